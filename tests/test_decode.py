"""fused_recurrent_kda, fused_kda_gate and l2norm: the numbers, from worked examples to hard inputs."""
import functools
from itertools import pairwise

import numpy as np
import pytest
from helpers import BF16, ISAS, make_inputs, relative_error, same_bits, widened

import kda
from kda import reference

HALVES = [np.float16, BF16]


# ---- by hand ----

def test_the_worked_example(isa):
    """H=1, K=2, V=1, S=[[1],[1]], k=q=(1,0), v=0, beta=1, decay (1/2, 1): decay first, then the update, then o."""
    e0 = np.array([1, 0], np.float32).reshape(1, 1, 1, 2)
    o, state = kda.fused_recurrent_kda(
        e0, e0, np.zeros((1, 1, 1, 1), np.float32), np.log(np.array([0.5, 1], np.float32)).reshape(1, 1, 1, 2),
        np.ones((1, 1, 1), np.float32), scale=1.0, initial_state=np.ones((1, 1, 2, 1), np.float32),
        output_final_state=True, isa=isa)
    assert np.abs(state - [[[[0], [1]]]]).max() <= 6e-8  # log(1/2) itself is rounded
    assert np.abs(o).max() <= 6e-8


def test_the_output_sees_its_own_token(isa):
    """From a zero state with k = q = e0: S = e0 beta v, and o = scale beta v, in the same token."""
    e0 = np.array([1, 0, 0], np.float32).reshape(1, 1, 1, 3)
    v = np.array([3, -4], np.float32).reshape(1, 1, 1, 2)
    o, state = kda.fused_recurrent_kda(e0, e0, v, np.full_like(e0, -7), np.full((1, 1, 1), 0.5, np.float32), scale=2.0,
                                       output_final_state=True, isa=isa)
    assert o.ravel().tolist() == [3, -4]
    assert state.tolist() == [[[[1.5, -2], [0, 0], [0, 0]]]]


def test_default_scale_is_of_K(isa):
    x = make_inputs(1, 1, 1, 1, 1, 16, 9)
    x["k"] = x["q"] = np.eye(16, dtype=np.float32)[:1].reshape(1, 1, 1, 16)
    x["beta"][:] = 1
    o, _ = kda.fused_recurrent_kda(**x, isa=isa)
    assert same_bits(o, x["v"] * np.float32(0.25))  # 16 ** -0.5; V would give 1/3


def test_gate_known_values(isa):
    zero = np.zeros((1, 1), np.float32)
    softplus = kda.fused_kda_gate(zero, np.zeros(1, np.float32), np.zeros(1, np.float32), isa=isa)
    assert abs(softplus.item() + 0.6931472) <= 6e-8
    assert kda.fused_kda_gate(zero, np.zeros(1, np.float32), None, -5.0, isa=isa).item() == -2.5
    assert kda.fused_kda_gate(zero, None, None, -5.0, isa=isa).item() == -2.5
    tiny = kda.fused_kda_gate(np.full((1, 1), -40, np.float32), np.zeros(1, np.float32), isa=isa).item()
    assert abs(tiny / -4.248354e-18 - 1) <= 1e-6
    assert kda.fused_kda_gate(np.full((1, 1), 50, np.float32), np.zeros(1, np.float32), isa=isa).item() == -50


def test_gate_multiplies_inside_the_sigmoid_and_per_head(isa):
    """Two heads, exp(A_log) = 1 and 4, z = 0.5: -5 sigmoid(0.5) and -5 sigmoid(2); dt_bias is head-major."""
    A_log = np.log(np.array([1, 4], np.float32))
    got = kda.fused_kda_gate(np.full((1, 1, 2, 3), 0.5, np.float32), A_log, None, -5.0, isa=isa)
    assert np.abs(got[0, 0, 0] - -3.1122967).max() <= 5e-7
    assert np.abs(got[0, 0, 1] - -4.4039854).max() <= 5e-7
    bias = np.array([0, 0, 0, 1, 2, 3], np.float32)
    got = kda.fused_kda_gate(np.zeros((1, 2, 3), np.float32), None, bias, -5.0, isa=isa)
    assert got[0, 0].tolist() == [-2.5, -2.5, -2.5]
    assert np.abs(got[0, 1] - [-3.6552929, -4.4039854, -4.7628706]).max() <= 5e-7


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_extremes_stay_finite(isa, lower_bound):
    z = np.array([-100, -88, -20, -1e-3, 0, 1e-3, 20, 88, 100], np.float32).reshape(1, 1, 9)
    for A_log in (-20, 20):
        A_log = np.full(1, A_log, np.float32)
        got = kda.fused_kda_gate(z, A_log, None, lower_bound, isa=isa)
        want = reference.fused_kda_gate(z, A_log, None, lower_bound)
        assert np.isfinite(got).all()
        assert (got <= 0).all()
        # exp(A_log) in float32 is rounded, which moves a product of it by as many parts of itself
        allowed = 1e-6 if lower_bound is None else 5e-6
        assert (np.abs(got - want) <= allowed * np.abs(want) + 1e-45 * np.exp(20)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_gate_is_float32_whatever_comes_in(isa, dtype):
    g = np.random.default_rng(0).standard_normal((2, 3, 2, 5)).astype(dtype)
    A_log = np.array([0.5, 1], np.float32)
    got = kda.fused_kda_gate(g, A_log, isa=isa)
    assert same_bits(got, kda.fused_kda_gate(g.astype(np.float32), A_log, isa=isa))


def test_l2norm(isa):
    x = np.random.default_rng(0).standard_normal((2, 3, 60)).astype(np.float32)
    assert relative_error(kda.l2norm(x, isa=isa), reference.l2norm(x)) <= 3e-7
    # eps is added to the sum: 16 squares of 2^-10 sum to 2^-16; with eps as large the norm is 2^-7.5
    small = np.full(16, 2.0**-10, np.float32)
    assert np.abs(kda.l2norm(small, 2.0**-16, isa=isa) - 2.0**-2.5).max() <= 3e-8
    assert kda.l2norm(np.zeros(7, np.float32), isa=isa).tolist() == [0] * 7
    for dtype in HALVES:
        half = x.astype(dtype)
        assert same_bits(kda.l2norm(half, isa=isa), kda.l2norm(half.astype(np.float32), isa=isa).astype(dtype))


# ---- against float64 ----

@functools.cache
def plan_reference(seed):
    return reference.fused_recurrent_kda(**make_inputs(seed, 1, 64, 32, 32, 128, 128), output_final_state=True)


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_on_the_plans_inputs(isa, seed):
    """T=64, 32 heads of 128 x 128, gentle decay: as good as the best float32 implementation known."""
    want_o, want_state = plan_reference(seed)
    o, state = kda.fused_recurrent_kda(**make_inputs(seed, 1, 64, 32, 32, 128, 128), output_final_state=True, isa=isa)
    assert np.abs(o - want_o).max() <= 4.1e-8
    assert np.abs(state - want_state).max() <= 1.8e-7


def hard(name):
    """(q, k, v, g, beta, initial state) that break chunked and careless implementations."""
    x = make_inputs(7, 1, 200, 2, 2, 32, 24, N=1)
    if name.startswith("g="):
        x["g"][:] = -0.01
        x["g"][:, 5] = float(name[2:])
    elif name == "one channel resets":
        x["g"][:] = -0.01
        x["g"][:, ::9, :, 3] = -np.inf
        x["g"][:, ::7, :, 5] = -1e5
    elif name.startswith("identical keys"):
        x["k"][:] = x["k"][:, :1]
        x["g"][:] = 0
        x["beta"][:] = float(name.split()[-1])
    elif name == "beta up to 2":
        x["beta"] *= 2
    elif name == "steep":
        x["g"] *= 10  # down to -5 a token
    return x


@pytest.mark.parametrize("name", [
    "g=-1e3", "g=-1e5", "g=-1e6", "g=-inf", "one channel resets", "identical keys 0.98", "identical keys 1",
    "identical keys 2", "beta up to 2", "steep"])
def test_hard_inputs(isa, name):
    x = hard(name)
    want_o, want_state = reference.fused_recurrent_kda(**x, output_final_state=True)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


@functools.cache
def long_run():
    """20,000 tokens that forget with time constants from 100 to 100,000 tokens, and their exact results."""
    x = make_inputs(3, 1, 20000, 1, 1, 16, 16)
    x["g"][:] = -np.geomspace(1e-5, 1e-2, 16).astype(np.float32)
    return x, reference.fused_recurrent_kda(**x, output_final_state=True)


@pytest.mark.slow
def test_many_tokens_of_slow_decay(isa):
    x, (want_o, want_state) = long_run()
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


def test_a_hard_reset_forgets_everything(isa):
    """After g = -inf in every channel the past is gone: the rest equals a run from zeros, bit for bit."""
    x = make_inputs(2, 1, 12, 2, 2, 33, 17, N=1)
    x["g"][:, 5] = -np.inf
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    rest = {name: a[:, 5:] for name, a in x.items() if name != "initial_state"}
    rest_o, rest_state = kda.fused_recurrent_kda(**rest, output_final_state=True, isa=isa)
    assert np.array_equal(o[:, 5:], rest_o)
    assert np.array_equal(state, rest_state)


def test_beta_one_stores_the_value(isa):
    """With beta = 1 and a key of length 1, S^T k is the last value: whatever was there is replaced."""
    x = make_inputs(4, 1, 50, 2, 2, 64, 48, N=1)
    x["beta"][:] = 1
    _, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    recalled = np.einsum("hkv,hk->hv", state[0].astype(np.float64), x["k"][0, -1].astype(np.float64))
    assert relative_error(recalled, x["v"][0, -1]) <= 2e-6


def test_beta_zero_and_g_zero_keep_the_state(isa):
    x = make_inputs(5, 2, 9, 2, 4, 33, 60, N=2)
    x["beta"][:] = 0
    x["g"][:] = 0
    _, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    assert same_bits(state, x["initial_state"])


# ---- options ----

OPTIONS = {
    "plain": {},
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "scale": {"scale": 0.3},
    "softplus gate": {"use_gate_in_kernel": True, "A_log": True},
    "softplus gate, bias": {"use_gate_in_kernel": True, "A_log": True, "dt_bias": True},
    "bounded gate": {"use_gate_in_kernel": True, "A_log": True, "dt_bias": True, "lower_bound": -5.0},
    "bounded gate, no A_log": {"use_gate_in_kernel": True, "dt_bias": True, "lower_bound": -2.0},
    "beta sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "negative eigenvalues": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "everything": {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": True, "dt_bias": True,
                   "lower_bound": -5.0, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
}


def with_options(name, seed=11, B=2, T=7, H=2, HV=4, K=20, V=13, dtype=np.float32, N=2):
    rng = np.random.default_rng(seed)
    options = dict(OPTIONS[name])
    x = make_inputs(seed, B, T, H, HV, K, V, N=N)
    if "use_qk_l2norm_in_kernel" in options:
        x["q"], x["k"] = 3 * x["q"], 5 * x["k"]
    if "use_gate_in_kernel" in options:
        x["g"] = (2 * rng.standard_normal(x["g"].shape)).astype(np.float32)
    if "use_beta_sigmoid_in_kernel" in options:
        x["beta"] = (2 * rng.standard_normal(x["beta"].shape)).astype(np.float32)
    for n in ("q", "k", "v", "g", "beta"):
        x[n] = x[n].astype(dtype)
    if "A_log" in options:
        options["A_log"] = rng.uniform(-1, 2, HV).astype(np.float32)
    if "dt_bias" in options:
        options["dt_bias"] = rng.standard_normal(HV * K).astype(np.float32)
    return x | options | {"output_final_state": True}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(isa, name):
    x = with_options(name)
    want_o, want_state = reference.fused_recurrent_kda(**x)
    o, state = kda.fused_recurrent_kda(**x, isa=isa)
    assert relative_error(o, want_o) <= 1e-6
    assert relative_error(state, want_state) <= 1e-6


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matters(name):
    """What test_options compares would be seen to differ: each option moves the result."""
    x = with_options(name)
    for option in set(OPTIONS[name]) - {"use_gate_in_kernel", "lower_bound", "A_log"}:
        less = {n: v for n, v in x.items() if n != option}
        if option == "use_beta_sigmoid_in_kernel":
            less.pop("allow_neg_eigval", None)
        assert relative_error(kda.fused_recurrent_kda(**less)[0], kda.fused_recurrent_kda(**x)[0]) > 1e-3


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIONS)
def test_halves_are_computed_in_float32(isa, name, dtype):
    """float16 and bfloat16 in: the float32 result of the widened inputs, o rounded once to the dtype of v."""
    x = with_options(name, dtype=dtype)
    wide_o, wide_state = kda.fused_recurrent_kda(**widened(x), isa=isa)
    o, state = kda.fused_recurrent_kda(**x, isa=isa)
    assert same_bits(o, wide_o.astype(dtype))
    assert same_bits(state, wide_state)


def test_dtypes_may_differ(isa):
    x = make_inputs(12, 1, 4, 2, 2, 17, 9, N=1)
    for n, dtype in zip(("q", "k", "v", "g", "beta"), (np.float16, BF16, BF16, np.float32, np.float16), strict=True):
        x[n] = x[n].astype(dtype)
    o, _ = kda.fused_recurrent_kda(**x, isa=isa)
    assert same_bits(o, kda.fused_recurrent_kda(**widened(x), isa=isa)[0].astype(BF16))


def test_value_heads_repeat_in_place(isa):
    """Value head j reads q/k head j // (HV // H): 0 0 0 1 1 1, not 0 1 0 1 0 1."""
    x = make_inputs(13, 2, 5, 2, 6, 12, 10, N=2)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    repeated = x | {"q": np.repeat(x["q"], 3, axis=2), "k": np.repeat(x["k"], 3, axis=2)}
    want_o, want_state = kda.fused_recurrent_kda(**repeated, output_final_state=True, isa=isa)
    assert same_bits(o, want_o)
    assert same_bits(state, want_state)
    tiled = x | {"q": np.tile(x["q"], (1, 1, 3, 1)), "k": np.tile(x["k"], (1, 1, 3, 1))}
    assert relative_error(kda.fused_recurrent_kda(**tiled, isa=isa)[0], o) > 0.1


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 40), (40, 1), (5, 130), (130, 5), (33, 47), (256, 8), (8, 300)])
def test_any_K_and_V(isa, K, V):
    x = make_inputs(14, 2, 6, 1, 2, K, V, N=2)
    want_o, want_state = reference.fused_recurrent_kda(**x, output_final_state=True)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    assert relative_error(o, want_o) <= 1e-6
    assert relative_error(state, want_state) <= 1e-6


@pytest.mark.parametrize(("K", "V"), [(12, 12), (12, 7), (7, 12)])
def test_state_v_first(isa, K, V):
    """[N, HV, V, K] in and out is the transpose of [N, HV, K, V], of asymmetric states too when K == V."""
    x = make_inputs(15, 2, 5, 1, 2, K, V, N=2)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    x["initial_state"] = np.ascontiguousarray(x["initial_state"].swapaxes(2, 3))
    v_o, v_state = kda.fused_recurrent_kda(**x, output_final_state=True, state_v_first=True, isa=isa)
    assert v_state.shape == (2, 2, V, K)
    assert same_bits(v_o, o)
    assert same_bits(v_state, np.ascontiguousarray(state.swapaxes(2, 3)))
    assert relative_error(state, reference.fused_recurrent_kda(
        **x, output_final_state=True, state_v_first=True)[1].swapaxes(2, 3)) <= 1e-6
    if K == V:  # and the other reading would be another result
        assert relative_error(kda.fused_recurrent_kda(**x, isa=isa)[0], o) > 0.01


def test_no_final_state_unless_asked(isa):
    x = make_inputs(16, 1, 3, 1, 1, 4, 4)
    o, state = kda.fused_recurrent_kda(**x, isa=isa)
    assert state is None
    assert o.dtype == np.float32
    assert o.flags.c_contiguous


def test_no_initial_state_is_zeros(isa):
    x = make_inputs(16, 2, 3, 1, 2, 20, 12)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    zeros = np.zeros((2, 2, 20, 12), np.float32)
    zero_o, zero_state = kda.fused_recurrent_kda(**x, initial_state=zeros, output_final_state=True, isa=isa)
    assert same_bits(o, zero_o)
    assert same_bits(state, zero_state)


# ---- batches and sequences ----

def test_batch_rows_equal_solo_runs(isa):
    x = make_inputs(17, 3, 6, 1, 2, 33, 20, N=3)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    for b in range(3):
        solo_o, solo_state = kda.fused_recurrent_kda(**{n: a[b:b + 1] for n, a in x.items()}, output_final_state=True,
                                                     isa=isa)
        assert same_bits(o[b:b + 1], solo_o)
        assert same_bits(state[b:b + 1], solo_state)


@pytest.mark.parametrize("cu", [[0, 20], [0, 1, 20], [0, 0, 3, 3, 3, 19, 20, 20], [0, 7, 7, 20]])
def test_packed_sequences_equal_solo_runs(isa, cu):
    N = len(cu) - 1
    x = make_inputs(18, 1, 20, 1, 2, 17, 33, N=N)
    o, state = kda.fused_recurrent_kda(**x, cu_seqlens=cu, output_final_state=True, isa=isa)
    want_o, want_state = reference.fused_recurrent_kda(**x, cu_seqlens=cu, output_final_state=True)
    assert relative_error(o, want_o) <= 1e-6
    assert relative_error(state, want_state) <= 1e-6
    for n, (start, end) in enumerate(pairwise(cu)):
        if start == end:
            assert same_bits(state[n], x["initial_state"][n])
            continue
        solo = {name: a[:, start:end] for name, a in x.items() if name != "initial_state"}
        solo_o, solo_state = kda.fused_recurrent_kda(**solo, initial_state=x["initial_state"][n:n + 1],
                                                     output_final_state=True, isa=isa)
        assert same_bits(o[:, start:end], solo_o)
        assert same_bits(state[n], solo_state[0])


def test_empty_sequences_keep_odd_states_bit_for_bit(isa):
    """NaN payloads, infinities, -0 and subnormals of an empty sequence's state come out as they went in."""
    x = make_inputs(19, 1, 4, 1, 1, 4, 4, N=3)
    odd = np.array([0x7fc12345, 0xffa00001, 0x80000000, 0x00000001, 0x7f800000, 0xff800000] * 2 + [3, 4, 5, 6],
                   np.uint32).view(np.float32).reshape(4, 4)
    x["initial_state"][0] = x["initial_state"][2] = odd
    o, state = kda.fused_recurrent_kda(**x, cu_seqlens=[0, 0, 4, 4], output_final_state=True, isa=isa)
    assert state[0].tobytes() == odd.tobytes()
    assert state[2].tobytes() == odd.tobytes()
    assert np.isfinite(o).all()


def test_empty_sequences_without_a_state_get_zeros(isa):
    x = make_inputs(19, 1, 4, 1, 1, 5, 3)
    _, state = kda.fused_recurrent_kda(**x, cu_seqlens=[0, 0, 4, 4], output_final_state=True, isa=isa)
    assert same_bits(state[0], np.zeros((1, 5, 3), np.float32))
    assert same_bits(state[2], np.zeros((1, 5, 3), np.float32))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, ">i4"])
def test_cu_seqlens_of_any_integer_dtype(isa, dtype):
    x = make_inputs(20, 1, 6, 1, 1, 8, 8)
    want = kda.fused_recurrent_kda(**x, cu_seqlens=[0, 2, 6], isa=isa)[0]
    cu = np.array([0, 2, 6], dtype)
    odd = np.zeros(cu.nbytes + 1, np.uint8)[1:].view(dtype)
    odd[:] = cu
    for same in (cu, np.repeat(cu, 2)[::2], odd):
        assert same_bits(kda.fused_recurrent_kda(**x, cu_seqlens=same, isa=isa)[0], want)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", ["q", "k", "v", "g", "beta", "initial_state"])
def test_nan_stays_in_its_sequence(isa, where, packed):
    N = 3
    x = make_inputs(21, 1 if packed else N, 9 if packed else 3, 1, 2, 17, 20, N=N)
    options = {"cu_seqlens": [0, 3, 6, 9]} if packed else {}
    clean_o, clean_state = kda.fused_recurrent_kda(**x, **options, output_final_state=True, isa=isa)
    x[where] = x[where].copy()
    middle = (0, slice(3, 6)) if packed and where != "initial_state" else (1,)
    x[where][middle] = np.nan
    o, state = kda.fused_recurrent_kda(**x, **options, output_final_state=True, isa=isa)
    o, clean_o = o.reshape(N, 3, 2, 20), clean_o.reshape(N, 3, 2, 20)
    for n in (0, 2):
        assert same_bits(o[n], clean_o[n])
        assert same_bits(state[n], clean_state[n])
    assert np.isnan(o[1]).all()
    if where != "q":  # the state does not depend on q
        assert np.isnan(state[1]).all()


def test_nan_does_not_reach_back_in_time(isa):
    x = make_inputs(22, 1, 8, 1, 1, 16, 16)
    clean = kda.fused_recurrent_kda(**x, isa=isa)[0]
    x["v"][0, 5, 0, 3] = np.nan
    o = kda.fused_recurrent_kda(**x, isa=isa)[0]
    assert same_bits(o[:, :5], clean[:, :5])
    assert np.isnan(o[0, 5:, 0, 3]).all()
    assert np.isfinite(np.delete(o, 3, axis=3)).all()  # columns are independent


@pytest.mark.parametrize("cut", range(9))
def test_split_anywhere_and_go_on(isa, cut):
    """Two calls with the state handed on give the bits of one call."""
    x = make_inputs(23, 2, 8, 1, 2, 33, 17, N=2)
    o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    first = {n: a if n == "initial_state" else a[:, :cut] for n, a in x.items()}
    second = {n: a if n == "initial_state" else a[:, cut:] for n, a in x.items()}
    o1, middle = kda.fused_recurrent_kda(**first, output_final_state=True, isa=isa)
    o2, end = kda.fused_recurrent_kda(**second | {"initial_state": middle}, output_final_state=True, isa=isa)
    assert same_bits(np.concatenate([o1, o2], axis=1), o)
    assert same_bits(end, state)


# ---- where results go ----

@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize(("N", "H", "HV", "K", "V"), [(1, 2, 4, 128, 128), (2, 1, 1, 33, 17), (3, 1, 3, 8, 1)])
def test_updates_left_to_the_next_call(isa, N, H, HV, K, V, T, in_place):
    """With `pending`, calls give the bits that they give without, and so does the state once it is settled."""
    state = make_inputs(0, N, 1, H, HV, K, V, N)["initial_state"]
    plain, pending = state.copy(), kda.no_updates(state)
    assert pending.shape == (N, HV, 2 * K + V)
    for call in range(3):
        x = make_inputs(call, N, T, H, HV, K, V)
        want, _ = kda.fused_recurrent_kda(**x, initial_state=plain, state_out=plain, isa=isa)
        target = state if in_place else np.full_like(state, np.nan)
        got, returned = kda.fused_recurrent_kda(**x, initial_state=state, state_out=target, pending=pending, isa=isa)
        assert returned is target
        assert same_bits(got, want)
        assert not np.array_equal(target, plain)  # it lacks the last update
        state = target
    last = state.copy(), pending.copy()
    empty = make_inputs(0, N, 0, H, HV, K, V)
    kda.fused_recurrent_kda(**empty, initial_state=state, state_out=state, pending=pending, isa=isa)
    assert same_bits(state, last[0])
    assert same_bits(pending, last[1])
    kda.settle(state, pending, isa=isa)
    assert same_bits(state, plain)
    assert same_bits(pending, kda.no_updates(state))


def test_settle_by_hand(isa):
    """S = [[1, 2], [3, 4]], decay (1/2, 0), k = (2, 1), d = (10, 20)."""
    state = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 2, 2)
    pending = kda.no_updates(state)
    assert pending.ravel().tolist() == [1, 1, 0, 0, 0, 0]
    kda.settle(state, pending, isa=isa)
    assert state.ravel().tolist() == [1, 2, 3, 4]
    pending[0, 0] = [0.5, 0, 2, 1, 10, 20]
    kda.settle(state, pending, isa=isa)
    assert state.ravel().tolist() == [20.5, 41, 10, 20]
    assert pending.ravel().tolist() == [1, 1, 0, 0, 0, 0]


def test_updates_that_cannot_be_left():
    x = make_inputs(0, 2, 1, 1, 2, 8, 4, 2)
    state, pending = x["initial_state"], kda.no_updates(x["initial_state"])
    before, memory = state.copy(), np.zeros(96, np.float32)
    for error, message, change in [
            (ValueError, "out: overlaps pending", {"pending": memory[:80].reshape(2, 2, 20),
                                                   "out": memory[79:95].reshape(2, 1, 2, 4)}),
            (ValueError, "pending: a state that is returned lacks nothing; pass state_out too", {"state_out": None}),
            (ValueError, r"pending: expected float32 \[2, 2, 20\], got float32 \[2, 2, 19\]",
             {"pending": pending[..., :19]}),
            (ValueError, "pending: expected float32 .*, got float64", {"pending": pending.astype(np.float64)}),
            (ValueError, "pending: axis 1 has a stride", {"pending": np.ones((2, 4, 20), np.float32)[:, ::2]}),
            (ValueError, "pending: overlaps initial_state", {"pending": state.reshape(-1)[:80].reshape(2, 2, 20)}),
            (TypeError, "pending: expected a numpy array", {"pending": [1.0]})]:
        with pytest.raises(error, match=message):
            kda.fused_recurrent_kda(**x | {"state_out": state, "pending": pending} | change)
    for error, message, args in [
            (ValueError, r"state: expected \[N, HV, K, V\], got \[8, 4\]", (state[0, 0], pending)),
            (ValueError, r"pending: expected float32 \[2, 2, 20\], got float32 \[1, 2, 20\]", (state, pending[:1])),
            (ValueError, "state: expected float32 .*, got float64", (state.astype(np.float64), pending))]:
        with pytest.raises(error, match=message):
            kda.settle(*args)
    assert same_bits(state, before)
    assert same_bits(pending, kda.no_updates(state))


def test_state_out_in_place(isa):
    """initial_state as its own state_out: no copy, and the bits of the functional call."""
    x = make_inputs(24, 2, 5, 1, 2, 33, 20, N=2)
    want_o, want_state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    state = x["initial_state"]
    o, returned = kda.fused_recurrent_kda(**x, state_out=state, isa=isa)
    assert returned is state
    assert same_bits(o, want_o)
    assert same_bits(state, want_state)


def test_state_out_of_its_own(isa):
    x = make_inputs(25, 2, 5, 1, 2, 33, 20, N=2)
    before = x["initial_state"].copy()
    want_o, want_state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    target = np.full((2, 2, 33, 20), np.nan, np.float32)
    o, returned = kda.fused_recurrent_kda(**x, state_out=target, isa=isa)
    assert returned is target
    assert same_bits(o, want_o)
    assert same_bits(target, want_state)
    assert same_bits(x["initial_state"], before)


def test_state_out_inside_a_larger_cache(isa):
    """Layers of one cache array, heads contiguous: the state of one layer is updated, the others are not."""
    x = make_inputs(26, 2, 3, 1, 2, 8, 12, N=2)
    want = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)[1]
    cache = np.full((2, 3, 2, 8, 12), 7, np.float32)
    cache[:, 1] = x["initial_state"]
    x["initial_state"] = cache[:, 1]
    kda.fused_recurrent_kda(**x, state_out=cache[:, 1], isa=isa)
    assert same_bits(np.ascontiguousarray(cache[:, 1]), want)
    assert (cache[:, [0, 2]] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_out(isa, dtype):
    x = make_inputs(27, 2, 3, 1, 2, 8, 12, dtype=dtype)
    want = kda.fused_recurrent_kda(**x, isa=isa)[0]
    out = np.zeros((2, 3, 2, 12), dtype)
    o, _ = kda.fused_recurrent_kda(**x, out=out, isa=isa)
    assert o is out
    assert same_bits(out, want)


def test_out_may_be_a_slice_of_a_larger_array(isa):
    x = make_inputs(28, 2, 3, 1, 2, 8, 12)
    want = kda.fused_recurrent_kda(**x, isa=isa)[0]
    whole = np.full((2, 3, 2, 40), 7, np.float32)
    kda.fused_recurrent_kda(**x, out=whole[..., 11:23], isa=isa)
    assert same_bits(np.ascontiguousarray(whole[..., 11:23]), want)
    assert (np.delete(whole, range(11, 23), axis=3) == 7).all()


@pytest.mark.parametrize("v_first", [False, True])
def test_initial_state_never_changes(isa, v_first):
    x = make_inputs(29, 2, 5, 1, 2, 16, 16, N=2)
    before = {n: a.copy() for n, a in x.items()}
    for a in x.values():
        a.flags.writeable = False
    _, state = kda.fused_recurrent_kda(**x, state_v_first=v_first, output_final_state=True, isa=isa)
    state[:] = 0  # a state of its own, not a view of the initial one
    for n, a in x.items():
        assert same_bits(a, before[n])


def test_calls_repeat_bit_for_bit(isa):
    x = make_inputs(30, 2, 6, 2, 4, 60, 100, N=2)
    first_o, first_state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
    for _ in range(3):
        o, state = kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa)
        assert same_bits(o, first_o)
        assert same_bits(state, first_state)


def test_the_default_isa_is_the_chosen_one():
    from kda import runtime
    x = make_inputs(31, 1, 6, 2, 2, 60, 100)
    assert runtime.chosen_isa() in ISAS
    assert same_bits(kda.fused_recurrent_kda(**x)[0], kda.fused_recurrent_kda(**x, isa=runtime.chosen_isa())[0])


def test_subnormal_states_are_not_flushed(isa):
    """A state of 2^-140 decays by halves: float32 keeps subnormals, so does every ISA."""
    one = np.zeros((1, 1, 1, 16), np.float32)
    state = np.full((1, 1, 16, 16), 2.0**-140, np.float32)
    g = np.full((1, 1, 1, 16), np.log(0.5), np.float32)
    _, after = kda.fused_recurrent_kda(one, one, one, g, np.zeros((1, 1, 1), np.float32), initial_state=state,
                                       output_final_state=True, isa=isa)
    assert (after == 2.0**-141).all()
