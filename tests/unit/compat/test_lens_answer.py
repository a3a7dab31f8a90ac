"""The field `activations` of one answer."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm_scope.compat.vllm_lens import http
from vllm_scope.compat.vllm_lens.http import LensReply


def test_all_choices_and_tensors_share_the_room_inside_an_answer(monkeypatch):
    monkeypatch.setattr(http, "MAX_INLINE_BYTES", 100)
    reply = LensReply(None)
    tensors = {"a": torch.zeros(10), "b": torch.zeros(10)}
    entries = []
    for number in range(2):
        completion = SimpleNamespace(activations=tensors)
        entries += reply.choice(number, 2, completion)["activations"].values()
    assert ["error" in entry for entry in entries] == [False, False, True, True]
    assert entries[2]["error"].startswith("120 bytes are too many for JSON, which takes 100 here")


def test_an_answer_has_at_most_32_mib_of_tensors_inside():
    reply = LensReply(None)
    large = SimpleNamespace(activations={"a": torch.zeros((32 << 20) + 1, dtype=torch.uint8)})
    assert (
        "activations_transport='binary'" in reply.choice(0, 2, large)["activations"]["a"]["error"]
    )
