"""Directions, probes and lenses from rows. Needs torch and results, no engine.

rows.py      one row per result (pooled over positions), or one row per token
contrast.py  steering modules from the difference of positive and negative rows
probes.py    linear probes, and their files
lens.py      the logit lens: which tokens the unembedding reads in a row
attention.py attention patterns, from the rows of q and k
cache.py     results under TransformerLens's names and shapes

Import each name from its file.
"""
