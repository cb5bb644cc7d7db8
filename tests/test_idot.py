"""QuantizedMatrix: the canonical forms in and out, and products that are exact up to the sum over groups."""
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16, ISAS, python, same_bits, search
from hypothesis import given
from hypothesis import strategies as st

import kda
from kda import QuantizedMatrix, _core, quant, reference

FORMS = [(bits, group) for bits in (8, 4) for group in (32, 64, 128)]
SHAPES = [(1, 1), (3, 31), (5, 33), (16, 64), (17, 129), (64, 128), (70, 300)]
HEADER = (Path(__file__).parents[1] / "kda" / "_simd" / "kernels.h").read_text()
SUM_TERMS = int(re.findall(r"Within \(groups \+ (\d)\) \* 2\^-24 of the sum of the terms' magnitudes", HEADER)[0])


def canonical(rng, N, K, bits, group):
    """Random canonical arrays over every code there is: (codes, scales)."""
    groups = -(-K // group)
    scales = rng.uniform(-2, 2, (N, groups)).astype(np.float16)
    if bits == 8:
        return rng.integers(-128, 128, (N, groups * group)).astype(np.int8), scales
    return rng.integers(0, 256, (N, groups * group // 2)).astype(np.uint8), scales


def integers(codes, bits):
    """Canonical codes as integers [N, Kp], by the definition: two to a byte, each plus 8, low nibble first."""
    if bits == 8:
        return codes.astype(np.int64)
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1).astype(np.int64) - 8


def padded(x, group):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)])


def quantized(x, group):
    """(codes [T, Kp], scales [T, groups]) of finite activations as kernels.h defines them, in float32."""
    grouped = padded(x, group).reshape(len(x), -1, group)
    most = np.abs(grouped).max(2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse, scales = np.float32(127) / most, most / np.float32(127)
    small = inverse > 2.0**127
    inverse[small], scales[small] = 2.0**127, 2.0**-127
    scales[most == 0] = 0
    codes = np.rint(grouped * inverse[:, :, None]).astype(np.int64)
    assert np.abs(codes).max() <= 127
    return codes.reshape(len(x), -1), scales


def exact_product(m, x):
    """(y, sum of the terms' magnitudes) in float64, of the matrix's weights and the quantised activations."""
    codes, scales = quantized(x, m.group_size)
    sums = np.einsum("tgi,ngi->gtn", codes.reshape(*scales.shape, -1),
                     integers(m.codes, m.bits).reshape(*m.scales.shape, -1))
    terms = sums * scales.astype(np.float64).T[:, :, None] * m.scales.astype(np.float64).T[:, None, :]
    return terms.sum(0), np.abs(terms).sum(0)


# ---- products ----

@pytest.mark.parametrize("bits", [8, 4])
def test_sums_are_exact(isa, bits):
    """K over 1 to 300 and N over 1 to 70, scales of 1: the integers of an int64 sum."""
    rng = np.random.default_rng(0)
    for K in range(1, 301):
        N, T, group = 1 + 37 * K % 70, 1 + K % 7, (32, 64, 128)[K % 3]
        codes, scales = canonical(rng, N, K, bits, group)
        x = rng.integers(-127, 128, (T, K))
        x[:, ::group] = 127  # so that each group's scale is 1
        m = QuantizedMatrix.from_codes(codes, np.ones_like(scales), (N, K), bits, group, isa=isa)
        y = m.matmul(x.astype(np.float32))
        assert np.array_equal(y, x @ integers(codes, bits)[:, :K].T), (K, N)


@pytest.mark.parametrize("K", [128, 300])
@pytest.mark.parametrize(("bits", "code"), [(8, 127), (8, -128), (8, -127), (4, 7), (4, -8)])
def test_rows_of_the_largest_codes(isa, bits, code, K):
    rows = -(-K // 128) * 128
    codes = np.full((19, rows), code, np.int8) if bits == 8 else np.full((19, rows // 2), (code + 8) * 17, np.uint8)
    m = QuantizedMatrix.from_codes(codes, np.ones((19, rows // 128), np.float16), (19, K), bits, isa=isa)
    for sign in (127, -127):
        for T in (1, 2, 4, 13):
            assert (m.matmul(np.full((T, K), sign, np.float32)) == sign * code * K).all()


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_matmul_against_float64(isa, bits, group):
    rng = np.random.default_rng(group)
    for N, K in [*SHAPES, (33, 1000)]:
        m = QuantizedMatrix.from_codes(*canonical(rng, N, K, bits, group), (N, K), bits, group, isa=isa)
        x = rng.standard_normal((23, K)).astype(np.float32)
        want, size = exact_product(m, x)
        groups = -(-K // group)
        assert (np.abs(m.matmul(x) - want) <= (groups + SUM_TERMS) * 2.0**-24 * size).all()


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
def test_error_of_quantisation(bits, error):
    """Against the product that nothing was quantised in, for normal weights and activations."""
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((300, 1024)).astype(np.float32), rng.standard_normal((20, 1024)).astype(np.float32)
    want = x.astype(np.float64) @ w.T.astype(np.float64)
    for group in (32, 64, 128):
        y = QuantizedMatrix.quantize(w, bits, group).matmul(x)
        rms = np.sqrt(np.mean((y - want) ** 2) / np.mean(want**2))
        assert error / 10 < rms < error


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_same_bits_on_every_isa_and_any_number_of_threads(threads, bits, group):
    rng = np.random.default_rng(2)
    w, x = rng.standard_normal((301, 517)).astype(np.float32), rng.standard_normal((27, 517)).astype(np.float32)
    threads(1)
    first = QuantizedMatrix.quantize(w, bits, group, isa="scalar")
    codes, scales, y = first.codes, first.scales, first.matmul(x)
    for isa in ISAS:
        for n in (1, 2, 3, 7):
            threads(n)
            m = QuantizedMatrix.quantize(w, bits, group, isa=isa)
            assert same_bits(m.codes, codes)
            assert same_bits(m.scales, scales)
            for T in (1, 5, 27):
                assert same_bits(m.matmul(x[:T]), y[:T])


def test_the_reference_by_hand():
    """Two groups of 32, one of them padded; x's scales are 1 and 2, and its ties go to even."""
    x = np.zeros((1, 34), np.float32)
    x[0, [0, 1, 2, 32, 33]] = 127, 2.5, -3.5, 254, -5  # codes 127, 2, -4; 127, -2
    codes = np.zeros((1, 64), np.int8)
    codes[0, [0, 1, 2, 32, 33]] = 1, 10, -128, 2, 3
    want = 0.5 * (127 + 20 + 512) + 2 * 4 * (254 - 6)
    assert reference.quantized_matmul(x, codes, np.array([[0.5, 4]], np.float16)) == want
    nibbles = np.full((1, 32), 0x88, np.uint8)
    nibbles[0, [0, 1, 16]] = 0xF9, 0x80, 0x6A  # 1, 7; -8, 0; 2, -2
    want = 0.5 * (127 + 14 + 32) + 2 * 4 * (254 + 4)
    assert reference.quantized_matmul(x, nibbles, np.array([[0.5, 4]], np.float16), 4) == want


def test_any_leading_shape(isa):
    rng = np.random.default_rng(3)
    m = QuantizedMatrix.quantize(rng.standard_normal((9, 40)).astype(np.float32), group_size=32, isa=isa)
    x = rng.standard_normal((2, 3, 5, 40)).astype(np.float32)
    rows = np.array([m.matmul(row) for row in x.reshape(-1, 40)])
    assert rows.shape == (30, 9)
    assert same_bits(m.matmul(x), rows.reshape(2, 3, 5, 9))
    assert m.matmul(x[:, :0]).shape == (2, 0, 5, 9)


def test_strides_and_byte_order_of_x(isa):
    rng = np.random.default_rng(4)
    m = QuantizedMatrix.quantize(rng.standard_normal((9, 70)).astype(np.float32), isa=isa)
    x = rng.standard_normal((4, 6, 70)).astype(np.float32)
    y = m.matmul(x)
    wide = np.full((8, 6, 150), np.nan, np.float32)
    wide[::2, :, 3:143:2] = x
    gap = np.full((4, 6, 100), np.nan, np.float32)
    gap[:, :, :70] = x
    bytes_ = np.zeros(x.nbytes + 1, np.uint8)
    bytes_[1:] = np.frombuffer(x.tobytes(), np.uint8)
    for same in (wide[::2, :, 3:143:2], gap[:, :, :70], np.asfortranarray(x), x.astype(">f4"),
                 x[::-1].copy()[::-1], bytes_[1:].view(np.float32).reshape(x.shape)):
        assert np.array_equal(same, x)
        assert same_bits(m.matmul(same), y)
    assert same_bits(m.matmul(np.broadcast_to(x[0, 0], (3, 70))), np.repeat(y[:1, 0], 3, axis=0))
    x.flags.writeable = False
    assert same_bits(m.matmul(x), y)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(isa, dtype):
    """Half weights and activations mean their float32 values; the result is rounded once, to x's type."""
    rng = np.random.default_rng(5)
    w, x = rng.standard_normal((20, 100)).astype(dtype), rng.standard_normal((5, 100)).astype(dtype)
    m = QuantizedMatrix.quantize(w, isa=isa)
    wide = QuantizedMatrix.quantize(w.astype(np.float32), isa=isa)
    assert same_bits(m.codes, wide.codes)
    assert same_bits(m.scales, wide.scales)
    y = m.matmul(x)
    assert y.dtype == np.dtype(dtype)
    assert same_bits(y, m.matmul(x.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 32)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_activations_stay_in_their_token(isa, bits, group, bad):
    rng = np.random.default_rng(6)
    w = rng.standard_normal((21, 200)).astype(np.float32)
    w[3] = 0
    m = QuantizedMatrix.quantize(w, bits, group, isa=isa)
    x = rng.standard_normal((23, 200)).astype(np.float32)
    clean = m.matmul(x)
    for token in (0, 11, 12, 19, 22):
        for column in (0, 130, 199):
            dirty = x.copy()
            dirty[token, column] = bad
            y = m.matmul(dirty)
            assert np.isnan(y[token]).all()
            assert same_bits(np.delete(y, token, 0), np.delete(clean, token, 0))


def test_tiny_and_huge_activations(isa):
    """Subnormal groups keep what float32 can hold of them; a sum of 0 stays 0 where the scales' product overflows."""
    m = QuantizedMatrix.from_codes(np.eye(32, dtype=np.int8), np.full((32, 1), 65504, np.float16), (32, 32), 8, 32,
                                   isa=isa)
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 3e38, -1e38, 1e-30, 0
    y = m.matmul(x)
    assert y[0, :2].tolist() == [np.inf, -np.inf]
    assert not y[0, 2:].any()
    x[0, :4] = np.array([1, -3, 5, 1000]) * 2.0**-149
    assert np.abs(m.matmul(x) - 65504.0 * x.astype(np.float64)).max() <= 65504 * 2.0**-128  # half of the least scale


def test_out(isa):
    rng = np.random.default_rng(7)
    m = QuantizedMatrix.quantize(rng.standard_normal((9, 40)).astype(np.float32), group_size=32, isa=isa)
    x = rng.standard_normal((2, 3, 40)).astype(np.float32)
    y = m.matmul(x)
    whole = np.full(2 * 3 * 9 + 2, 7, np.float32)
    out = whole[1:-1].reshape(2, 3, 9)
    assert m.matmul(x, out=out) is out
    assert same_bits(out, y)
    assert whole[0] == whole[-1] == 7
    out[:] = 7

    readonly = np.empty((2, 3, 9), np.float32)
    readonly.flags.writeable = False
    both = np.zeros((2, 3, 49), np.float32)
    refused = [
        (readonly, ValueError, "out: is read-only"),
        (np.empty((2, 3, 8), np.float32), ValueError, r"out: expected float32 \[2, 3, 9\], got float32 \[2, 3, 8\]"),
        (np.empty((6, 9), np.float32), ValueError, r"out: expected float32 \[2, 3, 9\]"),
        (np.empty((2, 3, 9), np.float64), ValueError, r"out: expected float32 \[2, 3, 9\], got float64"),
        (np.empty((2, 3, 18), np.float32)[:, :, ::2], ValueError, "out: axis 2 has a stride of 8 bytes"),
        (np.empty((2, 3, 10), np.float32)[:, :, :9], ValueError, "out: axis 1 has a stride of 40 bytes"),
        (np.empty(217, np.uint8)[1:].view(np.float32).reshape(2, 3, 9), ValueError, "out: is not aligned"),
        ([[0.0] * 9], TypeError, "out: expected a numpy array"),
    ]
    for bad, error, message in refused:
        with pytest.raises(error, match=message):
            m.matmul(x, out=bad)
    inside = both.reshape(-1)[:240].reshape(2, 3, 40)
    with pytest.raises(ValueError, match="out: overlaps x"):
        m.matmul(inside, out=both.reshape(-1)[236:290].reshape(2, 3, 9))
    for dtype in (np.float16, BF16):
        with pytest.raises(TypeError, match="out: is float32 and needs float32 x, got"):
            m.matmul(x.astype(dtype), out=out)
    assert (out == 7).all()
    assert not both.any()


def test_wrong_x(isa):
    m = QuantizedMatrix.quantize(np.ones((9, 40), np.float32), isa=isa)
    with pytest.raises(ValueError, match=r"x: expected \[\.\.\., 40\], got \[2, 39\]"):
        m.matmul(np.zeros((2, 39), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \[\.\.\., 40\], got \[\]"):
        m.matmul(np.float32(1))
    for dtype in (np.float64, np.int8, np.int32):
        with pytest.raises(TypeError, match=r"x: expected float32, float16 or bfloat16.*astype\(np.float32\)"):
            m.matmul(np.zeros((2, 40), dtype))


# ---- the canonical forms ----

@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_codes_and_scales_come_back(isa, bits, group):
    """Every byte and every pattern of a scale, NaN payloads included."""
    rng = np.random.default_rng(8)
    for N, K in SHAPES:
        codes, scales = canonical(rng, N, K, bits, group)
        scales = rng.integers(0, 65536, scales.shape).astype(np.uint16).view(np.float16)
        m = QuantizedMatrix.from_codes(codes, scales, (N, K), bits, group, isa=isa)
        assert same_bits(m.codes, codes)
        assert same_bits(m.scales, scales)
        lanes = _core.matrix_layout(list(kda.isas()).index(isa))[0]
        assert m.nbytes == -(-N // lanes) * lanes * (codes.shape[1] + 2 * scales.shape[1])
        assert (m.shape, m.bits, m.group_size, m.isa) == ((N, K), bits, group, isa)


def test_low_nibble_first(isa):
    """Worked by hand: byte 0x2f is 15 - 8 = 7 in column 0 and 2 - 8 = -6 in column 1."""
    codes = np.full((1, 16), 0x88, np.uint8)
    codes[0, :3] = 0x2f, 0x01, 0xc9
    m = QuantizedMatrix.from_codes(codes, np.array([[0.5]], np.float16), (1, 32), 4, 32, isa=isa)
    assert m.dequantize()[0].tolist() == [3.5, -3, -3.5, -4, 0.5, 2] + [0] * 26
    assert m.matmul(np.eye(32, dtype=np.float32) * 127)[:, 0].tolist() == [
        127 * w for w in m.dequantize()[0].tolist()]


@pytest.mark.parametrize("bits", [8, 4])
def test_all_scales_decode_as_numpys(isa, bits):
    """65,536 rows of one group, one scale each, and 1 for a weight: 127 times the scale is exact in float32."""
    patterns = np.arange(65536, dtype=np.uint16)
    codes = np.zeros((65536, 32), np.int8) if bits == 8 else np.full((65536, 16), 0x88, np.uint8)
    codes[:, 0] += 1
    m = QuantizedMatrix.from_codes(codes, patterns[:, None], (65536, 32), bits, 32, isa=isa)
    x = np.zeros(32, np.float32)
    x[0] = 127
    y = m.matmul(x)
    with np.errstate(invalid="ignore"):  # signalling NaN
        scales = patterns.view(np.float16).astype(np.float32)
        weights = m.dequantize()
    finite = np.isfinite(scales)
    assert finite.sum() == 63488
    assert np.array_equal(y[finite], 127 * scales[finite])
    assert not np.isfinite(y[~finite]).any()
    assert np.array_equal(weights[finite, 0], scales[finite])
    assert not weights[finite, 1:].any()
    assert not np.isfinite(weights[~finite, 0]).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_from_codes_takes_arrays_as_they_lie(isa, bits, tmp_path):
    rng = np.random.default_rng(9)
    N, K, group = 21, 200, 64
    codes, scales = canonical(rng, N, K, bits, group)
    (tmp_path / "trunk").write_bytes(b"odd" + codes.tobytes() + scales.tobytes())
    mapped = np.memmap(tmp_path / "trunk", np.uint8, "r", 3)
    flat_codes, flat_scales = mapped[:codes.size].view(codes.dtype), mapped[codes.size:].view(np.float16)
    apart = np.zeros((2 * N, codes.shape[1] + 7), codes.dtype)
    apart[::2, 3:-4] = codes
    ways = [
        (codes, scales), (codes.view(np.uint8), scales.view(np.uint16)), (codes.ravel(), scales.ravel()),
        (flat_codes, flat_scales), (flat_codes.reshape(codes.shape), flat_scales.reshape(scales.shape)),
        (apart[::2, 3:-4], scales.astype(">f2")), (codes[::-1].copy()[::-1], np.asfortranarray(scales)),
        (np.asfortranarray(codes), scales.view(np.uint16).astype(">u2")),
        (codes.repeat(2, axis=1)[:, ::2], scales[::-1].copy()[::-1]),
    ]
    for some_codes, some_scales in ways:
        some_codes.flags.writeable = some_scales.flags.writeable = False
        m = QuantizedMatrix.from_codes(some_codes, some_scales, (N, K), bits, group, isa=isa)
        assert same_bits(m.codes, codes)
        assert same_bits(m.scales, scales)
    one = scales[:, :1].T.copy().T  # [N, 1], its second stride arbitrary
    m = QuantizedMatrix.from_codes(np.ascontiguousarray(codes[:, :group * bits // 8]), one, (N, group), bits, group,
                                   isa=isa)
    assert same_bits(m.scales, scales[:, :1].copy())


def test_from_codes_does_not_keep_its_arrays(isa):
    codes, scales = np.ones((4, 32), np.int8), np.ones((4, 1), np.float16)
    m = QuantizedMatrix.from_codes(codes, scales, (4, 32), 8, 32, isa=isa)
    codes[:], scales[:] = 2, 2
    assert (m.codes == 1).all()
    assert (m.scales == 1).all()
    m.codes[:] = 3  # a new array each time
    assert (m.codes == 1).all()


def test_from_codes_refuses_what_does_not_fit():
    codes, scales = np.zeros((4, 64), np.int8), np.zeros((4, 2), np.float16)
    make = QuantizedMatrix.from_codes
    assert make(codes, scales, (4, 33), 8, 32).shape == (4, 33)
    with pytest.raises(ValueError, match=r"codes: expected \[4, 96\] for shape \(4, 65\) in groups of 32, got \[4, 64"):
        make(codes, scales, (4, 65), 8, 32)
    with pytest.raises(ValueError, match=r"scales: expected \[4, 1\] for shape \(4, 64\) in groups of 64, got \[4, 2"):
        make(codes, scales, (4, 64), 8, 64)
    with pytest.raises(TypeError, match=r"codes: expected uint8, got int8"):
        make(codes, scales, (4, 64), 4, 32)
    with pytest.raises(TypeError, match=r"codes: expected int8, got float32"):
        make(codes.astype(np.float32), scales, (4, 64), 8, 32)
    with pytest.raises(TypeError, match=r"scales: expected float16, got float32"):
        make(codes, scales.astype(np.float32), (4, 64), 8, 32)
    with pytest.raises(ValueError, match="bits: expected 8 or 4, got 5"):
        make(codes, scales, (4, 64), 5, 32)
    with pytest.raises(ValueError, match="group_size: expected one of 32, 64, 128, got 16"):
        make(codes, scales, (4, 64), 8, 16)
    with pytest.raises(ValueError, match=r"bits: expected 8 or 4, got 8.0"):
        make(codes, scales, (4, 64), 8.0, 32)
    with pytest.raises(ValueError, match=r"group_size: expected one of 32, 64, 128, got 32.0"):
        make(codes, scales, (4, 64), 8, 32.0)
    for shape in (None, 4, (4,), (4, 64, 1), (4.5, 64), "4,64", (0, 64)):
        with pytest.raises(ValueError, match=r"shape: expected \(N >= 1, K >= 1\), two integers, got"):
            make(codes, scales, shape, 8, 32)
    with pytest.raises(ValueError, match="codes: expected an array, got list, which numpy refuses"):
        make([[1], [1, 2]], scales, (4, 64), 8, 32)
    with pytest.raises(ValueError, match="shape: expected"):
        make(codes, scales, (0, 64), 8, 32)


# ---- quantising ----

def check_bound(m, w):
    """|w - code * scale| <= scale / 2 for every weight, in exact arithmetic, with codes within +-limit."""
    limit = 127 if m.bits == 8 else 7
    codes, scales = integers(m.codes, m.bits), m.scales.astype(np.float64).repeat(m.group_size, axis=1)
    w = padded(np.asarray(w, np.float64), m.group_size)
    assert np.abs(codes).max() <= limit
    assert np.isfinite(scales).all()
    assert (np.abs(w - codes * scales) <= scales / 2).all()
    assert same_bits(m.dequantize(), (codes * scales)[:, :m.shape[1]].astype(np.float32) + np.float32(0))
    return codes, scales


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_quantize_keeps_its_bound_at_every_size(isa, bits, group):
    """Groups from the least subnormal float32 to the largest that float16 scales."""
    rng = np.random.default_rng(10)
    limit = 127 if bits == 8 else 7
    sizes = np.concatenate([2.0 ** np.arange(-149, 16), rng.uniform(0, 40, 300) * 2.0**-24,
                            limit * np.array([1.5, 2.5, 65504, 0.9999 * 65504, 0.501 * 2.0**-24, 1.499 * 2.0**-24])])
    w = rng.uniform(-1, 1, (len(sizes), 2 * group - 5))
    w[:, 0] = -1
    w = (w * sizes[:, None]).astype(np.float32)
    w[np.abs(w) > limit * 65504] = 0
    check_bound(QuantizedMatrix.quantize(w, bits, group, isa=isa), w)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_by_hand(isa, bits):
    limit = 127 if bits == 8 else 7
    w = np.zeros((2, 64), np.float32)
    w[0, :6] = limit, 0.5, 1.5, -0.5, -2.5, 2.4999998
    w[0, 40] = 2.0**-30  # far below the least float16: its scale is that, not 0
    m = QuantizedMatrix.quantize(w, bits, 32, isa=isa)
    assert m.scales.tolist() == [[1, 2.0**-24], [0, 0]]
    codes = integers(m.codes, bits)
    assert codes[0, :6].tolist() == [limit, 0, 2, 0, -2, 2]
    assert not codes[0, 6:].any()
    assert not codes[1].any()
    y = m.matmul(np.ones((1, 64), np.float32))
    assert y.tolist() == [[limit + 2, 0]]
    assert not m.matmul(np.zeros((3, 64), np.float32)).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_names_the_group_without_a_scale(isa, bits):
    largest = np.float32(65504 * (127 if bits == 8 else 7))
    w = np.ones((40, 100), np.float32)
    w[37, 70] = largest
    check_bound(QuantizedMatrix.quantize(w, bits, 32, isa=isa), w)
    for bad in (np.nextafter(largest, np.float32(np.inf)), 3e38, np.nan, np.inf, -np.inf):
        w[37, 70] = bad
        with pytest.raises(ValueError, match=r"w: row 37, group 2 \(columns 64 to 95\) has max\|w\| = "):
            QuantizedMatrix.quantize(w, bits, 32, isa=isa)
    for dtype in (np.float16, BF16):
        half = np.ones((40, 100), np.float32).astype(dtype)
        half[5, 99] = np.inf
        with pytest.raises(ValueError, match=r"w: row 5, group 3 \(columns 96 to 99\) has max\|w\| = inf"):
            QuantizedMatrix.quantize(half, bits, 32, isa=isa)
    with pytest.raises(TypeError, match="w: expected float32"):
        QuantizedMatrix.quantize(np.ones((2, 2)))
    for shape in [(3,), (0, 4), (4, 0), (2, 2, 2)]:
        with pytest.raises(ValueError, match="w: expected"):
            QuantizedMatrix.quantize(np.ones(shape, np.float32))


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_rows_are_padded_with_zeros(isa, bits, group):
    w = np.random.default_rng(11).standard_normal((7, group + 5)).astype(np.float32)
    m = QuantizedMatrix.quantize(w, bits, group, isa=isa)
    whole = QuantizedMatrix.quantize(padded(w, group), bits, group, isa=isa)
    assert same_bits(m.codes, whole.codes)
    assert same_bits(m.scales, whole.scales)
    assert not integers(m.codes, bits)[:, group + 5:].any()
    x = np.random.default_rng(12).standard_normal((3, group + 5)).astype(np.float32)
    assert same_bits(m.matmul(x), whole.matmul(padded(x, group)))


def test_quantize_takes_weights_as_they_lie(isa):
    w = np.random.default_rng(13).standard_normal((12, 50)).astype(np.float32)
    want = QuantizedMatrix.quantize(w, isa=isa)
    big = np.zeros((24, 110), np.float32)
    big[::2, 5:105:2] = w
    for same in (big[::2, 5:105:2], np.asfortranarray(w), w.astype(">f4"), w[::-1].copy()[::-1]):
        got = QuantizedMatrix.quantize(same, isa=isa)
        assert same_bits(got.codes, want.codes)
        assert same_bits(got.scales, want.scales)


@search(60)
@given(st.integers(1, 80), st.integers(1, 400), st.sampled_from(FORMS), st.integers(1, 30), st.integers(0, 2**32),
       st.sampled_from(ISAS))
def test_any_shape(N, K, form, T, seed, isa):
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((N, K)) * 2.0 ** rng.integers(-30, 10, (N, 1))).astype(np.float32)
    x = (rng.standard_normal((T, K)) * 2.0 ** rng.integers(-100, 100, (T, 1))).astype(np.float32)
    m = QuantizedMatrix.quantize(w, *form, isa=isa)
    check_bound(m, w)
    again = QuantizedMatrix.from_codes(m.codes, m.scales, (N, K), *form, isa="scalar")
    y = m.matmul(x)
    assert same_bits(again.matmul(x), y)
    want, size = exact_product(m, x)
    groups = -(-K // form[1])
    assert (np.abs(y - want) <= (groups + SUM_TERMS) * 2.0**-24 * size + groups * 2.0**-149).all()


# ---- concatenating and keeping ----

@pytest.mark.parametrize("rows", [(5, 16, 1, 33), (16, 48, 32)], ids=["odd", "whole_tiles"])
@pytest.mark.parametrize("bits", [8, 4])
def test_concatenate(isa, bits, rows):
    rng = np.random.default_rng(14)
    parts = [QuantizedMatrix.quantize(rng.standard_normal((n, 100)).astype(np.float32), bits, 32, isa=isa)
             for n in rows]
    whole = QuantizedMatrix.concatenate(parts)
    x = rng.standard_normal((3, 100)).astype(np.float32)
    assert whole.shape == (sum(rows), 100)
    assert whole.isa == isa
    assert same_bits(whole.matmul(x), np.concatenate([m.matmul(x) for m in parts], axis=1))
    assert same_bits(whole.codes, np.concatenate([m.codes for m in parts]))
    for K, other, group in [(99, bits, 32), (100, 12 - bits, 32), (100, bits, 64)]:
        odd = QuantizedMatrix.quantize(np.ones((2, K), np.float32), other, group)
        with pytest.raises(ValueError, match=r"matrices\[1\]: expected K, bits, group_size = "):
            QuantizedMatrix.concatenate([parts[0], odd])
    with pytest.raises(ValueError, match="at least one"):
        QuantizedMatrix.concatenate([])


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_a_saved_file_loads_on_any_isa(isa, bits, group, tmp_path):
    rng = np.random.default_rng(15)
    codes, scales = canonical(rng, 21, 200, bits, group)
    m = QuantizedMatrix.from_codes(codes, scales, (21, 200), bits, group, isa=isa)
    m.save(tmp_path / "w.safetensors")
    x = rng.standard_normal((3, 200)).astype(np.float32)
    for other in ISAS:
        again = QuantizedMatrix.load(tmp_path / "w.safetensors", isa=other)
        assert (again.shape, again.bits, again.group_size, again.isa) == ((21, 200), bits, group, other)
        assert same_bits(again.codes, codes)
        assert same_bits(again.scales, scales)
        assert same_bits(again.matmul(x), m.matmul(x))


@pytest.mark.parametrize("bits", [8, 4])
def test_parts_make_the_same_matrix(isa, bits, tmp_path, monkeypatch):
    """Read, converted, unpacked and written in parts of a tile, of some tiles and at once: the same bits."""
    rng = np.random.default_rng(18)
    codes, scales = canonical(rng, 147, 200, bits, 32)
    x = rng.standard_normal((3, 200)).astype(np.float32)
    files = []
    for size, most in ((1, 16), (6000, 96), (1 << 24, 147)):  # a part has this many rows at most
        monkeypatch.setattr(quant, "_CHUNK", size)
        m = QuantizedMatrix.from_codes(codes, scales, (147, 200), bits, 32, isa=isa)
        assert max(last - first for first, last in m._chunks()) <= most
        m.save(tmp_path / "w")
        files.append((tmp_path / "w").read_bytes())
        parts = [QuantizedMatrix.from_codes(codes[a:b], scales[a:b], (b - a, 200), bits, 32, isa=isa)
                 for a, b in ((0, 50), (50, 51), (51, 147))]
        for made in (m, QuantizedMatrix.load(tmp_path / "w", isa=isa), QuantizedMatrix.concatenate(parts),
                     QuantizedMatrix.from_codes(np.asfortranarray(codes), scales.astype(">f2"), (147, 200), bits, 32)):
            assert same_bits(made.codes, codes)
            assert same_bits(made.scales, scales)
            assert same_bits(made.matmul(x), m.matmul(x))
    assert files[0] == files[1] == files[2]


def test_save_writes_what_safetensors_reads(isa, tmp_path):
    from safetensors.numpy import load_file

    codes, scales = canonical(np.random.default_rng(19), 37, 100, 4, 32)
    QuantizedMatrix.from_codes(codes, scales, (37, 100), 4, 32, isa=isa).save(tmp_path / "w")
    loaded = load_file(tmp_path / "w")
    assert sorted(loaded) == ["codes", "scales"]
    assert same_bits(loaded["codes"], codes)
    assert same_bits(loaded["scales"], scales)


MEMORY = """
import re
from pathlib import Path
import numpy as np
from kda import QuantizedMatrix
N, K = 65536, 4096
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
def matrix(rows):
    m = QuantizedMatrix._blank((rows, K), 8, 128, None)
    m._codes[:], m._scales[:] = 1, 0x3c00
    return m
{before}
start = peak()
m = {make}
print(peak() - start - {kept})
"""
PATHS = {
    "save": ("m = matrix(N)", "m.save({path!r})", 0),
    "load": ("pass", "QuantizedMatrix.load({path!r})", "m.nbytes"),
    "from_codes": ("codes, scales = np.ones((K, N), np.int8).T, np.ones((N, K // 128), np.float16)",
                   "QuantizedMatrix.from_codes(codes, scales, (N, K))", "m.nbytes"),
    "from_gguf": ("blocks = np.ones(N * K // 32 * 34, np.uint8)",
                  "QuantizedMatrix.from_gguf(blocks, (N, K), 'Q8_0')", "m.nbytes"),
    "concatenate": ("parts = [matrix(N // 2 - 1), matrix(N // 2 + 1)]", "QuantizedMatrix.concatenate(parts)",
                    "m.nbytes"),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_beside_the_matrix(tmp_path):
    """256 MiB of codes: what each way of making or keeping them takes at its peak, beside its input and result."""
    path = str(tmp_path / "w")
    extra = {}
    for name, (before, make, kept) in PATHS.items():
        code = MEMORY.format(before=before, make=make.format(path=path), kept=kept)
        extra[name] = int(python(code, OPENBLAS_NUM_THREADS="1").stdout) / 2**20
    assert max(extra.values()) < 40, extra
    assert Path(path).stat().st_size > 2**28


def test_load_refuses_other_files(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path, bad = tmp_path / "w.safetensors", tmp_path / "bad"
    QuantizedMatrix.quantize(np.ones((5, 40), np.float32), group_size=32).save(path)
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is not a complete kda-quantized-matrix file"):
            QuantizedMatrix.load(bad)
    with safe_open(path, framework="numpy") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in ("codes", "scales")}
    for metadata in (None, {}, {"format": "pt"}, about | {"version": "2"}):
        save_file(tensors, bad, metadata=metadata)
        with pytest.raises(ValueError, match="expected a kda-quantized-matrix file of version 1"):
            QuantizedMatrix.load(bad)
    save_file({"codes": tensors["codes"]}, bad, metadata=about)
    with pytest.raises(ValueError, match="is not a complete kda-quantized-matrix file"):
        QuantizedMatrix.load(bad)
    save_file(tensors, bad, metadata={name: value for name, value in about.items() if name != "bits"})
    with pytest.raises(ValueError, match="is not a complete kda-quantized-matrix file"):
        QuantizedMatrix.load(bad)
    for changed in ({"shape": "5,300"}, {"shape": "5"}, {"shape": "5,x"}, {"group_size": "48"}, {"bits": "4"}):
        save_file(tensors, bad, metadata=about | changed)
        with pytest.raises(ValueError, match="bad: is not a complete kda-quantized-matrix file: "):
            QuantizedMatrix.load(bad)
    save_file(tensors | {"scales": tensors["scales"].astype(np.float32)}, bad, metadata=about)
    with pytest.raises(ValueError, match="bad: is not a complete kda-quantized-matrix file: scales: expected float16"):
        QuantizedMatrix.load(bad)
    with pytest.raises(ValueError, match=r"^isa='mmx': there is no such ISA"):
        QuantizedMatrix.load(path, isa="mmx")
    with pytest.raises(FileNotFoundError):
        QuantizedMatrix.load(tmp_path / "none")


# ---- GGUF ----

def test_from_gguf_q8_0_by_hand(isa):
    """A block of 34 bytes: the float16 scale, little-endian, and 32 int8."""
    first, second = np.arange(-16, 16), np.arange(31, -1, -1) - 128
    data = b"".join(np.array([s], "<f2").tobytes() + c.astype(np.int8).tobytes()
                    for s, c in [(0.5, first), (2, second), (-1, second), (0, first)])
    m = QuantizedMatrix.from_gguf(np.frombuffer(data, np.uint8), (2, 64), "Q8_0", isa=isa)
    assert (m.bits, m.group_size) == (8, 32)
    assert np.array_equal(m.dequantize(), [[*first * 0.5, *second * 2.0], [*-1.0 * second, *first * 0.0]])


def test_from_gguf_q4_0_by_hand(isa):
    """A block of 18 bytes: the scale, and 16 bytes with value i in the low nibble of byte i, value i + 16 in the high
    one, each plus 8."""
    values = np.array([*range(-8, 8), *range(7, -9, -1)])
    block = np.array([0.25], "<f2").tobytes() + bytes((values[i] + 8) | (values[i + 16] + 8) << 4 for i in range(16))
    m = QuantizedMatrix.from_gguf(np.frombuffer(block * 2, np.uint8).reshape(2, 18), (2, 32), "Q4_0", isa=isa)
    assert (m.bits, m.group_size) == (4, 32)
    assert np.array_equal(m.dequantize(), [values * 0.25] * 2)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_from_a_gguf_file(isa, name, tmp_path):
    """Written and read back by the gguf package, against its own dequantisation."""
    import gguf

    w = np.random.default_rng(16).standard_normal((21, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "test")
    writer.add_tensor("w", gguf.quants.quantize(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor, = gguf.GGUFReader(tmp_path / "w.gguf").tensors
    m = QuantizedMatrix.from_gguf(tensor.data, tensor.shape[::-1], tensor.tensor_type.name, isa=isa)
    assert m.shape == (21, 96)
    assert np.array_equal(m.dequantize(), gguf.quants.dequantize(np.asarray(tensor.data), kind))
    assert np.abs(m.dequantize() - w).max() < (0.02 if name == "Q8_0" else 0.4)


def test_from_gguf_refuses_what_does_not_fit():
    make = QuantizedMatrix.from_gguf
    with pytest.raises(ValueError, match="quantization: expected 'Q8_0' or 'Q4_0', got 'Q4_K'"):
        make(np.zeros(34, np.uint8), (1, 32), "Q4_K")
    for data, shape in [(np.zeros(33, np.uint8), (1, 32)), (np.zeros(34, np.uint8), (1, 33)),
                        (np.zeros(34, np.int8), (1, 32)), (np.zeros(34, np.uint8), (2, 32))]:
        with pytest.raises(ValueError, match="data: expected uint8 of"):
            make(data, shape, "Q8_0")
    for shape in ((0, 32), (-1, -32), (1, 32, 1)):
        with pytest.raises(ValueError, match="shape: expected"):
            make(np.zeros(0 if 0 in shape else 34, np.uint8), shape, "Q8_0")
    with pytest.raises(ValueError, match="quantization: expected 'Q8_0' or 'Q4_0', got"):
        make(np.zeros(34, np.uint8), (1, 32), ["Q8_0"])


# ---- far addresses ----

def test_rows_beyond_2_31_elements(isa, tmp_path):
    """Rows that far apart in a sparse file, of which a few pages are touched: canonical codes and scales, weights, x.

    Offsets within a packed matrix are tested below; those of y are products of ptrdiff_t like these.
    """
    rng = np.random.default_rng(17)
    far = 2**31 + 64
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(4 * far + 4096)
    index = list(kda.isas()).index(isa)

    def far_apart(rows):
        whole = np.memmap(tmp_path / "sparse", rows.dtype, "r+")
        view = np.lib.stride_tricks.as_strided(whole, rows.shape, (far * rows.itemsize, rows.itemsize))
        view[:] = rows
        return view

    w, x = rng.standard_normal((2, 40)).astype(np.float32), rng.standard_normal((2, 40)).astype(np.float32)
    near = QuantizedMatrix.quantize(w, 4, 32, isa=isa)
    codes, scales, y = near.codes, near.scales, near.matmul(x)
    m = QuantizedMatrix.quantize(far_apart(w), 4, 32, isa=isa)
    assert same_bits(m.codes, codes)
    assert same_bits(m.matmul(far_apart(x)), y)
    for far_one in ("codes", "scales"):
        arrays = {"codes": codes, "scales": scales.view(np.uint16)}
        arrays[far_one] = far_apart(arrays[far_one])
        m._codes[:], m._scales[:] = 0, 0
        _core.matrix_pack(index, m._codes, m._scales, arrays["codes"], arrays["scales"], 40, 32, 4, False)
        assert same_bits(m.codes, codes)
        assert same_bits(m.scales, scales)
        assert same_bits(m.matmul(x), y)
    back = far_apart(np.zeros_like(codes))
    _core.matrix_pack(index, m._codes, m._scales, back, np.zeros((2, 2), np.uint16), 40, 32, 4, True)
    assert same_bits(np.array(back), codes)


BEYOND = """
import numpy as np
from kda import QuantizedMatrix
N, K = 65536, 32896  # 2^31 codes and 8 MiB more
small = QuantizedMatrix.quantize(np.random.default_rng(0).standard_normal((64, K)).astype(np.float32))
x = np.random.default_rng(1).standard_normal((2, K)).astype(np.float32)
codes, scales = np.zeros(N * K, np.uint8), np.zeros(N * K // 128, np.uint16)  # pages of zeros: no memory of their own
codes[-small._codes.size:], scales[-small._scales.size:] = small._codes, small._scales
y = QuantizedMatrix(codes, scales, (N, K), 8, 128, small.isa).matmul(x)
assert not y[:, :-64].any()
assert y[:, -64:].tobytes() == small.matmul(x).tobytes()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.maxsize < 2**33, reason="needs 64-bit addresses")
@pytest.mark.parametrize("isa", ISAS[:1])
def test_packed_matrix_beyond_2_31_bytes(isa):
    """The last tiles of a packed matrix, past 2^31 codes, are where they should be; all before them is zero pages."""
    python(BEYOND, KDA_ISA=isa)
