"""Reads the documents of a data set. A document is a text or token ids, with an id.

Owns:  Document, Documents, `find_documents`.
Runs:  in the process of a harvest or a feed. `find_documents` runs on the caller's thread, and a
       separate thread reads the documents.
To:    contexts.

Promise: each reading of the same data set finds the same documents, ids and fingerprint. If a file
changes after its fingerprint was computed, the reading raises FileError. Only one batch of a
file's documents is in memory at a time. With an `id_column`, the memory also holds a digest of each
id.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vllm_scope.errors import FileError, SpecError, reason_of, shown
from vllm_scope.files.folder import not_read
from vllm_scope.request.bounded_json import is_unicode

#: If the caller names no column, a document is in the first of these columns that has a value.
COLUMNS = ("text", "input_ids", "token_ids", "tokens")
SUFFIXES = (".parquet", ".jsonl", ".txt")
#: For a Parquet file: the number of bytes that are hashed in one call, and the number of rows that
#: are read at a time.
_CHUNK, _BATCH = 1 << 20, 256
#: The inode, size and modification time of a file.
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Document:
    """A text or token ids, with an id.

    Attributes:
        content: a text, or a list of token ids.
    """

    id: str
    content: str | Sequence[int]


@dataclass(frozen=True)
class Documents:
    """The documents of a data set, in order.

    Attributes:
        source: the name or path of the data set, for error texts and the manifest. `?` replaces
            bytes of a path that are not UTF-8.
        fingerprint: hexadecimal digits. Data sets with different content have different digits.
        count: the number of documents.
        column: the column of texts or token ids, or None for the first of COLUMNS with a value.
        id_column: the column of ids, or None if ids consist of the fingerprint and the row number.
        rows: a function that returns an iterator over the data set's rows.
    """

    source: str
    fingerprint: str
    count: int
    column: str | None
    id_column: str | None
    rows: Callable[[], Iterator[Mapping[str, Any]]]

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents. Raises the errors of `document`, SpecError if two rows have the same
        id, and FileError if a row cannot be read."""
        seen: set[bytes] = set()
        for number, row in enumerate(self.rows()):
            one = self.document(row, number)
            if self.id_column is not None:
                key = digest_of(one.id)
                if key in seen:
                    raise SpecError(
                        f"two rows of {self.source} have the {self.id_column} "
                        f"{shown(row[self.id_column])}; ids must be distinct. Name another "
                        "column, or leave id_column out: ids then contain row numbers."
                    )
                seen.add(key)
            yield one

    def document(self, row: Mapping[str, Any], number: int) -> Document:
        """Make a Document from a row. Raises SpecError if the document or its id is missing or
        wrong."""
        content = self._content(row, number)
        if self.id_column is None:
            return Document(f"{self.fingerprint[:12]}-{number}", content)
        if (found := row.get(self.id_column)) is None:
            raise SpecError(
                f"row {number} of {self.source} has no {shown(self.id_column)}; it has "
                f"{', '.join(row)}."
            )
        if not is_unicode(str(found)):
            raise SpecError(
                f"row {number} of {self.source} has the {self.id_column} {found!a}, which is "
                "no Unicode text; name another column, or leave id_column out."
            )
        return Document(str(found), content)

    def _content(self, row: Mapping[str, Any], number: int) -> str | Sequence[int]:
        names = COLUMNS if self.column is None else (self.column,)
        found = next((row[name] for name in names if row.get(name) is not None), None)
        if isinstance(found, str):
            return found
        # bytes are a Sequence of ints, but these ints are no token ids.
        is_bytes = isinstance(found, bytes | bytearray | memoryview)
        if isinstance(found, Sequence) and not is_bytes and all(type(i) is int for i in found):
            return found
        there = any(name in row for name in names)
        what = f"has the value {shown(found)}" if there else f"has {', '.join(map(str, row))}"
        advice = " Bytes are neither; decode them to a text or to token ids." if is_bytes else ""
        raise SpecError(
            f"row {number} of {self.source} {what}; a document is a text or a list of token ids, "
            f"in the column {' or '.join(names)}.{advice}"
        )


def digest_of(text: str) -> bytes:
    """The BLAKE2b digest of a text, in 16 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def find_documents(
    dataset: object,
    column: str | None = None,
    id_column: str | None = None,
    split: str = "train",
    config: str | None = None,
) -> Documents:
    """Find the documents of a data set. This function reads local files once for the fingerprint.

    The function checks the first document of each file, so that the caller learns of a wrong column
    before an engine starts.

    Args:
        dataset: a `.parquet`, `.jsonl` or `.txt` file, a folder of such files, the name or the
            folder of a Hugging Face data set, a `datasets.Dataset`, or a list. The items of a list
            are texts, lists of token ids, or rows (dicts). Each line of a `.txt` file that is not
            empty is a document.
        column: the column of texts or token ids, or None for the first of COLUMNS with a value.
        id_column: the column of ids, or None if ids consist of the fingerprint and the row number.
            The ids in a column must be distinct.
        split, config: the split and configuration of a Hugging Face data set.

    Raises:
        FileError: there is no such data set, or a file cannot be read.
        SpecError: the kind of the data set is unknown, a package that reads it is missing, a list
            has a row that JSON cannot contain, or the first row of the data set or of a file has no
            document or no valid id.
    """
    if isinstance(dataset, list | tuple):
        rows = [row if isinstance(row, Mapping) else {COLUMNS[0]: row} for row in dataset]
        name = f"a list of {len(rows)}"
        try:
            text = json.dumps(rows, sort_keys=True, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(
                f"{name} cannot be read: {error}; each row must be what JSON can contain, and each "
                "key a string."
            ) from None
        found = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return _checked(Documents(name, found, len(rows), column, id_column, lambda: iter(rows)))
    if not isinstance(dataset, str | os.PathLike):
        return _of_library(dataset, str(type(dataset).__name__), column, id_column)
    path = Path(dataset)
    try:
        files = [path] if path.is_file() else sorted(_files(path))
        is_there = path.exists()
    except OSError as error:  # for example, this process may not enter a parent folder
        raise FileError(f"{shown(str(path))} cannot be read: {error.strerror}") from None
    if files:
        return _of_files(path, files, column, id_column)
    if not is_there and (path.suffix in SUFFIXES or path.is_absolute()):
        raise FileError(
            f"there is no file or folder {path}; give the path of an existing file or folder, or "
            "the name of a Hugging Face data set."
        )
    return _of_library(_load(str(dataset), split, config), str(dataset), column, id_column)


def _checked(documents: Documents) -> Documents:
    """Check the first row, and return the documents. Raises SpecError if the row has no document or
    no valid id."""
    next(iter(documents), None)
    return documents


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder and its subfolders, in any order. Raises FileError if a folder cannot
    be read. `Path.rglob` would leave out such a folder without an error."""
    for inside, folders, names in os.walk(folder, onerror=not_read):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(inside, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.suffix in SUFFIXES)


def _of_files(
    root: Path, files: Sequence[Path], column: str | None, id_column: str | None
) -> Documents:
    whole, starts = hashlib.sha256(), [0]
    stamps: list[_Stamp] = []
    wanted = {*(COLUMNS if column is None else (column,)), id_column}
    for file in files:
        if file.suffix not in SUFFIXES:
            raise SpecError(
                f"{file} cannot be read; a data set consists of {', '.join(SUFFIXES)} files."
            )
        name = file.name if file == root else file.relative_to(root).as_posix()
        stamps.append(_stamp(file))
        num_rows, digest = _looked_at(file)
        whole.update(f"{name}\0{digest}\0".encode("utf-8", "surrogateescape"))
        starts.append(starts[-1] + num_rows)
    source = str(root).encode("utf-8", "replace").decode()  # the name of a file can be any bytes
    documents = Documents(
        source, whole.hexdigest(), starts[-1], column, id_column,
        lambda: chain.from_iterable(map(partial(_same_rows, wanted=wanted), files, stamps)),
    )  # fmt: skip
    for file, start in zip(files, starts, strict=False):
        if (row := next(_rows(file, wanted), None)) is not None:
            documents.document(row, start)
    return documents


def _looked_at(file: Path) -> tuple[int, str]:
    """The number of documents in a file, and the SHA-256 of the file's bytes."""
    found, num_lines = hashlib.sha256(), 0
    with _opened(file) as opened:
        if file.suffix == ".parquet":
            while chunk := opened.read(_CHUNK):
                found.update(chunk)
            return _parquet(file).metadata.num_rows, found.hexdigest()
        for line in opened:
            found.update(line)
            num_lines += bool(line.strip())
    return num_lines, found.hexdigest()


def _stamp(file: Path) -> _Stamp:
    """The stamp of a file. Raises FileError."""
    try:
        found = file.stat()
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error}") from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _same_rows(
    file: Path, stamp: _Stamp, wanted: Collection[str | None]
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file. Raises FileError if the file's stamp is not `stamp` before the
    first row is read or after the last row. Such a file has changed since its fingerprint was
    computed."""
    for rows in (_rows(file, wanted), ()):
        if _stamp(file) != stamp:
            raise FileError(
                f"{file} was changed or replaced after its fingerprint was computed; leave the "
                "files of the data set unchanged, and run the command again."
            )
        yield from rows


def _opened(file: Path) -> Any:
    try:
        return open(file, "rb")
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error}") from None


def _rows(file: Path, wanted: Collection[str | None]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file.

    From a Parquet file, this function reads only the wanted columns, or all columns if the file has
    no wanted column.
    """
    if file.suffix == ".parquet":
        try:
            opened = _parquet(file)
            names = [name for name in opened.schema_arrow.names if name in wanted]
            for batch in opened.iter_batches(_BATCH, columns=names or None):
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:  # pyarrow raises errors of these classes
            raise FileError(f"{file} cannot be read: {error}") from None
        return
    with _opened(file) as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield _row(line, file, number)


def _row(line: bytes, file: Path, number: int) -> Mapping[str, Any]:
    try:
        if file.suffix == ".txt":
            return {COLUMNS[0]: line.decode().rstrip("\r\n")}
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"line {number} of {file} cannot be read: {error}") from None
    if not isinstance(row, Mapping):
        raise FileError(f"line {number} of {file} is {shown(row)}; it must be an object.")
    return row


def _parquet(file: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise SpecError(
            f"{file} needs the package pyarrow; pip install 'vllm-scope[files]', or give JSONL."
        ) from None
    try:
        return ParquetFile(file)
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read: {error}") from None


def _load(name: str, split: str, config: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise SpecError(
            f"{name} is no file or folder of {', '.join(SUFFIXES)} files, and a Hugging Face data "
            "set needs the package datasets; pip install datasets, or give a path."
        ) from None
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
            return found[split] if isinstance(found, Mapping) else found
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package datasets raises errors of many classes
        raise FileError(f"the data set {name} cannot be loaded: {reason_of(error)}") from None


def _of_library(found: Any, source: str, column: str | None, id_column: str | None) -> Documents:
    """The documents of a `datasets.Dataset`. The fingerprint of such a data set depends on its
    content and its transforms."""
    fingerprint = getattr(found, "_fingerprint", None)
    if not isinstance(fingerprint, str) or not isinstance(found, Iterable):
        raise SpecError(
            f"the data set is {shown(found)}; it must be a path, the name of a Hugging Face data "
            "set, a datasets.Dataset that is not streamed, or a list."
        )
    return _checked(
        Documents(source, fingerprint, len(found), column, id_column, lambda: iter(found))  # type: ignore[arg-type]
    )
