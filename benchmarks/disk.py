"""How fast captured rows reach the disk, beside what `dd` writes in the same run.

    python -m benchmarks.disk --folder .bench

Both write as many bytes to the same file system, in turns, and sync the same way:
`dd` with bs=16M conv=fdatasync, the sharded writer with fsync. Rows are handed over as an
engine would, in blocks of one step that are reused right after. The figure is the median
of the turns' ratios: the disk of a shared machine drifts by more than the difference.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from vllm_scope.files import FileOptions, RequestRecord, Writer, open_writer
from vllm_scope.files import open as open_capture

HIDDEN_SIZE = 4096
LAYERS = (8, 16, 24)
PROMPT_TOKENS = 1024
BLOCK_TOKENS = 512
REQUEST_BYTES = len(LAYERS) * PROMPT_TOKENS * HIDDEN_SIZE * 2


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


def read_rows(folder: Path, shuffle: bool) -> float:
    """Bytes per second of one layer, from the page cache, each row touched."""
    capture = open_capture(folder)
    started = time.perf_counter()
    num_bytes = 0
    for rows in capture.iter_rows("resid_post", LAYERS[0], 4096, shuffle=shuffle):
        rows.view(torch.int16).amax()
        num_bytes += rows.nbytes
    return num_bytes / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--gib", type=float, default=0.5, help="bytes per turn")
    parser.add_argument("--turns", type=int, default=24)
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * (1 << 30))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shards, plain = arguments.folder / "shards", arguments.folder / "dd"
    writer = open_writer(FileOptions.parse({"root": str(shards), "fsync": True}))
    found: dict[str, list[float]] = {"dd": [], "rows": []}
    # The first turn is not counted: it finds a writer, and memory, that are new.
    for turn in range(arguments.turns + 1):
        speeds: dict[str, float] = {}
        # Whoever comes second may find the disk tired: take turns at that, too.
        for who in ("dd", "rows") if turn % 2 == 0 else ("rows", "dd"):
            for path in shards.glob("shard-*"):
                path.unlink()
            os.sync()
            if who == "dd":
                speeds[who] = (num_bytes >> 24 << 24) / write_with_dd(plain, num_bytes)
            else:
                seconds = write_rows(writer, num_bytes)
                written = sum(path.stat().st_size for path in shards.glob("shard-*"))
                speeds[who] = written / seconds
        for who, speed in speeds.items():
            found[who].append(speed)
        print(
            f"turn {turn}: dd {speeds['dd'] / 1e6:.0f} MB/s, rows {speeds['rows'] / 1e6:.0f} MB/s",
            flush=True,
        )
    counted = {who: speeds[1:] for who, speeds in found.items()}
    ratios = [rows / dd for rows, dd in zip(counted["rows"], counted["dd"], strict=True)]
    print(
        f"{arguments.turns} turns, medians: dd {statistics.median(counted['dd']) / 1e6:.0f} MB/s, "
        f"rows {statistics.median(counted['rows']) / 1e6:.0f} MB/s, "
        f"ratio of a turn {statistics.median(ratios):.2f}"
    )
    write_rows(writer, num_bytes)
    writer.close()
    for shuffle in (False, True):
        # The best: the first pass also pays for memory that nobody has touched yet.
        speed = max(read_rows(shards, shuffle) for _ in range(3))
        print(f"reading {'shuffled' if shuffle else 'in order'}: {speed / 1e9:.1f} GB/s")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
