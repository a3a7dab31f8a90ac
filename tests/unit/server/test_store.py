"""Results on disk: their owners, time to live and room; and results as JSON."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.unit.waiting import until
from tests.warm_start import cold
from vllm_scope.errors import CapacityError, ConfigError
from vllm_scope.results.column import Column
from vllm_scope.server import encode
from vllm_scope.server import store as module
from vllm_scope.server.settings import ServerSettings
from vllm_scope.server.store import Store, owner_of

ROWS = {"resid_post.3": torch.randn(5, 8).bfloat16(), "resid_post.3.positions": torch.arange(5)}
MOST = 10_000_000
MINE, OTHER = owner_of("Bearer mine"), owner_of("Bearer other")


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path, "run", MOST, 600.0)
    yield found
    found.close()


def test_a_result_comes_back_as_it_was(store):
    kept = store.put(ROWS, {"scope": "{}"}, MINE)
    with store.open(kept.id, MINE) as file:
        data = file.read()
    assert len(data) == kept.num_bytes
    found = safetensors.torch.load(data)
    assert {name: t.dtype for name, t in found.items()} == {n: t.dtype for n, t in ROWS.items()}
    assert all(torch.equal(found[name], ROWS[name]) for name in ROWS)


def test_ids_are_long_and_never_the_same(store):
    ids = {store.put({"x": torch.zeros(1)}, {}, MINE).id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(name) == 32 for name in ids)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../run/lock", id="a-path-up"),
        pytest.param("/etc/passwd", id="an-absolute-path"),
        pytest.param("lock", id="the-lock"),
        pytest.param("*" * 32, id="a-pattern"),
        pytest.param("a" * 32, id="a-guess"),
        pytest.param("a" * 31 + "\0", id="a-null-byte"),
        pytest.param("", id="nothing"),
        pytest.param("ä" * 32, id="unicode"),
    ],
)
def test_a_text_that_is_no_id_finds_and_deletes_nothing(name, store, tmp_path):
    store.put(ROWS, {}, MINE)
    before = sorted(tmp_path.rglob("*"))
    assert store.open(name, MINE) is None
    store.delete(name, MINE)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_owner_neither_finds_nor_deletes_it(store):
    kept = store.put(ROWS, {}, MINE)
    assert store.open(kept.id, OTHER) is None
    store.delete(kept.id, OTHER)
    store.open(kept.id, MINE).close()
    assert owner_of(None) != MINE


def test_the_case_of_the_scheme_does_not_change_the_owner():
    """vLLM compares the scheme without case, the key as it is."""
    assert {owner_of(f"{scheme} mine") for scheme in ("bearer", "BEARER", "bEARer")} == {MINE}
    assert len({owner_of(text) for text in ("Bearer Mine", "Bearer mine ", "Basic mine")}) == 3


def test_processes_of_one_server_find_each_others_results(store, tmp_path):
    sibling = Store(tmp_path, "run", MOST, 600.0)
    kept = store.put(ROWS, {}, MINE)
    sibling.open(kept.id, MINE).close()
    sibling.close()
    store.open(kept.id, MINE).close()  # the folder outlives who does not hold it alone
    stranger = Store(tmp_path, "another-run", MOST, 600.0)
    assert stranger.open(kept.id, MINE) is None
    stranger.close()


def test_results_end_with_their_time(tmp_path):
    store = Store(tmp_path, "run", MOST, 0.05)
    kept = store.put(ROWS, {}, MINE)
    time.sleep(0.1)
    assert store.open(kept.id, MINE) is None
    until(lambda: not list(tmp_path.rglob("*.safetensors")), 20)
    assert (len(store), store.num_bytes) == (0, 0)
    store.close()


def test_one_timer_ends_all_files(tmp_path):
    store = Store(tmp_path, "run", MOST, 1.0)
    for _ in range(20):
        store.put(ROWS, {}, MINE)
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert (len(store), len(timers)) == (20, 1)
    until(lambda: len(store) == 0 and not list(tmp_path.rglob("*.safetensors")), 20)
    kept = store.put(ROWS, {}, MINE)
    until(lambda: store.open(kept.id, MINE) is None and len(store) == 0, 20)
    store.close()


def test_a_file_that_cannot_be_deleted_is_tried_again_and_harms_no_other(
    tmp_path, monkeypatch, caplog
):
    store, unlink, tried = Store(tmp_path, "run", MOST, 0.1), Path.unlink, []
    kept, other = (store.put(ROWS, {}, MINE) for _ in range(2))

    def stubborn(path, **given):
        if path.name.startswith(kept.id):
            tried.append(store.num_bytes)
            if len(tried) == 1:
                raise OSError(16, "Device or resource busy")
        unlink(path, **given)

    monkeypatch.setattr(Path, "unlink", stubborn)
    until(lambda: len(tried) == 2 and not list(tmp_path.rglob("*.safetensors")), 20)
    assert (len(store), store.num_bytes) == (0, 0)
    assert "Device or resource busy" in caplog.text
    later = store.put(ROWS, {}, MINE)
    until(lambda: not list(tmp_path.rglob("*.safetensors")), 20)
    assert store.open(other.id, MINE) is store.open(later.id, MINE) is None
    store.close()


def test_to_check_for_room_takes_no_longer_with_many_files(store):
    def seconds():
        started = time.perf_counter()
        for _ in range(300):
            store.check_room(1, OTHER)
        return time.perf_counter() - started

    store.room.most_bytes = 1 << 40
    store.put(ROWS, {}, MINE)
    one = min(seconds() for _ in range(5))
    for _ in range(2000):
        store.put(ROWS, {}, MINE)
    assert min(seconds() for _ in range(5)) < 5 * one


def test_small_files_count_for_64_kib_each(store):
    kept = store.put(ROWS, {}, MINE)
    assert (kept.num_bytes < 1000, store.num_bytes) == (True, 1 << 16)
    with suppress(CapacityError):
        while store.put(ROWS, {}, MINE):
            pass
    assert len(store) == 3 * MOST // 4 >> 16
    store.delete(kept.id, MINE)
    store.put(ROWS, {}, MINE)


def test_a_file_that_could_not_be_written_is_not_counted(store, monkeypatch):
    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(OSError, match="disk full"):
        store.put(zeros(5_000_000), {}, MINE)
    assert (len(store), store.num_bytes) == (0, 0)
    assert not list(store.folder().glob("*.part"))


def test_a_siblings_result_is_not_served_past_its_time(tmp_path):
    writer = Store(tmp_path, "run", MOST, 600.0)
    reader = Store(tmp_path, "run", MOST, 0.05)
    kept = writer.put(ROWS, {}, MINE)
    time.sleep(0.1)
    assert reader.open(kept.id, MINE) is None
    reader.close()
    writer.close()


def zeros(num_bytes):
    return {"x": torch.zeros(num_bytes, dtype=torch.uint8)}


def test_the_bound_is_never_exceeded_and_a_key_at_its_share_is_refused(store):
    store.check_room(7_000_000, MINE)
    store.put(zeros(5_000_000), {}, MINE)
    with pytest.raises(
        CapacityError, match=r"results of 5,0\d\d,\d+ bytes of this key.* of 10,000,000"
    ):
        store.check_room(3_000_000, MINE)
    with pytest.raises(
        CapacityError, match=r"results of 5,0\d\d,\d+ bytes of this key.* of 10,000,000"
    ):
        store.put(zeros(3_000_000), {}, MINE)
    with pytest.raises(
        CapacityError, match=r"8,0\d\d,\d+ bytes; this server keeps at most 7,500,000 of one"
    ):
        store.put(zeros(8_000_000), {}, MINE)
    assert len(store) == 1


def test_keys_that_keep_all_they_can_leave_room_for_another(store):
    store.room.most_bytes = 10 * MOST
    for i in range(4):
        with suppress(CapacityError):
            while True:
                store.put(zeros(500_000), {"scope": '"ü' * 50}, owner_of(f"Bearer {i}"))
                assert store.num_bytes <= store.room.most_bytes
    assert store.open(store.put(zeros(10), {}, OTHER).id, OTHER) is not None
    store.check_room(10, OTHER)


def test_deleting_makes_room(store):
    kept = store.put(zeros(6_000_000), {}, MINE)
    store.delete(kept.id, MINE)
    store.check_room(6_000_000, MINE)
    assert store.num_bytes == 0


def test_a_file_that_another_process_deleted_makes_room_too(store, tmp_path):
    sibling = Store(tmp_path, "run", MOST, 600.0)
    kept = store.put(zeros(6_000_000), {}, MINE)
    with pytest.raises(CapacityError):
        store.check_room(6_000_000, MINE)
    sibling.delete(kept.id, MINE)
    store.check_room(6_000_000, MINE)
    assert (len(store), store.num_bytes) == (0, 0)
    sibling.close()


def test_another_owner_cannot_make_the_store_forget_a_file(store):
    kept = store.put(zeros(6_000_000), {}, MINE)
    store.delete(kept.id, OTHER)
    assert store.num_bytes > 6_000_000


def test_a_file_that_takes_longer_to_write_than_it_is_kept_ends_too(tmp_path, monkeypatch):
    store = Store(tmp_path, "run", MOST, 0.05)
    write = module.write_tensors

    def slow(*args):
        write(*args)
        time.sleep(0.1)
        store.sweep()
        store.forget_deleted()
        assert len(store) == 1

    monkeypatch.setattr(module, "write_tensors", slow)
    kept = store.put(ROWS, {}, MINE)
    store.open(kept.id, MINE).close()
    time.sleep(0.1)
    store.sweep()
    assert not list(tmp_path.rglob("*.safetensors"))
    store.close()


def test_only_this_user_can_look_into_the_folder(store, tmp_path):
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_a_link_is_not_used(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"vllm-scope-results-{os.getuid()}-run").symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        Store(tmp_path, "run", MOST, 600.0)


def test_closing_leaves_nothing(store, tmp_path):
    store.put(ROWS, {}, MINE)
    store.close()
    assert list(tmp_path.iterdir()) == []


def _end_with_a_store(folder):
    Store(folder, "run", MOST, 600.0).put(ROWS, {}, MINE)


def test_a_child_process_that_ends_leaves_nothing(tmp_path):
    """API servers are such children."""
    with cold():
        spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=_end_with_a_store, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_servers_are_removed_and_those_of_living_ones_not(tmp_path):
    living = Store(tmp_path, "living", MOST, 600.0)
    killed = tmp_path / f"vllm-scope-results-{os.getuid()}-killed"
    killed.mkdir(mode=0o700)
    (killed / "x.safetensors").write_bytes(b"left")
    for folder in tmp_path.iterdir():
        os.utime(folder, (time.time() - 3600,) * 2)
    Store(tmp_path, "new", MOST, 600.0).close()
    assert not killed.exists()
    kept = living.put(ROWS, {}, MINE)
    living.open(kept.id, MINE).close()
    living.close()


def _old(folder):
    os.utime(folder, (time.time() - 3600,) * 2)


def test_a_cleaner_of_old_files_frees_no_folder_for_other_servers(tmp_path):
    living = Store(tmp_path, "living", MOST, 600.0)
    (folder,) = tmp_path.iterdir()
    for path in folder.iterdir():
        path.unlink()
    _old(folder)
    Store(tmp_path, "new", MOST, 600.0).close()
    living.open(living.put(ROWS, {}, MINE).id, MINE).close()
    living.close()


def test_a_folder_that_is_gone_is_made_and_held_again(store, tmp_path):
    store.put(ROWS, {}, MINE)
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    store.forget_deleted()
    assert len(store) == 0
    kept = store.put(ROWS, {}, MINE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    _old(folder)
    Store(tmp_path, "new", MOST, 600.0).close()
    store.open(kept.id, MINE).close()


def test_a_holder_of_a_removed_folder_leaves_the_new_folder_alone(store, tmp_path):
    sibling = Store(tmp_path, "run", MOST, 600.0)
    shutil.rmtree(next(tmp_path.iterdir()))
    kept = store.put(ROWS, {}, MINE)
    sibling.close()
    store.open(kept.id, MINE).close()


@pytest.mark.parametrize(
    ("positions", "spans"),
    [
        pytest.param([], [], id="none"),
        pytest.param([4], [[4, 5]], id="one"),
        pytest.param([0, 1, 2, 7, 9, 10], [[0, 3], [7, 8], [9, 11]], id="several"),
    ],
)
def test_positions_become_half_open_spans(positions, spans):
    assert encode.spans(np.array(positions, np.int64)) == spans


def test_scores_that_are_not_finite_are_null():
    values = torch.tensor([1.5, torch.nan, torch.inf])
    where = np.arange(3)
    body = {"scores": encode.scores([Column("p", values, where)], True)}
    assert body["scores"]["p"] == {"spans": [[0, 3]], "values": [1.5, None, None]}
    body = encode.scores([Column("p", values, where, aggregates=values.flip(0))], True)["p"]
    assert (body["values"], body["aggregates"]) == ([1.5, None, None], [None, None, 1.5])


def test_aggregates_whose_scores_are_in_the_file_are_not_inline():
    values = torch.arange(3.0)
    column = Column("p", values, np.arange(3), aggregates=values)
    assert encode.scores([column], False) == {"p": {"spans": [[0, 3]]}}


@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf"])
def test_a_limit_that_is_not_above_0_stops_the_start(text):
    with pytest.raises(ConfigError, match="VLLM_SCOPE_RESULTS_MIB is"):
        ServerSettings.from_environment({"VLLM_SCOPE_RESULTS_MIB": text})


def test_without_an_environment_nothing_can_be_changed():
    assert ServerSettings.from_environment({}).admin_key is None
    assert ServerSettings.from_environment({"VLLM_SCOPE_ADMIN_KEY": ""}).admin_key is None
