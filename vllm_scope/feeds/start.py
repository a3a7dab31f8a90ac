"""Checks the arguments of a feed, and starts the process or thread that runs the feed's engine.

Owns:  `start_feed` (`vllm_scope.stream` calls this function).
To:    feeder (a process, or a thread if the caller gave an LLM), row_feed.

If the caller gives the name of a model, the engine and the trainer run in two processes. In one
process they would share a GIL, and would slow each other down. The engine's process is started as a
command. multiprocessing is not used, because it needs `if __name__ == "__main__"` in the caller's
script.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import asdict

from vllm_scope.errors import SpecError, shown
from vllm_scope.feeds.feeder import run
from vllm_scope.feeds.memory import ORDERED
from vllm_scope.feeds.messages import Channel, Order, Settings
from vllm_scope.feeds.row_feed import Feeder, RowFeed
from vllm_scope.harvests.start import check_reads
from vllm_scope.request.actions import Read
from vllm_scope.request.spec import scope

#: The first arguments with which Python starts the engine's process. The three arguments of
#: feeder.py follow.
COMMAND = ("-m", "vllm_scope.feeds.feeder")


def start_feed(
    dataset: object,
    reads: Sequence[Read],
    model: object,
    settings: Settings,
    engine: Mapping[str, Any],
) -> RowFeed:
    """Start a feed. The docstring of `vllm_scope.stream` explains the arguments."""
    check_reads(reads, settings.long)
    _check(reads, settings, engine)
    order = _encoded(dataset, reads, model, settings, engine) if isinstance(model, str) else b""
    ours, theirs = Channel.pair()
    memory = os.memfd_create("vllm-scope-feed", os.MFD_CLOEXEC)
    feeder: Feeder
    if isinstance(model, str):
        with theirs:
            feeder = _process(order, theirs.fileno(), memory)
    else:
        feeder = threading.Thread(
            target=_on_thread, args=(dataset, reads, model, engine, settings, theirs, memory),
            name="vllm-scope-feed", daemon=True,
        )  # fmt: skip
        feeder.start()
    return RowFeed(Channel(ours), memory, settings, feeder)


def _check(reads: Sequence[Read], settings: Settings, engine: object) -> None:
    """Raise SpecError if an argument is wrong, or if a feed cannot work on this processor."""
    for name, value, least in (
        ("batch_size", settings.batch_size, 1),
        ("buffer_rows", settings.num_slots, 2 * settings.batch_size),
        ("seed", settings.seed, 0),
    ):
        if type(value) is not int or value < least:
            why = ", twice the batch_size" if name == "buffer_rows" else ""
            raise SpecError(
                f"{name} is {shown(value)}; it must be an int of at least {least}{why}."
            )
    given: tuple[tuple[str, object, tuple[type, ...], str], ...] = (
        ("column", settings.column, (str, type(None)), "a column's name or None"),
        ("split", settings.split, (str,), "a split's name"),
        ("config", settings.config, (str, type(None)), "a configuration's name or None"),
        ("context", settings.context, (int, type(None)), "an int of at least 1 or None"),
        ("engine", engine, (Mapping,), "a dict of arguments of LLM"),
    )
    for name, one, kinds, told in given:
        if not isinstance(one, kinds) or isinstance(one, bool):
            raise SpecError(f"{name} is {shown(one)}; it must be {told}.")
    if platform.machine() not in ORDERED:
        raise SpecError(
            f"this processor is {platform.machine()}; a feed's memory needs one of "
            f"{', '.join(ORDERED)}, so harvest to files, and read the files with RowDataset."
        )
    if len({repr(read.tokens.to_json()) for read in reads}) > 1:
        raise SpecError(
            "the reads name different tokens; a batch has the rows of the same tokens at all "
            "places, so give each read the same tokens."
        )


def _encoded(
    dataset: object,
    reads: Sequence[Read],
    model: str,
    settings: Settings,
    engine: Mapping[str, Any],
) -> bytes:
    if isinstance(dataset, os.PathLike):
        dataset = os.fspath(dataset)
    if not isinstance(dataset, str | list | tuple):
        raise SpecError(
            f"the dataset is {shown(dataset)}; another process reads it, so give a path, a name or "
            "a list. With an LLM as the model it may be any data set."
        )
    text = scope(*reads)["scope"]
    try:
        found = dataset if isinstance(dataset, str) else list(dataset)
        order = Order(found, text, model, dict(engine), settings)
        # `dumps` raises for values that JSON does not support. `dumps` accepts a text that contains
        # half of a surrogate pair. The feeder skips such a text, as a harvest does.
        return json.dumps(asdict(order) | {"settings": asdict(settings)}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"the dataset or the engine's arguments are no JSON ({error}); they go to another "
            "process. Give texts, token ids, and names such as 'bfloat16'."
        ) from None


def _process(order: bytes, end: int, memory: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, *COMMAND, str(end), str(memory), str(os.getpid())],
        stdin=subprocess.PIPE, pass_fds=(end, memory), start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as file:  # RowFeed reports a dead process
        file.write(order)
    return process


def _on_thread(
    dataset: object,
    reads: Sequence[Read],
    model: object,
    engine: Mapping[str, Any],
    settings: Settings,
    end: Any,
    memory: int,
) -> None:
    channel = Channel(end)
    with suppress(EOFError):  # the feed was closed
        run(dataset, reads, model, engine, settings, channel, memory, threading.Event())
    channel.close()
