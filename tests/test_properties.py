"""What holds for every input, with hypothesis looking for one where it does not: outputs do not see later tokens, a
cut does not show, packed sequences do not see each other, and bits do not depend on the number of threads."""
from itertools import pairwise

import numpy as np
from helpers import BF16, ISAS, make_inputs, same_bits, search
from hypothesis import example, given
from hypothesis import strategies as st

import kda
from kda import reference

FUNCTIONS = [kda.fused_recurrent_kda, kda.chunk_kda]
TOKENS = ("q", "k", "v", "g", "beta")  # what has one row per token
isas = st.sampled_from(ISAS)
functions = st.sampled_from(FUNCTIONS)


@st.composite
def calls(draw, T=(1, 140), sizes=(1, 70), N=None):
    """Arguments of both functions: any gate, from gentle decay to hard resets; T tokens and sizes K, V of these ranges.
    N: packed sequences in one batch row."""
    heads, repeat, K, V = (draw(st.integers(*r)) for r in ((1, 2), (1, 2), sizes, sizes))
    B, T, HV = 1 if N else draw(st.integers(1, 2)), draw(st.integers(*T)), heads * repeat
    seed = draw(st.integers(0, 2**32 - 1))
    x = make_inputs(seed, B, T, heads, HV, K, V, N=N or B)
    x["g"] *= draw(st.sampled_from([0, 1e-3, 1, 20, 1e4]))
    rng = np.random.default_rng(seed)
    if draw(st.booleans()):
        x["g"][rng.random(x["g"].shape) < 0.05] = -np.inf
    if draw(st.booleans()):
        x["g"][rng.random(x["g"].shape[:3]) < 0.05] = -1e6
    x["beta"] *= draw(st.sampled_from([1, 2]))
    x |= {"scale": 1.0, "output_final_state": True, "use_qk_l2norm_in_kernel": draw(st.booleans())}
    if draw(st.booleans()):
        del x["initial_state"]
    return x


def cut(x, start, end, state):
    """The tokens [start, end), from another state."""
    return {n: a[:, start:end] if n in TOKENS else a for n, a in x.items()} | {"initial_state": state}


def close(got, want, tolerance=2e-6):
    """Within `tolerance` of the largest value, or of 1: what has been forgotten, or has cancelled, is not large."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return got.shape == want.shape and np.all(np.abs(got - want) <= tolerance * max(1, np.max(np.abs(want), initial=0)))


@search(60)
@given(x=calls(), data=st.data(), function=functions, isa=isas)
def test_outputs_do_not_see_later_tokens(x, data, function, isa):
    """To the bit: other later tokens, NaN among them, or none at all."""
    T = x["v"].shape[1]
    seen = data.draw(st.integers(0, T))
    want = function(**x, isa=isa)[0][:, :seen].copy()
    later = x | {n: x[n].copy() for n in TOKENS}
    for n in data.draw(st.sets(st.sampled_from(TOKENS), min_size=1)):
        later[n][:, seen:] = data.draw(st.sampled_from([np.nan, -3.0, -np.inf]))
    assert same_bits(function(**later, isa=isa)[0][:, :seen].copy(), want)
    assert same_bits(function(**cut(x, 0, seen, x.get("initial_state")), isa=isa)[0], want)


@search(60)
@given(x=calls(), data=st.data(), isa=isas)
def test_a_cut_does_not_show(x, data, isa):
    """Cut anywhere, each piece through either function."""
    T = x["v"].shape[1]
    o, state = data.draw(functions)(**x, isa=isa)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, T), max_size=3))), T]
    pieces, passed_on = [], x.get("initial_state")
    for start, end in pairwise(cuts):
        piece, passed_on = data.draw(functions)(**cut(x, start, end, passed_on), isa=isa)
        pieces.append(piece)
    assert close(np.concatenate(pieces, axis=1), o)
    assert close(passed_on, state)


@st.composite
def packed(draw):
    """(arguments, cu_seqlens) of one to four sequences, empty ones among them."""
    T = draw(st.integers(1, 100))
    cu = [0, *sorted(draw(st.lists(st.integers(0, T), max_size=3))), T]
    return draw(calls(T=(T, T), N=len(cu) - 1)), cu


@search(60)
@given(xs=packed(), data=st.data(), function=functions, isa=isas)
def test_packed_sequences_do_not_see_each_other(xs, data, function, isa):
    """Each has the bits of its own run, also when another one is full of NaN."""
    x, cu = xs
    ill = data.draw(st.integers(0, len(cu) - 2))
    for n in data.draw(st.sets(st.sampled_from([*TOKENS, "initial_state"]))) & x.keys():
        if n == "initial_state":
            x[n][ill] = np.nan
        else:
            x[n][:, cu[ill]:cu[ill + 1]] = np.nan
    o, state = function(**x, cu_seqlens=cu, isa=isa)
    for n, (start, end) in enumerate(pairwise(cu)):
        own = x["initial_state"][n:n + 1] if "initial_state" in x else None
        solo_o, solo_state = function(**cut(x, start, end, own), isa=isa)
        assert n == ill or (np.isfinite(solo_o).all() and np.isfinite(solo_state).all())
        assert np.array_equal(o[:, start:end], solo_o, equal_nan=True)
        assert np.array_equal(state[n:n + 1], solo_state, equal_nan=True)


def on_threads(counts, call):
    """call() on each number of threads."""
    before = kda.get_num_threads()
    try:
        for n in counts:
            kda.set_num_threads(n)
            yield call()
    finally:
        kda.set_num_threads(before)


def two_heads():
    return make_inputs(1, 1, 60, 2, 2, 100, 131, N=1) | {"output_final_state": True}


# Large enough that each of seven threads has its share; fewer heads than threads, so that columns are split.
@search(20)
@given(x=calls(T=(40, 80), sizes=(110, 131), N=1), function=functions, isa=isas)
@example(x=two_heads(), function=kda.chunk_kda, isa=ISAS[0])
@example(x=two_heads(), function=kda.fused_recurrent_kda, isa=ISAS[0])
@example(x=two_heads(), function=kda.chunk_kda, isa="scalar")
def test_bits_do_not_depend_on_threads(x, function, isa):
    (o, state), *others = on_threads((1, 2, 3, 7), lambda: function(**x, isa=isa))
    for other_o, other_state in others:
        assert same_bits(other_o, o)
        assert same_bits(other_state, state)


# ---- the epilogues ----

@st.composite
def convolutions(draw, T=(0, 30), D=(1, 40), dtypes=(np.float32, np.float16, BF16)):
    """Arguments of causal_conv1d with any kernel width, packed or not; its state has W - 1 or W columns. T and D are
    of these ranges."""
    W, T, D = (draw(st.integers(*r)) for r in ((1, 8), T, D))
    cu = [0, *sorted(draw(st.lists(st.integers(0, T), max_size=3))), T] if draw(st.booleans()) else None
    B = draw(st.integers(1, 3)) if cu is None else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    past = rng.standard_normal((B if cu is None else len(cu) - 1, D, W)).astype(np.float32)
    past[:, :, 0] = np.nan  # the first of W columns is never read
    return {"x": rng.standard_normal((B, T, D)).astype(draw(st.sampled_from(dtypes))),
            "weight": rng.standard_normal((D, W)).astype(np.float32),
            "bias": rng.standard_normal(D).astype(np.float32) if draw(st.booleans()) else None,
            "activation": draw(st.sampled_from(["silu", "swish", None])), "output_final_state": True,
            "initial_state": draw(st.sampled_from([None, past, past[:, :, 1:]])), "cu_seqlens": cu}


@search(60)
@given(x=convolutions(dtypes=[np.float32]), isa=isas)
def test_convolution(x, isa):
    y, state = kda.causal_conv1d(**x, isa=isa)
    want, want_state = reference.causal_conv1d(**x)
    assert close(y, want)
    assert np.array_equal(state, want_state)


@search(60)
@given(x=convolutions(), data=st.data(), isa=isas)
def test_decoding_goes_on_where_a_convolution_ended(x, data, isa):
    """Prefill of any number of tokens, 0 to 3 among them, then one by one: the numbers of one pass."""
    x["cu_seqlens"] = None
    B, T, D = x["x"].shape
    W, dtype = x["weight"].shape[1], x["x"].dtype
    if x["initial_state"] is not None:
        x["initial_state"] = np.broadcast_to(x["initial_state"][:1], (B, D, x["initial_state"].shape[2]))
    want, want_state = kda.causal_conv1d(**x, isa=isa)
    done = data.draw(st.integers(0, min(T, 4)))
    y, state = kda.causal_conv1d(**x | {"x": x["x"][:, :done]}, isa=isa)
    assert same_bits(y, want[:, :done].copy())
    if data.draw(st.booleans()):  # W columns
        state = np.concatenate([np.full((B, D, 1), np.nan, np.float32), state], axis=2)
    if data.draw(st.booleans()):  # in other strides
        state = np.asfortranarray(state)
    for t in range(done, T):
        y = kda.causal_conv1d_update(x["x"][:, t], state, x["weight"], x["bias"], x["activation"], isa=isa)
        ulp = {2: 2.0**-7 if dtype == BF16 else 2.0**-10, 4: 1e-6}[dtype.itemsize]  # of a sum in another order
        assert close(y, want[:, t], ulp)
    assert np.array_equal(state[:, :, state.shape[2] - (W - 1):], want_state)


@search(60)
@given(x=convolutions(), data=st.data(), isa=isas)
def test_a_convolution_is_causal_and_its_sequences_are_apart(x, data, isa):
    y, state = kda.causal_conv1d(**x, isa=isa)
    B, T, _ = x["x"].shape
    cu = x["cu_seqlens"]
    ill = data.draw(st.integers(0, (B if cu is None else len(cu) - 1) - 1))
    row, start, end = (ill, 0, T) if cu is None else (0, cu[ill], cu[ill + 1])
    seen = data.draw(st.integers(start, end))
    other = x["x"].copy()
    other[row, seen:end] = np.nan
    changed, changed_state = kda.causal_conv1d(**x | {"x": other}, isa=isa)
    assert np.isnan(changed[row, seen:end].astype(np.float32)).all()
    changed[row, seen:end] = y[row, seen:end]
    assert same_bits(changed, y)
    changed_state[ill] = state[ill]
    assert same_bits(changed_state, state)


@search(20)
@given(x=convolutions(T=(40, 90), D=(900, 1400)), isa=isas)
def test_bits_of_the_epilogues_do_not_depend_on_threads(x, isa):
    (y, state), *others = on_threads((1, 2, 3, 7), lambda: kda.causal_conv1d(**x, isa=isa))
    for other, other_state in others:
        assert same_bits(other, y)
        assert same_bits(other_state, state)
    y, *others = on_threads((1, 2, 3, 7), lambda: kda.rms_norm_gated(y, x["x"], x["weight"][:, 0], isa=isa))
    assert all(same_bits(other, y) for other in others)
