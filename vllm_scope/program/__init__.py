"""What a tap does to each token of a request. Runs everywhere, with numpy and without torch.

operations.py  one operation on a row; programs of them; what they cost
picks.py       which tokens an action applies to
compiler.py    a request's actions -> the program of each of its tokens
compiled.py    the programs of a spec, built when a token needs them
block_keys.py  the keys under which vLLM finds the KV of edited tokens
layout.py      what one token delivers, and where each part of it lies
"""
