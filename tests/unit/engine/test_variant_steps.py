"""Steps of vLLM's own scheduler while variants of a request are in it."""

from __future__ import annotations

import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.conftest import TOYWORLD
from vllm_scope.engine.core import variants as core
from vllm_scope.engine.core.entered import Entered, keep
from vllm_scope.engine.core.scheduler import _schedule
from vllm_scope.request.resolved import NOTHING

BLOCK = 16
_hasher = None


def _scheduler(chunks, most=8192):
    global _hasher
    if _hasher is None:
        init_none_hash(sha256)
        _hasher = get_request_block_hasher(BLOCK, sha256)
    config = EngineArgs(
        str(TOYWORLD), dtype="float32", max_num_seqs=1024, max_num_batched_tokens=most,
        enable_chunked_prefill=chunks, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    # vLLM turns it off on a CPU.
    config.scheduler_config.async_scheduling = True
    config.model_config.max_model_len = most
    config.cache_config.num_gpu_blocks = 9000
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return AsyncScheduler(
        config, KVCacheConfig(9000, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(config), block_size=BLOCK,
    )  # fmt: skip


def _request(name, size, token=3, max_tokens=1):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, 2)
    ids = [token] * size
    return Request(name, ids, params, None, block_hasher=_hasher)


def _add_variants(scheduler, num, size, first=0):
    standing, made = _request("r", size), {}
    for number in range(num):
        made[number] = _request(f"r.{number}", size, 10 + number)
        keep(made[number], Entered(NOTHING, first_edited=first))
    core._entered.put(standing, core._Group(made, {}, [5], 9))
    for one in core.variants_of(scheduler, standing):
        scheduler.add_request(one)


def _step(scheduler):
    """Make one step. Returns how many tokens it has, and the outputs that leave EngineCore."""
    taken = _schedule(type(scheduler).schedule, scheduler)
    names, requests = list(taken.num_scheduled_tokens), scheduler.requests
    whole = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
    output = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[5] if one else [] for one in whole], prompt_logprobs_dict={},
    )  # fmt: skip
    found = core.take_variants(type(scheduler).update_from_output, scheduler, taken, output)
    return taken.total_num_scheduled_tokens, [
        one for each in found.values() for one in each.outputs
    ]


@pytest.mark.parametrize("chunks", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize(
    ("others", "num", "size"),
    [([6000], 16, 24), ([6000, 3000], 400, 24), ([50], 16, 1200), ([], 1200, 24), ([900], 9, 24)],
)
def test_all_requests_end(chunks, others, num, size):
    """A prompt that is longer than a part of the variants' tokens keeps none of them out."""
    scheduler = _scheduler(chunks)
    for i, length in enumerate(others):
        scheduler.add_request(_request(f"other {i}", length, max_tokens=40))
    _add_variants(scheduler, num, size)
    ended = set()
    for _ in range(100):
        if not scheduler.has_unfinished_requests():
            break
        num_tokens, outputs = _step(scheduler)
        assert num_tokens, "an empty step would come again and again"
        ended |= {one.request_id for one in outputs if one.finish_reason is not None}
    assert ended == {"r", *(f"other {i}" for i in range(len(others)))}


def test_a_sweep_is_computed_in_steps_of_a_third_and_fewer():
    scheduler, sizes = _scheduler(True, 1 << 15), []
    _add_variants(scheduler, 600, 24)
    while scheduler.has_unfinished_requests():
        sizes.append(_step(scheduler)[0])
    assert sizes[:3] == [600 * 24 // 3, 400 * 24 // 3, pytest.approx(267 * 24 // 3, abs=24)]
    assert sum(sizes) == pytest.approx(600 * 24, abs=24 * len(sizes))
    assert len(sizes) < 10


def test_without_the_bound_one_step_takes_all(monkeypatch):
    monkeypatch.setattr(core, "most_tokens", lambda _: None)
    monkeypatch.setattr("vllm_scope.engine.core.scheduler.most_tokens", lambda _: None)
    scheduler = _scheduler(True, 1 << 15)
    _add_variants(scheduler, 600, 24)
    assert _step(scheduler)[0] == 600 * 24
