"""The process of a feed with recorded rows in place of an engine: it starts at once.

python -m tests.recorded_feeder CHANNEL MEMORY TRAINER < order
"""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

from tests.recorded import RecordedEngine

#: The engine dies after so many contexts; 0: never.
DIES = "dies_after"
#: So long the engine takes to start, in seconds.
STARTS = "starts_s"


class Engine(RecordedEngine):
    def __init__(self, model: str, options: dict[str, Any], sites: list[str]) -> None:
        super().__init__(model=model)
        self.dies_after = options.get(DIES, 0)
        if seconds := options.get(STARTS, 0):
            print("an engine starts", file=sys.stderr, flush=True)
            time.sleep(seconds)

    def _ended(self, some: Any, reads: Any) -> Any:
        if self.dies_after and len(self.computed) >= self.dies_after:
            raise RuntimeError("the graphics card is on fire")
        return super()._ended(some, reads)


def stand_in() -> ModuleType:
    """In place of engine.offline, which imports vLLM."""
    module: Any = ModuleType("vllm_scope.engine.offline")
    module.OfflineEngine = lambda model, options, sites: (
        Engine(model, options, sites) if isinstance(model, str) else model
    )
    found: ModuleType = module
    return found


if __name__ == "__main__":
    from vllm_scope.feeds.feeder import main

    sys.modules["vllm_scope.engine.offline"] = stand_in()
    main()
