"""Train a sparse autoencoder on the toy model's rows, from a harvest or from a running engine.

Runs:  `python -m examples.train_sae` uses a feed, or with `--harvest FOLDER` a harvest. The SAE
       trains on a CPU.
From:  toyworld: documents of facts. The documents' rows at one layer come from `vllm_scope.stream`.
       With `--harvest`, `vllm_scope.harvest` writes the rows to shards, and `RowDataset` reads the
       shards.
To:    the terminal: loss, L0, dead features, explained variance; with `--out FOLDER` also
       train_sae.json, train_sae.png, and the SAE in SAELens's format, which an engine can hold.

A TopK SAE: a linear encoder and a ReLU compute features, and a linear decoder computes the row from
the k largest features. Features that were not active for a while learn the remaining error (an
auxiliary loss). The first batches are not used for gradients, only for the mean and the scale of
the rows. The figures at the end are computed from these batches.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor, nn

import vllm_scope
from examples.demo import MODEL, set_environment
from examples.figure import MARKS, STYLE
from toyworld.world import documents
from vllm_scope import Read
from vllm_scope.files import RowDataset

LAYER: Final = 2
NUM_DOCUMENTS: Final = 12_000
BATCH: Final = 1_024
HELD_OUT: Final = 8
ENGINE: Final = {
    "dtype": "float32",
    "max_model_len": 256,
    "gpu_memory_utilization": 0.3,
    "enforce_eager": True,
}
#: In training, a feature is dead if it was inactive in more than this many batches in a row.
IDLE: Final = 50


class TopK(nn.Module):
    """A TopK SAE. It centres and scales rows so that `sample` has the mean squared norm `width`."""

    def __init__(self, width: int, num_features: int, k: int, sample: Tensor) -> None:
        super().__init__()
        self.k = k
        self.register_buffer("mean", sample.mean(0))
        self.register_buffer("scale", (sample - sample.mean(0)).square().mean().rsqrt())
        start = nn.functional.normalize(torch.randn(num_features, width), dim=1)
        self.encoder, self.decoder = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.encoder_bias = nn.Parameter(torch.zeros(num_features))
        self.decoder_bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("idle", torch.zeros(num_features))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scaled rows, the SAE's reconstruction from the k largest features, and the values of
        all features [n, num_features]."""
        rows = (rows.float() - self.mean) * self.scale
        values = ((rows - self.decoder_bias) @ self.encoder.T + self.encoder_bias).relu()
        features = largest(values, self.k)
        return rows, features @ self.decoder + self.decoder_bias, values

    def step(self, rows: Tensor, optimizer: torch.optim.Optimizer) -> float:
        """Train on a batch. Returns the mean squared error."""
        rows, made, values = self(rows)
        error = rows - made
        loss = main = error.square().mean()
        active = (largest(values, self.k) > 0).any(0)
        self.idle = torch.where(active, 0, self.idle + 1)
        dead = self.idle > IDLE
        if dead.any():
            rest = largest(values * dead, 2 * self.k) @ self.decoder
            loss = loss + (error.detach() - rest).square().mean() / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            self.decoder /= self.decoder.norm(dim=1, keepdim=True)
        return float(main.detach())


def largest(values: Tensor, k: int) -> Tensor:
    best = values.topk(k, dim=1)
    return torch.zeros_like(values).scatter(1, best.indices, best.values)


@torch.inference_mode()
def evaluate(sae: TopK, rows: Tensor) -> tuple[dict[str, float], Tensor]:
    """The SAE's figures on some rows, and for each feature the share of rows where it is active."""
    scaled, made, values = sae(rows)
    features = largest(values, sae.k) > 0
    error = (scaled - made).square()
    return {
        "loss": float(error.mean()),
        "L0": float(features.sum(1).float().mean()),
        "dead": float((~features.any(0)).float().mean()),
        "explained variance": 1 - float(error.sum() / (scaled - scaled.mean(0)).square().sum()),
    }, features.float().mean(0)


def harvested(texts: list[str], folder: Path) -> Iterator[Tensor]:
    """Batches of mixed rows, from shards. A finished harvest is not computed again."""
    read = Read("resid_post", layer=LAYER)
    found = vllm_scope.harvest(
        texts, read, model=str(MODEL), out=folder, engine=ENGINE, long="pack"
    )
    print(
        f"{found.computed} contexts computed, {found.manifest.totals['tokens']:,} rows in {folder}"
    )
    yield from RowDataset(folder, "resid_post", LAYER, BATCH, seed=1)


def fed(texts: list[str]) -> Iterator[Tensor]:
    """Batches of mixed rows, from an engine in another process."""
    read = Read("resid_post", layer=LAYER)
    feed = vllm_scope.stream(
        texts, read, model=str(MODEL), batch_size=BATCH, engine=ENGINE, long="pack", seed=1
    )
    with feed:
        for batch in feed:
            yield batch["resid_post", LAYER]


@torch.no_grad()
def save(folder: Path, sae: TopK, hook_name: str) -> None:
    """Write the SAE in SAELens's format. Rows need no centring and scaling there: SAELens's encoder
    computes (x - b_dec) @ W_enc + b_enc, and its decoder computes features @ W_dec + b_dec."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        "W_enc": sae.scale * sae.encoder.T,
        "b_enc": sae.encoder_bias,
        "W_dec": sae.decoder / sae.scale,
        "b_dec": sae.mean + sae.decoder_bias / sae.scale,
    }
    path = folder / "sae_weights.safetensors"
    save_file({name: part.contiguous() for name, part in weights.items()}, path)
    num_features, width = sae.decoder.shape
    config = {"architecture": "topk", "k": sae.k, "d_in": width, "d_sae": num_features}
    config |= {"metadata": {"hook_name": hook_name}}
    (folder / "cfg.json").write_text(json.dumps(config, indent=1) + "\n")


def write_figure(path: Path, losses: Sequence[float], frequencies: Tensor) -> None:
    """Draw the loss during the training, and how often the SAE's features are active."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        learning, active = figure.subplots(1, 2)
    learning.plot([BATCH * i / 1000 for i in range(1, len(losses) + 1)], losses, MARKS[0].colour)
    learning.set_yscale("log")
    learning.set_xlabel("thousand rows")
    learning.set_ylabel("mean squared error of a batch")
    alive = frequencies[frequencies > 0]
    active.hist(alive.log10().tolist(), bins=40, color=MARKS[1].colour)
    active.set_xlabel(f"log10 of a feature's share of {HELD_OUT * BATCH:,} rows")
    active.set_ylabel(f"features ({len(frequencies) - len(alive)} more have no row)")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.train_sae", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--documents", type=int, default=NUM_DOCUMENTS)
    parser.add_argument("--harvest", type=Path, help="a folder of shards, made if it is missing")
    parser.add_argument("--out", type=Path, help="a folder for the figures")
    chosen = parser.parse_args()
    set_environment()
    torch.manual_seed(0)
    texts = [one.text for one in documents(0, "train", 0, chosen.documents) if one.kind == "facts"]
    started = time.monotonic()
    batches = fed(texts) if chosen.harvest is None else harvested(texts, chosen.harvest)
    held_out = torch.cat([next(batches) for _ in range(HELD_OUT)])
    print(f"{len(texts)} documents; the first rows after {time.monotonic() - started:.0f} s")
    sae = TopK(held_out.shape[1], chosen.features, chosen.k, held_out)
    losses = train(sae, (rows for rows in batches if len(rows) == BATCH))
    found, frequencies = evaluate(sae, held_out)
    num_rows = len(losses) * BATCH
    print(f"{num_rows:,} rows in {time.monotonic() - started:.0f} s; on {len(held_out):,} others:")
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if chosen.out is not None:
        settings = {"layer": LAYER, "features": chosen.features, "k": chosen.k, "rows": num_rows}
        write(chosen.out, {**settings, "held-out rows": len(held_out), **found})
        write_figure(chosen.out / "train_sae.png", losses, frequencies)
        save(chosen.out / "sae", sae, f"blocks.{LAYER}.hook_resid_post")


def train(sae: TopK, batches: Iterator[Tensor]) -> list[float]:
    """Train on each batch one time. Returns the losses of the batches."""
    optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3)
    losses = []
    for rows in batches:
        losses.append(sae.step(rows, optimizer))
        if len(losses) % 50 == 0:
            dead = float((sae.idle > IDLE).float().mean())
            print(f"batch {len(losses):4}  loss {losses[-1]:.4f}  dead {dead:.1%}", flush=True)
    return losses


def write(folder: Path, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_sae.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
