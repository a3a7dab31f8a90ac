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

from vllm_scope.files import FileOptions, RequestRecord, open_writer
from vllm_scope.files import open as open_capture

HIDDEN_SIZE = 4096
LAYERS = (8, 16, 24)
PROMPT_TOKENS = 1024
BLOCK_TOKENS = 512


def write_with_dd(path: Path, num_bytes: int, source: Path) -> float:
    """Seconds that dd takes, with data from memory."""
    started = time.perf_counter()
    subprocess.run(
        ["dd", f"if={source}", f"of={path}", "bs=16M", f"count={num_bytes >> 24}"]
        + ["conv=fdatasync", "status=none"],
        check=True,
    )
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def write_rows(folder: Path, num_bytes: int) -> tuple[float, int]:
    """Seconds that the writer takes from first row to synced file, and its bytes."""
    block = torch.randn(BLOCK_TOKENS, HIDDEN_SIZE).bfloat16()
    per_request = len(LAYERS) * PROMPT_TOKENS * HIDDEN_SIZE * 2
    options = FileOptions.parse({"root": str(folder), "fsync": True})
    started = time.perf_counter()
    with open_writer(options) as writer:
        for number in range(num_bytes // per_request):
            request = writer.begin()
            for first in range(0, PROMPT_TOKENS, BLOCK_TOKENS):
                positions = np.arange(first, first + BLOCK_TOKENS)
                for layer in LAYERS:
                    request.write("resid_post", layer, positions, block)
            num_rows = len(LAYERS) * PROMPT_TOKENS
            record = RequestRecord(
                str(number), range(PROMPT_TOKENS), [], "benchmark", num_rows, num_rows
            )
            request.finish(record)
    seconds = time.perf_counter() - started
    return seconds, sum(path.stat().st_size for path in folder.iterdir())


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
    parser.add_argument("--gib", type=float, default=2.0, help="bytes per turn")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * (1 << 30))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shards, plain = arguments.folder / "shards", arguments.folder / "dd"
    ratios: list[float] = []
    for turn in range(arguments.turns):
        speeds: dict[str, float] = {}
        # Whoever comes second may find the disk tired: take turns at that, too.
        for who in ("dd", "rows") if turn % 2 == 0 else ("rows", "dd"):
            os.sync()
            if who == "dd":
                seconds = write_with_dd(plain, num_bytes, Path("/dev/zero"))
                speeds[who] = (num_bytes >> 24 << 24) / seconds
            else:
                shutil.rmtree(shards, ignore_errors=True)
                os.sync()
                seconds, written = write_rows(shards, num_bytes)
                speeds[who] = written / seconds
        ratios.append(speeds["rows"] / speeds["dd"])
        print(
            f"turn {turn}: dd {speeds['dd'] / 1e6:.0f} MB/s, rows {speeds['rows'] / 1e6:.0f} MB/s, "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} of {len(ratios)} turns")
    for shuffle in (False, True):
        speed = read_rows(shards, shuffle)
        print(f"reading {'shuffled' if shuffle else 'in order'}: {speed / 1e9:.1f} GB/s")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
