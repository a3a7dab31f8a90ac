"""What a tap does to each token of a request. Runs everywhere, with numpy and without torch.

operations.py  one operation on a row; programs of them; what they cost
compiler.py    a request's actions -> the program of each of its tokens
layout.py      what one token delivers, and where each part of it lies
"""
