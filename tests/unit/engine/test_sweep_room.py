"""How the sweeps of an API server share the batch, and how many there may be."""

from __future__ import annotations

import pytest

from vllm_scope import CapacityError, ConfigError
from vllm_scope.engine.http.sweeps import MOST_SWEEPS, Room, SweepRun
from vllm_scope.server.settings import ServerSettings


class Taking:
    """In place of a planned sweep: remembers its share."""

    def take_share(self, share):
        self.share = share


def entered(room, owner, share=0.5):
    run = SweepRun(None, room, owner, share)
    room.enter(run)
    run._sweeping = Taking()
    room.divide()
    return run


def shares(*runs):
    return [run._sweeping.share for run in runs]


def test_keys_have_equal_parts_and_then_the_sweeps_of_a_key():
    room = Room()
    a = entered(room, "one")
    assert shares(a) == [0.5]
    b, c = entered(room, "one"), entered(room, "other")
    assert shares(a, b, c) == [0.125, 0.125, 0.25]
    a.close()
    a.close()  # once more changes nothing
    assert shares(b, c) == [0.25, 0.25]
    c.close()
    assert shares(b) == [0.5]
    b.close()
    assert not room._of


def test_a_key_leaves_room_for_others():
    room = Room()
    runs = [entered(room, "one") for _ in range(12)]
    sentence = "runs 12 sweeps, 12 of this key; it runs at most 16, 12 of one key"
    with pytest.raises(CapacityError, match=sentence):
        entered(room, "one")
    runs += [entered(room, f"other {i}") for i in range(4)]
    assert len(runs) == MOST_SWEEPS
    with pytest.raises(CapacityError, match="runs 16 sweeps, 0 of this key"):
        entered(room, "late")
    runs[0].close()
    assert shares(entered(room, "late")) == [0.5 / 6]


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "half"])
def test_a_share_is_a_part(share):
    with pytest.raises(ConfigError, match="VLLM_SCOPE_SWEEP_SHARE is"):
        ServerSettings.from_environment({"VLLM_SCOPE_SWEEP_SHARE": share})


def test_a_server_has_bounds_of_its_own():
    found = ServerSettings.from_environment({"VLLM_SCOPE_SWEEP_CELLS": "0.5"})
    assert (found.sweep_cells, found.sweep_share) == (1, 0.5)
