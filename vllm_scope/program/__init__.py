"""Determines which operations a tap runs on each token of a request. numpy, no torch.

operations.py  Op, Program, and Cost (how many entries of the device tables a request uses)
compiler.py    computes the program of each token from a request's actions
compiled.py    the programs of a spec, shared by all requests with this spec
held.py        all programs that one request can need
table_rows.py  all programs of a request, as rows of the device's table of operations
lens_rows.py   counts the rows to which the lenses of a request are applied
picks.py       which tokens a request's actions pick
ranges.py      the values of picks in a range of positions, shared by specs with equal picks
block_keys.py  the keys under which the KV cache stores the blocks of a request with edits
layout.py      what one token delivers, and the offset of each part
"""
