"""vLLM's Rust front-end sends requests past ours: one with a scope is refused, others are not."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from vllm_scope import Read, SpecError, compat, scope
from vllm_scope.engine import rust_frontend
from vllm_scope.engine.params import TICKET

SCOPE = scope(Read("resid_post", layers=[0]))
OURS = {TICKET: b""}


def enter(extra, rank=0):
    """What EngineCore makes of a request with these `extra_args`."""
    params = None if extra is None else SimpleNamespace(extra_args=extra or None)
    request = SimpleNamespace(request_id="r", sampling_params=params)
    parallel = SimpleNamespace(_api_process_rank=rank)
    core = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    return rust_frontend._preprocess(lambda core, request: "in", core, request)


@pytest.fixture
def rust(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "vllm.vllm_scope")
    return lambda: caplog.text


@pytest.mark.parametrize(
    "extra", [SCOPE, {"output_residual_stream": [1]}], ids=["a-scope", "words-of-another-system"]
)
def test_a_request_with_a_scope_that_nobody_checked_is_refused_and_logged(extra, said):
    compat.register()
    with pytest.raises(SpecError, match=r"Rust front-end.* Start without VLLM_USE_RUST_FRONTEND"):
        enter(extra)
    assert "request r is refused" in said()


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}], ids=["pooling", "none", "another-s"])
def test_a_request_without_a_scope_is_served(extra, rust):
    assert enter(extra, rank=-1) == "in"


def test_a_request_of_our_front_end_is_served(rust):
    assert enter(OURS) == "in", "LLM ignores the variable"


def test_a_ticket_that_a_client_made_itself_is_refused(rust):
    with pytest.raises(SpecError):
        enter(OURS, rank=-1)


def test_several_python_servers_are_not_the_rust_front_end():
    assert enter(OURS, rank=-1) == "in"


def test_its_start_is_warned_of(said):
    started = []
    rust_frontend._start(lambda self, *args: started.append(args), None, "vllm-rs")
    assert started == [("vllm-rs",)]
    assert "Requests with a scope are refused" in said()
