"""Sparse autoencoders (SAEs) and transcoders, from their publishers' files. Needs torch, but no
engine.

sae.py          Sae, also a transcoder: its weights, what it computes, and one feature as two
                vectors and a bias
load.py         load_sae, load_saes: the files tell the format
saelens.py      SAELens
gemma_scope.py  Gemma Scope 1 and 2
llama_scope.py  Llama Scope
qwen_scope.py   Qwen-Scope
sparsify.py     EleutherAI's sparsify
cross_layer.py  cross-layer transcoders, as circuit-tracer writes them
max_activating.py  the strongest tokens of each feature, in a table of fixed size
strongest.py    arrays of active features and of such a table's entries
max_activating_files.py  such tables in files
neuronpedia.py  such a table as Neuronpedia's JSON
arrays.py       the tensors of a file, mapped and not read; configurations
places.py       the site and the layer that a hook's name means

Import each name from its file.
"""
