"""Memory of results: used again when nobody has it any more, and never before."""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_scope import ConfigError
from vllm_scope.results.allocator import (
    LARGE_BYTES,
    LEAST_BYTES,
    CachingAllocator,
    memory_bytes,
    reuse_bytes,
    size_class,
)

MIB = 1 << 20


@given(st.integers(LEAST_BYTES, 1 << 36))
def test_a_size_class_wastes_at_most_a_quarter_or_a_step(num_bytes):
    size = size_class(num_bytes)
    step = 64 << 10 if num_bytes < LARGE_BYTES else 2 * MIB
    assert num_bytes <= size <= max(1.25 * num_bytes, num_bytes + step)
    assert size_class(size) == size


@pytest.mark.parametrize("num_bytes", [LEAST_BYTES, MIB, LARGE_BYTES, 9 * MIB])
def test_memory_is_used_again_once_its_array_is_gone(num_bytes):
    allocator = CachingAllocator(256 * MIB)
    first = allocator.empty(num_bytes)
    at = first.ctypes.data
    second = allocator.empty(num_bytes)
    assert second.ctypes.data != at
    del first
    assert allocator.empty(num_bytes).ctypes.data == at
    assert allocator.stats.reused == size_class(num_bytes)
    assert allocator.stats.new == 2 * size_class(num_bytes)


#: Every way to keep the memory of a tensor of rows, [4, 2, n], without the tensor.
HOLDERS = {
    "a-slice": lambda rows: rows[1:, 1],
    "another-dtype": lambda rows: rows.view(torch.bfloat16)[:, 0],
    "rows-one-by-one": lambda rows: rows.unbind(1)[1],
    "an-array": lambda rows: rows[2].numpy(),
    "an-array-s-view": lambda rows: rows.numpy()[::2].view(np.int16).T,
    "a-buffer": lambda rows: memoryview(rows.numpy()).cast("B"),
    "its-storage": lambda rows: rows.untyped_storage(),
    "dlpack": lambda rows: torch.from_dlpack(rows)[0],
    "an-alias": lambda rows: rows.detach().expand(2, 4, 2, -1)[1],
    "a-frame": lambda rows: (one for one in rows),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_any_view_keeps_the_memory_and_the_last_one_gives_it_back(hold):
    allocator = CachingAllocator(256 * MIB)
    rows = torch.from_numpy(allocator.empty(4, 2, MIB))
    held = hold(rows)
    del rows
    gc.collect()
    assert allocator.stats.free == 0
    del held
    gc.collect()
    assert allocator.stats.lent == 0
    assert allocator.stats.free == 8 * MIB


@settings(max_examples=8)
@given(st.integers(0, 1 << 30))
def test_no_array_changes_after_it_was_given_out(seed):
    """Random sizes and lifetimes, on several threads; every holder checks what it wrote, through
    whatever view it kept, after others have written theirs."""
    allocator = CachingAllocator(24 * MIB)

    def caller(number: int) -> None:
        rng = random.Random(seed + number)
        held: list[tuple[object, int]] = []
        for i in range(12):
            num_bytes = rng.choice([1000, LEAST_BYTES, MIB, 3 * MIB, LARGE_BYTES, 7 * MIB])
            value = (16 * number + i) % 256
            rows = allocator.empty(num_bytes // 1000, 10, 100)
            rows[...] = value
            hold = rng.choice(
                [lambda r: r[1:], lambda r: r.numpy()[:, 3], lambda r: r.untyped_storage(),
                 lambda r: pickle.loads(pickle.dumps(r[0])), lambda r: r.add_(0)]
            )  # fmt: skip
            held.append((hold(torch.from_numpy(rows)), value))
            del rows
            if rng.random() < 0.3:  # in place, by its caller
                old, value = held.pop(rng.randrange(len(held)))
                whole = torch.tensor(old, dtype=torch.uint8) if not _writable(old) else old
                _fill(whole, (value + 1) % 256)
                held.append((whole, (value + 1) % 256))
            if rng.random() < 0.6:
                held.pop(rng.randrange(len(held)))
            assert all(_only(one, value) for one, value in held)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(caller, range(4)))
    gc.collect()
    assert allocator.stats.lent == 0
    assert allocator.stats.free <= 24 * MIB


def _writable(held: object) -> bool:
    return isinstance(held, torch.Tensor | np.ndarray | torch.UntypedStorage)


def _fill(held, value: int) -> None:
    held.fill_(value) if not isinstance(held, np.ndarray) else held.fill(value)


def _only(held, value: int) -> bool:
    if isinstance(held, torch.UntypedStorage):
        held = torch.tensor([], dtype=torch.uint8).set_(held)
    return bool((np.asarray(held) == value).all())


def test_free_memory_above_the_bound_goes_back_to_the_system():
    allocator = CachingAllocator(64 * MIB)
    before = _mapped_bytes()
    held = [allocator.empty(16 * MIB) for _ in range(20)]
    for one in held:
        one[:] = 1
    del one
    assert allocator.stats.lent == 320 * MIB
    held.clear()
    stats = allocator.stats
    assert stats.lent == 0
    assert 32 * MIB <= stats.free <= 64 * MIB
    assert _mapped_bytes() - before <= 80 * MIB


def test_the_kernel_may_take_the_pages_of_large_free_segments():
    allocator = CachingAllocator(256 * MIB)
    rows = allocator.empty(64 * MIB)
    rows[:] = 1
    before = _lazily_free()
    del rows
    assert _lazily_free() - before >= 32 * MIB


def test_small_segments_have_a_bound_of_their_own():
    allocator = CachingAllocator(16 * MIB)
    held = [allocator.empty(MIB) for _ in range(16)]
    held.clear()
    assert allocator.stats.free == 4 * MIB


def test_the_least_recently_returned_goes_first():
    allocator = CachingAllocator(60 * MIB)
    old, new = allocator.empty(16 * MIB), allocator.empty(32 * MIB)
    at = new.ctypes.data
    del old, new
    assert allocator.stats.free == 32 * MIB
    assert allocator.empty(32 * MIB).ctypes.data == at


def test_zero_switches_it_off():
    allocator = CachingAllocator(0)
    assert allocator.empty(8 * MIB).base is None
    assert allocator.stats == (0, 0, 0, 0)


def test_if_nothing_can_be_mapped_the_memory_is_numpy_s(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("vllm_scope.results.allocator.mmap.mmap", full)
    rows = CachingAllocator(64 * MIB).empty(3, 4 * MIB)
    assert rows.shape == (3, 4 * MIB)
    assert rows.base is None


def test_a_caller_who_keeps_everything_is_told_once(caplog, monkeypatch):
    allocator, other = CachingAllocator(8 * MIB), []
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_scope"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        held = [allocator.empty(LEAST_BYTES) for _ in range(10_000)]
        # Another caller, who drops results, has the same memory each time.
        for _ in range(3):
            rows = allocator.empty(LARGE_BYTES)
            other.append(rows.ctypes.data)
            del rows
    (told,) = [one.getMessage() for one in caplog.records if "keeps" in one.getMessage()]
    assert "VLLM_SCOPE_REUSE_MIB" in told
    assert len(set(other)) == 1
    assert len({rows.ctypes.data for rows in held}) == 10_000


def test_what_is_reused_and_what_is_new_is_counted():
    from prometheus_client import REGISTRY

    def counted(memory):
        return REGISTRY.get_sample_value("vllm_scope_result_bytes_total", {"memory": memory}) or 0

    allocator, before = CachingAllocator(64 * MIB), [counted("new"), counted("reused")]
    for _ in range(3):
        allocator.empty(8 * MIB)
    assert counted("new") - before[0] == 8 * MIB
    assert counted("reused") - before[1] == 16 * MIB


def test_memory_that_cannot_be_counted_comes_back(monkeypatch):
    def failing(*_):
        raise ValueError("Duplicated timeseries")

    allocator = CachingAllocator(64 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr("vllm_scope.results.allocator.count_memory", failing)
        with pytest.raises(ValueError, match="Duplicated"):
            allocator.empty(8 * MIB)
    gc.collect()  # the error held it
    assert allocator.stats.lent == 0
    assert allocator.stats.free == 8 * MIB


def test_a_fork_has_its_own_copy_and_keeps_nothing():
    allocator = CachingAllocator(64 * MIB)
    kept, dropped = allocator.empty(8 * MIB), allocator.empty(8 * MIB)
    kept[:], dropped[:] = 1, 2
    # As if another thread had it when the fork is made: the child must not wait for it.
    with allocator._lock:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            del dropped
            os.write(write, bytes([kept.min(), kept.max(), len(allocator._returned)]))
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 3) == bytes([1, 1, 0])
    os.close(read)
    os.close(write)
    del dropped
    again = allocator.empty(8 * MIB)
    again[:] = 3
    assert (kept == 1).all()


def test_memory_that_comes_back_during_a_call_waits_for_its_end():
    """The garbage collector may end a view while this very thread has the lock."""
    allocator = CachingAllocator(64 * MIB)
    rows = allocator.empty(8 * MIB)
    with allocator._lock:
        del rows
    assert allocator.stats.free == 8 * MIB


def test_a_result_of_another_thread_comes_back_too():
    allocator = CachingAllocator(64 * MIB)
    held = [allocator.empty(8 * MIB)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert allocator.stats.free == 8 * MIB


def test_torch_saves_no_more_than_the_array():
    allocator = CachingAllocator(64 * MIB)
    rows = torch.from_numpy(allocator.empty(5 * MIB))
    file = io.BytesIO()
    torch.save(rows, file)
    assert file.tell() < 5 * MIB + 10_000


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "1e10"])
def test_a_bound_that_is_no_number_is_refused(text):
    with pytest.raises(
        ConfigError,
        match=r"VLLM_SCOPE_REUSE_MIB is .*; it must be a number from 0 to below 1e9",
    ):
        reuse_bytes({"VLLM_SCOPE_REUSE_MIB": text})


def test_the_bound_is_in_mib():
    assert reuse_bytes({"VLLM_SCOPE_REUSE_MIB": "0"}) == 0
    assert reuse_bytes({"VLLM_SCOPE_REUSE_MIB": "1.5"}) == 3 * MIB // 2
    assert reuse_bytes({}) > 0


def test_the_processes_of_a_server_share_the_memory_unless_the_bound_of_each_is_given():
    assert reuse_bytes({}, 4) == memory_bytes() // 16
    assert reuse_bytes({"VLLM_SCOPE_REUSE_MIB": "8"}, 4) == 8 * MIB


def test_a_lower_bound_gives_free_memory_back_at_once():
    allocator = CachingAllocator(256 * MIB)
    held = [allocator.empty(8 * MIB) for _ in range(4)]
    del held
    assert allocator.stats.free == 32 * MIB
    allocator.bound(24 * MIB)
    assert allocator.most_bytes == 24 * MIB
    assert allocator.stats.free == 16 * MIB, "a quarter is for small segments"


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _lazily_free() -> int:
    """Bytes that the kernel may take."""
    with suppress(FileNotFoundError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("LazyFree:"):
                return int(line.split()[1]) << 10
    pytest.skip("this kernel does not say what is lazily free")
