"""Memory that is not there: errors that leave all as it was. More of it than an int counts: the right elements."""
import os
import platform
import subprocess
import sys

import pytest
from helpers import python

HERE = os.path.dirname(__file__)
GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")  # whose allocator is its own


# ---- an allocation that fails ----

@pytest.fixture(scope="module")
def failing_malloc(tmp_path_factory):
    library = tmp_path_factory.mktemp("malloc") / "failing.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, f"{HERE}/failing_malloc.c"], check=True)
    return str(library)


SWEEP = f"""
import ctypes, sys, tempfile, os
sys.path.insert(0, {HERE!r})
import numpy as np
import kda
from kda import KDALayer, QuantizedMatrix, Session
from plain_layer import TINY, seeded
kda.set_num_threads(2)
here = ctypes.CDLL(None)
rng = np.random.default_rng(0)
def random(*shape):
    return rng.standard_normal(shape).astype(np.float32)

def sweep(make):
    # make() -> (call, what must be as it was if the call fails: arrays, or a function). One allocation fails, or all
    # from one on, each in its turn, until the call needs no more.
    failures = 0
    call, _ = make()
    call()  # what is made once is made
    for all_that_follow in (0, 1):
        n = 0
        while True:
            call, kept = make()
            before = kept() if callable(kept) else [a.tobytes() for a in kept]
            here.fail_from(n, all_that_follow)
            try:
                call()
                failed = False
            except (MemoryError, OSError):
                failed = True
            except SystemError as error:  # a ufunc of numpy, which loses the MemoryError of its buffers
                failed = "returned NULL without setting an exception" in str(error)
            left = here.fail_never()
            if failed:
                failures += 1
                after = kept() if callable(kept) else [a.tobytes() for a in kept]
                assert before == after, n
            elif left >= 0:
                break
            n += 1
        make()[0]()
    assert failures > 0
    print("ok", failures)
"""

OPS = """
q, k, v, g = random(1, 70, 2, 96), random(1, 70, 2, 96), random(1, 70, 4, 64), -abs(random(1, 70, 4, 96))
beta = abs(random(1, 70, 4)) % 1
def delta(function, **options):
    def make():
        out, state = np.full(v.shape, 7, np.float32), random(1, 4, 96, 64)
        return (lambda: function(q, k, v, g, beta, out=out, initial_state=state, state_out=state,
                                 use_qk_l2norm_in_kernel=True, **options), [out, state])
    sweep(make)
delta(kda.fused_recurrent_kda)
delta(kda.chunk_kda)
delta(kda.chunk_kda, chunk_size=16, return_intermediate_states=True)
sweep(lambda: (lambda: kda.ops.chunk_kda_backward(v, None, q, k, v, g, beta), [q, k, v, g, beta]))
x, w = random(2, 40, 700), random(700, 4)
out = np.full(x.shape, 7, np.float32)
def conv():
    out[...] = 7
    return lambda: kda.causal_conv1d(x, w, output_final_state=True, out=out), [out]
sweep(conv)
def update(columns, order):
    def make():
        state, out = np.array(random(2, 700, columns), order=order), np.full((2, 700), 7, np.float32)
        x = random(2, 700).astype(np.float16 if order == "F" else np.float32)
        out = out.astype(x.dtype)
        return lambda: kda.causal_conv1d_update(x, state, w, out=out), [state, out]
    return make
for columns in (3, 4):
    for order in "CF":
        sweep(update(columns, order))
def norm():
    y = x.copy()
    return lambda: kda.rms_norm_gated(y, y, w[0].repeat(175), out=y), [y]
sweep(norm)
sweep(lambda: (lambda: kda.l2norm(x), [x]))
sweep(lambda: (lambda: kda.fused_kda_gate(g, np.zeros(4, np.float32)), [g]))
"""

# Without dequantize: a ufunc of numpy that gets no memory for its buffers sets the error without the GIL, and crashes.
MATRICES = """
w, x = random(200, 300), random(2100, 300)
matrix = QuantizedMatrix.quantize(w, 4, 32)
folder = tempfile.mkdtemp()
path = folder + "/matrix"
for bits in (8, 4):
    sweep(lambda: (lambda: QuantizedMatrix.quantize(w, bits), [w]))
def product():
    out = np.full((2100, 200), 7, np.float32)
    return lambda: matrix.matmul(x, out), [out]
sweep(product)
sweep(lambda: (lambda: QuantizedMatrix.concatenate([matrix, matrix]), [matrix._codes]))
sweep(lambda: (lambda: QuantizedMatrix.from_codes(matrix.codes, matrix.scales, matrix.shape, 4, 32), [matrix._codes]))
sweep(lambda: (lambda: kda.dense.DenseMatrix([w]), [w]))
def saving():
    matrix.save(path)
    other = QuantizedMatrix.quantize(2 * w, 4, 32)
    return lambda: other.save(path), lambda: (open(path, "rb").read(), os.listdir(folder))
sweep(saving)
sweep(lambda: (lambda: QuantizedMatrix.load(path), lambda: os.listdir(folder)))
"""

# What a state holds is what its position says: a call that failed after its recurrence has taken its tokens.
STATES = """
x = random(1, 200, 48)
folder = tempfile.mkdtemp()
path = folder + "/session"
def bits(state):
    parts = (state.recurrent, state.conv_q, state.conv_k, state.conv_v)
    return b"".join(np.ascontiguousarray(a).tobytes() for a in parts)
for weights in ("f32", "q8g"):
    layer = KDALayer.from_tensors(TINY, seeded(TINY), weight_format=weights, recurrent_max=10**9)
    state, wanted = layer.new_state(), []
    for t in range(200):
        wanted.append(bits(state))
        layer(x[:, t:t + 1], state)
    def check(states):
        for state in states:
            with state.lock:
                pass
            for b, position in enumerate(state.positions):
                row = state.select([b])
                assert bits(row) == wanted[position], position
                if row.rows[0].depth:
                    row.rollback(row.rows[0].depth)
                    assert bits(row) == wanted[row.position], position
        return True
    for window in (0, 5):
        for batch, tokens in ((1, 1), (1, 3), (2, 3), (1, 140)):
            def make():
                states = [layer.new_state(rollback_window=window) for _ in range(batch)]
                for state in states:
                    for t in range(0, 14, 2):
                        layer(x[:, t:t + 2], state)
                part = np.repeat(x[:, 14:14 + tokens], batch, axis=0)
                return (lambda: layer(part, states if batch > 1 else states[0])), lambda: check(states)
            sweep(make)
    for n in (1, 3, 5):
        def make():
            state = layer.new_state(batch=2, rollback_window=5)
            for t in range(0, 14, 2):
                layer(np.repeat(x[:, t:t + 2], 2, axis=0), state)
            return (lambda: state.rollback([n, 5 - n])), lambda: check([state])
        sweep(make)
    def apart():
        state = layer.new_state(batch=2, rollback_window=5)
        for t in range(0, 14, 2):
            layer(np.repeat(x[:, t:t + 2], 2, axis=0), state)
        state.rollback([3, 0])
        assert len({row.slot for row in state.rows}) == 2
        return (lambda: state.recurrent), lambda: check([state])
    sweep(apart)
session = Session(TINY, rollback_window=3)
layers = [KDALayer.from_tensors(TINY, seeded(TINY, i)) for i in range(2)]
def ran(tokens):
    for layer, state in zip(layers, session.layers):
        layer(x[:, :tokens], state)
    return [bits(state) for state in session.layers]
ran(3)
def saving():
    session.save(path)
    ran(1)
    return lambda: session.save(path), lambda: (open(path, "rb").read(), os.listdir(folder))
sweep(saving)
session.save(path)
sweep(lambda: (lambda: Session.load(path, TINY), lambda: os.listdir(folder)))
sweep(lambda: (session.fork, lambda: [bits(state) for state in session.layers]))
"""


@pytest.mark.skipif(not GLIBC, reason="stands in for the malloc of glibc")
@pytest.mark.skipif(SANITIZED, reason="the sanitizers' malloc cannot be stood in for")
@pytest.mark.parametrize("what", ["OPS", "MATRICES", "STATES"])
def test_an_allocation_that_fails_changes_nothing(failing_malloc, what):
    """Each allocation of a call in its turn: an error, and arrays, files and states as they were."""
    done = python(SWEEP + globals()[what], LD_PRELOAD=failing_malloc, timeout=300)
    assert set(done.stdout.split()[::2]) == {"ok"}
    assert len(done.stdout.splitlines()) == {"OPS": 12, "MATRICES": 8, "STATES": 27}[what]
