"""Steering vectors: in memory, as bytes for a server, and in files.

module.py         SteeringModule: vectors by (site, layer), and where they come from
files.py          load_vectors, save_vectors, to_bytes, from_bytes
probe_files.py    a linear probe's two files
probe_weights.py  weights of a probe from scikit-learn, torch and safetensors
estimators.py     weights of a probe from a fitted estimator of scikit-learn
layers.py         weights of a probe from the layers of a linear model or a perceptron
hooks.py          vectors in JSON by hook and layer, as the steering fork writes them
containers.py     arrays from safetensors, npz and GGUF; sizes are checked before allocation
"""

from vllm_scope.vectors.files import from_bytes, load_vectors, save_vectors, to_bytes
from vllm_scope.vectors.module import Provenance, SteeringModule

__all__ = ["Provenance", "SteeringModule", "from_bytes", "load_vectors", "save_vectors", "to_bytes"]
