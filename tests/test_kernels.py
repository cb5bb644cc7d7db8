"""The C kernels one by one, in the manner of dav1d's checkasm: each ISA against scalar and against float64.

Kernels are called through their addresses, past everything in Python. Every array stands at an odd address
between guard zones: what follows an input is NaN and must not leak into a result, what surrounds an output
must keep its bits.
"""
import ctypes
import mmap
import re
import sys
from ctypes import c_float, c_int, c_int32, c_ssize_t, c_void_p
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import ISAS

import kda
from kda import _core, reference

SIZES = [1, 3, 5, 8, 15, 16, 17, 33, 60, 64, 100, 128, 129]
HEADER = (Path(__file__).parents[1] / "kda" / "_simd" / "kernels.h").read_text()
ULP = {name: float(bound) for name, bound in re.findall(r"^[/* ]+(\w+):.*ulp <= ([\d.]+)", HEADER, re.M)}
L2NORM_TERMS, NORM_GATED_TERMS = map(int, re.findall(r"relative error <= \(n / 2 \+ (\d+)\) \* 2\^-24", HEADER))
STEP_TERMS = int(re.findall(r"within \(K \+ (\d)\) \* 2\^-24 of the sum", HEADER)[0])
BACKWARD_TERMS = int(re.findall(r"Sums of n terms are within \(n \+ (\d)\) \* 2\^-24", HEADER)[0])
GATE_BACKWARD_ERROR = 2.0 ** -int(re.findall(r"Elementwise within 2\^-(\d+) of the value", HEADER)[0])
EPS = 2.0**-24  # half an ulp of 1: the largest relative error of one rounding

P = c_void_p
MAP, GATE = (P, P, c_ssize_t), (P, P, P, c_float, c_float, c_ssize_t)
SIGNATURES = {
    "widen_f16": MAP, "widen_bf16": MAP, "narrow_f16": MAP, "narrow_bf16": MAP,
    "exp": MAP, "sigmoid": MAP, "softplus": MAP,
    "l2norm": (P, P, c_float, c_ssize_t),
    "prepare": (P, P, P, P, P, P, c_float, c_float, c_ssize_t),
    "gate_softplus": GATE, "gate_bounded": GATE,
    "step": (P, P, P, P, P, P, P, P, P, P, c_float, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "settle": (P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "block": (P, P, P, P, P, P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "block_bf16": (P, P, P, P, P, P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "step_backward": (*(P,) * 12, c_float, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "prepare_backward": (P, P, P, P, c_float, c_float, c_ssize_t),
    "gate_softplus_backward": GATE, "gate_bounded_backward": GATE,
    "conv": (P, P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_int, c_int),
    "conv_step": (P, P, P, P, P, c_ssize_t, c_int, c_int),
    "norm_gated": (P, P, P, P, c_float, c_ssize_t, c_int),
    "probe_update": (P, c_float, c_float, c_ssize_t),
    "probe_fma": (P, c_ssize_t), "probe_idot": (P, c_ssize_t), "probe_read": (P, c_ssize_t),
    "quantize": (P, P, P, c_ssize_t), "amax": (P, c_ssize_t), "encode": (P, P, c_float, c_int, c_ssize_t),
    "idot_q8": (P, P, P, P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "idot_q4": (P, P, P, P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
    "dense": (P, P, P, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t, c_ssize_t),
}
RESULTS = {"step_backward": c_float, "gate_softplus_backward": c_float, "gate_bounded_backward": c_float,
           "probe_fma": c_ssize_t, "probe_idot": c_ssize_t, "probe_read": c_float, "quantize": c_int32, "amax": c_float}
FLOAT32_BITS = np.concatenate([
    np.arange(0, 2**32, 65537, dtype=np.uint64).astype(np.uint32),
    # zeros, subnormals, the least and greatest normals, ones, infinities, NaNs quiet and signalling
    np.array([0, 1, 2, 0x7fffff, 0x800000, 0x800001, 0x3f7fffff, 0x3f800000, 0x3f800001, 0x7f7fffff, 0x7f800000,
              0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fffffff], np.uint32).repeat(2)
    | np.tile(np.array([0, 1 << 31], np.uint32), 15),
    # around where exp overflows, becomes subnormal, and becomes 0
    (np.array([88.72284, -87.33655, -103.97208, 20.0, -20.0], np.float32).view(np.uint32)[:, None]
     + np.arange(-40, 41).astype(np.uint32)).ravel(),
])


def kernel(isa, name):
    index = list(kda.isas()).index(isa)
    function = ctypes.CFUNCTYPE(RESULTS.get(name), *SIGNATURES[name])(_core.kernel_addresses(index)[name])

    def call(*arguments):
        result = function(*(a.pointer if isinstance(a, Guarded) else a for a in arguments))
        check_float_environment()
        return result

    return call


def check_float_environment():
    """Subnormals live and rounding is to nearest, as before the call."""
    x = np.array([2.0**-126, 1.0, -1.0], np.float32)
    assert x[0] * np.float32(0.5) == 2.0**-127
    assert np.array([2.0**-140], np.float32)[0] * np.float32(1.0) == 2.0**-140
    assert (x[1:] / np.float32(3)).view(np.uint32).tolist() == [0x3eaaaaab, 0xbeaaaaab]


class Guarded:
    """An array at an odd element offset between two guard zones of NaN patterns."""
    ZONE = 41

    def __init__(self, values, lead=0, gap=0):
        """values [n] or [rows, n]; `gap` guarded elements after every row."""
        values = np.asarray(values)
        rows = np.atleast_2d(values)
        self.size_of_row = rows.shape[1] + gap
        # NaN as float32, float16 and bfloat16
        bits, canary = {4: (np.uint32, 0x7fc0da7a), 2: (np.uint16, 0x7fa7), 1: (np.uint8, 0xa7)}[values.itemsize]
        self.whole = np.full(2 * self.ZONE + lead + rows.shape[0] * self.size_of_row, canary, bits)
        self.start = start = self.ZONE + lead
        span = self.whole[start:start + rows.shape[0] * self.size_of_row].view(values.dtype)
        self.rows = span.reshape(rows.shape[0], self.size_of_row)[:, :rows.shape[1]]
        self.rows[:] = rows
        self.array = self.rows if values.ndim == 2 else self.rows[0]
        self.pointer = span.ctypes.data
        self.before = self.whole.copy()

    def unchanged(self):
        return np.array_equal(self.whole, self.before)

    def guards_unchanged(self):
        mine = np.zeros(self.whole.size, bool)
        for i in range(self.rows.shape[0]):
            mine[self.start + i * self.size_of_row:][:self.rows.shape[1]] = True
        return np.array_equal(self.whole[~mine], self.before[~mine])


def blank(*shape, dtype=np.float32, **options):
    """A guarded output, full of a value that no test expects."""
    return Guarded(np.full(shape, 12345 if np.dtype(dtype).itemsize > 1 else 85, dtype), **options)


def bits(x):
    return x.view(np.uint32 if x.itemsize == 4 else np.uint16)


def equal_but_nan(got, want):
    """The same bits, where any NaN stands for any other."""
    nan = np.isnan(want)
    return np.array_equal(np.isnan(got), nan) and np.array_equal(bits(got)[~nan], bits(want)[~nan])


def ulps(got, exact):
    """|got - exact rounded to float32| in units in the last place of the latter; infinity counts as 2^128."""
    with np.errstate(over="ignore", under="ignore"):
        want = exact.astype(np.float32)
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    got, want = got[~nan].astype(np.float64), want[~nan].astype(np.float64)
    top, largest = 2.0**128, np.float32(2.0**127)  # numpy's spacing of the largest float overflows
    spacing = np.spacing(np.minimum(np.abs(want).astype(np.float32), largest)).astype(np.float64)
    return np.abs(np.clip(got, -top, top) - np.clip(want, -top, top)) / spacing


def all_of(name, isa, x, bits_of_y=np.float32):
    """One call over a long array."""
    x = Guarded(x)
    y = blank(x.array.size, dtype=bits_of_y)
    kernel(isa, name)(y, x, x.array.size)
    assert x.unchanged()
    assert y.guards_unchanged()
    return y.array


EXACT = {"exp": np.exp, "sigmoid": reference.sigmoid, "softplus": reference.softplus}


def test_every_kernel_has_a_signature_here():
    for isa in ISAS:
        assert sorted(_core.kernel_addresses(list(kda.isas()).index(isa))) == sorted(SIGNATURES)
    assert sorted(ULP) == sorted([*EXACT, "gate_softplus", "gate_bounded"])


# ---- conversion ----

def test_widen_f16_all_codes(isa):
    codes = np.arange(65536, dtype=np.uint16)
    got = all_of("widen_f16", isa, codes)
    with np.errstate(invalid="ignore"):  # AArch64 raises the flag where numpy widens a signalling NaN
        expected = codes.view(np.float16).astype(np.float32)
    assert equal_but_nan(got, expected)
    assert np.array_equal(np.signbit(got), codes >= 0x8000)


def test_widen_bf16_all_codes(isa):
    codes = np.arange(65536, dtype=np.uint16)
    got = all_of("widen_bf16", isa, codes)
    assert np.array_equal(bits(got), codes.astype(np.uint32) << 16)
    assert equal_but_nan(got, codes.view(ml_dtypes.bfloat16).astype(np.float32))


def halfway_points(dtype):
    """Every finite value of a half type, the points halfway to the next, and their float32 neighbours."""
    codes = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    middles = ((codes[1:].astype(np.float64) + codes[:-1]) / 2).astype(np.float32)
    top = np.float64(codes[-1]) + (np.float64(codes[-1]) - codes[-2]) / 2  # from here on: infinity
    tops = np.array([top, -top]).astype(np.float32)
    middles = np.concatenate([middles, tops])
    beside = [np.nextafter(middles, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    return np.concatenate([codes, -codes, middles, *beside])


@pytest.mark.parametrize(("name", "dtype"), [("narrow_f16", np.float16), ("narrow_bf16", ml_dtypes.bfloat16)])
def test_narrow_rounds_to_nearest_even(isa, name, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([halfway_points(dtype), FLOAT32_BITS.view(np.float32)])
        got = all_of(name, isa, x, np.uint16)
        want = x.astype(dtype)
    nan = np.isnan(x)
    assert nan.sum() > 100
    assert np.isnan(got.view(dtype)[nan].astype(np.float32)).all()
    assert np.array_equal(got[~nan], want.view(np.uint16)[~nan])


@pytest.mark.parametrize(("x", "f16", "bf16"), [
    (1.0, 0x3c00, 0x3f80), (-2.0, 0xc000, 0xc000), (65504.0, 0x7bff, 0x4780), (65519.996, 0x7bff, 0x4780),
    (65520.0, 0x7c00, 0x4780), (2.0**-24, 0x0001, 0x3380), (2.0**-25, 0x0000, 0x3300), (-(2.0**-25), 0x8000, 0xb300),
    (1.5 * 2.0**-24, 0x0002, 0x33c0), (1 + 2.0**-11, 0x3c00, 0x3f80), (1 + 3 * 2.0**-11, 0x3c02, 0x3f80),
    (1 + 2.0**-8, 0x3c04, 0x3f80), (1 + 3 * 2.0**-8, 0x3c0c, 0x3f82), (3.4e38, 0x7c00, 0x7f80),
])
def test_narrow_known_values(isa, x, f16, bf16):
    """Worked by hand: ties go to the even code, overflow to infinity, the smallest subnormals to 0."""
    x = np.array([x], np.float32)
    assert all_of("narrow_f16", isa, x, np.uint16)[0] == f16
    assert all_of("narrow_bf16", isa, x, np.uint16)[0] == bf16


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["widen_f16", "widen_bf16", "narrow_f16", "narrow_bf16"])
def test_conversion_sizes(isa, name, n):
    rng = np.random.default_rng(n)
    for lead in range(4):
        if name.startswith("widen"):
            x, y = Guarded(rng.integers(0, 0x7c00, n).astype(np.uint16), lead), blank(n)
        else:
            x, y = Guarded(rng.standard_normal(n).astype(np.float32), lead), blank(n, dtype=np.uint16)
        want = blank(n, dtype=y.array.dtype)
        kernel("scalar", name)(want, x, n)
        kernel(isa, name)(y, x, n)
        assert np.array_equal(bits(y.array), bits(want.array))
        assert y.guards_unchanged()
        assert x.unchanged()


# ---- elementwise ----

@pytest.mark.parametrize("name", EXACT)
def test_map_over_all_floats(isa, name):
    x = FLOAT32_BITS.view(np.float32)
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64))
    got = all_of(name, isa, x)
    assert ulps(got, exact).max() <= ULP[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_map_over_many_floats(isa, name):
    """Every 997th bit pattern, 4 million in all, with every exponent and both signs."""
    for start in range(8):
        x = np.arange(start * 2**29, (start + 1) * 2**29, 997, dtype=np.uint64).astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            exact = EXACT[name](x.astype(np.float64))
        assert ulps(all_of(name, isa, x), exact).max() <= ULP[name]


@pytest.mark.parametrize(("name", "x", "y"), [
    ("exp", [0.0, -0.0, -np.inf, np.inf, -104.0, -1e30, 88.73, 1e30, 2.0**-149, -(2.0**-149)],
     [1, 1, 0, np.inf, 0, 0, np.inf, np.inf, 1, 1]),
    ("exp", [-100.0, -103.0], [26 * 2.0**-149, 1 * 2.0**-149]),
    ("sigmoid", [0.0, -0.0, np.inf, -np.inf, 200.0, -200.0, 17.5], [0.5, 0.5, 1, 0, 1, 0, 1]),
    ("softplus", [np.inf, -np.inf, 20.5, 1e30, -200.0], [np.inf, 0, 20.5, 1e30, 0]),
])
def test_map_known_values(isa, name, x, y):
    x = np.array(x, np.float32)
    got = all_of(name, isa, x)
    if name == "exp" and x[0] == -100:  # subnormal results: 26.55 and 1.32 steps of 2^-149
        assert np.abs(got.astype(np.float64) / 2.0**-149 - [26.55, 1.32]).max() <= 1.0
    else:
        assert np.array_equal(got, np.array(y, np.float32))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_map_sizes_and_in_place(isa, name, n):
    """A value does not depend on where in the array it stands, nor on y being x."""
    rng = np.random.default_rng(n)
    values = (8 * rng.standard_normal(n)).astype(np.float32)
    one_by_one = np.array([all_of(name, isa, values[i:i + 1])[0] for i in range(n)])
    for lead in range(4):
        x, y = Guarded(values, lead), blank(n, lead=lead + 1)
        kernel(isa, name)(y, x, n)
        assert np.array_equal(bits(y.array), bits(one_by_one))
        assert y.guards_unchanged()
        assert x.unchanged()
        kernel(isa, name)(x, x, n)
        assert np.array_equal(bits(x.array), bits(one_by_one))
        assert x.guards_unchanged()


def test_nan_stays_in_its_lane(isa):
    for name in EXACT:
        x = np.linspace(-3, 3, 33, dtype=np.float32)
        clean = all_of(name, isa, x)
        for i in (0, 7, 16, 32):
            dirty = x.copy()
            dirty[i] = np.nan
            got = all_of(name, isa, dirty)
            assert np.flatnonzero(np.isnan(got)).tolist() == [i]
            assert np.array_equal(np.delete(bits(got), i), np.delete(bits(clean), i))


# ---- norms ----

@pytest.mark.parametrize("n", SIZES)
def test_l2norm(isa, n):
    rng = np.random.default_rng(n)
    for lead in range(4):
        x, y = Guarded(rng.standard_normal(n).astype(np.float32), lead), blank(n)
        kernel(isa, "l2norm")(y, x, 1e-6, n)
        assert np.abs(y.array / reference.l2norm(x.array) - 1).max() <= (n / 2 + L2NORM_TERMS) * EPS
        assert y.guards_unchanged()
        assert x.unchanged()
        kernel(isa, "l2norm")(x, x, 1e-6, n)
        assert np.array_equal(bits(x.array), bits(y.array))


def test_l2norm_eps_is_on_the_sum(isa):
    """128 values of 2^-12: their squares sum to 2^-17; eps as large again doubles that, to 2^-16."""
    x, y = Guarded(np.full(128, 2.0**-12, np.float32)), blank(128)
    kernel(isa, "l2norm")(y, x, 2.0**-17, 128)
    assert np.array_equal(y.array, np.full(128, 2.0**-4, np.float32))
    zeros = blank(5)
    kernel(isa, "l2norm")(zeros, Guarded(np.zeros(5, np.float32)), 1e-6, 5)
    assert np.array_equal(zeros.array, np.zeros(5))


@pytest.mark.parametrize("K", SIZES)
def test_prepare(isa, K):
    rng = np.random.default_rng(K)
    q, k = (Guarded(x, i) for i, x in enumerate(rng.standard_normal((2, K)).astype(np.float32)))
    g, scale = Guarded(-np.abs(3 * rng.standard_normal(K)).astype(np.float32), 2), np.float32(0.0883883461356163)
    decay = all_of("exp", isa, g.array.copy())
    for eps in (1e-6, 0.5, -1.0):
        q_out, k_out, g_out = blank(K), blank(K, lead=1), blank(K, lead=2)
        kernel(isa, "prepare")(q_out, k_out, g_out, q, k, g, float(scale), eps, K)
        if eps < 0:
            assert np.array_equal(bits(q_out.array), bits(scale * q.array))  # one rounding
            assert np.array_equal(bits(k_out.array), bits(k.array))
        else:
            allowed = (K / 2 + L2NORM_TERMS) * EPS
            assert np.abs(q_out.array / (scale * reference.l2norm(q.array, eps)) - 1).max() <= allowed
            assert np.abs(k_out.array / reference.l2norm(k.array, eps) - 1).max() <= allowed
        assert np.array_equal(bits(g_out.array), bits(decay))
        for x in (q_out, k_out, g_out):
            assert x.guards_unchanged()
        for x in (q, k, g):
            assert x.unchanged()
    kernel(isa, "prepare")(q_out, k_out, g_out, q, k, g, float(scale), 1e-6, K)
    kernel(isa, "prepare")(q, k, g, q, k, g, float(scale), 1e-6, K)  # each in its place
    for x, y in [(q, q_out), (k, k_out), (g, g_out)]:
        assert np.array_equal(bits(x.array), bits(y.array))
        assert x.guards_unchanged()


ACTIVATIONS = {0: lambda x: x, 1: reference.sigmoid, 2: reference.silu}


@pytest.mark.parametrize("activation", [1, 2])
@pytest.mark.parametrize("n", SIZES)
def test_norm_gated(isa, n, activation):
    rng = np.random.default_rng(n)
    x, gate, weight = (Guarded(a, i) for i, a in enumerate(rng.standard_normal((3, n)).astype(np.float32)))
    y = blank(n, lead=3)
    kernel(isa, "norm_gated")(y, x, gate, weight, 1e-5, n, activation)
    want = reference.rms_norm_gated(x.array, gate.array, weight.array, 1e-5, {1: "sigmoid", 2: "silu"}[activation])
    assert np.abs(y.array / want - 1).max() <= (n / 2 + NORM_GATED_TERMS) * EPS
    assert y.guards_unchanged()
    for a in (x, gate, weight):
        assert a.unchanged()
    for place in (x, gate):
        kernel(isa, "norm_gated")(place, x, gate, weight, 1e-5, n, activation)
        assert np.array_equal(bits(place.array), bits(y.array))
        assert place.guards_unchanged()
        place.array[:] = place.before[place.start:][:n].view(np.float32)


# ---- convolution ----

class Conv:
    """Rows of a convolution, each guarded on its own, the history first."""

    def __init__(self, n, width, tokens, bias=True, gap=0):
        rng = np.random.default_rng(100 * n + width)
        self.n, self.width, self.tokens, self.gap = n, width, tokens, gap
        self.rows = [Guarded(rng.standard_normal(n).astype(np.float32), i % 4) for i in range(width - 1 + tokens)]
        self.taps = Guarded(rng.standard_normal((width, n)).astype(np.float32), 1, gap)
        self.bias = Guarded(rng.standard_normal(n).astype(np.float32), 2) if bias else None

    def run(self, isa, activation):
        y = [blank(self.n, lead=i % 3) for i in range(self.tokens)]
        pointers = [(c_void_p * len(rows))(*[r.pointer for r in rows]) for rows in (y, self.rows)]
        kernel(isa, "conv")(*pointers, self.taps, self.bias, self.tokens, self.n, self.n + self.gap, self.width,
                            activation)
        assert all(row.guards_unchanged() for row in y)
        assert all(x.unchanged() for x in [*self.rows, self.taps, *([self.bias] if self.bias else [])])
        return np.array([row.array for row in y])

    def exact(self, activation):
        """(y, bound of its error) in float64; no activation here is steeper than 1.1."""
        x = np.array([row.array for row in self.rows], np.float64)
        taps, bias = self.taps.array.astype(np.float64), self.bias.array.astype(np.float64) if self.bias else 0.0
        windows = np.array([x[t:t + self.width] for t in range(self.tokens)])
        y = ACTIVATIONS[activation](bias + np.einsum("twc,wc->tc", windows, taps))
        size = np.abs(bias) + np.einsum("twc,wc->tc", np.abs(windows), np.abs(taps))
        return y, 1.1 * (self.width + 1) * EPS * size + 6 * EPS * np.abs(y)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("n", SIZES)
def test_conv(isa, n, width):
    for activation in ACTIVATIONS:
        for bias in (False, True):
            conv = Conv(n, width, 5, bias, gap=3)
            y = conv.run(isa, activation)
            want, error = conv.exact(activation)
            assert (np.abs(y - want) <= error).all()


def test_conv_impulse(isa):
    """Taps 1, 10, 100, 1000 and a unit impulse: the last tap is the current token."""
    conv = Conv(1, 4, 4, bias=False)
    for i, row in enumerate(conv.rows):
        row.array[:] = float(i == 3)
        row.before = row.whole.copy()
    conv.taps.array[:, 0] = [1, 10, 100, 1000]
    conv.taps.before = conv.taps.whole.copy()
    assert conv.run(isa, 0).ravel().tolist() == [1000, 100, 10, 1]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("n", SIZES)
def test_conv_step(isa, n, width):
    """One token with the state channel by channel: the numbers of conv, and the state moves on by one."""
    for activation in ACTIVATIONS:
        for bias in (False, True):
            conv = Conv(n, width, 1, bias)
            past = np.array([row.array for row in conv.rows[:-1]], np.float32).reshape(width - 1, n).T
            state, weight = Guarded(past.ravel() if width > 1 else np.zeros(1, np.float32), 1), Guarded(
                conv.taps.array.T.ravel(), 2)
            x, y = conv.rows[-1], blank(n, lead=3)
            kernel(isa, "conv_step")(y, state, x, weight, conv.bias, n, width, activation)
            want, error = conv.exact(activation)
            assert (np.abs(y.array - want[0]) <= error[0]).all()
            if width > 1:
                after = np.concatenate([past[:, 1:], x.array[:, None]], axis=1)
                assert np.array_equal(bits(state.array), bits(after.ravel()))
            else:
                assert state.unchanged()
            for a in (state, y):
                assert a.guards_unchanged()
            for a in (x, weight):
                assert a.unchanged()


# ---- gates ----

@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ["gate_softplus", "gate_bounded"])
@pytest.mark.parametrize("n", SIZES)
def test_gates(isa, n, name, with_bias):
    rng = np.random.default_rng(n)
    x = Guarded((10 * rng.standard_normal(n)).astype(np.float32), 1)
    bias = Guarded(rng.standard_normal(n).astype(np.float32), 2)
    y, ea, bound = blank(n, lead=3), np.float32(1.7), -5.0
    kernel(isa, name)(y, x, bias if with_bias else None, float(ea), bound, n)
    z = x.array + bias.array if with_bias else x.array  # the roundings of z are the input's, not the gate's
    want = -np.float64(ea) * reference.softplus(z) if name == "gate_softplus" else bound * reference.sigmoid(ea * z)
    assert ulps(y.array, want).max() <= ULP[name]
    assert y.guards_unchanged()
    assert x.unchanged()
    assert bias.unchanged()


@pytest.mark.parametrize("name", ["gate_softplus", "gate_bounded"])
@pytest.mark.parametrize(("ea", "bound"), [(2.5, -5.0), (1.99, -7.9)])
def test_gates_over_all_floats(isa, name, ea, bound):
    ea, bound = np.float32(ea), np.float64(np.float32(bound))
    x, y = Guarded(FLOAT32_BITS.view(np.float32)), blank(FLOAT32_BITS.size)
    kernel(isa, name)(y, x, None, float(ea), float(bound), y.array.size)
    with np.errstate(all="ignore"):
        z = x.array.astype(np.float64)
        want = -np.float64(ea) * reference.softplus(z) if name == "gate_softplus" else (
            bound * reference.sigmoid(ea * x.array))
    error = ulps(y.array, want)
    if name == "gate_softplus":  # ea enlarges the spacing of subnormals that softplus was rounded to
        small = z < -87
        assert small.sum() > 10000
        assert np.abs(y.array[small] - want[small]).max() <= (ea + 1) * 2.0**-149
        error = error[~small[~np.isnan(z)]]
    assert error.max() <= ULP[name]


# ---- the delta rule ----

class Step:
    """Inputs of one step; rows of S padded by NaN."""

    def __init__(self, K, V, seed=0, ld_in=None):
        rng = np.random.default_rng(seed)
        unit = rng.standard_normal((2, K))
        q, k = unit / np.linalg.norm(unit, axis=1, keepdims=True)
        self.K, self.V, self.beta = K, V, float(np.float32(1.3))
        self.s = Guarded(rng.standard_normal((K, V)).astype(np.float32), 1, (ld_in or V) - V)
        self.q, self.k = Guarded(q.astype(np.float32), 2), Guarded(k.astype(np.float32), 3)
        self.v = Guarded(rng.standard_normal(V).astype(np.float32), 4)
        decay = rng.uniform(0, 1, K)
        decay[::7] = 1
        decay[5::11] = 0  # a hard reset of the row
        self.decay = Guarded(decay.astype(np.float32), 5)

    def run(self, isa, gap=0, in_place=False, j0=0, j1=None):
        """(o, S) over columns j0 to j1, with every guard and every input checked."""
        j1 = self.V if j1 is None else j1
        n = j1 - j0
        o, out, work = blank(n, lead=1), blank(self.K, n, lead=1, gap=gap), blank(2 * self.K + n, lead=1)
        s, keep = self.s, [self.s, self.q, self.k, self.v, self.decay]
        if in_place:
            out = s = Guarded(self.s.array[:, j0:j1].copy(), 1, gap)
            s_in, v_in, ld_in, keep = s.pointer, self.v.pointer + 4 * j0, n + gap, keep[1:]
        else:
            s_in, v_in, ld_in = s.pointer + 4 * j0, self.v.pointer + 4 * j0, s.size_of_row
        kernel(isa, "step")(o, out, None, work, s_in, None, self.q, self.k, v_in, self.decay, self.beta, self.K, n,
                            n + gap, ld_in)
        assert all(x.unchanged() for x in keep)
        assert o.guards_unchanged()
        assert out.guards_unchanged()
        assert work.guards_unchanged()
        return o.array.copy(), out.array.copy()

    def exact(self):
        """(o, S, bound of o's error, bound of S's) in float64, by the definition."""
        q, k, v, decay, S = (x.array.astype(np.float64) for x in (self.q, self.k, self.v, self.decay, self.s))
        S = decay[:, None] * S
        d = self.beta * (v - S.T @ k)
        new = S + k[:, None] * d
        o = new.T @ q
        # n sums and products in any order: n * EPS of the sum of magnitudes, to first order
        terms = self.K + STEP_TERMS
        d_error = terms * EPS * self.beta * (np.abs(v) + np.abs(S).T @ np.abs(k))
        o_error = terms * EPS * (np.abs(S).T @ np.abs(q) + np.abs(q) @ np.abs(k) * np.abs(d)) + abs(q @ k) * d_error
        s_error = 3 * EPS * (np.abs(S) + np.abs(k[:, None] * d)) + np.abs(k[:, None]) * d_error
        return o, new, o_error, s_error


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("K", SIZES)
def test_step(isa, K, V):
    step = Step(K, V, seed=1000 * K + V)
    o, s = step.run(isa)
    exact_o, exact_s, o_error, s_error = step.exact()
    assert (np.abs(o - exact_o) <= o_error).all()
    assert (np.abs(s - exact_s) <= s_error).all()
    assert np.abs(o - exact_o).max() <= 6e-7 * max(1, np.abs(exact_o).max())  # and not near those bounds as a rule
    assert np.abs(s - exact_s).max() <= 6e-7 * max(1, np.abs(exact_s).max())
    scalar_o, scalar_s = step.run("scalar")
    assert np.abs(o - scalar_o).max() <= 1e-6 * max(1, np.abs(scalar_o).max())
    assert np.abs(s - scalar_s).max() <= 1e-6 * max(1, np.abs(scalar_s).max())

    for gap, in_place in [(0, True), (7, True), (7, False)]:
        again_o, again_s = step.run(isa, gap, in_place)
        assert np.array_equal(bits(again_o), bits(o))
        assert np.array_equal(bits(again_s), bits(s))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("K", [1, 17, 64, 129])
def test_updates_put_off_keep_the_bits(isa, K, V, in_place):
    """Three tokens: the first leaves its update, the second makes it and leaves its own, the third makes both; and
    settle makes what is left. Each as if it had been made at once."""
    tokens = [Step(K, V, seed=K + 7 * V + t) for t in range(3)]
    want_o, want_s = [], []
    for token in tokens:
        if want_s:
            token.s.array[...] = want_s[-1]
            token.s.before = token.s.whole.copy()
        o, s = token.run(isa)
        want_o.append(o)
        want_s.append(s)

    S = Guarded(tokens[0].s.array.copy(), 1, 5)
    S.array[...] = tokens[0].s.array
    updates, work = blank(2 * K + V, lead=3), blank(2 * K + V, lead=1)

    def step(t, s_out, left, s_in, pending):
        token, o = tokens[t], blank(V, lead=1)
        kernel(isa, "step")(o, s_out, left, work, s_in, pending, token.q, token.k, token.v, token.decay, token.beta,
                            K, V, V + 5, V + 5)
        assert all(x.unchanged() for x in (token.q, token.k, token.v, token.decay))
        assert all(x.guards_unchanged() for x in (o, S, updates, work))
        assert np.array_equal(bits(o.array), bits(want_o[t]))

    start = S.whole.copy()
    step(0, S, updates, S, None)
    assert np.array_equal(bits(S.whole), bits(start))  # read alone
    assert np.array_equal(updates.array[:K], tokens[0].decay.array)
    assert np.array_equal(updates.array[K:2 * K], tokens[0].k.array)
    settled = blank(K, V, lead=1, gap=5)
    kernel(isa, "settle")(settled, S, updates, K, V, V + 5, V + 5)
    assert settled.guards_unchanged()
    assert np.array_equal(bits(settled.array), bits(want_s[0]))

    target, other = (S, updates) if in_place else (blank(K, V, lead=2, gap=5), blank(2 * K + V, lead=2))
    before = S.whole.copy(), updates.whole.copy()
    step(1, target, other, S, updates)
    if not in_place:
        assert np.array_equal(bits(S.whole), bits(before[0]))
        assert np.array_equal(bits(updates.whole), bits(before[1]))
    assert target.guards_unchanged()
    assert other.guards_unchanged()
    assert np.array_equal(bits(target.array), bits(want_s[0]))  # the second token's is left
    step(2, target, None, target, other)
    assert np.array_equal(bits(target.array), bits(want_s[2]))


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("K", [1, 17, 64, 129])
def test_step_by_columns(isa, K, V):
    """Any block of columns gives the bits that the whole gives there, and rows may stand apart."""
    o, s = Step(K, V).run(isa)
    apart = Step(K, V, ld_in=V + 5)
    for j0, j1 in {(0, V), (0, max(1, V // 2)), (V // 2, V), (0, min(16, V)), (min(16, V - 1), V), (V - 1, V)}:
        for step in (Step(K, V), apart):
            for in_place in (False, True):
                block_o, block_s = step.run(isa, 3, in_place, j0, j1)
                assert np.array_equal(bits(block_o), bits(o[j0:j1].copy()))
                assert np.array_equal(bits(block_s), bits(s[:, j0:j1].copy()))


def test_step_by_hand(isa):
    """SPEC's example: the first row halves, its prediction error is taken out, the second row stays."""
    s, o, work = Guarded(np.array([[1], [1]], np.float32)), blank(1), blank(5)
    e0, v = Guarded(np.array([1, 0], np.float32)), Guarded(np.array([0], np.float32))
    decay = Guarded(np.array([0.5, 1], np.float32))
    kernel(isa, "step")(o, s, None, work, s.pointer, None, e0, e0, v, decay, 1.0, 2, 1, 1, 1)
    assert s.array.tolist() == [[0], [1]]
    assert o.array.tolist() == [0]


def test_step_with_nothing_to_learn_keeps_the_bits(isa):
    step = Step(33, 17)
    step.beta = 0.0
    step.decay.array[:] = 1
    step.decay.before = step.decay.whole.copy()
    _, s = step.run(isa)
    assert np.array_equal(bits(s), bits(step.s.array.copy()))


def test_step_nan_in_a_column_stays_there(isa):
    clean_o, clean_s = Step(33, 40).run(isa)
    step = Step(33, 40)
    step.v.array[17] = np.nan
    step.v.before = step.v.whole.copy()
    o, s = step.run(isa)
    assert np.flatnonzero(np.isnan(o)).tolist() == [17]
    assert np.isnan(s[:, 17]).all()
    assert np.array_equal(np.delete(bits(o), 17), np.delete(bits(clean_o), 17))
    assert np.array_equal(np.delete(bits(s), 17, axis=1), np.delete(bits(clean_s), 17, axis=1))


# ---- its gradients ----

class StepBackward(Step):
    """Inputs of one step backwards: those of the step, and the gradients by o and by the state after it."""

    def __init__(self, K, V, seed=0):
        super().__init__(K, V, seed)
        rng = np.random.default_rng(seed + 1)
        self.d_o = Guarded(rng.standard_normal(V).astype(np.float32), 2)
        self.ds = rng.standard_normal((K, V)).astype(np.float32)

    def run(self, isa, gap=0):
        """{name: gradient}, with every guard and every input checked."""
        K, V = self.K, self.V
        y = {name: blank(n, lead=1) for name, n in (("q", K), ("k", K), ("g", K), ("v", V))}
        ds, work, keep = Guarded(self.ds, 1, gap), blank(K + 3 * V, lead=1), (
            self.s, self.q, self.k, self.v, self.decay, self.d_o)
        beta = kernel(isa, "step_backward")(
            *y.values(), ds, work, self.s, self.q, self.k, self.v, self.decay, self.d_o, self.beta, K, V, V + gap, V)
        assert all(x.unchanged() for x in keep)
        assert all(x.guards_unchanged() for x in (*y.values(), ds, work))
        return {name: x.array.copy() for name, x in y.items()} | {
            "beta": np.array([beta], np.float32), "s": ds.array.copy()}

    def exact(self):
        """{name: (gradient, bound of its error)}: every sum of n terms adds (n + terms) EPS of their magnitudes to what
        its terms bring along."""
        q, k, v, a, S, d_o = (x.array.astype(np.float64)
                              for x in (self.q, self.k, self.v, self.decay, self.s, self.d_o))
        K, V, beta, ds = self.K, self.V, self.beta, self.ds.astype(np.float64)
        down, along = (K + BACKWARD_TERMS) * EPS, (V + BACKWARD_TERMS) * EPS
        Sd = a[:, None] * S
        rest, rest_error = v - Sd.T @ k, down * (np.abs(v) + np.abs(Sd).T @ np.abs(k))
        G, G_error = ds + q[:, None] * d_o, 2 * EPS * (np.abs(ds) + np.abs(q[:, None] * d_o))
        e = G.T @ k
        e_error = down * (np.abs(G).T @ np.abs(k)) + G_error.T @ np.abs(k)
        d, du, d_error, du_error = beta * rest, -beta * e, beta * rest_error, beta * e_error
        Gd, Gd_error = G + k[:, None] * du, G_error + np.abs(k[:, None]) * du_error + 2 * EPS * np.abs(k[:, None] * du)
        return {
            "q": (Sd @ d_o + d @ d_o * k, along * (np.abs(Sd) @ np.abs(d_o) + np.abs(d) @ np.abs(d_o) * np.abs(k))
                  + d_error @ np.abs(d_o) * np.abs(k)),
            "k": (G @ d + Sd @ du, along * (np.abs(G) @ np.abs(d) + np.abs(Sd) @ np.abs(du))
                  + np.abs(G) @ d_error + G_error @ np.abs(d) + np.abs(Sd) @ du_error),
            "g": ((Gd * Sd).sum(1), along * np.abs(Gd * Sd).sum(1) + (Gd_error * np.abs(Sd)).sum(1)),
            "v": (beta * e, beta * e_error + 2 * EPS * np.abs(beta * e)),
            "beta": (e @ rest, along * (np.abs(e) @ np.abs(rest)) + e_error @ np.abs(rest) + np.abs(e) @ rest_error),
            "s": (a[:, None] * Gd, a[:, None] * (Gd_error + 2 * EPS * np.abs(Gd))),
        }


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("K", SIZES)
def test_step_backward(isa, K, V):
    step = StepBackward(K, V, seed=1000 * K + V)
    got, scalar, apart = step.run(isa), step.run("scalar"), step.run(isa, gap=7)
    for name, (want, bound) in step.exact().items():
        assert (np.abs(got[name] - want) <= bound).all(), name
        assert (np.abs(got[name] - scalar[name]) <= bound).all(), name
        assert np.abs(got[name] - want).max() <= 0.3 * bound.max() + 3e-7, name  # nor near those bounds as a rule
        assert np.array_equal(bits(apart[name]), bits(got[name])), name


def test_step_backward_by_hand(isa):
    """One element: S = 2, a = 1/2, k = 1, v = 3, beta = 1/2, q = 4, d_o = 1, ds = 1."""
    step = StepBackward(1, 1)
    step.beta = 0.5
    for name, value in (("s", 2), ("q", 4), ("k", 1), ("v", 3), ("decay", 0.5), ("d_o", 1)):
        getattr(step, name).array[...] = value
        getattr(step, name).before = getattr(step, name).whole.copy()
    step.ds[:] = 1
    # Sd = 1, v - u = 2, d = 1, G = 5, e = 5, du = -2.5, Gd = 2.5
    assert {name: x.tolist() for name, x in step.run(isa).items()} == {
        "q": [2], "k": [2.5], "g": [2.5], "v": [2.5], "beta": [10], "s": [[1.25]]}


@pytest.mark.parametrize("eps", [1e-6, -1.0])
@pytest.mark.parametrize("n", SIZES)
def test_prepare_backward(isa, n, eps):
    rng = np.random.default_rng(n)
    q, k, dq, dk = rng.standard_normal((4, n)).astype(np.float32)
    x, y = (Guarded(q, 1), Guarded(k, 2)), (Guarded(dq, 3), Guarded(dk, 4))
    kernel(isa, "prepare_backward")(*y, *x, 0.3, eps, n)
    assert all(a.unchanged() for a in x)
    assert all(a.guards_unchanged() for a in y)
    for got, given, raw, factor in [(y[0], dq, q, float(np.float32(0.3))), (y[1], dk, k, 1.0)]:
        given, raw = given.astype(np.float64), raw.astype(np.float64)
        if eps < 0:
            assert (np.abs(got.array - factor * given) <= 2 * EPS * np.abs(factor * given)).all()
            continue
        square = raw @ raw + float(np.float32(eps))
        want = factor / np.sqrt(square) * (given - raw * (raw @ given) / square)
        terms = factor / np.sqrt(square) * (np.abs(given) + np.abs(raw) * (np.abs(raw) @ np.abs(given)) / square)
        assert (np.abs(got.array - want) <= (2 * n + 2 * BACKWARD_TERMS) * EPS * terms).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ["gate_softplus_backward", "gate_bounded_backward"])
@pytest.mark.parametrize("n", SIZES)
def test_gate_backward(isa, n, name, with_bias):
    rng = np.random.default_rng(n)
    x, bias = (10 * rng.standard_normal((2, n))).astype(np.float32)
    x[::5], dy, ea, bound = -40, rng.standard_normal(n).astype(np.float32), float(np.float32(1.7)), -5.0
    xs, b, y = Guarded(x, 1), Guarded(bias, 2), Guarded(dy, 3)
    got_A = kernel(isa, name)(y, xs, b if with_bias else None, ea, bound, n)
    assert xs.unchanged()
    assert b.unchanged()
    assert y.guards_unchanged()
    z = (x + bias if with_bias else x).astype(np.float64)
    if name == "gate_softplus_backward":
        slope, by_A = -ea * reference.sigmoid(z), -ea * reference.softplus(z)
    else:
        p = (np.float32(ea) * z.astype(np.float32)).astype(np.float64)  # bounds are for ea * z as rounded
        slope = bound * ea * reference.sigmoid(p) * reference.sigmoid(-p)
        by_A = slope * z
    want, terms = dy * slope, dy * by_A
    assert (np.abs(y.array - want) <= GATE_BACKWARD_ERROR * np.abs(want) + 2.0**-140).all()
    assert abs(got_A - terms.sum()) <= (GATE_BACKWARD_ERROR + (n + BACKWARD_TERMS) * EPS) * np.abs(terms).sum()


# ---- the delta rule in blocks ----

BLOCK = int(re.findall(r"#define KDA_BLOCK (\d+)", HEADER)[0])
BLOCK_WORK = re.findall(r"#define KDA_BLOCK_WORK\(K\)((?:.*\\\n)*.*)", HEADER)[0].replace("\\\n", "").replace("/", "//")
BLOCK_ERRORS = {"block": 1e-6, "block_bf16": 2.0 ** -int(re.findall(r"within 2\^-(\d+) of the largest", HEADER)[0])}


def block_work(K):
    """The floats that the header's macro asks for."""
    return eval(BLOCK_WORK, {"K": K, "KDA_BLOCK": BLOCK})


class Block:
    """Inputs of up to BLOCK tokens of one head."""

    def __init__(self, tokens, K, V, seed=0):
        rng = np.random.default_rng(seed)
        unit = rng.standard_normal((2, tokens, K))
        q, k = unit / np.linalg.norm(unit, axis=2, keepdims=True)
        decay = rng.uniform(0, 1, (tokens, K)) ** 0.25
        decay[:, 5::11] = 0
        self.tokens, self.K, self.V = tokens, K, V
        self.q, self.k, self.decay, self.v, self.s, self.beta = (
            x.astype(np.float32) for x in (q, k, decay, rng.standard_normal((tokens, V)), rng.standard_normal((K, V)),
                                           rng.uniform(0, 2, tokens)))

    def run(self, isa, tokens=None, j0=0, j1=None, gap=0, name="block"):
        tokens, j1 = tokens or self.tokens, self.V if j1 is None else j1
        n, K = j1 - j0, self.K
        flat = [Guarded(x[:tokens].ravel(), i) for i, x in enumerate((self.q, self.k, self.decay, self.beta))]
        v, s = Guarded(self.v[:tokens, j0:j1].copy(), 1, gap), Guarded(self.s[:, j0:j1].copy(), 3, gap)
        o, work = blank(tokens, n, gap=gap), blank(block_work(K))
        q, k, decay, beta = flat
        kernel(isa, name)(o, s, work, q, k, v, decay, beta, tokens, K, n, n + gap, n + gap, n + gap)
        assert all(x.unchanged() for x in [*flat, v])
        assert all(x.guards_unchanged() for x in (o, s, work))
        return o.array.copy(), s.array.copy()

    def exact(self):
        S, o = self.s.astype(np.float64), []
        for q, k, v, decay, beta in zip(self.q, self.k, self.v, self.decay, self.beta, strict=True):
            S = decay.astype(np.float64)[:, None] * S
            S = S + k.astype(np.float64)[:, None] * (beta * (v - S.T @ k.astype(np.float64)))
            o.append(S.T @ q.astype(np.float64))
        return np.array(o), S


def test_the_header_and_the_core_agree():
    assert BLOCK == _core.BLOCK
    assert block_work(1) > 3 * BLOCK * BLOCK
    assert block_work(100) - block_work(98) >= 2 * 3 * BLOCK


@pytest.mark.parametrize("name", BLOCK_ERRORS)
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("K", SIZES)
def test_block(isa, K, V, name):
    for tokens in {1 + (7 * K + V) % BLOCK, BLOCK}:
        block = Block(tokens, K, V, seed=1000 * K + V)
        o, s = block.run(isa, name=name)
        want_o, want_s = block.exact()
        scalar_o, scalar_s = block.run("scalar", name=name)
        largest = max(np.abs(x).max() for x in (block.s, block.v, want_o, want_s))  # of what goes in and out
        for got, want, scalar in [(o, want_o, scalar_o), (s, want_s, scalar_s)]:
            assert np.abs(got - want).max() <= BLOCK_ERRORS[name] * largest
            # on the edge of two bfloat16 the ISAs may part
            assert np.abs(got - scalar).max() <= min(BLOCK_ERRORS[name], 2.0**-10) * largest
        again_o, again_s = block.run(isa, gap=5, name=name)
        assert np.array_equal(bits(again_o), bits(o))
        assert np.array_equal(bits(again_s), bits(s))


@pytest.mark.parametrize("name", BLOCK_ERRORS)
@pytest.mark.parametrize("tokens", range(1, 17))
@pytest.mark.parametrize(("K", "V"), [(1, 1), (17, 33), (64, 100), (129, 60)])
def test_block_is_causal_and_by_columns(isa, K, V, tokens, name):
    """A token's output does not see how many follow, and a block of columns is on its own: to the bit."""
    block = Block(BLOCK, K, V)
    o, _ = block.run(isa, name=name)
    head_o, head_s = block.run(isa, tokens, name=name)
    assert np.array_equal(bits(head_o), bits(o[:tokens].copy()))
    j = (7 * tokens) % V
    for j0, j1 in [(0, j), (j, V)]:
        if j1 > j0:
            part_o, part_s = block.run(isa, tokens, j0, j1, name=name)
            assert np.array_equal(bits(part_o), bits(head_o[:, j0:j1].copy()))
            assert np.array_equal(bits(part_s), bits(head_s[:, j0:j1].copy()))


def test_block_bf16_rounds_what_it_says(isa):
    """One token, K = 1: S = 1 + 2^-8 rounds to 1 where it meets q and k, and keeps its bits where it decays."""
    block = Block(1, 1, 1)
    block.q[:], block.k[:], block.v[:], block.decay[:], block.beta[:] = 1, 1, 1, 1, 0.5
    block.s[:] = 1 + 2.0**-8
    o, s = block.run(isa, name="block_bf16")
    assert o.item() == 1  # u = w = 1, so the delta is 0
    assert s.item() == 1 + 2.0**-8
    o, s = block.run(isa)
    assert o.item() == s.item() == 1 + 2.0**-9


# ---- IDOT ----

IDOT = {"idot_q8": 8, "idot_q4": 4}


def layout(isa):
    """(lanes, q8_bias, tokens of a full block, codes of each that lie together there) of an ISA."""
    return _core.matrix_layout(list(kda.isas()).index(isa))


class Idot:
    """One tile of `rows` rows and a block of tokens, in canonical order: codes [rows, K], x [tokens, K], scales."""

    def __init__(self, bits, tokens, rows, groups, group, seed=0):
        rng = np.random.default_rng(seed)
        self.bits, self.tokens, self.rows, self.groups, self.group = bits, tokens, rows, groups, group
        half = 128 if bits == 8 else 8
        self.codes = rng.integers(-half, half, (rows, groups * group))
        self.x = rng.integers(-127, 128, (tokens, groups * group))
        self.scales = rng.uniform(-1, 1, (rows, groups)).astype(np.float16)
        self.x_scales = rng.uniform(0, 1, (tokens, groups)).astype(np.float32)

    def want(self):
        """The header's formula, every float32 operation rounded once: the bits that every ISA must give."""
        exact = np.einsum("rgi,tgi->gtr", *(a.astype(np.int64).reshape(len(a), self.groups, self.group)
                                            for a in (self.codes, self.x)))
        assert np.abs(exact).max() < 2**24
        y = np.zeros((self.tokens, self.rows), np.float32)
        for g, sums in enumerate(exact):
            y += sums.astype(np.float32) * self.scales[:, g].astype(np.float32) * self.x_scales[:, g, None]
        return y

    def arguments(self, isa, wrap):
        """The inputs packed as the header describes, each through `wrap`; what lanes past `rows` hold is arbitrary."""
        lanes, bias, full, run = layout(isa)
        run = run if self.tokens == full else 4
        codes = np.resize(self.codes, (lanes, self.codes.shape[1]))
        scales = np.resize(self.scales, (lanes, self.groups))
        codes[:self.rows], scales[:self.rows] = self.codes, self.scales
        if self.bits == 8:
            packed = (codes + bias).reshape(lanes, -1, 4)
        else:
            halves = (codes + 8).reshape(lanes, -1, 2, 4)
            packed = halves[:, :, 0] | halves[:, :, 1] << 4
        groups = self.x.reshape(self.tokens, self.groups, self.group)
        runs = [groups[:, g, i:i + run].ravel() for g in range(self.groups) for i in range(0, self.group, run)]
        sums = self.x.reshape(self.tokens, self.groups, -1).sum(2).T
        return [wrap(packed.transpose(1, 0, 2).astype(np.uint8).ravel()), wrap(scales.T.ravel().view(np.uint16)),
                wrap(np.concatenate(runs).astype(np.int8)), wrap(self.x_scales.T.ravel()),
                wrap(sums.astype(np.int32).ravel())]

    def sizes(self, ld):
        return self.tokens, self.rows, self.groups, self.group, ld

    def run(self, isa, gap=0):
        inputs = self.arguments(isa, Guarded)
        y = blank(self.tokens, self.rows, gap=gap, lead=1)
        kernel(isa, f"idot_q{self.bits}")(y, *inputs, *self.sizes(self.rows + gap))
        assert all(a.unchanged() for a in inputs)
        assert y.guards_unchanged()
        return y.array


@pytest.mark.parametrize("name", IDOT)
def test_idot(isa, name):
    """Every count of rows and tokens, over sizes of groups: bit for bit."""
    lanes, _, full, _ = layout(isa)
    for rows in range(1, lanes + 1):
        for tokens in {1, 2, 4, full} if full > 1 else {1}:
            for groups, group in [(1, 8), (3, 8), (2, 32), (1, 40), (3, 64), (2, 128), (1, 512)]:
                idot = Idot(IDOT[name], tokens, rows, groups, group, seed=rows)
                assert np.array_equal(bits(idot.run(isa, gap=rows % 3)), bits(idot.want()))


@pytest.mark.parametrize("name", IDOT)
def test_idot_all_pairs_of_codes(isa, name):
    """Every weight times every activation, alone in a group and eightfold.

    A row holds one weight everywhere and a group one activation, each under its own scale.
    """
    lanes, _, full, _ = layout(isa)
    half = 128 if name == "idot_q8" else 8
    for first in range(-half, half, lanes):
        weights = np.arange(first, min(first + lanes, half))
        for alone in (False, True):
            idot = Idot(IDOT[name], full, len(weights), 255, 8)
            idot.codes[:] = weights[:, None]
            for t in range(full):
                activations = np.roll(np.arange(-127, 128), 23 * t)
                idot.x[t] = activations.repeat(8)
                if alone:
                    idot.x[t][np.arange(8 * 255) % 8 != (np.arange(8 * 255) // 8 + t) % 8] = 0
            assert np.array_equal(bits(idot.run(isa)), bits(idot.want()))


@pytest.mark.parametrize("name", IDOT)
@pytest.mark.parametrize("a", [127, -127])
def test_idot_largest_sums(isa, name, a):
    """Nothing saturates or wraps where every product is as large as they come."""
    lanes, _, full, _ = layout(isa)
    half = 128 if name == "idot_q8" else 8
    for w in (-half, half - 1):
        idot = Idot(IDOT[name], full, lanes, 2, 512)
        idot.codes[:], idot.x[:], idot.scales[:], idot.x_scales[:] = w, a, 1, 1
        assert (idot.run(isa) == 1024 * w * a).all()


@pytest.mark.parametrize("name", IDOT)
def test_idot_scales_at_their_limits(isa, name):
    """Scales whose product float32 cannot hold, too large for it or too small: only the result may overflow."""
    lanes, _, full, _ = layout(isa)
    idot = Idot(IDOT[name], full, lanes, 1, 8)
    idot.codes[:], idot.x[:] = 0, 0
    idot.x[:, 0] = 127
    idot.codes[0, 0] = 7
    idot.scales[:], idot.x_scales[:] = 65504, np.float32(2.0**121)
    y = idot.run(isa)
    assert (y[:, 0] == np.inf).all()
    assert (y[:, 1:] == 0).all()
    idot.scales[:], idot.x_scales[:] = 2.0**-24, np.float32(2.0**-127)
    assert (idot.run(isa)[:, 0] == 222 * 2.0**-149).all()  # 7 * 127 * 2^-151: 222.25 spacings of the subnormals


@pytest.mark.parametrize("name", IDOT)
def test_idot_keeps_what_is_not_finite(isa, name):
    lanes, _, full, _ = layout(isa)
    for bad, where in [(np.nan, "scales"), (np.inf, "scales"), (np.nan, "x_scales")]:
        idot = Idot(IDOT[name], full, lanes, 3, 32)
        clean = idot.run(isa).copy()
        getattr(idot, where)[-1, 1] = bad
        y = idot.run(isa)
        hit = np.zeros(y.shape, bool)
        hit[(slice(None), -1) if where == "scales" else -1] = True
        assert not np.isfinite(y[hit]).any()
        assert np.array_equal(bits(y)[~hit], bits(clean)[~hit])


# Inputs of a group with a point to them, each of 16 values.
GROUPS = {
    "zeros": [0.0, -0.0] * 8,
    "ties": [127, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 0.50000006, 0.49999997, 2.4999998, 63.5, 64.5, -126.5, -125.5,
             1],
    "largest": [3.4028235e38, -3.4028235e38, 1e38, 1e-38] * 4,
    "subnormal": [2.0**-149, -3 * 2.0**-149, 2.0**-130, 2.0**-127] * 4,
    "least": [2.0**-149, 0, 0, -(2.0**-149)] * 4,
    "where the scale is a subnormal": [127 * 2.0**-127, -63.5 * 2.0**-127, 2.0**-127, 2.0**-128] * 4,
    "one large": [1e30] + [1.0] * 15,
    "nan": [1.0] * 15 + [np.nan],
    "nan first": [np.nan] + [1.0] * 15,
    "inf": [1.0] * 7 + [np.inf] + [2.0] * 8,
    "-inf and nan": [-np.inf] + [0.0] * 14 + [np.nan],
}


def quantized(x):
    """(codes, scale) of one group as the header defines them, in float32."""
    if not np.isfinite(x).all():
        return np.zeros(x.shape, np.int8), np.float32(np.nan)
    most = np.abs(x).max()
    if most == 0:
        return np.zeros(x.shape, np.int8), most
    with np.errstate(over="ignore"):
        inverse, scale = np.float32(127) / most, most / np.float32(127)
    if inverse > 2.0**127:
        inverse, scale = np.float32(2.0**127), np.float32(2.0**-127)
    return np.clip(np.rint(x * inverse), -127, 127).astype(np.int8), scale


def check_quantize(isa, x, lead=0):
    x = Guarded(np.asarray(x, np.float32), lead)
    codes, scale = blank(x.array.size, dtype=np.int8, lead=lead), blank(1)
    total = kernel(isa, "quantize")(codes, scale, x, x.array.size)
    want_codes, want_scale = quantized(x.array)
    assert np.array_equal(codes.array, want_codes)
    assert equal_but_nan(scale.array, np.atleast_1d(want_scale))
    assert total == want_codes.sum(dtype=np.int64)
    assert x.unchanged()
    assert codes.guards_unchanged()
    assert scale.guards_unchanged()
    return codes.array, scale.array.item()


@pytest.mark.parametrize("n", [4, 8, 12, 16, 20, 32, 36, 60, 64, 100, 128, 512])
def test_quantize_sizes(isa, n):
    rng = np.random.default_rng(n)
    for lead in range(4):
        x = rng.standard_normal(n).astype(np.float32)
        codes, scale = check_quantize(isa, x, lead)
        assert np.abs(codes).max() == 127
        assert np.abs(codes * scale - x).max() <= scale / 2 * (1 + 2.0**-15)
        assert check_quantize(isa, np.full(n, -3.0))[0].tolist() == [-127] * n


@pytest.mark.parametrize("name", GROUPS)
def test_quantize_known_groups(isa, name):
    x = np.array(GROUPS[name], np.float32)
    for repeats in (1, 3):
        for x_here in (np.tile(x, repeats), np.tile(x, repeats)[::-1]):
            check_quantize(isa, x_here)


def test_quantize_by_hand(isa):
    codes, scale = check_quantize(isa, GROUPS["ties"])
    assert scale == 1
    assert codes.tolist() == [127, 0, 2, 2, 4, 0, -2, -2, 1, 0, 2, 64, 64, -126, -126, 1]
    codes, scale = check_quantize(isa, GROUPS["subnormal"])
    assert scale == 2.0**-127
    assert codes[:4].tolist() == [0, 0, 0, 1]  # 2^-22, -3 * 2^-22, 1/8, 1 scales


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 127, 128, 512])
def test_amax(isa, n):
    rng = np.random.default_rng(n)
    for lead in range(4):
        x = Guarded(rng.standard_normal(n).astype(np.float32), lead)
        assert kernel(isa, "amax")(x, n) == np.abs(x.array).max()
        for i in {0, n // 2, n - 1}:
            for value in (1e38, -1e38, -(2.0**-149), np.nan, np.inf, -np.inf):
                x.array[i] = value
                got = kernel(isa, "amax")(x, n)
                want = np.abs(x.array).max() if np.isfinite(x.array).all() else np.nan
                assert got == want or (np.isnan(got) and np.isnan(want))
            x.array[i] = 0
    for x in (np.zeros(n), np.full(n, -0.0), np.full(n, -(2.0**-149))):
        assert kernel(isa, "amax")(Guarded(x.astype(np.float32)), n) == np.abs(x).max()


def encoded(isa, w, scale, limit, lead=0):
    w = Guarded(w, lead)
    codes = blank(w.array.size, dtype=np.int8, lead=lead)
    kernel(isa, "encode")(codes, w, float(scale), limit, w.array.size)
    assert w.unchanged()
    assert codes.guards_unchanged()
    return codes.array.astype(np.int64)


@pytest.mark.parametrize("limit", [127, 7])
def test_encode_near_ties(isa, limit):
    """Around every tie under scales of every exponent: the nearest code in exact arithmetic, the even one on it."""
    k = np.arange(-limit, limit) + 0.5
    finite = np.arange(1, 0x7c00, dtype=np.uint16)
    scales = np.concatenate([finite[:40], finite[5::397], finite[-3:]]).view(np.float16).astype(np.float32)
    for scale in scales:
        ties = (k * float(scale)).astype(np.float32)
        assert (ties == k * float(scale)).all()  # float32 holds them exactly
        w, up, down = [ties], ties, ties
        for _ in range(2):
            up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(-np.inf))
            w += [up, down]
        w = np.concatenate(w)
        codes = encoded(isa, w, scale, limit, lead=1)
        assert np.array_equal(codes, np.rint(w.astype(np.float64) / float(scale)))
        error = np.abs(w.astype(np.float64) - codes * float(scale))  # exact: 24 bits less at most 19
        assert error.max() == float(scale) / 2


@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 128])
def test_encode_sizes(isa, n):
    rng = np.random.default_rng(n)
    for lead in range(4):
        w = rng.uniform(-1, 1, n).astype(np.float32)
        scale = np.float32(np.float16(1 / 127))
        assert np.array_equal(encoded(isa, w, scale, 127, lead), np.rint(w.astype(np.float64) / float(scale)))
        assert encoded(isa, np.full(n, 9e9, np.float32), scale, 127, lead).tolist() == [127] * n
        assert encoded(isa, np.full(n, -9e9, np.float32), scale, 7, lead).tolist() == [-7] * n
        assert not encoded(isa, np.zeros(n, np.float32), 0.0, 127, lead).any()
        assert not encoded(isa, np.full(n, 2.0**-149, np.float32), 2.0**-24, 127, lead).any()


# ---- ceilings ----

@pytest.mark.parametrize("n", SIZES)
def test_probe_update(isa, n):
    s = Guarded(np.linspace(-1, 1, n, dtype=np.float32), 1)
    want = s.array.astype(np.float64) * np.float32(0.75) + np.float32(0.125)
    kernel(isa, "probe_update")(s, 0.75, 0.125, n)
    assert np.abs(s.array - want).max() <= 2 * EPS
    assert s.guards_unchanged()


@pytest.mark.parametrize("name", ["probe_fma", "probe_idot"])
def test_probes_count_what_they_do(isa, name):
    y = blank(1)
    call = kernel(isa, name)
    once = call(y, 1)
    assert once >= 8
    assert call(y, 1000) == 1000 * once
    assert y.guards_unchanged()
    assert np.isfinite(y.array).all()


@pytest.mark.parametrize("n", SIZES)
def test_probe_read(isa, n):
    for lead in range(4):
        s = Guarded(np.random.default_rng(n).uniform(0, 1, n).astype(np.float32), lead)
        got = kernel(isa, "probe_read")(s, n)
        assert abs(got - s.array.sum(dtype=np.float64)) <= n * EPS * s.array.sum()  # a float missed or doubled shows
        assert s.unchanged()


# ---- the ends of memory ----

def before_a_forbidden_page(values):
    """A copy whose last byte is the last of a page; the next page may not be touched. (pointer, mapping)."""
    page = mmap.PAGESIZE
    size = -(-values.nbytes // page) * page
    mapping = mmap.mmap(-1, size + page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(base + size, page, 0) == 0  # PROT_NONE
    ctypes.memmove(base + size - values.nbytes, values.ctypes.data, values.nbytes)
    return base + size - values.nbytes, mapping


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
@pytest.mark.parametrize("n", SIZES)
def test_nothing_is_touched_past_the_end(isa, n):
    """An access past the end of an array here ends the process."""
    rng = np.random.default_rng(n)
    x32 = rng.standard_normal(n).astype(np.float32)
    x16 = x32.astype(np.float16)
    (f, *_), (h, *_) = kept = [before_a_forbidden_page(x32), before_a_forbidden_page(x16)]
    y32, y16 = (before_a_forbidden_page(x) for x in (x32, x16))
    kept += [y32, y16]
    for name in ("widen_f16", "widen_bf16"):
        kernel(isa, name)(y32[0], h, n)
    for name in ("narrow_f16", "narrow_bf16"):
        kernel(isa, name)(y16[0], f, n)
    for name in EXACT:
        kernel(isa, name)(y32[0], f, n)
    kernel(isa, "l2norm")(y32[0], f, 1e-6, n)
    more = [before_a_forbidden_page(x32) for _ in range(2)]
    kernel(isa, "prepare")(y32[0], more[0][0], more[1][0], f, f, f, 1.0, 1e-6, n)
    kernel(isa, "prepare_backward")(y32[0], more[0][0], f, f, 1.0, 1e-6, n)
    kernel(isa, "norm_gated")(y32[0], f, f, f, 1e-5, n, 2)
    for width in (1, 3, 4):
        taps, state = (before_a_forbidden_page(np.resize(x32, max(1, size))) for size in (width * n, (width - 1) * n))
        rows, y = (c_void_p * width)(*[f] * width), (c_void_p * 1)(y32[0])
        kernel(isa, "conv")(y, rows, taps[0], f, 1, n, n, width, 2)
        kernel(isa, "conv_step")(y32[0], state[0], f, taps[0], f, n, width, 2)
    for name in ("gate_softplus", "gate_bounded"):
        kernel(isa, name)(y32[0], f, f, 1.0, -5.0, n)
        kernel(isa, f"{name}_backward")(y32[0], f, f, 1.0, -5.0, n)
    kernel(isa, "probe_update")(y32[0], 0.5, 0.5, n)

    for K, V in [(n, 17), (17, n), (n, n)]:
        step = Step(K, V, seed=n)
        o, s = step.run(isa)
        ends = {name: before_a_forbidden_page(np.ascontiguousarray(getattr(step, name).array))
                for name in ("s", "q", "k", "v", "decay")}
        ends |= {"o": before_a_forbidden_page(o), "work": before_a_forbidden_page(np.zeros(2 * K + V, np.float32))}
        at = {name: pointer for name, (pointer, _) in ends.items()}
        kernel(isa, "step")(at["o"], at["s"], None, at["work"], at["s"], None, at["q"], at["k"], at["v"],
                            at["decay"], step.beta, K, V, V, V)
        assert ctypes.string_at(at["o"], o.nbytes) == o.tobytes()
        assert ctypes.string_at(at["s"], s.nbytes) == s.tobytes()
        updates, keep = before_a_forbidden_page(np.zeros(2 * K + V, np.float32))
        for pending, left in [(None, updates), (updates, updates), (updates, None)]:
            kernel(isa, "step")(at["o"], at["s"], left, at["work"], at["s"], pending, at["q"], at["k"], at["v"],
                                at["decay"], step.beta, K, V, V, V)
        kernel(isa, "settle")(at["s"], at["s"], updates, K, V, V, V)
        del keep

        back = StepBackward(K, V, seed=n)
        want = back.run(isa)
        ends = {name: before_a_forbidden_page(np.ascontiguousarray(getattr(back, name).array))
                for name in ("s", "q", "k", "v", "decay", "d_o")}
        ends |= {f"by_{name}": before_a_forbidden_page(want[name] * 0) for name in "qkgv"}
        ends |= {"ds": before_a_forbidden_page(back.ds),
                 "work": before_a_forbidden_page(np.zeros(K + 3 * V, np.float32))}
        at = {name: pointer for name, (pointer, _) in ends.items()}
        kernel(isa, "step_backward")(
            at["by_q"], at["by_k"], at["by_g"], at["by_v"], at["ds"], at["work"], at["s"], at["q"], at["k"], at["v"],
            at["decay"], at["d_o"], back.beta, K, V, V, V)
        assert ctypes.string_at(at["ds"], want["s"].nbytes) == want["s"].tobytes()
        assert ctypes.string_at(at["by_v"], want["v"].nbytes) == want["v"].tobytes()

        for which in BLOCK_ERRORS:
            block = Block(BLOCK - 1, K, V)
            ends = {name: before_a_forbidden_page(np.ascontiguousarray(getattr(block, name)))
                    for name in ("s", "q", "k", "v", "decay", "beta")}
            ends |= {"o": before_a_forbidden_page(block.v),
                     "work": before_a_forbidden_page(np.zeros(block_work(K), np.float32))}
            at = {name: pointer for name, (pointer, _) in ends.items()}
            kernel(isa, which)(at["o"], at["s"], at["work"], at["q"], at["k"], at["v"], at["decay"], at["beta"],
                               BLOCK - 1, K, V, V, V, V)
            assert ctypes.string_at(at["s"], block.s.nbytes) == block.run(isa, name=which)[1].tobytes()


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
@pytest.mark.parametrize("n", [4, 8, 12, 20, 32, 60, 64, 100, 128])
def test_nothing_is_touched_past_the_end_by_idot(isa, n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n).astype(np.float32)
    w, codes, scale = (before_a_forbidden_page(a) for a in (x, np.zeros(n, np.int8), x[:1]))
    assert kernel(isa, "amax")(w[0], n) == np.abs(x).max()
    assert kernel(isa, "probe_read")(w[0], n) != 0
    kernel(isa, "quantize")(codes[0], scale[0], w[0], n)
    assert ctypes.string_at(codes[0], n) == quantized(x)[0].tobytes()
    kernel(isa, "encode")(codes[0], w[0], 0.125, 127, n)
    assert ctypes.string_at(codes[0], n) == np.clip(np.rint(x * 8), -127, 127).astype(np.int8).tobytes()

    lanes, _, full, _ = layout(isa)
    for size in IDOT.values():
        for tokens in {1, full}:
            for rows in {1, lanes // 2 + 1, lanes}:
                idot = Idot(size, tokens, rows, n // 4, 8, seed=n)
                ends = idot.arguments(isa, before_a_forbidden_page)
                y = before_a_forbidden_page(np.zeros((tokens, rows), np.float32))
                kernel(isa, f"idot_q{size}")(y[0], *(pointer for pointer, _ in ends), *idot.sizes(rows))
                assert ctypes.string_at(y[0], 4 * tokens * rows) == idot.want().tobytes()


# ---- dense weights ----

DENSE_TERMS = int(re.findall(r"within \((\d+) \+ K / 256\) \* 2\^-24", HEADER, re.I)[0])


def panels_of(w, lanes):
    """[N, K] as [panels][K][lanes], zeros past the last row."""
    N, K = w.shape
    padded = np.zeros((-(-N // lanes) * lanes, K), np.float32)
    padded[:N] = w
    return np.ascontiguousarray(padded.reshape(-1, lanes, K).transpose(0, 2, 1)).ravel()


@pytest.mark.parametrize("K", [1, 3, 255, 256, 257, 700])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 9, 17])
def test_dense(isa, tokens, K):
    """Against float64; guard zones; the bits of a token alone, and of a row alone, are those of the whole."""
    lanes = _core.dense_lanes(list(kda.isas()).index(isa))
    rng = np.random.default_rng(K)
    call = kernel(isa, "dense")
    for rows in (1, lanes, lanes + 1, 4 * lanes, 4 * lanes + 3, 5 * lanes - 1):
        w = rng.standard_normal((rows, K)).astype(np.float32)
        x = Guarded(rng.standard_normal((tokens, K)).astype(np.float32), lead=1, gap=3)
        y = Guarded(np.zeros((tokens, rows), np.float32), lead=1, gap=2)
        packed = Guarded(panels_of(w, lanes), lead=1)
        call(y, packed, x, tokens, rows, K, x.size_of_row, y.size_of_row)
        assert x.unchanged()
        assert packed.unchanged()
        assert y.guards_unchanged()
        exact = x.array.astype(np.float64) @ w.T.astype(np.float64)
        bound = (DENSE_TERMS + K / 256) * EPS * (np.abs(x.array).astype(np.float64) @ np.abs(w.T).astype(np.float64))
        assert (np.abs(y.array - exact) <= bound).all()
        last = Guarded(np.zeros(rows, np.float32))
        call(last, packed, x.pointer + 4 * (tokens - 1) * x.size_of_row, 1, rows, K, K, rows)
        assert np.array_equal(last.array, y.array[-1])
        few = min(rows, lanes)
        part = Guarded(np.zeros((tokens, few), np.float32))
        call(part, packed, x, tokens, few, K, x.size_of_row, few)
        assert np.array_equal(part.array, y.array[:, :few])
