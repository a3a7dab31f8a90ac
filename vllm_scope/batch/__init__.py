"""Batches of rows: labelled, taken apart and put together.

labels.py       the tokens that one step computes, and the tokens whose rows a batch holds
by_request.py   splits a batch into the parts of its requests
readout.py      makes scores and aggregates of a probe from its nets' numbers
sparse.py       makes features from a bank's numbers
by_position.py  makes one row per position from all rows of a stream; the last computed row stays
sums.py         sums of rows by label
"""
