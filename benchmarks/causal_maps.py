"""Cells per second of a causal map: `vllm_scope.sweep`, TransformerLens, Hugging Face's hooks.

    PYTHONPATH=.venv/training python -m benchmarks.causal_maps           # toy world on a CPU
    PYTHONPATH=FOLDER python -m benchmarks.causal_maps --gpu --shape 8b  # random weights on a GPU

FOLDER has TransformerLens: `pip install --no-deps --target FOLDER -r requirements/training.txt`.

A map patches `resid_pre` of one prompt's run into another prompt's run, at every layer and
position. The value is the difference of two logits of the next token. All systems get the same
prompts and take turns. A turn's time includes the run on the source prompt. A turn's time leaves
out the start of the engine and of the models. The first turn warms up, with one prompt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES, make_shape, make_tokenizer
from benchmarks.turns import order, ratio_of

ROOT = Path(__file__).parents[1]
#: The metric is the logit of token A minus the logit of token B.
A, B = 5, 50
#: A function of the token ids of the prompts and of the sources, int64 [num_prompts, num_positions]
#: each. It returns the metric of every cell, float64 [num_prompts, num_layers, num_positions].
Map = Callable[[Tensor, Tensor], Tensor]
#: Changes the stream [num_cells, num_positions, hidden_size] at the entry of a layer, in place.
Patch = Callable[[Tensor], None]


class Hooked(Protocol):
    """A model that is patched by hooks."""

    def rows(self, ids: Tensor) -> Sequence[Tensor]:
        """`resid_pre` of each layer, [num_positions, hidden_size]; ids: int64 [num_positions]."""

    def logits(self, ids: Tensor, patches: Mapping[int, Patch]) -> Tensor:
        """The next token's logits [num_cells, vocab]; ids: int64 [num_cells, num_positions]."""


class HuggingFace:
    """Hugging Face's model with forward hooks.

    Args:
        model: a model with `model.model.layers`, such as Llama or Qwen.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def rows(self, ids: Tensor) -> Sequence[Tensor]:
        streams = self._model(ids[None], output_hidden_states=True, logits_to_keep=1).hidden_states
        return [stream[0] for stream in streams[:-1]]

    def logits(self, ids: Tensor, patches: Mapping[int, Patch]) -> Tensor:
        def enter(patch: Patch, module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # The embedding of a batch can be a view in which cells share rows. So patch a copy.
            stream = args[0].clone()
            patch(stream)
            return stream, *args[1:]

        with ExitStack() as hooks:
            for layer, patch in patches.items():
                module = self._model.model.layers[layer]
                hooks.callback(module.register_forward_pre_hook(partial(enter, patch)).remove)
            found: Tensor = self._model(ids, logits_to_keep=1).logits[:, -1]
        return found


class TransformerLens:
    """A TransformerBridge with its own hooks."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def rows(self, ids: Tensor) -> Sequence[Tensor]:
        cache = self.cache(ids)
        return [cache["resid_pre", layer][0] for layer in range(self.model.cfg.n_layers)]

    def logits(self, ids: Tensor, patches: Mapping[int, Patch]) -> Tensor:
        def enter(patch: Patch, stream: Tensor, hook: object) -> Tensor:
            patch(stream)
            return stream

        hooks = [(f"blocks.{n}.hook_resid_pre", partial(enter, one)) for n, one in patches.items()]
        found: Tensor = self.model.run_with_hooks(ids, fwd_hooks=hooks)[:, -1]
        return found

    def cache(self, ids: Tensor) -> Any:
        wanted = {f"blocks.{layer}.hook_resid_pre" for layer in range(self.model.cfg.n_layers)}
        return self.model.run_with_cache(ids[None], names_filter=wanted.__contains__)[1]

    def map(self, asked: Tensor, other: Tensor) -> Tensor:
        """A map by TransformerLens's own function, which runs one cell at a time."""
        from transformer_lens.patching import get_act_patch_resid_pre

        def metric(logits: Tensor) -> Tensor:
            return logits[0, -1, A] - logits[0, -1, B]

        found = [
            get_act_patch_resid_pre(self.model, one[None], self.cache(source), metric)
            for one, source in zip(asked, other, strict=True)
        ]
        return torch.stack(found).double().cpu()


def by_hooks(system: Hooked, at_once: int, asked: Tensor, other: Tensor) -> Tensor:
    """A map, with `at_once` cells in one forward."""
    return torch.stack(
        [_map(system, at_once, one, source) for one, source in zip(asked, other, strict=True)]
    )


def _map(system: Hooked, at_once: int, ids: Tensor, source: Tensor) -> Tensor:
    rows = system.rows(source)
    cells = list(product(range(len(rows)), range(len(ids))))
    found = []
    for first in range(0, len(cells), at_once):
        some = cells[first : first + at_once]
        logits = system.logits(ids.repeat(len(some), 1), _patches(rows, some))
        found.append(logits[:, A] - logits[:, B])
    return torch.cat(found).double().cpu().view(len(rows), len(ids))


def _patches(rows: Sequence[Tensor], cells: Sequence[tuple[int, int]]) -> dict[int, Patch]:
    """Layer -> the patch of this layer's cells. The n-th cell is item n of the batch."""
    places: dict[int, list[tuple[int, int]]] = {}
    for n, (layer, position) in enumerate(cells):
        places.setdefault(layer, []).append((n, position))

    def patch(layer: int, stream: Tensor) -> None:
        which, where = torch.tensor(places[layer], device=stream.device).T
        stream[which, where] = rows[layer][where]

    return {layer: partial(patch, layer) for layer in places}


def by_sweep(llm: Any, asked: Tensor, other: Tensor) -> Tensor:
    """A map, by `vllm_scope.sweep`."""
    from vllm_scope import LogitDifference, Sweep, sweep

    prompts, sources = (
        [{"prompt_token_ids": one} for one in ids.tolist()] for ids in (asked, other)
    )
    swept = Sweep(sources, metric=LogitDifference(A, B))
    return torch.from_numpy(sweep(llm, prompts, swept, progress=False).values)


def engine_of(folder: Path, args: argparse.Namespace) -> Any:
    from vllm import LLM

    # The models of the other two systems are in the same memory.
    options: dict[str, Any] = {"gpu_memory_utilization": 0.4 if args.gpu else 0.3}
    if args.shape:
        options["load_format"] = "dummy"
    options |= {"dtype": args.dtype, "max_model_len": 256, "disable_log_stats": True}
    return LLM(str(folder), **options | args.options)


def model_of(folder: Path, args: argparse.Namespace) -> Any:
    """Hugging Face's model; random weights are the same at each call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    with torch.device(args.device):
        if not args.shape:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype
        ).eval()


def bridge_of(folder: Path, args: argparse.Namespace) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    return TransformerBridge.boot_transformers(
        str(folder), hf_model=model_of(folder, args), device=args.device,
        dtype=getattr(torch, args.dtype), tokenizer=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip


def maps_of(folder: Path, args: argparse.Namespace) -> dict[str, Map]:
    """The systems of the table. The values of the first system are the reference."""
    scope = partial(by_sweep, engine_of(folder, args))
    hooks = HuggingFace(model_of(folder, args))
    lens = TransformerLens(bridge_of(folder, args))
    several = f"{args.at_once} cells a forward"
    return {
        "hooks, one cell a forward": partial(by_hooks, hooks, 1),
        f"hooks, {several}": partial(by_hooks, hooks, args.at_once),
        "TransformerLens, its function": lens.map,
        f"TransformerLens, {several}": partial(by_hooks, lens, args.at_once),
        "vllm_scope.sweep": scope,
    }


def prompts_of(turn: int, num: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Prompts that are new in each turn, so that a sweep cannot use caches of earlier turns."""
    random = torch.Generator().manual_seed(turn)
    asked, other = torch.randint(5, 1000, (2, num, args.tokens), generator=random)
    return asked.to(args.device), other.to(args.device)


def run(maps: Mapping[str, Map], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table."""
    first, last = next(iter(maps)), list(maps)[-1]
    speeds: dict[str, list[float]] = {name: [] for name in maps}
    apart: dict[str, float] = dict.fromkeys(maps, 0.0)
    for turn in range(args.turns + 1):
        prompts = prompts_of(turn, args.prompts if turn else 1, args)
        values = {}
        for name in order(maps, turn):
            started = time.perf_counter()
            values[name] = maps[name](*prompts)
            seconds = time.perf_counter() - started
            if turn:
                speeds[name].append(values[name].numel() / seconds)
        for name, found in values.items():
            difference = (found - values[first]).abs().nan_to_num(nan=torch.inf)
            apart[name] = max(apart[name], float(difference.max()))
    rows = []
    for name, each in speeds.items():
        row: dict[str, Any] = {"system": name, "cells_per_s": statistics.median(each)}
        row |= {"low": min(each), "high": max(each), "apart": apart[name]}
        row["sweep_is"] = ratio_of(speeds[last], each)
        if args.shape and name == last:
            del row["apart"]
        rows.append(row)
    return rows


def format_row(row: Mapping[str, Any]) -> str:
    speed = f"{row['cells_per_s']:9.1f} ({row['low']:.1f} to {row['high']:.1f})"
    apart = f"{row['apart']:9.1e}" if "apart" in row else "      own"
    return f"{row['system']:36} {speed:32} {row['sweep_is']!s:26} {apart}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24, help="of a prompt")
    parser.add_argument("--at-once", type=int, default=64, help="cells of a forward with hooks")
    parser.add_argument("--threads", type=int, help="of torch, outside of the engine")
    parser.add_argument("--dtype", help="float32 unless given; on a GPU bfloat16")
    parser.add_argument("--options", type=json.loads, default={}, help="more LLM arguments, JSON")
    parser.add_argument("--layers", type=int, help="the shape with this number of layers")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    if importlib.util.find_spec("transformer_lens") is None:
        parser.error(
            "TransformerLens is not importable; put a folder that has it on PYTHONPATH, such as "
            ".venv/training."
        )
    args.device = "cuda" if args.gpu else "cpu"
    args.dtype = args.dtype or ("bfloat16" if args.gpu else "float32")
    return args


def main() -> None:
    args = parsed()
    torch.set_grad_enabled(False)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = ROOT / "toyworld" / "model"
        if args.shape:
            folder = make_shape(args.shape, Path(temporary), args.layers)
            make_tokenizer(folder)
        maps = maps_of(folder, args)
        where = f"{args.device}, {torch.get_num_threads()} threads"
        print(f"{args.prompts} prompts of {args.tokens} tokens, {args.dtype}, {where}")
        print(f"{'':36} {'cells/s':32} {'sweep is so many times':26} values apart")
        rows = run(maps, args)
    for row in rows:
        print(format_row(row))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
