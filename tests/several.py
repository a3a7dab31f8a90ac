"""A harvest by several recorded engines, each in a process of its own; see `tests.recorded`.

python -m tests.several DATASET OUT '{"long": "pack"}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tests.recorded import READS, RecordedEngine
from vllm_scope.files import FileOptions
from vllm_scope.harvests.documents import find_documents
from vllm_scope.harvests.job import Harvest, Job
from vllm_scope.harvests.manifest import locked
from vllm_scope.harvests.member import Setup
from vllm_scope.harvests.pools import Pool
from vllm_scope.harvests.processes import Processes
from vllm_scope.harvests.several import SeveralEngines
from vllm_scope.harvests.shards import take_left


class LoggedEngine(RecordedEngine):
    """Writes a line for each context that it computes to `log`, as `PID NAME`.

    Args:
        killer: a word of a context's name; the engine's process dies when it computes that one.
        wait_s: for each context.
    """

    def __init__(
        self, log: str, killer: str = "", wait_s: float = 0.0, once: str = "", **fields: Any
    ) -> None:
        super().__init__(**fields)
        self._log, self._killer, self._wait_s, self._once = log, killer, wait_s, once

    def _ended(self, some: list[Any], reads: Any) -> Iterator[Any]:
        for context, rows in super()._ended(some, reads):
            if self._killer and self._killer in context.name and self._kills():
                os.kill(os.getpid(), signal.SIGKILL)
            with open(self._log, "a") as file:
                file.write(f"{os.getpid()} {context.name}\n")
            time.sleep(self._wait_s)
            yield context, rows

    def _kills(self) -> bool:
        """With `once`, a file that is made: only the first time."""
        if not self._once:
            return True
        try:
            os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def harvest(
    dataset: Any,
    out: Any,
    make: Callable[[], RecordedEngine],
    count: int = 2,
    pool: Pool | None = None,
    **options: Any,
) -> Harvest:
    """A harvest into small shards."""
    named = {name: options.pop(name) for name in ("column", "id_column") if name in options}
    files = FileOptions.parse({"root": str(out), "file_mib": 1})
    job = Job(find_documents(dataset, **named), READS, files, progress=False, **options)
    setup = Setup(make, READS, files, str(Path.cwd()))
    with locked(str(out)):
        take_left(files)
        with closing(SeveralEngines(pool or Processes(count, 1), count, setup)) as engines:
            return job.run(engines, engines)


if __name__ == "__main__":
    source, target, log, more = sys.argv[1:]
    harvest(source, target, partial(LoggedEngine, log), **json.loads(more))
