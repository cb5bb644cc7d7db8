"""Arguments of any kind: what the definition says, or a TypeError or ValueError whose message begins with the name of
an argument, and nothing written.

Each property draws good arguments, spoils some of them, and calls. The fuzzers of tests/fuzz feed the same properties
with bytes, guided by coverage.
"""
import contextlib
import functools
import inspect
import re
from itertools import pairwise

import ml_dtypes
import numpy as np
from helpers import BF16, ISAS, make_inputs, search
from hypothesis import given
from hypothesis import strategies as st
from plain_layer import seeded

import kda
from kda import KDALayer, QuantizedMatrix, reference
from kda.ops import chunk_kda_backward

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
DTYPES = [F32, F16, BF16]
isas = st.sampled_from(ISAS)


@functools.cache
def small_layer(config):
    """A layer with seeded weights."""
    return KDALayer.from_tensors(config, seeded(config))


def near(got, want, tolerance):
    """As far apart as `tolerance` at most, and not finite where float32 cannot hold what is wanted."""
    got = np.asarray(got, np.float64)
    with np.errstate(over="ignore"):
        want = np.asarray(want).astype(np.float32).astype(np.float64)
    finite = np.isfinite(want)
    return (got.shape == want.shape and np.array_equal(np.isfinite(got), finite)
            and bool(np.all(np.abs(got[finite] - want[finite]) <= tolerance)))


# ---- good arguments ----

def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)
    y = raw[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def spaced(x):
    y = np.full([2 * n + 1 for n in x.shape], np.nan, x.dtype)[tuple(slice(1, None, 2) for _ in x.shape)]
    y[...] = x
    return y


def backwards(x):
    return x[..., ::-1].copy()[..., ::-1] if x.ndim else x


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = [lambda x: x, lambda x: x, misaligned, spaced, backwards, read_only, np.asfortranarray,
           lambda x: x if x.dtype == BF16 else x.astype(x.dtype.newbyteorder(">")),
           lambda x: x.tolist() if x.size == 0 else x]
STRIDED = [lambda x: x, spaced, np.asfortranarray, backwards]  # of what is written to


def laid_out(draw, x):
    """x in some memory layout."""
    return draw(st.sampled_from(LAYOUTS[:-1]))(x)


def sequences(draw, T):
    """cu_seqlens of T tokens, in some form."""
    cu = [0, *sorted(draw(st.lists(st.integers(0, T), max_size=3))), T]
    form = draw(st.integers(0, 4))
    if form == 0:
        return tuple(cu)
    if form == 1:
        return np.array(cu, draw(st.sampled_from([np.int8, np.uint8, np.int32, ">i4", np.uint64, ">u8"])))
    if form == 2:
        return spaced_integers(cu)
    if form == 3:
        return misaligned(np.array(cu))
    return cu


def spaced_integers(values):
    y = np.full(2 * len(values), -1, np.int64)[::2]
    y[:] = values
    return y


# ---- bad ones ----

class Refusing:
    """An object of another library that will not become an array."""

    def __array__(self, dtype=None, copy=None):
        raise ValueError("not this one")


ODD = [None, "0.5", b"x", "", object(), Refusing(), 0, -1, 1, True, 0.5, 1j, -0.0, float("nan"), float("inf"), 1e300,
       10**400, 2**63, -2**63 - 1, [], [[]], [[1.0], [1.0, 2.0]], [1, "a"], {}, {"a": 1}, {1.0}, slice(1), range(3),
       np.float32(0.5), np.array(0.5), np.float64(1), np.array(None), np.zeros(3, "S4"), np.zeros(3, "M8[s]"),
       np.zeros(3, [("a", np.float32)]), np.zeros(3, ml_dtypes.float8_e4m3fn), np.zeros(0, np.float32),
       np.array([2**63], np.uint64), np.ma.masked_array([1.0, 2.0], [True, False], np.float32)]


def other_array(draw, x):
    """x with another dtype, another shape, or its elements in one place."""
    x = np.asarray(x)
    deed = draw(st.integers(0, 8))
    if deed == 0:
        return x.astype(draw(st.sampled_from([np.float64, np.int32, np.uint8, np.complex64, object, bool])))
    if deed == 1:
        return x[..., None] if draw(st.booleans()) else x[None]
    if deed == 2 and x.ndim:
        return x[0] if x.shape[0] else x.reshape(-1)
    if deed == 3 and x.ndim:
        axis = draw(st.integers(0, x.ndim - 1))
        return np.concatenate([x, x], axis)
    if deed == 4 and x.ndim:
        return x[tuple(slice(None) if i else slice(0, 0) for i in range(x.ndim))]
    if deed == 5:
        return x.swapaxes(0, -1) if x.ndim > 1 else x
    if deed == 6 and x.ndim:
        return np.broadcast_to(x[..., :1], x.shape)
    if deed == 7:
        return x.reshape(-1)
    return x.tolist()


def spoiled(draw, arguments, names):
    """Names of the arguments among `names` that were replaced by odd ones, in place."""
    chosen = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    for name in chosen:
        value = arguments.get(name)
        if value is not None and not isinstance(value, bool | int | float | str) and draw(st.booleans()):
            arguments[name] = other_array(draw, value)
        else:
            arguments[name] = draw(st.sampled_from(ODD))
    return set(chosen)


def memories(arguments):
    """The bytes behind every array, with what lies between its elements."""
    found = {}
    for x in arguments.values():
        while isinstance(x, np.ndarray) and isinstance(x.base, np.ndarray):
            x = x.base
        if isinstance(x, np.ndarray) and x.dtype != object:
            found[id(x)] = (x, x.tobytes(order="A"))
    return found


def outcome(function, arguments, may_fail, *isa):
    """The result of the call; or None if it was refused, by name, and nothing was written."""
    before = memories(arguments)
    try:
        with np.errstate(all="ignore"):
            return function(**arguments, **({"isa": isa[0]} if isa else {}))
    except (TypeError, ValueError) as error:
        if not may_fail:
            raise
        refusal = error
    names = "|".join(inspect.signature(function).parameters)
    assert re.match(rf"({names})\b", str(refusal)), repr(refusal)
    assert all(x.tobytes(order="A") == kept for x, kept in before.values())
    return None


def plain(x):
    """A copy that the reference computes with: floats wide enough."""
    if isinstance(x, np.ndarray | list | tuple | range):
        try:
            x = np.array(x)
        except ValueError:  # what is never read may be anything
            return x
        return x.astype(np.float64) if x.dtype == BF16 or x.dtype.kind == "f" else x
    return x


def flat(arguments, name):
    """With one argument as a row: of small parameters any shape of as many values is taken."""
    return arguments | {name: None if arguments[name] is None else np.reshape(arguments[name], -1)}


# ---- the delta rule ----

DELTA = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "lower_bound", "cu_seqlens")


def delta_arguments(draw):
    """Good arguments of both functions, of the gradient too: what it does not take is left out there."""
    small = st.integers(1, 9)
    B, T, H, repeat = (draw(st.integers(low, high)) for low, high in ((0, 2), (0, 20), (1, 2), (1, 2)))
    K, V, HV = draw(small), draw(small), H * repeat
    cu = sequences(draw, T) if B == 1 and draw(st.booleans()) else None
    N = B if cu is None else len(cu) - 1
    x = make_inputs(draw(st.integers(0, 2**32 - 1)), B, T, H, HV, K, V, N=N)
    x |= {name: x[name].astype(draw(st.sampled_from(DTYPES))) for name in ("q", "k", "v", "g", "beta")}
    x |= {"cu_seqlens": cu, "scale": draw(st.sampled_from([None, 0, 1, -0.5, np.float32(2), 1e30])),
          "state_v_first": draw(st.booleans()), "use_qk_l2norm_in_kernel": draw(st.booleans()),
          "use_beta_sigmoid_in_kernel": draw(st.booleans())}
    x["allow_neg_eigval"] = x["use_beta_sigmoid_in_kernel"] and draw(st.booleans())
    if draw(st.booleans()):
        x["use_gate_in_kernel"] = True
        x["lower_bound"] = draw(st.sampled_from([None, -5.0, -1, np.float32(-0.5), -1e-30]))
        if x["lower_bound"] is None or draw(st.booleans()):
            x["A_log"] = np.linspace(-1, 2, HV, dtype=np.float32).reshape(draw(st.sampled_from([(HV,), (1, HV, 1)])))
        if draw(st.booleans()):
            x["dt_bias"] = np.linspace(-2, 1, HV * K, dtype=np.float32)
    x["initial_state"] = np.swapaxes(x["initial_state"], 2, 3).copy() if x["state_v_first"] else x["initial_state"]
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        x[name] = laid_out(draw, x[name])
    if draw(st.booleans()):
        del x["initial_state"]
    return x, (N, HV, K, V)


def outputs(draw, x, shape):
    """out and state_out for the arguments x: absent, of their own, in the place of the initial state, or in the memory
    of an input. Returns whether they may be refused."""
    refusable = False
    v = np.asarray(x["v"])
    if draw(st.booleans()):
        kind = draw(st.integers(0, 4))
        if kind == 3:
            x["out"], refusable = x[draw(st.sampled_from(["q", "k", "v", "g"]))], True
        elif kind == 4:
            x["out"], refusable = np.broadcast_to(np.zeros((1,), v.dtype), v.shape), True
        else:
            x["out"] = (np.zeros(v.shape, v.dtype.newbyteorder("=")) if kind else spaced(np.zeros(
                (*v.shape[:-1], 1), v.dtype.newbyteorder("="))).repeat(v.shape[-1], -1))
    if draw(st.booleans()):
        kind, initial = draw(st.integers(0, 4)), x.get("initial_state")
        x["state_out"] = np.zeros(shape, np.float32)
        refusable |= x["state_v_first"]
        if kind == 1 and initial is not None:
            x["state_out"] = initial  # in place, where it can be written
            refusable |= not (initial.flags.carray and initial.dtype.isnative)
        elif kind == 2 and initial is not None and initial.shape == shape:
            memory = np.zeros(initial.size + 1, np.float32)  # half over it
            x["initial_state"] = memory[:-1].reshape(shape)
            x["initial_state"][...] = initial
            x["state_out"], refusable = memory[1:].reshape(shape), True
        elif kind == 3:
            x["state_out"] = draw(st.sampled_from([np.asfortranarray, read_only, misaligned, spaced]))(x["state_out"])
            refusable = True
        elif kind == 4:
            memory = np.zeros(2 * int(np.prod(shape)), np.float32)  # heads with room between them
            x["state_out"] = memory.reshape(shape[0], 2 * shape[1], *shape[2:])[:, ::2]
    return refusable


@search(150)
@given(data=st.data())
def test_delta_rule(data):
    draw = data.draw
    x, shape = delta_arguments(draw)
    x["output_final_state"] = draw(st.booleans())
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, DELTA))
    function = draw(st.sampled_from([kda.fused_recurrent_kda, kda.chunk_kda]))
    if not may_fail:
        may_fail |= outputs(draw, x, shape)
        if function is kda.fused_recurrent_kda and draw(st.integers(0, 3)) == 0:
            x["pending"] = kda.no_updates(np.zeros(shape, np.float32))
            may_fail |= "state_out" not in x
        if draw(st.integers(0, 9)) == 0:
            may_fail |= bool(spoiled(draw, x, ["out", "state_out", *(["pending"] if "pending" in x else [])]))
    options = {}
    if function is kda.chunk_kda:
        options = {"chunk_size": draw(st.sampled_from([1, 3, 64, np.int64(5), 2**70])),
                   "return_intermediate_states": draw(st.booleans())}
        may_fail |= bool(spoiled(draw, options, ["chunk_size", "precision"])) if draw(st.integers(0, 9)) == 0 else False
    given_to_reference = {name: plain(a) for name, a in x.items() if name not in ("out", "state_out", "pending")}
    result = outcome(function, x | options, may_fail, draw(isas))
    if result is None:
        return
    if options.get("precision") == "bf16":
        return
    with np.errstate(all="ignore"):
        wanted = reference.chunk_kda(**given_to_reference | {"output_final_state": True},
                                     chunk_size=min(int(options.get("chunk_size") or 64), 2**40),
                                     return_intermediate_states=True)
    if x.get("pending") is not None:
        kda.settle(x["state_out"], x["pending"])
    size = max(1, *(np.abs(w[np.isfinite(w)]).max(initial=0) for w in wanted))
    rounding = {F32: 0, F16: 2.0**-11, BF16: 2.0**-8}[result[0].dtype]
    assert "out" not in x or x["out"] is None or result[0] is x["out"]
    assert near(result[0], in_dtype(wanted[0], result[0].dtype), size * (3e-6 + 2 * rounding))
    assert (result[1] is None) == (x.get("state_out") is None and not x["output_final_state"])
    assert x.get("state_out") is None or result[1] is x["state_out"]
    for got, want in zip(result[1:], wanted[1:], strict=False):
        assert got is None or near(got[np.isfinite(want)], want[np.isfinite(want)], size * 3e-6)


def in_dtype(want, dtype):
    """float64 as `dtype` has it: what is too large for it becomes infinite."""
    with np.errstate(over="ignore"):
        return want.astype(np.float32).astype(dtype).astype(np.float32)


@search(40)
@given(data=st.data())
def test_settle(data):
    draw = data.draw
    shape = tuple(draw(st.integers(low, 9)) for low in (0, 1, 1, 1))
    N, HV, K, V = shape
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    state = rng.standard_normal(shape).astype(np.float32)
    x = {"state": draw(st.sampled_from([state, read_only(state), np.asfortranarray(state)])),
         "pending": rng.standard_normal((N, HV, 2 * K + V)).astype(np.float32)}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, list(x)))
    if outcome(kda.no_updates, {"state": x["state"]}, True) is not None:
        assert np.ndim(x["state"]) == 4
    before = plain(x["state"]), plain(x["pending"])
    isa = draw(isas)
    done = []
    outcome(lambda state, pending, isa: done.append(kda.settle(state, pending, isa=isa)), x,
            may_fail or not x["state"].flags.carray, isa)
    if done:
        s, p = before
        K = s.shape[2]
        want = p[..., :K, None] * s + p[..., K:2 * K, None] * p[..., None, 2 * K:]
        assert near(x["state"], want, 1e-5 * max(1, np.abs(want).max(initial=0)))
        assert (x["pending"][..., :K] == 1).all()
        assert not x["pending"][..., K:].any()


@search(40)
@given(data=st.data())
def test_gradients(data):
    draw = data.draw
    x, shape = delta_arguments(draw)
    v = np.asarray(x["v"])
    x["d_o"] = laid_out(draw, np.linspace(-1, 1, v.size).reshape(v.shape).astype(draw(st.sampled_from(DTYPES))))
    if draw(st.booleans()):
        last = np.linspace(1, -1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        x["d_final_state"] = np.swapaxes(last, 2, 3) if x["state_v_first"] else last
    else:
        x["d_final_state"] = None
    if x["scale"] == 1e30:
        x["scale"] = None
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, [*DELTA, "d_o", "d_final_state", "states"]))
    result = outcome(chunk_kda_backward, x, may_fail, draw(isas))
    if result is None or may_fail:
        return
    want = reference.chunk_kda_backward(**{name: plain(a) for name, a in x.items()})
    for name, got in result.items():
        assert (got is None) == (want[name] is None)
        if got is not None:
            assert near(got, want[name], 3e-5 * max(1, np.abs(want[name]).max(initial=0))), name


@search(80)
@given(data=st.data())
def test_cu_seqlens(data):
    """Any of them: exactly [N + 1] integers from 0 to T that do not decrease are taken, and are N calls of their own;
    by the convolution as by the delta rule."""
    draw = data.draw
    T = draw(st.integers(0, 12))
    numbers = st.one_of(st.integers(-1, T + 1), st.sampled_from([2**31, 2**63, -2**63, 2**64 - 1, 2**64, 10**30]))
    cu = draw(st.one_of(st.lists(numbers, max_size=5), st.builds(sequences, st.just(draw), st.just(T)),
                        st.sampled_from(ODD)))
    B = draw(st.sampled_from([1, 1, 1, 0, 2]))
    array = None
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(cu)
    good = cu is None or (
        array is not None and array.dtype.kind in "iu" and array.ndim == 1 and array.size > 0 and B == 1
        and int(array[0]) == 0 and int(array[-1]) == T and all(int(a) <= int(b) for a, b in pairwise(array)))
    x = make_inputs(1, B, T, 1, 2, 4, 3)
    isa, results = draw(isas), []
    rows = np.ones((B, T, 3), np.float32)
    for function, arguments in ((kda.fused_recurrent_kda, x), (kda.chunk_kda, x),
                                (kda.causal_conv1d, {"x": rows, "weight": np.ones((3, 4), np.float32)})):
        results.append(outcome(function, arguments | {"cu_seqlens": cu, "output_final_state": True}, not good, isa))
        assert (results[-1] is not None) == good
    if good and cu is not None:
        for function, (o, state) in zip((kda.fused_recurrent_kda, kda.chunk_kda), results, strict=False):
            for n, (start, end) in enumerate(pairwise(map(int, array))):
                own, final = function(**{name: a[:, start:end] for name, a in x.items()}, output_final_state=True,
                                      isa=isa)
                assert own.tobytes() == np.ascontiguousarray(o[:, start:end]).tobytes()
                assert final.tobytes() == state[n:n + 1].tobytes()


# ---- the other functions ----

@search(60)
@given(data=st.data())
def test_gate_and_l2norm(data):
    draw = data.draw
    lead = draw(st.lists(st.integers(0, 3), max_size=3))
    HV, K = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    g = np.random.default_rng(draw(st.integers(0, 99))).standard_normal((*lead, HV, K)).astype(
        draw(st.sampled_from(DTYPES)))
    x = {"g": laid_out(draw, g), "A_log": np.linspace(-1, 1, HV, dtype=np.float32),
         "dt_bias": draw(st.sampled_from([None, np.linspace(-1, 1, HV * K, dtype=np.float32)])),
         "lower_bound": draw(st.sampled_from([None, -5.0, -1]))}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, list(x)))
    isa = draw(isas)
    result = outcome(kda.fused_kda_gate, x, may_fail, isa)
    if result is not None:
        with np.errstate(all="ignore"):
            want = reference.fused_kda_gate(**{name: plain(a) for name, a in x.items()})
        assert near(result, want, 2e-6 * max(1, np.abs(want[np.isfinite(want)]).max(initial=0)))
    y = {"x": laid_out(draw, g), "eps": draw(st.sampled_from([1e-6, 0, 1, np.float32(1e-3)]))}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, y, list(y)))
    result = outcome(kda.l2norm, y, may_fail, isa)
    if result is not None:
        with np.errstate(all="ignore"):
            want = in_dtype(reference.l2norm(**{name: plain(a) for name, a in y.items()}), result.dtype)
        assert near(result, want, {F32: 1e-6, F16: 2.0**-10, BF16: 2.0**-7}[result.dtype])


@search(80)
@given(data=st.data())
def test_convolution(data):
    draw = data.draw
    T, D, W = draw(st.integers(0, 9)), draw(st.integers(1, 20)), draw(st.integers(1, 8))
    cu = sequences(draw, T) if draw(st.booleans()) else None
    B = draw(st.integers(0, 2)) if cu is None else 1
    N = B if cu is None else len(cu) - 1
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    past = rng.standard_normal((N, D, W)).astype(draw(st.sampled_from(DTYPES)))
    x = {"x": laid_out(draw, rng.standard_normal((B, T, D)).astype(draw(st.sampled_from(DTYPES)))),
         "weight": laid_out(draw, rng.standard_normal((D, W)).astype(draw(st.sampled_from(DTYPES)))),
         "bias": draw(st.sampled_from([None, rng.standard_normal(D).astype(np.float32)])),
         "activation": draw(st.sampled_from(["silu", "swish", None])),
         "initial_state": draw(st.sampled_from([None, past, past[:, :, 1:]])), "cu_seqlens": cu}
    names = ["x", "weight", "bias", "activation", "initial_state", "cu_seqlens"]
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, names))
    if not may_fail and draw(st.booleans()):
        kind = draw(st.integers(0, 2))
        dtype = np.asarray(x["x"]).dtype
        x["out"] = [x["x"], np.zeros((B, T, D), dtype.newbyteorder("=")), np.zeros((B, T, D), np.float64)][kind]
        may_fail = kind != 1
    wanted = {name: plain(a) for name, a in x.items() if name != "out"}
    result = outcome(kda.causal_conv1d, x | {"output_final_state": True}, may_fail, draw(isas))
    if result is not None:
        with np.errstate(all="ignore"):
            y, state = reference.causal_conv1d(**flat(wanted, "bias"), output_final_state=True)
        assert near(result[0], in_dtype(y, result[0].dtype), max(1, np.abs(y).max(initial=0)) * {
            F32: 2e-6, F16: 2.0**-10, BF16: 2.0**-7}[result[0].dtype])
        assert np.array_equal(result[1], state.astype(np.float32))


@search(80)
@given(data=st.data())
def test_convolution_update(data):
    draw = data.draw
    B, D, W = draw(st.integers(0, 2)), draw(st.integers(1, 20)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    wide = draw(st.booleans())
    state = rng.standard_normal((B, D, W if wide else W - 1)).astype(np.float32)
    x = {"x": laid_out(draw, rng.standard_normal((B, D)).astype(draw(st.sampled_from(DTYPES)))),
         "state": draw(st.sampled_from(STRIDED))(state),
         "weight": laid_out(draw, rng.standard_normal((D, W)).astype(draw(st.sampled_from(DTYPES)))),
         "bias": draw(st.sampled_from([None, rng.standard_normal(D).astype(np.float32)])),
         "activation": draw(st.sampled_from(["silu", "swish", None]))}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, list(x)))
    if not may_fail and draw(st.integers(0, 3)) == 0:
        x["state"] = draw(st.sampled_from([read_only, misaligned, lambda s: np.broadcast_to(s[:, :1], s.shape)]))(state)
        may_fail = True
    wanted = {name: plain(a) for name, a in x.items()}
    result = outcome(kda.causal_conv1d_update, x, may_fail, draw(isas))
    if result is None:
        return
    past = np.array(wanted["state"], np.float64)
    with np.errstate(all="ignore"):
        W = np.asarray(wanted["weight"]).shape[-1]
        narrow = past[:, :, past.shape[2] - (W - 1):]
        want = reference.causal_conv1d_update(wanted["x"], narrow, wanted["weight"],
                                              flat(wanted, "bias")["bias"], wanted["activation"])
    assert near(result, in_dtype(want, result.dtype), max(1, np.abs(want).max(initial=0)) * {
        F32: 2e-6, F16: 2.0**-10, BF16: 2.0**-7}[result.dtype])
    assert np.array_equal(x["state"][:, :, past.shape[2] - (W - 1):], narrow.astype(np.float32))


@search(60)
@given(data=st.data())
def test_gated_norm(data):
    draw = data.draw
    shape = (*draw(st.lists(st.integers(0, 3), max_size=5)), draw(st.integers(1, 20)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = {name: laid_out(draw, rng.standard_normal(shape).astype(draw(st.sampled_from(DTYPES))))
         for name in ("x", "gate")}
    x |= {"weight": rng.standard_normal(shape[-1]).astype(np.float32),
          "eps": draw(st.sampled_from([1e-5, 1, np.float32(1e-3)])),
          "activation": draw(st.sampled_from(["sigmoid", "silu", "swish"]))}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, list(x)))
    if not may_fail and draw(st.booleans()):
        dtype = np.asarray(x["x"]).dtype
        kind = draw(st.integers(0, 2))
        x["out"] = [x["x"], x["gate"], np.zeros(shape, dtype.newbyteorder("="))][kind]
        may_fail = kind != 2
    wanted = {name: plain(a) for name, a in x.items() if name != "out"}
    result = outcome(kda.rms_norm_gated, x, may_fail, draw(isas))
    if result is not None:
        with np.errstate(all="ignore"):
            want = reference.rms_norm_gated(**flat(wanted, "weight"))
        assert near(result, in_dtype(want, result.dtype), max(1, np.abs(want).max(initial=0)) * {
            F32: 2e-6, F16: 2.0**-10, BF16: 2.0**-7}[result.dtype.newbyteorder("=")])


# ---- quantised matrices ----

@search(80)
@given(data=st.data())
def test_codes(data):
    """Any codes and finite scales: they come back bit for bit, and the product is that of the definition."""
    draw = data.draw
    N, K, bits, group = draw(st.integers(1, 40)), draw(st.integers(1, 140)), draw(st.sampled_from([8, 4])), draw(
        st.sampled_from([32, 64, 128]))
    groups = -(-K // group)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    codes = rng.integers(0, 256, (N, groups * group * bits // 8)).astype(np.uint8)
    codes = codes.view(np.int8) if bits == 8 and draw(st.booleans()) else codes
    scales = rng.uniform(-1, 1, (N, groups)).astype(np.float16)
    if draw(st.booleans()):
        codes, scales = codes.reshape(-1), scales.view(np.uint16).reshape(-1)
    x = {"codes": draw(st.sampled_from([lambda c: c, read_only, spaced_codes]))(codes),
         "scales": draw(st.sampled_from([lambda s: s, read_only, misaligned, lambda s: s.astype(
             s.dtype.newbyteorder(">"))]))(scales), "shape": draw(st.sampled_from([(N, K), [N, K], np.array([N, K])])),
         "bits": bits, "group_size": group}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, x, list(x)))
    isa = draw(isas)
    m = outcome(QuantizedMatrix.from_codes, x, may_fail, isa)
    if m is None:
        return
    N, K = m.shape
    kept = np.asarray(x["codes"]).tobytes(), np.asarray(x["scales"]).astype(
        np.asarray(x["scales"]).dtype.newbyteorder("=")).tobytes()
    assert (m.codes.tobytes(), m.scales.tobytes()) == kept
    y = {"x": laid_out(draw, rng.standard_normal((*draw(st.lists(st.integers(0, 3), max_size=2)), K)).astype(
        draw(st.sampled_from(DTYPES))))}
    if draw(st.booleans()) and y["x"].dtype == F32:
        y["out"] = np.zeros((*y["x"].shape[:-1], N), np.float32)
    may_fail = draw(st.booleans()) and bool(spoiled(draw, y, ["x", "out"]))
    wanted = plain(y["x"])

    def product(x, out=None, isa=None):
        return m.matmul(x, out)

    result = outcome(product, y, may_fail, None)
    if result is not None:
        with np.errstate(all="ignore"):
            want = reference.quantized_matmul(wanted, m.codes, m.scales, m.bits)
        finite = np.abs(want[np.isfinite(want)]).max(initial=0)
        assert near(result, in_dtype(want, result.dtype), max(1, finite) * {
            F32: 1e-5, F16: 2.0**-10, BF16: 2.0**-7}[result.dtype])


def spaced_codes(codes):
    y = np.zeros((*codes.shape[:-1], 2 * codes.shape[-1]), codes.dtype)[..., ::2]
    y[...] = codes
    return y


@search(60)
@given(data=st.data())
def test_quantize_and_gguf(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    N, K = draw(st.integers(1, 20)), draw(st.integers(1, 140))
    w = (10.0**draw(st.integers(-8, 6)) * rng.standard_normal((N, K))).astype(np.float32)
    x = {"w": laid_out(draw, w), "bits": draw(st.sampled_from([8, 4])),
         "group_size": draw(st.sampled_from([32, 64, 128]))}
    may_fail = bool(draw(st.booleans()) and spoiled(draw, x, list(x))) or bool(np.abs(w).max() > 4e5)
    isa = draw(isas)
    m = outcome(QuantizedMatrix.quantize, x, may_fail, isa)
    if m is not None:
        steps = np.repeat(m.scales.astype(np.float64), m.group_size, axis=1)[:, :m.shape[1]]
        assert np.all(np.abs(plain(x["w"]) - m.dequantize()) <= steps / 2 * (1 + 1e-6))
    kind = draw(st.sampled_from(["Q8_0", "Q4_0"]))
    groups = -(-K // 32)
    blocks = rng.integers(0, 256, (N, groups * (34 if kind == "Q8_0" else 18))).astype(np.uint8)
    y = {"data": blocks, "shape": (N, 32 * groups), "quantization": kind}
    may_fail = draw(st.booleans()) and bool(spoiled(draw, y, list(y)))
    m = outcome(QuantizedMatrix.from_gguf, y, may_fail, isa)
    if m is not None:
        own = np.asarray(y["data"]).reshape(-1, 34 if m.bits == 8 else 18)
        assert m.scales.tobytes() == np.ascontiguousarray(own[:, :2]).tobytes()
        if m.bits == 8:
            assert m.codes.tobytes() == np.ascontiguousarray(own[:, 2:]).tobytes()


PROPERTIES = {"delta_rule": test_delta_rule, "settle": test_settle, "gradients": test_gradients,
              "cu_seqlens": test_cu_seqlens, "gate_and_l2norm": test_gate_and_l2norm, "convolution": test_convolution,
              "convolution_update": test_convolution_update, "gated_norm": test_gated_norm, "codes": test_codes,
              "quantize_and_gguf": test_quantize_and_gguf}
