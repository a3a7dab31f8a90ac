"""Converts the name of a hook, or the path of a file, to a site and a layer.

Owns:  place_of, number_in.
From:  analysis.hook_names (TransformerLens's names of hooks).   To: the loaders.
"""

from __future__ import annotations

import re
from pathlib import Path

from vllm_scope.analysis.hook_names import stream_of_hook
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import MAX_LAYER, Place, canonical_site

#: The name of a Hugging Face module has a part after the layer's number. Maps this part to a site.
#: `post_attention_layernorm` is not listed, because its meaning depends on the model. It is the
#: norm of the attention's output, or the norm before the MLP.
_MODULES = {
    "": "resid_post",
    ".output": "resid_post",
    ".self_attn.o_proj.input": "z",
    ".mlp.down_proj.input": "mlp_post",
    ".mlp.input": "mlp_in",
    ".pre_feedforward_layernorm.output": "mlp_in",
    ".self_attn.input": "attn_in",
    ".post_feedforward_layernorm.output": "mlp_out",
}
#: `hook_mlp_in` is the stream before the MLP's norm. `hook_normalized` is a row inside the norm.
_BEFORE_NORM = re.compile(r"blocks\.([0-9]{1,5})\.hook_mlp_in")
_INSIDE_NORM = re.compile(r"blocks\.[0-9]+\.ln[12]\.hook_normalized")
_MODULE = re.compile(r"(?:[a-z_]+\.)*(?:layers|h)\.([0-9]{1,5})([a-z_.]*)")


def place_of(hook: object, where: str) -> Place:
    """The place that a hook means. A hook is the name of a TransformerLens hook
    (`blocks.12.hook_resid_post`), the name of a Hugging Face module (`model.layers.12`), or a pair
    (site, layer).

    Raises:
        SpecError: the hook does not mean a place that a tap can read.
    """
    if isinstance(hook, tuple | list) and len(hook) == 2:
        site, layer = canonical_site(hook[0], f"{where}[0]"), hook[1]
        if type(layer) is not int or not 0 <= layer < MAX_LAYER:
            raise SpecError(f"{where}[1] is {shown(layer)}; layers are whole numbers from 0.")
        return Place(site, layer)
    if isinstance(hook, str) and len(hook) <= 256:
        if (found := stream_of_hook(hook)) is not None:
            return Place(*found)
        if (match := _MODULE.fullmatch(hook)) and match[2] in _MODULES:
            return Place(_MODULES[match[2]], int(match[1]))
        if match := _BEFORE_NORM.fullmatch(hook):
            return Place("resid_mid", int(match[1]))
        if _INSIDE_NORM.fullmatch(hook):
            raise SpecError(
                f"{where} is {shown(hook)}, the row inside a norm, before the norm's weight; taps "
                "cannot read this row. The MLP's input, with the weight, is "
                "'blocks.3.mlp.hook_in'. The stream before the norm is 'blocks.3.hook_resid_mid'."
            )
    raise SpecError(
        f"{where} is {shown(hook)}, which names no site; give place=('resid_post', 12), or "
        "another place of the SAE."
    )


def number_in(path: Path, pattern: str) -> int | None:
    """The number that the only group of `pattern` matches in a part of a path. If several parts
    match, the last of them counts. None if no part matches."""
    for part in reversed(path.absolute().parts):
        if match := re.search(pattern, part):
            return int(match[1])
    return None
