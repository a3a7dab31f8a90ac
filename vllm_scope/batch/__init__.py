"""Labelled batches of rows, and the values that are computed from them.

labels.py       the tokens that one step computes, and the tokens whose rows a batch contains
by_request.py   splits a batch into the parts of its requests
readout.py      computes a probe's scores and aggregates from the numbers of its nets
sparse.py       makes features from the numbers of a bank or of the head Strongest
by_position.py  keeps one row per position of a stream: the row that was computed last
sums.py         sums of rows by label
"""
