"""A data set has the same documents, ids and fingerprint whatever file it is in."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.recording import nobody
from vllm_scope.errors import FileError, SpecError
from vllm_scope.harvests.documents import find_documents
from vllm_scope.harvests.manifest import HarvestManifest

TEXTS = ["one", "two words", "", "ü\u2028 three"]
IDS = [[1, 2, 3], [4], [], [5, 6]]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


@pytest.mark.parametrize("contents", [TEXTS, IDS], ids=["texts", "token-ids"])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_of_files_are_documents(contents, write, tmp_path):
    name = "text" if contents is TEXTS else "input_ids"
    rows = [{name: content, "key": f"k{i}"} for i, content in enumerate(contents)]
    path = write(tmp_path / f"rows.{'jsonl' if write is write_jsonl else 'parquet'}", rows)
    found = find_documents(path)
    assert found.count == 4
    assert [document.content for document in found] == contents
    assert [d.id for d in found] == [f"{found.fingerprint[:12]}-{i}" for i in range(4)]
    named = find_documents(str(path), column=name, id_column="key")
    assert [document.id for document in named] == ["k0", "k1", "k2", "k3"]
    assert named.fingerprint == found.fingerprint
    write(path, [*rows[:3], rows[0]])
    assert find_documents(path).fingerprint != found.fingerprint


def test_a_line_of_a_text_is_a_document_and_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("third\n\n  \nfourth", encoding="utf-8")
    (tmp_path / "a.txt").write_bytes(b"first\r\nsecond \n")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "notes.md").write_text("no")
    found = find_documents(tmp_path)
    assert found.count == 4
    assert [document.content for document in found] == ["first", "second ", "third", "fourth"]
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert find_documents(tmp_path).fingerprint != found.fingerprint


def test_paths_that_are_no_utf8_are_read(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/set\xff"))
    fingerprints = set()
    for name in (b"a\xff.txt", b"a\xfe.txt", b"a?.txt"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / os.fsdecode(name)).write_text("first")
        found = find_documents(folder)
        assert [document.content for document in found] == ["first"]
        fingerprints.add(found.fingerprint)
    assert len(fingerprints) == 3
    assert found.source == f"{tmp_path}/set?"
    assert HarvestManifest({}, found.source, found.count, []).encode()


def test_the_fingerprint_of_a_file_stays_the_same(tmp_path):
    path = tmp_path / "ü.txt"
    path.write_text("first\n")
    digest = hashlib.sha256(b"first\n").hexdigest()
    wanted = hashlib.sha256(f"ü.txt\0{digest}\0".encode()).hexdigest()
    assert find_documents(path).fingerprint == wanted


def test_a_list_is_a_data_set():
    assert [document.content for document in find_documents(TEXTS)] == TEXTS
    assert [document.content for document in find_documents(IDS)] == IDS
    assert find_documents(TEXTS).fingerprint != find_documents(TEXTS[:3]).fingerprint
    (one,) = find_documents([{"body": "x", "n": 7}], column="body", id_column="n")
    assert (one.id, one.content) == ("7", "x")


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ([{"body": "x"}], {}, r"row 0 of a list of 1 has body; a document is a text or a list of"),
        (["a", None], {}, r"row 1 of a list of 2 has the value None; a document is a text or a"),
        ([{"text": 5}], {}, r"row 0 of a list of 1 has the value 5"),
        ([{"text": ["a"]}], {}, r"has the value \['a'\]"),
        (
            [{"text": b"ab"}], {},
            r"has the value b'ab'; .* in the column text .* Bytes are neither; decode them",
        ),
        (
            [{"text": "x", "more": {1: "a", "b": "c"}}], {},
            r"a list of 1 cannot be read: '<' not .*; each row must be what JSON can contain",
        ),
        (
            [{"text": "x", 5: "y"}], {},
            r"a list of 1 cannot be read: '<' not .* and each key a string",
        ),
        ([{5: "y"}], {}, r"row 0 of a list of 1 has 5; a document is a text or a list of token"),
        ([{"text": "x"}], {"id_column": "key"}, r"row 0 of a list of 1 has no 'key'; it has text"),
        (
            [{"text": "x", "key": 1}] * 2, {"id_column": "key"},
            r"two rows of a list of 2 have the key 1; ids must be distinct",
        ),
        (
            [{"text": "x", "key": "a\ud83d"}], {"id_column": "key"},
            r"row 0 of a list of 1 has the key 'a\\ud83d', which is no Unicode text",
        ),
    ],
)  # fmt: skip
def test_a_row_without_a_document_or_an_id_of_its_own_is_refused(rows, options, sentence):
    with pytest.raises(SpecError, match=sentence):
        list(find_documents(rows, **options))


def test_a_wrong_column_of_any_file_is_told_before_the_documents_are_read(tmp_path):
    """And so before an engine starts."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    write_jsonl(tmp_path / "b.jsonl", [{"body": "three"}])
    with pytest.raises(SpecError, match=r"row 2 of .* has body; a document is a text or a list"):
        find_documents(tmp_path)
    write_jsonl(tmp_path / "b.jsonl", [{"text": "three", "id": 7}])
    with pytest.raises(SpecError, match=r"row 0 of .* has no 'id'; it has text"):
        find_documents(tmp_path, id_column="id")
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(FileError, match=r"line 1 of .*b\.jsonl cannot be read"):
        find_documents(tmp_path)
    (tmp_path / "b.jsonl").write_text("")
    assert find_documents(tmp_path).count == 2
    with pytest.raises(SpecError, match=r"row 0 of a list of 2 has the value 5"):
        find_documents([{"text": 5}, {"text": "x"}])


@pytest.mark.parametrize("id_column", [None, "key"])
def test_a_wrong_column_of_parquet_is_told_with_the_columns_that_are_there(id_column, tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [{"body": "one", "n": 5}])
    with pytest.raises(SpecError, match=r"row 0 of .*x\.parquet has body, n; a document is"):
        find_documents(path, id_column=id_column)
    with pytest.raises(SpecError, match=r"row 0 of .* has body, n; .* in the column prose"):
        find_documents(path, "prose", id_column)


def test_bytes_of_a_parquet_file_are_no_token_ids(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [{"input_ids": b"ab"}])
    with pytest.raises(SpecError, match=r"row 0 of .* has the value b'ab'; .* Bytes are neither"):
        find_documents(path)


def test_a_damaged_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(FileError, match=r"line 2 of .*x\.jsonl cannot be read"):
        list(find_documents(tmp_path))
    (tmp_path / "x.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(FileError, match=r"line 1 of .*x\.jsonl cannot be read: maximum recursion"):
        list(find_documents(tmp_path))
    (tmp_path / "x.jsonl").write_text("5\n")
    with pytest.raises(FileError, match=r"line 1 of .*x\.jsonl is 5; it must be an object"):
        list(find_documents(tmp_path))
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(SpecError, match=r"x\.csv cannot be read; a data set consists of"):
        find_documents(tmp_path / "x.csv")
    (tmp_path / "x.parquet").write_text("no parquet")
    pytest.importorskip("pyarrow")
    with pytest.raises(FileError, match=r"x\.parquet cannot be read"):
        find_documents(tmp_path / "x.parquet")
    with pytest.raises(SpecError, match="it must be a path, the name of a Hugging Face data set"):
        find_documents(5)


@pytest.mark.parametrize("num_read", [0, 1])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_file_that_changes_after_its_fingerprint_is_refused(write, num_read, tmp_path):
    path = write(tmp_path / f"x.{'jsonl' if write is write_jsonl else 'parquet'}", [{"text": "a"}])
    documents = iter(find_documents(tmp_path))
    assert [next(documents).content for _ in range(num_read)] == ["a"] * num_read
    write(path, [{"text": "a"}, {"text": "b"}])
    with pytest.raises(FileError, match="was changed or replaced after its fingerprint"):
        list(documents)
    assert [document.content for document in find_documents(tmp_path)] == ["a", "b"]
    documents = iter(find_documents(tmp_path))
    path.unlink()
    with pytest.raises(FileError, match=r"cannot be read: .*No such file"):
        list(documents)


@pytest.mark.parametrize("name", ["no.jsonl", "no/where.parquet", "/nowhere"])
def test_a_path_that_is_not_there_is_refused_as_a_path(name):
    with pytest.raises(FileError, match=f"there is no file or folder {name}; give the path of an"):
        find_documents(name)


def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out(tmp_path):
    (tmp_path / "set" / "shut").mkdir(parents=True)
    for name in ("a.txt", "shut/b.txt"):
        (tmp_path / "set" / name).write_text("first")
    with nobody(tmp_path):
        assert find_documents(tmp_path / "set").count == 2
        (tmp_path / "set" / "shut").chmod(0)
        with pytest.raises(FileError, match="shut cannot be read: Permission denied"):
            find_documents(tmp_path / "set")
        with pytest.raises(FileError, match=r"b\.txt' cannot be read: Permission denied"):
            find_documents(tmp_path / "set" / "shut" / "b.txt")
    with pytest.raises(FileError, match="cannot be read: File name too long"):
        find_documents("a text in place of a list of texts " * 200)


def test_a_folder_is_read_whatever_its_name_ends_with(tmp_path):
    (tmp_path / "x.parquet").mkdir()
    (tmp_path / "x.parquet" / "part.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    found = find_documents(tmp_path)
    assert [document.content for document in found] == ["first", "second"]


def test_without_the_package_datasets_a_name_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SpecError, match=r"NeelNanda/pile-10k is no file or folder .*pip install"):
        find_documents("NeelNanda/pile-10k")


def test_data_sets_of_hugging_face_have_the_librarys_fingerprint(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS, "key": list("abcd")})
    made.save_to_disk(str(tmp_path / "saved"))
    saved = find_documents(str(tmp_path / "saved"), id_column="key")
    assert [(d.id, d.content) for d in saved] == list(zip("abcd", TEXTS, strict=True))
    assert find_documents(str(tmp_path / "saved")).fingerprint == saved.fingerprint
    assert find_documents(made).fingerprint == made._fingerprint
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("text\na\nb\n")
    assert [d.content for d in find_documents(str(tmp_path / "csv"))] == ["a", "b"]
    with pytest.raises(FileError, match="cannot be loaded"):
        find_documents(str(tmp_path / "csv"), split="nowhere")
