"""Requests that differ in nothing that the check looks at: the first is checked for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from vllm_scope import Read, SpecError
from vllm_scope.engine.frontend import alike as module
from vllm_scope.engine.frontend.alike import Alike, asking
from vllm_scope.engine.frontend.connection import Connection
from vllm_scope.engine.frontend.prepared import prepare
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.request.actions import Action
from vllm_scope.request.selectors import TokenIds
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import scope

PARAMS = SamplingParams(max_tokens=1)
SHORT, LONG = [5, 6], list(range(10, 40))


@pytest.fixture
def connection() -> Connection:
    limits = Limits((16,), 0, 100, 100, 100, 100, False)
    return Connection(Sites(2, 4, "float32", (0, 2, 4)), None, 1, 1.0, limits, {}, {})


def alone(connection: Connection, actions: list[Action], ids: list[int]):
    """The check of one request."""
    params = asking(PARAMS, scope(*actions)["scope"])
    return prepare(
        connection, SimpleNamespace(sampling_params=params, prompt_token_ids=ids, resumable=False)
    )


@pytest.mark.parametrize("tokens", ["all", "prompt"])
def test_a_prompt_beside_a_checked_one_is_prepared_as_if_it_were_checked(connection, tokens):
    reads = [Read("resid_post", layers=[0, 1], tokens=tokens)]
    alike = Alike(connection)
    first = alike.checked("harvest", reads, PARAMS, SHORT)
    assert alike.with_prompt(first, LONG) == alone(connection, reads, LONG)
    assert alike.with_prompt(first, SHORT) == first


@pytest.mark.parametrize(
    "tokens", ["last", "generated", [0, -1], TokenIds(13)], ids=["last", "generated", "at", "ids"]
)
def test_a_prompt_on_which_the_check_depends_is_checked_itself(connection, tokens):
    alike = Alike(connection)
    reads = [Read("resid_post", layers=[1], tokens=tokens)]
    assert alike.with_prompt(alike.checked("harvest", reads, PARAMS, SHORT), LONG) is None


def test_the_first_request_of_each_kind_is_checked_and_no_other(connection, monkeypatch):
    checked = []

    def counted(connection, request):
        checked.append(request.prompt_token_ids)
        return prepare(connection, request)

    monkeypatch.setattr(module, "prepare", counted)
    alike, reads = Alike(connection), [Read("resid_post", layers=[0])]
    for kind, ids in (("a", SHORT), ("a", LONG), ("b", LONG), ("b", SHORT)):
        alike.checked(kind, reads, PARAMS, ids)
    assert checked == [SHORT, LONG]


def test_a_first_request_that_is_not_possible_is_refused_each_time(connection):
    alike = Alike(connection)
    for _ in range(2):
        with pytest.raises(SpecError, match="layer"):
            alike.checked("harvest", [Read("resid_post", layers=[7])], PARAMS, SHORT)
    found = alike.checked("harvest", [Read("embed")], PARAMS, SHORT)
    assert found.prompt_ids == SHORT
