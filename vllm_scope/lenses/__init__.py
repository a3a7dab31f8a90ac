"""Tuned lenses and Jacobian lenses (J-lenses): affine maps of rows, before the model's own norm and
unembedding. Needs torch, and does not need vLLM.

linear.py   LinearLens: one affine map for each place; the files of lenses
"""
