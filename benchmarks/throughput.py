"""Tokens per second: plain vLLM, the plugin idle, and reading, in one run.

The engines are loaded at the same time, and compute in turns. If the machine's speed changes, the
change affects all engines. A speed is the median of the turns. A ratio divides the speed of a turn
by plain vLLM's speed in the same turn. The table has the median of the ratios and its 95 %
interval.

    python -m benchmarks.throughput                    # toy world on a CPU
    python -m benchmarks.throughput --shape 8b --gpu   # random weights on a GPU
    python -m benchmarks.throughput --shape 8b --gpu --saes 4   # features of 1 and of 4 layers
    python -m benchmarks.throughput --shape 8b --gpu --lens 4   # likeliest tokens at 1 and 4 layers
    python -m benchmarks.throughput --shape 8b --gpu --sums     # sums of all layers on the device

Other systems (`--beside`) are in folders of their own. See benchmarks.systems.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.engine import Workload, encode
from benchmarks.shapes import SHAPES, make_saes, make_shape, make_tokenizer
from benchmarks.systems import BESIDE, ROOT, Engine, config_of, spread, start
from benchmarks.turns import Ratio, order, ratio_of
from benchmarks.values import Reference
from vllm_scope.batch.sums import bytes_of

CPU_WORK = [Workload("batch 1", 1, 16, 64), Workload("batch 16", 16, 16, 64)]
CPU_WORK += [Workload("prefill 16x200", 16, 200, 1)]
#: Engines that get only one turn.
SLOW = ("lens", "huggingface")
GPU_WORK = [Workload("batch 1", 1, 128, 256), Workload("batch 64", 64, 128, 256)]
GPU_WORK += [Workload("batch 256", 256, 128, 256), Workload("prefill 64x1024", 64, 1024, 1)]
GPU_WORK += [Workload("prefill 1x512", 1, 512, 1)]
#: Workloads that run only if `--only` names them.
MORE_CPU_WORK = [Workload("batch 8", 8, 16, 64), Workload("batch 64", 64, 16, 64)]
MORE_GPU_WORK = [Workload("batch 8", 8, 128, 256)]
#: Prompts with the same beginning. If there is a prefix cache, it has most of their tokens.
SHARED = [
    Workload("shared 256", 256, 96, 128, shared=768),
    Workload("first token", 16, 96, 8, shared=768, first=True),
    Workload("64 clients", 256, 96, 128, shared=768, clients=64),
]


#: mode -> (engine, changes of the workload)
Modes = dict[str, tuple[str, dict[str, Any]]]


def modes_of(
    engines: dict[str, Engine], num_layers: int, saes: int = 0, lens: int = 0, sums: bool = False
) -> Modes:
    """The modes, which are the rows of the table, without the modes whose engine is missing.

    Args:
        saes: number of layers that have an SAE.
        lens: number of layers to which a LensTopK is applied, the last layer included.
        sums: True: one row of the table has the sums of all layers.
    """
    everything = spread(num_layers, num_layers)
    found: Modes = {"plain vLLM": ("plain", {}), "plugin idle": ("scope", {})}
    for count in (1, 3, num_layers):
        word = "all" if count == num_layers else str(count)
        name = f"{word} layer{'s' if count > 1 else ''}"
        found[name] = ("scope", {"layers": spread(num_layers, count)})
    found["own vector each"] = ("scope", {"edits": "own"})
    found["own gate each"] = ("scope", {"edits": "gated"})
    found["one vector for all"] = ("scope", {"edits": "one"})
    found["64 probes"] = ("scope", {"probes": 64, "named": True})
    found["1,024 probes"] = ("scope", {"probes": 1024, "named": True})
    found["1 probe"] = ("scope", {"probes": 1})
    found["64 probes inline"] = ("scope", {"probes": 64})
    for count in sorted({1, min(4, saes), saes}) if saes else ():
        some = spread(num_layers, saes)[:count]
        found[f"features, {count} layer{'s' * (count > 1)}"] = ("scope", {"features": some})
    for count in (1, lens) if lens else ():
        some = list(range(num_layers))[-count:]
        found[f"top 10, {count} layer{'s' * (count > 1)}"] = ("scope", {"unembedded": some})
    if sums:
        found["sums of all layers"] = ("scope", {"summed": everything})
    found["monitor of 8 layers"] = ("scope", {"monitored": min(8, num_layers)})
    found["eager vLLM"] = ("eager", {})
    found["vllm-lens idle"] = ("lens", {})
    found["vllm-lens 1 layer"] = ("lens", {"layers": spread(num_layers, 1), "lens": True})
    found["vllm-lens all layers"] = ("lens", {"layers": everything, "lens": True})
    found["vLLM of interp-engine"] = ("interp-plain", {})
    found["interp idle"] = ("interp", {})
    found["interp 1 layer"] = ("interp", {"layers": spread(num_layers, 1)})
    found["interp all layers"] = ("interp", {"layers": everything})
    found["interp own vector each"] = ("interp", {"edits": "own"})
    found["interp-one idle"] = ("interp-one", {})
    found["interp-one 1 layer"] = ("interp-one", {"layers": spread(num_layers, 1)})
    found["Hugging Face"] = ("huggingface", {})
    found["Hugging Face all layers"] = ("huggingface", {"layers": everything})
    return {mode: how for mode, how in found.items() if how[0] in engines}


def run(
    engines: dict[str, Engine], work: list[Workload], modes: Modes, turns: int,
    reference: Reference | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The lines of the table. With a reference, a line has the error of the rows that were read."""
    rows = []
    salt = 0
    dead: set[str] = set()
    for base in work:
        found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
        for turn in range(turns + 1):
            for mode in order(modes, turn):
                engine, change = modes[mode]
                if (turn > 1 and engine in SLOW) or mode in dead:
                    continue  # a slow engine has one turn, and a failed mode has no further turns
                salt += 1
                try:
                    answer = engines[engine].ask(encode(replace(base, salt=salt, **change)))
                except RuntimeError as error:
                    print(f"{base.name:16} {mode:22} failed: {str(error)[-300:]}", flush=True)
                    dead.add(mode)
                    engines[engine] = engines[engine].again()
                    continue
                if turn:  # the first turn warms up
                    found[mode].append(answer)
        for mode, answers in found.items():
            if answers:
                row = {"work": base.name, "mode": mode} | figures(answers, found["plain vLLM"])
                if reference is not None:
                    row |= error_of(engines, modes[mode], base, reference)
                rows.append(row)
                print(format_row(row), flush=True)
    return rows


def error_of(
    engines: dict[str, Engine],
    mode: tuple[str, dict[str, Any]],
    base: Workload,
    reference: Reference,
) -> dict[str, Any]:
    """The error of a mode's rows; {} if the mode has gates, or neither reads nor edits. If the mode
    only adds vectors, all layers are read."""
    name, change = mode
    if not change.keys() & {"layers", "edits"} or change.get("edits") == "gated":
        return {}
    change = {"layers": change.get("layers") or reference.layers} | change
    with tempfile.TemporaryDirectory() as folder:
        work = replace(base, keep=str(Path(folder) / "rows"), **change)
        engines[name].ask(encode(work))
        return {"error": reference.worst(work)}


def figures(answers: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a mode. If the mode has n turns, they are compared with plain vLLM's first n."""
    speeds = [a["tokens"] / a["seconds"] for a in answers]
    ratio = ratio_of(speeds, [a["tokens"] / a["seconds"] for a in plain[: len(answers)]])
    found = {"tokens_per_s": statistics.median(speeds), "turns": len(answers)}
    found |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
    if any(a["cached"] for a in plain) and "cached" in answers[0]:
        cached = [sum(a["cached"] for a in each) for each in (answers, plain[: len(answers)])]
        found["hits"] = cached[0] / cached[1]
    if "gigabytes" in answers[0]:
        found["gb_per_s"] = statistics.median(a["gigabytes"] / a["seconds"] for a in answers)
    return found


def format_row(row: dict[str, Any]) -> str:
    delivered = f"{row['gb_per_s']:8.3f}" if "gb_per_s" in row else " " * 8
    ratio = Ratio(row["ratio"], row["low"], row["high"])
    if "hits" in row:
        delivered += f"  {row['hits']:.3f} of plain's prefix hits"
    if "error" in row:
        delivered += f"  rows differ from Hugging Face's by {row['error']:.1e}"
    return f"{row['work']:16} {row['mode']:22} {row['tokens_per_s']:12,.0f} {ratio} {delivered}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--model", default=str(ROOT / "toyworld" / "model"))
    parser.add_argument("--gpu", action="store_true", help="the GPU's workloads")
    parser.add_argument(
        "--beside", nargs="*", default=[], choices=[name for names in BESIDE for name in names],
        help="compare with these too",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--options", type=json.loads, default={}, help="more LLM arguments, JSON")
    parser.add_argument("--saes", type=int, default=0, help="layers that get an SAE")
    parser.add_argument("--sae-width", type=int, default=1 << 16, help="features of an SAE")
    parser.add_argument("--lens", type=int, default=0, help="layers with the 10 likeliest tokens")
    parser.add_argument("--sums", action="store_true", help="sums of all layers on the device")
    parser.add_argument("--only", nargs="*", help="only workloads of these names")
    parser.add_argument("--modes", nargs="*", help="only these rows; 'interp*' for several")
    parser.add_argument(
        "--values", action="store_true", help="compare rows with Hugging Face's, on the CPU"
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_shape(args.shape, Path(folder)) if args.shape else Path(args.model)
        options: dict[str, Any] = {
            "model": str(model), "skip_tokenizer_init": True,
            "max_model_len": 2048 if args.gpu else 512, "enable_prefix_caching": False,
        } | args.options  # fmt: skip
        if args.shape:
            options["load_format"] = "dummy"
            make_tokenizer(model)  # interp-engine needs a tokenizer
        if args.gpu:
            # Up to three engines are loaded at the same time.
            options.setdefault("gpu_memory_utilization", 0.28)
        logs = Path(os.environ.get("OUT", folder))
        config = config_of(options)
        if args.saes:
            layers = spread(config["num_hidden_layers"], args.saes)
            size = config["hidden_size"]
            saes = make_saes(Path(folder) / "saes", layers, size, args.sae_width)
            most_mib = 2 * args.saes * args.sae_width * (size + 8) / 2**20
            scope = options.setdefault("additional_config", {}).setdefault("scope", {})
            scope |= {"saes": saes, "saes_mib": max(4096, 2 * most_mib)}
        if args.sums:
            # A layer needs float64 [width, width], and the rows that wait for their products.
            most_mib = config["num_hidden_layers"] * bytes_of(config["hidden_size"], 4, True, False)
            scope = options.setdefault("additional_config", {}).setdefault("scope", {})
            scope["moments_mib"] = 1.1 * most_mib / 2**20
        work = GPU_WORK if args.gpu else CPU_WORK
        work = work + SHARED if options["enable_prefix_caching"] else work
        if args.only:
            work = work + (MORE_GPU_WORK if args.gpu else MORE_CPU_WORK)
            work = [w for w in work if w.name in args.only]
        reference = Reference(model, options.get("dtype", "bfloat16")) if args.values else None
        rows: list[dict[str, Any]] = []
        plain = Engine(options, logs / "plain.log")
        # Engines that start at the same time would count each other's memory as their own.
        together = "kv_cache_memory_bytes" in options
        if not together:
            assert plain.start_seconds
        # The groups run one after another, because together they would exceed the device's memory.
        for names in BESIDE:
            others = {}
            for name in names:
                if name in (*args.beside, "scope"):
                    others[name] = start(name, options, logs)
                    if not together:
                        assert others[name].start_seconds
            if not others:
                continue
            engines = {"plain": plain, **others}
            starts = ", ".join(f"{name} {e.start_seconds:.1f} s" for name, e in engines.items())
            print(f"start: {starts}")
            print(f"{'':16} {'':22} {'tokens/s':>12} {'ratio':>6} {'':16} {'GB/s':>8}")
            modes = modes_of(engines, config["num_hidden_layers"], args.saes, args.lens, args.sums)
            if args.modes:
                wanted = ["plain vLLM", *args.modes]
                modes = {m: h for m, h in modes.items() if any(fnmatchcase(m, w) for w in wanted)}
            rows += run(engines, work, modes, args.turns, reference)
            plain = engines.pop("plain")
            for engine in engines.values():
                engine.close()
        plain.close()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
