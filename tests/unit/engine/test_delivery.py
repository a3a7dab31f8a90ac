"""How soon a worker delivers what a request asks for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.stepping import SITES, running_worker
from vllm_scope import Add, Probe, Read
from vllm_scope.request.actions.probing import MONITOR
from vllm_scope.request.spec import Spec
from vllm_scope.request.ticket import Recipient

WEIGHT = np.ones(SITES.hidden_size, np.float32)
OWN = Probe(WEIGHT, layer=0, name="own")
MONITORS = tuple(Probe(WEIGHT, layer=0, name=f"{MONITOR}{name}") for name in "ab")
READ = Read("resid_post", layers=[0])


@pytest.mark.parametrize(
    ("spec", "follows", "soon"),
    [
        pytest.param(Spec(probes=MONITORS), True, set(), id="monitors"),
        pytest.param(Spec(probes=(*MONITORS, OWN)), True, {7}, id="an-own-probe-too"),
        pytest.param(Spec(reads=(READ,), probes=MONITORS), True, {7}, id="rows-too"),
        pytest.param(Spec(probes=MONITORS), False, set(), id="nothing-before-the-end"),
        pytest.param(Spec(reads=(READ,)), False, set(), id="rows-at-the-end"),
    ],
)
def test_a_caller_that_reads_as_values_arrive_has_its_own_soon_but_not_those_of_monitors(
    spec, follows, soon
):
    with running_worker(SITES.boundaries, 64) as (worker, _):
        delivery, asked = worker._delivery, spec.resolve(SITES)
        recipient = Recipient(7, "front", follows=follows)
        assert delivery.add_request("r", [1, 2], recipient, asked) == 7
        pace = delivery.drain._pace
        assert pace._followed == soon
        delivery.drain.finish_request(7)
        assert pace._followed == set()


def test_what_a_caller_reads_itself_is_more_than_monitors():
    asked = {
        name: Spec(**fields).resolve(SITES).is_monitored_alone
        for name, fields in {
            "monitors": {"probes": MONITORS},
            "own probe": {"probes": (*MONITORS, OWN)},
            "rows": {"reads": (READ,), "probes": MONITORS},
            "edit": {"probes": MONITORS, "edits": (Add(WEIGHT, layer=0),)},
        }.items()
    }
    assert asked == {"monitors": True, "own probe": False, "rows": False, "edit": True}
