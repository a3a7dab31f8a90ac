"""Nothing leaves the root, no half file is ever visible, and no file is believed."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vllm_scope
from tests.unit.files.test_files import LAYOUTS, put, record_of, store, writer_of
from tests.unit.recording import nobody
from vllm_scope.errors import ConfigError, FileError
from vllm_scope.files import FileOptions, publish
from vllm_scope.files.datafile import NpzFile
from vllm_scope.files.folder import LocalFolder
from vllm_scope.files.names import clean, place
from vllm_scope.files.per_request import KEY
from vllm_scope.files.publish import LocalPublisher
from vllm_scope.files.tensors import MAX_HEADER_BYTES, read_header

WILD = st.one_of(
    st.text(max_size=150),
    st.text(alphabet=list("./\\\0:~aA ._-"), max_size=40),
    st.sampled_from(
        [
            *("..", ".", "", "/etc/passwd", "../../x", "a/../b", "C:\\x", "con", "NUL.txt"),
            *("com1.a.b", "a\0b", "a.", "a ", ".hidden", "é", "e\u0301", "\ud800", "x" * 5000),
            *("a.json", "-rf"),
        ]
    ),
)


@given(WILD)
@example("lpt9.safetensors")
@example("a" * 101)
def test_any_text_becomes_one_safe_name(text):
    name = clean(text)
    assert 1 <= len(name) <= 101
    assert name.isascii()
    assert not set(name) & set('/\\\0:*?"<>| ')
    assert name[0] != "."
    assert name[-1] != "."
    assert name.split(".")[0].lower() not in {"con", "prn", "aux", "nul", "com1", "lpt9"}
    assert name == clean(text)


@given(WILD, WILD)
@example("a/b", "a_b")
@example("a", "a.")
@example("é", "e\u0301")
def test_two_texts_never_share_a_name(one, other):
    assert (clean(one) == clean(other)) == (one == other)


def test_a_plain_name_stays_as_it_is():
    assert [clean(name) for name in ("run-7", "a.b_C", "0")] == ["run-7", "a.b_C", "0"]
    assert place(record_of(name="n", tag="t", child=2, stage=1, num_stages=4)) == "t/n~c2~s1of4"


@given(tag=WILD, name=WILD)
@example(tag="..", name="\ud800")
@example(tag="\0", name="/etc/passwd")
@example(tag="x" * 5000, name="NUL")
def test_a_request_stays_in_the_root(tmp_path_factory, tag, name):
    base = tmp_path_factory.mktemp("base")
    root = base / "root"
    with writer_of(root, layout="per_request") as writer:
        put(writer, 1, tag=tag, name=name)
    assert [path.name for path in base.iterdir()] == ["root"]
    files = [path for path in root.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".json", ".safetensors"]
    assert all(len(path.relative_to(root).parts) == 2 for path in files)
    (request,) = vllm_scope.open(root)
    if not any("\ud800" <= char <= "\udfff" for char in tag + name):
        assert (request.manifest.tag, request.manifest.name) == (tag, name)


def test_a_link_inside_the_root_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "a.safetensors"
    victim.write_text("mine")
    root = tmp_path / "root"
    with writer_of(root, layout="per_request") as writer:
        (root / "tag").symlink_to(outside)
        with pytest.raises(FileError, match=r"tag is a symbolic link"):
            put(writer, 1, tag="tag", name="a")
        # A link in the file's own place is replaced, not written through.
        (root / "a.safetensors").symlink_to(victim)
        rows = put(writer, 2, name="a")[1]
    assert victim.read_text() == "mine"
    assert os.listdir(outside) == ["a.safetensors"]
    assert torch.equal(vllm_scope.open(root)["a"]["embed", 0], rows["embed", 0])


def test_a_reader_does_not_follow_links_between_folders(tmp_path):
    with writer_of(tmp_path / "other", layout="per_request") as writer:
        put(writer, 1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "other")
    assert len(vllm_scope.open(root)) == 0


#: Forks writers that write for good, and kills each; prints how many were caught at it.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np, torch, vllm_scope
from vllm_scope.files import FileOptions, RequestRecord, open_writer

root, layout = sys.argv[1:]
torch.set_num_threads(1)
rows = torch.ones(64, 8192)
positions = np.arange(64)


def data_files():
    return [*Path(root).rglob("*.safetensors"), *Path(root).rglob("*.npz")]


def write_for_good():
    options = {"root": root, "layout": layout, "file_mib": 1, "packed_requests": 2}
    writer = open_writer(FileOptions.parse(options))
    number = 0
    while True:
        request = writer.begin()
        request.write("embed", 0, positions, rows)
        request.finish(RequestRecord(
            str(number), list(range(64)), [], "m", 64, 64, name=f"r{number % 5}", tag="t"
        ))
        number += 1


open_writer(FileOptions.parse({"root": root, "layout": layout})).close()
rng = random.Random(0)
caught = rounds = 0
while rounds < 6 or caught < 3:
    rounds += 1
    child = os.fork()
    if child == 0:
        write_for_good()
    while not data_files():
        time.sleep(0.001)
    time.sleep(rng.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    caught += any(Path(root).rglob(".*.tmp"))
    for request in vllm_scope.open(root):
        assert request["embed", 0].shape == (64, 8192)
        assert bool((request["embed", 0] == 1).all())
        assert len(request.token_ids) == 64
        assert request.status == "ok"
    for path in data_files():
        path.unlink()
print(caught)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_killed_in_mid_write_leaves_only_whole_files(layout, tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), layout],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert int(out.stdout) > 0
    writer_of(tmp_path).close()
    assert [name for _, _, names in os.walk(tmp_path) for name in names if name[0] == "."] == []


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    living = LocalPublisher(tmp_path)
    code = (
        "import os, signal, sys; from pathlib import Path; "
        "from vllm_scope.files.publish import LocalPublisher; "
        f"p = LocalPublisher(Path({str(tmp_path)!r})); "
        "p.publish({'d/x': lambda f: (f.write(b'half'), os.kill(os.getpid(), signal.SIGKILL))})"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (half,) = (tmp_path / "d").iterdir()
    assert half.name.startswith(".x.")
    ours = tmp_path / "d" / f".y.{living.identity}.tmp"
    ours.write_text("being written")
    (tmp_path / "d" / ".notes.tmp").write_text("somebody else's")
    newcomer = LocalPublisher(tmp_path)
    assert sorted(os.listdir(tmp_path / "d")) == sorted([ours.name, ".notes.tmp"])
    locks = {name for name in os.listdir(tmp_path) if name.endswith(".lock")}
    assert locks == {f".scope-{p.identity}.lock" for p in (living, newcomer)}
    for publisher in (living, newcomer):
        publisher.close()


@pytest.mark.parametrize(("root", "other"), [("inner", "."), (".", "inner")])
def test_a_writer_keeps_the_files_that_a_writer_above_or_below_it_still_writes(
    root, other, tmp_path
):
    (tmp_path / "link").symlink_to(tmp_path / "outer")
    writer = LocalPublisher(tmp_path / "outer" / root)

    def write(file):
        file.write(b"half, ")
        LocalPublisher(tmp_path / "link" / other).close()
        file.write(b"whole")

    name = "inner/d/a" if root == "." else "d/a"
    writer.publish({name: write})
    writer.close()
    assert (tmp_path / "outer" / "inner" / "d" / "a").read_bytes() == b"half, whole"


def test_a_writer_keeps_its_files_after_its_root_was_removed_and_made_again(tmp_path):
    root = tmp_path / "root"
    writer = LocalPublisher(root)
    (root / f".scope-{writer.identity}.lock").unlink()
    root.rmdir()
    with pytest.raises(FileError, match="cannot be written"):
        writer.publish({"a": lambda file: file.write(b"a")})
    root.mkdir()

    def write(file):
        file.write(b"half, ")
        LocalPublisher(root).close()
        file.write(b"whole")

    writer.publish({"a": write})
    writer.close()
    assert os.listdir(root) == ["a"]
    assert (root / "a").read_bytes() == b"half, whole"


def test_a_leftover_that_may_not_be_removed_stops_no_writer(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    leftover = folder / f".x.{'0' * 16}.tmp"
    leftover.touch()
    with nobody(tmp_path):
        folder.chmod(0o555)
        publisher = LocalPublisher(tmp_path)
        publisher.publish({"a": lambda file: file.write(b"whole")})
        publisher.close()
        folder.chmod(0o755)
    assert leftover.exists()
    assert (tmp_path / "a").exists()


def test_a_root_that_cannot_be_listed_keeps_no_lock(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    with nobody(tmp_path):
        tmp_path.chmod(0o333)
        with pytest.raises(FileError, match="cannot be written to"):
            LocalPublisher(tmp_path)
        tmp_path.chmod(0o755)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fails_with", [OSError(28, "No space left on device"), RuntimeError("x")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(fails_with, tmp_path):
    publisher = LocalPublisher(tmp_path)
    publisher.publish({"a": lambda file: file.write(b"old")})

    def fail(file):
        file.write(b"new")
        raise fails_with

    with pytest.raises((FileError, RuntimeError)):
        publisher.publish({"b": lambda file: file.write(b"b"), "a": fail})
    publisher.close()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_rename_that_fails_leaves_whole_files_only(tmp_path, monkeypatch):
    publisher = LocalPublisher(tmp_path)
    real = os.replace

    def fail(source, target):
        if Path(target).name == "b":
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(FileError, match="cannot be written"):
        publisher.publish({"a": lambda f: f.write(b"whole"), "b": lambda f: f.write(b"b")})
    publisher.close()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"whole"


@contextmanager
def full_disk():
    """No file may be written, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("layout", ["sharded", "packed"])
@pytest.mark.parametrize("met_by", ["flush", "rotation"])
def test_a_file_that_could_not_be_written_fails_the_requests_in_it_and_no_others(
    layout, met_by, tmp_path
):
    writer = writer_of(tmp_path, layout=layout, file_mib=1)
    with full_disk():
        lost = [store(writer, seed, name=f"lost{seed}")[0] for seed in range(3)]
        assert not any(one.published.done() for one in lost)
        if met_by == "flush":
            with pytest.raises(FileError, match="File too large"):
                writer.flush()
        else:
            lost.append(store(writer, 3, streams=[("resid_pre", 1)], hidden_size=1 << 17)[0])
        for one in lost:
            assert "File too large" in str(one.published.exception(timeout=10))
    assert os.listdir(tmp_path) == [f".scope-{writer._publisher.identity}.lock"]
    later = store(writer, 4, name="later")[0]
    writer.close()
    assert later.published.exception() is None
    assert [r.manifest.name for r in vllm_scope.open(tmp_path)] == ["later"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_request_is_on_disk(layout, tmp_path):
    with writer_of(tmp_path, layout=layout, packed_requests=3) as writer:
        seen: list[int] = []
        for seed in range(7):
            one = store(writer, seed, uid=str(seed))[0]
            one.published.add_done_callback(
                lambda future, seed=seed: seen.append(
                    sum(r.manifest.uid == str(seed) for r in vllm_scope.open(tmp_path))
                )
            )
            assert one.published.done() == (
                layout in ("per_request", "npz") or (layout == "packed" and seed % 3 == 2)
            )
    assert seen == [1] * 7


def test_no_index_speaks_of_rows_that_are_not_there(tmp_path, monkeypatch):
    """A writer that is killed between two files leaves the rows, not their index."""
    appeared: list[str] = []
    real = os.replace

    def note(source, target):
        appeared.append(Path(target).suffix)
        real(source, target)

    monkeypatch.setattr(os, "replace", note)
    for layout in LAYOUTS:
        with writer_of(tmp_path / layout, layout=layout) as writer:
            put(writer, 1)
    assert appeared == [".safetensors", ".json"] * 3 + [".npz", ".json"]


def test_an_index_that_cannot_be_written_leaves_no_rows_either(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for layout in LAYOUTS:
        with writer_of(tmp_path, layout=layout) as writer, monkeypatch.context() as patch:
            patch.setattr(f"vllm_scope.files.{layout}.write_bytes", full, raising=False)
            patch.setattr("vllm_scope.files.per_request.write_bytes", full)
            with suppress(FileError):
                put(writer, 1)
            with suppress(FileError):
                writer.flush()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fsync", [False, True])
def test_fsync_waits_for_the_file_before_it_is_visible_and_for_its_folder_after(
    fsync, tmp_path, monkeypatch
):
    calls: list[str] = []
    for name in ("fdatasync", "fsync", "replace"):
        real = getattr(os, name)

        def note(*args, _real=real, _name=name):
            calls.append(_name)
            return _real(*args)

        monkeypatch.setattr(os, name, note)
    publisher = LocalPublisher(tmp_path, fsync)
    publisher.publish({"a": lambda file: file.write(b"x")})
    publisher.close()
    assert calls == (["fdatasync", "replace", "fsync"] if fsync else ["replace"])


def test_fsync_covers_the_folders_that_are_made(tmp_path, monkeypatch):
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))[1])
    LocalPublisher(tmp_path / "a" / "b", fsync=True).close()
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "a")} <= set(synced)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "of_file", "of_folder"),
    [
        pytest.param({}, 0o600, 0o700, id="by-default"),
        pytest.param({"mode": "640"}, 0o640, 0o750, id="for-a-group"),
        pytest.param({"mode": "664"}, 0o664, 0o775, id="for-all"),
    ],
)
def test_files_are_their_writers_alone_unless_the_operator_says_so(
    options, of_file, of_folder, layout, tmp_path
):
    """Whatever the process's umask is; a folder that was there keeps its mode."""
    tmp_path.chmod(0o755)
    before = os.umask(0o027)
    try:
        with writer_of(tmp_path / "a" / "root", layout=layout, **options) as writer:
            put(writer, 1, tag="t", name="n")
    finally:
        os.umask(before)
    found = sorted(path for path in tmp_path.rglob("*"))
    assert len(found) > 3
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (of_folder if path.is_dir() else of_file), path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", ["rw", "0o600", "99", "7777", 600, "066", "700"])
def test_a_wrong_mode_is_refused(mode, tmp_path):
    with pytest.raises(ConfigError, match="file option mode is"):
        FileOptions.parse({"root": str(tmp_path), "mode": mode})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writers_and_readers_leave_no_descriptor_open(layout, tmp_path):
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for seed in range(5):
        with writer_of(tmp_path, layout=layout, fsync=True) as writer:
            put(writer, seed, tag=f"t{seed}")
            writer.flush()
            with full_disk(), suppress(FileError):
                put(writer, 50 + seed)
                writer.flush()
        for request in vllm_scope.open(tmp_path):
            assert request["embed", 0].numel()
        del request
    assert num_open() == before


def _safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(**fields) -> dict:
    """Of a file that says it is one of ours."""
    ours = {"__metadata__": {KEY: "{}"}}
    return ours | {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"abc", "not a safetensors file", id="shorter-than-its-length"),
        pytest.param(struct.pack("<Q", 1 << 60), "says that its header has", id="huge-header"),
        pytest.param(
            struct.pack("<Q", MAX_HEADER_BYTES), "says that its header", id="longer-than-the-file"
        ),
        pytest.param(_safetensors(b"{{"), "header cannot be read", id="no-json"),
        pytest.param(_safetensors(b"[" * 100_000), "header cannot be read", id="deep"),
        pytest.param(_safetensors(b"\xff\xfe"), "header cannot be read", id="no-text"),
        pytest.param(_safetensors(_entry(), b"1234"), "lie within the file", id="cut-off"),
        pytest.param(
            _safetensors(_entry(shape=[1 << 62, 1 << 62]), b"12345678"), "needs", id="huge-shape"
        ),
        pytest.param(
            _safetensors(_entry(shape=[1 << 62] * 40_000), b"12345678"),
            "40000 dimensions",
            id="many-dimensions",
        ),
        pytest.param(
            _safetensors(_entry(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0])),
            "needs another",
            id="empty-and-huge",
        ),
        pytest.param(_safetensors(_entry(shape=[-2]), b"12345678"), "lie within", id="negative"),
        pytest.param(
            _safetensors(_entry(data_offsets=[8, 0]), b"12345678"), "lie within", id="backwards"
        ),
        pytest.param(_safetensors(_entry(dtype="F99"), b"12345678"), "not supported", id="dtype"),
    ],
)
def test_a_damaged_safetensors_file_is_refused_before_anything_is_allocated(
    content, says, tmp_path
):
    class Counted(io.BytesIO):
        most = 0

        def read(self, size=-1):
            self.most = max(self.most, size)
            return super().read(size)

    file = Counted(content)
    with pytest.raises(FileError, match=says):
        read_header(file, len(content), "it")
    assert file.most <= max(8, len(content))
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(FileError, match=says):
        vllm_scope.open(tmp_path)


def _forged(tmp_path, change) -> None:
    """A shard whose index was changed by somebody."""
    with writer_of(tmp_path, layout="sharded") as writer:
        put(writer, 1, name="a")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    body = json.loads(tensors["vllm_scope"].numpy().tobytes())
    change(body["requests"][0])
    tensors["vllm_scope"] = torch.frombuffer(
        bytearray(json.dumps(body).encode()), dtype=torch.uint8
    )
    save_file(tensors, path, {"layout": "sharded"})


def _stream(**fields):
    return lambda request: request["streams"]["embed.0"].update(fields)


def _codec(**fields):
    return lambda request: request["streams"]["embed.0"]["codec"].update(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(_stream(shape=[1 << 40, 12]), "rows up to", id="more-rows"),
        pytest.param(_stream(shape=[8, 1 << 40]), "contradicts itself", id="wider"),
        pytest.param(_stream(first=-3), "contradicts itself", id="negative-first"),
        pytest.param(_stream(first=1 << 50), "rows up to", id="late-first"),
        pytest.param(_codec(hidden_size=13), "contradicts itself", id="codec's-width"),
        pytest.param(_codec(codec="rp8", k=12), "no tensor 'embed.0.q'", id="codec"),
        pytest.param(_codec(codec="evil"), "the codecs are", id="unknown-codec"),
        pytest.param(lambda r: r.update(num_prompt_tokens=1 << 40), "token ids", id="tokens"),
        pytest.param(lambda r: r.update(first_token=-1), "token ids", id="negative-token"),
        pytest.param(
            lambda r: r["streams"].update(evil=r["streams"]["embed.0"]), "names no", id="s"
        ),
        pytest.param(lambda r: r.update(status="fine"), "cannot be read", id="status"),
        pytest.param(
            lambda r: r["streams"].update({"s." + "9" * 5000: r["streams"]["embed.0"]}),
            "names no",
            id="layer-of-5000-digits",
        ),
        pytest.param(lambda r: r.update(num_stages=5_000_000), "at most 1024", id="stages"),
        pytest.param(lambda r: r.update(num_stages=10**400), "at most 1024", id="huge-stages"),
        pytest.param(lambda r: r.update(num_stages=0), "at most 1024", id="no-stages"),
        pytest.param(lambda r: r.update(stage=1), "says stage 1 of 1", id="past-its-stages"),
        pytest.param(lambda r: r.update(stage=-1, num_stages=2), "stage -1 of 2", id="stage"),
    ],
)
def test_an_index_that_contradicts_its_file_is_refused(change, says, tmp_path):
    _forged(tmp_path, change)

    def use():
        (request,) = vllm_scope.open(tmp_path)
        assert request.token_ids.numel()
        assert request["embed", 0].numel()
        assert request.positions("embed", 0).numel()

    with pytest.raises(FileError, match=says):
        use()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("first", [0, 1 << 40])
def test_rows_that_an_index_invents_are_refused_before_a_training_counts_them(
    shuffle, first, tmp_path
):
    _forged(tmp_path, _stream(shape=[1 << 40, 12], first=first))
    capture = vllm_scope.open(tmp_path)
    started = time.thread_time()
    with pytest.raises(FileError, match="rows up to"):
        capture.iter_rows("embed", 0, 4, shuffle=shuffle)
    assert time.thread_time() - started < 1


def test_an_index_names_no_path_that_is_opened(tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(b"x" * 100)
    root = tmp_path / "root"
    _forged(
        root,
        lambda r: (r.update(files=["../secret.safetensors"]), _stream(file="../secret")(r)),
    )
    (request,) = vllm_scope.open(root)
    assert request["embed", 0].shape == (8, 12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_read_without_the_index_beside_it(layout, tmp_path):
    with writer_of(tmp_path, layout=layout) as writer:
        rows = put(writer, 1)[1]
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    (request,) = vllm_scope.open(tmp_path)
    assert torch.equal(request["embed", 0], rows["embed", 0])


def test_other_programs_files_are_passed_over_and_pipes_are_not_waited_for(tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / "weights.safetensors")
    save_file({"x": torch.zeros(3, dtype=torch.float64)}, tmp_path / "wide.safetensors")
    save_file({"x": torch.ones(3, dtype=torch.bool)}, tmp_path / "mask.safetensors")
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    np.savez_compressed(tmp_path / "small.npz", a=np.zeros(3))
    np.savez(tmp_path / "columns.npz", a=np.zeros((3, 2), order="F"))
    np.savez(tmp_path / "objects.npz", a=np.array([{}], object))
    (tmp_path / "notes.txt").write_text("x")
    assert len(vllm_scope.open(tmp_path)) == 0
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(FileError, match="not a regular file"):
        vllm_scope.open(tmp_path)


def _npz_with(tmp_path, name: str, body: bytes, compression=zipfile.ZIP_STORED) -> None:
    with writer_of(tmp_path, layout="npz") as writer:
        put(writer, 1)
    (path,) = tmp_path.glob("*.npz")
    with zipfile.ZipFile(path, "a", compression) as archive:
        archive.writestr(name, body)


def _npy(shape: str, descr: str = "<f4", data: bytes = b"1234") -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    ("body", "compression", "says"),
    [
        pytest.param(_npy("(99999999999,)"), zipfile.ZIP_STORED, "damaged", id="huge-shape"),
        pytest.param(_npy("(-1,)"), zipfile.ZIP_STORED, "damaged", id="negative"),
        pytest.param(_npy("(1,)", "|O"), zipfile.ZIP_STORED, "damaged", id="objects"),
        pytest.param(b"not numpy at all", zipfile.ZIP_STORED, "cannot be read", id="no-array"),
        pytest.param(_npy("(1,)"), zipfile.ZIP_DEFLATED, "compressed", id="a-zip-bomb's-way"),
    ],
)
def test_a_damaged_npz_is_refused(body, compression, says, tmp_path):
    _npz_with(tmp_path, "evil.npy", body, compression)
    with pytest.raises(FileError, match=says):
        vllm_scope.open(tmp_path)


@pytest.mark.parametrize("layout", ["npz", "sharded"])
def test_an_index_that_is_too_large_is_not_read(layout, tmp_path, monkeypatch):
    with writer_of(tmp_path, layout=layout) as writer:
        put(writer, 1)
    monkeypatch.setattr("vllm_scope.files.datafile.MAX_INDEX_BYTES", 64)
    with pytest.raises(FileError, match=r"has an index of \d+ bytes; an index has at most 64"):
        vllm_scope.open(tmp_path)


def test_a_shard_ends_before_its_index_is_too_large_to_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_scope.files.sharded.MOST_INDEX_BYTES", 2048)
    monkeypatch.setattr("vllm_scope.files.datafile.MAX_INDEX_BYTES", 4096)
    with writer_of(tmp_path, layout="sharded") as writer:
        for seed in range(20):
            put(writer, seed, request_id=str(seed))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert len(vllm_scope.open(tmp_path)) == 20


@pytest.mark.parametrize("layout", ["packed", "sharded"])
def test_a_file_ends_before_its_header_is_too_large(layout, tmp_path, monkeypatch):
    """Each request brings streams of its own, whose names are long in JSON."""
    monkeypatch.setattr(f"vllm_scope.files.{layout}.MOST_HEADER_BYTES", 1 << 16)
    monkeypatch.setattr("vllm_scope.files.tensors.MAX_HEADER_BYTES", 1 << 17)
    with writer_of(tmp_path, layout=layout, packed_requests=1000) as writer:
        for seed in range(20):
            names = [f"{seed}-{i}-".ljust(200, "\x01") + ".features" for i in range(3)]
            put(writer, seed, [(name, 5) for name in names], request_id=str(seed))
    assert 3 < len(list(tmp_path.glob("*.safetensors"))) < 10
    assert len(vllm_scope.open(tmp_path)) == 20


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_npy("(1,)", ">f4"), id="other-endian"),
        pytest.param(_npy("(1,)", "|S4"), id="text"),
        pytest.param(_npy("(0, 4611686018427387904, 4)", data=b""), id="empty-and-huge"),
        pytest.param(_npy("(1,)", "|V0", b""), id="no-bytes"),
    ],
)
def test_an_array_that_torch_does_not_know_is_a_file_error(body, tmp_path):
    _npz_with(tmp_path, "evil.npy", body)
    (path,) = tmp_path.glob("*.npz")
    file = NpzFile(LocalFolder(tmp_path), path.name, {})
    with pytest.raises(FileError, match="'evil' cannot be read"):
        file.tensor("evil")


@pytest.mark.parametrize("positions", [list(range(8))[::-1], [0] * 7 + [9], [0] * 8])
def test_positions_out_of_order_are_found_or_a_file_error(positions, tmp_path):
    with writer_of(tmp_path, layout="sharded") as writer:
        rows = put(writer, 1)[1]["embed", 0]
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors["embed.0.positions"] = torch.tensor(positions)
    save_file(tensors, path, {"layout": "sharded"})
    (request,) = vllm_scope.open(tmp_path)
    for one in (*range(10), -1):
        try:
            found = request.at("embed", 0, [one])
        except (FileError, KeyError):
            continue
        assert torch.equal(found[0], rows[positions.index(one)])
    with pytest.raises((FileError, KeyError)):
        request.at("embed", 0, range(8))


def test_positions_and_tokens_of_another_shape_are_a_file_error(tmp_path):
    with writer_of(tmp_path, layout="sharded") as writer:
        put(writer, 1)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors["embed.0.positions"] = torch.zeros(8, 2, dtype=torch.int64)
    tensors["token_ids"] = torch.tensor(3, dtype=torch.int32)
    save_file(tensors, path, {"layout": "sharded"})
    (request,) = vllm_scope.open(tmp_path)
    with pytest.raises(FileError, match=r"positions of embed\.0 are"):
        request.at("embed", 0, [0])
    with pytest.raises(FileError, match="token ids"):
        assert request.token_ids is None


def test_a_link_to_a_file_is_not_followed_unless_the_caller_names_it(tmp_path):
    with writer_of(tmp_path / "other", layout="per_request") as writer:
        put(writer, 1, name="a")
    root = tmp_path / "root"
    root.mkdir()
    link = root / "a.safetensors"
    link.symlink_to(tmp_path / "other" / "a.safetensors")
    with pytest.raises(FileError, match=r"a\.safetensors is a symbolic link"):
        vllm_scope.open(root)
    assert len(vllm_scope.open(link)) == 1


def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out(tmp_path):
    root = tmp_path / "root"
    with writer_of(root, layout="per_request") as writer:
        put(writer, 1, tag="open", name="a")
        put(writer, 2, tag="shut", name="b")
    (root / "lost+found").mkdir(mode=0)  # on a disk, it is root's alone
    with nobody(tmp_path):
        assert len(vllm_scope.open(root)) == 2
        (root / "shut").chmod(0)
        for path in (root, root / "shut"):
            with pytest.raises(FileError, match="shut cannot be read: Permission denied"):
                vllm_scope.open(path)
        with pytest.raises(FileError, match=r"b\.safetensors' cannot be read: Permission denied"):
            vllm_scope.open(root / "shut" / "b.safetensors")
        assert len(vllm_scope.open(root / "open")) == 1
    with pytest.raises(FileError, match="cannot be read: File name too long"):
        vllm_scope.open("x" * 5000)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_under_any_name_of_features_are_read_or_refused(layout, tmp_path):
    streams = [("a\0x.features", 0), ("a\0y.features", 0)]
    with writer_of(tmp_path, layout=layout) as writer:
        if layout == "npz":
            with pytest.raises(FileError, match=r"'a\\x00x\.features\.0\S* cannot be the name"):
                put(writer, 1, streams)
            return
        put(writer, 1, streams)
    (request,) = vllm_scope.open(tmp_path)
    assert all(len(request[stream]) for stream in streams)


def test_many_pieces_of_one_request_are_opened_quickly(tmp_path):
    with writer_of(tmp_path, layout="per_request") as writer:
        put(writer, 1, name="a")
    path = tmp_path / "a.safetensors"
    with safe_open(path, "pt") as file:
        body = json.loads(file.metadata()["vllm_scope"])
    (one,) = body["requests"]
    body["requests"] = [{**one, "num_stages": 2, "stage": i % 2} for i in range(20_000)]
    path.write_bytes(_safetensors({"__metadata__": {"vllm_scope": json.dumps(body)}}))
    started = time.thread_time()  # other work of the machine does not count
    with pytest.raises(FileError, match=r"is in a\.safetensors and in"):
        vllm_scope.open(tmp_path)
    body["requests"] = [{**one, "streams": {}} for i in range(20_000)]
    path.write_bytes(_safetensors({"__metadata__": {"vllm_scope": json.dumps(body)}}))
    assert len(vllm_scope.open(tmp_path)) == 20_000
    assert time.thread_time() - started < 5


@given(st.data())
@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_file_with_wrong_bytes_is_refused_or_read_and_never_crashes(
    tmp_path_factory, suffix, data
):
    root = tmp_path_factory.mktemp("root")
    with writer_of(root, layout="npz" if suffix == "npz" else "sharded") as writer:
        put(writer, 1)
    (path,) = root.glob(f"*.{suffix}")
    body = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(body[: data.draw(st.integers(0, len(body)))])
    try:
        for request in vllm_scope.open(root):
            assert request.token_ids is not None
            for stream in request.keys():
                assert request[stream].dim() == 2
                assert request.positions(*stream).dim() == 1
    except FileError:
        pass


def test_a_thousand_requests_of_one_row_are_written_quickly(tmp_path):
    started = time.monotonic()
    rng = random.Random(0)
    with writer_of(tmp_path, layout="sharded") as writer:
        for seed in range(1000):
            put(writer, seed, streams=[("embed", 0)], num_prompt=1 + rng.randrange(3))
    assert len(vllm_scope.open(tmp_path)) == 1000
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert time.monotonic() - started < 10


def test_a_lock_is_never_taken_from_a_writer_that_is_just_starting(monkeypatch, tmp_path):
    """Whatever a cleaner does between the making of a lock and its locking."""
    make, calls = publish.fcntl.flock, []

    def flock(fd, how):
        if not calls:  # of the new writer: a cleaner is faster
            calls.append(fd)
            (path,) = tmp_path.glob(".scope-*.lock")
            assert publish._removed(str(path))
        make(fd, how)

    monkeypatch.setattr(publish.fcntl, "flock", flock)
    first = publish.LocalPublisher(tmp_path)
    monkeypatch.undo()
    (lock,) = tmp_path.glob(".scope-*.lock")
    assert first.identity in lock.name
    assert not publish._removed(str(lock))
    first.close()
    assert not list(tmp_path.glob(".scope-*.lock"))
