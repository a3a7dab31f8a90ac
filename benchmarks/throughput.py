"""Tokens per second: plain vLLM, the plugin idle, and reading, in one run.

Both engines are alive at once and take turns, so that a machine whose speed drifts
slows both. A speed is the median of the turns; the ratio is to plain vLLM's turn beside it, the
median of these with the interval in which it lies with 95 % certainty.

    python -m benchmarks.throughput                    # toy world on a CPU
    python -m benchmarks.throughput --shape 8b --gpu   # random weights on a GPU
    python -m benchmarks.throughput --shape 8b --gpu --saes 4   # features of 1 and of 4 layers
    python -m benchmarks.throughput --shape 8b --gpu --lens 4   # likeliest tokens at 1 and 4 layers
    python -m benchmarks.throughput --shape 8b --gpu --sums     # sums of all layers on the device
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.engine import Workload, encode
from benchmarks.shapes import SHAPES, make_saes, make_shape
from benchmarks.turns import Ratio, order, ratio_of
from vllm_scope.batch.sums import bytes_of

ROOT = Path(__file__).parent.parent
CPU_WORK = [Workload("batch 1", 1, 16, 64), Workload("batch 16", 16, 16, 64)]
CPU_WORK += [Workload("prefill 16x200", 16, 200, 1)]
#: An engine that has not answered by then is ended.
MOST_SECONDS = 150.0
#: Engines that get one turn.
SLOW = ("lens", "huggingface")
GPU_WORK = [Workload("batch 1", 1, 128, 256), Workload("batch 64", 64, 128, 256)]
GPU_WORK += [Workload("batch 256", 256, 128, 256), Workload("prefill 64x1024", 64, 1024, 1)]
GPU_WORK += [Workload("prefill 1x512", 1, 512, 1)]
#: Prompts that begin alike: with a prefix cache most of their tokens are hits.
SHARED = [Workload("shared 256", 256, 96, 128, shared=768)]
SHARED += [Workload("first token", 16, 96, 1, shared=768)]


class Engine:
    """A child process that runs `benchmarks.engine`, or another module that speaks so."""

    def __init__(
        self,
        options: dict[str, Any],
        log: Path,
        plugin: bool = False,
        module: str = "benchmarks.engine",
        **environment: str,
    ) -> None:
        self._again = partial(Engine, options, log, plugin, module, **environment)
        environment = {**os.environ, "VLLM_SCOPE": "1" if plugin else "0", **environment}
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, env=environment, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self._tell(json.dumps(options))

    @cached_property
    def start_seconds(self) -> float:
        """Waits until the engine has started."""
        return float(self._answer()["start_seconds"])

    def ask(self, line: str) -> dict[str, Any]:
        """Raises RuntimeError where the engine has ended, or is ended as it does not answer."""
        assert self.start_seconds
        end = threading.Timer(MOST_SECONDS, self._kill)
        end.start()
        try:
            self._tell(line)
            return self._answer()
        except BrokenPipeError:
            raise RuntimeError("the engine has ended.") from None
        finally:
            end.cancel()

    def again(self) -> Engine:
        """A new one, in place of one that has ended."""
        self._kill()
        self._process.wait()
        return self._again()

    def _kill(self) -> None:
        """With the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for answer in self._process.stdout:
            if answer.startswith("RESULT"):
                found: dict[str, Any] = json.loads(answer[len("RESULT") :])
                return found
        raise RuntimeError("the engine ended:\n" + Path(self._log.name).read_text()[-3000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


def spread(num_layers: int, count: int) -> list[int]:
    return [round((i + 0.5) * num_layers / count - 0.5) for i in range(count)]


#: mode -> (engine, what it changes in the workload)
Modes = dict[str, tuple[str, dict[str, Any]]]


def modes_of(
    engines: dict[str, Engine], num_layers: int, saes: int = 0, lens: int = 0, sums: bool = False
) -> Modes:
    """The rows of the table, as far as there are engines for them.

    Args:
        saes: layers that have an SAE.
        lens: layers to which a LensTopK is applied; the last layer is among them.
        sums: whether sums of all layers are made.
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
    found["Hugging Face"] = ("huggingface", {})
    found["Hugging Face all layers"] = ("huggingface", {"layers": everything})
    return {mode: how for mode, how in found.items() if how[0] in engines}


def run(
    engines: dict[str, Engine], work: list[Workload], modes: Modes, turns: int
) -> list[dict[str, Any]]:
    rows = []
    salt = 0
    dead: set[str] = set()
    for base in work:
        found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
        for turn in range(turns + 1):
            for mode in order(modes, turn):
                engine, change = modes[mode]
                if (turn > 1 and engine in SLOW) or mode in dead:
                    continue  # far from the others: one turn tells enough
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
                rows.append(row)
                print(format_row(row), flush=True)
    return rows


def figures(answers: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a mode's turns, and plain vLLM's; of a mode that got fewer, the first ones."""
    speeds = [a["tokens"] / a["seconds"] for a in answers]
    ratio = ratio_of(speeds, [a["tokens"] / a["seconds"] for a in plain[: len(answers)]])
    found = {"tokens_per_s": statistics.median(speeds), "turns": len(answers)}
    found |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
    if any(a["cached"] for a in plain):
        cached = [sum(a["cached"] for a in each) for each in (answers, plain[: len(answers)])]
        found["hits"] = cached[0] / cached[1]
    if "gigabytes" in answers[0]:
        found["gb_per_s"] = statistics.median(a["gigabytes"] / a["seconds"] for a in answers)
    return found


def start(name: str, options: dict[str, Any], logs: Path) -> Engine:
    """One of the engines beside plain vLLM."""
    log, eager = logs / f"{name}.log", options | {"enforce_eager": True}
    if name == "scope":
        return Engine(options, log, plugin=True)
    if name == "eager":
        return Engine(eager, log)
    if name == "huggingface":
        return Engine(options, log, module="benchmarks.huggingface")
    path = f"{os.environ['VLLM_LENS_PATH']}:{os.environ.get('PYTHONPATH', '')}"
    # It knows Model Runner V1 alone.
    return Engine(eager, log, VLLM_USE_V2_MODEL_RUNNER="0", PYTHONPATH=path)


def format_row(row: dict[str, Any]) -> str:
    delivered = f"{row['gb_per_s']:8.3f}" if "gb_per_s" in row else " " * 8
    ratio = Ratio(row["ratio"], row["low"], row["high"])
    if "hits" in row:
        delivered += f"  {row['hits']:.3f} of plain's prefix hits"
    return f"{row['work']:16} {row['mode']:22} {row['tokens_per_s']:12,.0f} {ratio} {delivered}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--model", default=str(ROOT / "toyworld" / "model"))
    parser.add_argument("--gpu", action="store_true", help="the GPU's workloads")
    parser.add_argument(
        "--beside", nargs="*", default=[], choices=["eager", "lens", "huggingface"],
        help="compare with these too; vllm-lens must be importable under VLLM_LENS_PATH",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--options", type=json.loads, default={}, help="more LLM arguments, JSON")
    parser.add_argument("--saes", type=int, default=0, help="layers that get an SAE")
    parser.add_argument("--sae-width", type=int, default=1 << 16, help="features of an SAE")
    parser.add_argument("--lens", type=int, default=0, help="layers with the 10 likeliest tokens")
    parser.add_argument("--sums", action="store_true", help="sums of all layers on the device")
    parser.add_argument("--only", nargs="*", help="only workloads of these names")
    parser.add_argument("--modes", nargs="*", help="only these rows")
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
        if args.gpu:
            # Three engines are alive at once.
            options.setdefault("gpu_memory_utilization", 0.28)
        logs = Path(os.environ.get("OUT", folder))
        config = json.loads((model / "config.json").read_text())
        config |= options.get("hf_overrides", {})
        if args.saes:
            layers = spread(config["num_hidden_layers"], args.saes)
            size = config["hidden_size"]
            saes = make_saes(Path(folder) / "saes", layers, size, args.sae_width)
            most_mib = 2 * args.saes * args.sae_width * (size + 8) / 2**20
            scope = options.setdefault("additional_config", {}).setdefault("scope", {})
            scope |= {"saes": saes, "saes_mib": max(4096, 2 * most_mib)}
        if args.sums:
            # Of each layer float64 [width, width], and the rows that wait for their products.
            most_mib = config["num_hidden_layers"] * bytes_of(config["hidden_size"], 4, True, False)
            scope = options.setdefault("additional_config", {}).setdefault("scope", {})
            scope["moments_mib"] = 1.1 * most_mib / 2**20
        work = GPU_WORK if args.gpu else CPU_WORK
        work = work + SHARED if options["enable_prefix_caching"] else work
        work = [w for w in work if not args.only or w.name in args.only]
        rows: list[dict[str, Any]] = []
        plain = Engine(options, logs / "plain.log")
        # Engines that start at once would mistake each other's memory for their own.
        together = "kv_cache_memory_bytes" in options
        if not together:
            assert plain.start_seconds
        # The others come after one another, as far as they would crowd the device.
        for names in (["scope", "eager"], ["lens", "huggingface"]):
            others = {}
            for name in names:
                if name == "scope" or name in args.beside:
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
                modes = {m: how for m, how in modes.items() if m in ("plain vLLM", *args.modes)}
            rows += run(engines, work, modes, args.turns)
            plain = engines.pop("plain")
            for engine in engines.values():
                engine.close()
        plain.close()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
