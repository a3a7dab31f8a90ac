"""Where a model keeps its residual stream, and how layers get taps.

source.py      the source of a module's forward, as that module runs it
convention.py  what a decoder layer's output means (read from its source)
layers.py      finds the decoder layers of a loaded model
middle.py      where the stream is between attention and MLP (read from the source)
watched.py     one forward, recorded by hooks
proof.py       whether the recorded rows are as the anatomy says
supposed.py    finds the convention by numbers if the source is not understood
tapped.py      subclasses of decoder layers whose forward has taps
attention.py   subclasses of attention modules whose forward has taps
split.py       rows that tensor parallelism splits over the ranks
parts.py       subclasses of the MLP's projection, the experts' router and the final norm
hooked.py      layers that call Python functions; only where nothing is compiled
"""
