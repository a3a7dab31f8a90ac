"""Faults that a server has only where a test asks for them, in every one of its processes.

Owns:  Loud (a sink), `install` (a fault in planning), `installed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Characters of what is raised.
LONG = 50_000_000
#: In the ids of requests whose steps cannot be planned.
FAULT = "planning-fault"
_ENTRY_POINTS = """
[vllm_scope.sinks]
loud = tests.server.trouble:Loud
[vllm.general_plugins]
vllm_scope_trouble = tests.server.trouble:install
"""


class Loud:
    """A plugin whose errors are long."""

    live = True

    def write(self, block: Any) -> None:
        raise RuntimeError("x" * LONG)

    def finish(self, ending: Any) -> None:
        raise RuntimeError("y" * LONG)

    def flush(self) -> None:
        raise RuntimeError("z" * LONG)

    def close(self) -> None: ...


def install() -> None:
    """Have vLLM's processes raise where they plan a step of a request with FAULT in its id."""
    from vllm_scope.worker.plan import Planner

    begin_step = Planner.begin_step

    def failing(self: Any, batch: Any) -> Any:
        if any(FAULT in req_id for req_id in batch.req_ids):
            raise RuntimeError("x" * LONG)
        return begin_step(self, batch)

    Planner.begin_step = failing  # type: ignore[method-assign]


def installed(folder: Path) -> str:
    """Make the folder one that has both as entry points; for PYTHONPATH."""
    made = folder / "vllm_scope_trouble-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-scope-trouble\nVersion: 0\n")
    (made / "entry_points.txt").write_text(_ENTRY_POINTS)
    return str(folder)
