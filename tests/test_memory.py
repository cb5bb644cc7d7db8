"""Memory that is not there: errors that leave all as it was. More of it than an int counts: the right elements."""
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from helpers import make_inputs, python, same_bits
from plain_layer import TINY, seeded

import kda
from kda import _core

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


# ---- offsets beyond 2^31 elements ----

FAR = 2**31 + 64  # elements: an int of 32 bits does not hold it, nor the bytes of 16-bit elements


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """far(x, axis): x with its two entries along an axis that far apart, in a sparse file of which few pages exist."""
    folder = tmp_path_factory.mktemp("sparse")
    made = []

    def far_apart(x, axis):
        assert x.shape[axis] == 2
        path = folder / f"{len(made)}"
        with open(path, "wb") as file:
            file.truncate((FAR + 2 * x.size) * x.itemsize)
        whole = np.memmap(path, x.dtype, "r+")
        strides = list(np.empty(x.shape, x.dtype).strides)
        strides[axis] = FAR * x.itemsize
        view = np.lib.stride_tricks.as_strided(whole, x.shape, strides)
        view[...] = x
        made.append(path)
        return view

    yield far_apart
    for path in made:
        path.unlink(missing_ok=True)


FAR_APART = pytest.mark.skipif(sys.maxsize < 2**33 or os.name == "nt", reason="needs 64-bit addresses, sparse files")


@FAR_APART
@pytest.mark.parametrize("function", [kda.fused_recurrent_kda, kda.chunk_kda], ids=lambda f: f.__name__)
def test_far_apart_in_the_delta_rule(isa, function, far):
    x = make_inputs(0, 2, 2, 2, 2, 20, 12, N=2)
    want_o, want_s = function(**x, output_final_state=True, isa=isa)
    for name, array in x.items():
        for axis in range(2 if name == "initial_state" else 3):
            o, s = function(**x | {name: far(array, axis)}, output_final_state=True, isa=isa)
            assert same_bits(o, want_o), (name, axis)
            assert same_bits(s, want_s), (name, axis)
    for axis in range(3):  # an output's axes before the far one have one entry, or it is refused
        cut = (slice(0, 1),) * min(axis, 2)
        y = {name: a[cut[:1]] if name == "initial_state" else a[cut] for name, a in x.items()}
        want_o, want_s = function(**y, output_final_state=True, isa=isa)
        o, s = far(np.zeros_like(want_o), axis), far(np.zeros_like(want_s), min(axis, 1))
        function(**y, out=o, state_out=s, isa=isa)
        assert same_bits(o, want_o), axis
        assert same_bits(s, want_s), axis
    halves = {name: a if name == "initial_state" else a.astype(np.float16) for name, a in x.items()}
    want_o, _ = function(**halves, isa=isa)
    out = far(np.zeros_like(want_o), 0)
    function(**halves | {name: far(halves[name], 1) for name in "qkvg"}, out=out, isa=isa)
    assert same_bits(out, want_o)


@FAR_APART
def test_a_pool_of_states_beyond_2_31_elements(isa, tmp_path):
    """131,104 sequences, of which the first and the last have tokens; the others' states are not touched."""
    N, x = 131_104, make_inputs(0, 1, 6, 1, 1, 128, 128)
    cu = np.full(N + 1, 3)
    cu[0], cu[-1] = 0, 6
    with open(tmp_path / "pool", "wb") as file:
        file.truncate(N * 128 * 128 * 4)
    pool = np.memmap(tmp_path / "pool", np.float32, "r+", shape=(N, 1, 128, 128))
    assert pool.size > 2**31
    o, _ = kda.fused_recurrent_kda(**x, initial_state=pool, state_out=pool, cu_seqlens=cu, isa=isa)
    for n, part in ((0, slice(0, 3)), (N - 1, slice(3, 6))):
        alone = {name: array[:, part] for name, array in x.items()}
        want_o, want_s = kda.fused_recurrent_kda(**alone, output_final_state=True, isa=isa)
        assert same_bits(o[:, part], want_o)
        assert same_bits(np.array(pool[n:n + 1]), want_s)
    assert not pool[1].any()


@FAR_APART
def test_far_apart_elsewhere(isa, far):
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, gate, weight, past = random(2, 2, 2, 40), random(2, 2, 2, 40), random(40), random(2, 2, 3)
    want = kda.rms_norm_gated(x, gate, weight, isa=isa)
    for axis in range(3):
        got = kda.rms_norm_gated(far(x, axis), far(gate, axis), weight, out=far(0 * x, 0), isa=isa)
        assert same_bits(np.array(got), want)
        assert same_bits(kda.l2norm(far(x, axis), isa=isa), kda.l2norm(x, isa=isa))
        A_log = weight[:2]
        assert same_bits(kda.fused_kda_gate(far(x, axis), A_log, isa=isa), kda.fused_kda_gate(x, A_log, isa=isa))
    tokens, taps = random(2, 2, 2), random(2, 4)
    want_y, want_s = kda.causal_conv1d(tokens, taps, None, "silu", past, True, isa=isa)
    for axis in range(2):
        got, s = kda.causal_conv1d(far(tokens, axis), taps, None, "silu", far(past, axis), True,
                                   out=far(0 * tokens, 0), isa=isa)
        assert same_bits(np.array(got), want_y)
        assert same_bits(s, want_s)
        near, away, y = past.copy(), far(past, axis), far(0 * tokens[:, 0], 0)
        want = kda.causal_conv1d_update(tokens[:, 0], near, taps, isa=isa)
        kda.causal_conv1d_update(far(tokens[:, 0], 0), away, taps, out=y, isa=isa)
        assert same_bits(np.array(y), want)
        assert same_bits(np.array(away), near)
    two = random(2, 40)
    near, away = kda.dense.DenseMatrix([two], isa), kda.dense.DenseMatrix([far(two, 0)], isa)
    want, got = np.empty((2, 2), np.float32), far(np.zeros((2, 2), np.float32), 0)
    near.into(want, two)
    away.into(got, far(two, 0))
    assert same_bits(np.array(got), want)
    codes = kda.QuantizedMatrix.quantize(two, 8, 32, isa=isa)
    want = codes.matmul(two)
    codes.into(got, far(two, 0))
    assert same_bits(np.array(got), want)


@FAR_APART
def test_far_apart_in_gradients(far):
    x = make_inputs(0, 2, 2, 2, 2, 20, 12, N=2)
    d_o = x["v"] * 0.5
    want = kda.ops.chunk_kda_backward(d_o, x["initial_state"], **x)
    for axis in range(3):
        apart = {name: far(array, min(axis, 1) if name == "initial_state" else axis) for name, array in x.items()}
        got = kda.ops.chunk_kda_backward(far(d_o, axis), far(x["initial_state"], min(axis, 1)), **apart)
        assert all(a is None or same_bits(a, got[name]) for name, a in want.items())


@FAR_APART
def test_far_apart_in_a_layer(far):
    layer = kda.KDALayer.from_tensors(TINY, seeded(TINY))
    x = np.random.default_rng(0).standard_normal((2, 2, 48)).astype(np.float32)
    for axis in range(2):
        assert same_bits(layer(far(x, axis), layer.new_state(2)), layer(x, layer.new_state(2)))


@pytest.mark.slow
@pytest.mark.skipif(sys.maxsize < 2**33, reason="needs 64-bit addresses")
def test_dense_panels_beyond_2_31_elements():
    """The last panels of 2^31 weights and more; all before them are pages of zeros."""
    row = list(kda.isas().values()).index(True)
    lanes = _core.dense_lanes(row)
    K, N = 32768, 65536 + 2 * lanes
    panels = np.zeros(-(-N // lanes) * lanes * K, np.float32)
    last = np.random.default_rng(0).standard_normal((lanes, K)).astype(np.float32)
    _core.dense_pack(row, panels[-lanes * K:], last, lanes, 0)
    x = np.random.default_rng(1).standard_normal((1, K)).astype(np.float32)
    y, want = np.empty((1, N), np.float32), np.empty((1, lanes), np.float32)
    _core.Dense(row, panels, N, K).multiply(y, x)
    kda.dense.DenseMatrix([last]).into(want, x)
    assert panels.size > 2**31
    assert not y[:, :-lanes].any()
    assert same_bits(y[:, -lanes:], want)


# ---- sizes that cannot be ----

@pytest.mark.parametrize("shape", [(1, 2**40, 1, 64), (1, 2**54, 1, 64)], ids=["2^48 bytes", "2^62 bytes"])
def test_huge_results_are_refused(shape):
    """MemoryError, or numpy's ValueError where the bytes are too many to count; what is there stays as it was."""
    x = np.broadcast_to(np.ones(64, np.float32), shape)
    S = np.ones((1, 1, 64, 64), np.float32)
    before = S.copy()
    for call in (lambda: kda.fused_recurrent_kda(x, x, x, x, x[..., 0], initial_state=S, state_out=S),
                 lambda: kda.chunk_kda(x, x, x, x, x[..., 0], initial_state=S, state_out=S, chunk_size=1,
                                       return_intermediate_states=True),
                 lambda: kda.l2norm(x), lambda: kda.rms_norm_gated(x, x, x[0, 0, 0]),
                 lambda: kda.fused_kda_gate(x, x[0, 0, 0, :1]),
                 lambda: kda.causal_conv1d(x[:, :, 0], np.ones((64, 4), np.float32)),
                 lambda: kda.QuantizedMatrix.quantize(x[0, :, 0]), lambda: kda.dense.DenseMatrix([x[0, :, 0]]),
                 lambda: kda.QuantizedMatrix.quantize(np.ones((64, 64), np.float32)).matmul(x),
                 lambda: kda.Session(TINY, batch=shape[1] // 16), lambda: kda.KDAState(TINY, shape[1] // 16)):
        with pytest.raises((MemoryError, ValueError), match=r"allocate|too big|Maximum allowed"):
            call()
    assert same_bits(S, before)
