"""Kimi Delta Attention in plain numpy, float64: the definition that everything else is measured against.

Slow and readable. The arguments are those of the functions of the same names in ops.py; every array is
converted to float64, and nothing is checked. Where a formula could be written in two ways, the comment
says which one is right.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def sigmoid(x: ArrayLike) -> F64:
    """1 / (1 + e^-x), accurate at both ends."""
    x = np.asarray(x, np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def softplus(x: ArrayLike) -> F64:
    """log(1 + e^x); log1p keeps e^x for a very negative x instead of rounding it to 0."""
    x = np.asarray(x, np.float64)
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def l2norm(x: ArrayLike, eps: float = 1e-6) -> F64:
    """x / sqrt(sum(x * x) + eps) over the last axis: eps on the SUM of squares, inside the root."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def fused_kda_gate(g: ArrayLike, A_log: ArrayLike | None = None, dt_bias: ArrayLike | None = None,
                   lower_bound: float | None = None) -> F64:
    """Log decay [..., HV, K] from raw logits. The presence of lower_bound alone chooses the formula."""
    z = np.asarray(g, np.float64)
    HV, K = z.shape[-2:]
    if dt_bias is not None:
        z = z + np.asarray(dt_bias, np.float64).reshape(HV, K)
    a = 1.0 if A_log is None else np.exp(np.asarray(A_log, np.float64)).reshape(HV, 1)  # one per HEAD
    if lower_bound is None:
        return np.asarray(-a * softplus(z))
    return np.asarray(lower_bound * sigmoid(a * z))  # a multiplies inside the sigmoid


def fused_recurrent_kda(
    q: Any, k: Any, v: Any, g: Any, beta: Any,
    A_log: Any = None, dt_bias: Any = None, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Any = None,
) -> tuple[F64, F64 | None]:
    """The recurrence, one token after the other, all heads at once. Shapes as in kda.fused_recurrent_kda."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]

    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q * (K**-0.5 if scale is None else scale)  # after the norm; K, not V
    q, k = (np.repeat(x, HV // H, axis=2) for x in (q, k))  # each head repeated in place, not tiled
    if use_gate_in_kernel:
        g = fused_kda_gate(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)

    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        spans = [(0, int(a), int(z)) for a, z in pairwise(cu_seqlens)]
    states = np.zeros((len(spans), HV, K, V))
    if initial_state is not None:
        states[:] = np.swapaxes(initial_state, 2, 3) if state_v_first else initial_state

    o = np.zeros((B, T, HV, V))
    for n, (b, start, end) in enumerate(spans):
        S = states[n]
        for t in range(start, end):
            S = np.exp(g[b, t])[:, :, None] * S  # decay first,
            u = np.einsum("hkv,hk->hv", S, k[b, t])  # so the prediction is by the decayed state,
            d = beta[b, t][:, None] * (v[b, t] - u)
            S = S + k[b, t][:, :, None] * d[:, None, :]
            o[b, t] = np.einsum("hkv,hk->hv", S, q[b, t])  # and the output by the updated one
        states[n] = S
    if not output_final_state:
        return o, None
    return o, np.swapaxes(states, 2, 3) if state_v_first else states
