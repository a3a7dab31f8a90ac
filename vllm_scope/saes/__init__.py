"""Sparse autoencoders (SAEs) from the files of those who publish them. Needs torch, no engine.

sae.py          Sae: its weights, what it computes, and one feature as two vectors and a bias
load.py         load_sae, load_saes: finds the format by the files
saelens.py      SAELens
gemma_scope.py  Gemma Scope 1 and 2
llama_scope.py  Llama Scope
qwen_scope.py   Qwen-Scope
sparsify.py     EleutherAI's sparsify
arrays.py       tensors of a file, mapped and not read; configurations
places.py       a hook's name as a site and a layer

Import each name from its file.
"""
