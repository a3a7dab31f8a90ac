"""vllm-lens: its keys of `extra_args`, its SteeringVector, `output.activations`.

    from vllm_scope.faces.vllm_lens import SteeringVector
    params = SamplingParams(max_tokens=8, extra_args={
        "output_residual_stream": [12, 20],
        "apply_steering_vectors": [SteeringVector(torch.randn(1, 4096), [15], scale=4.0)],
    })
    out = llm.generate(prompts, params)[0]
    out.activations["residual_stream"]    # [n_layers, n_prompt + n_generated - 1, hidden]

Its rows are read after all steering. Layer k is Hugging Face's `hidden_states[k + 1]`.

Keys, and what they become:
    output_residual_stream   Read("resid_post", layers): True for all layers, a list of
                             them, False or None for nothing
    apply_steering_vectors   an Add per vector, and per position where it has positions
    output_qk, apply_hooks   refused
    activations_transport    of HTTP; changes nothing here
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_scope.actions import Action, Add, Read
from vllm_scope.arrays import MAX_NUMBERS
from vllm_scope.engine.translators import Translation, give
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.result import ScopeResult
from vllm_scope.sites import Sites

SITE = "resid_post"


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """Vectors to add to the residual stream, at the exit of some layers.

    Attributes:
        activations: [num_layers, hidden_size] for every token, or [num_layers,
            num_positions, hidden_size] for one token per position.
        layer_indices: one layer for each row of `activations`.
        scale: what the vectors are multiplied by.
        norm_match: add `scale * ||h||` times the vector's direction, per token.
        position_indices: absolute, each once. With two dimensions, the tokens that
            the vector is added to; with three, one for each of `activations`' positions.
            None means every token, or positions 0 to num_positions - 1.

    Raises:
        SpecError: shapes and indices do not fit each other, or a position comes twice.
    """

    activations: Any
    layer_indices: Sequence[int]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activations, Mapping):
            object.__setattr__(self, "activations", _decoded(self.activations))
        values = torch.as_tensor(self.activations)
        object.__setattr__(self, "activations", values)
        object.__setattr__(self, "layer_indices", list(self.layer_indices))
        if values.dim() not in (2, 3):
            raise SpecError(
                f"SteeringVector.activations has shape {list(values.shape)}; it is [num_layers, "
                "hidden_size] or [num_layers, num_positions, hidden_size]."
            )
        if len(values) != len(self.layer_indices):
            raise SpecError(
                f"SteeringVector.activations has {len(values)} rows for "
                f"{len(self.layer_indices)} layer_indices."
            )
        if self.position_indices is None:
            return
        positions = list(self.position_indices)
        object.__setattr__(self, "position_indices", positions)
        if len(set(positions)) < len(positions):
            raise SpecError(f"SteeringVector.position_indices {shown(positions)} has one twice.")
        if values.dim() == 3 and len(positions) != values.shape[1]:
            raise SpecError(
                f"SteeringVector.activations has {values.shape[1]} positions for "
                f"{len(positions)} position_indices."
            )

    def to_actions(self) -> list[Action]:
        """The same in this system's words."""

        def add(vectors: Tensor, tokens: Any) -> Action:
            return Add(
                vectors, SITE, layers=self.layer_indices, scale=self.scale, tokens=tokens,
                norm_match=self.norm_match,
            )  # fmt: skip

        if self.activations.dim() == 2:
            whole = self.position_indices is None
            return [add(self.activations, "all" if whole else self.position_indices)]
        positions = self.position_indices
        if positions is None:
            positions = range(self.activations.shape[1])
        return [add(self.activations[:, i], [position]) for i, position in enumerate(positions)]

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """As it travels in JSON; `SteeringVector(**body)` reads it."""
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        return body | {"activations": _encoded(self.activations)}


class Activations(Mapping[str, Any]):
    """`output.activations`: one key, "residual_stream", stacked when it is asked for.

    CPU, model dtype, [n_layers, n_positions, hidden_size], layers ascending; n_positions
    is n_prompt + n_generated - 1, and fewer while the request still runs.

    Raises:
        ScopeError: on access, where rows are missing; they are never made up.
    """

    def __init__(self, result: ScopeResult, layers: Sequence[int]) -> None:
        self._result, self._layers = result, sorted(layers)

    def __getitem__(self, key: str) -> Tensor:
        if key != "residual_stream":
            raise KeyError(f"{key!r} was not asked for; these activations hold residual_stream.")
        if self._result.status not in ("complete", "streaming"):
            raise ScopeError(
                f"the residual stream of this request is {self._result.status}: "
                f"{self._result.error or f'{self._result.dropped} rows are missing'}. "
                "What is there is in output.outputs[0].scope."
            )
        rows = [self._result[SITE, layer] for layer in self._layers]
        # While it streams, layers of later pipeline stages may have come less far.
        shortest = min(len(each) for each in rows)
        return torch.stack([each[:shortest] for each in rows])

    def __iter__(self) -> Iterator[str]:
        return iter(("residual_stream",))

    def __len__(self) -> int:
        return 1


def translate(values: Mapping[str, Any], sites: Sites) -> Translation:
    """What vllm-lens's keys of one request mean.

    Raises:
        SpecError: a key of a wrong type, or one that asks for what is not given here.
    """
    if values.get("output_qk"):
        raise SpecError(
            "extra_args['output_qk']: queries and keys are not tapped in this version, so there "
            "are no attention patterns; the sites are embed, resid_pre, resid_mid, resid_post."
        )
    if values.get("apply_hooks"):
        raise SpecError(
            "extra_args['apply_hooks'] holds Python functions, which are arbitrary code and "
            "cannot run in a compiled graph. Use Read, Probe, Add, Ablate, Clamp and Replace "
            "of vllm_scope: docs/faces.md has one for each use."
        )
    actions: list[Action] = []
    for vector in _vectors(values.get("apply_steering_vectors")):
        actions += vector.to_actions()
    asked = values.get("output_residual_stream")
    if asked is None or asked is False:
        return Translation(tuple(actions))
    layers = _layers(asked, sites)
    read = Read(SITE, layers)

    def decorate(output: Any, completion: Any) -> None:
        give(output, completion, "activations", Activations(completion.scope, layers))

    return Translation((*actions, read), decorate)


def _layers(asked: Any, sites: Sites) -> list[int]:
    if isinstance(asked, str):
        asked = _json(asked, "output_residual_stream")
    if asked is True:
        # All layers of the model: one that carries no tap is an error, not left out.
        return list(range(sites.num_layers))
    if not isinstance(asked, list | tuple) or not asked:
        raise SpecError(
            f"extra_args['output_residual_stream'] is {shown(asked)}; it is True for all layers, "
            "a list of layers, or False for none."
        )
    Read(SITE, list(asked))
    return sorted(set(asked))


def _vectors(asked: Any) -> list[SteeringVector]:
    where = "extra_args['apply_steering_vectors']"
    if asked is None:
        return []
    if isinstance(asked, str):
        asked = _json(asked, "apply_steering_vectors")
    if not isinstance(asked, list | tuple):
        raise SpecError(f"{where} is {shown(asked)}; it is a list of SteeringVector, or its JSON.")
    found = []
    for i, one in enumerate(asked):
        if isinstance(one, Mapping):
            try:
                one = SteeringVector(**one)
            except TypeError:
                names = ", ".join(field.name for field in fields(SteeringVector))
                raise SpecError(f"{where}[{i}] is {shown(one)}; its fields are {names}.") from None
        if not isinstance(one, SteeringVector):
            raise SpecError(f"{where}[{i}] is {shown(one)}; it is a SteeringVector.")
        found.append(one)
    return found


def _json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"extra_args[{key!r}] is not JSON: {error}.") from None


def _encoded(values: Tensor) -> dict[str, Any]:
    values = values.detach().cpu().contiguous()
    bits = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    return {
        "data": base64.b64encode(bits.numpy().tobytes()).decode(),
        "dtype": str(bits.numpy().dtype),
        "original_dtype": str(values.dtype),
        "shape": list(values.shape),
    }


def _decoded(body: Mapping[str, Any]) -> Tensor:
    """A tensor of the wire: {data, dtype, original_dtype, shape, compression}.

    Sizes are compared before anything is allocated.
    """
    try:
        dtype, shape = np.dtype(body["dtype"]), [int(n) for n in body["shape"]]
        raw = base64.b64decode(body["data"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise SpecError(
            f"SteeringVector.activations is {shown(dict(body))}; over the wire it is {{data, "
            "dtype, original_dtype, shape, compression}."
        ) from None
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if dtype.kind not in "fiu" or min(shape, default=0) < 1 or size > MAX_NUMBERS * 8:
        raise SpecError(f"SteeringVector.activations has dtype {dtype} and shape {shape}.")
    if body.get("compression") == "zstd":
        raw = _unzipped(raw, size)
    if len(raw) != size:
        raise SpecError(
            f"SteeringVector.activations has {len(raw)} bytes; {dtype} of shape {shape} takes "
            f"{size}."
        )
    values = torch.from_numpy(np.frombuffer(raw, dtype).reshape(shape).copy())
    if body.get("original_dtype") == "torch.bfloat16":
        return values.view(torch.bfloat16)
    return values


def _unzipped(raw: bytes, size: int) -> bytes:
    try:
        from backports import zstd
    except ImportError:
        raise SpecError(
            "these vectors are compressed with zstd, which is not installed: "
            "pip install 'vllm-scope[files]'."
        ) from None
    try:
        # At most one byte more than there may be.
        return zstd.ZstdDecompressor().decompress(raw, size + 1)
    except zstd.ZstdError as error:
        raise SpecError(f"SteeringVector.activations is not zstd: {error}.") from None


#: What vllm-lens exports, and this version does not have.
_MISSING = {
    "Hook": "runs Python functions inside the model, which is arbitrary code and cannot run in "
    "a compiled graph; docs/faces.md has an action of vllm_scope for each use",
    "HookContext": "belongs to Hook",
    "attention_patterns": "needs queries and keys, which are not tapped in this version",
}


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise ImportError(f"{name} {_MISSING[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
