"""torchvision beside PyTorch's CPU build, for models whose processors import it.

Owns:  `import_torchvision`.
Runs:  once, before vLLM and transformers are imported.

The package index has torchvision for CUDA alone. Its compiled operators do not load here, and
without them its Python code stops at the shapes that it registers for two of them. Prompts of
text call no operator of torchvision, so a declaration is enough: an operator that is called all
the same raises NotImplementedError.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

#: Operators whose shapes torchvision 0.28 registers also if its library is not loaded.
#: torchvision 0.28, _meta_registrations.py
_OPERATORS = ("nms", "qnms")


def import_torchvision() -> bool:
    """True if torchvision is importable from now on."""
    if find_spec("torchvision") is None:
        return False
    if not hasattr(torch.ops.torchvision, _OPERATORS[0]):
        for name in _OPERATORS:
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    import torchvision  # noqa: F401

    return True
