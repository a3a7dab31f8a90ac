"""Batches of rows: labelled, taken apart and put together.

labels.py       what one step computes, and whose rows a batch holds
by_request.py   splits a batch into the parts of its requests
readout.py      makes scores and aggregates of a probe out of its nets' numbers
sparse.py       makes features of a bank's numbers
by_position.py  makes one row per position from all rows of a stream; the last computed row holds
"""
