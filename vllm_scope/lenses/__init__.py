"""Affine maps that act on rows before the model's own norm and unembedding: tuned lenses and
Jacobian lenses (J-lenses). Needs torch, no engine.

linear.py   LinearLens: one affine map for each place; its file, and `load_lens`
"""
