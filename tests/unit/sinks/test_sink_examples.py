"""The example sinks do what they say."""

from __future__ import annotations

import sys
import threading
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_scope.sinks import Block, Ending, RequestInfo

EXAMPLES = Path(__file__).parents[3] / "examples" / "sinks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def block(rows, key=1, probe=None):
    request = RequestInfo(key, f"r{key}", "u", (1, 2))
    return Block(request, "resid_post", 3, np.arange(len(rows)), rows, probe)


def ending(key=1):
    return Ending(RequestInfo(key, f"r{key}", "u", (1, 2)), (3,), "stop", 2, 2, "ok", None)


def test_moments_are_those_of_all_rows_at_once(tmp_path):
    from scope_example_sinks.moments import Moments

    rows = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)) * 3 + 5
    sink = Moments(str(tmp_path / "m.npz"))
    for some in rows.split([1, 7, 200, 292]):
        sink.write(block(some))
    assert sink.finish(ending()).details == {"resid_post.3": 500}
    sink.flush()
    saved = np.load(tmp_path / "m.npz")
    np.testing.assert_allclose(saved["resid_post.3.mean"], rows.double().mean(0), rtol=1e-9)
    covariance = np.cov(rows.double().numpy().T)
    np.testing.assert_allclose(saved["resid_post.3.covariance"], covariance, rtol=1e-9)


def test_a_sae_learns_from_served_rows(tmp_path):
    from scope_example_sinks.live_sae import LiveSae, Sae

    random = torch.Generator().manual_seed(0)
    words = torch.randn(12, 16, generator=random)
    sink = LiveSae(str(tmp_path / "sae.pt"), features=64, batch_rows=128, learning_rate=3e-3)
    for _ in range(60):
        picks = torch.rand(128, 12, generator=random)
        some = picks * (torch.rand(128, 12, generator=random) < 0.2) @ words
        sink.write(block(some))
        some.fill_(torch.nan)  # the memory is used again
    assert sink.losses[-1] < 0.5 * sink.losses[0]
    assert sink.finish(ending()).details["batches"] == 60
    sink.flush()
    Sae(16, 64).load_state_dict(torch.load(tmp_path / "sae.pt"))


@pytest.fixture
def monitor(monkeypatch):
    sys.path.insert(0, str(EXAMPLES.parents[1]))
    from examples.sinks.run import Monitor

    monkeypatch.setattr(Monitor, "heard", [])
    server = HTTPServer(("127.0.0.1", 0), Monitor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", heard=Monitor.heard)
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_scores_when_a_request_has_ended(monitor):
    from scope_example_sinks.webhook import Webhook

    sink = Webhook(monitor.url)
    sink.write(block(torch.tensor([0.5, -1.0]), probe="truth"))
    assert monitor.heard == []
    assert sink.finish(ending()).details == {"answered": 204}
    assert monitor.heard == [{
        "request_id": "r1", "finish_reason": "stop", "status": "ok",
        "probes": {"truth": {"positions": [0, 1], "scores": [0.5, -1.0]}},
    }]  # fmt: skip


def test_a_webhook_without_an_answer_is_reported():
    from scope_example_sinks.webhook import Webhook

    with pytest.raises(OSError, match="refused"):
        Webhook("http://127.0.0.1:1").finish(ending())
    with pytest.raises(ValueError, match="http"):
        Webhook("file:///etc/passwd")
