"""chunk_kda: the numbers of the recurrence, in blocks."""
import functools

import numpy as np
import pytest
from helpers import make_inputs, relative_error, same_bits
from test_decode import OPTIONS, hard, with_options
from test_golden import FILES, NAMES, stored

import kda
from kda import reference


@pytest.mark.parametrize("name", NAMES)
def test_stored_results(isa, name):
    arguments, _, _ = stored(name)
    with np.load(FILES[name]) as file:
        want_o, want_state = file["o_chunk"], file["s_chunk"]
    o, state = kda.chunk_kda(**arguments, isa=isa)
    assert relative_error(o, want_o) <= 5e-6  # of two float32 results that sum in different orders
    assert relative_error(state, want_state) <= 5e-6
    exact_o, exact_state = reference.fused_recurrent_kda(**arguments)
    assert relative_error(o, exact_o) <= 2e-6
    assert relative_error(state, exact_state) <= 2e-6


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 33, 64, 65])
def test_any_number_of_tokens(isa, T):
    x = make_inputs(T, 2, T, 1, 2, 33, 20, N=2)
    want_o, want_state = reference.fused_recurrent_kda(**x, output_final_state=True)
    o, state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 2e-6
    assert relative_error(state, want_state) <= 2e-6


@pytest.mark.parametrize("name", OPTIONS)
def test_options(isa, name):
    x = with_options(name, T=37)
    want_o, want_state = reference.fused_recurrent_kda(**x)
    o, state = kda.chunk_kda(**x, isa=isa)
    assert relative_error(o, want_o) <= 2e-6
    assert relative_error(state, want_state) <= 2e-6


@pytest.mark.parametrize("name", [
    "g=-1e3", "g=-1e5", "g=-1e6", "g=-inf", "one channel resets", "identical keys 0.98", "identical keys 1",
    "identical keys 2", "beta up to 2", "steep"])
def test_hard_inputs(isa, name):
    """What overflows, cancels or explodes in the textbook form of the chunk."""
    x = hard(name)
    want_o, want_state = reference.fused_recurrent_kda(**x, output_final_state=True)
    o, state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


GATES = {
    **{f"constant {g}": g for g in (-1, -3, -5, -20, -160)},
    **{f"uniform {g}": g for g in (-1, -3, -5, -20, -160)},
    **{f"once {g}, at {t}": g for g in (-1e3, -1e5, -1e6, -np.inf) for t in (0, 5, 63, 64)},
}


@functools.lru_cache(1)  # the ISAs of one gate follow each other
def gated(name):
    """130 tokens under one of GATES, and their exact results. A gate that comes once is of all channels, and the
    others are -0.01: a cumulative sum would have forgotten them."""
    x = make_inputs(12, 1, 130, 2, 2, 64, 48, N=1)
    if name.startswith("once"):
        x["g"][:] = -0.01
        x["g"][:, int(name.split()[-1])] = GATES[name]
    elif name.startswith("constant"):
        x["g"][:] = GATES[name]
    else:
        x["g"] *= -2 * GATES[name]  # from uniform in (-0.5, 0)
    return x, reference.fused_recurrent_kda(**x, output_final_state=True)


@pytest.mark.parametrize("name", GATES)
def test_any_gate(isa, name):
    x, (want_o, want_state) = gated(name)
    o, state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


@functools.lru_cache(1)
def identical_keys():
    x = make_inputs(13, 1, 256, 1, 2, 64, 48, N=1)
    x["k"][:] = x["k"][:, :1]
    x["g"][:] = 0
    x["beta"][:] = 0.98
    return x, reference.fused_recurrent_kda(**x, output_final_state=True)


def test_256_identical_keys(isa):
    """The inverse of the triangle as a Neumann series is off by 1e10 here."""
    x, (want_o, want_state) = identical_keys()
    o, state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


@pytest.mark.parametrize("same_key", [False, True])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 256])
def test_beta_one_stores_the_value(isa, T, same_key):
    """With beta = 1 and keys of length 1, S^T k is the last value, whatever the state held."""
    x = make_inputs(14, 1, T, 2, 2, 64, 48, N=1)
    x["beta"][:] = 1
    if same_key:
        x["k"][:] = x["k"][:, :1]
        x["g"][:] = 0
    _, state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    recalled = np.einsum("hkv,hk->hv", state[0].astype(np.float64), x["k"][0, -1].astype(np.float64))
    assert relative_error(recalled, x["v"][0, -1]) <= 1e-6


# ---- memory around the arrays ----

def in_nan(x, loose):
    """x as a view into memory that is NaN before it, after it and, if `loose`, between its rows, heads and tokens."""
    if loose:
        whole = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
        view = whole[tuple(slice(1, 1 + n) for n in x.shape)]
    else:
        whole = np.full(x.size + 4096, np.nan, x.dtype)
        view = whole[37:37 + x.size].reshape(x.shape)
    view[...] = x
    return view


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 129])
def test_nothing_outside_the_arrays_is_read_or_written(isa, T, loose):
    """What follows the last token is NaN and does not leak; what surrounds the results keeps its value."""
    x = make_inputs(T, 2, T, 1, 2, 33, 21, N=2)
    want_o, want_state = reference.fused_recurrent_kda(**x, output_final_state=True)
    views = {n: in_nan(a, loose) for n, a in x.items()}
    if loose:  # heads of a state must be contiguous to be written, so they lie in a pool
        pool = np.full((4, 5, 33, 21), 7, np.float32)
        state, o_memory = pool[1:3, 2:4], np.full((4, T + 2, 4, 40), 7, np.float32)
        o = o_memory[1:3, 1:T + 1, 1:3, 9:30]
    else:
        pool, o_memory = np.full(4 * 33 * 21 + 200, 7, np.float32), np.full(2 * T * 2 * 21 + 200, 7, np.float32)
        state, o = pool[100:-100].reshape(2, 2, 33, 21), o_memory[100:-100].reshape(2, T, 2, 21)
    kda.chunk_kda(**views, out=o, state_out=state, isa=isa)
    assert relative_error(o, want_o) <= 2e-6
    assert relative_error(state, want_state) <= 2e-6
    plain_o, plain_state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    assert same_bits(o.copy(), plain_o)
    assert same_bits(state.copy(), plain_state)
    o[...] = state[...] = 7
    assert (o_memory == 7).all()
    assert (pool == 7).all()
    for n, a in x.items():
        assert same_bits(np.ascontiguousarray(views[n]), a)


def test_state_out_in_a_reversed_pool(isa):
    """Negative strides between heads and sequences are strides like others."""
    x = make_inputs(15, 2, 20, 1, 2, 12, 20, N=2)
    want = kda.chunk_kda(**x, output_final_state=True, isa=isa)[1]
    pool = np.full((2, 2, 12, 20), 7, np.float32)[::-1, ::-1]
    pool[:] = x["initial_state"]
    assert kda.chunk_kda(**x | {"initial_state": pool}, state_out=pool, isa=isa)[1] is pool
    assert same_bits(np.ascontiguousarray(pool), want)
    # a pool in another order, all at one address: initial state and result at once, or not at all
    other = np.full((2, 2, 12, 20), 7, np.float32)
    with pytest.raises(ValueError, match=r"state_out: .*(overlaps initial_state|stride)"):
        kda.chunk_kda(**x | {"initial_state": other}, state_out=other[::-1], isa=isa)
    assert (other == 7).all()


# ---- causality, splits, packing ----

@pytest.mark.parametrize("seen", [1, 7, 16, 17, 40, 49])
def test_outputs_do_not_see_later_tokens(isa, seen):
    """To the bit, whatever the later tokens hold."""
    x = make_inputs(1, 1, 50, 2, 2, 60, 36, N=1)
    o, _ = kda.chunk_kda(**x, isa=isa)
    rng = np.random.default_rng(2)
    for n in ("q", "k", "v", "beta", "g"):
        x[n][:, seen:] = rng.standard_normal(x[n][:, seen:].shape) * 1e3 if n != "g" else -np.inf
    again, _ = kda.chunk_kda(**x, isa=isa)
    assert same_bits(again[:, :seen].copy(), o[:, :seen].copy())
    short, _ = kda.chunk_kda(**{n: a if n == "initial_state" else a[:, :seen] for n, a in x.items()}, isa=isa)
    assert same_bits(short, o[:, :seen].copy())


@pytest.mark.parametrize("cu", [[0, 70], [0, 0, 15, 15, 48, 70, 70], [0, 1, 2, 70]])
def test_packed_sequences_equal_solo_runs(isa, cu):
    N = len(cu) - 1
    x = make_inputs(3, 1, 70, 1, 2, 24, 40, N=N)
    o, state = kda.chunk_kda(**x, cu_seqlens=cu, output_final_state=True, isa=isa)
    for n in range(N):
        start, end = cu[n], cu[n + 1]
        if start == end:
            assert same_bits(state[n], x["initial_state"][n])
            continue
        solo = {name: a[:, start:end] for name, a in x.items() if name != "initial_state"}
        solo_o, solo_state = kda.chunk_kda(**solo, initial_state=x["initial_state"][n:n + 1],
                                           output_final_state=True, isa=isa)
        assert same_bits(o[:, start:end].copy(), solo_o)
        assert same_bits(state[n], solo_state[0])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 20, 33, 64, 67, 100])
def test_intermediate_states(isa, chunk_size, v_first):
    """After every chunk_size whole tokens, and NaN where a sequence is too short for one."""
    x = make_inputs(4, 1, 80, 1, 2, 9, 12, N=3)
    options = {"cu_seqlens": [0, 66, 66, 80], "chunk_size": chunk_size, "return_intermediate_states": True,
               "output_final_state": True}
    if v_first:
        x["initial_state"] = np.ascontiguousarray(x["initial_state"].swapaxes(2, 3))
    _, want_state, want = reference.chunk_kda(**x, **options, state_v_first=v_first)
    _, state, states = kda.chunk_kda(**x, **options, state_v_first=v_first, isa=isa)
    assert states.shape == want.shape == (3, 66 // chunk_size, 2, *((12, 9) if v_first else (9, 12)))
    assert np.array_equal(np.isnan(states), np.isnan(want))
    assert np.isnan(states[1]).all()
    assert relative_error(states[~np.isnan(want)], want[~np.isnan(want)]) <= 2e-6
    assert relative_error(state, want_state) <= 2e-6


@pytest.mark.parametrize("v_first", [False, True])
def test_intermediate_states_of_a_batch(isa, v_first):
    """From zeros; the last one is the final state when T is a multiple, and is memory of its own."""
    x = make_inputs(16, 2, 60, 2, 4, 17, 12)
    options = {"chunk_size": 20, "return_intermediate_states": True, "output_final_state": True,
               "state_v_first": v_first}
    want_o, want_state, want = reference.chunk_kda(**x, **options)
    o, state, states = kda.chunk_kda(**x, **options, isa=isa)
    assert states.shape == (2, 3, 4, *((12, 17) if v_first else (17, 12)))
    assert relative_error(o, want_o) <= 2e-6
    assert relative_error(states, want) <= 2e-6
    assert relative_error(state, want_state) <= 2e-6
    assert same_bits(states[:, 2].copy(), state)
    states[:] = 0
    assert relative_error(state, want_state) <= 2e-6
    assert kda.chunk_kda(**x, **options | {"output_final_state": False}, isa=isa)[1] is None


def test_intermediate_states_of_fewer_tokens_than_the_spacing(isa):
    x = make_inputs(17, 2, 19, 1, 2, 9, 12, N=2)
    want_o, want_state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    for chunk_size in (20, 64, 10**30):
        o, state, states = kda.chunk_kda(**x, output_final_state=True, chunk_size=chunk_size,
                                         return_intermediate_states=True, isa=isa)
        assert states.shape == (2, 0, 2, 9, 12)
        assert same_bits(o, want_o)
        assert same_bits(state, want_state)


def test_chunk_size_changes_nothing_else(isa):
    x = make_inputs(5, 1, 70, 1, 1, 16, 16)
    want, _ = kda.chunk_kda(**x, isa=isa)
    for chunk_size in (1, 32, 128, np.int8(3), 10**30):
        assert same_bits(kda.chunk_kda(**x, chunk_size=chunk_size, isa=isa)[0], want)
    for option in ("safe_gate", "disable_recompute"):  # accepted, and without effect
        assert same_bits(kda.chunk_kda(**x, **{option: True}, isa=isa)[0], want)


def test_in_place_and_out(isa):
    x = make_inputs(6, 2, 40, 1, 2, 33, 20, N=2)
    before = x["initial_state"].copy()
    want_o, want_state = kda.chunk_kda(**x, output_final_state=True, isa=isa)
    assert same_bits(x["initial_state"], before)
    out = np.empty_like(want_o)
    o, state = kda.chunk_kda(**x, out=out, state_out=x["initial_state"], isa=isa)
    assert o is out
    assert state is x["initial_state"]
    assert same_bits(o, want_o)
    assert same_bits(state, want_state)


def test_bits_do_not_depend_on_threads(isa, threads):
    x = make_inputs(7, 1, 50, 1, 1, 129, 131, N=1)
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append(kda.chunk_kda(**x, output_final_state=True, isa=isa))
    for o, state in results[1:]:
        assert same_bits(o, results[0][0])
        assert same_bits(state, results[0][1])


def test_bf16_products(isa):
    """Within 2^-7 of the largest value, and not float32 by another name."""
    x = make_inputs(8, 1, 64, 4, 4, 64, 64, N=1)
    want_o, want_state = reference.fused_recurrent_kda(**x, output_final_state=True)
    o, state = kda.chunk_kda(**x, output_final_state=True, precision="bf16", isa=isa)
    assert 1e-5 < relative_error(o, want_o) <= 2.0**-7
    assert 1e-5 < relative_error(state, want_state) <= 2.0**-7


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"chunk_size": 0}, ValueError, "chunk_size: expected an int >= 1, got 0"),
    ({"chunk_size": 16.0}, ValueError, "chunk_size: expected an int >= 1, got 16.0"),
    ({"chunk_size": np.array([4, 4])}, ValueError, r"chunk_size: expected an int >= 1, got array\(\[4, 4\]\)"),
    ({"chunk_size": None}, ValueError, "chunk_size: expected an int >= 1, got None"),
    ({"chunk_size": True}, ValueError, "chunk_size: expected an int >= 1, got True"),
    ({"precision": "int8"}, ValueError, "precision: expected 'float32' or 'bf16', got 'int8'"),
    ({"beta": np.ones((1, 4, 2), np.float64)}, TypeError, r"beta: .*got float64 \[1, 4, 2\]"),
    ({"lower_bound": 0.0, "use_gate_in_kernel": True}, ValueError, "lower_bound: expected a finite float32 below 0"),
])
def test_bad_input(change, error, message):
    x = make_inputs(9, 1, 4, 1, 2, 8, 8)
    with pytest.raises(error, match=message):
        kda.chunk_kda(**x | change)
