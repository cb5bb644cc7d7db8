"""The cases that flash-linear-attention's own tests run on its kernels (forward), with its metric.

The shapes, flags and tolerances are fla 0.6.0's (its tests of kda, of the short convolution and of the gated norm);
inputs are drawn from the same distributions by numpy, not the same numbers. q and k are normalised beforehand where
the kernel does not. fla's flag that keeps intermediates for its backward pass is left out.
"""
from dataclasses import dataclass, replace

import numpy as np
from helpers import BF16, normalised


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
    kept: float = 1.0  # the share of log decays that are not overwritten by `masked`
    masked: float = 0.0
    safe: bool = False  # the gate is bounded, or its result is clipped, at -5
    chunk_size: int | None = None  # None: the recurrent form
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def tolerance(self):
        return self.fla_tolerance if self.dtype == np.float16 else self.fla_tolerance / 10

    @property
    def id(self):
        flags = "".join(f"-{n}" for n in ("l2norm", "neg_eigval", "a_log", "dt_bias") if getattr(self, n))
        bound = "-bounded" if self.lower_bound else ""
        size = f"B{self.B}T{self.T}H{self.H}HV{self.HV}D{self.D}"
        if self.chunk_size is None:
            return f"{self.group}-{size}{flags}{bound}-{np.dtype(self.dtype)}"
        flags += "".join(f"-{n}" for n in ("gate", "safe") if getattr(self, n))
        if self.cu_seqlens:
            size += f"N{len(self.cu_seqlens) - 1}"
        return (f"{self.group}-{size}-scale{self.scale}-norm{self.gate_norm}{flags}-kept{self.kept:g}"
                f"-chunk{self.chunk_size}-{np.dtype(self.dtype)}")

    @property
    def slow(self):
        """Whether the float64 reference walks more than 10 million state elements."""
        return self.group != "gate" and self.B * self.T * self.HV * self.D**2 > 10e6

    def inputs(self):
        """The keyword arguments of fused_recurrent_kda; chunk_kda takes chunk_size too."""
        rng = np.random.default_rng(42)
        B, T, H, HV, D = self.B, self.T, self.H, self.HV, self.D
        q, k = rng.random((2, B, T, H, D))
        x = {"q": q if self.l2norm else normalised(q), "k": k if self.l2norm else normalised(k),
             "v": rng.random((B, T, HV, D)), "beta": rng.standard_normal((B, T, HV)),
             "g": rng.standard_normal((B, T, HV, D))}
        if not self.gate:
            x["g"] = -np.logaddexp(0, -x["g"]) / self.gate_norm
        if self.kept < 1:
            x["g"] = np.where(rng.random(x["g"].shape) < self.kept, x["g"], self.masked)
        if self.safe and not self.gate:
            x["g"] = np.clip(x["g"], -5, 0)
        if not self.raw_beta:
            x["beta"] = 1 / (1 + np.exp(-x["beta"]))
        x = {name: array.astype(self.dtype) for name, array in x.items()}
        N = B if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        x["initial_state"] = rng.standard_normal((N, HV, D, D)).astype(np.float32)
        x["cu_seqlens"] = self.cu_seqlens
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


def _chunk(B, T, H, HV, D, scale, norm, masked_share, l2norm, gate, dtype, safe, chunk_size=64):
    """Masked log decays are 0: nothing is forgotten there."""
    return Case("chunk", B, T, H, HV, D, 5e-3, scale=scale, gate_norm=norm, l2norm=l2norm, gate=gate, a_log=gate,
                dt_bias=gate, lower_bound=-5.0 if gate and safe else None, dtype=dtype, kept=1 - masked_share,
                safe=safe, chunk_size=chunk_size)


def _varlen(H, D, masked_share, cu_seqlens, gate, safe, chunk_size=64):
    """Masked values are -1000: a reset where g is a log decay, no decay at all where it is a logit."""
    return Case("chunk_varlen", 1, cu_seqlens[-1], H, H, D, 5e-3, scale=None, gate=gate, a_log=gate, dt_bias=gate,
                lower_bound=-5.0 if gate and safe else None, dtype=np.float16, kept=1 - masked_share, masked=-1000.0,
                safe=safe, chunk_size=chunk_size, cu_seqlens=cu_seqlens)


NAIVE_CHUNK = [replace(_recurrent(*row), group="naive_chunk", gate_norm=norm, chunk_size=64) for *row, norm in [
    (1, 64, 1, 1, 64, 1.0, 1.0), (2, 512, 3, 3, 60, 1.0, 1.0), (4, 1024, 4, 4, 128, 0.1, 1.0),
    (4, 1024, 4, 4, 128, 1.0, 10.0), (1, 64, 1, 2, 64, 1.0, 1.0), (2, 512, 2, 4, 60, 1.0, 1.0)]]
CHUNK = [
    _chunk(1, 63, 1, 1, 64, 1.0, 1.0, 0, False, False, np.float16, True),
    _chunk(2, 500, 3, 3, 60, 1.0, 1.0, 0, False, False, np.float16, True),
    _chunk(2, 1000, 3, 3, 64, 0.1, 1.0, 0.5, False, False, np.float16, False),
    _chunk(3, 1024, 4, 4, 100, 1.0, 0.1, 0, False, False, np.float16, False),
    _chunk(4, 1024, 4, 4, 128, 0.1, 1.0, 0, False, False, np.float16, True),
    _chunk(4, 1024, 4, 4, 128, 0.1, 1.0, 0, True, False, np.float16, True),
    _chunk(2, 1500, 4, 4, 128, 0.1, 10.0, 0, False, True, np.float16, False),
    _chunk(4, 2048, 8, 8, 64, 0.1, 1.0, 0, False, True, np.float16, True),
    _chunk(2, 1024, 2, 4, 64, 0.1, 1.0, 0, False, False, np.float16, False),
    _chunk(2, 1024, 2, 8, 64, 0.1, 1.0, 0, False, True, np.float16, False),
    _chunk(2, 1024, 4, 8, 128, 0.1, 1.0, 0, True, True, np.float16, False),
    _chunk(2, 160, 2, 4, 64, 0.1, 1.0, 0, False, True, np.float16, True, 32),
    _chunk(2, 1024, 2, 4, 64, 0.1, 1.0, 0, True, True, BF16.type, True),
    _chunk(2, 1024, 2, 4, 64, 0.1, 1.0, 0, False, True, BF16.type, False),
    _chunk(2, 160, 2, 4, 64, 0.1, 1.0, 0, False, True, BF16.type, True, 32),
    _chunk(2, 1024, 2, 8, 128, 0.1, 1.0, 0, True, True, BF16.type, False),
]
CHUNK_V_FIRST = [replace(_v_first(*row), group="chunk_v_first", chunk_size=64) for row in [
    (1, 63, 1, 64, 1.0), (2, 500, 3, 60, 1.0), (3, 1024, 4, 128, 0.1), (4, 2048, 8, 64, 0.1)]]
# fla runs the first two with 96 heads, here they have 2: heads are computed one by one, and 96 would cost the float64
# reference minutes. The number of tokens, with which rounding grows, is fla's.
CHUNK_BETA = [
    replace(_beta(*row), group="chunk_beta", fla_tolerance=1e-4, chunk_size=64, dtype=dtype) for *row, dtype in [
        (1, 8192, 2, 128, False, BF16.type), (1, 8192, 2, 128, True, BF16.type), (2, 96, 2, 64, True, np.float16)]]
CHUNK_VARLEN = [
    _varlen(4, 60, 0.1, (0, 15), True, False),
    _varlen(4, 64, 0.9, (0, 256, 500, 1000), True, False),
    _varlen(4, 128, 0.5, (0, 256, 500, 1000), False, False),
    _varlen(4, 100, 0, (0, 15, 100, 300, 1200, 2000), True, False),
    _varlen(2, 256, 0, (0, 100, 300, 1200, 3000, 4096), False, True),  # fla: 4 heads
    _varlen(4, 60, 0.1, (0, 31, 96, 160), True, False, 32),
]
# The same without the gate: -1000 is a log decay then, which is harder.
CHUNK_VARLEN += [_varlen(*row, False, False) for row in [
    (4, 60, 0.1, (0, 15)), (4, 64, 0.9, (0, 256, 500, 1000)), (4, 60, 0.1, (0, 31, 96, 160))]]

# B, T, D, W, activation, bias, dtype. fla runs two of them again without the residual that it adds to the result;
# ours adds none.
CONV = [
    (2, 64, 128, 3, "swish", True, np.float32), (2, 128, 128, 4, "swish", False, np.float32),
    (2, 500, 1024, 3, None, True, np.float32), (2, 1024, 1024, 4, None, False, np.float32),
    (2, 64, 128, 3, None, True, np.float16), (2, 128, 128, 4, None, False, np.float16),
    (2, 2, 128, 4, "swish", True, np.float32), (2, 3, 128, 4, "swish", True, np.float32),
    (2, 4, 128, 4, "swish", True, np.float32), (2, 2, 128, 3, "swish", True, np.float32),
]
# B, H, T, D, activation; eps 0
RMSNORM_GATED = [
    (2, 2, 1, 64, "silu"), (2, 2, 512, 128, "sigmoid"), (2, 2, 2048, 1200, "silu"), (2, 2, 50, 50, "sigmoid")]
EPILOGUE_TOLERANCE = 1e-3
