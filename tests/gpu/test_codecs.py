"""Codecs and probes on a GPU: the same parts and numbers as on a CPU, and the host waits for
nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tests.conftest import local_engine
from tests.gpu.test_rows import GRAPHS, IDS, OPTIONS, params, run
from vllm_scope import AttentionPool, Mlp, Read, scope
from vllm_scope.batch.labels import Labels
from vllm_scope.codecs import CODECS, codec_from, make_codec
from vllm_scope.codecs.packed import encoding_of
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import READ_CODECS, Bank, CodecChoice, Encoding
from vllm_scope.request.nets import HIDDEN, Net, net_of
from vllm_scope.request.sites import point_of
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.drain import Drain
from vllm_scope.worker.packer import Packer

pytestmark = pytest.mark.gpu

ENCODING = [name for name in READ_CODECS if name != "none"]
#: Of equal values top-k may keep others, and a projection's sums depend on how many rows
#: are multiplied at once; all other codecs are the same for a row in any batch.
INEXACT = ("rp8", "topk8")
HIDDEN_SIZE = 1000  # 125 slots
WIDTHS = Widths((2 * HIDDEN_SIZE,))
POINTS = tuple(point_of(boundary, 0) for boundary in (0, 2, 4))


@pytest.mark.parametrize("name", [name for name in CODECS if CODECS[name].rowwise])
def test_encoding_on_a_gpu_waits_for_nothing_and_decodes_anywhere(name):
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[3], rows[4], rows[5, 7] = 0.0, 2.5, torch.nan
    codec = make_codec(name, 1024, torch.bfloat16)
    on_gpu = rows.cuda()
    codec.encode(on_gpu)  # the first makes rp8's projection
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = codec.encode(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(part.is_cuda for part in parts.values())
    expected = _errors(codec.decode(codec.encode(rows), 64), rows)
    there = codec.decode(parts, 64).cpu()
    here = codec.decode({k: v.cpu() for k, v in parts.items()}, 64)
    for found in (there, here):
        # Not value by value: rounding may fall to the other side, and of equal values
        # top-k may keep others.
        torch.testing.assert_close(_errors(found, rows), expected, rtol=0.02, atol=1e-3)


def _errors(found: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What each row without NaN lost, relative to its length."""
    keep = rows.isfinite().all(1)
    lost = (found[keep].double() - rows[keep].double()).norm(dim=1)
    return lost / rows[keep].double().norm(dim=1).clamp(min=1e-9)


class _Keeper:
    """What the drain hands on, copied."""

    def __init__(self) -> None:
        self.batches: list[tuple[Labels, torch.Tensor, int | None]] = []
        self.finished = False

    def write(self, batch) -> None:
        self.batches.append((batch.labels, batch.slots.clone(), batch.boundary))

    def finish_all(self, ends) -> None:
        for key, error in ends:
            self.finish(key, error)

    def finish(self, key, error) -> None:
        self.finished = True

    def close(self) -> None: ...


def _layouts() -> tuple[Layout, ...]:
    codecs = [CodecChoice.parse(name, "codec") for name in ENCODING]
    encodings = [encoding_of(c, HIDDEN_SIZE, "bfloat16", "codec") for c in codecs]
    every = tuple(sorted(((e, POINTS) for e in (*encodings, MANY)), key=lambda x: x[0].text))
    return (
        Layout(POINTS, ((ONE, POINTS[:1]), (MANY, POINTS[1:]))),
        Layout((), ((encodings[2], POINTS),)),
        Layout(POINTS[:1], every),
    )


def _nets(num_linear: int) -> list[Net]:
    """Vectors, an AttentionPool, and an Mlp with each function."""

    def weight(*shape: int) -> np.ndarray:
        return generator.normal(size=shape) / shape[-1] ** 0.5

    generator = np.random.default_rng(num_linear)
    probes = [net_of(Array.parse(weight(HIDDEN_SIZE), "")) for _ in range(num_linear)]
    pool = AttentionPool(weight(2, HIDDEN_SIZE), weight(2, HIDDEN_SIZE))
    mlps = [
        Mlp([(weight(7, HIDDEN_SIZE), weight(7)), (weight(1, 7), weight(1))], hidden)
        for hidden in HIDDEN
    ]
    return [*probes, pool.net, *(mlp.net for mlp in mlps)]


def _bank(nets: list[Net]) -> Bank:
    return Bank.of([net.digest for net in nets], sum(net.num_values for net in nets))


NETS = {_bank(nets): nets for nets in (_nets(1)[:1], _nets(50))}
ONE, MANY = NETS


def _labels(layout_of: list[int], first: int = 0) -> Labels:
    count = np.arange(len(layout_of))
    return Labels(count, count + first, np.array(layout_of, np.int32), _layouts(), count)


@pytest.mark.parametrize("boundary", [None, 2])
@pytest.mark.parametrize("layout_of", [[1] * 300, [0, 1, 2] * 100], ids=["one", "mixed"])
def test_the_side_stream_makes_of_a_region_what_a_cpu_makes_of_it(layout_of, boundary):
    """While the main stream writes the region after it; the host waits for neither."""
    device = torch.device("cuda")
    labels = _labels(layout_of)
    sizes = [x if boundary is None else x.at(boundary) for x in labels.layouts]
    slots = [x.arena.slots(WIDTHS) for x in sizes]
    most = [max(slots)] * 3 if boundary is not None else slots
    num_slots = sum(most[i] for i in layout_of)
    arena = Arena(2 * num_slots, torch.bfloat16, device)
    ring = HostRing(16 * num_slots, cuda=True)  # holds all steps
    keeper = _Keeper()
    drain = Drain(arena, ring, keeper, WIDTHS)
    heads = [head for layout in labels.layouts for head, _ in layout.encoded]
    drain.add_request(1, [head for head in heads if isinstance(head, Encoding)], NETS)
    contents = [torch.randn(num_slots, 8).bfloat16() for _ in range(6)]
    on_gpu = [content.to(device) for content in contents]

    def step(content) -> None:
        region = arena.acquire(num_slots)
        torch.cuda._sleep(1 << 20)
        arena.view(region).copy_(content)
        drain.submit(region, labels, boundary)

    step(on_gpu[0])  # kernels are loaded, and memory is taken
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = time.monotonic()
        for content in on_gpu[1:]:
            step(content)
        launched = time.monotonic() - started
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain.finish_request(1)
    drain.close()
    assert keeper.finished
    print(f"\n  {launched / 5 * 1e3:.2f} ms of the host's time a step")
    packer = Packer(torch.bfloat16, torch.device("cpu"), WIDTHS)
    packer.hold(1, (), NETS)
    expected = []
    for content in contents:
        into = torch.empty((packer.num_slots(labels, boundary), 16), dtype=torch.uint8)
        packer.pack(content, labels, boundary, into)
        expected.append(into)
    found = torch.cat([slots for _, slots, _ in keeper.batches])
    found, expected = found.view(len(contents), -1, 16), torch.stack(expected)
    assert found.shape == expected.shape
    differ = (found != expected).any(-1).float().mean()
    # A rounding may fall to the other side here and there.
    assert float(differ) < (0.15 if layout_of[0] == 0 else 0.02)
    _compare(found, expected, labels, boundary, contents)


def _compare(found, expected, labels, boundary, contents) -> None:
    """Token by token: rows as they are bit for bit, encoded ones as near as on a CPU, and numbers
    of probes in float32."""
    layouts = [x if boundary is None else x.at(boundary) for x in labels.layouts]
    most = max(x.slots(WIDTHS) for x in layouts)
    for step in range(len(contents)):
        at = 0
        for which in labels.layout_of[:30]:
            layout = layouts[which]
            plain = layout.plain_slots(WIDTHS)
            assert torch.equal(found[step, at : at + plain], expected[step, at : at + plain])
            for head, points, first, size in layout.encoded_at(WIDTHS):
                here = slice(at + first, at + first + len(points) * size)
                one, two = (x[step, here].reshape(len(points), -1) for x in (found, expected))
                if isinstance(head, Bank):
                    numbers = [data.contiguous().view(torch.float32) for data in (one, two)]
                    torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)
                    continue
                decoded = [_decode(head, data).float() for data in (one, two)]
                scale = decoded[1].norm(dim=1) + 1e-6
                error = (decoded[0] - decoded[1]).norm(dim=1) / scale
                name = head.metadata["codec"]
                assert float(error.max()) < (0.4 if name in INEXACT else 0.01), name
            at += layout.slots(WIDTHS) if boundary is None else most


def _decode(encoding, data):
    from vllm_scope.codecs.packed import EncodedRows

    return EncodedRows(codec_from(encoding.metadata), data).decode()


@pytest.mark.parametrize("runner", ["V2", "V1"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_rows_of_an_engine_decode_to_what_the_codec_makes_of_them(
    graphs, runner, checkpoints, monkeypatch
):
    """`resid_pre` of layer k + 1 is `resid_post` of layer k, raw and of the same run."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    names = ["int8", None, "fp8", "topk8", "rp8"]
    specs = [
        scope(*([Read("resid_post", layers=[0, 1], codec=name)] if name else []), Read("resid_pre"))
        for name in names
    ]
    with local_engine(checkpoints("llama"), **(OPTIONS | GRAPHS[graphs])) as llm:
        for _ in range(2):
            outputs = run(llm, IDS, [params(spec) for spec in specs])
            for name, output in zip(names, outputs, strict=True):
                assert output.scope.status == "complete"
                for layer in (0, 1) if name else ():
                    rows = output.scope["resid_pre", layer + 1]
                    encoded = output.scope.encoded("resid_post", layer)
                    assert len(rows) == len(encoded) > 0
                    codec = encoded.codec
                    expected = codec.decode(codec.encode(rows.cuda()), len(rows)).cpu()
                    if name in INEXACT:
                        torch.testing.assert_close(
                            _errors(encoded.decode(), rows), _errors(expected, rows),
                            rtol=0.05, atol=0.02,
                        )  # fmt: skip
                    else:
                        found = codec.decode(
                            {k: v.cuda() for k, v in encoded.parts.items()}, len(rows)
                        )
                        assert torch.equal(found.cpu(), expected), name


def test_prefills_larger_than_the_arena_are_encoded_tap_by_tap(checkpoints):
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 16, "max_model_len": 1024}
    options |= {"additional_config": {"scope": {"arena_mib": 2.2}}}
    options |= {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
    spec = scope(Read("resid_post", layers=[0, 1], codec="int8"), Read("resid_pre"))
    with local_engine(checkpoints("llama"), **(OPTIONS | options)) as llm:
        ids = [[(7 * i + j) % 500 + 3 for j in range(900)] for i in range(9)]
        outputs = run(llm, ids, params(spec, max_tokens=4))
    for output in outputs:
        assert output.scope.status == "complete"
        for layer in (0, 1):
            rows = output.scope["resid_pre", layer + 1]
            codec = output.scope.encoded("resid_post", layer).codec
            expected = codec.decode(codec.encode(rows.cuda()), len(rows)).cpu()
            torch.testing.assert_close(
                _errors(output.scope["resid_post", layer], rows), _errors(expected, rows)
            )
