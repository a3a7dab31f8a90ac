"""What to make of rows: directions, probes, lenses. Knows results, not engines.

rows.py      one row per result, pooled over its positions
contrast.py  steering modules from rows of positives and negatives
probes.py    linear probes, and their files
lens.py      what the unembedding makes of a row
cache.py     results under TransformerLens's names and shapes

Import what you need from the file that has it; all of it needs torch.
"""
