"""Kimi Delta Attention in plain numpy, float64: the definition that everything else is measured against.

Slow and readable. The arguments are those of the functions of the same names in ops.py; every array is
converted to float64, and nothing is checked. Where a formula could be written in two ways, the comment
says which one is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    state_v_first: bool = False, cu_seqlens: Any = None, *, checkpoints: list[list[F64]] | None = None,
) -> tuple[F64, F64 | None]:
    """The recurrence, one token after the other, all heads at once. Shapes as in kda.fused_recurrent_kda.

    `checkpoints`, an empty list, receives per sequence the states [HV, K, V] after each of its tokens.
    """
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

    spans = _spans(B, T, cu_seqlens)
    states = np.zeros((len(spans), HV, K, V))
    if initial_state is not None:
        states[:] = np.swapaxes(initial_state, 2, 3) if state_v_first else initial_state

    o = np.zeros((B, T, HV, V))
    for n, (b, start, end) in enumerate(spans):
        S, seen = states[n], []
        for t in range(start, end):
            S = np.exp(g[b, t])[:, :, None] * S  # decay first,
            u = np.einsum("hkv,hk->hv", S, k[b, t])  # so the prediction is by the decayed state,
            d = beta[b, t][:, None] * (v[b, t] - u)
            S = S + k[b, t][:, :, None] * d[:, None, :]
            o[b, t] = np.einsum("hkv,hk->hv", S, q[b, t])  # and the output by the updated one
            if checkpoints is not None:
                seen.append(S)
        states[n] = S
        if checkpoints is not None:
            checkpoints.append(seen)
    if not output_final_state:
        return o, None
    return o, np.swapaxes(states, 2, 3) if state_v_first else states


def _spans(B: int, T: int, cu_seqlens: Any) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    return [(0, int(start), int(end)) for start, end in pairwise(cu_seqlens)]


def chunk_kda(q: Any, k: Any, v: Any, *args: Any, chunk_size: int = 64, return_intermediate_states: bool = False,
              safe_gate: bool = False, disable_recompute: bool = False, **kwargs: Any) -> tuple[Any, ...]:
    """The recurrence again: the chunked form is another way to compute it, not another definition."""
    if not return_intermediate_states:
        return fused_recurrent_kda(q, k, v, *args, **kwargs)
    checkpoints: list[list[F64]] = []
    o, final = fused_recurrent_kda(q, k, v, *args, **kwargs, checkpoints=checkpoints)
    HV, V = np.shape(v)[2:]
    n = max((len(seen) for seen in checkpoints), default=0) // chunk_size
    states = np.full((len(checkpoints), n, HV, np.shape(q)[3], V), np.nan)  # NaN: a shorter sequence has none
    for own, seen in zip(states, checkpoints, strict=True):
        for i, state in enumerate(seen[chunk_size - 1 :: chunk_size]):
            own[i] = state
    return o, final, np.swapaxes(states, 3, 4) if kwargs.get("state_v_first") else states


def chunk_kda_backward(
    d_o: Any, d_final_state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any,
    A_log: Any = None, dt_bias: Any = None, scale: float | None = None, initial_state: Any = None,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
    cu_seqlens: Any = None,
) -> dict[str, F64 | None]:
    """Gradients of sum(d_o * o) + sum(d_final_state * final state) by each argument, the chain rule line by line."""
    raw_q, raw_k, v, raw_g, raw_beta, d_o = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, d_o))
    B, T, H, K = raw_q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    most = 2.0 if allow_neg_eigval else 1.0

    q, k = (l2norm(raw_q), l2norm(raw_k)) if use_qk_l2norm_in_kernel else (raw_q, raw_k)
    q, k = np.repeat(q * scale, HV // H, axis=2), np.repeat(k, HV // H, axis=2)
    g = fused_kda_gate(raw_g, **gate) if use_gate_in_kernel else raw_g
    beta = most * sigmoid(raw_beta) if use_beta_sigmoid_in_kernel else raw_beta

    dq, dk, dv, dg, dbeta = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(g), np.zeros_like(beta)
    spans = _spans(B, T, cu_seqlens)
    first = np.zeros((len(spans), HV, K, V))  # the initial states, then the gradients by them
    if initial_state is not None:
        first[:] = np.swapaxes(initial_state, 2, 3) if state_v_first else initial_state
    for n, (b, start, end) in enumerate(spans):
        decayed = []  # Sd = diag(exp(g)) S of every token, and its error v - Sd^T k
        S = first[n]
        for t in range(start, end):
            S = np.exp(g[b, t])[:, :, None] * S
            error = v[b, t] - np.einsum("hkv,hk->hv", S, k[b, t])
            decayed.append((S, error))
            S = S + k[b, t][:, :, None] * (beta[b, t][:, None] * error)[:, None, :]
        dS = np.zeros((HV, K, V))
        if d_final_state is not None:
            dS[:] = np.swapaxes(d_final_state, 2, 3)[n] if state_v_first else np.asarray(d_final_state)[n]
        for t in range(end - 1, start - 1, -1):
            Sd, error = decayed.pop()
            delta = beta[b, t][:, None] * error
            new = Sd + k[b, t][:, :, None] * delta[:, None, :]
            dq[b, t] = np.einsum("hkv,hv->hk", new, d_o[b, t])  # o = new^T q
            dS = dS + q[b, t][:, :, None] * d_o[b, t][:, None, :]
            dk[b, t] = np.einsum("hkv,hv->hk", dS, delta)  # new = Sd + k delta^T
            d_delta = np.einsum("hkv,hk->hv", dS, k[b, t])
            dbeta[b, t] = np.sum(d_delta * error, axis=-1)  # delta = beta (v - u)
            dv[b, t] = beta[b, t][:, None] * d_delta
            dk[b, t] += np.einsum("hkv,hv->hk", Sd, -dv[b, t])  # u = Sd^T k
            dS = dS + k[b, t][:, :, None] * -dv[b, t][:, None, :]
            dg[b, t] = np.sum(dS * Sd, axis=-1)  # Sd = diag(exp(g)) S
            dS = np.exp(g[b, t])[:, :, None] * dS
        first[n] = dS

    dq, dk = (x.reshape(B, T, H, HV // H, K).sum(axis=3) for x in (dq * scale, dk))
    if use_qk_l2norm_in_kernel:
        dq, dk = _l2norm_backward(dq, raw_q), _l2norm_backward(dk, raw_k)
    if use_beta_sigmoid_in_kernel:
        dbeta = dbeta * most * sigmoid(raw_beta) * sigmoid(-raw_beta)
    d_A_log = d_dt_bias = None
    if use_gate_in_kernel:
        z = raw_g if dt_bias is None else raw_g + np.asarray(dt_bias, np.float64).reshape(HV, K)
        a = np.ones((HV, 1)) if A_log is None else np.exp(np.asarray(A_log, np.float64)).reshape(HV, 1)
        if lower_bound is None:
            by_a, by_z = -softplus(z), -a * sigmoid(z)
        else:
            slope = lower_bound * sigmoid(a * z) * sigmoid(-a * z)
            by_a, by_z = slope * z, slope * a
        if A_log is not None:
            d_A_log = np.sum(dg * by_a * a, axis=(0, 1, 3)).reshape(np.shape(A_log))
        dg = dg * by_z
        if dt_bias is not None:
            d_dt_bias = np.sum(dg, axis=(0, 1)).reshape(np.shape(dt_bias))
    return {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta, "A_log": d_A_log, "dt_bias": d_dt_bias,
            "initial_state": np.swapaxes(first, 2, 3) if state_v_first else first}


def _l2norm_backward(dy: F64, x: F64, eps: float = 1e-6) -> F64:
    """Gradient by x of l2norm(x), given that by its result."""
    square = np.sum(x * x, axis=-1, keepdims=True) + eps
    return (dy - x * np.sum(x * dy, axis=-1, keepdims=True) / square) / np.sqrt(square)


def silu(x: ArrayLike) -> F64:
    """x * sigmoid(x)."""
    return np.asarray(x, np.float64) * sigmoid(x)


def causal_conv1d(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, activation: str | None = "silu",
                  initial_state: ArrayLike | None = None, output_final_state: bool = False,
                  cu_seqlens: Any = None) -> tuple[F64, F64 | None]:
    """y_t = sum over w of weight[:, w] * x_{t - W + 1 + w}: the last tap is the current token."""
    x = np.asarray(x, np.float64)
    B, T, D = x.shape
    w = np.asarray(weight, np.float64).reshape(D, -1)
    past = w.shape[1] - 1
    spans = _spans(B, T, cu_seqlens)
    y = np.zeros_like(x)
    final = np.zeros((len(spans), D, past))
    for n, (b, start, end) in enumerate(spans):
        history = np.zeros((past, D))
        if initial_state is not None and past:
            history = np.asarray(initial_state, np.float64)[n].T[-past:]
        rows = np.concatenate([history, x[b, start:end]])  # raw inputs, oldest first
        for t in range(end - start):
            y[b, start + t] = np.einsum("dw,wd->d", w, rows[t:t + past + 1])
        final[n] = rows[len(rows) - past:].T
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return (silu(y) if activation else y), final if output_final_state else None


def causal_conv1d_update(x: ArrayLike, state: NDArray[Any], weight: ArrayLike, bias: ArrayLike | None = None,
                         activation: str | None = "silu") -> F64:
    """One token; `state` [B, D, W - 1] shifts by one in place."""
    y, final = causal_conv1d(np.asarray(x, np.float64)[:, None], weight, bias, activation, state, True)
    state[:] = final
    return y[:, 0]


def rms_norm_gated(x: ArrayLike, gate: ArrayLike, weight: ArrayLike, eps: float = 1e-5,
                   activation: str = "sigmoid") -> F64:
    """Norm first, then the gate: x / sqrt(mean(x * x) + eps) * weight * activation(gate)."""
    x = np.asarray(x, np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)
    return y * (sigmoid(gate) if activation == "sigmoid" else silu(gate))


def kda_layer(x: ArrayLike, tensors: Mapping[str, ArrayLike], num_heads: int, num_v_heads: int,
              lower_bound: float | None = None, norm_eps: float = 1e-5,
              state: tuple[ArrayLike, Sequence[ArrayLike]] | None = None) -> tuple[F64, tuple[F64, list[F64]]]:
    """The whole layer: x [B, T, hidden] -> (y, (S, histories of q, k, v [B, D, W - 1])).

    tensors: by their checkpoint's names (weights.tensor_shapes), without a prefix. g_proj.weight there: a full-rank
    output gate. state: what an earlier call returned.
    """
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    x = np.asarray(x, np.float64)
    B, T = x.shape[:2]
    S, pasts = state if state is not None else (None, (None, None, None))
    qkv, histories = [], []
    for name, heads, past in zip("qkv", (num_heads, num_heads, num_v_heads), pasts, strict=True):
        y, history = causal_conv1d(x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"], None, "silu", past, True)
        assert history is not None
        qkv.append(y.reshape(B, T, heads, -1))
        histories.append(history)
    g = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T).reshape(B, T, num_v_heads, -1)
    q, k, v = qkv
    o, final = fused_recurrent_kda(q, k, v, g, x @ w["b_proj.weight"].T, w["A_log"], w["dt_bias"], None, S, True, True,
                                   True, True, lower_bound=lower_bound)
    assert final is not None
    gate = x @ w["g_proj.weight"].T if "g_proj.weight" in w else x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    o = rms_norm_gated(o, gate.reshape(o.shape), w["o_norm.weight"], norm_eps)
    return o.reshape(B, T, -1) @ w["o_proj.weight"].T, (final, histories)


def quantized_matmul(x: ArrayLike, codes: ArrayLike, scales: ArrayLike, bits: int = 8) -> F64:
    """x [..., K] float32 times the transpose of canonical Q8G or Q4G codes and scales [N, groups] (quant.py): [..., N].

    x is quantised by token and group: scale = max|x| / 127, code = x * (127 / max|x|) to nearest, ties to even, each
    operation in float32, because a code that falls on the other side of a tie is another code.
    """
    packed, weight_scales = np.asarray(codes), np.asarray(scales, np.float64)
    if bits == 4:  # two codes in a byte, each plus 8, the lower column in the low nibble
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).astype(np.int8) - 8
    weights = packed.reshape(*weight_scales.shape, -1) * weight_scales[:, :, None]
    rows = np.asarray(x, np.float32)
    N, groups, size = weights.shape
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, groups * size - rows.shape[-1])])
    grouped = rows.reshape(*rows.shape[:-1], groups, size)
    most = np.abs(grouped).max(-1, keepdims=True)
    inverse = np.float32(127) / np.where(most > 0, most, np.float32(1))
    activations = np.rint(grouped * inverse).astype(np.float64) * (most / np.float32(127)).astype(np.float64)
    return activations.reshape(rows.shape) @ weights.reshape(N, -1).T
