"""Sends verdicts to an operator's HTTP address, on a separate thread.

Owns:  Webhook.
Runs:  in the front-end. `tell` only adds to a queue. `Judge` calls `tell` on any thread, one call
       at a time.

Promise: if an address does not answer or fails, no other work waits. If the queue is full, a
verdict is dropped and counted. The first failure is logged, and later failures are only counted. A
message contains numbers and names, but never the text of a request.
"""

from __future__ import annotations

import json
import logging
import queue
import re
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
#: MOST_WAITING is the largest number of verdicts that can wait. An HTTP request fails if the
#: address sends nothing for TIMEOUT_S seconds.
MOST_WAITING, TIMEOUT_S = 1024, 5.0


class Webhook(Background):
    """Sends verdicts to one address.

    Args:
        url: the address, with http or https. Only an operator can set the address, not a caller.
    """

    def __init__(self, url: str) -> None:
        super().__init__("vllm-scope-webhook")
        self.url = url
        self._waiting: queue.Queue[tuple[bytes, Callable[[], object] | None]] = queue.Queue(
            MOST_WAITING
        )
        #: `tell` counts "dropped". The webhook's thread counts "sent" and "failed".
        self._ended = dict.fromkeys(OUTCOMES, 0)
        #: This lock is held while a verdict changes from waiting to ended, so that `outcomes` never
        #: counts the same verdict twice.
        self._ending = threading.Lock()
        self._said = False

    @staticmethod
    def parse(url: object, where: str) -> Webhook:
        """Make the Webhook for a URL. Raises SpecError if the URL is not http or https, or has no
        host. The text of the error does not have the URL, because a URL can contain a secret."""
        if not isinstance(url, str):
            came = shown(url)
        elif _has_host(url):
            return Webhook(url)
        else:
            came = "a text that is not shown, because a URL can contain a secret"
        raise SpecError(
            f"{where} is {came}; it must be a URL of http or https with a host, without a user "
            "name, spaces and characters that are not ASCII, such as "
            "'https://example.com/verdicts'."
        )

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of verdicts so far, by outcome (control.activity.OUTCOMES)."""
        with self._ending:
            return self._ended | {"waiting": self._waiting.unfinished_tasks}

    def _count(self, outcome: str) -> None:
        self._ended[outcome] += 1
        count_escalation(outcome)

    def _say(self, error: Exception) -> None:
        """Log the first failure. The message has only the host of the URL, because a URL can
        contain a secret."""
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
        """Add a JSON object to the queue of the webhook's thread. This method never blocks. If the
        queue is full, the object is dropped and counted immediately.

        Args:
            ended: called on the webhook's thread, after the object's outcome is counted. If the
                object is dropped, `ended` is not called.
        """
        self._start()
        try:
            self._waiting.put_nowait((json.dumps(body).encode(), ended))
        except queue.Full:
            self._count("dropped")

    def _run(self) -> None:
        opener = urllib.request.build_opener(_NoRedirects)
        while True:
            body, ended = self._waiting.get()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.url, body, headers)
            outcome = "sent"
            try:
                opener.open(request, timeout=TIMEOUT_S).close()
            except Exception as error:
                # urllib raises OSError, and HTTPException for a malformed answer.
                self._say(error)
                outcome = "failed"
            with self._ending:
                self._count(outcome)
                self._waiting.task_done()
            if ended is not None:
                ended()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes urllib raise HTTPError if the address redirects. Otherwise, urllib would send a GET
    without the verdict to the new address."""

    def redirect_request(self, *args: object) -> None:
        return None


def _has_host(url: str) -> bool:
    """True if the text is a URL of http or https with a host, and urllib can send to this URL. For
    urllib, the URL must not have a user name or a space. Its path and query must be ASCII."""
    try:
        parts = urllib.parse.urlsplit(url)
        # The property `port` raises ValueError if the port is not a number from 0 to 65535.
        sane = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    plain = (parts.path + parts.query).isascii() and not re.search(r"[\s\x00-\x1f]", url.strip())
    return sane and plain and "@" not in parts.netloc
