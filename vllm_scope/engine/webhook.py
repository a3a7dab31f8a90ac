"""Sends verdicts to an operator's HTTP address, on a thread of its own.

Owns:  Webhook.
Runs:  in the front-end. `tell` only queues. `Judge` calls `tell` on any thread, one call at a time.

Promise: an address that hangs or fails delays no other work. If the queue is full, a verdict is
dropped and counted. The first failure is logged. Later failures are only counted. A body has
numbers and names, never a request's text.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from urllib.error import HTTPError

from vllm_scope.control.activity import OUTCOMES
from vllm_scope.control.background import Background
from vllm_scope.errors import SpecError, shown
from vllm_scope.sinks.metrics import count_escalation

logger = logging.getLogger("vllm.vllm_scope")
#: The largest number of verdicts that wait for an address; the timeout of one HTTP request in s.
MOST_WAITING, TIMEOUT_S = 1024, 5.0


class Webhook(Background):
    """Sends verdicts to one address.

    Args:
        url: http or https. Only an operator sets the address, never a caller.
    """

    def __init__(self, url: str) -> None:
        super().__init__("vllm-scope-webhook")
        self.url = url
        self._waiting: queue.Queue[tuple[bytes, Callable[[], object] | None]] = queue.Queue(
            MOST_WAITING
        )
        #: `tell` counts "dropped". The webhook's thread counts the other outcomes.
        self._ended = dict.fromkeys(OUTCOMES, 0)
        #: Held while a verdict changes from waiting to ended. Therefore `outcomes` never counts a
        #: verdict twice.
        self._ending = threading.Lock()
        self._said = False

    @staticmethod
    def parse(url: object, where: str) -> Webhook:
        """A Webhook of this URL. Raises SpecError if the URL does not begin with http or https."""
        if not isinstance(url, str) or urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise SpecError(f"{where} is {shown(url)}; it must be a URL of http or https.")
        return Webhook(url)

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome (control.activity.OUTCOMES) -> the number of verdicts so far."""
        with self._ending:
            return self._ended | {"waiting": self._waiting.unfinished_tasks}

    def _count(self, outcome: str) -> None:
        self._ended[outcome] += 1
        count_escalation(outcome)

    def _say(self, error: Exception) -> None:
        """Write the first failure to the log. The line has only the URL's host, because a URL can
        have a secret."""
        if self._said:
            return
        self._said = True
        name = type(error).__name__
        what = f"HTTP {error.code}" if isinstance(error, HTTPError) else name
        logger.warning(
            "vllm-scope: a verdict did not reach the webhook at %s (%s). Later failures are not "
            "logged; /metrics counts them (vllm_scope_monitor_escalations).",
            urllib.parse.urlsplit(self.url).hostname, what,
        )  # fmt: skip

    def tell(self, body: Mapping[str, object], ended: Callable[[], object] | None = None) -> None:
        """Queue a JSON object for the webhook's thread. Never blocks. If the queue is full, the
        object is dropped and counted immediately.

        Args:
            ended: called on the webhook's thread after the outcome is counted. If the object is
                dropped, `ended` is not called.
        """
        self._start()
        try:
            self._waiting.put_nowait((json.dumps(body).encode(), ended))
        except queue.Full:
            self._count("dropped")

    def _run(self) -> None:
        while True:
            body, ended = self._waiting.get()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.url, body, headers)
            outcome = "sent"
            try:
                urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
            except Exception as error:
                # urllib raises OSError, and raises HTTPException for malformed answers.
                self._say(error)
                outcome = "failed"
            with self._ending:
                self._count(outcome)
                self._waiting.task_done()
            if ended is not None:
                ended()
