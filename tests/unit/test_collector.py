"""The garbage collector after a test: as it was before, also if the test failed."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from tests.collector import collector_off, frozen_heap

ROOT = Path(__file__).parent.parent.parent


def fail_in(context):
    with context:
        raise ZeroDivisionError


def test_an_error_leaves_the_collector_as_it_was():
    with collector_off():
        assert not gc.isenabled()
        with pytest.raises(ZeroDivisionError):
            fail_in(collector_off())
        assert not gc.isenabled()  # as the outer one has it
    with pytest.raises(ZeroDivisionError):
        fail_in(collector_off())
    assert gc.isenabled()


def test_an_error_leaves_no_object_frozen():
    with frozen_heap():
        assert gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError):
        fail_in(frozen_heap())
    assert not gc.get_freeze_count()


def test_tests_and_benchmarks_hold_the_collector_in_a_context():
    """A bare call stays in force when an assertion after it fails."""
    bare = re.compile(r"\bgc\.(disable|freeze)\(\)|from gc import")
    here = {ROOT / "tests" / "collector.py", Path(__file__)}
    files = {*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")} - here
    assert len(files) > 100
    assert [str(f.relative_to(ROOT)) for f in sorted(files) if bare.search(f.read_text())] == []
