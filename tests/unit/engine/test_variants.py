"""Requests that EngineCore makes of one: what becomes of them, and of the one."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from vllm_scope.engine.core import variants as core
from vllm_scope.engine.core.entered import Entered, keep
from vllm_scope.engine.core.scheduler import _schedule
from vllm_scope.engine.core.variants import (
    aborted,
    expand,
    most_tokens,
    variants_of,
    with_variants,
)
from vllm_scope.engine.refusals import refused
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.answers import NO_LOGPROBS, Answers
from vllm_scope.request.resolved import NOTHING


class Request(SimpleNamespace):
    """vLLM's Request, told apart by identity."""

    __hash__ = object.__hash__


class Scheduler:
    """vLLM's, with blocks of 4 tokens."""

    finished_req_ids_dict = None
    block_size = 4

    def __init__(self, overlaps=True, caches=True, num_drafts=0):
        self.requests = {}
        self.kv_cache_manager = SimpleNamespace(enable_caching=caches)
        config = SimpleNamespace(async_scheduling=overlaps)
        self.vllm_config = SimpleNamespace(
            scheduler_config=config, num_speculative_tokens=num_drafts
        )


def entering(name, num, asked=(7, 3), refusals=None, size=9, edited=None):
    """A request that stands for `num` others, of which some are refused.

    Args:
        size: tokens of the prompt.
        edited: the first position that each edits, or a function of its number.
    """
    sent = SimpleNamespace(
        request_id=name,
        sampling_params=SimpleNamespace(logprob_token_ids=asked and list(asked)),
    )  # fmt: skip
    standing = Request(request_id=name, client_index=4, num_prompt_tokens=size)

    def make(number):
        if number in (refusals or {}):
            raise SpecError(refusals[number])
        made = Request(request_id=sent.request_id, num_prompt_tokens=size)
        first = edited(number) if callable(edited) else edited
        keep(made, Entered(NOTHING, first_edited=first))
        return made

    expand(standing, sent, num, make, num_tokens=3)
    assert sent.request_id == name
    return standing


def last(name, *logprobs):
    """The only output of a variant: the sampled token first, then those that were asked for."""
    ids, values = zip(*logprobs, strict=True)
    found = LogprobsLists(np.array([ids]), np.array([values], np.float32), np.array([0]))
    prefill = PrefillStats(num_prompt_tokens=9, num_computed_tokens=5, num_cached_tokens=4)
    return EngineCoreOutput(
        name, [ids[0]], new_logprobs=found, finish_reason=FinishReason.LENGTH,
        prefill_stats=prefill, events=[name],
    )  # fmt: skip


def step(scheduler, *outputs, client=0):
    """A step's outputs of one front-end, as they leave the scheduler."""
    made = {client: EngineCoreOutputs(outputs=list(outputs))}
    return core.take_variants(lambda *_: made, scheduler, None, None)[client]


def answers(output):
    assert output.finished
    return Answers.decode(output.kv_transfer_params)


def test_one_output_has_the_logprobs_of_all_in_the_order_of_the_asked_tokens():
    scheduler, standing = Scheduler(), entering("r", 3)
    names = [one.request_id for one in variants_of(scheduler, standing)]
    assert len(set(names)) == 3
    assert "r" not in names
    assert variants_of(scheduler, standing) == [], "it was expanded"
    other = EngineCoreOutput("plain", [1])
    first = step(scheduler, last(names[2], (3, -0.5), (7, -2.0), (3, -0.5)), other)
    assert first.outputs == [other]
    assert step(scheduler, last(names[0], (9, 0.0), (7, -1.0), (3, -4.0))).outputs == []
    end = step(scheduler, last(names[1], (9, 0.0), (7, -8.0), (3, -16.0)))
    (output,) = end.outputs
    assert output.request_id == "r"
    # vLLM counts and times these.
    assert output.new_token_ids == [3, 9, 9]
    assert output.events == [names[1]]
    stats = output.prefill_stats
    assert (stats.num_prompt_tokens, stats.num_computed_tokens) == (27, 15)
    assert stats.num_cached_tokens == 4, "of one prompt: vLLM subtracts it from the prompt's length"
    assert end.finished_requests == {"r"}
    found = answers(output)
    assert found.logprobs.tolist() == [[-1.0, -4.0], [-8.0, -16.0], [-2.0, -0.5]]
    assert found.errors == {}
    assert step(scheduler, other).outputs == [other]


def test_all_tokens_are_in_the_order_of_their_ids():
    scheduler, standing = Scheduler(), entering("r", 1, asked=None)
    (one,) = variants_of(scheduler, standing)
    every = [(2, -0.1), (2, -0.1), (0, -3.0), (1, -4.0)]  # the sampled one, then by their values
    (output,) = step(scheduler, last(one.request_id, *every)).outputs
    assert answers(output).logprobs.tolist() == [np.float32([-3.0, -4.0, -0.1]).tolist()]


def test_what_vllm_adds_to_a_row_beside_longer_ones_is_no_log_probability():
    """Token 0 and -inf, again and again."""
    scheduler, standing = Scheduler(), entering("r", 1, asked=(0,))
    (one,) = variants_of(scheduler, standing)
    padded = [(9, -0.1), (0, -3.0), (0, -np.inf), (0, -np.inf)]
    (output,) = step(scheduler, last(one.request_id, *padded)).outputs
    assert answers(output).logprobs.tolist() == [[-3.0]]


@pytest.mark.parametrize("asked", [None, (7, 3)], ids=["all", "named"])
def test_rows_of_other_tokens_fail_their_variants_with_a_sentence(asked):
    """As Model Runner V1 returns them with drafts."""
    scheduler, standing = Scheduler(), entering("r", 2, asked=asked)
    first, second = variants_of(scheduler, standing)
    step(scheduler, last(first.request_id, (1, -0.1), (0, -3.0), (0, -np.inf)))
    none = EngineCoreOutput(second.request_id, [5], finish_reason=FinishReason.LENGTH)
    (output,) = step(scheduler, none).outputs
    assert answers(output).errors == {0: NO_LOGPROBS, 1: NO_LOGPROBS}


def test_an_error_of_another_kind_is_that_of_the_request():
    sent = SimpleNamespace(request_id="r")

    def fail(number):
        raise ValueError(sent.request_id)

    with pytest.raises(ValueError, match=r"^r\.0$"):
        expand(Request(), sent, 2, fail, 3)
    assert sent.request_id == "r", "by which vLLM tells the front-end"


def test_a_variant_that_is_refused_or_fails_leaves_the_others():
    scheduler, standing = Scheduler(), entering("r", 3, refusals={1: "no such place."})
    first, second = variants_of(scheduler, standing)
    failed = refused(first.request_id, SpecError("the row is not finite."))
    assert step(scheduler, failed).outputs == []
    (output,) = step(scheduler, last(second.request_id, (7, -1.0), (3, -2.0))).outputs
    found = answers(output)
    assert found.errors == {0: "the row is not finite.", 1: "no such place."}
    assert found.logprobs[2].tolist() == [-1.0, -2.0]
    assert np.isnan(found.logprobs[:2]).all()


def test_a_variant_that_vllm_ends_with_an_error_has_a_sentence_too():
    scheduler = Scheduler()
    (one,) = variants_of(scheduler, entering("r", 1))
    failed = EngineCoreOutput(one.request_id, [], finish_reason=FinishReason.ERROR)
    (output,) = step(scheduler, failed).outputs
    assert answers(output).errors == {0: "the request failed"}
    assert answers(output).logprobs.shape == (1, 0)


def test_a_request_none_of_whose_variants_is_possible_is_refused():
    with pytest.raises(ScopeError, match=r"^first\.$"):
        entering("r", 2, refusals={0: "first.", 1: "second."})


def test_who_ends_the_request_ends_its_variants_and_is_told_of_the_request():
    scheduler = Scheduler()
    ones = variants_of(scheduler, entering("r", 3))
    others = variants_of(scheduler, entering("s", 1))
    step(scheduler, last(ones[1].request_id, (7, -1.0), (3, -2.0)))
    left = [ones[0].request_id, ones[2].request_id]
    assert list(with_variants(scheduler, "r")) == left
    assert list(with_variants(scheduler, {"r"})) == left
    assert list(with_variants(scheduler, ["plain"])) == ["plain"]
    assert with_variants(scheduler, None) is None
    plain = Request(request_id="plain")
    scheduler.finished_req_ids_dict = defaultdict(set)
    ended = aborted(scheduler, [ones[0], plain, ones[2]])
    assert [one.request_id for one in ended] == ["plain", "r"]
    assert scheduler.finished_req_ids_dict == {4: {"r"}}, "data-parallel clients wait for it"
    assert list(with_variants(scheduler, "s")) == [others[0].request_id]
    assert [one.request_id for one in aborted(scheduler, others)] == ["s"]
    # Nobody waits for a variant whose request has ended.
    late = last(ones[0].request_id, (7, -1.0), (3, -2.0))
    assert step(scheduler, late).outputs == [late]


def test_a_scheduler_without_such_requests_is_left_alone():
    scheduler, plain = Scheduler(), EngineCoreOutput("plain", [1])
    assert variants_of(scheduler, Request(request_id="plain")) == []
    assert with_variants(scheduler, "plain") == "plain"
    assert step(scheduler, plain).outputs == [plain]


# How much a step takes


def _begun(scheduler, name, num, **shape):
    """The variants of a request, which are in the scheduler."""
    some = variants_of(scheduler, entering(name, num, **shape))
    scheduler.requests.update({one.request_id: one for one in some})
    return some


def _other(num_tokens=1):
    return Request(num_tokens=num_tokens)


def test_a_step_takes_a_third_of_the_tokens_of_all_variants():
    scheduler = Scheduler()
    assert most_tokens(scheduler) is None, "there are none"
    some = _begun(scheduler, "r", 300, size=24, edited=9)
    assert most_tokens(scheduler) == 300 * (24 - 8) // 3, "two blocks are cached"
    _begun(scheduler, "s", 200, size=24)
    assert most_tokens(scheduler) == (300 * 16 + 200 * 24) // 3
    for one in some[:100]:
        step(scheduler, last(one.request_id, (7, -1.0), (3, -1.0)))
        del scheduler.requests[one.request_id]
    assert most_tokens(scheduler) == (200 * 16 + 200 * 24) // 3
    standing = [scheduler.requests.pop(one.request_id) for one in some[100:]]
    assert len(aborted(scheduler, standing)) == 1
    assert most_tokens(scheduler) == 200 * 24 // 3
    standing = list(scheduler.requests.values())
    scheduler.requests.clear()
    aborted(scheduler, standing)
    assert most_tokens(scheduler) is None


def test_variants_that_wait_outside_the_scheduler_do_not_count():
    scheduler = Scheduler()
    some = _begun(scheduler, "r", 600, size=24)
    for one in some[:200]:
        del scheduler.requests[one.request_id]
    assert most_tokens(scheduler) == 400 * 24 // 3
    scheduler.requests.update({f"other {i}": _other() for i in range(51)})
    assert most_tokens(scheduler) is None, "400 / 8 are a few"


def test_variants_count_by_what_each_edits_and_refused_ones_do_not():
    scheduler, num = Scheduler(), 600
    refusals = dict.fromkeys(range(0, num, 2), "no")
    _begun(scheduler, "r", num, size=24, edited=lambda number: 9 * (number % 4 == 1),
           refusals=refusals)  # fmt: skip
    assert most_tokens(scheduler) == 300 * (24 - 4) // 3, "half of them have two cached blocks"


def test_a_step_has_room_for_any_prompt_and_for_a_token_of_each_other_request():
    scheduler = Scheduler()
    _begun(scheduler, "r", 16, size=24)
    assert most_tokens(scheduler) == 1024
    scheduler.requests["other"] = _other(6000)
    assert most_tokens(scheduler) == 6000 + 1
    _begun(scheduler, "s", 16, size=7000, edited=6800)
    scheduler.requests["another"] = _other(3)
    assert most_tokens(scheduler) == 7000 + 2


def test_without_a_prefix_cache_every_token_of_a_prompt_is_computed():
    scheduler = Scheduler(caches=False)
    _begun(scheduler, "r", 300, size=24, edited=9)
    assert most_tokens(scheduler) == 300 * 24 // 3


def test_a_step_is_as_vllm_makes_it_without_async_scheduling():
    scheduler = Scheduler(overlaps=False)
    _begun(scheduler, "r", 300, size=24)
    assert most_tokens(scheduler) is None


def test_a_step_has_room_for_the_drafts_of_other_requests():
    scheduler = Scheduler(num_drafts=3)
    _begun(scheduler, "r", 304, size=24)
    scheduler.requests["other"] = _other()
    assert most_tokens(scheduler) == 304 * 24 // 3 + 4


@pytest.mark.parametrize(
    ("others", "told"), [((), False), (("sweep-0f-7",), False), (("sweep-0f-7", "cmpl-1"), True)]
)
@pytest.mark.parametrize("overlaps", [True, False])
def test_an_answer_tells_of_requests_that_are_of_no_sweep(others, told, overlaps):
    """Whatever front-end they are of."""
    scheduler = Scheduler(overlaps)
    (one,) = _begun(scheduler, "r", 1)
    scheduler.requests.update({name: _other() for name in others})
    most_tokens(scheduler)
    (output,) = step(scheduler, last(one.request_id, (7, -1.0), (3, -1.0))).outputs
    assert answers(output).others == told


def test_a_step_is_as_vllm_makes_it_beside_more_than_a_few_other_requests():
    scheduler = Scheduler()
    _begun(scheduler, "r", 304, size=24)
    scheduler.requests.update({f"other {i}": _other() for i in range(38)})
    assert most_tokens(scheduler) == 304 * 24 // 3 + 38
    scheduler.requests["one more"] = _other()
    assert most_tokens(scheduler) is None


def test_the_bound_of_a_step_is_vllms_own_again_after_it():
    scheduler = Scheduler()
    scheduler.max_num_scheduled_tokens = 8192
    _begun(scheduler, "r", 300, size=24)
    seen = []

    def fail(*args):
        seen.append(scheduler.max_num_scheduled_tokens)
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        _schedule(fail, scheduler)
    assert (seen, scheduler.max_num_scheduled_tokens) == ([2400], 8192)
    scheduler.max_num_scheduled_tokens = 2000
    with pytest.raises(RuntimeError, match="no step"):
        _schedule(fail, scheduler)
    assert (seen[1:], scheduler.max_num_scheduled_tokens) == ([2000], 2000)
