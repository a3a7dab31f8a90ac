"""Base classes of objects that all requests share and vLLM must not copy.

Owns:  Uncopied, Background.
Runs:  in the front-end.
To:    tally, backlog, controller, server.peers, engine.webhook.
"""

from __future__ import annotations

import threading
from typing import Self


class Uncopied:
    """An object that `deepcopy` does not copy. vLLM makes deep copies of SamplingParams. The
    SamplingParams of a request can refer to the object until the request enters."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Background(Uncopied):
    """An object with a daemon thread. The thread runs the method `_run`.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def _run(self) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        """Start the thread if the thread does not run yet. Any thread can call this method."""
        with self._starting:  # a thread can be started only one time
            if self._thread.ident is None:
                self._thread.start()
