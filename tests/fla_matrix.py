"""The cases that flash-linear-attention's own tests run on its recurrent kernels and its gate, with its metric.

The shapes, flags and tolerances are fla 0.6.0's (tests/ops/test_kda.py); inputs are drawn from the same
distributions by numpy, not the same numbers. q and k are normalised beforehand where the kernel does not.
"""
from dataclasses import dataclass

import numpy as np
from helpers import normalised


def passes(want, got, tolerance):
    """fla's metric: a tiny largest difference, or an RMS difference small beside the RMS of the reference."""
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    difference = np.abs(want - got)
    if np.isnan(difference).any():
        return False
    return bool(difference.max() <= 1e-6 or ratio(want, got) < tolerance)


def ratio(want, got):
    """RMS of the difference over the RMS of the reference."""
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    return float(np.sqrt(np.mean((want - got) ** 2)) / (np.sqrt(np.mean(want**2)) + 1e-8))


@dataclass(frozen=True)
class Case:
    """One row: shapes, options and fla's tolerance (a tenth of it is asked of float32 rows)."""
    group: str
    B: int
    T: int
    H: int
    HV: int
    D: int
    fla_tolerance: float
    scale: float | None = 1.0
    gate_norm: float = 1.0  # log decay is logsigmoid(randn) / gate_norm
    l2norm: bool = False
    raw_beta: bool = False
    neg_eigval: bool = False
    v_first: bool = False
    gate: bool = False
    a_log: bool = False
    dt_bias: bool = False
    lower_bound: float | None = None
    dtype: type = np.float32

    @property
    def tolerance(self):
        return self.fla_tolerance if self.dtype == np.float16 else self.fla_tolerance / 10

    @property
    def id(self):
        flags = "".join(f"-{n}" for n in ("l2norm", "neg_eigval", "a_log", "dt_bias") if getattr(self, n))
        bound = "-bounded" if self.lower_bound else ""
        return f"{self.group}-B{self.B}T{self.T}H{self.H}HV{self.HV}D{self.D}{flags}{bound}-{np.dtype(self.dtype)}"

    @property
    def slow(self):
        """Whether the float64 reference walks more than 30 million state elements."""
        return self.group != "gate" and self.B * self.T * self.HV * self.D**2 > 30e6

    def inputs(self):
        """The keyword arguments of fused_recurrent_kda."""
        rng = np.random.default_rng(42)
        B, T, H, HV, D = self.B, self.T, self.H, self.HV, self.D
        q, k = rng.random((2, B, T, H, D))
        x = {"q": q if self.l2norm else normalised(q), "k": k if self.l2norm else normalised(k),
             "v": rng.random((B, T, HV, D)), "beta": rng.standard_normal((B, T, HV)),
             "g": rng.standard_normal((B, T, HV, D))}
        if not self.gate:
            x["g"] = -np.logaddexp(0, -x["g"]) / self.gate_norm
        if not self.raw_beta:
            x["beta"] = 1 / (1 + np.exp(-x["beta"]))
        x = {name: array.astype(self.dtype) for name, array in x.items()}
        state = rng.standard_normal((B, HV, D, D)).astype(np.float32)
        x["initial_state"] = state
        x |= {"scale": self.scale, "output_final_state": True, "use_qk_l2norm_in_kernel": self.l2norm,
              "use_beta_sigmoid_in_kernel": self.raw_beta, "allow_neg_eigval": self.neg_eigval,
              "state_v_first": self.v_first, "use_gate_in_kernel": self.gate}
        return x | self.gate_parameters(rng)

    def gate_parameters(self, rng):
        x = {}
        if self.a_log:
            x["A_log"] = np.log(rng.uniform(1, 16, self.HV)).astype(np.float32)
        if self.dt_bias:
            x["dt_bias"] = rng.standard_normal(self.HV * self.D).astype(np.float32)
        if self.lower_bound is not None:
            x["lower_bound"] = self.lower_bound
        return x

    def gate_inputs(self):
        """The keyword arguments of fused_kda_gate: logits ten times wider."""
        rng = np.random.default_rng(42)
        g = 10 * rng.standard_normal((self.B, self.T, self.HV, self.D))
        return {"g": g.astype(np.float32)} | self.gate_parameters(rng)


def _recurrent(B, T, H, HV, D, scale, l2norm=False):
    return Case("recurrent", B, T, H, HV, D, 5e-3, scale=scale, l2norm=l2norm)


def _beta(B, T, H, D, neg):
    return Case("beta", B, T, H, H, D, 5e-3, scale=None, l2norm=True, raw_beta=True, neg_eigval=neg)


def _v_first(B, T, H, D, scale):
    return Case("v_first", B, T, H, H, D, 1e-4, scale=scale, l2norm=True, v_first=True)


def _gated(B, T, H, HV, D, scale, a_log, dt_bias, bounded, dtype):
    return Case("gated", B, T, H, HV, D, 2e-3, scale=scale, l2norm=True, gate=True, a_log=a_log, dt_bias=dt_bias,
                lower_bound=-5.0 if bounded else None, dtype=dtype)


def _gate(B, T, H, D, a_log, dt_bias, lower_bound):
    return Case("gate", B, T, H, H, D, 1e-4, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound)


RECURRENT = [
    _recurrent(1, 64, 1, 1, 64, 1.0),
    _recurrent(2, 512, 3, 3, 60, 1.0),
    _recurrent(3, 1000, 4, 4, 100, 0.1, l2norm=True),
    _recurrent(4, 1024, 4, 4, 128, 0.1),
    _recurrent(2, 512, 2, 4, 60, 1.0),
    _recurrent(2, 1024, 2, 8, 128, 0.1, l2norm=True),
]
RECURRENT_BETA = [_beta(2, 256, 4, 64, False), _beta(2, 256, 4, 64, True), _beta(1, 512, 3, 60, True)]
RECURRENT_V_FIRST = [
    _v_first(1, 64, 1, 64, 1.0),
    _v_first(2, 512, 3, 60, 1.0),
    _v_first(3, 1000, 4, 100, 0.1),
    _v_first(4, 1024, 4, 128, 0.1),
]
RECURRENT_GATE = [
    _gated(1, 64, 1, 1, 64, 1.0, True, False, False, np.float32),
    _gated(2, 256, 2, 2, 64, 1.0, True, True, False, np.float32),
    _gated(2, 512, 2, 4, 64, 0.1, True, True, True, np.float16),
    _gated(3, 1000, 2, 8, 128, 1.0, True, False, False, np.float16),
    _gated(4, 1024, 4, 4, 128, 0.1, True, True, True, np.float16),
    _gated(1, 64, 1, 1, 64, 1.0, False, False, True, np.float32),
    _gated(2, 256, 2, 4, 64, 1.0, False, True, True, np.float32),
]
GATE = [
    *[_gate(*shape, True, False, -5.0) for shape in [(1, 2, 2, 12), (1, 32, 2, 16), (2, 64, 4, 32), (4, 128, 8, 64)]],
    _gate(4, 128, 8, 128, True, False, None),
    *[_gate(*shape, True, True, None)
      for shape in [(1, 2, 2, 12), (1, 32, 2, 16), (2, 64, 4, 32), (4, 128, 8, 64), (4, 128, 8, 128)]],
    *[_gate(*shape, False, False, -5.0) for shape in [(1, 2, 2, 12), (2, 64, 4, 32)]],
    *[_gate(*shape, False, True, -5.0) for shape in [(4, 128, 8, 64), (4, 128, 8, 128)]],
]
