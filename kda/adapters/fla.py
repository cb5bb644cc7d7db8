"""The import names of flash-linear-attention, backed by this package on the CPU.

Modelling code that comes with a checkpoint imports fla, whose kernels need a GPU. After `install()` those imports find
this module's functions and classes: the same arguments and results, over CPU tensors. `uninstall()` puts things back.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kda import __version__
from kda.adapters import torch as kt

_saved: dict[str, ModuleType] | None = None  # what stood under fla's names before install(); None: not installed
_warned = False


# ---- fla.ops.kda ----

def _no_more(name: str, rest: dict[str, Any], passed_over: tuple[str, ...]) -> None:
    for option, value in rest.items():
        if option not in passed_over and value is not None and value is not False:
            raise TypeError(f"{name}: {option} is not supported on the CPU")


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    **rest: Any,
) -> tuple[Tensor | None, ...]:
    """kda.adapters.torch.chunk_kda in fla's argument order; o has q's dtype. Differentiable.

    transpose_state_layout is the older name of state_v_first. Raises TypeError for options that need a GPU.
    """
    _no_more("chunk_kda", rest, ("cu_seqlens_cpu", "chunk_indices", "use_graph", "max_num_seqs"))
    o, *more = kt.chunk_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        state_v_first if transpose_state_layout is None else transpose_state_layout, cu_seqlens, safe_gate, chunk_size,
        return_intermediate_states, disable_recompute)
    assert o is not None
    return o.to(q.dtype), *more


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
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """kda.adapters.torch.fused_recurrent_kda; an initial state of 16 bits is widened. Differentiable."""
    _no_more("fused_recurrent_kda", rest, ("cu_seqlens_cpu",))
    return kt.fused_recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, None if initial_state is None else initial_state.float(),
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, state_v_first if transpose_state_layout is None else transpose_state_layout, cu_seqlens)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | int | None = None,
    lower_bound: float | Tensor | None = None,
    output_dtype: torch.dtype | Tensor = torch.float32,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    A: Tensor | None = None,
    head_k_dim: int | None = None,
    g_bias: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """kda.adapters.torch.fused_kda_gate in both of fla's forms:

        fused_kda_gate(g [..., HV, K], A_log, dt_bias, lower_bound, output_dtype)
        fused_kda_gate(g [..., HV * K], A, head_k_dim, g_bias=None, b=None, beta=1.0, threshold=20.0)

    The older one splits the heads itself and, given b, returns sigmoid(b) in float32 as well.
    """
    if isinstance(dt_bias, int):  # the older form by position: its third is head_k_dim, then g_bias and b
        head_k_dim, dt_bias = dt_bias, None
        if isinstance(lower_bound, Tensor):
            g_bias, lower_bound = lower_bound, None
        if isinstance(output_dtype, Tensor):
            b, output_dtype = output_dtype, torch.float32
    if beta != 1.0 or threshold != 20.0:
        raise ValueError(f"fused_kda_gate: expected beta 1.0 and threshold 20.0, got {beta} and {threshold}")
    if head_k_dim is not None:
        g = g.unflatten(-1, (-1, head_k_dim))
    bias = dt_bias if g_bias is None else g_bias
    bound = None if lower_bound is None else float(lower_bound)
    assert isinstance(output_dtype, torch.dtype)
    y = kt.fused_kda_gate(g, A if A_log is None else A_log, bias, bound).to(output_dtype)
    return y if b is None else (y, b.float().sigmoid())


# ---- fla.modules ----

def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x * x) + eps) over the last axis."""
    return kt.l2norm(x if output_dtype is None else x.to(output_dtype), eps)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """norm(x + residual) * weight * activation(g) over the last axis; with prenorm also the sum that was normalised."""
    if bias is not None:
        raise ValueError("rms_norm_gated: bias is not supported")
    dtype = x.dtype
    if residual is not None:
        x = x.float() + residual.float()
    y = kt.rms_norm_gated(x, g, torch.ones(x.shape[-1]) if weight is None else weight, eps, activation).to(dtype)
    if not prenorm:
        return y
    return y, x.float() if residual_in_fp32 else x.to(dtype if residual is None else residual.dtype)


class FusedRMSNormGated(nn.Module):
    """fla.modules.FusedRMSNormGated: rms_norm_gated with a weight of hidden_size."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
                 device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation: expected one of 'swish', 'silu', 'sigmoid', got {activation!r}")
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Set the weight [hidden_size], where there is one, to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """What repr shows between the parentheses."""
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}"

    def forward(self, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """rms_norm_gated of x and the gate g, both [..., hidden_size], with this module's weight: x's shape and dtype,
        and with prenorm the sum with `residual` as well. Raises as rms_norm_gated does."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)


class ShortConvolution(nn.Conv1d):
    """fla.modules.ShortConvolution: a depthwise causal convolution over x [B, T, D], and its cache [N, D, W].

    The cache holds the last W raw inputs in x's dtype, oldest first. A call without gradients of one token per
    sequence moves a given cache on in place, as fla's does.
    """

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu",
                 backend: str | None = "triton", device: Any = None, dtype: torch.dtype | None = None,
                 **rest: Any) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias,
                         padding=kernel_size - 1, device=device, dtype=dtype)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation: expected one of None, 'silu', 'swish', got {activation!r}")
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    @property
    def state_size(self) -> int:
        """Elements of one sequence's cache: D * W."""
        return self.hidden_size * self.kernel_size[0]

    def forward(self, x: Tensor, residual: Tensor | None = None, mask: Tensor | None = None,
                cache: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                **rest: Any) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D] of x's dtype, plus `residual`; and the cache after the last token, or None."""
        B, T, D = x.shape
        W = self.kernel_size[0]
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: cannot be combined with cu_seqlens")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        past = None if cache is None else cache[:, :, cache.shape[2] - (W - 1):]
        y, _ = kt.causal_conv1d(x, self.weight, self.bias, self.activation, past, False, cu_seqlens)
        if residual is not None:
            y = y + residual
        step = not torch.is_grad_enabled() and B * T == N and (
            cu_seqlens is None or bool((torch.diff(cu_seqlens) == 1).all()))
        if not (output_final_state or (step and cache is not None)):
            return y, None
        bounds = [(n, 0, T) for n in range(N)]
        if cu_seqlens is not None:
            edges = cu_seqlens.tolist()
            bounds = [(0, edges[n], edges[n + 1]) for n in range(N)]
        before = x.new_zeros(N, D, W) if cache is None else cache
        after = torch.stack([torch.cat([before[n].to(x.dtype), x[row, max(start, end - W):end].T], dim=1)[:, -W:]
                             for n, (row, start, end) in enumerate(bounds)])
        if step and cache is not None:
            cache.copy_(after[:, :, W - cache.shape[2]:])
            after = cache
        return y, after if output_final_state else None


# ---- fla.layers.utils, fla.ops.utils.index, fla.utils ----

def tensor_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that remembers its last call and returns that result again for the same objects."""
    last: list[Any] = []

    @functools.wraps(function)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        """`function`, or its last result where every argument is the object that it was then."""
        if last:
            old_args, old_kwargs, result = last
            if (len(args) == len(old_args) and kwargs.keys() == old_kwargs.keys()
                    and all(a is b for a, b in zip(args, old_args, strict=True))
                    and all(value is old_kwargs[name] for name, value in kwargs.items())):
                return result
        result = function(*args, **kwargs)
        last[:] = [args, kwargs, result]
        return result

    return remembering


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """[N] tokens of each sequence."""
    return torch.diff(cu_seqlens)


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """[B] int32 tokens of each row of a mask [B, T], 1 where a token is."""
    return mask.sum(dim=-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """[N + 1] sums of lengths from 0."""
    return F.pad(lens.cumsum(dim=0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """[B + 1] offsets of the rows of a mask [B, T] once their tokens are packed."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where the tokens of a mask [B, T] are in the flattened batch, cu_seqlens [B + 1] int32, and the longest row."""
    lens = prepare_lens_from_mask(attention_mask)
    indices = attention_mask.flatten().nonzero().flatten()
    return indices, prepare_cu_seqlens_from_lens(lens), int(lens.max())


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]."""
    return x[indices]


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """[tokens, ...] put back to where `indices` says in [batch_size, seq_len, ...]; zeros elsewhere."""
    y = hidden_states.new_zeros(batch_size * seq_len, *hidden_states.shape[1:])
    return y.index_copy(0, indices, hidden_states).unflatten(0, (batch_size, seq_len))


# ---- the names ----

_INDEX = (prepare_lens, prepare_lens_from_mask, prepare_cu_seqlens_from_lens, prepare_cu_seqlens_from_mask)
_NAMES: dict[str, tuple[Any, ...]] = {
    "fla": (),
    "fla.layers": (),
    "fla.layers.utils": (get_unpad_data, index_first_axis, pad_input, *_INDEX),
    "fla.modules": (FusedRMSNormGated, ShortConvolution, l2norm),
    "fla.modules.convolution": (ShortConvolution,),
    "fla.modules.fused_norm_gate": (FusedRMSNormGated, rms_norm_gated),
    "fla.modules.l2norm": (l2norm,),
    "fla.ops": (),
    "fla.ops.kda": (chunk_kda, fused_recurrent_kda),
    "fla.ops.kda.chunk": (chunk_kda,),
    "fla.ops.kda.fused_recurrent": (fused_recurrent_kda,),
    "fla.ops.kda.gate": (fused_kda_gate,),
    "fla.ops.utils": (),
    "fla.ops.utils.index": _INDEX,
    "fla.utils": (tensor_cache,),
}


def _stands(name: str) -> bool:
    return name == "fla" or name.startswith("fla.")


def install(force: bool = False) -> bool:
    """Make fla's names importable, backed by this package. Returns whether they are now.

    An installed fla is left alone where it can run, which is where torch sees an accelerator, unless `force`. What the
    first call did is said once, in a warning. Modules that imported fla's functions before keep them.
    """
    global _saved, _warned
    if _saved is not None:
        return True
    found = "fla" in sys.modules or importlib.util.find_spec("fla") is not None
    if found and torch.accelerator.is_available() and not force:
        return False
    _saved = {name: module for name, module in sys.modules.items() if _stands(name)}
    for name in _saved:
        del sys.modules[name]
    for name, members in _NAMES.items():
        module = ModuleType(name, f"Names of flash-linear-attention, backed by kda {__version__} on the CPU.")
        package = any(other.startswith(name + ".") for other in _NAMES)
        module.__spec__ = ModuleSpec(name, None, is_package=package)
        if package:
            module.__path__ = []
        for member in members:
            setattr(module, member.__name__, member)
        module.__all__ = [member.__name__ for member in members]  # type: ignore[attr-defined]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and not hasattr(sys.modules[parent], child):  # fla.modules.l2norm is the function, as in fla
            setattr(sys.modules[parent], child, module)
    sys.modules["fla"].__version__ = f"0.6.0+kda.{__version__}"  # type: ignore[attr-defined]
    sys.modules["fla.modules.l2norm"].l2_norm = l2norm  # type: ignore[attr-defined]
    if not _warned:
        _warned = True
        why = "is installed but finds no accelerator" if found else "is not installed"
        warnings.warn(f"kda.adapters.fla: flash-linear-attention {why}; {', '.join(n for n, m in _NAMES.items() if m)} "
                      "are now kda's, on the CPU", stacklevel=2)
    return True


def uninstall() -> None:
    """Take the names away again and put back what stood there."""
    global _saved
    if _saved is None:
        return
    for name in [name for name in sys.modules if _stands(name)]:
        del sys.modules[name]
    sys.modules.update(_saved)
    _saved = None
