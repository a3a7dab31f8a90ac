"""Batches of rows: labelled, taken apart and put together.

labels.py       the tokens that one step computes, and the tokens whose rows a batch holds
by_request.py   splits a batch into the parts of its requests
readout.py      computes a probe's scores and aggregates from its nets' numbers
sparse.py       makes features from a bank's numbers
by_position.py  keeps, of all rows of a stream, the last computed row of each position
sums.py         sums of rows by label
"""
