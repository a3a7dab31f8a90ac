"""Cross-layer transcoders (CLTs): the features of a layer add to the outputs of that layer and of
all later layers.

Owns:  CrossLayerTranscoder, EncoderOfClt, `load_clt`, `load_encoders`, `load_encoder`.
Runs:  on the CPU, anywhere with torch.
From:  the folder that circuit-tracer writes. To: load (uses the encoders), callers of `load_clt`.

Promise: matrices are views of files that are mapped into memory. The encoder of a layer has the
type `Sae`. Therefore a worker can hold the encoder like any other SAE. No worker holds a decoder.

| file                   | tensors                                                             |
|------------------------|---------------------------------------------------------------------|
| `W_enc_{i}.safetensors`| `W_enc_{i}` [d_sae, d_model], `b_enc_{i}` [d_sae], `b_dec_{i}` [d_out];
|                        | optional: `threshold_{i}` [d_sae], `W_skip_{i}` [d_model, d_out]     |
| `W_dec_{i}.safetensors`| `W_dec_{i}` [d_sae, number of layers - i, d_out]                     |
| `config.yaml`          | optional: `feature_input_hook`, `feature_output_hook`                |

The encoder of layer i computes the features f_i from the row x_i. For the output of layer l, the
CLT computes this row y_l:

    y_l = sum_{i <= l} f_i . W_dec_i[:, l - i] + b_dec_l + x_l . W_skip_l

Source: circuit-tracer 0.5, CrossLayerTranscoder and load_clt
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from vllm_scope.errors import SpecError, reason_of, shown
from vllm_scope.saes.arrays import Tensors, map_safetensors, only
from vllm_scope.saes.places import place_of
from vllm_scope.saes.sae import Sae
from vllm_scope.vectors.containers import read_bytes

CONFIG = "config.yaml"
ENCODER, _DECODER = "W_enc_{}.safetensors", "W_dec_{}.safetensors"
_ENCODERS = re.compile(r"W_enc_([0-9]{1,5})\.safetensors")


@dataclass(frozen=True, eq=False)
class EncoderOfClt(Sae):
    """The encoder of one layer. `decoder` has only the vectors that the features add to the output
    of the same layer."""

    def decode(self, features: Tensor, x: Tensor | None = None) -> Tensor:
        raise self._wrong(
            "it is one layer of a cross-layer transcoder, and a decoded row needs the features of "
            "several layers; use CrossLayerTranscoder.decode, after "
            "vllm_scope.saes.cross_layer.load_clt"
        )


@dataclass(frozen=True, eq=False)
class CrossLayerTranscoder:
    """All layers of a CLT.

    Attributes:
        name: the CLT's name in messages.
        encoders: the encoder of each layer, from layer 0.
        decoders: for each layer i, a tensor [d_sae, number of layers - i, d_out] on the CPU.

    Raises:
        SpecError: shapes disagree.
    """

    name: str
    encoders: tuple[EncoderOfClt, ...]
    decoders: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        d_out = self.encoders[0].decoder_bias.shape[0]
        for i, decoder in enumerate(self.decoders):
            shape = [self.encoders[i].d_sae, len(self.encoders) - i, d_out]
            if list(decoder.shape) != shape or not decoder.is_floating_point():
                raise self._wrong(
                    f"W_dec_{i} is {decoder.dtype} {list(decoder.shape)}; it must have "
                    f"floats and the shape {shape}"
                )

    @torch.no_grad()
    def decode(self, features: Sequence[Tensor], layer: int, x: Tensor | None = None) -> Tensor:
        """The rows that the CLT computes for the output of a layer.

        Args:
            features: one tensor [..., d_sae] of features for each of the layers 0 to `layer`, in
                any float dtype, on the CPU.
            x: [..., d_model], the input rows of this layer's encoder, if the layer has a skip
                matrix. Otherwise None.

        Returns:
            [..., d_out], float32.

        Raises:
            SpecError: the CLT does not have the layer, `features` has a wrong number of layers, a
                shape is wrong, weights are not finite, `x` is missing although the layer has a skip
                matrix, or `x` is given although the layer has no skip matrix.
        """
        self._check_layer(layer)
        encoder = self.encoders[layer]
        if len(features) != layer + 1:
            raise self._wrong(
                f"features are of {len(features)} layers; the output of layer {layer} needs the "
                f"features of {layer + 1} layers, from layer 0"
            )
        if (x is None) != (encoder.skip is None):
            raise self._wrong(
                "decode needs x, the rows that were encoded, if the layer has a skip matrix, and "
                "refuses x otherwise"
            )
        found = encoder.decoder_bias
        for i, some in enumerate(features):
            if some.shape[-1:] != (self.encoders[i].d_sae,):
                raise self._wrong(
                    f"features of layer {i} are {list(some.shape)}; they must be "
                    f"[..., {self.encoders[i].d_sae}]"
                )
            found = found + some.float() @ self._finite(i, self.decoders[i][:, layer - i])
        if x is not None:
            found = found + encoder.skipped(x)
        return found

    def decoder_of(self, layer: int, index: int) -> Tensor:
        """The vectors that one feature adds to the outputs of its layer and of all later layers.

        Reads only this feature's numbers from the file.

        Returns:
            [number of layers - layer, d_out], float32.

        Raises:
            SpecError: the layer or the feature does not exist, or a number is not finite.
        """
        self._check_layer(layer)
        if type(index) is not int or not 0 <= index < self.encoders[layer].d_sae:
            raise self._wrong(
                f"the index of a feature is {shown(index)}; layer {layer} has features 0 to "
                f"{self.encoders[layer].d_sae - 1:,}"
            )
        return self._finite(layer, self.decoders[layer][index])

    def _finite(self, layer: int, some: Tensor) -> Tensor:
        rows = some.float()
        if not rows.isfinite().all():
            raise self._wrong(f"W_dec_{layer} has a number that is not finite in float32")
        return rows

    def _check_layer(self, layer: int) -> None:
        if type(layer) is not int or not 0 <= layer < len(self.encoders):
            raise self._wrong(f"layer is {shown(layer)}; layers are 0 to {len(self.encoders) - 1}")

    def _wrong(self, what: str) -> SpecError:
        return SpecError(f"the cross-layer transcoder {shown(self.name)}: {what}.")


def is_clt(path: Path) -> bool:
    """True if `path` is the folder of a CLT."""
    return (path / ENCODER.format(0)).is_file()


def layer_in(path: Path) -> int | None:
    """The layer number in the name of an encoder's file. None for the name of any other file."""
    match = _ENCODERS.fullmatch(path.name)
    return None if match is None else int(match[1])


def load_clt(path: str | Path, *, name: str | None = None) -> CrossLayerTranscoder:
    """Load a CLT. The matrices stay in the files until they are used.

    Args:
        path: the folder.
        name: the CLT's name in messages. If None, the path is the name.

    Raises:
        SpecError: the folder has another format, a file is malformed, or layers are missing.
        OSError: a file cannot be read.
    """
    folder = Path(path)
    name = str(path) if name is None else name
    encoders = load_encoders(folder, name)
    decoders = tuple(_decoder(folder, i) for i in range(len(encoders)))
    return CrossLayerTranscoder(name, encoders, decoders)


def load_encoders(folder: Path, name: str) -> tuple[EncoderOfClt, ...]:
    """Load the encoders NAME.i of all layers i. Raises the same errors as `load_clt`."""
    layers = sorted(layer for file in folder.iterdir() if (layer := layer_in(file)) is not None)
    if not layers or layers != list(range(len(layers))):
        raise SpecError(
            f"{folder} has the encoders of layers {', '.join(map(str, layers[:20])) or '-'}; a "
            "cross-layer transcoder has W_enc_0.safetensors and so on, without a gap."
        )
    return tuple(load_encoder(folder / ENCODER.format(i), f"{name}.{i}") for i in layers)


def load_encoder(path: Path, name: str) -> EncoderOfClt:
    """Load the encoder of one layer from a file. Raises the same errors as `load_clt`."""
    i = layer_in(path)
    assert i is not None
    names = {key: f"{key}_{i}" for key in ("W_enc", "b_enc", "b_dec", "threshold", "W_skip")}
    # `only` checks that W_enc is a matrix. `Sae` checks all shapes.
    tensors = only(map_safetensors(path), list(names.values())[:3], path, list(names.values())[3:])
    own: Tensors = {key: tensors[named] for key, named in names.items() if named in tensors}
    config = _config(path.parent / CONFIG)
    place, output = (
        place_of(f"blocks.{i}.{config.get(key, usual)}", f"{path.parent / CONFIG}: {key}")
        for key, usual in (
            ("feature_input_hook", "hook_resid_mid"), ("feature_output_hook", "hook_mlp_out"),
        )
    )  # fmt: skip
    skip = own.get("W_skip")
    return EncoderOfClt(
        name=name,
        architecture="jumprelu" if "threshold" in own else "standard",
        place=place,
        encoder=own["W_enc"],
        decoder=_decoder(path.parent, i)[:, 0],
        encoder_bias=own["b_enc"],
        decoder_bias=own["b_dec"],
        apply_b_dec_to_input=False,
        threshold=own.get("threshold"),
        output=output,
        skip=None if skip is None else skip.T,
    )


def _decoder(folder: Path, layer: int) -> Tensor:
    path, name = folder / _DECODER.format(layer), f"W_dec_{layer}"
    found = map_safetensors(path).get(name)
    if found is None or found.ndim != 3 or not found.shape[1]:
        shape = "no such tensor" if found is None else list(found.shape)
        raise SpecError(
            f"{path}: {name} is {shape}; it must be [d_sae, number of layers - {layer}, d_out]."
        )
    return found


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    data = read_bytes(path)
    try:
        found = yaml.safe_load(data)
    except Exception as error:  # a wrong date, number or bool raises many types of errors
        raise SpecError(f"{path} is not YAML that can be read: {reason_of(error)}.") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path} has a {type(found).__name__}; it must have fields.")
    return found
