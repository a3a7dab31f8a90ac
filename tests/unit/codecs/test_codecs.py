"""Codecs: what comes back, how near it is, and what is refused."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.codecs import measure, toyworld_rows
from vllm_scope.codecs import CODECS, codec_from, make_codec
from vllm_scope.codecs.rp8 import inverse, projection
from vllm_scope.errors import ConfigError


def _has_zstd() -> bool:
    try:
        import backports.zstd  # noqa: F401
    except ImportError:
        return False
    return True


needs_zstd = pytest.mark.skipif(not _has_zstd(), reason="needs vllm-scope[files]")
LOSSLESS = ["none", pytest.param("zstd", marks=needs_zstd)]
EVERY_CODEC = [pytest.param(n, marks=needs_zstd if n == "zstd" else ()) for n in CODECS]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Half a step, and what float32 arithmetic adds to it.
HALF = 0.5 * (1 + 1e-3)
ROUNDING = 8 * 2.0**-24
TINY = torch.finfo(torch.float32).tiny


@st.composite
def some_rows(draw) -> Tensor:
    """Odd shapes; rows of zeros, constants, tiny and huge values, and ordinary ones."""
    dtype = draw(st.sampled_from(DTYPES))
    num_rows, hidden_size = draw(st.integers(0, 5)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(num_rows, hidden_size, generator=generator, dtype=torch.float64)
    largest = float(torch.finfo(dtype).max)
    kinds = st.sampled_from(["plain", "zero", "constant", "tiny", "huge", "outlier", "offset"])
    for i in range(num_rows):
        kind = draw(kinds)
        if kind == "zero":
            rows[i] = 0.0
        elif kind == "constant":
            rows[i] = draw(st.floats(-3e4, 3e4))
        elif kind == "tiny":
            rows[i] *= float(torch.finfo(dtype).tiny)
        elif kind == "huge":
            rows[i] *= largest / rows[i].abs().max()
        elif kind == "outlier":
            rows[i, 0] = 3e3
        elif kind == "offset":
            rows[i] = 1e4 + 1e-3 * rows[i]
    return rows.clamp(-largest, largest).to(dtype)


def there_and_back(name: str, rows: Tensor, **options) -> Tensor:
    codec = make_codec(name, rows.shape[1], rows.dtype, **options)
    parts = codec.encode(rows)
    again = codec_from(json.loads(json.dumps(codec.metadata())))
    assert again == codec
    out = again.decode(parts, len(rows))
    assert out.dtype == rows.dtype
    assert out.shape == rows.shape
    return out


def check_within(out: Tensor, rows: Tensor, bound: Tensor) -> None:
    """|out - rows| <= bound [n, 1] plus one rounding to the rows' dtype."""
    wide, near = rows.double(), out.double()
    last = wide.abs() * torch.finfo(rows.dtype).eps + torch.finfo(rows.dtype).tiny
    assert out.isfinite().all()
    assert ((near - wide).abs() <= bound.double() + last).all()


@given(some_rows())
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_codec_returns_every_bit(name, rows):
    assert CODECS[name].lossless
    bits = torch.int16 if rows.dtype.itemsize == 2 else torch.int32
    assert torch.equal(there_and_back(name, rows).view(bits), rows.view(bits))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lossless_codec_keeps_nan_infinity_and_the_sign_of_zero(name, dtype):
    rows = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0]], dtype=dtype)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert torch.equal(there_and_back(name, rows).view(bits), rows.view(bits))


@given(some_rows())
def test_fp16_rounds_once_and_saturates(rows):
    limit = 65504.0
    expected = rows.float().clamp(-limit, limit).half().to(rows.dtype)
    assert torch.equal(there_and_back("fp16", rows), expected)


def test_fp16_keeps_infinity_and_nan():
    rows = torch.tensor([[float("inf"), -float("inf"), 1e38, -1e38]])
    inf = float("inf")
    assert there_and_back("fp16", rows).tolist() == [[inf, -inf, 65504.0, -65504.0]]
    assert there_and_back("fp16", torch.full((1, 2), torch.nan)).isnan().all()


@given(some_rows())
def test_full8_is_within_half_a_step_of_the_rows_range(rows):
    values = rows.double()
    width = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    largest = values.abs().amax(-1, keepdim=True)
    bound = (width / 255).clamp(min=TINY) * HALF + largest * ROUNDING
    check_within(there_and_back("full8", rows), rows, bound)


@given(some_rows())
def test_int8_is_within_half_a_step_of_the_largest_value(rows):
    largest = rows.double().abs().amax(-1, keepdim=True)
    bound = (largest / 127).clamp(min=TINY) * HALF + largest * ROUNDING
    check_within(there_and_back("int8", rows), rows, bound)


@given(some_rows())
def test_fp8_is_within_a_sixteenth_of_each_value(rows):
    values = rows.double()
    scale = (values.abs().amax(-1, keepdim=True) / 448).clamp(min=TINY)
    # 3 bits of mantissa; below 2**-6 the steps are 2**-9, of the scale.
    bound = torch.maximum(values.abs() / 16, scale * 2.0**-9 * HALF) * (1 + 1e-3)
    out = there_and_back("fp8", rows).double()
    last = values.abs() * torch.finfo(rows.dtype).eps + torch.finfo(rows.dtype).tiny
    assert ((out - values).abs() <= bound + last).all()


@given(some_rows(), st.integers(1, 70))
def test_topk8_keeps_the_largest_and_zeroes_the_rest(rows, k):
    k = min(k, rows.shape[1])
    out = there_and_back("topk8", rows, k=k)
    values = rows.double()
    kept, _ = values.abs().topk(k, dim=-1)
    smallest_kept = kept[:, -1:]
    clearly_lost = values.abs() < smallest_kept
    assert (out.double()[clearly_lost] == 0).all()
    # What is kept lies between -largest and largest.
    largest = values.abs().amax(-1, keepdim=True)
    bound = (2 * largest / 255).clamp(min=TINY) * HALF + largest * ROUNDING
    clearly_kept = values.abs() > (smallest_kept if k < rows.shape[1] else -1)
    error = (out.double() - values).abs()
    last = values.abs() * torch.finfo(rows.dtype).eps + torch.finfo(rows.dtype).tiny
    assert (error <= bound + last)[clearly_kept].all()


@pytest.mark.parametrize("name", ["fp8", "int8", "full8", "topk8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 1e-6, 60000.0])
def test_a_constant_row_survives(name, dtype, value):
    rows = torch.full((2, 33), value).to(dtype)
    out = there_and_back(name, rows, **({"k": 33} if name == "topk8" else {}))
    torch.testing.assert_close(out, rows, rtol=2e-7, atol=0)


def test_full8_rebuilds_by_q_minus_zero_times_scale():
    rows = torch.tensor([[-1.0, 0.0, 1.55]])
    parts = make_codec("full8", 3, torch.float32).encode(rows)
    assert parts["q"].dtype == torch.uint8
    assert parts["q"].tolist() == [[0, 100, 255]]
    assert parts["scale"].shape == parts["zero"].shape == (1, 1)
    torch.testing.assert_close(parts["scale"], torch.tensor([[0.01]]))
    torch.testing.assert_close(parts["zero"], torch.tensor([[100.0]]))
    back = (parts["q"].float() - parts["zero"]) * parts["scale"]
    torch.testing.assert_close(back, rows)


@pytest.mark.parametrize("name", ["fp8", "int8", "full8", "rp8", "topk8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_one_bad_value_is_all_nan_and_its_neighbours_are_not(name, bad):
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    rows[1, 5] = bad
    out = there_and_back(name, rows)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    plain = rows.clone()
    plain[1] = 0
    assert torch.equal(there_and_back(name, plain)[[0, 2]], out[[0, 2]])


def test_the_projection_of_a_seed_never_changes():
    found = projection(64, 16, 3, torch.device("cpu"))
    expected = np.random.RandomState(3).randn(64, 16) / 4.0
    assert np.array_equal(found.numpy(), expected.astype(np.float32))
    # Written down, so that another numpy cannot pass with another stream.
    golden = [0.4471571147441864, 0.10912746191024780, 0.02412436716258526]
    assert found[0, :3].tolist() == pytest.approx(golden, rel=1e-6)
    assert not torch.equal(found, projection(64, 16, 4, torch.device("cpu")))


def test_rp8_keeps_what_the_projection_sees_and_less_than_the_transpose_would_lose():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(64, 512, generator=generator)
    out = there_and_back("rp8", rows, k=128, seed=7)
    forward = projection(512, 128, 7, torch.device("cpu"))
    # The decoded row has the same projections, up to their 8 bits.
    seen, was = out @ forward, rows @ forward
    assert ((seen - was).norm(dim=-1) / was.norm(dim=-1)).max() < 0.02
    error = ((out - rows).norm(dim=-1) / rows.norm(dim=-1)).mean()
    assert error == pytest.approx((1 - 128 / 512) ** 0.5, abs=0.02)
    transposed = was @ forward.T
    assert ((transposed - rows).norm(dim=-1) / rows.norm(dim=-1)).mean() > 1.5
    assert inverse(512, 128, 7, torch.device("cpu")).shape == (128, 512)


@given(some_rows())
def test_rp8_stays_finite(rows):
    largest = rows.double().abs().max() if rows.numel() else 0.0
    if largest < 1e30:  # sums of float32 values near the limit overflow, and say so by NaN
        assert there_and_back("rp8", rows).isfinite().all()


@needs_zstd
def test_zstd_compresses_from_many_threads_at_once():
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    codec = make_codec("zstd", 64, torch.bfloat16)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            part = rows[number:].contiguous()
            if not torch.equal(codec.decode(codec.encode(part), len(part)), part):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_zstd
def test_zstd_refuses_a_frame_that_holds_more_than_it_should():
    codec = make_codec("zstd", 4, torch.float32)
    parts = codec.encode(torch.zeros(1 << 16, 4))
    assert parts["frame"].numel() < 1000
    with pytest.raises(ValueError, match="the frame holds 1048576 bytes; 16 are expected"):
        codec.decode(parts, 1)
    with pytest.raises(ValueError, match="not zstd"):
        codec.decode({"frame": torch.zeros(40, dtype=torch.uint8)}, 1)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        pytest.param("zip", {}, "the codecs are none, fp16", id="unknown-codec"),
        pytest.param("none", {"k": 3}, "k is no option", id="option-of-another-codec"),
        pytest.param("rp8", {"k": "12"}, "k is '12'; it must be an integer.", id="text"),
        pytest.param("rp8", {"k": True}, "k is True", id="bool-as-number"),
        pytest.param("rp8", {"k": 99}, "k is 99; a row has 8 values", id="more-than-a-row"),
        pytest.param("topk8", {"k": 0}, "k is 0; it must be at least 1.", id="nothing-kept"),
        pytest.param("rp8", {"seed": -1}, "seed is -1; it must be at least 0.", id="negative-seed"),
        pytest.param("zstd", {"level": 99}, "level is 99; it must be at most 22.", id="level"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(name, options, says):
    with pytest.raises(ConfigError) as caught:
        make_codec(name, 8, torch.float32, **options)
    assert says in str(caught.value)


def test_a_codec_is_frozen_and_refuses_absurd_sizes():
    codec = make_codec("rp8", 8, torch.float32)
    with pytest.raises(ValueError, match="frozen"):
        codec.k = 3  # type: ignore[attr-defined]
    body = codec.metadata()
    with pytest.raises(ConfigError, match="hidden_size"):
        codec_from(body | {"hidden_size": 1 << 40})
    with pytest.raises(ConfigError, match=r"hidden_size is 131073.*131072"):
        codec_from(
            make_codec("topk8", 8, torch.float32).metadata() | {"hidden_size": (1 << 17) + 1}
        )
    with pytest.raises(ConfigError, match="smaller k"):
        codec_from(body | {"hidden_size": 1 << 13, "k": (1 << 10) + 1})
    assert make_codec("rp8", 1 << 17, torch.float32).metadata()["k"] == 64
    with pytest.raises(ConfigError, match="dtype"):
        codec_from(body | {"dtype": "float64"})


@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].rowwise])
def test_any_row_of_a_rowwise_codec_decodes_alone(name):
    rows = torch.randn(9, 24, generator=torch.Generator().manual_seed(6)).half()
    codec = make_codec(name, 24, torch.float16)
    parts = codec.encode(rows)
    assert set(parts) == set(codec.part_names)
    alone = codec.decode({k: v[4:6] for k, v in parts.items()}, 2)
    # A product of two rows may be summed in another order than one of nine.
    torch.testing.assert_close(alone, codec.decode(parts, 9)[4:6], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", EVERY_CODEC)
def test_wrong_rows_and_wrong_parts_are_refused(name):
    codec = make_codec(name, 8, torch.float32)
    with pytest.raises(ValueError, match=r"rows are \[2, 7\]"):
        codec.encode(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"torch.float16; this codec takes"):
        codec.encode(torch.zeros(2, 8, dtype=torch.float16))
    parts = codec.encode(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="is missing"):
        codec.decode({}, 2)
    with pytest.raises(ValueError, match="expected"):
        codec.decode(parts, 3)


@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].rowwise])
def test_parts_that_only_broadcast_are_refused(name):
    codec = make_codec(name, 8, torch.float32)
    parts = codec.encode(torch.ones(3, 8))
    for part, found in parts.items():
        for other in (found[:, None], found.repeat(1, 2), found[:, 0], found.double()):
            with pytest.raises(ValueError, match=rf"part '{part}' .* is expected"):
                codec.decode(parts | {part: other}, 3)


def test_topk8_refuses_indices_outside_the_row():
    codec = make_codec("topk8", 8, torch.float32, k=2)
    parts = codec.encode(torch.ones(1, 8))
    parts["indices"][0, 0] = 8
    with pytest.raises(ValueError, match="indices are outside a row of 8"):
        codec.decode(parts, 1)


@pytest.fixture(scope="module")
def real_rows() -> Tensor:
    return toyworld_rows()


#: codec -> largest mean relative error, smallest mean cosine, largest share of bf16's
#: bytes, on the toy model's residual streams. docs/codecs.md prints what is measured.
BOUNDS = {
    "none": (0.0, 1.0 - 1e-6, 1.0),
    "fp16": (1e-4, 0.99999, 1.0),
    "fp8": (0.04, 0.999, 0.51),
    "int8": (0.02, 0.999, 0.51),
    "full8": (0.02, 0.999, 0.52),
    "rp8": (0.80, 0.60, 0.27),
    "topk8": (0.65, 0.75, 0.65),
    "zstd": (0.0, 1.0 - 1e-6, 0.95),
}


@pytest.mark.parametrize("name", EVERY_CODEC)
def test_the_error_on_a_trained_models_rows_is_as_stated(name, real_rows):
    found = measure(make_codec(name, real_rows.shape[1], real_rows.dtype), real_rows)
    error, cosine, share = BOUNDS[name]
    assert found.relative_error <= error
    assert found.cosine >= cosine
    assert found.share <= share
