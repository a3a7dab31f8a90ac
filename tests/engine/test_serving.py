"""The engine as users start it: own processes, compiled, toy world.

vLLM turns async scheduling off on a CPU; tests/interpreter turns it on again.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
import torch

from tests.checkpoints import check_completion, reference
from tests.conftest import TOYWORLD, process_engine
from vllm_scope import Add, Read, scope

READ_ALL = scope(Read("resid_post"), Read("resid_pre"), Read("embed"))
ONE_LAYER = scope(Read("resid_post", layers=[3]))
TEXTS = [
    "The capital of ",
    "My father told me about the book Goldette. Happily, it was",
    "Sadly, it was a misery. For me this camera",
    'Irma says: "',
]


@pytest.fixture(scope="module")
def llm():
    options = {"max_num_seqs": 64, "additional_config": {"scope": {"vectors_mib": 0.05}}}
    with pytest.MonkeyPatch.context() as patch:
        # oneDNN keeps up to 1,024 compiled kernels, one for each number of tokens in a
        # step: 50 MB, with or without a plugin, which would hide what this file looks for.
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
        # Lets `collective_rpc` take a function of this file.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        with process_engine(TOYWORLD, dtype="float32", **options) as llm:
            assert not llm.llm_engine.vllm_config.model_config.enforce_eager
            yield llm


@pytest.fixture(scope="module")
def ref():
    return reference(TOYWORLD, torch.float32)


def params(spec=None, **options):
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0, "max_tokens": 16} | options), extra_args=spec)


def generate(llm, prompts, parameters):
    return llm.generate(prompts, parameters, use_tqdm=False)


def check(output, ref):
    assert output.outputs
    for completion in output.outputs:
        check_completion(completion.scope, output.prompt_token_ids, list(completion.token_ids), ref)


def counters(llm):
    return llm.collective_rpc("scope_counters")[0]


def test_text_ids_and_chat(llm, ref):
    ids = llm.get_tokenizer().encode(TEXTS[0])
    for output in generate(llm, [*TEXTS, {"prompt_token_ids": ids}], params(READ_ALL)):
        check(output, ref)
    messages = [{"role": "user", "content": "What is the capital of Kimar?"}]
    (output,) = llm.chat(messages, params(READ_ALL), use_tqdm=False)
    assert output.outputs[0].text
    check(output, ref)


def test_stop_strings_end_the_rows_with_the_text(llm, ref):
    (free,) = generate(llm, TEXTS[1], params(max_tokens=40))
    stop = free.outputs[0].text[12:16]
    (output,) = generate(llm, TEXTS[1], params(READ_ALL, max_tokens=40, stop=[stop]))
    assert output.outputs[0].stop_reason == stop
    assert len(output.outputs[0].token_ids) < len(free.outputs[0].token_ids)
    check(output, ref)


def test_sampled_completions_of_n(llm, ref):
    (output,) = generate(llm, TEXTS[3], params(READ_ALL, n=3, temperature=1.0))
    assert len(output.outputs) == 3
    check(output, ref)


def test_sixty_four_mixed_requests_in_one_batch(llm, ref):
    texts = [TEXTS[i % 4] for i in range(64)]
    parameters = [params(ONE_LAYER if i % 2 else None, max_tokens=5 + i % 20) for i in range(64)]
    for i, output in enumerate(generate(llm, texts, parameters)):
        if i % 2:
            check(output, ref)
        else:
            assert output.scope is None


def test_plain_requests_are_bit_identical_beside_reading_ones(llm):
    """Tokens and logprobs of 16 plain requests, with 16 neighbours idle or reading."""

    def plain_half(spec):
        llm.reset_prefix_cache()
        texts = [TEXTS[i % 4] for i in range(32)]
        # The reading ones miss the prefix cache where idle ones would hit it, so no
        # two prompts share a block: the schedule is the same both times.
        prompts = [f"{i} {text}" for i, text in enumerate(texts)]
        parameters = [
            params(spec if i % 2 else None, logprobs=5, max_tokens=24, ignore_eos=True)
            for i in range(32)
        ]
        outputs = generate(llm, prompts, parameters)[::2]
        return [
            (list(o.outputs[0].token_ids), [
                {token: lp.logprob for token, lp in step.items()} for step in o.outputs[0].logprobs
            ])
            for o in outputs
        ]  # fmt: skip

    idle, busy = plain_half(None), plain_half(READ_ALL)
    assert idle == busy


def test_idle_steps_look_at_no_request_and_upload_nothing(llm):
    before = counters(llm)
    generate(llm, TEXTS * 8, params(max_tokens=30, ignore_eos=True))
    after = counters(llm)
    assert after["steps"] - before["steps"] >= 30
    for what in ("steps_planned", "requests_planned", "uploads"):
        assert after[what] == before[what], what
    generate(llm, TEXTS, params(ONE_LAYER))
    assert counters(llm)["uploads"] > after["uploads"]
    assert counters(llm)["requests"] == 0


class Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def allocated(worker=None):
    """(bytes that malloc has given out, blocks that Python holds) in the process it runs in."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    heap = mallinfo2()
    return heap.uordblks + heap.hblkhd, sys.getallocatedblocks()


@pytest.mark.long
def test_twenty_thousand_reading_requests_leave_memory_flat(llm):
    """By what is allocated, not by what is resident: pages are touched late, and freed late."""
    from vllm_scope.results.inbox import inbox

    prompts = [{"prompt_token_ids": [5 + i % 100, 7, 9]} for i in range(2000)]

    def some(batches):
        """Read 2,000 requests, `batches` times; [bytes, blocks] of front-end and worker after."""
        for _ in range(batches):
            outputs = generate(llm, prompts, params(READ_ALL, max_tokens=1, detokenize=False))
            assert all(o.scope.status == "complete" for o in outputs)
            assert all(o.scope.delivered == 3 * 13 for o in outputs)
        del outputs
        return np.array([allocated(), llm.collective_rpc(allocated)[0]])

    # vLLM keeps compiled kernels for each number of tokens in a step, with or without a plugin:
    # 1.5 MB for each number. Here, each number is a multiple of 3.
    for count in range(3, 3 * 64 + 1, 3):
        generate(llm, [{"prompt_token_ids": [5] * count}], params(max_tokens=1))
    before = some(4)
    gained = some(10) - before
    print(f"gained over 20,000 requests, [bytes, blocks] of front-end and worker: {gained}")
    # Their rows are 20,000 * 3 * 13 KiB = 780 MB; 100 bytes lost a request are 2 MB.
    assert (gained[:, 0] < 2 << 20).all()
    # One object lost for every second request.
    assert (gained[:, 1] < 10_000).all()
    assert len(inbox()) == 0
    assert counters(llm)["requests"] == 0


def test_what_enginecore_has_no_room_for_fails_alone_and_says_why(llm, ref):
    """The front-end lets it in: it does not know the server's edits. There is room for 51."""

    def edits(count, seed):
        rows = np.random.default_rng(seed).normal(size=(count, 256)).astype(np.float32)
        return scope(*(Add(row, layer=1, scale=1e-30, tokens="generated") for row in rows))

    llm.collective_rpc("scope_set_edits", args=(edits(40, 1)["scope"],))
    try:
        prompts, parameters = TEXTS[:2], [params(edits(20, 2)), params(READ_ALL)]
        refused, read = generate(llm, prompts, parameters)
    finally:
        llm.collective_rpc("scope_set_edits", args=(None,))
    assert refused.outputs[0].finish_reason == "error"
    assert (refused.scope.status, refused.scope.delivered) == ("failed", 0)
    assert refused.scope.error.startswith(
        "with the server's edits the request takes 60 vectors, "
    ), refused.scope.error
    assert refused.outputs[0].stop_reason == refused.scope.error
    check(read, ref)  # edits of 1e-30 change no float32
    (after,) = generate(llm, TEXTS[:1], params(edits(20, 2)))
    assert after.outputs[0].finish_reason == "length"


def test_a_result_can_be_pickled_and_kept(llm, ref):
    import pickle

    (output,) = generate(llm, TEXTS[0], params(ONE_LAYER))
    copy = pickle.loads(pickle.dumps(output.scope))
    assert torch.equal(copy["resid_post", 3], output.scope["resid_post", 3])
    assert copy.status == "complete"
    assert copy.delivered == copy.expected
