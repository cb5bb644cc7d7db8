"""fla's own recurrent and gate tests, against the float64 reference. The cases and the metric: fla_matrix.py."""
import functools

import numpy as np
import pytest
from fla_matrix import GATE, RECURRENT, RECURRENT_BETA, RECURRENT_GATE, RECURRENT_V_FIRST, Case, passes

import kda
from kda import reference


@functools.cache
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
