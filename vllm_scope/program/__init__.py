"""Which operations a tap runs on each token of a request. numpy, no torch.

operations.py  Op, Program, and Cost (how many places a request takes in the device tables)
compiler.py    from a request's actions to the program of each of its tokens
compiled.py    the programs of a spec, shared by its requests
held.py        all programs that one request may need, together
table_rows.py  all programs of a request, as rows of the device's table of operations
lens_rows.py   to how many rows the lenses of a request are applied
picks.py       which tokens a request's actions pick
ranges.py      the values of picks in a range of positions, made once for specs with equal picks
block_keys.py  what a request's edits mean for the KV cache
layout.py      what one token delivers, and at which offset each part of it lies
"""
