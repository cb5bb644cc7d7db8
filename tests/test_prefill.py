"""chunk_kda: the numbers of the recurrence, in blocks."""
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
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
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


def test_chunk_size_changes_nothing_else(isa):
    x = make_inputs(5, 1, 70, 1, 1, 16, 16)
    want, _ = kda.chunk_kda(**x, isa=isa)
    for chunk_size in (1, 32, 128, np.int8(3), 10**30):
        assert same_bits(kda.chunk_kda(**x, chunk_size=chunk_size, isa=isa)[0], want)


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
