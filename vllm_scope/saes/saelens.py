"""Loads SAEs of SAELens, from cfg.json and sae_weights.safetensors.

Owns:  `load`, for the configurations of all versions of SAELens.

| tensor                    | shape                     | SAEs                    |
|---------------------------|---------------------------|-------------------------|
| `W_enc`                   | [d_in, d_sae]             | all                     |
| `W_dec`                   | [d_sae, d_in]             | all                     |
| `b_dec`                   | [d_in]                    | all                     |
| `b_enc`                   | [d_sae]                   | all but gated           |
| `threshold`               | [d_sae]                   | jumprelu, batchtopk     |
| `topk_threshold`          | []                        | batchtopk, in training  |
| `b_gate`, `b_mag`, `r_mag`| [d_sae]                   | gated                   |
| `scaling_factor`          | [d_sae], all ones         | some, before version 6  |
| `W_skip`                  | [d_out, d_in]             | skip transcoders        |

A transcoder has W_dec [d_sae, d_out] and b_dec [d_out]. The field `hook_name_out` names the output.
The field is in `metadata`. In files before version 6, it is at the top level. A transcoder never
subtracts b_dec from the input.

Files before version 6 differ in three ways. The fields of `metadata` are at the top level. The
field `architecture` can be missing. topk is an activation function, not an architecture.

Source: sae_lens 6.54, loading/pretrained_sae_loaders.py, saes/sae.py, saes/transcoder.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import Place
from vllm_scope.saes.arrays import Given, Tensors, map_safetensors, only, read_config
from vllm_scope.saes.places import place_of
from vllm_scope.saes.sae import Sae

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
#: Maps SAELens's names of the vectors of each architecture to fields of `Sae`, except b_dec.
_VECTORS = {
    "standard": {"b_enc": "encoder_bias"},
    "topk": {"b_enc": "encoder_bias"},
    "jumprelu": {"b_enc": "encoder_bias", "threshold": "threshold"},
    "batchtopk": {"b_enc": "encoder_bias", "threshold": "threshold"},
    "gated": {"b_mag": "encoder_bias", "b_gate": "gate_bias", "r_mag": "gain"},
}
#: For each kind of transcoder: the architecture of its features, and True if it has W_skip.
_TRANSCODERS = {
    "transcoder": ("standard", False), "skip_transcoder": ("standard", True),
    "jumprelu_transcoder": ("jumprelu", False), "jumprelu_skip_transcoder": ("jumprelu", True),
}  # fmt: skip


class _Metadata(msgspec.Struct):
    hook_name: str | None = None
    hook_name_out: str | None = None
    hook_head_index: int | None = None


class _Config(msgspec.Struct):
    architecture: str = "standard"
    d_in: int | None = None
    d_sae: int | None = None
    k: float | None = None
    rescale_acts_by_decoder_norm: bool = False
    apply_b_dec_to_input: bool = True
    normalize_activations: str | bool | None = None
    metadata: _Metadata | None = None
    hook_name_out: str | None = None
    # Before version 6.
    hook_name: str | None = None
    hook_point: str | None = None
    hook_head_index: int | None = None
    hook_point_head_index: int | None = None
    activation_fn: str | None = None
    activation_fn_str: str | None = None
    activation_fn_kwargs: dict[str, Any] = {}


def load(folder: Path, given: Given) -> Sae:
    """Load the SAE of a folder. Raises the same errors as `load_sae`."""
    path = folder / CONFIG
    config = read_config(path, _Config)
    transcodes = _TRANSCODERS.get(config.architecture)
    if transcodes is not None:
        config = msgspec.structs.replace(
            config, architecture=transcodes[0], apply_b_dec_to_input=False
        )
    architecture, k = _architecture(config, path)
    tensors = map_safetensors(folder / WEIGHTS)
    if "topk_threshold" in tensors and architecture == "batchtopk":
        tensors["threshold"] = tensors.pop("topk_threshold")
    vectors = _VECTORS[architecture]
    weights = folder / WEIGHTS
    skips = ["W_skip"] if transcodes is not None and transcodes[1] else []
    needed = ["W_enc", "W_dec", "b_dec", *vectors, *skips]
    only(tensors, needed, weights, ["scaling_factor"])
    _refuse_finetuned(tensors, weights)
    encoder, decoder = tensors["W_enc"].T, tensors["W_dec"]
    for name, size in {"d_in": encoder.shape[-1], "d_sae": encoder.shape[0]}.items():
        if getattr(config, name) not in (None, size):
            raise SpecError(
                f"{path} has {name} {getattr(config, name)}; {WEIGHTS} has {size}: are both "
                "files of one SAE?"
            )
    if tensors.get("threshold") is not None and tensors["threshold"].ndim == 0:
        tensors["threshold"] = tensors["threshold"].expand(encoder.shape[0])
    return Sae(
        name=given.name,
        architecture=architecture,  # type: ignore[arg-type]
        place=_place(config, path, given),
        encoder=encoder,
        decoder=decoder,
        decoder_bias=tensors["b_dec"],
        apply_b_dec_to_input=config.apply_b_dec_to_input,
        k=k,
        input_scale=_input_scale(config, path, given),
        unit_decoder=config.rescale_acts_by_decoder_norm,
        output=None if transcodes is None else _output(config, path),
        skip=tensors.get("W_skip"),
        **{ours: tensors[name] for name, ours in vectors.items()},
    )


def _architecture(config: _Config, path: Path) -> tuple[str, int | None]:
    """The architecture, and k. If the architecture is not topk, k is None. Raises SpecError."""
    function = config.activation_fn or config.activation_fn_str or "relu"
    architecture, k = config.architecture, config.k
    if function == "topk" and architecture in ("standard", "topk"):
        architecture, k = "topk", config.activation_fn_kwargs.get("k", k)
    elif function != "relu":
        raise SpecError(f"{path} has the activation {shown(function)}; it must be relu or topk.")
    if architecture not in _VECTORS:
        raise SpecError(
            f"{path} has the architecture {shown(architecture)}; it must be one of "
            f"{', '.join([*_VECTORS, *_TRANSCODERS])}."
        )
    if architecture != "topk":
        return architecture, None
    if isinstance(k, bool) or not isinstance(k, int | float) or not float(k).is_integer():
        raise SpecError(f"{path} has k {shown(k)}; k of a topk SAE must be a whole number.")
    return architecture, int(k)


def _place(config: _Config, path: Path, given: Given) -> Place:
    metadata = config.metadata or _Metadata()
    heads = (config.hook_head_index, config.hook_point_head_index, metadata.hook_head_index)
    if any(head is not None for head in heads):
        raise SpecError(f"{path} has an SAE of a single head; only SAEs of whole rows are read.")
    hook = metadata.hook_name or config.hook_name or config.hook_point
    return given.place or place_of(hook, f"{path}: hook_name")


def _output(config: _Config, path: Path) -> Place:
    hook = (config.metadata or _Metadata()).hook_name_out or config.hook_name_out
    if hook is None:
        raise SpecError(f"{path} has no hook_name_out, which a transcoder has; add it.")
    return place_of(hook, f"{path}: hook_name_out")


def _input_scale(config: _Config, path: Path, given: Given) -> float:
    factor = given.norm_scaling_factor
    if config.normalize_activations in (None, False, "none"):
        if factor is not None:
            raise SpecError(f"{path} says that rows are not scaled; leave norm_scaling_factor out.")
        return 1.0
    if config.normalize_activations not in (True, "expected_average_only_in"):
        raise SpecError(
            f"{path} has normalize_activations {shown(config.normalize_activations)}, which is "
            "not a constant factor; only 'none' and 'expected_average_only_in' are read."
        )
    if factor is None:
        raise SpecError(
            f"{path} has normalize_activations 'expected_average_only_in', and the factor is not "
            "in the file; give norm_scaling_factor=..., from SAELens's list of SAEs."
        )
    return factor


def _refuse_finetuned(tensors: Tensors, path: Path) -> None:
    factor = tensors.get("scaling_factor")
    if factor is not None and not torch.allclose(factor.float(), torch.ones(())):
        raise SpecError(
            f"{path} has a scaling_factor that is not 1: its features were scaled in finetuning; "
            "multiply W_dec by the factors, and remove scaling_factor."
        )
