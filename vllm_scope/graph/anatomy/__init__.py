"""Where a model keeps its residual stream, and how layers get taps.

source.py      the source of a module's forward, without branches that never run
convention.py  what a decoder layer's output means, by the layer's source
layers.py      finds the decoder layers of a loaded model
middle.py      where the stream is between attention and MLP, by the layer's source
watched.py     one forward, recorded by hooks
proof.py       checks that the recorded rows agree with the anatomy
supposed.py    finds the convention by numbers if the source is not understood
tapped.py      subclasses of decoder layers whose forward has taps
attention.py   subclasses of attention modules whose forward has taps
split.py       rows that tensor parallelism splits over the ranks
parts.py       subclasses of the MLP's projection, the experts' router and the final norm
hooked.py      layers that call Python functions, for models that are not compiled
"""
