"""Steering vectors in memory, in files, and as bytes for a server; weights of probes.

module.py         SteeringModule: vectors by (site, layer), with their origin
files.py          load_vectors, save_vectors, to_bytes, from_bytes
probe_files.py    the two files of a linear probe
probe_weights.py  weights of a probe from scikit-learn, torch and safetensors
estimators.py     weights of a probe from a fitted estimator of scikit-learn
layers.py         weights of a probe from the layers of a linear model or a perceptron
hooks.py          vectors in JSON by hook and layer, in the form of the steering fork of vLLM
containers.py     arrays from safetensors, npz and GGUF, with checks of sizes
"""

from vllm_scope.vectors.files import from_bytes, load_vectors, save_vectors, to_bytes
from vllm_scope.vectors.module import Provenance, SteeringModule

__all__ = ["Provenance", "SteeringModule", "from_bytes", "load_vectors", "save_vectors", "to_bytes"]
