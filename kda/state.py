"""What a KDA layer remembers: the recurrent state, the last raw inputs of its convolutions, the position.

A state with a rollback window keeps up to two snapshots of each row and the raw projections of the tokens since the
older one. A snapshot is not a copy: the kernel leaves it where it is and writes the next state to another of three
buffers. To drop tokens is to take those before them again, from the snapshot, through the same kernel.

A step may leave its update of S to the next one (kernels.h), which saves a pass over S. A buffer's S then lacks it, but
nobody sees that: S is settled before it is shown, and once it has been shown writable no update is left any more.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kda import _core
from kda.config import KDAConfig
from kda.ops import Array, _array, aligned_empty

PASS = 128  # tokens of a row between two roundings of a bfloat16 S, counted from the start of its call
MOST_POSITION = 1 << 53  # of a state taken over from elsewhere: far from what int64 holds, however many tokens follow
STATE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Change = tuple[object, str, object]  # of an object, the attribute, its new value: made by the core, uninterrupted
Pair = tuple[Array, Array]  # S [HV, K, V] and histories [(W - 1) * (2 H K + HV V)], as the core takes them


class Call:
    """The tokens of a call from `offset` on: raw projections, in the parts that passes took them in.

    replay(call, source, target) takes them again, as a call that ends with them does.
    """

    __slots__ = ("offset", "parts", "replay")

    def __init__(self, replay: Callable[[Call, Pair, Pair], None], offset: int,
                 parts: tuple[tuple[Array, Array], ...] = ()) -> None:
        self.replay, self.offset, self.parts = replay, offset, parts

    @property
    def tokens(self) -> int:
        """How many tokens the parts hold."""
        return sum(len(part[0]) for part in self.parts)

    def first(self, tokens: int) -> Call:
        """The call as if it had ended after `tokens` of these tokens."""
        parts, left = [], tokens
        for part in self.parts:
            if left <= 0:
                break
            parts.append((part[0][:left], part[1][:left]))
            left -= len(part[0])
        return Call(self.replay, self.offset, tuple(parts))


class Snapshot:
    """The buffer that holds a row's state after `position` tokens, and the calls since, up to the next snapshot."""

    __slots__ = ("calls", "position", "slot")

    def __init__(self, slot: int, position: int, calls: list[Call]) -> None:
        self.slot, self.position, self.calls = slot, position, calls


class Row:
    """One sequence of a state, for the layer: where its buffers are and how to go back."""

    __slots__ = ("depth", "lacks", "leaves", "pairs", "position", "slot", "snapshots", "unit", "updates", "window")

    def __init__(self, pairs: list[Pair], window: int) -> None:
        self.pairs, self.window = pairs, window
        # of each buffer: room for the updates that its S lacks, once some were left; the ISA that left them, or None
        self.updates: list[Array | None] = [None] * len(pairs)
        self.lacks: list[int | None] = [None] * len(pairs)
        self.leaves = pairs[0][0].dtype == np.float32  # whether steps may leave their updates
        # a call may be cut after any number of these without a trace
        self.unit = _core.BLOCK if pairs[0][0].dtype == np.float32 else PASS
        self.slot = self.position = self.depth = 0
        self.snapshots: list[Snapshot] = []

    def at(self, slot: int, position: int, depth: int = 0, snapshots: Sequence[Snapshot] = (),
           lacks: list[int | None] | None = None) -> list[Change]:
        """What changes where the row is elsewhere, by default with nothing to go back to and nothing that lacks."""
        return [(self, "slot", slot), (self, "position", position), (self, "depth", depth),
                (self, "snapshots", list(snapshots)), (self, "lacks", lacks or [None] * len(self.pairs))]

    def lacking(self, slot: int, isa: int | None) -> list[int | None]:
        """`lacks` with another entry for buffer `slot`."""
        return [isa if i == slot else each for i, each in enumerate(self.lacks)]

    @property
    def source(self) -> Pair:
        """The buffers to read."""
        return self.pairs[self.slot]

    def pending(self, isa: int) -> Array | None:
        """The updates that `source` lacks and a call on this ISA makes first, or None."""
        if self.lacks[self.slot] not in (None, isa):
            self.settle(self.slot)
        return None if self.lacks[self.slot] is None else self.updates[self.slot]

    def room(self, slot: int) -> Array:
        """Where a call that writes buffer `slot` leaves its last updates."""
        found = self.updates[slot]
        if found is None:
            HV, K, V = self.pairs[slot][0].shape
            found = self.updates[slot] = aligned_empty((HV * (2 * K + V),))
        return found

    def settle(self, *slots: int) -> None:
        """Make what these buffers lack. The caller holds the lock."""
        for slot in slots:
            isa, updates = self.lacks[slot], self.updates[slot]
            if isa is not None and updates is not None:
                S = self.pairs[slot][0]
                _core.settle(isa, S[None], updates.reshape(1, len(S), -1),
                             changes=[(self, "lacks", self.lacking(slot, None))])

    def target_slot(self) -> int:
        """The buffer to write: this one, unless a snapshot holds it."""
        held = [snapshot.slot for snapshot in self.snapshots]
        if self.slot not in held:
            return self.slot
        return next(slot for slot in range(len(self.pairs)) if slot not in held)

    def spans(self, tokens: int, recurrent_max: int) -> list[tuple[int, int, bool]]:
        """A call of `tokens` as (start, end, whether to log it).

        A long call is logged from the last whole unit that the window cannot reach behind; one that is over
        recurrent_max and, after a rollback, might not have been, is logged whole.
        """
        if not self.window:
            return [(0, tokens, False)]
        if tokens - self.window <= recurrent_max < tokens:
            return [(0, tokens, True)]
        cut = max(0, tokens - self.window) // self.unit * self.unit
        return [(0, cut, False), (cut, tokens, True)] if cut else [(0, tokens, True)]

    def begin(self, start: int, end: int, logged: bool) -> None:
        """Before the tokens [start, end) of a call: a snapshot where the window will want one."""
        if not self.window:
            return
        if not logged:
            self.depth, self.snapshots = 0, []
            return
        since = self.position - self.snapshots[-1].position if self.snapshots else self.window
        if since + end - start > self.window:
            snapshots = [*self.snapshots[-1:], Snapshot(self.slot, self.position, [])]
            # as far as the older one is; the call makes up for it, unless it fails before it gets anywhere
            self.depth = min(self.depth, self.position - snapshots[0].position)
            self.snapshots = snapshots

    def after(self, slot: int, tokens: int, lacks: int | None, call: Call | None = None,
              part: tuple[Array, Array] | None = None) -> list[Change]:
        """What changes with a pass that writes buffer `slot`, which lacks the last updates if that ISA left them; part:
        what it adds to its call."""
        position = self.position + tokens
        changes: list[Change] = [(self, "position", position)]
        if slot != self.slot:
            changes.append((self, "slot", slot))
        if self.lacks[slot] != lacks:
            changes.append((self, "lacks", self.lacking(slot, lacks)))
        if call is not None:
            last = self.snapshots[-1]
            changes.append((call, "parts", (*call.parts, part)))
            if not last.calls or last.calls[-1] is not call:
                changes.append((last, "calls", [*last.calls, call]))
            reach = position - self.snapshots[0].position
            changes.append((self, "depth", min(self.window, self.depth + tokens, reach)))
        return changes

    def rollback(self, tokens: int) -> None:
        """Drop the last `tokens` <= depth tokens.

        Where it fails on the way (no memory, a signal) the row is as it was; or, if taking the dropped tokens again
        fails too, where its last snapshot is.
        """
        if tokens == 0:
            return
        position, depth = self.position - tokens, self.depth - tokens
        if self.snapshots[-1].position > position:  # drop that snapshot: its buffer is free then
            older, last = self.snapshots
            self.snapshots = [Snapshot(older.slot, older.position, [*older.calls, *last.calls])]
        start, left, calls = self.snapshots[-1], position - self.snapshots[-1].position, []
        for call in start.calls:
            if left > 0:
                calls.append(call if call.tokens <= left else call.first(left))
                left -= call.tokens
        self.settle(start.slot)
        snapshots = [*self.snapshots[:-1], Snapshot(start.slot, start.position, calls)]
        held = {self.slot, *(snapshot.slot for snapshot in snapshots)}
        free = [slot for slot in range(len(self.pairs)) if slot not in held]
        if not calls:
            _core.commit((), self.at(start.slot, position, depth, snapshots, self.lacks))
        elif free:
            self._replay(calls, start.slot, free[0])
            _core.commit((), self.at(free[0], position, depth, snapshots, self.lacking(free[0], None)))
        else:
            lacks = self.lacking(self.slot, None)
            before = self.at(self.slot, self.position, self.depth, self.snapshots, lacks)
            target, reach = self.slot, max(0, self.depth - (self.position - start.position))
            still = [*self.snapshots[:-1], Snapshot(start.slot, start.position, [])]
            try:
                _core.commit((), self.at(start.slot, start.position, reach, still, lacks))
                self._replay(calls, start.slot, target)
                _core.commit((), self.at(target, position, depth, snapshots, lacks))
            except BaseException:
                self._replay(start.calls, start.slot, target)
                _core.commit((), before)
                raise

    def _replay(self, calls: Sequence[Call], source: int, target: int) -> None:
        """The tokens of the calls once more, from one buffer into another."""
        read = self.pairs[source]
        for call in calls:
            call.replay(call, read, self.pairs[target])
            read = self.pairs[target]

    def copy_to(self, other: Row) -> None:
        """Everything but the memory; parts of calls are never written, so both may hold them."""
        other.slot, other.position, other.depth = self.slot, self.position, self.depth
        other.snapshots = [Snapshot(s.slot, s.position, list(s.calls)) for s in self.snapshots]
        other.lacks = [None] * len(other.pairs)
        for slot in {self.slot, *(s.slot for s in self.snapshots)}:
            self.settle(slot)
            for to, kept in zip(other.pairs[slot], self.pairs[slot], strict=True):
                np.copyto(to, kept)


class KDAState:
    """The state of one KDA layer for `batch` sequences. Made by KDALayer.new_state, by a Session, or from a config.

    config : KDAConfig. batch : sequences, each a row. rollback_window : how many of a row's last tokens `rollback` can
    drop; above 0 the state takes three times the memory, and 4 bytes x (2 H K + HV (K + V + 1)) a token for up to two
    windows and a call. state_dtype : "float32", or "bfloat16": S takes half the memory and is rounded to nearest even
    at the end of every call, and every 128 tokens of a longer one; all arithmetic stays float32, and the histories
    are. How far that drifts, decoding token by token, is up to the decay: seeded layers with Kimi-Linear's gate stay at
    0.3 % of the outputs (relative RMS) over thousands of tokens; with a bounded gate, where many channels hardly
    decay, errors gather: 2 % after 1000 tokens, 2.5 % after 3000.

    A state serves one call at a time: a second thread gets a RuntimeError, not a race. So does a forked child, where
    another thread of the parent was in a call that uses it.
    """

    def __init__(self, config: KDAConfig, batch: int = 1, rollback_window: int = 0,
                 state_dtype: str = "float32") -> None:
        self.config = config
        self.batch = _count("batch", batch, 1)
        self.rollback_window = _count("rollback_window", rollback_window, 0)
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype: expected 'float32' or 'bfloat16', got {state_dtype!r}")
        self.state_dtype = state_dtype
        self.lock = _core.Lock(weakref.ref(self))  # for the layer and the session
        HV, K, V = config.num_v_heads, config.head_dim, config.v_head_dim
        self._sizes = [(config.conv_size - 1) * self._channels(i) for i in range(3)]
        slots = 3 if self.rollback_window else 1
        bits = np.dtype(np.float32 if state_dtype == "float32" else np.uint16)
        self._s = [_zeros((self.batch, HV, K, V), bits) for _ in range(slots)]
        self._h = [np.zeros((self.batch, sum(self._sizes)), np.float32) for _ in range(slots)]
        self.rows = [Row([(s[i], h[i]) for s, h in zip(self._s, self._h, strict=True)], self.rollback_window)
                     for i in range(self.batch)]

    # ---- what it holds ----

    @property
    def recurrent(self) -> Array:
        """S [B, HV, K, V] of state_dtype: a view. With a rollback window it is read-only and holds until the next
        call; a value written there would be lost by a rollback. `assign` replaces it. Without a window it shows every
        later call too, which costs decoding a second pass over S from then on; `arrays` gives copies, and does not."""
        with self.lock:
            slot = self._common_slot()
            for row in self.rows:
                row.settle(slot)
                row.leaves = row.leaves and self.rollback_window > 0
        s = self._s[slot]
        return self._shown(s if s.dtype == np.float32 else s.view(ml_dtypes.bfloat16))

    @property
    def conv_q(self) -> NDArray[np.float32]:
        """The last W - 1 raw inputs of q's convolution [B, H K, W - 1], oldest first: a view as `recurrent` is."""
        return self._history(0)

    @property
    def conv_k(self) -> NDArray[np.float32]:
        """The same of k."""
        return self._history(1)

    @property
    def conv_v(self) -> NDArray[np.float32]:
        """The same of v, [B, HV V, W - 1]."""
        return self._history(2)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Tokens that each row has taken, [B], a copy."""
        return np.array([row.position for row in self.rows], np.int64)

    @property
    def position(self) -> int | NDArray[np.int64]:
        """Tokens taken: an int where all rows have taken as many, else `positions`."""
        first = self.rows[0].position
        return first if all(row.position == first for row in self.rows) else self.positions

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, of updates that are left to the next call, and of what is kept for a rollback."""
        calls = {id(part): part for row in self.rows for s in row.snapshots for c in s.calls for part in c.parts}
        return (sum(a.nbytes for a in (*self._s, *self._h))
                + sum(a.nbytes for row in self.rows for a in row.updates if a is not None)
                + sum(a.nbytes for part in calls.values() for a in part))

    def __repr__(self) -> str:
        return (f"KDAState(batch={self.batch}, position={self.position}, rollback_window={self.rollback_window}, "
                f"state_dtype={self.state_dtype!r}, nbytes={self.nbytes})")

    # ---- what can be done with it ----

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Copies of recurrent, conv_q, conv_k and conv_v."""
        with self.lock:
            s, q, k, v = (x.copy() for x in self.current())
        return s if s.dtype == np.float32 else s.view(ml_dtypes.bfloat16), q, k, v

    def copy(self) -> KDAState:
        """An independent state that goes on as this one would, rollback included."""
        return self.select(range(self.batch))

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> KDAState:
        return self.copy()

    def select(self, rows: Sequence[int]) -> KDAState:
        """A new state whose rows are copies of these rows, any of them once, more than once, or not at all. Raises
        IndexError for others, and for none."""
        with self.lock:
            return self.selected(rows)

    def selected(self, rows: Sequence[int]) -> KDAState:
        """select for a caller who holds the lock."""
        try:
            index = [operator.index(i) for i in rows]
        except TypeError as error:
            raise TypeError(f"rows: expected integers, got {rows!r}") from error
        if not index or not all(-self.batch <= i < self.batch for i in index):
            raise IndexError(f"rows: expected one or more of the rows 0 to {self.batch - 1}, got {index}")
        other = KDAState(self.config, len(index), self.rollback_window, self.state_dtype)
        for i, row in zip(index, other.rows, strict=True):
            self.rows[i].copy_to(row)
        return other

    def reset(self) -> None:
        """Back to zeros and position 0."""
        with self.lock:
            _core.commit(*self.cleared())

    def rollback(self, n: int | Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Drop the last n tokens of every row, or n[b] of row b: bit for bit as if they had never been taken.

        A row can drop as many tokens as it has taken since its start or a load, up to rollback_window; what has been
        dropped counts against the window until as many have been taken again. Raises ValueError for more, and leaves
        all rows as they are. Where memory runs out on the way, or a signal's handler raises, each row is where
        `positions` says: as it was, rolled back, or, if that failed twice, at its last snapshot.
        """
        with self.lock:
            self.rollback_rows(self.checked_rollback(n))

    def checked_rollback(self, n: Any, what: str = "") -> list[int]:
        """n for each row, or the error; for rollback and the session."""
        counts = _array("n", n)
        if counts.dtype.kind not in "iu":
            raise TypeError(f"n: expected an int or [{self.batch}] ints, got {n!r}")
        if counts.shape not in ((), (self.batch,)):
            raise ValueError(f"n: expected an int or [{self.batch}] ints, got {list(counts.shape)}")
        each = [int(c) for c in np.broadcast_to(counts, (self.batch,))]
        for i, (count, row) in enumerate(zip(each, self.rows, strict=True)):
            if not 0 <= count <= row.depth:
                raise ValueError(f"n: {what}row {i} can drop 0 to {row.depth} tokens (position {row.position}, "
                                 f"rollback_window {self.rollback_window}), got {count}")
        return each

    def rollback_rows(self, counts: Sequence[int]) -> None:
        """checked_rollback's numbers, done."""
        for count, row in zip(counts, self.rows, strict=True):
            row.rollback(count)

    def assign(self, recurrent: Array, conv_q: Array, conv_k: Array, conv_v: Array,
             positions: int | Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Copy in a state from elsewhere: arrays shaped as the properties of those names (conv states W columns wide
        are taken too: the first is never read), any float dtype, and how many tokens they stand for. They may be
        views of this state.

        Raises ValueError for other shapes or positions beyond 2^53 and TypeError for other dtypes; then nothing has
        changed.
        """
        given = [("recurrent", recurrent, self._s[0].shape)]
        W = self.config.conv_size
        for i, (name, x) in enumerate((("conv_q", conv_q), ("conv_k", conv_k), ("conv_v", conv_v))):
            given.append((name, x, (self.batch, self._channels(i), W - 1)))
        arrays = []
        for name, x, shape in given:
            x = _array(name, x)
            if x.dtype.kind != "f" and x.dtype != STATE_DTYPES["bfloat16"]:
                raise TypeError(f"{name}: expected floats {list(shape)}, got {x.dtype} {list(x.shape)}")
            if name != "recurrent" and x.shape == (*shape[:2], W):
                x = x[:, :, 1:]
            if x.shape != shape:
                raise ValueError(f"{name}: expected {list(shape)}, got {list(x.shape)}")
            arrays.append(x.astype(STATE_DTYPES[self.state_dtype] if name == "recurrent" else np.float32))
        counts = _array("positions", positions)
        if counts.dtype.kind not in "iu" or counts.shape not in ((), (self.batch,)) or (counts < 0).any():
            raise ValueError(f"positions: expected an int >= 0 or [{self.batch}] of them, got {positions!r}")
        if (counts > MOST_POSITION).any():
            raise ValueError(f"positions: expected at most {MOST_POSITION}, got {positions!r}")
        with self.lock:
            copies = [(self._s[0], arrays[0].view(self._s[0].dtype))]
            copies += [(self._taps(i, 0), x.transpose(0, 2, 1)) for i, x in enumerate(arrays[1:]) if W > 1]
            changes = [change for row, count in zip(self.rows, np.broadcast_to(counts, (self.batch,)), strict=True)
                       for change in row.at(0, int(count))]
            _core.commit(copies, changes)

    # ---- for the session, and inside ----

    def current(self) -> tuple[Array, Array, Array, Array]:
        """Writable views of recurrent (bfloat16 as its bits) and the three histories; the caller holds the lock."""
        slot = self._common_slot()
        for row in self.rows:
            row.settle(slot)
        q, k, v = (self._taps(i, slot).transpose(0, 2, 1) for i in range(3))
        return self._s[slot], q, k, v

    def holds(self, x: Array) -> bool:
        """Whether x may lie in the buffers."""
        return any(np.may_share_memory(x, a) for a in (*self._s, *self._h))

    def cleared(self) -> tuple[list[tuple[Array, Any]], list[Change]]:
        """What commit takes for a reset; the caller holds the lock."""
        return [(self._s[0], 0), (self._h[0], 0)], [change for row in self.rows for change in row.at(0, 0)]

    def _common_slot(self) -> int:
        """The slot of every row's current state; rows that went back alone are brought to that of the first. The caller
        holds the lock."""
        slot = self.rows[0].slot
        self._bring([row for row in self.rows if row.slot != slot], slot)
        return slot

    @staticmethod
    def _bring(rows: list[Row], slot: int) -> None:
        """Swap the rows' current buffers with those at `slot`."""
        for row in rows:
            if row.slot != slot:
                row.settle(row.slot, slot)
                pairs = list(zip(row.pairs[row.slot], row.pairs[slot], strict=True))
                copies = [(a, b.copy()) for a, b in pairs] + [(b, a.copy()) for a, b in pairs]
                changes: list[Change] = [(snapshot, "slot", slot + row.slot - snapshot.slot)
                                         for snapshot in row.snapshots if snapshot.slot in (slot, row.slot)]
                _core.commit(copies, [*changes, (row, "slot", slot)])

    def _taps(self, which: int, slot: int) -> NDArray[np.float32]:
        """[B, W - 1, D] of one convolution."""
        start, size, past = sum(self._sizes[:which]), self._sizes[which], self.config.conv_size - 1
        return self._h[slot][:, start:start + size].reshape(self.batch, past, self._channels(which))

    def _channels(self, which: int) -> int:
        """D of one convolution."""
        c = self.config
        return c.num_heads * c.head_dim if which < 2 else c.num_v_heads * c.v_head_dim

    def _history(self, which: int) -> Array:
        with self.lock:
            slot = self._common_slot()
        return self._shown(self._taps(which, slot).transpose(0, 2, 1))

    def _shown(self, x: Array) -> Array:
        if self.rollback_window:
            x = x.view()
            x.flags.writeable = False
        return x


def exclusive(*states: KDAState) -> _core.Locks:
    """A context that holds the locks of all the states, or of none."""
    return _core.Locks([state.lock for state in states])


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int >= {least}, got {value!r}")
    number: int = value.__index__()
    if number < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {number}")
    return number


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros on a cache line, in memory that is there: the first step does not fault its pages in."""
    size = math.prod(shape)
    x: Array = aligned_empty((-(-size * dtype.itemsize // 4),)).view(dtype)[:size].reshape(shape)
    x[...] = 0
    return x
