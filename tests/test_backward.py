"""Gradients of chunk_kda: the float64 reference against differences, the kernels against the reference."""
from dataclasses import replace

import numpy as np
import pytest
from fla_matrix import CHUNK, CHUNK_BETA, CHUNK_V_FIRST, CHUNK_VARLEN, passes
from helpers import BF16, make_inputs, relative_error, same_bits, widened

import kda
from kda import ops, reference

GATES = {
    "none": {},
    "softplus": {"use_gate_in_kernel": True, "A_log": 0.3, "dt_bias": 0.5},
    "softplus without bias": {"use_gate_in_kernel": True, "A_log": 0.3},
    "bounded": {"use_gate_in_kernel": True, "A_log": 0.3, "dt_bias": 0.5, "lower_bound": -5.0},
    "bounded without A_log": {"use_gate_in_kernel": True, "lower_bound": -2.0},
}


def problem(seed, B, T, H, HV, K, V, N=None, gate="none", dtype=np.float32, **options):
    """(arguments of chunk_kda, d_o, d_final_state)."""
    rng = np.random.default_rng(seed)
    x = make_inputs(seed, B, T, H, HV, K, V, N=N or B) | {"scale": 0.3} | options
    x |= {name: rng.standard_normal(HV).astype(dtype) * value if name == "A_log" else
          rng.standard_normal(HV * K).astype(dtype) * value if name == "dt_bias" else value
          for name, value in GATES[gate].items()}
    if gate != "none":
        x["g"] = rng.standard_normal((B, T, HV, K))
    if options.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = rng.standard_normal((B, T, HV))
    if options.get("use_qk_l2norm_in_kernel"):
        x |= {name: rng.standard_normal((B, T, H, K)) for name in "qk"}
    if options.get("state_v_first"):
        x["initial_state"] = np.swapaxes(x["initial_state"], 2, 3)
    x = {name: a.astype(dtype) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for name, a in x.items()}
    return x, rng.standard_normal((B, T, HV, V)).astype(dtype), rng.standard_normal(
        x["initial_state"].shape).astype(dtype)


@pytest.mark.parametrize("options", [
    {},
    {"gate": "softplus", "use_qk_l2norm_in_kernel": True},
    {"gate": "bounded", "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"gate": "bounded without A_log", "use_beta_sigmoid_in_kernel": True, "state_v_first": True},
    {"gate": "softplus without bias", "cu_seqlens": [0, 2, 2, 5], "N": 3},
], ids=str)
def test_reference_against_differences(options):
    """Central differences of the forward pass, in float64, along each argument's every element."""
    B = 1 if "cu_seqlens" in options else 2
    x, d_o, d_final = problem(3, B, 5, 1, 2, 3, 2, dtype=np.float64, **options)
    got = reference.chunk_kda_backward(d_o, d_final, **x)

    def value(**changed):
        o, final = reference.chunk_kda(**(x | changed), output_final_state=True)
        return np.sum(o * d_o) + np.sum(final * d_final)

    checked = 0
    for name, gradient in got.items():
        if x.get(name) is None:
            assert gradient is None
            continue
        assert gradient.shape == x[name].shape
        want = np.zeros_like(x[name])
        for at in np.ndindex(want.shape):
            step = np.zeros_like(want)
            step[at] = 1e-5
            want[at] = (value(**{name: x[name] + step}) - value(**{name: x[name] - step})) / 2e-5
        assert np.abs(gradient - want).max() <= 1e-8 * max(1, np.abs(want).max()), name
        checked += 1
    assert checked >= 6


def check(x, d_o, d_final, isa, tolerance=2e-6, **more):
    want = reference.chunk_kda_backward(d_o, d_final, **x)
    got = ops.chunk_kda_backward(d_o, d_final, **x, isa=isa, **more)
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None
            continue
        assert got[name].dtype == np.float32
        assert relative_error(got[name], gradient) <= tolerance, name
    return got


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("flags", [(False, False, False), (True, True, False), (False, True, True)])
def test_gradients(isa, gate, flags):
    l2norm, sigmoid, double = flags
    x, d_o, d_final = problem(5, 2, 70, 2, 4, 12, 20, gate=gate, use_qk_l2norm_in_kernel=l2norm,
                              use_beta_sigmoid_in_kernel=sigmoid, allow_neg_eigval=double)
    check(x, d_o, d_final, isa)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 81, 128, 130])
def test_around_blocks_and_checkpoints(isa, T):
    x, d_o, d_final = problem(T, 1, T, 1, 1, 17, 9)
    check(x, d_o, d_final, isa)


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (33, 8), (64, 100), (128, 129)])
def test_sizes(isa, shape):
    x, d_o, d_final = problem(8, 1, 20, 1, 2, *shape)
    check(x, d_o, d_final, isa)


def test_sequences(isa):
    """Packed sequences, an empty one among them: each as on its own, and nothing crosses."""
    cu = [0, 3, 3, 80, 150]
    x, d_o, d_final = problem(4, 1, 150, 2, 2, 16, 24, N=4, gate="bounded", cu_seqlens=cu)
    got = check(x, d_o, d_final, isa)
    assert same_bits(got["initial_state"][1], d_final[1])
    alone = {name: a[:, 80:150] if name in ("q", "k", "v", "g", "beta") else a for name, a in x.items()}
    alone |= {"initial_state": x["initial_state"][3:], "cu_seqlens": None}
    solo = ops.chunk_kda_backward(d_o[:, 80:150], d_final[3:], **alone, isa=isa)
    for name in ("q", "k", "v", "g", "beta"):
        assert same_bits(solo[name], np.ascontiguousarray(got[name][:, 80:150])), name
    assert same_bits(solo["initial_state"], got["initial_state"][3:])


def test_v_first_no_state_and_default_scale(isa):
    x, d_o, d_final = problem(6, 2, 33, 1, 2, 8, 24, scale=None, state_v_first=True)
    check(x, d_o, d_final, isa)
    x = {name: a for name, a in x.items() if name != "initial_state"}
    check(x, d_o, None, isa)


def test_hard_resets(isa):
    """A decay of 0 passes nothing back, and its own gradient is 0, not NaN."""
    x, d_o, d_final = problem(7, 1, 40, 1, 1, 8, 8)
    x["g"][0, 20] = -np.inf
    x["g"][0, 30, :, ::2] = -1e5
    got = check(x, d_o, d_final, isa)
    assert (got["g"][0, 20] == 0).all()
    assert (got["g"][0, 30, :, ::2] == 0).all()
    again = ops.chunk_kda_backward(np.where(np.arange(40)[None, :, None, None] >= 20, d_o, 0), d_final, **x, isa=isa)
    assert (again["v"][:, :20] == 0).all()
    assert (again["initial_state"] == 0).all()


def test_strides_states_and_threads(isa, threads):
    """Any strides, 16-bit arguments, states handed over, one thread or more: the same bits."""
    x, d_o, d_final = problem(9, 2, 90, 2, 4, 16, 16, gate="softplus", use_qk_l2norm_in_kernel=True)
    x |= {name: x[name].astype(BF16).astype(np.float32) for name in "qkvg"}
    want = ops.chunk_kda_backward(d_o, d_final, **x, isa=isa)
    _, _, states = kda.chunk_kda(**x, isa=isa, chunk_size=ops.BACKWARD_SPACING, return_intermediate_states=True)
    strided = {name: np.ascontiguousarray(np.swapaxes(x[name], 1, 2)).swapaxes(1, 2) for name in "qg"}
    strided["v"] = x["v"].astype(BF16)
    for n in (1, 2):
        threads(n)
        for more in ({}, {"states": states}):
            got = ops.chunk_kda_backward(np.asfortranarray(d_o), d_final, **(x | strided), isa=isa, **more)
            for name in want:
                assert same_bits(got[name], want[name]), name


def test_nothing_is_changed(isa):
    x, d_o, d_final = problem(2, 1, 20, 1, 1, 8, 8)
    before = {name: a.copy() for name, a in x.items() if isinstance(a, np.ndarray)}
    kept = d_o.copy(), d_final.copy()
    for name in before:
        x[name].setflags(write=False)
    ops.chunk_kda_backward(d_o, d_final, **x, isa=isa)
    assert all(same_bits(x[name], a) for name, a in before.items())
    assert same_bits(d_o, kept[0])
    assert same_bits(d_final, kept[1])


def test_errors():
    x, d_o, d_final = problem(2, 1, 20, 1, 1, 8, 4)
    with pytest.raises(ValueError, match=r"d_o: expected \[1, 20, 1, 4\].*got \[1, 19, 1, 4\]"):
        ops.chunk_kda_backward(d_o[:, 1:], d_final, **x)
    with pytest.raises(ValueError, match=r"d_final_state: expected \[1, 1, 8, 4\], got \[1, 1, 4, 8\]"):
        ops.chunk_kda_backward(d_o, d_final.swapaxes(2, 3), **x)
    with pytest.raises(TypeError, match="d_o: expected float32, float16 or bfloat16, got float64"):
        ops.chunk_kda_backward(d_o.astype(np.float64), d_final, **x)
    with pytest.raises(ValueError, match="states"):
        ops.chunk_kda_backward(d_o, d_final, **x, states=np.zeros((1, 1, 1, 4, 8), np.float32))


# fla's tolerances of the gradients in its tests of chunk_kda; ours is a fifth of each. Sizes are cut so that the
# float64 reference, which walks token by token, takes a second: 2 rows, 2 q/k heads and 192 tokens at most, GVA
# ratios, head sizes, flags and dtypes as fla has them; packed sequences scaled to 300 tokens.
FLA = {"q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02, "A_log": 0.003, "dt_bias": 0.008,
       "initial_state": 0.008}


def cut(case):
    ratio, H = case.HV // case.H, min(case.H, 2)
    if case.cu_seqlens is None:
        return replace(case, B=min(case.B, 2), T=min(case.T, 192), H=H, HV=H * ratio)
    factor = max(1, case.cu_seqlens[-1] / 300)
    cu = tuple(int(t / factor) for t in case.cu_seqlens)
    return replace(case, T=cu[-1], H=H, HV=H, cu_seqlens=cu)


MATRIX = [cut(case) for case in CHUNK + CHUNK_V_FIRST + CHUNK_BETA + CHUNK_VARLEN]


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{i}-{c.id}", marks=[pytest.mark.slow] if c.slow else [])
                                  for i, c in enumerate(MATRIX)])
def test_fla_matrix(case):
    """On the best ISA, of float32 arithmetic over fla's inputs (float16 and bfloat16 ones widened)."""
    x = widened(case.inputs())
    del x["output_final_state"]
    rng = np.random.default_rng(43)
    d_o = rng.standard_normal(x["v"].shape).astype(np.float32)
    d_final = rng.standard_normal(x["initial_state"].shape).astype(np.float32)
    want = reference.chunk_kda_backward(d_o, d_final, **x)
    got = ops.chunk_kda_backward(d_o, d_final, **x)
    for name, tolerance in FLA.items():
        if want[name] is not None:
            assert passes(want[name], got[name], tolerance / 5), name
