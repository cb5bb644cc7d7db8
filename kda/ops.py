"""The functions of fla.ops.kda over numpy arrays.

Here arguments become what the core takes (or an error that says what would be right), and nothing is
computed. The formulas are in reference.py, one line each.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kda import _core
from kda.runtime import isa_index

_F32 = np.dtype(np.float32)
_F16 = np.dtype(np.float16)
_I64 = np.dtype(np.int64)
_F32_MAX = float(np.finfo(np.float32).max)
_U16 = np.dtype(np.uint16)  # bfloat16 on its way through the core
_BF16 = np.dtype(ml_dtypes.bfloat16)

BACKWARD_SPACING = 64  # tokens between the states that the backward pass is given

Array = NDArray[Any]


# ---- arguments ----

def _described(x: Array) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _is_native_or_swapped(dtype: np.dtype[Any], *floats: np.dtype[Any]) -> bool:
    return dtype.kind == "f" and dtype.newbyteorder("=") in floats  # strings of variable width have no byte order


def _check_dtype(name: str, x: Array) -> None:
    if x.dtype == _BF16 or _is_native_or_swapped(x.dtype, _F32, _F16):
        return
    raise TypeError(
        f"{name}: expected float32, float16 or bfloat16, got {_described(x)}; convert with {name}.astype(np.float32)")


def _array(name: str, x: Any) -> Array:
    """np.asarray with an error that says whose it is."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected an array, got {type(x).__name__}, which numpy refuses: {error}") from error


def _number(name: str, value: Any) -> float:
    """A real number, an array of no axes included, as a float."""
    dtype = value.dtype if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else None
    if not isinstance(value, Real) and (dtype is None or (dtype.kind not in "fiu" and dtype != _BF16)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that a float can hold: {error}") from error


def _input(name: str, x: Any, inner: bool = True) -> Array:
    """x for the core: native byte order, aligned, last axis contiguous if `inner`, bfloat16 as its uint16 bits."""
    if type(x) is not np.ndarray:
        x = _array(name, x)
    dtype = x.dtype
    if dtype is not _F32:
        _check_dtype(name, x)
        if dtype == _BF16:
            x = x.view(_U16)
        elif not dtype.isnative:
            x = x.astype(dtype.newbyteorder("="))
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        return x
    if (inner and x.ndim and x.shape[-1] > 1 and x.strides[-1] != x.itemsize) or not flags.aligned:
        x = np.array(x, order="C")
    return x


def _packed(x: Array, dtype: np.dtype[Any]) -> Array:
    """x as an aligned C-contiguous array of a native dtype; np.ascontiguousarray would leave it misaligned."""
    x = np.ascontiguousarray(x, dtype)
    return x if x.flags.aligned else x.copy()


def _shape_error(name: str, x: Array, want: Sequence[Any], why: str = "") -> ValueError:
    dims = ", ".join(str(d) for d in want)
    return ValueError(f"{name}: expected [{dims}]{why}, got {list(x.shape)}")


def _output(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: dict[str, Any] | None = None,
            inner: int = 1) -> Array:
    """A caller's array to be written in place: exactly right, or refused. `inner` last axes must be contiguous. Without
    `inputs` the caller sees to overlaps."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name}: expected a numpy array to write into, got {type(x).__name__}")
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {_described(x)}")
    flags = x.flags
    if not flags.writeable:
        raise ValueError(f"{name}: is read-only; an update in place would be lost")
    if not flags.c_contiguous:
        _check_strides(name, x, inner)
    if not flags.aligned:
        raise ValueError(f"{name}: is not aligned to its element size")
    if dtype is _BF16:
        x = x.view(_U16)
    if inputs is not None and not _core.apart((x,), tuple(inputs.values())):  # the ranges meet
        _check_overlap(name, x, inputs)
    return x


def _check_overlap(name: str, x: Array, others: dict[str, Any]) -> None:
    """ValueError if elements of x lie in one of the others."""
    for other, array in others.items():
        if array is not None and np.shares_memory(x, array):
            raise ValueError(f"{name}: overlaps {other}; pass a separate array")


def _check_strides(name: str, x: Array, inner: int) -> None:
    """The `inner` last axes contiguous, and no two elements in one place."""
    run = x.itemsize
    for axis in range(x.ndim - 1, -1, -1):
        step = x.strides[axis]
        if x.shape[axis] > 1 and (step != run if axis >= x.ndim - inner else abs(step) < run):
            raise ValueError(f"{name}: axis {axis} has a stride of {step} bytes, expected {run}; "
                             f"pass a C-contiguous array")
        run = max(run, run * x.shape[axis] if axis >= x.ndim - inner else abs(step) * x.shape[axis])


def _elements_apart(x: Array) -> bool:
    """Whether no two elements lie in one place, as in every slice, reversal and transpose of an ordinary array."""
    extent = x.itemsize
    for step, n in sorted((abs(step), n) for step, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if step < extent:
            return x.size == 0
        extent += step * (n - 1)
    return True


def _floats(name: str, x: Any, size: int, what: str) -> Array | None:
    """A small per-head parameter as `size` contiguous float32."""
    if x is None:
        return None
    x = _array(name, x)
    _check_dtype(name, x)
    if x.size != size:
        raise ValueError(f"{name}: expected {size} values ({what}), got {list(x.shape)}")
    return _packed(x, _F32).reshape(size)


def _gate_flags(A_log: Any, lower_bound: float | None) -> int:
    if lower_bound is None:
        if A_log is None:
            raise ValueError("A_log: the softplus gate needs it; pass A_log [HV], or lower_bound for the bounded gate")
        return _core.F_GATE
    if not -_F32_MAX <= _number("lower_bound", lower_bound) < 0:
        raise ValueError(f"lower_bound: expected a finite float32 below 0, got {lower_bound}")
    return _core.F_GATE | _core.F_BOUNDED


def _scale(scale: float | None, K: int) -> float:
    return K**-0.5 if scale is None else _number("scale", scale)


def _eps(eps: float) -> float:
    value = _number("eps", eps)
    if not value >= 0:
        raise ValueError(f"eps: expected a number >= 0, got {eps}")
    return value


def _sequences(cu_seqlens: Any, B: int, T: int) -> NDArray[np.int64]:
    cu = np.array(_array("cu_seqlens", cu_seqlens))  # a copy: what is checked must still be so when the core reads it
    if cu.dtype.kind not in "iu":
        raise TypeError(f"cu_seqlens: expected integers, got {_described(cu)}")
    if cu.ndim != 1 or cu.size < 1:
        raise ValueError(f"cu_seqlens: expected [N + 1], got {list(cu.shape)}")
    if B != 1:
        raise ValueError(f"cu_seqlens: sequences are packed along T of one batch row; expected B = 1, got B = {B}")
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {cu[0]}")
    falls = np.flatnonzero(cu[1:] < cu[:-1])  # in their own dtype: a difference of unsigned ones wraps
    if falls.size:
        i = int(falls[0])
        raise ValueError(f"cu_seqlens: expected not to decrease, got {cu[i]} then {cu[i + 1]} at {i}")
    if cu[-1] != T:
        raise ValueError(f"cu_seqlens: expected to end at T = {T}, got {cu[-1]}")
    return _packed(cu, _I64)


_HUGE_PAGE = 2**21


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Uninitialised bytes that start on a cache line, or, from 2 MiB on, where a huge page may: numpy asks Linux for
    those, and gets them for the whole 2 MiB blocks of an array alone, of which one that starts anywhere has fewer or
    none. On small pages a kernel that streams walks to the next one every 4 KiB, and prefetchers stop at each."""
    boundary = _HUGE_PAGE if size >= _HUGE_PAGE else 64
    raw = np.empty(size + boundary, np.uint8)
    start = -raw.ctypes.data % boundary
    return raw[start:start + size]


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """np.empty in float32 on aligned_bytes: a vector of a state never lies across two cache lines (a fifth of a decode
    step on Zen 3). Small arrays are left to numpy."""
    size = math.prod(shape)
    if size < 16384:
        return np.empty(shape, np.float32)
    return aligned_bytes(4 * size).view(np.float32).reshape(shape)


# ---- operations ----

def fused_recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | Sequence[int] | None = None,
    *,
    out: Array | None = None,
    state_out: Array | None = None,
    pending: Array | None = None,
    isa: str | None = None,
) -> tuple[Array, NDArray[np.float32] | None]:
    """Kimi Delta Attention, token by token: the decode step, and the plain form of prefill.

    Per token and value head, in float32 (Kimi Linear, arXiv:2510.26692; reference.py is the float64
    definition):

        S <- diag(exp(g)) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T (scale q)

    Parameters
    ----------
    q, k : [B, T, H, K] float32, float16 or bfloat16 (dtypes may differ; any strides and byte order).
    v : [B, T, HV, V]. HV is a multiple of H; value head j uses q/k head j // (HV // H).
    g : [B, T, HV, K] log decay, <= 0 and -inf allowed; raw logits with use_gate_in_kernel.
    beta : [B, T, HV]; raw logits with use_beta_sigmoid_in_kernel.
    A_log : [HV], dt_bias : [HV * K]. Read only with use_gate_in_kernel; see fused_kda_gate.
    scale : factor on q, after the norm. Default K ** -0.5.
    initial_state : [N, HV, K, V] float32, never changed ([N, HV, V, K] with state_v_first). Default zeros.
        N is B, or the number of sequences of cu_seqlens.
    output_final_state : return the state after the last token.
    use_qk_l2norm_in_kernel : q and k are divided by sqrt(sum of squares + 1e-6) first.
    use_beta_sigmoid_in_kernel : beta = sigmoid(beta).
    allow_neg_eigval : beta is doubled, to (0, 2). Needs use_beta_sigmoid_in_kernel.
    lower_bound : chooses the bounded gate; see fused_kda_gate. Read only with use_gate_in_kernel.
    cu_seqlens : [N + 1] integers from 0 to T: N sequences packed along T of one batch row; empty ones keep
        their initial state, bit for bit.
    out : [B, T, HV, V] of v's dtype, receives o.
    state_out : [N, HV, K, V] float32 (not with state_v_first), receives the final state; heads contiguous.
        It may be initial_state itself: an update in place, without a copy. Implies output_final_state.
    pending : [N, HV, 2 K + V] float32 from no_updates(), C-contiguous; needs state_out. The last token's update is
        left here instead of being made: initial_state lacks what it holds when the call begins, state_out what it
        holds afterwards. The next call makes it while it reads the state for its own token, so a token takes one
        pass over the state instead of two, with the same bits. `settle` makes it without another token.
    isa : one of kda.isas(). Default the best here, or KDA_ISA.

    Returns
    -------
    o : [B, T, HV, V] of v's dtype.
    final_state : [N, HV, K, V] float32 ([N, HV, V, K] with state_v_first), or None.

    Raises
    ------
    TypeError for float64 or integer arrays, or a scale or lower_bound that is no number; ValueError for shapes,
    cu_seqlens or options that do not fit together; MemoryError. Nothing has been written then.

    Signals are handled between two tokens of a long call. What a handler raises (KeyboardInterrupt for Ctrl-C) ends
    the call there: a note on the exception says after how many tokens n of every sequence, and out and state_out, if
    given, hold the results of just these.
    """
    o, final, _ = _delta(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        out, state_out, isa, None, False, pending=pending)
    return o, final


def no_updates(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """For fused_recurrent_kda's `pending`: what a state [N, HV, K, V] that lacks nothing lacks, [N, HV, 2 K + V].

    Per head decay [K] (ones), k [K] and d [V] (zeros) of an update S <- diag(decay) S + k d^T. Raises ValueError for
    another number of axes.
    """
    state = _array("state", state)
    if state.ndim != 4:
        raise _shape_error("state", state, ["N", "HV", "K", "V"])
    N, HV, K, V = state.shape
    pending = aligned_empty((N, HV, 2 * K + V))
    _core.commit(_none(pending, K), ())
    return pending


def _none(pending: Array, K: int) -> list[tuple[Array, int]]:
    """What commit copies to leave no updates."""
    return [(pending[..., :K], 1), (pending[..., K:], 0)]


def settle(state: NDArray[np.float32], pending: NDArray[np.float32], *, isa: str | None = None) -> None:
    """Make the updates that fused_recurrent_kda left in `pending`, in place; pending then holds none.

    state : [N, HV, K, V] float32, heads contiguous. pending : [N, HV, 2 K + V] float32, C-contiguous. Raises TypeError
    for what is not an array, ValueError for other shapes, dtypes and read-only arrays; nothing has been written then.
    """
    row = isa_index(isa)
    if not isinstance(state, np.ndarray):
        raise TypeError(f"state: expected a numpy array to write into, got {type(state).__name__}")
    if state.ndim != 4:
        raise _shape_error("state", state, ["N", "HV", "K", "V"])
    N, HV, K, V = state.shape
    s = _output("state", state, (N, HV, K, V), _F32, {}, inner=2)
    updates = _output("pending", pending, (N, HV, 2 * K + V), _F32, {"state": state}, inner=3)
    if s.size:
        _core.settle(row, s, updates, _none(updates, K))


def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | Sequence[int] | None = None,
    safe_gate: bool = False,
    chunk_size: int = 64,
    return_intermediate_states: bool = False,
    disable_recompute: bool = False,
    *,
    precision: str = "float32",
    out: Array | None = None,
    state_out: Array | None = None,
    isa: str | None = None,
) -> tuple[Any, ...]:
    """Kimi Delta Attention in blocks of tokens: prefill. The result is that of fused_recurrent_kda, to rounding.

    Inside a block the deltas come from a forward substitution; what crosses tokens are products of decays that
    are all <= 1, so there is nothing to overflow, for g = -inf included. A token's output does not depend on
    the tokens after it, to the bit.

    Parameters
    ----------
    As fused_recurrent_kda, and:
    chunk_size : spacing in tokens of the intermediate states, >= 1. It is not the kernel's block, and unless
        intermediate states are asked for it changes nothing.
    return_intermediate_states : also return the state after every chunk_size whole tokens of each sequence.
    precision : "float32", or "bf16": the operands of the products with the state are rounded to bfloat16, the
        state and all sums stay float32. Errors of about 0.3 % of the largest value; faster only on avx512bf16 and amx.
    safe_gate, disable_recompute : accepted for fla's callers; this kernel is safe for every gate.

    Returns
    -------
    o : [B, T, HV, V] of v's dtype.
    final_state : as fused_recurrent_kda.
    states : [N, n, HV, K, V] float32 ([N, n, HV, V, K] with state_v_first), only with return_intermediate_states.
        n = the longest sequence // chunk_size; a shorter sequence's missing states are NaN.

    Raises
    ------
    As fused_recurrent_kda; ValueError for chunk_size < 1 or an unknown precision.
    """
    if not isinstance(precision, str) or precision not in ("float32", "bf16"):
        raise ValueError(f"precision: expected 'float32' or 'bf16', got {precision!r}")
    try:
        spacing = 0 if isinstance(chunk_size, bool) else operator.index(chunk_size)
    except TypeError:
        spacing = 0
    if spacing < 1:
        raise ValueError(f"chunk_size: expected an int >= 1, got {chunk_size!r}")
    spacing = min(spacing, sys.maxsize)  # longer than any sequence, and what the core can hold
    o, final, states = _delta(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        out, state_out, isa, spacing, return_intermediate_states, precision == "bf16")
    return (o, final, states) if return_intermediate_states else (o, final)


def _delta_arguments(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, initial_state: Any, use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, lower_bound: float | None, state_v_first: bool,
    cu_seqlens: Any,
) -> tuple[Array, Array, Array, Array, Array, Array | None, Array | None, Array | None, Array | None, int, int,
           float | None]:
    """Checked, as the core takes them: q, k, v, g, beta, A_log, dt_bias, initial_state ([N, HV, K, V]), cu_seqlens; N,
    flags, lower_bound."""
    q, k, v, g = _input("q", q), _input("k", k), _input("v", v), _input("g", g)
    beta = _input("beta", beta, inner=False)
    if q.ndim != 4:
        raise _shape_error("q", q, ["B", "T", "H", "K"])
    if v.ndim != 4:
        raise _shape_error("v", v, ["B", "T", "HV", "V"])
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    if k.shape != q.shape:
        raise _shape_error("k", k, q.shape, " (the shape of q)")
    if v.shape[0] != B or v.shape[1] != T:
        raise _shape_error("v", v, [B, T, "HV", "V"], " (B and T of q)")
    if H < 1 or K < 1:
        raise _shape_error("q", q, ["B", "T", "H >= 1", "K >= 1"])
    if HV < 1 or V < 1 or HV % H:
        raise _shape_error("v", v, [B, T, f"a multiple of H = {H}", "V >= 1"])
    if g.shape != (B, T, HV, K):
        raise _shape_error("g", g, (B, T, HV, K), " (HV of v, K of q)")
    if beta.shape != (B, T, HV):
        raise _shape_error("beta", beta, (B, T, HV), " (HV of v)")

    flags = 0
    if use_gate_in_kernel:
        flags |= _gate_flags(A_log, lower_bound)
        A_log = _floats("A_log", A_log, HV, "HV: one per value head")
        dt_bias = _floats("dt_bias", dt_bias, HV * K, "HV * K, head by head")
    else:
        A_log = dt_bias = lower_bound = None
    if use_beta_sigmoid_in_kernel:
        flags |= _core.F_BETA_SIGMOID | (_core.F_NEG_EIGVAL if allow_neg_eigval else 0)
    elif allow_neg_eigval:
        raise ValueError("allow_neg_eigval: doubles the sigmoid, so it needs use_beta_sigmoid_in_kernel=True")

    N = B
    if cu_seqlens is not None:
        cu_seqlens = _sequences(cu_seqlens, B, T)
        N = cu_seqlens.size - 1
    state_shape = (N, HV, K, V)
    initial = initial_state
    if initial is not None:
        initial = _array("initial_state", initial)
        want = (N, HV, V, K) if state_v_first else state_shape
        if initial.dtype is not _F32 and not _is_native_or_swapped(initial.dtype, _F32):
            raise TypeError(f"initial_state: expected float32 {list(want)}, got {_described(initial)}; "
                            f"convert with initial_state.astype(np.float32)")
        if initial.shape != want:
            raise _shape_error("initial_state", initial, want, " (V first)" if state_v_first else "")
        if state_v_first:
            initial = np.swapaxes(initial, 2, 3)
        if not ((initial.dtype is _F32 and initial.flags.carray) or _head_contiguous(initial)):
            initial = _packed(initial, _F32)
    return q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, N, flags, lower_bound


def _delta(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, scale: float | None, initial_state: Any,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, lower_bound: float | None, state_v_first: bool,
    cu_seqlens: Any, out: Any, state_out: Any, isa: str | None, chunk_size: int | None, intermediate: bool,
    bf16: bool = False, pending: Any = None,
) -> tuple[Array, NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """The two forms of the delta rule: token by token (chunk_size None) or in blocks."""
    row = isa_index(isa)
    given = cu_seqlens if isinstance(cu_seqlens, np.ndarray) else None
    q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, N, flags, lower_bound = _delta_arguments(
        q, k, v, g, beta, A_log, dt_bias, initial_state, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound, state_v_first, cu_seqlens)
    if bf16:
        flags |= _core.F_BF16
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    state_shape = (N, HV, K, V)

    if state_out is None:
        if pending is not None:
            raise ValueError("pending: a state that is returned lacks nothing; pass state_out too")
        final = aligned_empty(state_shape)
    else:
        if state_v_first:
            raise ValueError("state_out: is [N, HV, K, V]; it cannot be combined with state_v_first")
        final = _output("state_out", state_out, state_shape, _F32, inner=2)
    if pending is not None:
        pending = _output("pending", pending, (N, HV, 2 * K + V), _F32, inner=3)
    if out is None:
        o = np.empty((B, T, HV, V), v.dtype)
    else:
        o = _output("out", out, v.shape, _BF16 if v.dtype == _U16 else v.dtype)
    if state_out is not None or out is not None:
        written = (None if state_out is None else final, pending, None if out is None else o)
        inputs = (q, k, v, g, beta, A_log, dt_bias, given)
        in_place = initial is not None and (final is initial or _same_memory(final, initial))
        if not _core.apart(written, (*inputs, None if in_place else initial)):
            _check_written(written, inputs, initial, in_place)

    states = None
    if intermediate:
        assert chunk_size is not None
        lengths = np.full(N, T) if cu_seqlens is None else np.diff(cu_seqlens)
        states = np.empty((N, int(lengths.max(initial=0)) // chunk_size, HV, K, V), np.float32)
        for n, length in enumerate(lengths):
            states[n, length // chunk_size:] = np.nan

    _core.delta(row, o, final, initial, q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
                _scale(scale, K), lower_bound or 0.0, 1e-6 if use_qk_l2norm_in_kernel else -1.0,
                flags, chunk_size is not None, states, chunk_size or 0, pending)

    o = _returned(out, o)
    if state_v_first and states is not None:
        states = np.ascontiguousarray(np.swapaxes(states, 3, 4))
    if state_out is not None:
        return o, state_out, states
    if not output_final_state:
        return o, None, states
    return o, np.ascontiguousarray(np.swapaxes(final, 2, 3)) if state_v_first else final, states


def _check_written(written: tuple[Array | None, ...], inputs: tuple[Array | None, ...], initial: Array | None,
                   in_place: bool) -> None:
    """The address ranges of _delta's outputs meet others; an error if elements do."""
    final, pending, o = written
    named = dict(zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"), inputs, strict=True))
    if final is not None:
        _check_overlap("state_out", final, named)
        if initial is not None and not in_place and np.shares_memory(final, initial):
            raise ValueError("state_out: overlaps initial_state; pass initial_state itself or a separate array")
    named |= {"initial_state": initial, "state_out": final}
    if pending is not None:
        _check_overlap("pending", pending, named)
    if o is not None:
        _check_overlap("out", o, named | {"pending": pending})


def chunk_kda_backward(
    d_o: Array,
    d_final_state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | Sequence[int] | None = None,
    *,
    states: Array | None = None,
    isa: str | None = None,
) -> dict[str, NDArray[np.float32] | None]:
    """Gradients of chunk_kda, computed in float32 by going back token by token from recomputed states.

    Between the states kept after every BACKWARD_SPACING tokens all others are computed again, so memory is
    that of T / BACKWARD_SPACING states and, for each thread, of 20.

    Parameters
    ----------
    d_o : [B, T, HV, V] float32, float16 or bfloat16, the gradient by o.
    d_final_state : shaped as the final state, float32, or None: zeros.
    q, k, v, ... cu_seqlens : what chunk_kda was given.
    states : what chunk_kda(..., chunk_size=BACKWARD_SPACING, return_intermediate_states=True) returned, K first;
        None: computed here.

    Returns
    -------
    {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"}: gradients shaped as the arguments, float32. By
    initial_state also where None was given, as the gradient by zeros; A_log and dt_bias None where they were not read.

    Raises
    ------
    As chunk_kda.
    """
    row = isa_index(isa)
    shapes = [() if x is None else _array(name, x).shape for name, x in (("A_log", A_log), ("dt_bias", dt_bias))]
    raw: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    options: dict[str, Any] = {
        "use_gate_in_kernel": use_gate_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "lower_bound": lower_bound, "cu_seqlens": cu_seqlens}
    q, k, v, g, beta, A_log, dt_bias, initial, sequences, N, flags, lower_bound = _delta_arguments(
        **raw, initial_state=initial_state, state_v_first=state_v_first, **options)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    d_o = _input("d_o", d_o)
    if d_o.shape != v.shape:
        raise _shape_error("d_o", d_o, v.shape, " (the shape of o)")
    if d_final_state is not None:
        want = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        d_final_state = _array("d_final_state", d_final_state)
        if d_final_state.shape != want:
            raise _shape_error("d_final_state", d_final_state, want)
        _check_dtype("d_final_state", d_final_state)
        d_final_state = _packed(np.swapaxes(d_final_state, 2, 3) if state_v_first else d_final_state, _F32)
    if states is None:
        _, _, states = chunk_kda(
            **raw, scale=scale, initial_state=initial, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options,
            chunk_size=BACKWARD_SPACING, return_intermediate_states=True, isa=isa)
    states = _array("states", states)
    _check_dtype("states", states)
    states = _packed(states, _F32)
    if states.ndim != 5 or (states.shape[0], *states.shape[2:]) != (N, HV, K, V):
        raise _shape_error("states", states, (N, f"T // {BACKWARD_SPACING}", HV, K, V))

    dq, dk, dg = (np.empty((B, T, HV, K), np.float32) for _ in range(3))
    dv, d_initial = np.empty((B, T, HV, V), np.float32), aligned_empty((N, HV, K, V))
    d_beta, d_A = np.empty((B, T, HV), np.float32), np.empty((B, T, HV), np.float32)
    _core.delta_backward(
        row, dq, dk, dv, dg, d_beta, d_A, d_initial, d_o, d_final_state, initial, states, q, k, v, g, beta, A_log,
        dt_bias, sequences, _scale(scale, K), lower_bound or 0.0,
        1e-6 if use_qk_l2norm_in_kernel else -1.0, flags, BACKWARD_SPACING)
    if A_log is not None:
        d_A_log = d_A.sum(axis=(0, 1), dtype=np.float64).astype(np.float32).reshape(shapes[0])
    if HV != H:  # a q/k head is read by several value heads
        dq, dk = (x.reshape(B, T, H, HV // H, K).sum(axis=3) for x in (dq, dk))
    return {
        "q": dq, "k": dk, "v": dv, "g": dg, "beta": d_beta,
        "A_log": None if A_log is None else d_A_log,
        "dt_bias": None if dt_bias is None else dg.sum(axis=(0, 1)).reshape(shapes[1]),
        "initial_state": np.ascontiguousarray(np.swapaxes(d_initial, 2, 3)) if state_v_first else d_initial,
    }


def _head_contiguous(state: Array) -> bool:
    """Whether each head's [K, V] block of a state lies contiguous and aligned in native float32."""
    K, V = state.shape[2:]
    return (state.dtype.isnative and state.flags.aligned and (V == 1 or state.strides[3] == 4)
            and (K == 1 or state.strides[2] == 4 * V))


def _same_memory(a: Any, b: Array) -> bool:
    """Whether a and b are the same elements in the same places."""
    if a is None or a.shape != b.shape or a.itemsize != b.itemsize:
        return False
    return a.ctypes.data == b.ctypes.data and all(
        s == t for s, t, n in zip(a.strides, b.strides, a.shape, strict=True) if n > 1)


def fused_kda_gate(
    g: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    *,
    isa: str | None = None,
) -> NDArray[np.float32]:
    """The decay gate: raw logits to log decay, with z = g + dt_bias.

        lower_bound is None:  -exp(A_log) * softplus(z)                      (Kimi-Linear)
        lower_bound given:    lower_bound * sigmoid(exp(A_log) * z)          (K3; A_log None: sigmoid(z))

    Parameters
    ----------
    g : [..., HV, K] float32, float16 or bfloat16 logits.
    A_log : [HV], one per head; required without lower_bound. dt_bias : [HV * K], head by head.
    lower_bound : finite, below 0 (K3: -5.0).
    isa : one of kda.isas().

    Returns
    -------
    [..., HV, K] float32, natural log, <= 0. float32 whatever g's dtype: a decay rounded to 16 bits drifts.

    Raises
    ------
    ValueError without A_log and lower_bound, for lower_bound >= 0, for a wrong length of A_log or dt_bias;
    TypeError for float64 or integer arrays.
    """
    row = isa_index(isa)
    g = _input("g", g)
    if g.ndim < 2 or g.shape[-1] < 1 or g.shape[-2] < 1:
        raise _shape_error("g", g, ["...", "HV", "K"])
    HV, K = g.shape[-2:]
    flags = _gate_flags(A_log, lower_bound)
    y = np.empty(g.shape, np.float32)
    g4, y4 = g.reshape(1, -1, HV, K), y.reshape(1, -1, HV, K)
    _core.gate(row, y4, g4, _floats("A_log", A_log, HV, "HV: one per value head"),
               _floats("dt_bias", dt_bias, HV * K, "HV * K, head by head"),
               0.0 if lower_bound is None else lower_bound, flags)
    return y


def l2norm(x: Array, eps: float = 1e-6, *, isa: str | None = None) -> Array:
    """x / sqrt(sum(x * x) + eps) over the last axis; eps inside the root, on the sum.

    Parameters
    ----------
    x : [..., K] float32, float16 or bfloat16, computed in float32. isa : one of kda.isas().

    Returns
    -------
    [..., K] of x's dtype.

    Raises
    ------
    TypeError for float64 or integer arrays; ValueError for an empty last axis or a negative eps.
    """
    row = isa_index(isa)
    x = _input("x", x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise _shape_error("x", x, ["...", "K >= 1"])
    eps = _eps(eps)
    y = np.empty(x.shape, x.dtype)
    four = (1, -1, 1, x.shape[-1])
    _core.l2norm(row, y.reshape(four), x.reshape(four), eps)
    return y.view(_BF16) if y.dtype == _U16 else y


def fused_kda_layer(
    out: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    gate: Array | None,
    taps: tuple[Array, ...],
    norm_weight: NDArray[np.float32] | None,
    A_log: NDArray[np.float32] | None,
    dt_bias: NDArray[np.float32] | None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
    activation: str = "sigmoid",
    allow_neg_eigval: bool = False,
    isa: str | None = None,
) -> _core.Layer:
    """Everything of a KDA layer between its projections, block by block while it is in the nearest cache: short
    convolutions and SiLU, l2norm of q and k, gate, sigmoid of beta, delta rule, gated norm. No [T, H, K]
    temporary goes through memory.

    For the layer, not for users: nothing is checked but what the core checks. q, k, v, g, beta are raw projections
    shaped as in chunk_kda with B = 1, bfloat16 as its bits; taps: [W * D] of q, k and v, tap by tap. gate
    [1, T, HV, V]; None leaves the norm out. out: [1, T, HV, V].

    What it returns holds these arrays, and runs as often as they get new values:

        run(states_in, states_out, cu_seqlens, chunked)

    Sequence n reads its state, a pair (S [HV, K, V] float32 or bfloat16 bits, histories float32 [(W - 1) *
    (2 H K + HV V)]: tap by tap of q, then k, then v), from states_in[n] and leaves it in states_out[n], which may be
    the same pair. cu_seqlens: int64 [N + 1]. One thread at a time.
    """
    flags = _gate_flags(A_log, lower_bound) | _core.F_BETA_SIGMOID | (_core.F_NEG_EIGVAL if allow_neg_eigval else 0)
    return _core.Layer(isa_index(isa), out, q, k, v, g, beta, A_log, dt_bias, q.shape[3]**-0.5, lower_bound or 0.0,
                       1e-6, flags, taps, gate, norm_weight, norm_eps,
                       _activation(activation, ("sigmoid", "silu", "swish")))


# ---- epilogues ----

def _result(name: str, out: Any, x: Array, inputs: dict[str, Any]) -> Array:
    """Where a result shaped as x goes: the caller's `out`, checked, or a new array; as the core takes it."""
    if out is None:
        return np.empty(x.shape, x.dtype)
    return _output(name, out, x.shape, _BF16 if x.dtype == _U16 else x.dtype, inputs)


def _returned(out: Any, y: Array) -> Any:
    """`out` itself where it was given; bfloat16 under its own name."""
    if out is not None:
        return out
    return y.view(_BF16) if y.dtype == _U16 else y


_ACTIVATIONS = {None: _core.IDENTITY, "sigmoid": _core.SIGMOID, "silu": _core.SILU, "swish": _core.SILU}


def _activation(name: str | None, allowed: tuple[str | None, ...]) -> int:
    if not isinstance(name, str | None) or name not in allowed:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, allowed))}, got {name!r}")
    return _ACTIVATIONS[name]


def _conv_weight(weight: Any, D: int) -> Array:
    """[D, W] or [D, 1, W] as contiguous float32 [D, W]."""
    w = _array("weight", weight)
    _check_dtype("weight", w)
    if w.ndim == 3 and w.shape[1] == 1:
        w = w[:, 0]
    if w.ndim != 2 or w.shape[0] != D or not 1 <= w.shape[1] <= _core.CONV_MAX:
        raise _shape_error("weight", w, [D, f"W, 1 to {_core.CONV_MAX}"], " or [D, 1, W]")
    return _packed(w, _F32)


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    activation: str | None = "silu",
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | Sequence[int] | None = None,
    *,
    out: Array | None = None,
    isa: str | None = None,
) -> tuple[Array, NDArray[np.float32] | None]:
    """Depthwise causal convolution: y_t = activation(bias + sum over w of weight[:, w] * x_{t - W + 1 + w}).

    The last tap is the current token.

    Parameters
    ----------
    x : [B, T, D] float32, float16 or bfloat16, channels last.
    weight : [D, W] or [D, 1, W], W from 1 to 8. bias : [D].
    activation : "silu" ("swish") or None.
    initial_state : [N, D, W - 1] float32, the last raw inputs (before convolution and activation), oldest first;
        never changed. [N, D, W] is taken too; its first column is not read. Default zeros.
    output_final_state : return the state after the last token.
    cu_seqlens : [N + 1] integers: N sequences packed along T of one batch row, each with its own history.
    out : [B, T, D] of x's dtype, channels contiguous, receives y; not x itself, whose rows are still history.
    isa : one of kda.isas().

    Returns
    -------
    y : [B, T, D] of x's dtype.
    final_state : [N, D, W - 1] float32, or None. A sequence shorter than W - 1 shifts its history.

    Raises
    ------
    TypeError for float64 or integer arrays; ValueError for shapes, activation or cu_seqlens that do not fit. Ctrl-C
    ends a long call; then only part of `out` is written.
    """
    row = isa_index(isa)
    x = _input("x", x)
    if x.ndim != 3 or x.shape[2] < 1:
        raise _shape_error("x", x, ["B", "T", "D >= 1"])
    B, T, D = x.shape
    w = _conv_weight(weight, D)
    W = w.shape[1]
    act = _activation(activation, ("silu", "swish", None))
    bias = _floats("bias", bias, D, "D: one per channel")
    N, given = B, cu_seqlens if isinstance(cu_seqlens, np.ndarray) else None
    if cu_seqlens is not None:
        cu_seqlens = _sequences(cu_seqlens, B, T)
        N = cu_seqlens.size - 1
    if initial_state is not None:
        initial_state = _array("initial_state", initial_state)
        _check_dtype("initial_state", initial_state)
        if initial_state.shape not in ((N, D, W - 1), (N, D, W)):
            raise _shape_error("initial_state", initial_state, (N, D, W - 1), f" (or {W} columns)")
        initial_state = initial_state[:, :, initial_state.shape[2] - (W - 1):]
        if initial_state.dtype is not _F32 or not initial_state.flags.aligned:
            initial_state = _packed(initial_state, _F32)
    y = _result("out", out, x, {"x": x, "weight": w, "bias": bias, "initial_state": initial_state,
                                 "cu_seqlens": given})
    final = np.empty((N, D, W - 1), np.float32) if output_final_state else None
    _core.conv(row, y, final, x, initial_state, np.ascontiguousarray(w.T).reshape(-1), bias, cu_seqlens, act)
    return _returned(out, y), final


def causal_conv1d_update(
    x: Array,
    state: NDArray[np.float32],
    weight: Array,
    bias: Array | None = None,
    activation: str | None = "silu",
    *,
    out: Array | None = None,
    isa: str | None = None,
) -> Array:
    """One token of causal_conv1d per batch row; `state` moves on in place.

    Parameters
    ----------
    x : [B, D] float32, float16 or bfloat16.
    state : [B, D, W - 1] float32, writable, the last raw inputs, oldest first; updated in place in any strides.
        [B, D, W] is taken too, and shifts whole.
    weight, bias, activation, isa : as causal_conv1d. out : [B, D] of x's dtype, receives y.

    Returns
    -------
    y : [B, D] of x's dtype.

    Raises
    ------
    TypeError for float64 or integer arrays, or a state that is not a float32 array; ValueError for shapes that do
    not fit or a state that cannot be updated in place (read-only, overlapping itself or an input). The state is
    unchanged then.
    """
    row = isa_index(isa)
    x = _input("x", x)
    if x.ndim != 2 or x.shape[1] < 1:
        raise _shape_error("x", x, ["B", "D >= 1"])
    B, D = x.shape
    w = _conv_weight(weight, D)
    W = w.shape[1]
    act = _activation(activation, ("silu", "swish", None))
    bias = _floats("bias", bias, D, "D: one per channel")
    if not isinstance(state, np.ndarray) or state.dtype != _F32:
        got = _described(state) if isinstance(state, np.ndarray) else type(state).__name__
        raise TypeError(f"state: expected a float32 array [{B}, {D}, {W - 1}] to update in place, got {got}")
    wide = state.shape == (B, D, W)
    if not wide and state.shape != (B, D, W - 1):
        raise _shape_error("state", state, (B, D, W - 1), f" (or {W} columns)")
    past = state[:, :, 1:] if wide else state
    if not state.flags.writeable:
        raise ValueError("state: is read-only; an update in place would be lost")
    if not state.flags.aligned:
        raise ValueError("state: is not aligned to its element size")
    if not (state.flags.c_contiguous or _elements_apart(state)):
        raise ValueError("state: is a broadcast or sliding view; its elements share memory and cannot be updated in "
                         "place")
    for name, other in (("x", x), ("weight", w), ("bias", bias)):
        if other is not None and np.may_share_memory(state, other) and np.shares_memory(state, other):
            raise ValueError(f"state: overlaps {name}; pass a separate array")
    y = _result("out", out, x, {"x": x, "state": state, "weight": w, "bias": bias})
    oldest: tuple[tuple[Array, Array], ...] = ()
    if wide:
        taken = state[:, :, 1] if W > 1 else x.view(_BF16) if x.dtype == _U16 else x
        oldest = ((state[:, :, 0], taken.astype(np.float32)),)
    if past.flags.c_contiguous:
        _core.conv_step(row, y, past, x, w.reshape(-1), bias, act, oldest)
    else:
        _core.conv(row, y[:, None], past, x[:, None], past, np.ascontiguousarray(w.T).reshape(-1), bias,
                   None, act, oldest)
    return _returned(out, y)


def rms_norm_gated(
    x: Array,
    gate: Array,
    weight: Array,
    eps: float = 1e-5,
    activation: str = "sigmoid",
    *,
    out: Array | None = None,
    isa: str | None = None,
) -> Array:
    """x / sqrt(mean(x * x) + eps) * weight * activation(gate) over the last axis: norm before gate.

    Parameters
    ----------
    x, gate : [..., V] of one shape, float32, float16 or bfloat16; a slice of a fused projection is not copied.
    weight : [V], shared by the leading axes. eps : >= 0, on the mean of squares.
    activation : "sigmoid" or "silu" ("swish"). isa : one of kda.isas().
    out : [..., V] of x's dtype, last axis contiguous, receives the result; it may be x or gate itself.

    Returns
    -------
    [..., V] of x's dtype.

    Raises
    ------
    TypeError for float64 or integer arrays; ValueError for shapes or options that do not fit. Ctrl-C ends a long call;
    then only part of `out` is written.
    """
    row = isa_index(isa)
    x, gate = _input("x", x), _input("gate", gate)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise _shape_error("x", x, ["...", "V >= 1"])
    if gate.shape != x.shape:
        raise _shape_error("gate", gate, x.shape, " (the shape of x)")
    eps = _eps(eps)
    act = _activation(activation, ("sigmoid", "silu", "swish"))
    w = _floats("weight", _array("weight", weight), x.shape[-1], "V: one per channel")  # None: an error
    y = _result("out", out, x, {"weight": w} | {name: a for name, a in (("x", x), ("gate", gate))
                                                if out is None or not _same_memory(a, out)})
    if y.ndim > 4 and not y.flags.c_contiguous:
        raise ValueError("out: expected a C-contiguous array, as for every result of more than four axes")
    if y.size:
        _core.norm_gated(row, _four(y), _four(x), _four(gate), w, eps, act)
    return _returned(out, y)


def _four(x: Array) -> Array:
    """[..., n] as [B, T, H, n], without a copy up to four axes. Threads share B and T: H is missing first."""
    if x.ndim > 4:
        return x.reshape(1, -1, x.shape[-2], x.shape[-1])
    return x[((None, None, None), (None, slice(None), None), (slice(None), slice(None), None), ())[x.ndim - 1]]
