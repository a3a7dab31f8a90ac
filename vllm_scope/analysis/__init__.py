"""Computes directions, probes and lenses from rows. Only patching.py needs an engine.

rows.py        makes one row per result (pooled over positions), or one row per token
contrast.py    computes steering modules from positive and negative rows
moments.py     computes probes, steering modules and components from sums of rows
probes.py      fits linear probes, and writes and reads the files of linear probes
lens.py        the logit lens, which computes the likeliest tokens of a row by the unembedding
attention.py   computes attention patterns from the rows of q and k
cache.py       shows results under TransformerLens's names and shapes
hook_names.py  TransformerLens's names of hooks, and the streams of these hooks
patching.py    the functions of TransformerLens for activation patching

This package exports no names. Import each name from the file that defines the name.
"""
