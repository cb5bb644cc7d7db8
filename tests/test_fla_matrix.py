"""fla's own tests of its kernels, against the float64 reference. The cases and the metric: fla_matrix.py."""
import functools

import numpy as np
import pytest
from fla_matrix import (
    CHUNK,
    CHUNK_BETA,
    CHUNK_V_FIRST,
    CHUNK_VARLEN,
    CONV,
    EPILOGUE_TOLERANCE,
    GATE,
    NAIVE_CHUNK,
    RECURRENT,
    RECURRENT_BETA,
    RECURRENT_GATE,
    RECURRENT_V_FIRST,
    RMSNORM_GATED,
    Case,
    passes,
)
from helpers import same_bits, widened

import kda
from kda import reference


@functools.lru_cache(1)  # the ISAs of one case follow each other
def wanted(case: Case):
    """(o, final state) of the float64 reference, the same for every ISA."""
    return reference.fused_recurrent_kda(**case.inputs())


def parameters(cases):
    return [pytest.param(c, id=c.id, marks=[pytest.mark.slow] if c.slow else []) for c in cases]


@pytest.mark.parametrize("case", parameters(RECURRENT + RECURRENT_BETA + RECURRENT_V_FIRST + RECURRENT_GATE))
def test_recurrent(case, isa):
    want_o, want_state = wanted(case)
    o, state = kda.fused_recurrent_kda(**case.inputs(), isa=isa)
    assert o.dtype == case.dtype
    assert state.dtype == np.float32
    assert passes(want_o, o, case.tolerance)
    assert passes(want_state, state, case.tolerance)


@pytest.mark.parametrize("case", parameters(NAIVE_CHUNK + CHUNK + CHUNK_V_FIRST + CHUNK_BETA + CHUNK_VARLEN))
def test_chunk(case, isa):
    """A tenth of fla's tolerance of what is computed in float32; a 16-bit result is that one, rounded once."""
    want_o, want_state = wanted(case)
    x = case.inputs() | {"chunk_size": case.chunk_size, "safe_gate": case.safe, "isa": isa}
    o, state = kda.chunk_kda(**widened(x))
    assert passes(want_o, o, case.fla_tolerance / 10)
    assert passes(want_state, state, case.fla_tolerance / 10)
    if case.dtype != np.float32:
        half_o, half_state = kda.chunk_kda(**x)
        assert same_bits(half_o, o.astype(case.dtype))
        assert same_bits(half_state, state)


@pytest.mark.parametrize(("B", "T", "D", "W", "activation", "bias", "dtype"), CONV)
def test_conv(isa, B, T, D, W, activation, bias, dtype):
    rng = np.random.default_rng(42)
    x = rng.standard_normal((B, T, D)).astype(dtype)
    parameters = {"weight": rng.standard_normal((D, W)).astype(dtype), "activation": activation,
                  "bias": rng.standard_normal(D).astype(dtype) if bias else None}
    y, _ = kda.causal_conv1d(x.astype(np.float32), **parameters, isa=isa)
    assert passes(reference.causal_conv1d(x, **parameters)[0], y, EPILOGUE_TOLERANCE / 10)
    if dtype != np.float32:
        assert same_bits(kda.causal_conv1d(x, **parameters, isa=isa)[0], y.astype(dtype))


@pytest.mark.parametrize(("B", "H", "T", "D", "activation"), [
    pytest.param(*row, marks=[pytest.mark.slow] if row[2] * row[3] > 1e6 else []) for row in RMSNORM_GATED])
def test_rms_norm_gated(isa, B, H, T, D, activation):
    rng = np.random.default_rng(42)
    x, gate = rng.standard_normal((2, B, H, T, D)).astype(np.float32)
    weight = rng.standard_normal(D).astype(np.float32)
    y = kda.rms_norm_gated(x, gate, weight, 0, activation, isa=isa)
    assert passes(reference.rms_norm_gated(x, gate, weight, 0, activation), y, EPILOGUE_TOLERANCE / 10)


@pytest.mark.parametrize("case", parameters(GATE))
def test_gate(case, isa):
    x = case.gate_inputs()
    y = kda.fused_kda_gate(**x, isa=isa)
    assert y.dtype == np.float32
    assert passes(reference.fused_kda_gate(**x), y, case.tolerance)


def test_the_metric_can_fail():
    want = np.linspace(1, 2, 100)
    assert passes(want, want + 9e-7, 0)
    assert passes(want, want * 1.009, 0.01)
    assert not passes(want, want * 1.011, 0.01)
    assert not passes(want, np.where(want > 1.5, np.nan, want), 1)
