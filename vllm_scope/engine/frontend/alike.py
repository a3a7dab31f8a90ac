"""Requests that are alike: the check of the first request holds for all of them.

Owns:  Alike.
Runs:  in the front-end process, on the thread that sends the requests.
From:  prepared (the check).   To: sweeping, engine.offline; requests (`prepared_as`).
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
    """Checks the first of several alike requests. The check holds for all these requests.

    Args:
        connection: the connection of the requests' engine.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: (the kind of the current requests, the checked first request of this kind)
        self._first: tuple[Hashable, Prepared] | None = None
        #: The last spec of edits.
        self._last: Spec | None = None

    @staticmethod
    def of_engine(engine: Engine) -> Alike | None:
        """An Alike for an engine. None if the engine has no taps, or if a translator adds actions
        (such as monitors) to every request."""
        connection = connections.of(engine.output_processor)
        if connection is None or connection.reason is not None:
            return None
        no_keys = SimpleNamespace(extra_args=None)
        return None if translators.applying(no_keys, engine.vllm_config) else Alike(connection)

    def checked(
        self, kind: Hashable, actions: Sequence[Action], params: Any, ids: Sequence[int]
    ) -> Prepared:
        """The checked first request of this kind. Stored until the caller names another kind.

        Args:
            kind: equal for all requests for which one check is enough.
            actions, params, ids: the parts of this request. Used only for the first request.

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
        """A request that differs from a checked one only in the place and the numbers of its edits.

        Args:
            each: the request's edits. If there are several tuples, the request stands for several
                variants: one variant for each tuple.
        """
        specs = []
        for edits in each:
            self._last = Spec(edits=edits) if self._last is None else self._last.with_edits(edits)
            specs.append(self._last)
        return replace(checked, spec=specs[0], variants=tuple(specs) if specs[1:] else ())

    def with_prompt(self, checked: Prepared, ids: list[int]) -> Prepared | None:
        """A request that differs from a checked one only in its prompt.

        Args:
            ids: token ids of the prompt, at least one token.

        Returns:
            None if the check depends on the prompt: the actions are not uniform (Resolved.uniform),
            or the prompt delivers no rows.
        """
        if not checked.asked.uniform or checked.first_position != 0:
            return None
        num_bytes = bytes_of_prompt(checked.own, checked.asked, self._connection.sites, ids)
        return replace(checked, prompt_ids=ids, num_bytes=num_bytes)


def asking(params: Any, text: str = "") -> Any:
    """A copy of SamplingParams with a spec. For a prepared request the text can be empty, because
    no code reads the text."""
    made = copy(params)
    made.extra_args = {"scope": text}
    return made
