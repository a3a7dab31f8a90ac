"""Requests that are so similar that the check of the first request is valid for all of them.

Owns:  Alike.
Runs:  in the front-end process, on the thread that sends the requests.
From:  prepared (the check).   To: sweeping, engine.offline, requests (`prepared_as`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.connection import Connection, connections
from vllm_scope.engine.frontend.prepared import Prepared, prepare
from vllm_scope.engine.vllm_types import Engine
from vllm_scope.request.actions import Action, Edit
from vllm_scope.request.spec import Spec, scope
from vllm_scope.results.budget import bytes_of_prompt


class Alike:
    """Checks the first of several similar requests. The check is valid for all of these requests.

    Args:
        connection: the front-end's connection to the engine that computes the requests.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: A pair: the kind of the current requests, and the checked first request of this kind.
        self._first: tuple[Hashable, Prepared] | None = None
        #: The spec that `with_edits` made last.
        self._last: Spec | None = None

    @staticmethod
    def of_engine(engine: Engine) -> Alike | None:
        """An Alike for the requests of an engine. None if the engine is not connected or has no
        taps, or if a translator adds actions (such as monitors) to every request. If a translator
        begins to add actions later, the requests that the Alike prepares do not get them."""
        connection = connections.of(engine.output_processor)
        if connection is None or connection.reason is not None:
            return None
        no_keys = SimpleNamespace(extra_args=None)
        return None if translators.applying(no_keys, engine.vllm_config) else Alike(connection)

    def checked(
        self, kind: Hashable, actions: Sequence[Action], params: Any, ids: Sequence[int]
    ) -> Prepared:
        """The checked first request of this kind, which is stored until the caller names another
        kind.

        Args:
            kind: a value that is equal for all requests for which one check is enough.
            actions, params, ids: the parts of the request, which are used only for the first
                request.

        Raises:
            SpecError: the engine cannot run the first request.
        """
        if self._first is None or self._first[0] != kind:
            asked: Any = SimpleNamespace(
                sampling_params=asking(params, scope(*actions)["scope"]),
                prompt_token_ids=ids, resumable=False,
            )  # fmt: skip
            self._first = kind, prepare(self._connection, asked)
        return self._first[1]

    def with_edits(self, checked: Prepared, *each: tuple[Edit, ...]) -> Prepared:
        """A request that differs from `checked` only in the place and the numbers of its edits.

        Args:
            each: the edits of the request, or the edits of each of its variants.
        """
        specs = []
        for edits in each:
            self._last = Spec(edits=edits) if self._last is None else self._last.with_edits(edits)
            specs.append(self._last)
        return replace(checked, spec=specs[0], variants=tuple(specs) if specs[1:] else ())

    def with_prompt(self, checked: Prepared, ids: list[int]) -> Prepared | None:
        """A request that differs from `checked` only in its prompt.

        Args:
            ids: token ids of the prompt, at least one token.

        Returns:
            None if the check of one prompt is not valid for other prompts, because the actions are
            not uniform (Resolved.uniform), or do not need rows from position 0 on.
        """
        if not checked.asked.uniform or checked.first_position != 0:
            return None
        num_bytes = bytes_of_prompt(checked.own, checked.asked, self._connection.sites, ids)
        return replace(checked, prompt_ids=ids, num_bytes=num_bytes)


def asking(params: Any, text: str = "") -> Any:
    """A copy of SamplingParams that contains a spec. If the request is already prepared, the text
    of the spec can be empty, because the spec is not parsed again."""
    made = copy(params)
    made.extra_args = {"scope": text}
    return made
