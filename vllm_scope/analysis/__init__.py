"""Directions, probes and lenses from rows. This folder needs torch and results, and no engine.

rows.py        one row per result (pooled over positions), or one row per token
contrast.py    steering modules from the difference of positive and negative rows
moments.py     probes, steering modules and components from sums of rows
probes.py      linear probes, and their files
lens.py        the logit lens: the likeliest tokens of a row by the model's unembedding
attention.py   attention patterns, from the rows of q and k
cache.py       results under TransformerLens's names and shapes
hook_names.py  TransformerLens's names of hooks
patching.py    TransformerLens's activation patching

Import each name from its file.
"""
