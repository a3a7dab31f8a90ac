"""The error and the size of each codec, on the residual streams of the trained toy model.

    python -m benchmarks.codecs

The output is the table of docs/codecs.md. The rows are `resid_pre` of every layer, at every token
of NUM_PROMPTS prompts, in bf16, from Hugging Face's model. No engine is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_scope.codecs import CODECS, Codec, make_codec

TOYWORLD = Path(__file__).parent.parent / "toyworld" / "model"
NUM_PROMPTS = 40


@dataclass(frozen=True)
class Loss:
    """The figures of one codec on some rows.

    Attributes:
        relative_error: |decoded - row| / |row|, the mean over rows.
        worst_error: the largest relative error of a row.
        cosine: the cosine similarity of a row and its decoded row, the mean over rows.
        share: the bytes of the parts, divided by the bytes of the rows.
    """

    relative_error: float
    worst_error: float
    cosine: float
    share: float


def measure(codec: Codec, rows: Tensor) -> Loss:
    """Encode and decode rows [n, hidden_size], none of them zero."""
    parts = codec.encode(rows)
    wide, out = rows.double(), codec.decode(parts, len(rows)).double()
    errors = (out - wide).norm(dim=-1) / wide.norm(dim=-1)
    num_bytes = sum(part.nbytes for part in parts.values())
    return Loss(
        float(errors.mean()),
        float(errors.max()),
        float(torch.cosine_similarity(out, wide, dim=-1).mean()),
        num_bytes / rows.nbytes,
    )


def toyworld_rows() -> Tensor:
    """The rows of all layers and prompts, bf16 [num_rows, 256]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toyworld import world

    tokenizer = AutoTokenizer.from_pretrained(TOYWORLD)
    model = AutoModelForCausalLM.from_pretrained(TOYWORLD, dtype=torch.bfloat16).eval()
    rows: list[Tensor] = []
    with torch.no_grad():
        for prompt in world.sentiment_prompts(NUM_PROMPTS, 0, "test"):
            ids = tokenizer(prompt.text, return_tensors="pt").input_ids
            # The last hidden state is after the final norm, so it is not on the residual stream.
            streams = model(ids, output_hidden_states=True).hidden_states[:-1]
            rows += [stream[0] for stream in streams]
    return torch.cat(rows)


def table(rows: Tensor) -> str:
    """The table as Markdown."""
    lines = [
        "| codec | bytes | relative error, mean | worst row | cosine, mean |",
        "|---|---|---|---|---|",
    ]
    for name in CODECS:
        codec = make_codec(name, rows.shape[1], rows.dtype)
        loss = measure(codec, rows)
        own = {"codec", "hidden_size", "dtype", "seed", "level"}
        options = [f"{k}={v}" for k, v in codec.metadata().items() if k not in own]
        lines.append(
            f"| `{name}`{' ' if options else ''}{', '.join(options)} | {loss.share:.2f} "
            f"| {loss.relative_error:.4f} | {loss.worst_error:.4f} | {loss.cosine:.5f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(toyworld_rows()))
