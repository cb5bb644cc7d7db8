"""What calls leave behind: no memory, no references, the floating-point mode and the signal mask as they were."""
import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers import python, same_bits
from hypothesis import settings
from plain_layer import GVA, TINY, seeded

import kda
from kda import KDALayer, QuantizedMatrix, Session, ops

HERE = os.path.dirname(__file__)


def calls(folder):
    """{what: a call that leaves everything as it was but for what it returns}, the bad ones with the error."""
    rng = np.random.default_rng(0)

    def random(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    q, k, g = random(1, 20, 2, 16), random(1, 20, 2, 16), -abs(random(1, 20, 4, 16))
    v, beta, S = random(1, 20, 4, 8), abs(random(1, 20, 4)) % 1, random(1, 4, 16, 8)
    halves = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v, g, beta)]
    out, state_out = np.empty_like(v), S.copy()
    x, w, history = random(2, 9, 24), random(24, 4), random(2, 24, 4)
    matrix, panels = QuantizedMatrix.quantize(random(40, 64), 4, 32), kda.dense.DenseMatrix([random(40, 64)])
    rows, results = random(3, 64), np.empty((3, 40), np.float32)
    layer, other = KDALayer.from_tensors(TINY, seeded(TINY)), KDALayer.from_tensors(GVA, seeded(GVA))
    state, window, hidden = layer.new_state(), layer.new_state(batch=2, rollback_window=3), random(2, 3, 48)
    session, path = Session(TINY, rollback_window=2), os.path.join(folder, "session")
    layer(np.repeat(hidden[:, :1], 9, 1), window)

    def there_and_back():
        layer(hidden[:, :2], window)
        window.rollback(2)

    def saved():
        session.save(path)
        Session.load(path, TINY)

    def matrix_saved():
        matrix.save(path + "-matrix")
        QuantizedMatrix.load(path + "-matrix")

    good = {
        "recurrent": lambda: kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=S, output_final_state=True),
        "in place": lambda: kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=state_out, state_out=state_out,
                                                    out=out, use_qk_l2norm_in_kernel=True),
        "bfloat16": lambda: kda.fused_recurrent_kda(*halves, state_v_first=True, output_final_state=True),
        "chunk": lambda: kda.chunk_kda(q, k, v, g, beta, cu_seqlens=[0, 3, 20], chunk_size=4,
                                       return_intermediate_states=True),
        "backward": lambda: ops.chunk_kda_backward(v, S, q, k, v, g, beta, initial_state=S),
        "gate": lambda: kda.fused_kda_gate(g, np.zeros(4, np.float32), np.zeros(64, np.float32)),
        "l2norm": lambda: kda.l2norm(q),
        "conv": lambda: kda.causal_conv1d(x, w, initial_state=history, output_final_state=True),
        "conv step": lambda: kda.causal_conv1d_update(x[:, 0], history, w),
        "norm": lambda: kda.rms_norm_gated(v, v, S[0, 0, 0]),
        "quantize": lambda: QuantizedMatrix.quantize(panels._panels[:2560].reshape(40, 64), 8, 32).matmul(rows),
        "matmul": lambda: matrix.matmul(rows, results),
        "codes": lambda: QuantizedMatrix.from_codes(matrix.codes, matrix.scales, matrix.shape, 4, 32),
        "concatenate": lambda: QuantizedMatrix.concatenate([matrix, matrix]).dequantize(),
        "dense": lambda: panels.into(results, rows),
        "layer": lambda: layer(hidden[:1, :1], state),
        "padded": lambda: layer(hidden, layer.new_state(2), lengths=[1, 3], padding_side="left"),
        "long": lambda: other(np.zeros((1, 200, 40), np.float32), other.new_state()),
        "rollback": there_and_back,
        "fork": session.fork,
        "reset": session.reset,
        "save": saved,
        "save a matrix": matrix_saved,
    }
    bad = {
        "dtype": lambda: kda.fused_recurrent_kda(q.astype(np.float64), k, v, g, beta),
        "shape": lambda: kda.chunk_kda(q, k, v[:, :3], g, beta),
        "overlap": lambda: kda.fused_recurrent_kda(q, k, v, g, beta, out=v),
        "read-only": lambda: kda.causal_conv1d_update(x[:, 0], np.broadcast_to(history[:1], history.shape), w),
        "core": lambda: kda._core.norm_gated(0, out, v, v[:, :5], S[0, 0, 0], 1e-5, 0),
        "core matrix": lambda: kda._core.Matrix(0, results, results, 40, 64, 32, 4),
        "not finite": lambda: QuantizedMatrix.quantize(np.full((2, 64), np.inf, np.float32)),
        "out": lambda: matrix.matmul(rows, results[:, :5]),
        "another model": lambda: other(hidden[:, :, :40], state),
        "too far": lambda: window.rollback(99),
        "no file": lambda: Session.load(path + "-none", TINY),
        "no session": lambda: Session.load(__file__, TINY),
        "no folder": lambda: matrix.save(os.path.join(folder, "none", "x")),
    }

    def failing(call):
        def run():
            with pytest.raises((TypeError, ValueError, OSError)):
                call()
        return run

    return good | {f"bad {name}": failing(call) for name, call in bad.items()}


@pytest.fixture(scope="module")
def each(tmp_path_factory):
    return calls(str(tmp_path_factory.mktemp("files")))


# ---- memory and references ----

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def held():
    """Blocks that Python's allocator has given out, objects that its collector knows, and bytes that malloc has, where
    its library tells."""
    gc.collect()
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return np.array([sys.getallocatedblocks(), len(gc.get_objects()), 0])
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return np.array([sys.getallocatedblocks(), len(gc.get_objects()), (info.uordblks + info.hblkhd) / 64])


def grown(call, n):
    """How much `held` grows with n more calls, at the least of some tries: caches and free lists fill meanwhile."""
    call()
    least = np.inf
    for _ in range(6):
        before = held()
        for _ in range(n):
            call()
        least = np.minimum(least, held() - before)
        if (least < n / 2).all():
            break
    return least


def test_calls_keep_nothing(each):
    """No block, object or 64 bytes for every other call, of any kind, the refused ones included."""
    for name, call in each.items():
        n = 100 if "save" in name else 400
        assert (grown(call, n) < n / 2).all(), name


def test_a_leak_would_be_seen():
    kept = []
    told = 2 if "asan" in os.environ.get("LD_PRELOAD", "") or not held()[2] else 3  # ASan's malloc does not count
    assert (grown(lambda: kept.append([np.empty(100)]), 400)[:told] >= 400).all()


@pytest.mark.parametrize("name", ["in place", "chunk", "conv step", "norm", "matmul", "bad overlap",
                                  "bad core", "bad core matrix", "bad out"])
def test_arrays_are_not_held(each, name):
    """The references to the arrays of a call are as many after it, and their buffers are free."""
    call = each[name]
    inner = call.__closure__[0].cell_contents if name.startswith("bad ") else call
    arrays = [cell.cell_contents for cell in inner.__closure__ if isinstance(cell.cell_contents, np.ndarray)]
    assert arrays
    before = [sys.getrefcount(a) for a in arrays]
    for _ in range(50):
        call()
    assert [sys.getrefcount(a) for a in arrays] == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_thousand_calls(tmp_path):
    """In all, or of each kind with the nightly profile (at most 1000 that write files): what the process has in memory
    grows by less than 2 MiB."""
    times = 30 * settings.default.max_examples
    done = python(f"""
import sys
sys.path.insert(0, {HERE!r})
from test_traces import *
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
for name, call in calls({str(tmp_path)!r}).items():
    n = min({times}, 1000) if "save" in name else {times}
    for _ in range(n // 20):
        call()
    before, blocks = resident(), held()
    for _ in range(n):
        call()
    more, new = resident() - before, held() - blocks
    print(name, more, *new, flush=True)
    assert more < 2**21 and (new[:2] < max(n / 100, 200)).all(), (name, more, new)  # names of files are interned
""", timeout=3600)
    kinds = calls(str(tmp_path))
    assert len(done.stdout.splitlines()) == len(kinds)
    assert times * sum("save" not in name for name in kinds) > 100_000


# ---- the floating-point mode, signals ----

@pytest.fixture(scope="module")
def mode(tmp_path_factory):
    """float_mode.c, for this thread."""
    if platform.machine() not in ("x86_64", "aarch64") or os.name == "nt":
        pytest.skip("float_mode.c knows x86-64 and aarch64")
    library = str(tmp_path_factory.mktemp("mode") / "float_mode.so")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, f"{HERE}/float_mode.c"], check=True)
    loaded = ctypes.CDLL(library)
    for name in ("get_mode", "flushing", "rounding_up"):
        getattr(loaded, name).restype = ctypes.c_ulonglong
    loaded.set_mode.argtypes = [ctypes.c_ulonglong]
    return loaded


def test_calls_leave_the_floating_point_mode(each, mode):
    """The usual one, and one that the caller has chosen; the mask of blocked signals too."""
    usual = mode.get_mode()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        for chosen in (usual, mode.flushing(), mode.rounding_up()):
            mode.set_mode(chosen)
            assert mode.get_mode() == chosen
            for name, call in each.items():
                call()
                assert mode.get_mode() == chosen, name
    finally:
        mode.set_mode(usual)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


@pytest.mark.skipif(kda._core.threading() == "serial", reason="built without threads")
@pytest.mark.parametrize("name", ["flushing", "rounding_up"])
def test_workers_compute_in_the_mode_of_their_caller(mode, threads, name):
    """Results do not depend on who computed which item, nor on what an earlier caller had chosen."""
    usual = mode.get_mode()
    x = np.random.default_rng(0).standard_normal((1, 8, 64, 64)).astype(np.float32)
    S = np.full((1, 64, 64, 64), 1e-41, np.float32)

    def run():
        return kda.fused_recurrent_kda(x, x, x, -abs(x), x[..., 0], initial_state=S, output_final_state=True)

    def of_tiny():
        return kda.fused_recurrent_kda(x, x, 0 * x, 0 * x, x[..., 0], initial_state=S, output_final_state=True)

    want = {}
    for n in (1, 3, 1, 3):  # workers begin in the chosen mode, and go on in the usual one
        threads(n)
        for chosen in (getattr(mode, name)(), usual):
            mode.set_mode(chosen)
            try:
                got = [*run(), *of_tiny()]
            finally:
                mode.set_mode(usual)
            for a, b in zip(got, want.setdefault(chosen, got), strict=True):
                assert same_bits(a, b)
    usual_bits, chosen_bits = want[usual], want[next(m for m in want if m != usual)]
    assert not all(same_bits(a, b) for a, b in zip(usual_bits, chosen_bits, strict=True))
    assert usual_bits[3].any()  # and subnormal states are kept where nobody flushes them
