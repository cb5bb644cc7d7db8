"""Arrays of every form give the right numbers, or an error with a sentence of its own and nothing written."""
import re

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16, ISAS, make_inputs, same_bits, search, widened
from hypothesis import given
from hypothesis import strategies as st

import kda
from kda import reference

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


# ---- forms of an array ----

def reversed_axes(x):
    ends = (slice(None, None, -1),) if x.ndim == 1 else (slice(None, None, -1), ..., slice(None, None, -1))
    return x[ends].copy()[ends]


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)
    y = raw[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    assert not (y.size and y.flags.aligned)
    return y


def read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


def spaced(x):
    """Every second element of every axis of a larger array full of NaN."""
    y = np.full([2 * n + 1 for n in x.shape], np.nan, x.dtype)[tuple(slice(1, None, 2) for _ in x.shape)]
    y[...] = x
    return y


class Wrapped:
    """An object of another library: an array through __array__."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x if dtype is None else self.x.astype(dtype)


FORMS = {
    "reversed": reversed_axes,
    "Fortran order": np.asfortranarray,
    "axes swapped": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "last axes swapped": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "big-endian, reversed": lambda x: reversed_axes(x).astype(x.dtype.newbyteorder(">"), order="K"),
    "read-only": read_only,
    "misaligned": misaligned,
    "every second element": spaced,
    "subclass": lambda x: x.view(type("Mine", (np.ndarray,), {})),
    "__array__": Wrapped,
    "nested lists of float32": lambda x: [list(row) for row in x],
}


@pytest.mark.parametrize(("form", "dtype"), [
    (form, dtype) for form in FORMS for dtype in (np.dtype(np.float32), np.dtype(np.float16), BF16)
    if not (dtype == BF16 and "endian" in form)])  # bfloat16 exists in native byte order only
def test_forms(isa, form, dtype):
    x = make_inputs(1, 2, 3, 2, 4, 12, 5, N=2, dtype=dtype)
    want_o, want_state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    for names in [(n,) for n in NAMES] + [NAMES]:
        y = x | {n: FORMS[form](x[n]) for n in names}
        o, state = kda.fused_recurrent_kda(**y, output_final_state=True, isa=isa)
        assert o.dtype == dtype
        assert same_bits(np.asarray(o), want_o)
        assert same_bits(np.asarray(state), want_state)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_gate_and_norm(isa, form):
    g = make_inputs(2, 2, 3, 2, 4, 12, 5)["g"]
    A_log, dt_bias = np.linspace(-1, 1, 4, dtype=np.float32), np.linspace(-1, 1, 48, dtype=np.float32)
    want = kda.fused_kda_gate(g, A_log, dt_bias, isa=isa)
    assert same_bits(kda.fused_kda_gate(FORMS[form](g), A_log, dt_bias, isa=isa), want)
    assert same_bits(np.asarray(kda.l2norm(FORMS[form](g), isa=isa)), kda.l2norm(g, isa=isa))
    if "axes" not in form and "lists" not in form and "reversed" not in form:
        assert same_bits(kda.fused_kda_gate(g, FORMS[form](A_log), FORMS[form](dt_bias), isa=isa), want)
    assert same_bits(kda.fused_kda_gate(g, A_log[::-1].copy()[::-1], dt_bias.astype(">f4"), isa=isa), want)


def test_slices_of_one_fused_projection(isa):
    """q, k, v, g and beta as columns of one [B, T, everything] array, as a fused projection leaves them."""
    B, T, H, K, V = 2, 5, 3, 8, 6
    widths = {"q": H * K, "k": H * K, "v": H * V, "g": H * K, "beta": H}
    x = make_inputs(3, B, T, H, H, K, V, N=B)
    fused = np.concatenate([x[n].reshape(B, T, -1) for n in widths], axis=2)
    parts = dict(zip(widths, np.split(fused, np.cumsum(list(widths.values()))[:-1], axis=2), strict=True))
    y = {n: part.reshape(B, T, H, -1) if n != "beta" else part for n, part in parts.items()}
    assert all(np.shares_memory(y[n], fused) for n in y)
    want_o, want_state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    o, state = kda.fused_recurrent_kda(**y, initial_state=x["initial_state"], output_final_state=True, isa=isa)
    assert same_bits(o, want_o)
    assert same_bits(state, want_state)


def test_memory_mapped(isa, tmp_path):
    x = make_inputs(4, 2, 3, 1, 2, 8, 6, N=2)
    y = {}
    for n, a in x.items():
        np.save(tmp_path / f"{n}.npy", a)
        y[n] = np.load(tmp_path / f"{n}.npy", mmap_mode="r")
        assert isinstance(y[n], np.memmap)
    want_o, want_state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    o, state = kda.fused_recurrent_kda(**y, output_final_state=True, isa=isa)
    assert same_bits(np.asarray(o), want_o)
    assert same_bits(np.asarray(state), want_state)
    # a mapped state can be updated in its file
    mapped = np.load(tmp_path / "initial_state.npy", mmap_mode="r+")
    kda.fused_recurrent_kda(**y | {"initial_state": mapped}, state_out=mapped, isa=isa)
    mapped.flush()
    assert same_bits(np.load(tmp_path / "initial_state.npy"), want_state)


def test_broadcast(isa):
    """Strides of 0: one token's gate and one head's key for all."""
    x = make_inputs(5, 2, 4, 2, 2, 8, 6, N=2)
    x["g"] = np.broadcast_to(x["g"][:, :1], x["g"].shape)
    x["k"] = np.broadcast_to(x["k"][:, :, :1], x["k"].shape)
    x["q"] = np.broadcast_to(x["q"][..., :1], x["q"].shape)
    x["beta"] = np.broadcast_to(np.float32(0.5), x["beta"].shape)
    x["initial_state"] = np.broadcast_to(x["initial_state"][:1], x["initial_state"].shape)
    copies = {n: a.copy() for n, a in x.items()}
    want_o, want_state = kda.fused_recurrent_kda(**copies, output_final_state=True, isa=isa)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    assert same_bits(o, want_o)
    assert same_bits(state, want_state)


def test_q_and_k_may_be_one_array(isa):
    x = make_inputs(6, 1, 4, 2, 2, 8, 8)
    want = kda.fused_recurrent_kda(**x | {"k": x["q"].copy()}, isa=isa)[0]
    assert same_bits(kda.fused_recurrent_kda(**x | {"k": x["q"]}, isa=isa)[0], want)


def test_batch_of_none(isa):
    x = make_inputs(7, 0, 4, 2, 4, 8, 6, N=0)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    assert o.shape == (0, 4, 4, 6)
    assert state.shape == (0, 4, 8, 6)


@pytest.mark.parametrize("cu", [None, [0], [0, 0], [0, 0, 0]])
def test_no_tokens(isa, cu):
    N = 1 if cu is None else len(cu) - 1
    x = make_inputs(8, 1, 0, 2, 4, 8, 6, N=N)
    o, state = kda.fused_recurrent_kda(**x, cu_seqlens=cu, output_final_state=True, isa=isa)
    assert o.shape == (1, 0, 4, 6)
    assert same_bits(state, x["initial_state"])
    del x["initial_state"]
    _, state = kda.fused_recurrent_kda(**x, cu_seqlens=cu, output_final_state=True, isa=isa)
    assert same_bits(state, np.zeros((N, 4, 8, 6), np.float32))


def test_empty_gate_and_norm(isa):
    assert kda.fused_kda_gate(np.zeros((0, 2, 3), np.float32), np.zeros(2, np.float32), isa=isa).shape == (0, 2, 3)
    assert kda.l2norm(np.zeros((0, 4), np.float16), isa=isa).shape == (0, 4)


# ---- any of it at once ----

LAYOUTS = {"as it is": lambda x: x, "reversed": reversed_axes, "Fortran order": np.asfortranarray, "spaced": spaced,
           "misaligned": misaligned, "read-only": read_only,
           "big-endian": lambda x: x if x.dtype == BF16 else x.astype(x.dtype.newbyteorder(">"))}


@st.composite
def calls(draw):
    """Arguments of fused_recurrent_kda and chunk_kda, as they may come."""
    size = st.integers(1, 40)
    B, T, H, repeat = (draw(st.integers(low, high)) for low, high in ((0, 3), (0, 20), (1, 3), (1, 3)))
    K, V, HV = draw(size), draw(size), H * repeat
    cu = None
    if B == 1 and draw(st.booleans()):
        cu = [0, *sorted(draw(st.lists(st.integers(0, T), max_size=4))), T]
    N = B if cu is None else len(cu) - 1
    x = make_inputs(draw(st.integers(0, 2**32 - 1)), B, T, H, HV, K, V, N=N)
    for n in NAMES[:5]:
        x[n] = x[n].astype(draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), BF16])))
    options = {"cu_seqlens": cu, "output_final_state": draw(st.booleans()), "state_v_first": draw(st.booleans()),
               "use_qk_l2norm_in_kernel": draw(st.booleans()), "use_beta_sigmoid_in_kernel": draw(st.booleans()),
               "scale": draw(st.sampled_from([None, 0.25, 1.0, 2.0]))}
    options["allow_neg_eigval"] = options["use_beta_sigmoid_in_kernel"] and draw(st.booleans())
    if draw(st.booleans()):
        options["use_gate_in_kernel"] = True
        options["lower_bound"] = draw(st.sampled_from([None, -5.0, -0.5]))
        if options["lower_bound"] is None or draw(st.booleans()):
            options["A_log"] = np.linspace(-1, 2, HV, dtype=np.float32).reshape(draw(
                st.sampled_from([(HV,), (1, 1, HV, 1)])))
        if draw(st.booleans()):
            options["dt_bias"] = np.linspace(-2, 1, HV * K, dtype=np.float32)
    if options["state_v_first"]:
        x["initial_state"] = np.ascontiguousarray(x["initial_state"].swapaxes(2, 3))
    for n in NAMES:
        x[n] = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x[n])
    if draw(st.booleans()):
        del x["initial_state"]
    return x | options


def close(got, want, tolerance):
    """Within `tolerance` of the largest value or of 1: a single value may have cancelled to nearly nothing."""
    return got.shape == want.shape and np.all(np.abs(got - want) <= tolerance * max(1, np.max(np.abs(want), initial=0)))


@search(200)
@given(x=calls(), function=st.sampled_from([kda.fused_recurrent_kda, kda.chunk_kda]), isa=st.sampled_from(ISAS))
def test_shapes_strides_and_dtypes(x, function, isa):
    before = {n: a.copy() for n, a in x.items() if isinstance(a, np.ndarray)}
    o, state = function(**x, isa=isa)
    want_o, want_state = reference.fused_recurrent_kda(**widened(x))
    rounding = {2: 2.0**-11 if x["v"].dtype != BF16 else 2.0**-8, 4: 0}[o.itemsize]  # of o into the dtype of v
    assert o.dtype == x["v"].dtype.newbyteorder("=")
    assert close(o, want_o, 2e-6 + 1.01 * rounding)
    if x["output_final_state"]:
        assert close(state, want_state, 2e-6)
    else:
        assert state is None
    for n, a in before.items():
        assert same_bits(np.ascontiguousarray(x[n]), np.ascontiguousarray(a))


DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]


@st.composite
def laid_out(draw, *shape, dtypes=DTYPES):
    """(an array in C order, the same in any layout)."""
    x = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).standard_normal(shape).astype(
        draw(st.sampled_from(dtypes)))
    return x, LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x)


@search(100)
@given(data=st.data(), isa=st.sampled_from(ISAS))
def test_layouts_of_the_convolution(data, isa):
    """The bits of C order, and what lies between the elements of the caller's state stays as it was."""
    B, T, D, W = (data.draw(st.integers(low, high)) for low, high in ((0, 3), (0, 20), (1, 40), (1, 8)))
    x, odd_x = data.draw(laid_out(B, T, D))
    w, odd_w = data.draw(laid_out(D, W))
    bias, odd_bias = data.draw(laid_out(D))
    past, odd_past = data.draw(laid_out(B, D, W - 1))
    want, want_state = kda.causal_conv1d(x, w, bias, None, past, True, isa=isa)
    odd_w = data.draw(st.sampled_from([odd_w, odd_w[:, None]]))
    y, state = kda.causal_conv1d(odd_x, odd_w, odd_bias, None, odd_past, True, isa=isa)
    assert same_bits(y, want)
    assert same_bits(state, want_state)

    state = LAYOUTS[data.draw(st.sampled_from(["as it is", "reversed", "Fortran order", "spaced"]))](
        past.astype(np.float32))
    memory = state
    while memory.base is not None:
        memory = memory.base
    elsewhere = np.isnan(memory)
    for t in range(T):
        y = kda.causal_conv1d_update(odd_x[:, t], state, odd_w, odd_bias, None, isa=isa)
        assert close(y.astype(np.float32), want[:, t].astype(np.float32), 1e-6 if x.dtype == np.float32 else 2.0**-7)
    assert np.array_equal(state, want_state)
    assert np.array_equal(np.isnan(memory), elsewhere)


@search(100)
@given(data=st.data(), isa=st.sampled_from(ISAS))
def test_layouts_of_the_gated_norm(data, isa):
    shape = (*data.draw(st.lists(st.integers(0, 3), max_size=5)), data.draw(st.integers(1, 40)))
    x, odd_x = data.draw(laid_out(*shape))
    gate, odd_gate = data.draw(laid_out(*shape))
    weight, odd_weight = data.draw(laid_out(shape[-1]))
    activation = data.draw(st.sampled_from(["sigmoid", "silu"]))
    want = reference.rms_norm_gated(x, gate, weight, activation=activation)
    y = kda.rms_norm_gated(odd_x, odd_gate, odd_weight, activation=activation, isa=isa)
    assert y.dtype == x.dtype
    assert same_bits(y, kda.rms_norm_gated(x, gate, weight, activation=activation, isa=isa))
    assert close(y.astype(np.float32), want, 1e-6 + {4: 0, 2: 2.0**-11 if x.dtype != BF16 else 2.0**-8}[x.itemsize])


# ---- errors ----

def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


B, T, H, HV, K, V = 2, 3, 2, 4, 8, 6
CU = {"q": ones(1, 3, 2, 8), "k": ones(1, 3, 2, 8), "v": ones(1, 3, 4, 6), "g": ones(1, 3, 4, 8),
      "beta": ones(1, 3, 4)}
GATE = {"use_gate_in_kernel": True, "A_log": ones(4)}

# dtypes that no float can be taken from without a guess; a string of variable width has no byte order to ask for
STRANGE = [np.zeros(3, [("a", np.float32)]), np.zeros(3, "V4"), np.zeros(3, "S4"), np.zeros(3, "M8[s]"),
           np.zeros(3, ml_dtypes.float8_e4m3fn), np.array(None), "abc"]
if hasattr(np.dtypes, "StringDType"):
    STRANGE.append(np.array(["a", "b"], np.dtypes.StringDType()))

BAD = [
    # shapes
    ({"q": ones(2, 3, 16)}, ValueError, r"q: expected \[B, T, H, K\], got \[2, 3, 16\]"),
    ({"k": ones(2, 3, 2, 7)}, ValueError, r"k: expected \[2, 3, 2, 8\] \(the shape of q\), got \[2, 3, 2, 7\]"),
    ({"k": ones(2, 4, 2, 8)}, ValueError, r"k: expected \[2, 3, 2, 8\] \(the shape of q\), got \[2, 4, 2, 8\]"),
    ({"k": ones(2, 3, 4, 8)}, ValueError, r"k: expected \[2, 3, 2, 8\] \(the shape of q\), got \[2, 3, 4, 8\]"),
    ({"v": ones(2, 3, 24)}, ValueError, r"v: expected \[B, T, HV, V\], got \[2, 3, 24\]"),
    ({"v": ones(1, 3, 4, 6)}, ValueError, r"v: expected \[2, 3, HV, V\] \(B and T of q\), got \[1, 3, 4, 6\]"),
    ({"v": ones(2, 1, 4, 6)}, ValueError, r"v: expected \[2, 3, HV, V\] \(B and T of q\), got \[2, 1, 4, 6\]"),
    ({"v": ones(2, 3, 3, 6)}, ValueError, r"v: expected \[2, 3, a multiple of H = 2, V >= 1\], got \[2, 3, 3, 6\]"),
    ({"v": ones(2, 3, 1, 6)}, ValueError, r"v: expected \[2, 3, a multiple of H = 2, V >= 1\], got \[2, 3, 1, 6\]"),
    ({"v": ones(2, 3, 0, 6)}, ValueError, r"v: expected \[2, 3, a multiple of H = 2, V >= 1\], got \[2, 3, 0, 6\]"),
    ({"v": ones(2, 3, 4, 0)}, ValueError, r"v: expected \[2, 3, a multiple of H = 2, V >= 1\], got \[2, 3, 4, 0\]"),
    ({"q": ones(2, 3, 2, 0), "k": ones(2, 3, 2, 0)}, ValueError,
     r"q: expected \[B, T, H >= 1, K >= 1\], got \[2, 3, 2, 0\]"),
    ({"q": ones(2, 3, 0, 8), "k": ones(2, 3, 0, 8)}, ValueError,
     r"q: expected \[B, T, H >= 1, K >= 1\], got \[2, 3, 0, 8\]"),
    ({"g": ones(2, 3, 2, 8)}, ValueError, r"g: expected \[2, 3, 4, 8\] \(HV of v, K of q\), got \[2, 3, 2, 8\]"),
    ({"g": ones(2, 3, 4)}, ValueError, r"g: expected \[2, 3, 4, 8\] \(HV of v, K of q\), got \[2, 3, 4\]"),
    ({"g": ones(2, 3, 4, 6)}, ValueError, r"g: expected \[2, 3, 4, 8\] \(HV of v, K of q\), got \[2, 3, 4, 6\]"),
    ({"beta": ones(2, 3, 2)}, ValueError, r"beta: expected \[2, 3, 4\] \(HV of v\), got \[2, 3, 2\]"),
    ({"beta": ones(2, 3, 4, 1)}, ValueError, r"beta: expected \[2, 3, 4\] \(HV of v\), got \[2, 3, 4, 1\]"),
    ({"initial_state": ones(2, 4, 6, 8)}, ValueError,
     r"initial_state: expected \[2, 4, 8, 6\], got \[2, 4, 6, 8\]"),
    ({"initial_state": ones(2, 4, 8, 6), "state_v_first": True}, ValueError,
     r"initial_state: expected \[2, 4, 6, 8\] \(V first\), got \[2, 4, 8, 6\]"),
    ({"initial_state": ones(1, 4, 8, 6)}, ValueError, r"initial_state: expected \[2, 4, 8, 6\], got \[1, 4, 8, 6\]"),
    ({"initial_state": ones(4, 8, 6)}, ValueError, r"initial_state: expected \[2, 4, 8, 6\], got \[4, 8, 6\]"),
    # dtypes
    *[({n: np.ones(s, dtype)}, TypeError,
       rf"{n}: expected float32, float16 or bfloat16, got {np.dtype(dtype)} \[.*\]; "
       rf"convert with {n}.astype\(np.float32\)")
      for n, s in [("q", (2, 3, 2, 8)), ("k", (2, 3, 2, 8)), ("v", (2, 3, 4, 6)), ("g", (2, 3, 4, 8)),
                   ("beta", (2, 3, 4))]
      for dtype in (np.float64, np.int64, np.int32, np.uint16, np.bool_, np.complex64)],
    ({"beta": [[[0.5] * 4] * 3] * 2}, TypeError, "beta: expected float32, float16 or bfloat16, got float64"),
    ({"q": ones(2, 3, 2, 8, dtype=object)}, TypeError, "q: expected float32, float16 or bfloat16, got object"),
    *[({n: None}, TypeError, f"{n}: expected float32, float16 or bfloat16, got object") for n in NAMES[:5]],
    *[({"q": x}, TypeError, "q: expected float32, float16 or bfloat16, got ") for x in STRANGE],
    *[({"initial_state": x}, TypeError, "initial_state: expected float32 .*, got ") for x in STRANGE],
    *[({"initial_state": np.ones((2, 4, 8, 6), dtype)}, TypeError,
       rf"initial_state: expected float32 \[2, 4, 8, 6\], got {np.dtype(dtype)} .*; "
       r"convert with initial_state.astype\(np.float32\)")
      for dtype in (np.float64, np.float16, BF16, np.int32)],
    ({**GATE, "A_log": ones(4, dtype=np.float64)}, TypeError, r"A_log: expected float32.*got float64 \[4\]"),
    ({**GATE, "dt_bias": ones(32, dtype=np.int32)}, TypeError, r"dt_bias: expected float32.*got int32 \[32\]"),
    # the gate
    ({"use_gate_in_kernel": True}, ValueError, "A_log: the softplus gate needs it; pass A_log.* or lower_bound"),
    ({**GATE, "A_log": ones(2)}, ValueError, r"A_log: expected 4 values \(HV: one per value head\), got \[2\]"),
    ({**GATE, "A_log": ones(32)}, ValueError, r"A_log: expected 4 values \(HV: one per value head\), got \[32\]"),
    ({**GATE, "dt_bias": ones(4)}, ValueError, r"dt_bias: expected 32 values \(HV \* K, head by head\), got \[4\]"),
    ({**GATE, "dt_bias": ones(16)}, ValueError, r"dt_bias: expected 32 values \(HV \* K, head by head\), got \[16\]"),
    *[({**GATE, "lower_bound": bound}, ValueError,
       re.escape(f"lower_bound: expected a finite float32 below 0, got {bound}"))
      for bound in (0.0, 5.0, float("nan"), float("-inf"), -3.5e38)],  # the last is -inf in float32
    # beta
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval: .* needs use_beta_sigmoid_in_kernel=True"),
    # sequences
    ({"cu_seqlens": [0, 3]}, ValueError, "cu_seqlens: .* expected B = 1, got B = 2"),
    *[({**CU, "cu_seqlens": cu}, ValueError, message) for cu, message in [
        ([1, 3], "cu_seqlens: expected to start at 0, got 1"),
        ([-1, 3], "cu_seqlens: expected to start at 0, got -1"),
        ([0, 2], "cu_seqlens: expected to end at T = 3, got 2"),
        ([0, 4], "cu_seqlens: expected to end at T = 3, got 4"),
        ([0, 2, 1, 3], "cu_seqlens: expected not to decrease, got 2 then 1 at 1"),
        ([0, 5, 3], "cu_seqlens: expected not to decrease, got 5 then 3 at 1"),
        ([[0, 3]], r"cu_seqlens: expected \[N \+ 1\], got \[1, 2\]"),
        (np.zeros(0, np.int64), r"cu_seqlens: expected \[N \+ 1\], got \[0\]"),
        # beyond int64, where a conversion wraps, the true number is told
        (np.array([0, 2**64 - 1, 3], np.uint64),
         "cu_seqlens: expected not to decrease, got 18446744073709551615 then 3 at 1"),
        (np.array([0, 2**63], np.uint64), "cu_seqlens: expected to end at T = 3, got 9223372036854775808"),
        (np.array([2**63, 3], np.uint64), "cu_seqlens: expected to start at 0, got 9223372036854775808"),
    ]],
    ({**CU, "cu_seqlens": [0.0, 3.0]}, TypeError, r"cu_seqlens: expected integers, got float64 \[2\]"),
    ({**CU, "cu_seqlens": np.array([False, True])}, TypeError, r"cu_seqlens: expected integers, got bool \[2\]"),
    ({**CU, "cu_seqlens": [0, 1, 3], "initial_state": ones(1, 4, 8, 6)}, ValueError,
     r"initial_state: expected \[2, 4, 8, 6\], got \[1, 4, 8, 6\]"),
    # where results go
    ({"out": ones(2, 3, 4, 8)}, ValueError, r"out: expected float32 \[2, 3, 4, 6\], got float32 \[2, 3, 4, 8\]"),
    ({"out": ones(2, 3, 4, 6, dtype=np.float64)}, ValueError,
     r"out: expected float32 \[2, 3, 4, 6\], got float64 \[2, 3, 4, 6\]"),
    ({"out": ones(2, 3, 4, 6, dtype=np.float16)}, ValueError, r"out: expected float32 .*, got float16"),
    ({"out": ones(2, 3, 4, 6).astype(">f4")}, ValueError, r"out: expected float32 .*, got >f4"),
    ({"out": read_only(ones(2, 3, 4, 6))}, ValueError, "out: is read-only; an update in place would be lost"),
    ({"out": ones(2, 3, 6, 4).swapaxes(2, 3)}, ValueError, "out: axis 3 has a stride of 16 bytes, expected 4"),
    ({"out": ones(2, 3, 4, 12)[..., ::2]}, ValueError, "out: axis 3 has a stride of 8 bytes, expected 4"),
    ({"out": ones(2, 3, 4, 6)[..., ::-1]}, ValueError, "out: axis 3 has a stride of -4 bytes, expected 4"),
    ({"out": np.broadcast_to(ones(6), (2, 3, 4, 6))}, ValueError, "out: is read-only"),
    ({"out": np.lib.stride_tricks.as_strided(ones(6), (2, 3, 4, 6), (0, 0, 0, 4))}, ValueError,
     "out: axis 2 has a stride of 0 bytes"),
    ({"out": misaligned(ones(2, 3, 4, 6))}, ValueError, "out: is not aligned"),
    ({"out": [1.0]}, TypeError, "out: expected a numpy array to write into, got list"),
    ({"state_out": ones(2, 4, 6, 8)}, ValueError,
     r"state_out: expected float32 \[2, 4, 8, 6\], got float32 \[2, 4, 6, 8\]"),
    ({"state_out": ones(2, 4, 8, 6, dtype=np.float64)}, ValueError, "state_out: expected float32 .*, got float64"),
    ({"state_out": ones(2, 4, 8, 6, dtype=np.float16)}, ValueError, "state_out: expected float32 .*, got float16"),
    ({"state_out": read_only(ones(2, 4, 8, 6))}, ValueError, "state_out: is read-only"),
    ({"state_out": ones(2, 4, 6, 8).swapaxes(2, 3)}, ValueError, "state_out: axis 3 has a stride of 32 bytes"),
    ({"state_out": ones(2, 4, 8, 12)[..., :6]}, ValueError, "state_out: axis 2 has a stride of 48 bytes, expected 24"),
    ({"state_out": misaligned(ones(2, 4, 8, 6))}, ValueError, "state_out: is not aligned"),
    ({"state_out": ones(2, 4, 6, 8), "state_v_first": True}, ValueError, "state_out: .* cannot be combined"),
    ({"state_out": 3}, TypeError, "state_out: expected a numpy array to write into, got int"),
    # the ISA
    ({"isa": "sse9"}, ValueError, "isa='sse9': there is no such ISA in this build; available here: .*scalar"),
    ({"isa": ""}, ValueError, "isa='': there is no such ISA"),
    ({"isa": 3}, ValueError, "isa=3: there is no such ISA"),
    ({"isa": ["scalar"]}, ValueError, "isa=.*: there is no such ISA"),
]


def good():
    return make_inputs(9, B, T, H, HV, K, V)


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    """Its own sentence, and the arrays to be written keep their bits."""
    out = change.get("out", np.full((2, 3, 4, 6), 7, np.float32))
    state = change.get("state_out", np.full((2, 4, 8, 6), 7, np.float32))
    arguments = good() | {"out": out, "state_out": state} | change
    if "state_v_first" in change and "state_out" not in change:
        del arguments["state_out"]
    before = [np.array(x) for x in (out, state)]
    with pytest.raises(error, match=message):
        kda.fused_recurrent_kda(**arguments)
    for x, kept in zip((out, state), before, strict=True):
        assert np.array_equal(np.array(x), kept)


def test_the_arguments_that_bad_input_changes_are_good():
    kda.fused_recurrent_kda(**good(), out=ones(2, 3, 4, 6), state_out=ones(2, 4, 8, 6))
    kda.fused_recurrent_kda(**CU, cu_seqlens=[0, 1, 3])
    kda.fused_recurrent_kda(**good(), **GATE, dt_bias=ones(32))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_outputs_may_not_overlap_inputs(name):
    """out and state_out inside the memory of an input are refused, and nothing is written."""
    x = good()
    memory = np.zeros(4096, np.float32)
    x[name] = memory[100:100 + x[name].size].reshape(x[name].shape)
    x[name][...] = 0.25
    before = memory.copy()
    for start in (0, 99 + x[name].size):
        out = memory[start:start + 144].reshape(2, 3, 4, 6)
        with pytest.raises(ValueError, match=f"out: overlaps {name}; pass a separate array"):
            kda.fused_recurrent_kda(**x, out=out)
    for start in (0, 99 + x[name].size):
        state = memory[start:start + 384].reshape(2, 4, 8, 6)
        with pytest.raises(ValueError, match=f"state_out: overlaps {name}; pass a separate array"):
            kda.fused_recurrent_kda(**x, state_out=state)
    assert same_bits(memory, before)
    beside = memory[100 + x[name].size:][:144].reshape(2, 3, 4, 6)
    assert kda.fused_recurrent_kda(**x, out=beside)[0] is beside


@pytest.mark.parametrize("call", [kda.fused_recurrent_kda, kda.chunk_kda])
@pytest.mark.parametrize("name", ["A_log", "dt_bias", "cu_seqlens"])
def test_outputs_may_not_overlap_parameters(name, call):
    """They are read again for every head and token: a result written over them would change the next one."""
    x = CU | GATE | {"A_log": ones(4), "dt_bias": ones(32), "cu_seqlens": np.array([0, 3])}
    memory = np.zeros(500, np.int64)
    for output, shape in [("out", (1, 3, 4, 6)), ("state_out", (1, 4, 8, 6))]:
        own = memory.view(x[name].dtype)[10:10 + x[name].size]
        own[:] = x[name]
        before = memory.copy()
        written = memory.view(np.float32)[:np.prod(shape)].reshape(shape)
        with pytest.raises(ValueError, match=f"{output}: overlaps {name}; pass a separate array"):
            call(**x | {name: own, output: written})
        assert same_bits(memory, before)


def test_out_between_the_columns_of_a_projection():
    """Interleaved with an input but sharing no element: taken, and right."""
    x = good()
    fused = np.zeros((2, 3, 4, 12), np.float32)
    fused[..., :6] = x["v"]
    want = kda.fused_recurrent_kda(**x)[0]
    o, _ = kda.fused_recurrent_kda(**x | {"v": fused[..., :6]}, out=fused[..., 6:])
    assert same_bits(np.ascontiguousarray(o), want)
    assert same_bits(np.ascontiguousarray(fused[..., :6]), x["v"])


def test_out_may_not_overlap_the_states():
    x = good()
    memory = np.zeros(1000, np.float32)
    state = memory[:384].reshape(2, 4, 8, 6)
    out = memory[300:444].reshape(2, 3, 4, 6)
    with pytest.raises(ValueError, match="out: overlaps state_out"):
        kda.fused_recurrent_kda(**x, state_out=state, out=out)
    with pytest.raises(ValueError, match="out: overlaps initial_state"):
        kda.fused_recurrent_kda(**x, initial_state=state, out=out)
    assert not memory.any()


def test_state_out_half_over_the_initial_state():
    x = good()
    memory = np.zeros(1000, np.float32)
    with pytest.raises(ValueError, match="state_out: overlaps initial_state; pass initial_state itself or"):
        kda.fused_recurrent_kda(**x, initial_state=memory[:384].reshape(2, 4, 8, 6),
                                state_out=memory[48:432].reshape(2, 4, 8, 6))
    assert not memory.any()


def test_state_out_in_the_initial_states_memory_but_another_order(isa):
    """The same address with other strides is no update in place: the state is read whole before it is written."""
    x = make_inputs(10, 2, 3, 2, 4, 8, 8, N=2)
    want = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)[1]
    state = np.ascontiguousarray(x["initial_state"].swapaxes(2, 3))
    kda.fused_recurrent_kda(**x | {"initial_state": state.swapaxes(2, 3)}, state_out=state, isa=isa)
    assert same_bits(state, want)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"g": ones(3, 4)}, ValueError, "A_log: the softplus gate needs it"),
    ({"g": ones(4), "A_log": ones(4)}, ValueError, r"g: expected \[..., HV, K\], got \[4\]"),
    ({"g": ones(3, 0), "A_log": ones(3)}, ValueError, r"g: expected \[..., HV, K\], got \[3, 0\]"),
    ({"g": ones(3, 4), "A_log": ones(4)}, ValueError, r"A_log: expected 3 values .*, got \[4\]"),
    ({"g": ones(3, 4), "A_log": ones(3), "dt_bias": ones(3)}, ValueError, r"dt_bias: expected 12 values .*, got \[3\]"),
    ({"g": ones(3, 4), "lower_bound": 0.0}, ValueError, "lower_bound: expected a finite float32 below 0, got 0.0"),
    ({"g": ones(3, 4), "lower_bound": 2}, ValueError, "lower_bound: expected a finite float32 below 0, got 2"),
    ({"g": ones(3, 4, dtype=np.float64), "A_log": ones(3)}, TypeError, r"g: .*got float64 \[3, 4\]; convert with g"),
    ({"g": ones(3, 4, dtype=np.int8), "A_log": ones(3)}, TypeError, r"g: .*got int8 \[3, 4\]; convert with g"),
    ({"g": ones(3, 4), "A_log": ones(3), "isa": "no"}, ValueError, "isa='no': there is no such ISA"),
])
def test_bad_gate_input(arguments, error, message):
    with pytest.raises(error, match=message):
        kda.fused_kda_gate(**arguments)


@pytest.mark.parametrize(("x", "options", "error", "message"), [
    (np.float32(1), {}, ValueError, r"x: expected \[..., K >= 1\], got \[\]"),
    (ones(3, 0), {}, ValueError, r"x: expected \[..., K >= 1\], got \[3, 0\]"),
    (ones(3), {"eps": -1e-6}, ValueError, "eps: expected a number >= 0, got -1e-06"),
    (ones(3), {"eps": float("nan")}, ValueError, "eps: expected a number >= 0, got nan"),
    (ones(3, dtype=np.float64), {}, TypeError, r"x: .*got float64 \[3\]; convert with x.astype"),
    (ones(3, dtype=np.int64), {}, TypeError, r"x: .*got int64 \[3\]; convert with x.astype"),
    (ones(3), {"isa": "no"}, ValueError, "isa='no': there is no such ISA"),
])
def test_bad_norm_input(x, options, error, message):
    with pytest.raises(error, match=message):
        kda.l2norm(x, **options)


@pytest.mark.parametrize(("call", "name"), [
    (lambda value: kda.fused_recurrent_kda(**good(), scale=value), "scale"),
    (lambda value: kda.chunk_kda(**good(), scale=value), "scale"),
    (lambda value: kda.fused_recurrent_kda(**good(), **GATE, lower_bound=value), "lower_bound"),
    (lambda value: kda.fused_kda_gate(ones(3, 4), ones(3), lower_bound=value), "lower_bound"),
    (lambda value: kda.l2norm(ones(3), value), "eps"),
    (lambda value: kda.rms_norm_gated(ones(3), ones(3), ones(3), value), "eps"),
])
def test_what_must_be_a_number(call, name):
    for value in ("0.1", 1j, [0.1], np.ones(1, np.float32), object(), np.array("x")):
        with pytest.raises(TypeError, match=f"{name}: expected a number, got "):
            call(value)
    with pytest.raises(ValueError, match=f"{name}: expected a number that a float can hold"):
        call(10**400)
    for value in (np.float32(-0.5), np.array(-0.5), BF16.type(-0.5), -1):
        call(-value if name == "eps" else value)


@pytest.mark.parametrize(("call", "name"), [
    (lambda x: kda.fused_recurrent_kda(**good() | {"v": x}), "v"),
    (lambda x: kda.fused_recurrent_kda(**good(), initial_state=x), "initial_state"),
    (lambda x: kda.fused_recurrent_kda(**good(), **GATE, dt_bias=x), "dt_bias"),
    (lambda x: kda.fused_recurrent_kda(**CU, cu_seqlens=x), "cu_seqlens"),
    (lambda x: kda.l2norm(x), "x"),
    (lambda x: kda.causal_conv1d(ones(1, 2, 3), x), "weight"),
    (lambda x: kda.rms_norm_gated(ones(3), ones(3), x), "weight"),
])
def test_what_numpy_makes_no_array_of(call, name):
    with pytest.raises(ValueError, match=f"^{name}: expected an array, got list, which numpy refuses: .*inhomogeneous"):
        call([[1.0], [1.0, 2.0]])


def test_pending_updates_of_what_is_no_array():
    state = ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"state: expected \[N, HV, K, V\], got \[3\]"):
        kda.no_updates([1.0, 2.0, 3.0])
    assert kda.no_updates(state.tolist()).shape == (1, 2, 10)
    with pytest.raises(TypeError, match="state: expected a numpy array to write into, got list"):
        kda.settle(state.tolist(), kda.no_updates(state))
    with pytest.raises(TypeError, match="pending: expected a numpy array to write into, got NoneType"):
        kda.settle(state, None)


def test_intermediate_states_of_no_sequence():
    """More tokens than chunk_size in each row of a batch that has none."""
    x = make_inputs(0, 0, 5, 1, 2, 4, 3)
    o, final, states = kda.chunk_kda(**x, output_final_state=True, chunk_size=2, return_intermediate_states=True)
    assert (o.shape, final.shape, states.shape) == ((0, 5, 2, 3), (0, 2, 4, 3), (0, 0, 2, 4, 3))


@pytest.mark.parametrize("activation", [["silu"], np.array(["silu", "swish"]), 1])
def test_an_activation_is_a_name(activation):
    with pytest.raises(ValueError, match="activation: expected one of 'silu', 'swish', None, got "):
        kda.causal_conv1d(ones(1, 2, 3), ones(3, 4), activation=activation)
    with pytest.raises(ValueError, match="precision: expected 'float32' or 'bf16', got "):
        kda.chunk_kda(**good(), precision=activation)


def test_cu_seqlens_are_the_calls_own():
    """Another thread that changes the caller's array must not move what the core reads."""
    cu = np.array([0, 3, 7])
    assert not np.shares_memory(kda.ops._sequences(cu, 1, 7), cu)
