"""The speed of writing captured rows to the disk, compared with `dd` in the same run.

    python -m benchmarks.disk --folder .bench

Three kinds of programs write to the same file system, in one run. Each program syncs its files. The
first is `dd` (bs=16M conv=fdatasync). The second is the writer of each layout alone, in turns with
dd. The third is an engine that serves the toy world and writes every layer of every token to
sharded files. The writers get rows as from an engine: in blocks of one step, whose memory is used
again after the call. The ratio of a writer to dd is the median of the turns' ratios: on a shared
machine, the disk's speed changes more from turn to turn than the speeds of writers differ. The
engine has no turns with dd.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.turns import ratio_of
from vllm_scope.files import FileOptions, RequestRecord, Writer, open_writer
from vllm_scope.files import open as open_capture

HIDDEN_SIZE = 4096
LAYERS = (8, 16, 24)
PROMPT_TOKENS = 1024
BLOCK_TOKENS = 512
REQUEST_BYTES = len(LAYERS) * PROMPT_TOKENS * HIDDEN_SIZE * 2
LAYOUTS = ("sharded", "packed", "per_request", "npz")
TOYWORLD = Path(__file__).parent.parent / "toyworld" / "model"
#: The engine's number of requests, and the number of tokens in each prompt.
ENGINE_REQUESTS, ENGINE_TOKENS = 400, 500


def write_with_dd(path: Path, num_bytes: int) -> float:
    """Seconds that dd takes."""
    started = time.perf_counter()
    command = f"dd if=/dev/zero of={path} bs=16M count={num_bytes >> 24} conv=fdatasync"
    subprocess.run([*command.split(), "status=none"], check=True)
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def write_rows(writer: Writer, num_bytes: int) -> float:
    """Seconds that the writer takes from the first row to synced files."""
    block = torch.randn(BLOCK_TOKENS, HIDDEN_SIZE).bfloat16()
    started = time.perf_counter()
    for number in range(num_bytes // REQUEST_BYTES):
        request = writer.begin()
        for first in range(0, PROMPT_TOKENS, BLOCK_TOKENS):
            positions = np.arange(first, first + BLOCK_TOKENS)
            for layer in LAYERS:
                request.write("resid_post", layer, positions, block)
        num_rows = len(LAYERS) * PROMPT_TOKENS
        request.finish(
            RequestRecord(str(number), range(PROMPT_TOKENS), [], "benchmark", num_rows, num_rows)
        )
    writer.flush()
    return time.perf_counter() - started


def data_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.npz")]


def read_rows(folder: Path, shuffle: bool) -> float:
    """Bytes per second of reading one layer from the page cache. Each row is read."""
    capture = open_capture(folder)
    started = time.perf_counter()
    num_bytes = 0
    for rows in capture.iter_rows("resid_post", LAYERS[0], 4096, shuffle=shuffle):
        rows.view(torch.int16).amax()
        num_bytes += rows.nbytes
    return num_bytes / (time.perf_counter() - started)


def writers_alone(folder: Path, num_bytes: int, turns: int) -> float:
    """Print speeds, ratios and file counts. Returns dd's median speed, in bytes per second."""
    writers = {
        layout: open_writer(
            FileOptions.parse({"root": str(folder / layout), "layout": layout, "fsync": True})
        )
        for layout in LAYOUTS
    }
    everyone = ["dd", *LAYOUTS]
    found: dict[str, list[float]] = {who: [] for who in everyone}
    num_files: dict[str, int] = {}
    # The first turn is not counted, because writers and memory are used for the first time.
    for turn in range(turns + 1):
        # The order rotates, because the disk can be slower for a later writer.
        for who in everyone[turn % len(everyone) :] + everyone[: turn % len(everyone)]:
            os.sync()
            if who == "dd":
                found[who].append((num_bytes >> 24 << 24) / write_with_dd(folder / "dd", num_bytes))
                continue
            seconds = write_rows(writers[who], num_bytes)
            written = data_files(folder / who)
            num_files[who] = len(written)
            found[who].append(sum(path.stat().st_size for path in written) / seconds)
            for path in (folder / who).glob("*"):
                path.unlink()
    counted = {who: speeds[1:] for who, speeds in found.items()}
    dd = statistics.median(counted["dd"])
    print(f"{turns} turns of {num_bytes >> 20} MiB, medians; dd {dd / 1e6:.0f} MB/s", flush=True)
    for layout in LAYOUTS:
        speeds = counted[layout]
        ratio = ratio_of(speeds, counted["dd"])
        print(
            f"{layout}: {statistics.median(speeds) / 1e6:.0f} MB/s, ratio of a turn "
            f"{ratio}, {num_files[layout]} files",
            flush=True,
        )
    write_rows(writers["sharded"], num_bytes)
    for writer in writers.values():
        writer.close()
    for shuffle in (False, True):
        # The best pass, because the first pass also allocates memory.
        speed = max(read_rows(folder / "sharded", shuffle) for _ in range(3))
        print(f"reading {'shuffled' if shuffle else 'in order'}: {speed / 1e9:.1f} GB/s")
    return dd


def through_an_engine(folder: Path, dd: float) -> None:
    """Serve the toy world's model, and print speeds. Each turn has three runs. In the first run,
    the rows of every layer and token go to files. In the second run, the caller gets these rows. In
    the third run, no rows are read."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    from vllm_scope import Read, scope

    sink: dict[str, Any] = {"root": str(folder / "engine"), "fsync": True}
    llm = LLM(
        str(TOYWORLD), max_model_len=512, skip_tokenizer_init=True, enable_prefix_caching=False,
        gpu_memory_utilization=0.3, additional_config={"scope": {"sinks": {"filesystem": sink}}},
    )  # fmt: skip
    prompts: list[Any] = [
        {"prompt_token_ids": [(7 * i + j) % 1000 + 10 for j in range(ENGINE_TOKENS)]}
        for i in range(ENGINE_REQUESTS)
    ]

    def serve(to: str | None) -> float:
        actions = [Read(site, to=to) for site in ("resid_post", "embed")] if to else []
        params = SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, detokenize=False,
            extra_args=scope(*actions) if actions else None,
        )  # fmt: skip
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        for output in outputs if to else ():
            result: Any = output.scope
            assert result.status == "complete", result.error
        return seconds

    serve("filesystem")
    root = folder / "engine"
    speeds: dict[str, list[float]] = {"filesystem": [], "memory": [], "": []}
    num_bytes = num_files = 0
    for _ in range(3):
        for path in root.glob("shard-*"):
            path.unlink()
        for to, took in speeds.items():
            took.append(serve(to or None))
        written = data_files(root)
        num_files, num_bytes = len(written), sum(path.stat().st_size for path in written)
    seconds = {to: statistics.median(took) for to, took in speeds.items()}
    tokens = ENGINE_REQUESTS * ENGINE_TOKENS
    speed = num_bytes / seconds["filesystem"]
    print(
        f"engine: {tokens} tokens, {num_bytes / 1e6:.0f} MB in {num_files} files: "
        f"{speed / 1e6:.0f} MB/s, {speed / dd:.2f} of dd's; tokens per second "
        f"{tokens / seconds['']:.0f} plain, {tokens / seconds['memory']:.0f} to memory, "
        f"{tokens / seconds['filesystem']:.0f} to files"
    )
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path(".bench"), help="the files are below this folder"
    )
    parser.add_argument("--gib", type=float, default=0.5, help="GiB of a writer in a turn")
    parser.add_argument("--turns", type=int, default=24)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        dd = writers_alone(Path(made), int(arguments.gib * (1 << 30)), arguments.turns)
        through_an_engine(Path(made), dd)


if __name__ == "__main__":
    main()
