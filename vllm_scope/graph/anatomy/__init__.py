"""Where a model keeps its residual stream, and how taps get onto it.

convention.py   what a decoder layer's output means (read off its source)
layers.py       finds the decoder layers of a loaded model
middle.py       where the stream is between attention and MLP (read off the source)
attention.py    taps inside the attention
tapped.py       gives each layer a subclass whose forward carries the taps
hooked.py       layers that call Python, where nothing is compiled
"""
