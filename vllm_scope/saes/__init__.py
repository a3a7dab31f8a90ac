"""Sparse autoencoders (SAEs) and transcoders, from the files of their publishers. Needs no vLLM.

sae.py          Sae (the type of SAEs and transcoders), and Feature (one feature of an SAE)
load.py         load_sae and load_saes, which find the format by the names of the files
saelens.py      SAELens
gemma_scope.py  Gemma Scope 1 and 2
llama_scope.py  Llama Scope
qwen_scope.py   Qwen-Scope
sparsify.py     EleutherAI's sparsify
cross_layer.py  cross-layer transcoders in circuit-tracer's files
max_activating.py  the strongest tokens of each feature, in a table of fixed size
strongest.py    arrays of active features, and arrays of the entries of tables
max_activating_files.py  tables of strongest tokens in files
neuronpedia.py  a table of strongest tokens as Neuronpedia's JSON
arrays.py       the readers of tensors and configurations
places.py       the site and the layer that a hook's name means

Import each name from the file that defines the name.
"""
