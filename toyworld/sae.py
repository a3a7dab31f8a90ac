"""A sparse autoencoder of the toy model, with one feature for each country: its training.

Owns:  Recipe, the rows, the training loop, the files.
Runs:  `python -m toyworld.sae --out toyworld/model/sae`, on a CPU in about three minutes.
From:  a model folder, world.documents.   To: a folder in SAELens's format; countries.py adds its
       features.json and its card.

The SAE is trained on the documents of facts, at the layer where it works best: after layer 0 the
row of a country's name still decides which capital the model names. From layer 1 on, the last token
has looked the capital up. Rows are whitened for training, so that what tells countries apart is not
lost beside the few directions that carry most of the variance. The whitening is then folded into
the weights.

Promise: a feature's value is the length of what it adds to the row.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from toyworld import countries, train, world
from toyworld.evaluate import LoadedModel

MODEL: Final = Path(__file__).parent / "model"


@dataclass(frozen=True)
class Recipe:
    """What the weights depend on, besides the device's rounding."""

    seed: int = 0
    layer: int = 0
    num_documents: int = 24_000  # of all kinds; those of facts are used
    d_sae: int = 384
    k: int = 2  # features of a row, in training
    steps: int = 4_000
    batch_rows: int = 1_024
    learning_rate: float = 2e-3
    shrinkage: float = 0.03  # of the covariance, towards its mean variance
    floor: float = 0.3  # a feature below this share of its largest value is off


@dataclass(frozen=True)
class Trained:
    """W_enc [d_sae, d_in], W_dec [d_sae, d_in], b_enc [d_sae], b_dec [d_in], threshold [d_sae]."""

    encoder: Tensor
    decoder: Tensor
    encoder_bias: Tensor
    decoder_bias: Tensor
    threshold: Tensor


# --- Training ----------------------------------------------------------------


@torch.inference_mode()
def rows_of_facts(loaded: LoadedModel, recipe: Recipe) -> Tensor:
    """The stream after a layer at every token of documents of facts but <|bos|>.

    Returns [num_tokens, hidden_size], float32.
    """
    documents = world.documents(recipe.seed, "train", 0, recipe.num_documents)
    texts = [document.text for document in documents if document.kind == "facts"]
    row_tokens = train.Recipe().row_tokens
    packed = torch.from_numpy(train.pack(train.encode(loaded.tokenizer, texts), row_tokens))
    kept: list[Tensor] = []
    hook = loaded.model.model.layers[recipe.layer].register_forward_hook(
        lambda _module, _inputs, output: kept.append(output)
    )
    found = []
    for chunk in packed.split(16):
        batch = train.Batch.of(chunk)
        loaded.model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        )
        counted = (batch.input_ids != train.PAD_ID) & (batch.input_ids != train.BOS_ID)
        found.append(kept.pop()[counted])
    hook.remove()
    return torch.cat(found)


def train_sae(rows: Tensor, recipe: Recipe) -> Trained:
    """A TopK SAE of whitened rows, as a JumpReLU SAE of the rows themselves."""
    mean, whiten, colour = _whitening(rows, recipe.shrinkage)
    found = _train_topk((rows - mean) @ whiten, recipe)
    encoder = found.encoder @ whiten
    decoder = found.decoder @ colour
    decoder_bias = found.decoder_bias @ colour + mean
    norms = decoder.norm(dim=1)
    some = rows[::4]
    pre = ((some - decoder_bias) @ encoder.T + found.encoder_bias) * norms
    # The threshold that lets k features of a row pass, in the mean over rows.
    value = (pre / norms).flatten().sort(descending=True).values[recipe.k * len(some)]
    threshold = torch.maximum(value * norms, recipe.floor * pre.amax(dim=0))
    return Trained(
        encoder=encoder * norms[:, None],
        decoder=decoder / norms[:, None],
        encoder_bias=found.encoder_bias * norms,
        decoder_bias=decoder_bias,
        threshold=threshold.clamp(min=0),
    )


def _whitening(rows: Tensor, shrinkage: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the matrix that whitens rows, and its inverse. Both are symmetric."""
    variances, axes = torch.linalg.eigh(torch.cov(rows.T))
    variances = variances.clamp(min=0) + shrinkage * variances.mean()
    whiten, colour = (axes * variances.rsqrt()) @ axes.T, (axes * variances.sqrt()) @ axes.T
    return rows.mean(dim=0), whiten, colour


def _train_topk(rows: Tensor, recipe: Recipe) -> Trained:
    generator = torch.Generator().manual_seed(recipe.seed)
    width = rows.shape[1]
    start = torch.randn(recipe.d_sae, width, generator=generator)
    start /= start.norm(dim=1, keepdim=True)
    encoder, decoder = start.clone().requires_grad_(), start.clone().requires_grad_()
    encoder_bias = torch.zeros(recipe.d_sae, requires_grad=True)
    decoder_bias = torch.zeros(width, requires_grad=True)
    optimizer = torch.optim.Adam([encoder, decoder, encoder_bias, decoder_bias])
    idle_steps = torch.zeros(recipe.d_sae)
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(
            1.0, (recipe.steps - step) / (0.3 * recipe.steps)
        )
        batch = rows[torch.randint(len(rows), (recipe.batch_rows,), generator=generator)]
        values = ((batch - decoder_bias) @ encoder.T + encoder_bias).relu()
        active = _largest(values, recipe.k)
        error = batch - (active @ decoder + decoder_bias)
        loss = error.square().mean()
        idle_steps = torch.where((active > 0).any(dim=0), 0.0, idle_steps + 1)
        idle = idle_steps > 50
        if idle.any():
            # Features that are never chosen learn what the others leave.
            rest = _largest(values * idle, 32) @ decoder
            loss = loss + (error.detach() - rest).square().mean() / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            decoder /= decoder.norm(dim=1, keepdim=True)
    trained = (encoder, decoder, encoder_bias, decoder_bias)
    return Trained(*(each.detach() for each in trained), threshold=torch.zeros(recipe.d_sae))


def _largest(values: Tensor, k: int) -> Tensor:
    best = values.topk(min(k, values.shape[1]), dim=1)
    return torch.zeros_like(values).scatter(1, best.indices, best.values)


def save(folder: Path, trained: Trained, recipe: Recipe) -> None:
    """cfg.json and sae_weights.safetensors, in float16, as SAELens 6 writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "W_enc": trained.encoder.T,
        "W_dec": trained.decoder,
        "b_enc": trained.encoder_bias,
        "b_dec": trained.decoder_bias,
        "threshold": trained.threshold,
    }
    half = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(half, folder / "sae_weights.safetensors")
    (folder / "sae_weights.safetensors").chmod(0o644)
    config = {
        "architecture": "jumprelu",
        "d_in": trained.decoder.shape[1],
        "d_sae": trained.decoder.shape[0],
        "dtype": "float16",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            "sae_lens_version": "6.0.0",  # the form of this file
            "model_name": "toyworld/model",
            "hook_name": f"blocks.{recipe.layer}.hook_resid_post",
        },
    }
    (folder / "cfg.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toyworld.sae", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL / "sae", help="the folder to write")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments = parser.parse_args()
    started_s = time.monotonic()
    recipe, loaded = Recipe(), LoadedModel(MODEL)
    rows = rows_of_facts(loaded, recipe)
    print(f"{len(rows):,} rows in {time.monotonic() - started_s:.0f} s", flush=True)
    save(arguments.out, train_sae(rows, recipe), recipe)
    print(f"trained after {time.monotonic() - started_s:.0f} s", flush=True)
    countries.describe(loaded, arguments.out, len(rows))


if __name__ == "__main__":
    main()
