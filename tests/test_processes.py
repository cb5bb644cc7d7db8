"""Processes, interpreters and many threads: results as ever, or a clear refusal."""
import os
import threading

import numpy as np
import pytest
from helpers import make_inputs, python, same_bits
from plain_layer import GVA, K3, TINY, seeded

from kda import KDALayer, Session, _core, chunk_kda

HERE = os.path.dirname(__file__)
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


# ---- threads ----

def test_64_threads_with_sessions_of_their_own(threads):
    """Layers, scratch and the pool are shared; every thread's results are those of a serial run, to the bit."""
    threads(2)
    layers = {c: [KDALayer.from_tensors(c, seeded(c, i)) for i in range(len(c.kda_layers))] for c in (TINY, GVA, K3)}
    configs = [list(layers)[i % 3] for i in range(64)]
    steps = (3, 1, 70, 1, 1, 17)

    def run(i):
        config, rng = configs[i], np.random.default_rng(i)
        session, outputs = Session(config, rollback_window=i % 2 * 4), []
        for n in steps:
            x = rng.standard_normal((1, n, config.hidden_size)).astype(np.float32)
            for layer, state in zip(layers[config], session.layers, strict=True):
                x = x + layer(x, state)
            outputs.append(x)
            if i % 2 and n == 70:
                session.rollback(3)
        return [*outputs, *(state.recurrent.copy() for state in session.layers)]

    results, start = [None] * 64, threading.Barrier(64)

    def work(i):
        start.wait(60)
        results[i] = run(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    for i in range(64):
        for got, want in zip(results[i], run(i), strict=True):
            assert same_bits(got, want), i


def test_one_session_from_two_threads(tmp_path):
    """Whoever comes second is refused; what went through makes a session that a serial run would have made."""
    layers = [KDALayer.from_tensors(TINY, seeded(TINY, i)) for i in range(2)]
    session, x = Session(TINY, rollback_window=2), np.ones((1, 1, TINY.hidden_size), np.float32)
    inside, leave = threading.Event(), threading.Event()

    class Held:  # the position of a batch, in the middle of a call of layer 1
        def __array__(self, dtype=None, copy=None):
            inside.set()
            assert leave.wait(60)
            return np.array([1])

    for layer, state in zip(layers, session.layers, strict=True):
        layer(x, state)
    kept = [state.recurrent.copy() for state in session.layers]
    other = threading.Thread(target=lambda: layers[1](x, session.layers[1], lengths=Held()))
    other.start()
    assert inside.wait(60)
    for call in (lambda: layers[1](x, session.layers[1]), session.fork, session.reset, lambda: session.rollback(1),
                 lambda: session.save(tmp_path / "x"), lambda: session.layers[1].copy()):
        with pytest.raises(RuntimeError, match="in use by another call; a state serves one call at a time"):
            call()
    layers[0](x, session.layers[0])  # whose lock each refused call gave back
    assert not os.listdir(tmp_path)
    leave.set()
    other.join(60)
    assert session.position == 2
    session.rollback(1)
    for state, want in zip(session.layers, kept, strict=True):
        assert same_bits(state.recurrent, want)


# ---- processes ----



def work(seed):
    return chunk_kda(**make_inputs(seed, 1, 90, 4, 4, 64, 64, N=1))[0].tobytes()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes(method):
    done = python(f"""
import sys
sys.path.insert(0, {HERE!r})
import multiprocessing
from test_processes import work
if __name__ == "__main__":
    import kda
    kda.set_num_threads(3)
    want = [work(seed) for seed in range(4)]
    if {method!r} in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context({method!r}).Pool(2) as pool:
            assert pool.map_async(work, range(4)).get(100) == want
    print("ok")
""")
    assert done.stdout.strip() == "ok"


@FORKS
def test_fork_while_another_thread_is_in_a_call():
    """The child has the pool to itself, and sessions of its own work; the state that the other thread had in hand,
    which may be half way, is refused for good."""
    done = python(f"""
import sys
sys.path.insert(0, {HERE!r})
import warnings, time
warnings.simplefilter("ignore", DeprecationWarning)
import kda
from test_processes import *
kda.set_num_threads(3)
layer = KDALayer.from_tensors(TINY, seeded(TINY))
busy, idle, x = layer.new_state(), layer.new_state(), np.ones((1, 5, 48), np.float32)
want, long = layer(x, layer.new_state()), np.broadcast_to(x[:, :1], (1, 10**6, 48))
threading.Thread(target=lambda: layer(long, busy), daemon=True).start()
while not busy.position:
    time.sleep(0.001)
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            refused = 0
            for call in (lambda: layer(x, busy), busy.reset, busy.copy):
                try:
                    call()
                except RuntimeError as error:
                    refused += "in use by another call" in str(error)
            status = 0 if refused == 3 and same_bits(layer(x, idle), want) and work(1) else 2
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
""")
    assert done.stdout.split() == ["0"] * 5


@pytest.mark.parametrize("daemon", [True, False])
def test_the_interpreter_ends_while_a_thread_is_in_a_call(daemon):
    """A daemon is left where it is; for any other thread the interpreter waits."""
    done = python(f"""
import sys
sys.path.insert(0, {HERE!r})
import kda, threading
import numpy as np
kda.set_num_threads(3)
x = np.broadcast_to(np.ones(256, np.float32), (1, {10**6 if daemon else 30000}, 1, 256))
begun = threading.Event()
def call():
    begun.set()
    kda.chunk_kda(x, x, x, x, x[..., 0])
    print("done")
threading.Thread(target=call, daemon={daemon}).start()
begun.wait()
""", timeout=100)
    assert done.stdout.split() == ([] if daemon else ["done"])
    assert done.stderr == ""


SUBINTERPRETER = """
import importlib.machinery, importlib.util, os, warnings
warnings.simplefilter("ignore")  # numpy's
try:
    import kda
except ImportError as error:
    os.write(1, b"refused\\n")
try:
    loader = importlib.machinery.ExtensionFileLoader("kda._core", {path!r})
    loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader("kda._core", loader)))
except ImportError as error:
    os.write(1, str(error).encode())
"""


def test_subinterpreters_are_refused():
    """As numpy's are not supported either: an ImportError, whichever extension module is asked first."""
    done = python(f"""
import kda, sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
try:
    other = interpreters.create("legacy")
except TypeError:
    other = interpreters.create()
interpreters.run_string(other, {SUBINTERPRETER.format(path=_core.__file__)!r})
interpreters.destroy(other)
""")
    first, second = done.stdout.split("\n")[:2]
    assert first == "refused"
    assert any(words in second for words in ("can only be loaded into one interpreter",
                                             "does not support loading in subinterpreters"))
