"""The whole layer: projections, what lies between them, and the passes that long and padded batches take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kda import _core, ops
from kda.config import KDAConfig
from kda.dense import DenseMatrix
from kda.ops import Array, aligned_empty
from kda.quant import QuantizedMatrix
from kda.runtime import isa_index, isas
from kda.state import PASS, Call, KDAState, Pair, Row, exclusive
from kda.weights import layer_tensors, read_safetensors

Matrix = DenseMatrix | QuantizedMatrix
_FORMATS = {"f32": 32, "q8g": 8, "q4g": 4}
_SIDES = ("right", "left")
_FEW = 16  # tokens that a small scratch holds

# Scratch that no call is using, by its sizes: a call takes one and puts it back, so that layers of one model share the
# memory that is in the cache, and two threads never do. Never given up: a layer keeps its views of it.
_idle: dict[tuple[int, ...], list[_Scratch]] = {}


class KDALayer:
    """One Kimi Delta Attention layer: y = W_o norm(delta rule(conv(W_q x), conv(W_k x), conv(W_v x), gates)).

    Made by `from_tensors` or `from_safetensors`. In float32 whatever the weights' dtype was, with weights as
    weight_format says:

        f32    float32                                                     4 bytes a weight
        q8g    QuantizedMatrix, 8 bits, groups of 128                      1.016
        q4g    QuantizedMatrix, 4 bits                                     0.516

    Calls of up to `recurrent_max` tokens run token by token, longer ones in blocks; the two agree to rounding. A
    sequence's results do not depend, to the bit, on what else is in the batch or on the number of threads.

    Attributes: config, weight_format, isa, recurrent_max, nbytes (of the weights).
    """

    def __init__(self, config: KDAConfig, tensors: Mapping[str, Array], weight_format: str = "f32",
                 recurrent_max: int = 64, isa: str | None = None) -> None:
        """From the tensors of weights.layer_tensors; users take from_tensors."""
        if isinstance(recurrent_max, bool) or not isinstance(recurrent_max, int) or recurrent_max < 0:
            raise ValueError(f"recurrent_max: expected an int >= 0, got {recurrent_max!r}")
        if config.conv_size > _core.CONV_MAX:
            raise ValueError(f"config: conv_size: expected 1 to {_core.CONV_MAX}, got {config.conv_size}")
        self.config, self.weight_format, self.recurrent_max = config, weight_format, recurrent_max
        self._row = isa_index(isa)
        self.isa = list(isas())[self._row]
        c = config
        qk, v, HV = c.num_heads * c.head_dim, c.num_v_heads * c.v_head_dim, c.num_v_heads
        gate = "g_proj.weight" if c.full_rank_gate else "g_a_proj.weight"
        names = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "f_a_proj.weight", gate]
        self._in = self._matrix(tensors, *names)
        self._decay = self._matrix(tensors, "f_b_proj.weight")
        self._gate = None if c.full_rank_gate else self._matrix(tensors, "g_b_proj.weight")
        self._out = self._matrix(tensors, "o_proj.weight")
        # copies: the caller's arrays may change, or be a file that is mapped into memory
        self._taps = tuple(tensors[f"{x}_conv1d.weight"][:, 0].T.astype(np.float32, "C").reshape(-1) for x in "qkv")
        self._A_log, self._dt_bias, self._norm = (tensors[name].astype(np.float32)
                                                  for name in ("A_log", "dt_bias", "o_norm.weight"))
        # columns of the joint projection, and of what is kept of it for a rollback
        self._cuts = np.cumsum([0, qk, qk, v, HV, c.head_dim, v if c.full_rank_gate else c.head_dim]).tolist()
        # of a token's row in a scratch: joint projection, decay, output gate, o, hidden
        self._sizes = (self._in.shape[0], HV * c.head_dim, 0 if c.full_rank_gate else v, v, c.hidden_size)
        self._bound: dict[tuple[_Scratch, int], _Views] = {}

    @classmethod
    def from_tensors(cls, config: KDAConfig, tensors: Mapping[str, Array],
                     prefix: str = "model.layers.0.self_attn.", weight_format: str = "f32", *,
                     recurrent_max: int = 64, isa: str | None = None) -> KDALayer:
        """The layer whose tensors are named `prefix` + q_proj.weight, ... as checkpoints of Kimi-Linear, K3 and
        GLM-5-Next have them (weights.tensor_shapes lists them), in float32, float16 or bfloat16.

        K3's A_log, padded with zeros to 128 heads, is cut; [1, 1, H, 1] is taken. Tensors with other prefixes are
        passed over. They are read once and not kept.

        Raises ValueError that names every missing, surplus and misshapen tensor with what was expected, for weights
        that cannot be quantised (not finite, or huge), and for an unknown weight_format; TypeError for other dtypes.
        """
        if weight_format not in _FORMATS:
            raise ValueError(f"weight_format: expected one of {', '.join(map(repr, _FORMATS))}, got {weight_format!r}")
        return cls(config, layer_tensors(config, tensors, prefix), weight_format, recurrent_max, isa)

    @classmethod
    def from_safetensors(cls, config: KDAConfig, path: str | os.PathLike[str],
                         prefix: str = "model.layers.0.self_attn.", weight_format: str = "f32", *,
                         recurrent_max: int = 64, isa: str | None = None) -> KDALayer:
        """from_tensors, reading from `path`: a .safetensors file, the .index.json of a sharded checkpoint, or the
        directory of either. Raises FileNotFoundError, and ValueError for a file that is not what it should be."""
        return cls.from_tensors(config, read_safetensors(path, prefix), prefix, weight_format,
                                recurrent_max=recurrent_max, isa=isa)

    def _matrix(self, tensors: Mapping[str, Array], *names: str) -> Matrix:
        """The rows of these tensors as one matrix, so that projections that share an input are one product."""
        if self.weight_format == "f32":
            return DenseMatrix([tensors[name] for name in names], self.isa)
        parts = []
        for name in names:
            try:
                parts.append(QuantizedMatrix.quantize(tensors[name], _FORMATS[self.weight_format], isa=self.isa))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return QuantizedMatrix.concatenate(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        small = (*self._taps, self._A_log, self._dt_bias, self._norm)
        matrices = (self._in, self._decay, self._gate, self._out)
        return sum(m.nbytes for m in matrices if m is not None) + sum(a.nbytes for a in small)

    def __repr__(self) -> str:
        c = self.config
        return (f"KDALayer({c.model_type}, hidden_size={c.hidden_size}, heads={c.num_v_heads} x {c.head_dim}, "
                f"weight_format={self.weight_format!r}, isa={self.isa!r}, nbytes={self.nbytes})")

    def new_state(self, batch: int = 1, rollback_window: int = 0, state_dtype: str = "float32") -> KDAState:
        """A state of zeros for this layer; see KDAState."""
        return KDAState(self.config, batch, rollback_window, state_dtype)

    # ---- the call ----

    def __call__(self, x: Array, state: KDAState | Sequence[KDAState],
                 lengths: Sequence[int] | NDArray[np.integer[Any]] | None = None,
                 padding_side: str = "right") -> Array:
        """The layer's output for the next tokens of each row; `state` moves on in place.

        x : [B, T, hidden_size] float32, float16 or bfloat16, already normalised as the model does before attention.
        state : a KDAState of B rows, or several states of B rows in all, in order: sessions decoded in one call,
            each where it is.
        lengths : [B] valid tokens of each row, 0 to T; default all. What lies in the padding is not read, not even
            NaN, and its outputs are 0. padding_side : where the padding is, "right" or "left".

        Returns [B, T, hidden_size] of x's dtype. Each row equals, to the bit, its solo run.

        Raises TypeError for other dtypes; ValueError for shapes, lengths or a state of another model; RuntimeError
        where another call uses one of the states. The states are unchanged then.

        What a signal's handler raises (KeyboardInterrupt for Ctrl-C), or a MemoryError, ends the call within or between
        two passes of up to 128 tokens. The outputs are lost; the passes done are done, and each row's state is that
        after `position` tokens.
        """
        if isinstance(state, KDAState):
            states: tuple[KDAState, ...] = (state,)
        elif isinstance(state, Iterable):
            states = tuple(state)
        else:
            raise TypeError(f"state: expected a KDAState or a sequence of them, got {type(state).__name__}")
        x = self._checked(x, states)
        B, T = x.shape[:2]
        if B == 1 and lengths is None and 1 <= T <= PASS and padding_side in _SIDES:  # the plain step
            row = states[0].rows[0]
            if not row.window or T - row.window <= self.recurrent_max:
                with states[0].lock:
                    return self._simple(x, row)
        with exclusive(*states):
            rows = [row for s in states for row in s.rows]
            spans = self._valid(lengths, padding_side, B, T)
            y = np.zeros(x.shape, x.dtype)
            passes = self._passes(rows, spans)
            if len(passes) > 1 and any(s.holds(x) for s in states):  # before the first pass overwrites it
                x = x.copy()
            for pieces in passes:
                self._run(x, y, pieces)
        return y

    def _checked(self, x: Any, states: tuple[Any, ...]) -> Array:
        if type(x) is not np.ndarray:
            x = ops._array("x", x)
        if x.dtype is not ops._F32:
            ops._check_dtype("x", x)
        if x.ndim != 3 or x.shape[2] != self.config.hidden_size or not x.shape[0]:
            raise ops._shape_error("x", x, ["B >= 1", "T", self.config.hidden_size])
        batch, seen = 0, set()
        for i, s in enumerate(states):
            if not isinstance(s, KDAState):
                raise TypeError(f"state: expected a KDAState or a sequence of them, got {type(s).__name__}")
            if s.config is not self.config and s.config.identity != self.config.identity:
                raise ValueError(f"state: is of model {s.config.identity}, expected {self.config.identity}")
            if id(s) in seen:
                raise ValueError(f"state: states[{i}] is in the list twice")
            seen.add(id(s))
            if s.state_dtype != states[0].state_dtype:
                raise ValueError(f"state: states[{i}] is {s.state_dtype}, states[0] {states[0].state_dtype}; one call "
                                 "takes states of one dtype")
            batch += s.batch
        if batch != x.shape[0]:
            raise ValueError(f"state: {batch} rows, expected one for each of the {x.shape[0]} rows of x")
        checked: Array = x if x.dtype is ops._F32 or x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
        return checked

    @staticmethod
    def _valid(lengths: Any, padding_side: str, B: int, T: int) -> list[tuple[int, int]]:
        """First and last valid token of each row."""
        if padding_side not in _SIDES:
            raise ValueError(f"padding_side: expected 'right' or 'left', got {padding_side!r}")
        if lengths is None:
            return [(0, T)] * B
        n = ops._array("lengths", lengths)
        if n.dtype.kind not in "iu":
            raise TypeError(f"lengths: expected integers [{B}], got {n.dtype} {list(n.shape)}")
        if n.shape != (B,) or (n < 0).any() or (n > T).any():
            raise ValueError(f"lengths: expected [{B}] from 0 to T = {T}, got {n.tolist()}")
        return [(0, int(m)) if padding_side == "right" else (T - int(m), T) for m in n]

    def _passes(self, rows: Sequence[Row], spans: Sequence[tuple[int, int]]) -> list[list[_Piece]]:
        """The call as passes of at most PASS tokens, each a set of pieces of one kind, one to a row.

        Weights are read once for a pass, and its projections stay near. Pieces of a row run in order, and a row is
        cut only at whole units from its start, where the cut leaves no trace.
        """
        passes: list[list[_Piece]] = []
        for chunked in (False, True):
            room = 0
            present: set[int] = set()
            for b, (row, (first, last)) in enumerate(zip(rows, spans, strict=True)):
                T = last - first
                if T == 0 or (self.recurrent_max < T) != chunked:
                    continue
                for start, end, logged in row.spans(T, self.recurrent_max):
                    call = Call(self._replay, start) if logged else None
                    at = start
                    while at < end:
                        if room < min(end - at, row.unit) or b in present:
                            passes.append([])
                            room, present = PASS, set()
                        n = min(end - at, room)
                        if n < end - at:
                            n -= n % row.unit
                        begins = (start, end, logged) if at == start else None
                        passes[-1].append(_Piece(row, b, first + at, n, chunked, begins, call))
                        room, at = room - n, at + n
                        present.add(b)
        return passes

    def _run(self, x: Array, y: Array, pieces: Sequence[_Piece]) -> None:
        """One pass: gather its tokens, project, run, project, scatter."""
        n = sum(piece.tokens for piece in pieces)
        first = pieces[0]
        whole = len(pieces) == 1 and x.dtype == np.float32
        scratch = self._borrow(n)
        try:
            cu = np.cumsum([0, *(piece.tokens for piece in pieces)], dtype=np.int64)
            if whole:
                rows = x[first.b, first.at:first.at + n]
                rows = rows if rows.strides[1] == 4 and rows.flags.aligned else np.array(rows, order="C")
            else:
                rows = scratch.hidden[:n]
                for piece, start in zip(pieces, cu.tolist(), strict=False):
                    rows[start:start + piece.tokens] = x[piece.b, piece.at:piece.at + piece.tokens]
            results = y[first.b, first.at:first.at + n] if whole else rows
            views = self._views(scratch, n)
            self._project(rows, views)
            for piece in pieces:
                if piece.begins is not None:
                    piece.row.begin(*piece.begins)
            sources, targets, pending, left, changes = [], [], [], [], []
            for piece, start in zip(pieces, cu.tolist(), strict=False):
                row, slot = piece.row, piece.row.target_slot()
                leaves = row.leaves and not piece.chunked
                sources.append(row.source)
                targets.append(row.pairs[slot])
                pending.append(row.pending(self._row))
                left.append(row.room(slot) if leaves else None)
                part = None if piece.call is None else self._kept(views, start, start + piece.tokens)
                changes += row.after(slot, piece.tokens, self._row if leaves else None, piece.call, part)
            views.fused.run(sources, targets, cu, first.chunked, pending, left, changes)
            self._out.into(results, views.o_rows)
            if not whole:
                for piece, start in zip(pieces, cu.tolist(), strict=False):
                    y[piece.b, piece.at:piece.at + piece.tokens] = rows[start:start + piece.tokens]
        finally:
            scratch.give_back()

    def _simple(self, x: Array, row: Row) -> Array:
        """_run for one row whose tokens are one pass and one span."""
        T, hidden = x.shape[1:]
        scratch = self._borrow(T)
        try:
            rows = x[0]
            if x.dtype is not ops._F32 or not (rows.flags.c_contiguous and rows.flags.aligned):
                rows = np.array(rows, np.float32, order="C")
            views = self._views(scratch, T)
            self._project(rows, views)
            slot = row.slot
            if row.window:
                row.begin(0, T, True)
                slot = row.target_slot()
            y = np.empty((1, T, hidden), np.float32)
            chunked = self.recurrent_max < T
            pending = row.pending(self._row)  # which may settle, and change what `after` starts from
            left, isa = (row.room(slot), self._row) if row.leaves and not chunked else (None, None)
            changes = (row.after(slot, T, isa, Call(self._replay, 0), self._kept(views, 0, T)) if row.window else
                       row.after(slot, T, isa))
            views.fused.run((row.pairs[row.slot],), (row.pairs[slot],), views.cu, chunked, (pending,), (left,), changes)
            self._out.into(y[0], views.o_rows)
        finally:
            scratch.give_back()
        return y if x.dtype is ops._F32 else y.astype(x.dtype)

    def _kept(self, views: _Views, start: int, end: int) -> tuple[Array, Array]:
        """What a rollback takes tokens again from: raw q, k, v, beta, and g."""
        return views.joint[start:end, :self._cuts[4]].copy(), views.g_rows[start:end].copy()

    def _project(self, rows: Array, views: _Views) -> None:
        """The projections before the recurrence: all that share x as one product, then the gates' second factors."""
        self._in.into(views.joint, rows)
        self._decay.into(views.g_rows, views.f_a)
        if self._gate is not None:
            self._gate.into(views.gate_rows, views.g_a)

    def project_only(self, rows: Array) -> Array:
        """For the benchmarks: the products of up to PASS tokens [n, hidden] without what lies between them."""
        scratch = self._borrow(len(rows))
        try:
            views = self._views(scratch, len(rows))
            self._project(rows, views)
            y = np.empty((len(rows), self.config.hidden_size), np.float32)
            self._out.into(y, views.o_rows)
        finally:
            scratch.give_back()
        return y

    def _fused(self, out: Array, q: Array, k: Array, v: Array, g: Array, beta: Array,
               gate: Array | None) -> _core.Layer:
        """The kernel between the projections, bound to these arrays; without a gate there is no norm."""
        c = self.config
        return ops.fused_kda_layer(out, q, k, v, g, beta, gate, self._taps, self._norm, self._A_log, self._dt_bias,
                                   c.gate_lower_bound, c.norm_eps, isa=self.isa)

    def _replay(self, call: Call, source: Pair, target: Pair) -> None:
        """The tokens of a call once more, states only; see state.Call."""
        joint, g = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*call.parts, strict=True))
        c, cut, tokens = self.config, self._cuts, len(joint)
        q, k, v = (joint[:, cut[i]:cut[i + 1]].reshape(1, tokens, heads, -1)
                   for i, heads in enumerate((c.num_heads, c.num_heads, c.num_v_heads)))
        fused = self._fused(np.empty(v.shape, np.float32), q, k, v,
                            g.reshape(1, tokens, c.num_v_heads, c.head_dim),
                            joint[None, :, cut[3]:cut[4]], None)
        chunked = call.offset + tokens > self.recurrent_max
        step = tokens if source[0].dtype == np.float32 else PASS  # bfloat16 is rounded where the call did it
        for start in range(0, tokens, step):
            fused.run((source,), (target,), np.array([start, min(start + step, tokens)], np.int64), chunked)
            source = target

    def _borrow(self, tokens: int) -> _Scratch:
        """Scratch for a pass; the caller gives it back."""
        capacity = _FEW if tokens <= _FEW else PASS
        try:
            return _idle[(*self._sizes, capacity)].pop()
        except (KeyError, IndexError):
            return _Scratch(self._sizes, capacity)

    def _views(self, scratch: _Scratch, n: int) -> _Views:
        """The first n tokens of a scratch, and the kernel bound to them; those of few tokens are kept."""
        found = self._bound.get((scratch, n))
        if found is None:
            found = _Views(self, scratch, n)
            if n <= _FEW:
                self._bound[scratch, n] = found
        return found


class _Piece:
    """Tokens [at, at + tokens) of row b of x, in one pass. begins: what Row.begin takes, where a span starts."""

    __slots__ = ("at", "b", "begins", "call", "chunked", "row", "tokens")

    def __init__(self, row: Row, b: int, at: int, tokens: int, chunked: bool, begins: tuple[int, int, bool] | None,
                 call: Call | None) -> None:
        self.row, self.b, self.at, self.tokens = row, b, at, tokens
        self.chunked, self.begins, self.call = chunked, begins, call


class _Views:
    """n tokens of a scratch, as the products (rows) and the kernel (heads) want them."""

    __slots__ = ("beta", "cu", "f_a", "fused", "g", "g_a", "g_rows", "gate", "gate_rows", "joint", "k", "o", "o_rows",
                 "q", "v")

    def __init__(self, layer: KDALayer, scratch: _Scratch, n: int) -> None:
        c, cut = layer.config, layer._cuts
        self.joint = scratch.joint[:n]
        q, k, v, beta, self.f_a, last = (self.joint[:, cut[i]:cut[i + 1]] for i in range(6))
        self.g_rows, self.o_rows = scratch.g[:n], scratch.o[:n]
        self.q, self.k = (a.reshape(1, n, c.num_heads, c.head_dim) for a in (q, k))
        values = (1, n, c.num_v_heads, c.v_head_dim)
        self.v, self.o, self.beta = v.reshape(values), self.o_rows.reshape(values), beta[None]
        self.g = self.g_rows.reshape(1, n, c.num_v_heads, c.head_dim)
        self.g_a, self.gate_rows = last, last if c.full_rank_gate else scratch.gate[:n]
        self.gate = self.gate_rows.reshape(values)
        self.cu = np.array([0, n], np.int64)
        self.fused = layer._fused(self.o, self.q, self.k, self.v, self.g, self.beta, self.gate)


class _Scratch:
    """Room for the projections of a pass of up to `capacity` tokens."""

    def __init__(self, sizes: tuple[int, ...], capacity: int) -> None:
        self.key = (*sizes, capacity)
        self.joint, self.g, self.gate, self.o, self.hidden = (aligned_empty((capacity, n)) for n in sizes)

    def give_back(self) -> None:
        """No call uses it any more."""
        _idle.setdefault(self.key, []).append(self)
