"""The functions of this package over torch tensors on the CPU: the same numbers, nothing copied on the way.

A tensor becomes a numpy view of its memory (float16 as it is, bfloat16 through its bits), in any strides; results come
back the same way. Each function is an operator of torch.library (torch.ops.kda), so that torch.compile and FakeTensor
know its shapes. What they compute, and their arguments' shapes and meaning, stand in kda.ops.

fused_recurrent_kda and chunk_kda are differentiable through this package's own backward kernels, in float32. The
functions around them (gate, norms, short convolution) run as plain torch operations, slower, where a gradient is
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kda import ops
from kda.quant import QuantizedMatrix

_BF16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# ---- tensors as arrays and back ----

def as_array(x: Tensor, name: str = "tensor") -> np.ndarray[Any, Any]:
    """A numpy view of a CPU tensor's memory, without its gradient; bfloat16 as ml_dtypes.bfloat16.

    Raises ValueError for a tensor that is not on the CPU or not dense.
    """
    if x.device.type != "cpu":
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {x.device}; move it with {name}.cpu()")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got {x.layout}; convert with {name}.to_dense()")
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(_BF16)
    return x.numpy()


def as_tensor(x: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over a numpy array's memory."""
    if x.dtype == _BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _optional(x: Tensor | None, name: str) -> np.ndarray[Any, Any] | None:
    return None if x is None else as_array(x, name)


def _check(**tensors: Any) -> None:
    """Before an operator is chosen: tensors, on the CPU, of a dtype that the kernels take."""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(x).__name__}")
        if x.device.type not in ("cpu", "meta"):
            raise ValueError(f"{name}: expected a tensor on the CPU, got one on {x.device}; move it with {name}.cpu()")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype} {list(x.shape)}; convert "
                            f"with {name}.float()")


def _wants_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _eager(*tensors: Any) -> bool:
    """Whether an operator can be left out: nothing traces, and no gradient is wanted. Its dispatch costs 80 us."""
    return (not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
            and not torch.jit.is_tracing() and not _wants_gradient(*tensors)
            and all(type(x) is Tensor or type(x) is nn.Parameter for x in tensors if x is not None))


def _sequences(cu_seqlens: Any) -> Tensor | None:
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens.cpu()
    return torch.as_tensor(np.asarray(cu_seqlens))


# ---- the delta rule ----

def _delta_rule_now(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, lower_bound: float | None,
    qk_l2norm: bool, gate: bool, beta_sigmoid: bool, neg_eigval: bool, v_first: bool, chunked: bool, spacing: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final state, states after every `spacing` tokens: none for 0)."""
    arguments = _numpy_arguments(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, lower_bound,
                                 qk_l2norm, gate, beta_sigmoid, neg_eigval, v_first)
    if spacing or chunked:
        o, final, *states = ops.chunk_kda(**arguments, output_final_state=True, chunk_size=spacing or 64,
                                          return_intermediate_states=spacing > 0)
    else:
        o, final = ops.fused_recurrent_kda(**arguments, output_final_state=True)
        states = []
    assert final is not None
    return as_tensor(o), as_tensor(final), as_tensor(states[0]) if states else torch.empty(0)


def _numpy_arguments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, lower_bound: float | None,
    qk_l2norm: bool, gate: bool, beta_sigmoid: bool, neg_eigval: bool, v_first: bool,
) -> dict[str, Any]:
    return {
        "q": as_array(q, "q"), "k": as_array(k, "k"), "v": as_array(v, "v"), "g": as_array(g, "g"),
        "beta": as_array(beta, "beta"), "A_log": _optional(A_log, "A_log"), "dt_bias": _optional(dt_bias, "dt_bias"),
        "initial_state": _optional(initial_state, "initial_state"),
        "cu_seqlens": _optional(cu_seqlens, "cu_seqlens"), "scale": scale, "lower_bound": lower_bound,
        "use_qk_l2norm_in_kernel": qk_l2norm, "use_gate_in_kernel": gate, "use_beta_sigmoid_in_kernel": beta_sigmoid,
        "allow_neg_eigval": neg_eigval, "state_v_first": v_first,
    }


_delta_rule = torch.library.custom_op("kda::delta_rule", _delta_rule_now, mutates_args=())


@_delta_rule.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, lower_bound,
      qk_l2norm, gate, beta_sigmoid, neg_eigval, v_first, chunked, spacing):
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    head = (V, K) if v_first else (K, V)
    states = q.new_empty(0, dtype=torch.float32)
    if spacing:
        n = T // spacing if cu_seqlens is None else torch.library.get_ctx().new_dynamic_size()
        states = q.new_empty((N, n, HV, *head), dtype=torch.float32)
    return (v.new_empty((B, T, HV, V)), q.new_empty((N, HV, *head), dtype=torch.float32), states)


@torch.library.custom_op("kda::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    d_o: Tensor, d_final: Tensor | None, states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float | None, lower_bound: float | None, qk_l2norm: bool, gate: bool, beta_sigmoid: bool, neg_eigval: bool,
    v_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by q, k, v, g, beta, A_log, dt_bias, initial_state, in their dtypes; empty for None."""
    arguments = _numpy_arguments(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, lower_bound,
                                 qk_l2norm, gate, beta_sigmoid, neg_eigval, v_first)
    kept = as_array(states, "states")
    gradients = ops.chunk_kda_backward(as_array(d_o, "d_o"), _optional(d_final, "d_final_state"), **arguments,
                                       states=np.swapaxes(kept, 3, 4) if v_first else kept)

    def of(name: str, x: Tensor | None) -> Tensor:
        """The gradient by x, in its shape and dtype; an empty tensor where there is none."""
        gradient = gradients[name]
        return torch.empty(0) if x is None or gradient is None else as_tensor(gradient).to(x.dtype)

    return (of("q", q), of("k", k), of("v", v), of("g", g), of("beta", beta), of("A_log", A_log),
            of("dt_bias", dt_bias), of("initial_state", initial_state))


@_delta_rule_backward.register_fake
def _(d_o, d_final, states, q, k, v, g, beta, A_log, dt_bias, initial_state, *options):
    return tuple(torch.empty(0) if x is None else x.new_empty(x.shape)
                 for x in (q, k, v, g, beta, A_log, dt_bias, initial_state))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], output[2])
    ctx.options = inputs[9:16]
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    *inputs, states = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(inputs[2])
    gradients = _delta_rule_backward(d_o, d_final, states, *inputs, *ctx.options)
    return (*(gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)),
            *(None,) * 10)


_delta_rule.register_autograd(_backward, setup_context=_keep)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """kda.fused_recurrent_kda over CPU tensors: o [B, T, HV, V] of v's dtype and the final state, float32, or None.

    Where a gradient is wanted it is chunk_kda, whose result is the same to rounding.

    Raises ValueError for tensors elsewhere than on the CPU, TypeError for float64 or integers, and what
    kda.fused_recurrent_kda raises.
    """
    o, final, _ = _run(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens, False, 0)
    return o, final if output_final_state else None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    safe_gate: bool = False,
    chunk_size: int = 64,
    return_intermediate_states: bool = False,
    disable_recompute: bool = False,
) -> tuple[Tensor | None, ...]:
    """kda.chunk_kda over CPU tensors, differentiable by q, k, v, g, beta, A_log, dt_bias and initial_state.

    For the backward pass the states after every 64 tokens are kept, [N, T // 64, HV, K, V] float32, and those between
    are computed again. Gradients are computed in float32 and have their tensor's dtype. Intermediate states carry no
    gradient. safe_gate and disable_recompute are accepted for fla's callers.

    Returns o [B, T, HV, V] of v's dtype, the final state (float32, or None), and with return_intermediate_states the
    states after every chunk_size tokens. Raises as fused_recurrent_kda.
    """
    tensors = (q, k, v, g, beta, A_log, dt_bias)
    options = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
               state_v_first, cu_seqlens)
    if return_intermediate_states and (chunk_size < 1 or isinstance(chunk_size, bool)):
        raise ValueError(f"chunk_size: expected an int >= 1, got {chunk_size!r}")
    graph = _wants_gradient(*tensors, initial_state)
    o, final, states = _run(*tensors, scale, initial_state, *options, True,
                            chunk_size if return_intermediate_states and not graph else 0)
    if not output_final_state:
        final = None
    if not return_intermediate_states:
        return o, final
    if graph:
        with torch.no_grad():
            _, _, states = _run(*tensors, scale, initial_state, *options, True, chunk_size)
    return o, final, states


def _run(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, scale: float | None, initial_state: Any,
    qk_l2norm: bool, gate: bool, beta_sigmoid: bool, neg_eigval: bool, lower_bound: float | None, v_first: bool,
    cu_seqlens: Any, chunked: bool, spacing: int,
) -> tuple[Tensor, Tensor | None, Tensor]:
    _check(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
    for name, x, axes in (("q", q, 4), ("v", v, 4)):
        if x.ndim != axes:
            raise ValueError(f"{name}: expected [B, T, heads, {'K' if name == 'q' else 'V'}], got {list(x.shape)}")
    if not gate:
        A_log = dt_bias = None
    if _wants_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state):
        spacing = ops.BACKWARD_SPACING
    run = _delta_rule_now if _eager(q, k, v, g, beta, A_log, dt_bias, initial_state) else _delta_rule
    return run(
        q, k, v, g, beta, A_log, dt_bias, initial_state, _sequences(cu_seqlens),
        None if scale is None else float(scale), None if lower_bound is None else float(lower_bound), bool(qk_l2norm),
        bool(gate), bool(beta_sigmoid), bool(neg_eigval), bool(v_first), chunked, spacing)


# ---- what stands around it ----

def _gate_now(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    return as_tensor(ops.fused_kda_gate(as_array(g, "g"), _optional(A_log, "A_log"), _optional(dt_bias, "dt_bias"),
                                        lower_bound))


_gate = torch.library.custom_op("kda::gate", _gate_now, mutates_args=())


@_gate.register_fake
def _(g, A_log, dt_bias, lower_bound):
    return g.new_empty(g.shape, dtype=torch.float32)


def fused_kda_gate(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                   lower_bound: float | None = None) -> Tensor:
    """kda.fused_kda_gate over CPU tensors: log decay, float32, shaped as g [..., HV, K]."""
    _check(g=g, A_log=A_log, dt_bias=dt_bias)
    if not _wants_gradient(g, A_log, dt_bias):
        return (_gate_now if _eager(g, A_log, dt_bias) else _gate)(
            g, A_log, dt_bias, None if lower_bound is None else float(lower_bound))
    HV, K = g.shape[-2:]
    z = g.float()
    if dt_bias is not None:
        z = z + dt_bias.float().reshape(HV, K)
    factor = None if A_log is None else A_log.float().reshape(HV, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(z if factor is None else factor * z)
    if factor is None:
        raise ValueError("A_log: the softplus gate needs it; pass A_log [HV], or lower_bound for the bounded gate")
    return -factor * F.softplus(z)


def _l2norm_now(x: Tensor, eps: float) -> Tensor:
    return as_tensor(ops.l2norm(as_array(x, "x"), eps))


_l2norm = torch.library.custom_op("kda::l2norm", _l2norm_now, mutates_args=())


@_l2norm.register_fake
def _(x, eps):
    return x.new_empty(x.shape)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """kda.l2norm over a CPU tensor: x / sqrt(sum(x * x) + eps) over the last axis, of x's dtype."""
    _check(x=x)
    if not _wants_gradient(x):
        return (_l2norm_now if _eager(x) else _l2norm)(x, float(eps))
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_gated_now(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    return as_tensor(ops.rms_norm_gated(as_array(x, "x"), as_array(gate, "gate"), as_array(weight, "weight"), eps,
                                        activation))


_rms_norm_gated = torch.library.custom_op("kda::rms_norm_gated", _rms_norm_gated_now, mutates_args=())


@_rms_norm_gated.register_fake
def _(x, gate, weight, eps, activation):
    return x.new_empty(x.shape)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5, activation: str = "sigmoid") -> Tensor:
    """kda.rms_norm_gated over CPU tensors: norm(x) * weight * activation(gate) over the last axis, of x's dtype."""
    _check(x=x, gate=gate, weight=weight)
    if not _wants_gradient(x, gate, weight):
        run = _rms_norm_gated_now if _eager(x, gate, weight) else _rms_norm_gated
        return run(x, gate, weight, float(eps), activation)
    if activation not in ("sigmoid", "silu", "swish"):
        raise ValueError(f"activation: expected one of 'sigmoid', 'silu', 'swish', got {activation!r}")
    wide, by = x.float(), gate.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y * (torch.sigmoid(by) if activation == "sigmoid" else F.silu(by))).to(x.dtype)


def _causal_conv1d_now(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
                   cu_seqlens: Tensor | None, activation: str | None) -> tuple[Tensor, Tensor]:
    y, final = ops.causal_conv1d(
        as_array(x, "x"), as_array(weight, "weight"), _optional(bias, "bias"), activation,
        _optional(initial_state, "initial_state"), True, _optional(cu_seqlens, "cu_seqlens"))
    assert final is not None
    return as_tensor(y), as_tensor(final)


_causal_conv1d = torch.library.custom_op("kda::causal_conv1d", _causal_conv1d_now, mutates_args=())


@_causal_conv1d.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, activation):
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((N, x.shape[2], weight.shape[-1] - 1), dtype=torch.float32)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """kda.causal_conv1d over CPU tensors: y [B, T, D] of x's dtype, and the last W - 1 raw inputs [N, D, W - 1],
    float32, or None."""
    _check(x=x, weight=weight, bias=bias, initial_state=initial_state)
    cu_seqlens = _sequences(cu_seqlens)
    if not _wants_gradient(x, weight, bias, initial_state):
        run = _causal_conv1d_now if _eager(x, weight, bias, initial_state) else _causal_conv1d
        y, final = run(x, weight, bias, initial_state, cu_seqlens, activation)
        return y, final if output_final_state else None
    if activation not in ("silu", "swish", None):
        raise ValueError(f"activation: expected one of 'silu', 'swish', None, got {activation!r}")
    W = weight.shape[-1]
    taps = weight.float().reshape(weight.shape[0], 1, W)
    rows = [(i, 0, x.shape[1]) for i in range(x.shape[0])]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        rows = [(0, start, end) for start, end in pairwise(bounds)]
    parts, finals = [], []
    for n, (row, start, end) in enumerate(rows):
        part = x[row, start:end].float().T
        past = part.new_zeros(part.shape[0], W - 1)
        if initial_state is not None:
            past = initial_state[n, :, initial_state.shape[2] - (W - 1):].float()
        part = torch.cat([past, part], dim=1)
        finals.append(part[:, part.shape[1] - (W - 1):])
        if end > start:
            parts.append(F.conv1d(part, taps, None if bias is None else bias.float(), groups=part.shape[0]).T)
    y = torch.cat(parts).reshape(x.shape) if parts else x * 0
    return (F.silu(y) if activation else y).to(x.dtype), torch.stack(finals) if output_final_state else None


def _causal_conv1d_update_now(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None,
                          activation: str | None) -> Tensor:
    return as_tensor(ops.causal_conv1d_update(as_array(x, "x"), as_array(state, "state"), as_array(weight, "weight"),
                                              _optional(bias, "bias"), activation))


_causal_conv1d_update = torch.library.custom_op(
    "kda::causal_conv1d_update", _causal_conv1d_update_now, mutates_args=("state",))


@_causal_conv1d_update.register_fake
def _(x, state, weight, bias, activation):
    return x.new_empty(x.shape)


def causal_conv1d_update(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None,
                         activation: str | None = "silu") -> Tensor:
    """kda.causal_conv1d_update over CPU tensors: one token x [B, D]; `state` [B, D, W - 1], float32, moves on in place.
    Without gradients."""
    _check(x=x, state=state, weight=weight, bias=bias)
    with torch.no_grad():
        run = _causal_conv1d_update_now if _eager(x, state, weight, bias) else _causal_conv1d_update
        return run(x, state, weight, bias, activation)


# ---- quantised weights ----

def _quantized_matmul_now(x: Tensor, codes: Tensor, scales: Tensor, N: int, K: int, bits: int, group_size: int,
                      isa: str) -> Tensor:
    matrix = QuantizedMatrix(codes.numpy(), scales.numpy().view(np.uint16), (N, K), bits, group_size, isa)
    return as_tensor(matrix.matmul(as_array(x, "x")))


_quantized_matmul = torch.library.custom_op("kda::quantized_matmul", _quantized_matmul_now, mutates_args=())


@_quantized_matmul.register_fake
def _(x, codes, scales, N, K, bits, group_size, isa):
    return x.new_empty((*x.shape[:-1], N))


class QuantizedLinear(nn.Module):
    """torch.nn.Linear with a kda.QuantizedMatrix for its weight, for inference on the CPU: x [..., in_features] in
    float32, float16 or bfloat16 gives [..., out_features] in x's dtype.

    The state dict holds the canonical `codes` and `scales`, which any ISA packs for itself on load, and `bias`.
    """

    _codes: Tensor
    _scales: Tensor

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.bits, self.group_size = matrix.bits, matrix.group_size
        self._take(matrix)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def _take(self, matrix: QuantizedMatrix) -> None:
        self.isa = matrix.isa
        self.register_buffer("_codes", torch.from_numpy(matrix._codes), persistent=False)
        self.register_buffer("_scales", torch.from_numpy(matrix._scales.view(np.int16)), persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int = 8, group_size: int = 128) -> QuantizedLinear:
        """Quantise the weight of a Linear on the CPU; see QuantizedMatrix.quantize for what it raises."""
        return cls(QuantizedMatrix.quantize(as_array(linear.weight, "weight"), bits, group_size), linear.bias)

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weight, over this module's memory."""
        if self._codes.device.type != "cpu":
            raise ValueError(f"QuantizedLinear: runs on the CPU, and is on {self._codes.device}")
        return QuantizedMatrix(self._codes.numpy(), self._scales.numpy().view(np.uint16),
                               (self.out_features, self.in_features), self.bits, self.group_size, self.isa)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] times the transpose of the weight, plus bias."""
        _check(x=x)
        with torch.no_grad():
            run = _quantized_matmul_now if _eager(x) else _quantized_matmul
            y = run(x, self._codes, self._scales, self.out_features, self.in_features, self.bits,
                    self.group_size, self.isa)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """What repr shows between the parentheses."""
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"bits={self.bits}, group_size={self.group_size}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        matrix = self.matrix
        destination[prefix + "codes"] = torch.from_numpy(matrix.codes)
        destination[prefix + "scales"] = torch.from_numpy(matrix.scales)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any,
                              unexpected_keys: Any, error_msgs: Any) -> None:
        names = [prefix + "codes", prefix + "scales"]
        found = [state_dict[name] for name in names if name in state_dict]
        if len(found) == 2:
            try:
                self._take(QuantizedMatrix.from_codes(
                    as_array(found[0], "codes"), as_array(found[1], "scales"), (self.out_features, self.in_features),
                    self.bits, self.group_size))
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}: {error}")
        elif strict:
            missing_keys.extend(name for name in names if name not in state_dict)
        rest = {name: x for name, x in state_dict.items() if name not in names}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
