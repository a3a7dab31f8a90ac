"""Shows results under TransformerLens's names and shapes.

    cache["blocks.3.hook_resid_post"]    # [batch, pos, d_model]
    cache["blocks.3.attn.hook_z"]        # [batch, pos, head, d_head]

Owns:  ActivationCache.
From:  results.   To: notebooks that were written for TransformerLens.

Promise: index p of the pos dimension is position p. The cache refuses a result that lacks a
position. With one exception, a name means the same as in TransformerLens. The exception is
`hook_embed`, which is here the input of layer 0, with position embeddings and scaling. This input
equals `blocks.0.hook_resid_pre`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from vllm_scope.analysis.hook_names import Key, hook_of, pattern_hook, pattern_layer, stream_of_key
from vllm_scope.analysis.rows import Result, check_complete, streams_of
from vllm_scope.errors import SpecError, checked_word, shown
from vllm_scope.request.sites import SiteLayer, Sites

#: The components of the residual stream that `decompose_resid` returns.
_Mode = Literal["all", "attn", "mlp"]


class ActivationCache(Mapping[str, Tensor]):
    """Maps hook names to activations of the shape [batch, pos, d_model].

    For sites inside the attention, the shape is [batch, pos, head, d_head].

    In most models, a layer's `resid_post` is the next layer's `resid_pre`. Suppose that neither the
    request nor the model changes the stream between these two sites. Then a read of one site is
    available under both names, and the keys of the cache have both names. The shorthands of
    TransformerLens are possible too, such as `cache["resid_post", 3]`, `cache["embed"]` and
    `cache["resid_post", -1]`.

    `blocks.3.attn.hook_pattern`, or `cache["pattern", 3]`, is [batch, head, query pos, key pos] in
    float32. The first access computes the pattern from the layer's `q` and `k`. A pattern is not in
    the keys of the cache.

    Args:
        results: the rows of one completion, or a list of such results, which forms a batch. Every
            stream of a result must have the same positions 0, 1, 2, ... without a gap. A Read with
            `tokens="all"` or "prompt" gives such positions. All results must have the same streams.
        num_layers: the model's number of layers. The cache needs this number for a negative layer,
            as in `cache["resid_post", -1]`, and for a method with `layer=None`.

    Attributes:
        lengths: the number of positions of each result, as int64 [batch]. The batch is padded on
            the right with zeros.
        mask: False at padding and True elsewhere, as bool [batch, pos].

    Raises:
        SpecError: there are no results, or a result is not complete, lacks a position, or does not
            have the same streams as the first result.
    """

    def __init__(self, results: Result | Sequence[Result], num_layers: int | None = None) -> None:
        batch: Sequence[Result] = results if isinstance(results, list | tuple) else [results]  # type: ignore[list-item]
        if not batch:
            raise SpecError("there are no results; a cache needs at least one.")
        streams = streams_of(batch[0])
        lengths = []
        for i, result in enumerate(batch):
            where = f"results[{i}]"
            check_complete(result, where)
            if set(streams_of(result)) != set(streams):
                raise SpecError(
                    f"{where} has other streams than results[0]; read the same streams in all."
                )
            lengths.append(_length(result, where))
        self._results, self._num_layers = batch, num_layers
        self._read = {hook_of(stream): stream for stream in streams}
        #: Maps the name of a stream that was not read to a read stream that has the same rows.
        self._same: dict[str, SiteLayer] = {}
        for stream in streams:
            for twin in _twins(stream):
                if all(_same_rows(result, stream, twin) for result in batch):
                    self._same.setdefault(hook_of(twin), stream)
        if num_layers is not None:
            # The model has no layer of this number, so this `resid_pre` does not exist.
            self._same.pop(hook_of(("resid_pre", num_layers)), None)
        self._names = dict.fromkeys([*self._read, *self._same])
        self._values: dict[str, Tensor] = {}
        self.lengths = torch.tensor(lengths)
        self.mask = torch.arange(max(lengths)) < self.lengths[:, None]

    def __getitem__(self, key: Key) -> Tensor:
        if (layer := self._pattern_layer(key)) is not None:
            return self._pattern(layer)
        name = hook_of(self._stream_of(key))
        stream = self._read.get(name) or self._same.get(name)
        if stream is None:
            raise KeyError(f"{name} was not read; this cache has {', '.join(self._names)}.")
        name = hook_of(stream)
        if name not in self._values:
            rows = [result[stream] for result in self._results]
            self._values[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return self._values[name]

    def _pattern_layer(self, key: Key) -> int | None:
        if isinstance(key, str):
            return pattern_layer(key)
        return self._stream_of(("q", key[1]))[1] if len(key) == 2 and key[0] == "pattern" else None

    def _pattern(self, layer: int) -> Tensor:
        from vllm_scope.analysis.attention import attention_pattern

        name = pattern_hook(layer)
        if name not in self._values:
            needed = [hook_of((site, layer)) for site in ("q", "k")]
            if missing := [one for one in needed if one not in self._read]:
                raise KeyError(f"{name} follows from {' and '.join(missing)}; read q and k, too.")
            patterns = [attention_pattern(result, layer) for result in self._results]
            found = patterns[0].new_zeros(len(patterns), len(patterns[0]), *self.mask.shape[1:] * 2)
            for one, pattern in zip(found, patterns, strict=True):
                one[:, : pattern.shape[1], : pattern.shape[2]] = pattern
            self._values[name] = found
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"ActivationCache with keys {list(self._names)}"

    def stack_activation(self, site: str, layer: int | None = None) -> Tensor:
        """A site's activations at all layers before `layer`, as [layers, batch, pos, d_model].

        Args:
            layer: the number of layers, or None or -1 for all layers of the model.

        Raises:
            KeyError: the site was not read at one of the layers.
            SpecError: no layer is before `layer`, or the number of layers is needed and
                `num_layers` is None.
        """
        layers = range(self._up_to(layer))
        if not layers:
            raise SpecError("there is no layer before layer 0; layer must be 1 or more.")
        return torch.stack([self[site, each] for each in layers])

    @overload
    def accumulated_resid(self, layer: int | None = None, incl_mid: bool = False) -> Tensor: ...
    @overload
    def accumulated_resid(
        self, layer: int | None = None, incl_mid: bool = False, *, return_labels: Literal[True]
    ) -> tuple[Tensor, list[str]]: ...
    def accumulated_resid(
        self, layer: int | None = None, incl_mid: bool = False, *, return_labels: bool = False
    ) -> Tensor | tuple[Tensor, list[str]]:
        """The residual stream at the entry of each layer up to and including `layer`.

        `Lens.logits` computes the logit lens's logits from the returned tensor.

        Args:
            layer: the last layer. With None, -1 or the number of layers, the method returns the
                stream of all layers, and the last layer's `resid_post` ("final_post").
            incl_mid: whether to return also `resid_mid` of the layers before `layer`.
            return_labels: whether to return also the components' names, such as "0_pre".

        Returns:
            [components, batch, pos, d_model], and with `return_labels` the components' names.

        Raises:
            KeyError: the results do not have one of the components.
            SpecError: the number of layers is needed, but `num_layers` is None.
        """
        last = self._up_to(layer)
        labels: dict[str, tuple[str, int]] = {}
        for each in range(last):
            labels[f"{each}_pre"] = ("resid_pre", each)
            if incl_mid:
                labels[f"{each}_mid"] = ("resid_mid", each)
        if last == self._num_layers:
            labels["final_post"] = ("resid_post", last - 1)
        else:
            labels[f"{last}_pre"] = ("resid_pre", last)
        return self._stacked(labels, return_labels)

    @overload
    def decompose_resid(
        self, layer: int | None = None, mode: _Mode = "all", incl_embeds: bool = True
    ) -> Tensor: ...
    @overload
    def decompose_resid(
        self,
        layer: int | None = None,
        mode: _Mode = "all",
        incl_embeds: bool = True,
        *,
        return_labels: Literal[True],
    ) -> tuple[Tensor, list[str]]: ...
    def decompose_resid(
        self,
        layer: int | None = None,
        mode: _Mode = "all",
        incl_embeds: bool = True,
        *,
        return_labels: bool = False,
    ) -> Tensor | tuple[Tensor, list[str]]:
        """The components that the embedding and each layer before `layer` add to the stream.

        If the request has no edits, the sum of all components is the residual stream at the entry
        of `layer`.

        Args:
            layer: the number of layers, or None or -1 for all layers of the model.
            mode: "attn" for attention outputs, "mlp" for MLP outputs, or "all" for both.
            incl_embeds: whether to return also the embedding.
            return_labels: whether to return also the components' names, such as "embed" and
                "0_attn_out".

        Returns:
            [components, batch, pos, d_model], and with `return_labels` the components' names.

        Raises:
            KeyError: the results do not have one of the components.
            SpecError: `mode` is unknown, there are no components, or the number of layers is needed
                and `num_layers` is None.
        """
        sites = {"all": ("attn_out", "mlp_out"), "attn": ("attn_out",), "mlp": ("mlp_out",)}
        checked_word(mode, sites, "mode")
        labels: dict[str, tuple[str, int]] = {"embed": ("embed", 0)} if incl_embeds else {}
        for each in range(self._up_to(layer)):
            labels |= {f"{each}_{site}": (site, each) for site in sites[mode]}
        if not labels:
            raise SpecError("before layer 0, only the embedding is added; set incl_embeds.")
        return self._stacked(labels, return_labels)

    def _stacked(
        self, labels: Mapping[str, tuple[str, int]], return_labels: bool
    ) -> Tensor | tuple[Tensor, list[str]]:
        stacked = torch.stack([self[key] for key in labels.values()])
        return (stacked, list(labels)) if return_labels else stacked

    def _up_to(self, layer: int | None) -> int:
        if layer is None or layer == -1:
            return self._layers("all layers")
        if layer < 0:
            raise SpecError(f"layer is {layer}; it must be a number of layers, None or -1 for all.")
        return layer

    def _layers(self, what: str) -> int:
        if self._num_layers is None:
            raise SpecError(
                f"the number of layers is needed for {what}; give the cache num_layers."
            )
        return self._num_layers

    def _stream_of(self, key: Key) -> SiteLayer:
        site, layer = stream_of_key(key)
        return site, layer + self._layers(f"layer {layer}") if layer < 0 else layer


def _same_rows(result: Result, read: SiteLayer, twin: SiteLayer) -> bool:
    """Whether a stream that was read and its twin have the same rows.

    The twins are a layer's `resid_post` and the next layer's `resid_pre`, or `embed` and layer 0's
    `resid_pre`. They have the same rows if no edit is between them, and if the model does not
    change the stream between them.
    """
    _, entered = twin if twin[0] == "resid_pre" else read
    sites: Sites | None = getattr(result, "sites", None)
    if sites is not None and entered in sites.moved:
        return False
    edited = getattr(result, "edited", frozenset[SiteLayer]())
    behind = read not in edited or (*read, "after") in result  # type: ignore[operator]
    if read[0] == "resid_pre":
        return read not in edited or not behind
    return behind and twin not in edited


def _twins(stream: SiteLayer) -> list[SiteLayer]:
    """The other streams that can have the same rows as `stream` (`_same_rows`)."""
    site, layer = stream
    if site == "resid_post":
        return [("resid_pre", layer + 1)]
    if site == "resid_pre":
        return [("resid_post", layer - 1)] if layer else [("embed", 0)]
    return [("resid_pre", 0)] if site == "embed" else []


def _length(result: Result, where: str) -> int:
    """The number of positions of a result, which must be the same for all streams."""
    found: dict[int, SiteLayer] = {}
    for site, layer in streams_of(result):
        positions = result.positions(site, layer)
        if not len(positions) or not torch.equal(positions, torch.arange(len(positions))):
            raise SpecError(
                f"{where} has positions {shown(positions.tolist())} at {site!r} {layer}; a cache "
                "needs every position from 0 on: Read(..., tokens='all') or tokens='prompt'."
            )
        found[len(positions)] = (site, layer)
    if len(found) != 1:
        raise SpecError(
            f"{where} has streams of different lengths, {shown(found)}; read the same tokens at "
            "all streams."
        )
    return next(iter(found))
