"""Translates TransformerLens's names of hooks to streams, and streams to names of hooks.

Owns:  `stream_of_hook` (`blocks.3.hook_resid_post` to ("resid_post", 3)), `hook_of` (the inverse),
       `stream_of_key` (accepts also TransformerLens's shorthands).
To:    cache, saes.places.
"""

from __future__ import annotations

import re

import numpy as np

from vllm_scope.errors import shown
from vllm_scope.request.sites import ALIASES, MODEL_SITES, SiteLayer

#: A hook's name, or a shorthand such as ("resid_post", 3) or ("embed",).
Key = str | tuple[str] | tuple[str, int]
#: Maps sites of a layer to the part of the hook's name after "blocks.{layer}.".
_HOOKS = {
    "resid_pre": "hook_resid_pre", "resid_mid": "hook_resid_mid", "resid_post": "hook_resid_post",
    "attn_out": "hook_attn_out", "mlp_out": "hook_mlp_out", "mlp_post": "mlp.hook_post",
    # These names are TransformerBridge's. `hook_attn_in` and `hook_mlp_in` name rows before norms.
    "attn_in": "attn.hook_in", "mlp_in": "mlp.hook_in",
    # TransformerLens has no one name for these rows. `mlp.gate.hook_out` of TransformerBridge names
    # them only in a layer with experts.
    "router_logits": "router_logits",
    "q": "attn.hook_rot_q", "k": "attn.hook_rot_k", "v": "attn.hook_v", "z": "attn.hook_z",
}  # fmt: skip
#: TransformerLens's `ln_final.hook_normalized` names the rows before the multiplication by the
#: norm's weight. The rows of `ln_final` are after this multiplication, and need another name.
_MODEL_HOOKS = {"embed": "hook_embed", "ln_final": "ln_final"}
#: The hook of the attention pattern, which is computed from `q` and `k` and is not a stream.
_PATTERN_HOOK = "attn.hook_pattern"
#: TransformerLens's shorthands for rotated queries and keys.
_ROTATED = {"rot_q": "q", "rot_k": "k"}
_SITE_OF = {hook: site for site, hook in _HOOKS.items()}
_HOOK = re.compile(r"blocks\.([0-9]+)\.([a-z_.]+)")


def stream_of_hook(name: str) -> SiteLayer | None:
    """The site and layer of a name such as `blocks.3.hook_resid_post`, or None for other names."""
    match = _HOOK.fullmatch(name)
    site = None if match is None else _SITE_OF.get(match[2])
    return None if match is None or site is None else (site, int(match[1]))


def stream_of_key(key: Key) -> SiteLayer:
    """The stream that a hook's name or a shorthand names. A shorthand's layer can be negative.

    Raises:
        KeyError: the key names no stream.
    """
    if isinstance(key, str):
        if (found := stream_of_hook(key)) is not None:
            return found
        key = (key.removeprefix("hook_"),)
    site = ALIASES.get(key[0], key[0])
    if site in MODEL_SITES:
        return site, 0
    site = _ROTATED.get(site, site)
    if site not in _HOOKS or len(key) != 2 or not isinstance(key[1], int | np.integer):
        raise KeyError(
            f"{shown(key)} names no stream; write 'blocks.3.hook_resid_post' or ('resid_post', 3)."
        )
    return site, key[1]


def pattern_hook(layer: int) -> str:
    return f"blocks.{layer}.{_PATTERN_HOOK}"


def pattern_layer(name: str) -> int | None:
    """The layer in the name of an attention pattern's hook, or None for other names."""
    match = _HOOK.fullmatch(name)
    return int(match[1]) if match is not None and match[2] == _PATTERN_HOOK else None


def hook_of(stream: SiteLayer) -> str:
    site, layer = stream
    return _MODEL_HOOKS.get(site) or f"blocks.{layer}.{_HOOKS[site]}"
