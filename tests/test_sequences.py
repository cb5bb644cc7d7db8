"""What a KDAState and a Session do in any order of operations, compared with the plainest model there is: each row is
the list of its tokens, and its state is that of a fresh run over them, to the bit."""
import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers import same_bits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_arguments import small_layer

import kda

which = st.integers(0, 2)
CONFIG = kda.KDAConfig("kimi_linear", 4, 3, (0, 2), 1, 2, 3, 2, 3)
NAMES = ("recurrent", "conv_q", "conv_k", "conv_v")


@functools.cache
def token(number):
    return np.random.default_rng(number).standard_normal(CONFIG.hidden_size).astype(np.float32)


class Sequences(RuleBasedStateMachine):
    """Up to three sessions beside lists: for each row the numbers of its tokens in the calls that took them, and how
    many can be dropped."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.tokens = 0
        self.all = []

    def teardown(self):
        self.folder.cleanup()

    def known(self, session, rows, depths):
        entry = {"session": session, "rows": rows, "depths": depths}
        self.all = [*self.all[-2:], entry]

    @initialize(batch=st.integers(1, 3), window=st.sampled_from([5, 3, 1, 0]),
                dtype=st.sampled_from(["float32", "bfloat16"]))
    def start(self, batch, window, dtype):
        session = kda.Session(CONFIG, batch, window, dtype)
        self.known(session, [[] for _ in range(batch)], [0] * batch)

    @rule(i=which, data=st.data(), T=st.sampled_from([1, 6, 2, 3, 0]), side=st.sampled_from(["right", "left"]))
    def take(self, i, data, T, side):
        """A call of every layer, with padding of NaN."""
        s = self.all[i % len(self.all)]
        batch, session = len(s["rows"]), s["session"]
        lengths = data.draw(st.none() | st.lists(st.integers(0, T), min_size=batch, max_size=batch))
        x = np.full((batch, T, CONFIG.hidden_size), np.nan, np.float32)
        for b, row in enumerate(s["rows"]):
            n = T if lengths is None else lengths[b]
            numbers = list(range(self.tokens, self.tokens + n))
            self.tokens += n
            start = 0 if side == "right" else T - n
            for t, number in enumerate(numbers):
                x[b, start + t] = token(number)
            if n:
                row.append(numbers)
                s["depths"][b] = min(session.rollback_window, s["depths"][b] + n)
        for layer in session.layers:
            y = small_layer(CONFIG)(x, layer, lengths, side)
            for b in range(batch):
                n = T if lengths is None else lengths[b]
                assert np.isnan(y[b]).sum() == 0
                assert np.count_nonzero(y[b].any(axis=1)) == n

    @rule(i=which, data=st.data())
    def drop(self, i, data):
        """A rollback; one row too far, and nothing has changed."""
        s = self.all[i % len(self.all)]
        session, depths = s["session"], s["depths"]
        counts = [data.draw(st.integers(0, depth)) for depth in depths]
        too_far = [*counts]
        too_far[data.draw(st.integers(0, len(depths) - 1))] += max(depths) + 1
        with pytest.raises(ValueError, match=r"n: layer 0, row \d can drop 0 to"):
            session.rollback(too_far)
        session.rollback(counts if len(set(counts)) > 1 or data.draw(st.booleans()) else counts[0])
        for b, (row, count) in enumerate(zip(s["rows"], counts, strict=True)):
            depths[b] -= count
            while count:
                last = row.pop()
                if len(last) > count:
                    row.append(last[:-count])
                count -= min(count, len(last))

    @rule(i=which, j=which, data=st.data(),
          deed=st.sampled_from(["fork", "select", "save", "assign", "assign", "reset"]))
    def other(self, i, j, data, deed):
        """What is not done for every token."""
        s, other = (self.all[n % len(self.all)] for n in (i, j))
        session, rows, depths = s["session"], s["rows"], s["depths"]
        if deed == "fork":
            self.known(session.fork(), [list(row) for row in rows], list(depths))
        elif deed == "select":
            index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), min_size=1, max_size=3))
            with pytest.raises(IndexError, match="rows: expected one or more of the rows"):
                session.select([*index, len(rows)])
            self.known(session.select(index), [list(rows[n]) for n in index], [depths[n] for n in index])
        elif deed == "save":
            path = Path(self.folder.name) / "session"
            session.save(path)
            loaded = kda.Session.load(path, CONFIG, data.draw(st.sampled_from([5, 0])))
            self.known(loaded, [list(row) for row in rows], [0] * len(rows))
        elif deed == "reset":
            session.reset()
            rows[:], depths[:] = [[] for _ in rows], [0] * len(rows)
        elif session.batch == other["session"].batch and session.state_dtype == other["session"].state_dtype:
            # a state taken over by its arrays, its own too; what could be dropped before cannot be now
            for to, kept in zip(session.layers, other["session"].layers, strict=True):
                to.assign(*(getattr(kept, name) for name in NAMES), kept.positions)
            rows[:], depths[:] = [list(row) for row in other["rows"]], [0] * len(rows)

    @invariant()
    def all_are_as_their_tokens_say(self):
        for s in self.all:
            session = s["session"]
            assert session.positions.tolist() == [sum(map(len, row)) for row in s["rows"]]
            for layer in session.layers:
                for b, row in enumerate(s["rows"]):
                    want = fresh(tuple(map(tuple, row)), session.state_dtype)
                    for name, kept in zip(NAMES, want, strict=True):
                        assert same_bits(np.ascontiguousarray(getattr(layer, name)[b]), kept), name
                assert [layer.rows[b].depth for b in range(session.batch)] == s["depths"]


@functools.lru_cache(4096)
def fresh(calls, dtype):
    """A row's state after these calls, from zeros: tokens one to a call in float32, where a call's ends leave no trace;
    in bfloat16, which rounds at the end of every call, in the calls themselves."""
    state = small_layer(CONFIG).new_state(1, 0, dtype)
    if dtype == "float32":
        calls = [(n,) for call in calls for n in call]
    for call in calls:
        small_layer(CONFIG)(np.array([[token(n) for n in call]]), state)
    return [np.ascontiguousarray(getattr(state, name)[0]) for name in NAMES]


Sequences.TestCase.settings = settings(max_examples=max(1, settings.default.max_examples // 4), stateful_step_count=30)
TestSequences = Sequences.TestCase
