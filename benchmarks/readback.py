"""Rows from shards in the page cache, in random order, compared with a copy of memory.

    python -m benchmarks.readback

Writes shards of random rows. Then three modes take turns: a copy of 256 MiB within memory that is
used again, `iter_rows` shuffled, and RowDataset. The first turn is not counted, because it fills
the page cache. With --cold, the shards are dropped from the page cache before each mode of a turn.
Prints GB per second, and in brackets GB per second of CPU time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import vllm_scope
from benchmarks.turns import order
from vllm_scope.files import FileOptions, RequestRecord, RowDataset, open_writer

STREAM = ("resid_post", 0)
#: The number of tokens in a request.
LENGTH = 1024
COPIED_BYTES = 256 << 20


def write(root: Path, num_bytes: int, width: int, dtype: torch.dtype, codec: str) -> int:
    """Write shards of random rows. Returns the number of rows."""
    rows = torch.randn(LENGTH, width).to(dtype)
    count = num_bytes // rows.nbytes
    positions = torch.arange(LENGTH).numpy()
    options = {"root": str(root), "layout": "sharded", "codec": codec}
    with open_writer(FileOptions.parse(options)) as writer:
        for number in range(count):
            request = writer.begin()
            request.write(*STREAM, positions, rows)
            tokens = [number] * LENGTH
            request.finish(RequestRecord(str(number), tokens, (), "random", LENGTH, LENGTH))
        writer.flush()
    return count * LENGTH


def copied() -> Callable[[], int]:
    """A function that copies memory and returns the number of copied bytes."""
    source, into = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))

    def copy() -> int:
        for _ in range(8):
            into.copy_(source)
        return 8 * COPIED_BYTES

    return copy


def read(batches: Iterable[Tensor]) -> int:
    """Read all batches, and return their number of bytes."""
    return sum(batch.nbytes for batch in batches)


def drop(root: Path) -> None:
    """Drop the shards from the page cache."""
    os.sync()
    for shard in root.glob("shard-*"):
        with open(shard, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(root: Path, batch_size: int, turns: int, cold: bool) -> dict[str, tuple[float, float]]:
    """Way of reading -> GB per second, and GB per CPU second of all threads: medians of turns.

    If other programs use the cores, the second figure is more reliable.
    """
    capture, dataset = vllm_scope.open(root), RowDataset(root, *STREAM, batch_size)
    ways: dict[str, Callable[[], int]] = {
        "memcpy": copied(),
        "shuffled": lambda: read(capture.iter_rows(*STREAM, batch_size, shuffle=True)),
        "RowDataset": lambda: read(dataset),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name in order(ways, turn):
            if cold:
                drop(root)
            started = time.perf_counter(), time.process_time()
            num_bytes = ways[name]() / 1e9
            seconds = time.perf_counter() - started[0], time.process_time() - started[1]
            if turn:  # the first turn fills the page cache
                found[name].append((num_bytes / seconds[0], num_bytes / seconds[1]))
    return {
        name: (median(wall for wall, _ in rates), median(cpu for _, cpu in rates))
        for name, rates in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    chosen = parser.parse_args(arguments)
    for width, dtype, codec in (
        (4096, torch.bfloat16, "none"), (4096, torch.float32, "none"),
        (512, torch.bfloat16, "none"), (4096, torch.bfloat16, "int8"),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = int(chosen.gigabytes * 1e9)
            num_rows = write(Path(folder), num_bytes, width, dtype, codec)
            rates = measure(Path(folder), chosen.batch_size, chosen.turns, chosen.cold)
            name = str(dtype).removeprefix("torch.")
            said = ", ".join(f"{way} {wall:.2f} ({cpu:.2f})" for way, (wall, cpu) in rates.items())
            print(f"{num_rows} rows of {width} {name}, codec {codec}: {said}", flush=True)


if __name__ == "__main__":
    main()
