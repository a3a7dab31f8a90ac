"""Sparse autoencoders (SAEs) and transcoders, from the files of their publishers. Needs only torch.

sae.py          Sae, also a transcoder: its weights, what it computes, and one feature as two
                vectors and a bias
load.py         load_sae, load_saes: detect the format by the files
saelens.py      SAELens
gemma_scope.py  Gemma Scope 1 and 2
llama_scope.py  Llama Scope
qwen_scope.py   Qwen-Scope
sparsify.py     EleutherAI's sparsify
cross_layer.py  cross-layer transcoders in circuit-tracer's files
max_activating.py  the strongest tokens of each feature, in a table of fixed size
strongest.py    arrays of active features and of table entries
max_activating_files.py  tables of strongest tokens in files
neuronpedia.py  a table of strongest tokens as Neuronpedia's JSON
arrays.py       mapped tensors of a file; configurations
places.py       the site and the layer of a hook's name

Import each name from its file.
"""
