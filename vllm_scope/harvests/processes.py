"""Starts the processes of several engines on this host, one process for each engine.

Owns:  Processes.
Runs:  in the harvesting process. For each engine, one thread receives the engine's answers. Only
       `_serve` runs in the engine's process.
To:    several.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from vllm_scope.errors import ConfigError, ScopeError, reason_of
from vllm_scope.harvests.member import Member
from vllm_scope.harvests.pools import EngineLostError, Handle

#: The most calls that run in a member at one time.
MOST_CALLS = 8
#: The most seconds that `kill` waits for the end of killed processes.
MOST_KILL_S = 60.0


class Processes:
    """A Pool that starts processes on this host.

    Args:
        count: the number of engines.
        gpus: the number of GPUs of each engine.

    Raises:
        ConfigError: this host has GPUs, but fewer than the engines need.
    """

    def __init__(self, count: int, gpus: int) -> None:
        devices = _devices()
        if devices and count * gpus > len(devices):
            if gpus > len(devices):
                raise ConfigError(
                    f"each engine needs {gpus} GPUs, and this host has {len(devices)}; give "
                    "smaller parallel sizes in engine, or use ray on hosts with enough GPUs."
                )
            raise ConfigError(
                f"{count} engines need {count * gpus} GPUs, and this host has {len(devices)}; take "
                f"{len(devices) // gpus}, or several hosts with ray."
            )
        self._devices = [devices[i * gpus : (i + 1) * gpus] for i in range(count)]

    def start(self, number: int) -> Handle:
        return _Process(self._devices[number])

    def close(self) -> None:
        """Do nothing, because this pool holds no resources."""


def _devices() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or all GPUs if this variable is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


class _Process:
    def __init__(self, devices: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # The process is not a daemon, because vLLM starts processes, which Python forbids to a
        # daemon.
        self._process = context.Process(target=_serve, args=(theirs, devices))
        self._process.start()
        assert self._process.pid is not None
        self._pid = self._process.pid
        theirs.close()
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._gone: str | None = None
        threading.Thread(target=self._take, name="vllm-scope-answers", daemon=True).start()

    def call(self, method: str, *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._gone is not None:
                future.set_exception(EngineLostError(self._gone))
                return future
            number = next(self._numbers)
            self._futures[number] = future
            try:
                self._pipe.send((number, method, args))
            except OSError:
                pass  # the process has ended, which `_take` notices
            except BaseException:  # an argument cannot be pickled
                del self._futures[number]
                raise
        return future

    def kill(self) -> None:
        """Kill the process and the processes that it started. Then wait until all these processes
        have ended, but at most MOST_KILL_S seconds."""
        # A thread kills the processes. Ctrl-C ends the wait for the thread, but not the thread.
        thread = threading.Thread(target=self._kill, name="vllm-scope-kill")
        thread.start()
        thread.join()

    def _kill(self) -> None:
        if self._process.is_alive():
            # The member's guard also kills these processes, but perhaps too late for this method.
            with suppress(ProcessLookupError):  # the member does not lead a group yet
                os.killpg(self._pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        end = time.monotonic() + MOST_KILL_S
        while _runs(self._pid) and time.monotonic() < end:
            time.sleep(0.01)

    def _take(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, answer = self._pipe.recv()
                _settle(self._futures.pop(number), answer)
        self._process.join()
        with self._lock:
            self._gone = f"its process ended with code {self._process.exitcode}"
        for future in self._futures.values():
            future.set_exception(EngineLostError(self._gone))


def _runs(group: int) -> bool:
    """Whether a group of processes has a running process.

    A zombie does not count, because the parent of a zombie may never wait for the zombie. The first
    process of a container is often such a parent.
    """
    try:
        os.killpg(group, 0)
    except OSError:  # the group has no process
        return False
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # the process has ended meanwhile
            # The status is also `zombie` if the first thread has ended and other threads still run.
            if os.getpgid(process.pid) == group and (
                process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
            ):
                return True
    return False


def _settle(future: Future[Any], answer: bytes) -> None:
    try:
        value, error = pickle.loads(answer)
    except Exception as unread:
        error = ScopeError(f"an engine's answer cannot be read here ({reason_of(unread)}).")
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _serve(pipe: Connection, devices: list[str]) -> None:
    """Run a member. Answer calls until the pipe's other end is closed. Then end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harvesting process ends this process
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    member, lock = Member(), threading.Lock()

    def answer(number: int, method: str, args: tuple[object, ...]) -> None:
        value, error = None, None
        try:
            value = getattr(member, method)(*args)
        except ScopeError as raised:
            error = raised
        except BaseException as raised:
            error = ScopeError(f"{type(raised).__name__}: {raised}")
        try:
            body = pickle.dumps((value, error))
        except Exception as raised:
            what = f"{error or value!r} cannot be sent to another process: {raised}"
            body = pickle.dumps((None, ScopeError(what)))
        with lock, suppress(OSError):
            pipe.send((number, body))

    threads = ThreadPoolExecutor(MOST_CALLS)
    with suppress(EOFError, OSError):
        while True:
            threads.submit(answer, *pipe.recv())
    # `os._exit` ends this process even if the engine is busy. The guard then ends the engine's
    # processes.
    os._exit(0)
