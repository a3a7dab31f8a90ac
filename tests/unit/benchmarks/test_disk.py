"""The benchmark of the disk leaves the folder that it is given as it was."""

from __future__ import annotations

import sys

from benchmarks import disk


def test_the_benchmark_removes_its_own_files_only(monkeypatch, tmp_path):
    folders = []

    def write(folder, *_):
        (folder / "dd").write_text("rows")
        folders.append(folder)
        return 1.0

    monkeypatch.setattr(disk, "writers_alone", write)
    monkeypatch.setattr(disk, "through_an_engine", write)
    monkeypatch.setattr(sys, "argv", ["disk", "--folder", str(tmp_path)])
    (tmp_path / "mine").write_text("kept")
    disk.main()
    assert [folder.parent for folder in folders] == [tmp_path, tmp_path]
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("mine", "kept")]
