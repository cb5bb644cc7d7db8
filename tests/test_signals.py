"""Signals: a long call is run in parts, whose bits are those of the whole, and Ctrl-C ends it between two of them."""
import os
import sys

import numpy as np
import pytest
from helpers import make_inputs, python, same_bits
from plain_layer import CONFIGS, seeded

import kda
from kda import KDALayer, _core, ops

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")  # which slows Python's own memory down
TESTS = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"


@pytest.fixture
def parts():
    """Calls in as many parts as can be."""
    before = _core.set_parts(np.inf, 0)

    def cut(on):
        _core.set_parts(1 if on else np.inf, 0)

    yield cut
    _core.set_parts(*before)


def both(parts, call):
    """What call() returns in one part and in many, flat."""
    results = []
    for on in (False, True):
        parts(on)
        flat = []
        for value in call():
            flat += value.values() if isinstance(value, dict) else [value]
        results.append(flat)
    return zip(*results, strict=True)


CUTS = {
    "one sequence": {},
    "a batch": {"B": 3, "T": 37},
    "uneven": {"cu_seqlens": [0, 0, 1, 40, 57, 57, 97], "T": 97, "N": 6},
    "columns split": {"H": 1, "HV": 1, "K": 64, "V": 70},
}


@pytest.mark.parametrize("spacing", [None, 1, 5, 16, 24, 64, 1000])
@pytest.mark.parametrize("case", CUTS)
def test_parts_do_not_show_in_the_delta_rule(isa, threads, parts, case, spacing):
    options = {"B": 1, "T": 97, "H": 2, "HV": 4, "K": 20, "V": 12} | CUTS[case]
    cu = options.pop("cu_seqlens", None)
    x = make_inputs(0, **{"N": options["B"]} | options)
    threads(3)
    more = {} if spacing is None else {"chunk_size": spacing, "return_intermediate_states": True}
    for function in (kda.chunk_kda, kda.fused_recurrent_kda)[:1 if more else 2]:
        for initial in (x["initial_state"], None):
            def call(function=function, initial=initial):
                return function(**x | {"initial_state": initial}, output_final_state=True, cu_seqlens=cu, isa=isa,
                                **more)

            for got, want in both(parts, call):
                assert same_bits(got, want)


@pytest.mark.parametrize("case", CUTS)
def test_parts_do_not_show_in_updates_that_are_left(isa, parts, case):
    options = {"B": 1, "T": 97, "H": 2, "HV": 4, "K": 20, "V": 12} | CUTS[case]
    cu = options.pop("cu_seqlens", None)
    x = make_inputs(0, **{"N": options["B"]} | options)

    def call():
        state = x["initial_state"].copy()
        pending = kda.no_updates(state)
        for _ in range(2):
            o, _ = kda.fused_recurrent_kda(**x | {"initial_state": state}, state_out=state, pending=pending,
                                           cu_seqlens=cu, isa=isa)
            yield o
        yield pending.copy()
        yield state.copy()
        kda.settle(state, pending, isa=isa)
        yield state
        assert same_bits(pending, kda.no_updates(state))

    for got, want in both(parts, call):
        assert same_bits(got, want)


@pytest.mark.parametrize("case", CUTS)
def test_parts_do_not_show_in_gradients(parts, case):
    options = {"B": 1, "T": 150, "H": 2, "HV": 4, "K": 12, "V": 8} | CUTS[case]
    cu = options.pop("cu_seqlens", None)
    if cu:
        cu, options["T"] = [0, 0, 1, 80, 97, 97, 260], 260
    x = make_inputs(0, **{"N": options["B"]} | options)
    d_o, d_s = x["v"][::-1] * 0.5, x["initial_state"] * 0.25
    for got, want in both(parts, lambda: [ops.chunk_kda_backward(d_o, d_s, **x, cu_seqlens=cu)]):
        assert (got is None and want is None) or same_bits(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_parts_do_not_show_elsewhere(isa, threads, parts, dtype):
    threads(2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 90, 300)).astype(dtype)
    weight = rng.standard_normal((300, 4)).astype(np.float32)
    taken = rng.standard_normal((6, 300, 3)).astype(np.float32)
    cu = [0, 0, 1, 40, 57, 57, 90]
    many = np.repeat(np.arange(41), 2)[:42]  # more items than tokens

    def call():
        yield from kda.causal_conv1d(x, weight, initial_state=taken, output_final_state=True, cu_seqlens=cu, isa=isa)
        yield from kda.causal_conv1d(x[:, :many[-1]], weight, output_final_state=True, cu_seqlens=many, isa=isa)
        yield from kda.causal_conv1d(x[:, :0], weight, initial_state=taken[:1], output_final_state=True, isa=isa)
        yield kda.l2norm(x, isa=isa)
        yield kda.rms_norm_gated(x, x, weight[:, 0], isa=isa)
        yield kda.fused_kda_gate(x.reshape(1, 90, 3, 100), np.zeros(3, np.float32), isa=isa)
        for bits in (8, 4):
            m = kda.QuantizedMatrix.quantize(x[0], bits, 32, isa=isa)
            yield m.codes
            yield m.scales
            yield m.matmul(x[0, :37])
        y = np.empty((90, 90), np.float32)
        kda.dense.DenseMatrix([x[0]], isa).into(y, x[0].astype(np.float32))
        yield y

    for got, want in both(parts, call):
        assert same_bits(got, want)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.model_type}-{c.hidden_size}")
def test_a_layer_does_not_show_parts(parts, config):
    layer = KDALayer.from_tensors(config, seeded(config))
    x = np.random.default_rng(0).standard_normal((1, 200, config.hidden_size)).astype(np.float32)

    def call():
        state = layer.new_state()
        yield layer(x, state)
        yield state.recurrent

    for got, want in both(parts, call):
        assert same_bits(got, want)


# ---- Ctrl-C ----

INTERRUPTED = TESTS + """
import os, re, signal, sys, threading, time
import numpy as np
import kda
LIMIT = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background starts without
kda.set_num_threads(2)
def wide(*shape, value=1):
    # many rows that take no memory
    return np.broadcast_to(np.full(shape[-1], value, np.float32), shape)
def interrupted(call, tries=8):
    # the shortest time from the signal to the exception, of as many tries as it needs; and the last exception
    best = 1e9
    for _ in range(tries):
        sent = []
        def send():
            time.sleep(0.3)
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            call()
        except KeyboardInterrupt as error:
            best, stopped = min(best, time.perf_counter() - sent[0]), error
        else:
            raise SystemExit("the call was over before the signal: make it longer")
        sender.join()
        if best < LIMIT:
            break
    return best, stopped
def pool_is_usable():
    x = wide(1, 64, 4, 128)
    return kda.fused_recurrent_kda(x, x, x, wide(*x.shape, value=-1), x[..., 0])[0].shape == x.shape
"""
T = 400_000  # minutes of work, or at least many seconds

DELTA = "x, g = wide(1, T, 1, 512), wide(1, T, 1, 512, value=-1); call = lambda: kda."
CALLS = {
    "chunk_kda": DELTA + "chunk_kda(x, x, x, g, x[..., 0])",
    "fused_recurrent_kda": DELTA + "fused_recurrent_kda(x, x, x, g, x[..., 0])",
    "chunk_kda of states": DELTA + "chunk_kda(x, x, x, g, x[..., 0], chunk_size=T // 2, "
                                   "return_intermediate_states=True)",
    "causal_conv1d": "x = wide(1, 30 * T, 64); w = np.ones((64, 8), np.float32)\n"
                     "call = lambda: kda.causal_conv1d(x, w)",
    "l2norm": "x = wide(T // 10, 4096); call = lambda: [kda.l2norm(x) for _ in range(99)]",
    "rms_norm_gated": "x = np.ones((T // 10, 4096), np.float32); w = x[0].copy()\n"
                      "call = lambda: [kda.rms_norm_gated(x, x, w, out=x) for _ in range(99)]",
    "quantize": "w = wide(T, 4096); call = lambda: [kda.QuantizedMatrix.quantize(w) for _ in range(20)]",
    "matmul": "m = kda.QuantizedMatrix.quantize(np.ones((4096, 4096), np.float32)); x = wide(T, 4096)\n"
              "call = lambda: m.matmul(x)",
    "layer": "from plain_layer import *; from kda import *\n"
             "layer = KDALayer.from_tensors(TINY, seeded(TINY)); x = wide(1, 3 * T, 48)\n"
             "call = lambda: layer(x, layer.new_state())",
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_long_call(name):
    """Within 0.5 s at the best of some, which a busy machine manages too; whole calls take several seconds."""
    done = python(INTERRUPTED + f"T = {T}\n{CALLS[name]}\n"
                  "print(interrupted(call)[0], pool_is_usable())", timeout=300)
    seconds, usable = done.stdout.split()
    assert float(seconds) < (10 if SANITIZED else 0.5)
    assert usable == "True"


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
def test_an_interrupted_call_tells_its_tokens(function):
    """out and the state in place are those of the tokens in the note, to the bit."""
    done = python(INTERRUPTED + f"""
T = {T}
rng = np.random.default_rng(0)
few = rng.standard_normal((3, 1, 1, 2, 256)).astype(np.float32)
q, k, v, g = (np.broadcast_to(a, (1, T, 2, 256)) for a in (*few, -abs(few[0])))
beta, state = wide(1, T, 2), rng.standard_normal((1, 2, 256, 256)).astype(np.float32)
first, out = state.copy(), np.zeros((1, T, 2, 256), np.float32)
options = dict(use_qk_l2norm_in_kernel=True)
_, error = interrupted(lambda: kda.{function}(q, k, v, g, beta, initial_state=state, state_out=state, out=out,
                                              **options), tries=1)
n = int(re.fullmatch("kda: stopped after the first ([0-9]+) tokens of each sequence; out and state_out hold the "
                     "results of these", *error.__notes__)[1])
o, s = kda.{function}(q[:, :n], k[:, :n], v[:, :n], g[:, :n], beta[:, :n], initial_state=first,
                      output_final_state=True, **options)
print(0 < n < T, o.tobytes() == out[:, :n].tobytes(), s.tobytes() == state.tobytes(), not out[:, n:n + 9999].any())
""", timeout=300)
    assert done.stdout.split() == ["True"] * 4


def test_a_handler_that_returns_changes_nothing():
    done = python(INTERRUPTED + """
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
x = np.random.default_rng(0).standard_normal((1, 8000, 1, 256)).astype(np.float32)
def call():
    return kda.chunk_kda(x, x, x, -abs(x), x[..., 0], use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)[0]
want = call()
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
got = call()
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(seen) > 0, got.tobytes() == want.tobytes())""", timeout=300)
    assert done.stdout.split() == ["True", "True"]


STORM = TESTS + """
import random, signal
import numpy as np
from plain_layer import TINY, seeded
from kda import KDALayer, Session
import kda
WINDOW, LENGTH = {window}, 400
kda.set_num_threads(2)
layer = KDALayer.from_tensors(TINY, seeded(TINY), weight_format={weights!r}, recurrent_max=10**9)
x = np.random.default_rng(0).standard_normal((1, LENGTH, 48)).astype(np.float32)
def bits(state):
    parts = (state.recurrent, state.conv_q, state.conv_k, state.conv_v)
    return b"".join(np.ascontiguousarray(a).tobytes() for a in parts)
state = layer.new_state()
wanted = [bits(state)]
for t in range(LENGTH):
    layer(x[:, t:t + 1], state)
    wanted.append(bits(state))

armed, hits = False, 0
def handler(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
rng = random.Random(1)
session = Session(TINY, batch=2, rollback_window=WINDOW)
state = session.layers[0]
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.00037)
while hits < {hits}:
    at, what = state.positions, rng.random()
    try:
        armed = True
        if what < 0.6 and max(at) < LENGTH - 140:
            n = [rng.choice((1, 1, 1, 2, 5, 130)) for _ in range(2)]
            batch = np.zeros((2, max(n), 48), np.float32)
            for b in range(2):
                batch[b, :n[b]] = x[0, at[b]:at[b] + n[b]]
            layer(batch, state, lengths=n)
        elif what < 0.9 and WINDOW:
            state.rollback([rng.randint(0, row.depth) for row in state.rows])
        elif what < 0.93:
            state.reset()
        elif what < 0.96:
            session.reset()
        else:
            session.fork()
        armed = False
    except KeyboardInterrupt:
        hits += 1
    armed = False
    with state.lock, session.layers[1].lock:
        pass
    copy = state.copy()
    for b, position in enumerate(state.positions):
        row = state.select([b])
        assert bits(row) == wanted[position], (b, position, what)
        if row.rows[0].depth:
            row.rollback(row.rows[0].depth)
            assert bits(row) == wanted[row.position], "back"
signal.setitimer(signal.ITIMER_REAL, 0)
print(hits)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="interval timers")
@pytest.mark.parametrize(("window", "weights"), [(0, "f32"), (7, "f32"), (7, "q8g")])
def test_signals_at_any_moment_leave_a_state_whole(window, weights):
    """Calls, rollbacks, resets and forks, interrupted anywhere: locks are free, and what each row holds, and what it
    can go back to, is what its position says."""
    done = python(STORM.format(window=window, weights=weights, hits=200), timeout=300)
    assert done.stdout.split() == ["200"]
