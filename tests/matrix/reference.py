"""What the modules of a Hugging Face model get and give, for one list of tokens.

Owns:  `Recorded`, `record`, `logprobs_after`.

Sites are found by their numbers: a row of vLLM's must equal, at every layer and position, what one
module of Hugging Face's layers gets or gives. With random weights no other module's rows come
within 1e-4.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Recorded:
    """Rows [num_tokens, n] of one forward.

    Attributes:
        streams: the input of layer 0, then the output of each layer.
        inner: of each layer: "self_attn output", "mlp.down_proj input", "q", ... -> rows.
        outer: of the modules beside the layers.
        logprobs: float32 [num_tokens, vocab].
    """

    streams: list[Tensor]
    inner: list[dict[str, Tensor]]
    outer: dict[str, Tensor]
    logprobs: Tensor = field(repr=False)


def layers_of(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The outermost list of the model's layers; of several, the decoder's."""
    decoder = set(model.get_decoder().modules()) if hasattr(model, "get_decoder") else set()
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    return min(found, key=lambda pair: (pair[0].count("."), pair[1] not in decoder))


def record(model: Any, num_layers: int, token_ids: list[int], **inputs: Any) -> Recorded:
    """What the modules get and give.

    Args:
        inputs: further arguments of the model, such as an image's or a sound's.
    """
    path, layers = layers_of(model, num_layers)
    rows = Recorded([], [{} for _ in layers], {}, torch.empty(0))
    n = len(token_ids)

    def keep(into: dict[str, Tensor], name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() % n == 0:
            flat = value.detach().reshape(-1, value.shape[-1])
            if flat.shape[0] == n:
                into.setdefault(name, flat.clone())

    def entry(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs["hidden_states"]
        rows.streams.append(value.detach().reshape(n, -1).clone())

    def leave(_: Any, __: Any, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else out
        rows.streams.append(value.detach().reshape(n, -1).clone())

    def watch(into: dict[str, Tensor], name: str, module: nn.Module) -> Iterator[Any]:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(into, f"{name} input", args or tuple(kwargs.values())[:1])

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(lambda _, __, out: keep(into, f"{name} output", out))

    handles = [layers[0].register_forward_pre_hook(entry, with_kwargs=True)]
    for layer, into in zip(layers, rows.inner, strict=True):
        handles.append(layer.register_forward_hook(leave))
        for name, module in layer.named_modules():
            if name:
                handles += watch(into, name, module)
    for name, module in model.named_modules():
        if name and not name.startswith(path) and not path.startswith(name):
            handles += watch(rows.outer, name, module)
    module = sys.modules[type(layers[0]).__module__]
    attention = getattr(module, "eager_attention_forward", None)

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        if getattr(layer, "layer_idx", None) is None:  # of a tower
            return attention(layer, query, key, value, *args, **kw)
        into = rows.inner[layer.layer_idx]
        for name, one in (("q", query), ("k", key), ("v", value)):
            keep(into, name, one.transpose(1, 2).flatten(2))
        out = attention(layer, query, key, value, *args, **kw)
        keep(into, "z", out[0].flatten(2))
        return out

    if attention is not None:
        module.eager_attention_forward = attend
    try:
        with torch.no_grad():
            ids = torch.tensor([token_ids])
            logits = model(ids, use_cache=False, **inputs).logits[0].float()
    finally:
        if attention is not None:
            module.eager_attention_forward = attention
        for handle in handles:
            handle.remove()
    rows.logprobs = logits.log_softmax(-1)
    return rows


def logprobs_after(model: Any, num_layers: int, token_ids: list[int], last: Tensor) -> Tensor:
    """float32 [num_tokens, vocab], if the last layer gave the rows `last`."""
    _, layers = layers_of(model, num_layers)

    def replaced(_: Any, __: Any, out: Any) -> Any:
        old = out[0] if isinstance(out, tuple) else out
        new = last.to(old.dtype).view_as(old)
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handle = layers[-1].register_forward_hook(replaced)
    try:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    finally:
        handle.remove()
    found: Tensor = logits.log_softmax(-1)
    return found
