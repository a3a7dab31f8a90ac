"""Policies for tests, and how they are installed: by entry points, for this process and others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_scope.control import Decision, Start

ENTRY_POINTS = """[vllm_scope.policies]
follow = tests.policies:Follow
script = tests.policies:Script
"""


class Follow:
    """The scale of `steer` follows a score: `gain * score` of the token before."""

    def __init__(self, most: float = 2.0) -> None:
        self.most = most

    def check(self, options: Any) -> None:
        if set(options) - {"gain", "score"}:
            raise ValueError(f"the options are gain and score, not {sorted(options)}.")

    def start(self, request: Start) -> Any:
        return Following(self.most, **request.options)


class Following:
    def __init__(self, most: float, gain: float = 1.0, score: str = "p") -> None:
        self.most, self.gain, self.score = most, gain, score

    def observe(self, position: int, scores: Any) -> Decision:
        return Decision({"steer": scale_of(scores[self.score], self.gain, self.most)})


def scale_of(score: float, gain: float, most: float = 2.0) -> float:
    # In steps, so that the last bits of a score decide nothing.
    return max(-most, min(most, round(gain * score, 2)))


class Script:
    """Does at each position what the request's options say; remembers what it has seen."""

    #: Request id -> (position, scores) of each call, of running policies of this process.
    seen: dict[str, list[tuple[int, dict[str, float]]]] = {}  # noqa: RUF012

    def check(self, options: Any) -> None:
        if options.get("raise"):
            raise KeyError(options["raise"])

    def start(self, request: Start) -> Any:
        if request.options.get("at start"):
            raise RuntimeError("at start")
        return Scripted(request)


class Scripted:
    def __init__(self, request: Start) -> None:
        self.first, self.script = request.num_prompt_tokens, request.options
        self.seen = Script.seen.setdefault(f"{request.request_id}/{request.completion}", [])

    def observe(self, position: int, scores: Any) -> Any:
        self.seen.append((position, dict(scores)))
        todo = self.script.get(str(position - self.first))
        if todo is None:
            return None
        if "raise" in todo:
            raise RuntimeError(todo["raise"])
        if "sleep" in todo:
            time.sleep(todo["sleep"])
            return None
        return todo["returns"] if "returns" in todo else Decision(**todo)


def install(
    folder: Path,
    patch: pytest.MonkeyPatch,
    entry_points: str = ENTRY_POINTS,
    root: Path = Path(__file__).parent.parent,
) -> None:
    """Install both for this process and for those that it starts.

    Args:
        folder: for the entry points.
        root: the folder of their modules.
    """
    made = folder / "vllm_scope_policies_of_tests-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: policies-of-tests\nVersion: 0\n")
    (made / "entry_points.txt").write_text(entry_points)
    for one in (folder, root):
        patch.syspath_prepend(str(one))
    known = os.environ.get("PYTHONPATH", "")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), str(root), known))))
