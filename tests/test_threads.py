"""Threads and the choice of the ISA: the same bits on any number of threads, and nothing that hangs."""
import os
import signal
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import ISAS, make_inputs, python, same_bits

import kda
from kda import _core, runtime

THREADED = _core.threading() != "serial"
CPUS = runtime.available_cpus()


# ---- the same bits ----

SHAPES = {
    "one head, columns split": {"T": 9, "H": 1, "HV": 1, "K": 256, "V": 256},
    "one head, columns that do not divide": {"T": 30, "H": 1, "HV": 1, "K": 129, "V": 131},
    "three heads": {"T": 40, "H": 3, "HV": 3, "K": 100, "V": 60},
    "more value heads": {"T": 12, "H": 4, "HV": 32, "K": 64, "V": 64},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_threads(isa, threads, shape, dtype):
    x = make_inputs(1, 1, **SHAPES[shape], N=1, dtype=dtype)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "isa": isa}
    threads(1)
    want_o, want_state = kda.fused_recurrent_kda(**x, **options)
    for n in (2, 3, 7):
        threads(n)
        o, state = kda.fused_recurrent_kda(**x, **options)
        assert same_bits(o, want_o)
        assert same_bits(state, want_state)
        kda.fused_recurrent_kda(**x, **options, out=o, state_out=state)
        assert same_bits(o, want_o)
        assert same_bits(state, want_state)
        in_place = x["initial_state"].copy()
        kda.fused_recurrent_kda(**x | {"initial_state": in_place}, **options, state_out=in_place)
        assert same_bits(in_place, want_state)


def test_bits_of_uneven_sequences(isa, threads):
    cu = [0, 3, 3, 120, 121, 160]
    x = make_inputs(2, 1, 160, 2, 4, 60, 64, N=5)
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append(kda.fused_recurrent_kda(**x, cu_seqlens=cu, output_final_state=True, isa=isa))
    for o, state in results[1:]:
        assert same_bits(o, results[0][0])
        assert same_bits(state, results[0][1])


def test_bits_of_the_gate_and_norm(isa, threads):
    g = make_inputs(3, 4, 64, 1, 8, 100, 1)["g"]
    A_log = np.linspace(-1, 1, 8, dtype=np.float32)
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append((kda.fused_kda_gate(g, A_log, isa=isa), kda.l2norm(g, isa=isa)))
    for gate, norm in results[1:]:
        assert same_bits(gate, results[0][0])
        assert same_bits(norm, results[0][1])


def test_nan_stays_in_its_sequence_across_threads(isa, threads):
    x = make_inputs(4, 3, 8, 1, 4, 128, 128, N=3)
    threads(1)
    clean = kda.fused_recurrent_kda(**x, isa=isa)[0]
    x["k"][1] = np.nan
    threads(3)
    o = kda.fused_recurrent_kda(**x, isa=isa)[0]
    assert same_bits(o[[0, 2]], clean[[0, 2]])
    assert np.isnan(o[1]).all()


# ---- how many ----

def expected(n):
    return n if THREADED else 1


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_set_and_get(threads, n):
    threads(n)
    assert kda.get_num_threads() == expected(n)
    threads(np.int64(n))
    assert kda.get_num_threads() == expected(n)


@pytest.mark.parametrize(("n", "error", "message"), [
    (0, ValueError, "n: expected 1 to 1024 threads, got 0"), (-1, ValueError, "n: expected 1 to 1024 threads, got -1"),
    (1025, ValueError, "n: expected 1 to 1024 threads, got 1025"), (10**30, ValueError, "n: expected 1 to 1024"),
    (2.0, TypeError, "n: expected an int, got float"), ("2", TypeError, "n: expected an int, got str"),
    (None, TypeError, "n: expected an int, got NoneType"), (True, TypeError, "n: expected an int, got bool")])
def test_bad_thread_counts(threads, n, error, message):
    threads(2)
    with pytest.raises(error, match=message):
        kda.set_num_threads(n)
    assert kda.get_num_threads() == expected(2)


def test_the_default_is_what_the_process_may_use():
    done = python("import kda; from kda import runtime; print(kda.get_num_threads(), runtime.available_cpus())")
    threads, cpus = map(int, done.stdout.split())
    assert threads == (cpus if THREADED else 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity can be set on Linux only")
def test_affinity_is_honoured():
    done = python("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
                  "import kda; print(kda.get_num_threads())")
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(("cpu_max", "cpus"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1),
                                               ("400000 100000", 4), ("garbage", 8)])
def test_cgroup_quota(tmp_path, monkeypatch, cpu_max, cpus):
    """cpu.max of cgroup v2 is "quota period" in microseconds; one and a half CPUs are worth two threads."""
    (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    monkeypatch.setattr(runtime, "_cgroup_cpus", lambda: runtime._quota_v2(str(tmp_path)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert runtime.available_cpus() == cpus


@pytest.mark.parametrize(("files", "cpus"), [
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000",
      "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 3),  # a level above limits too
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),  # as containers see it
    ({"proc/self/cgroup": "0::/gone\n"}, np.inf),
    ({"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000",
      "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 2.5),  # version 1
    ({"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, np.inf),
    ({}, np.inf),
])
def test_cgroup_files(tmp_path, monkeypatch, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(runtime, "_read", lambda path: (tmp_path / path.lstrip("/")).read_text())
    assert runtime._cgroup_cpus() == cpus


COUNTS = "import kda; print(kda.get_num_threads()); kda.set_num_threads(3); print(kda.get_num_threads())"


@pytest.mark.skipif(not THREADED, reason="built without threads")
@pytest.mark.parametrize(("environment", "default"), [
    ({"OMP_NUM_THREADS": "1"}, 1), ({"OMP_NUM_THREADS": " 1,2"}, 1), ({"OMP_NUM_THREADS": "1000"}, CPUS),
    ({"OMP_NUM_THREADS": "0"}, CPUS), ({"OMP_NUM_THREADS": "many"}, CPUS), ({"OMP_NUM_THREADS": ""}, CPUS),
    ({"KDA_NUM_THREADS": "5", "OMP_NUM_THREADS": "1"}, 5), ({"KDA_NUM_THREADS": ""}, CPUS)])
def test_the_environment_is_the_default(environment, default):
    """And asking for more is asking."""
    assert [int(n) for n in python(COUNTS, **environment).stdout.split()] == [default, 3]


@pytest.mark.parametrize("value", ["0", "1025", "-1", "2.0", "two"])
def test_bad_number_in_the_environment(value):
    done = python("import kda", KDA_NUM_THREADS=value, check=False)
    assert done.returncode == 1
    assert f"ImportError: KDA_NUM_THREADS='{value}': expected 1 to 1024 threads" in done.stderr


@pytest.mark.skipif(not (THREADED and sys.platform == "linux"), reason="counts threads in /proc")
def test_large_calls_use_the_threads_and_small_ones_do_not():
    done = python("""if True:
        import os, kda, numpy as np
        def count():
            return len(os.listdir("/proc/self/task"))
        def call(T, K):
            one = np.ones((1, T, 1, K), np.float32)
            kda.fused_recurrent_kda(one, one, one, -one, one[..., 0])
        kda.set_num_threads(3)
        before = count()
        call(1, 16)
        call(1, 128)
        small = count()
        call(20, 128)
        print(small - before, count() - before)""", OPENBLAS_NUM_THREADS="1")
    assert done.stdout.split() == ["0", "2"]


@pytest.mark.skipif(not (THREADED and sys.platform == "linux"), reason="reads /proc")
def test_signals_are_not_for_the_workers():
    """Ctrl-C interrupts the main thread; a fault in a worker is still reported."""
    done = python("""if True:
        import os, re, signal, time, kda, numpy as np
        before = set(os.listdir("/proc/self/task"))
        kda.set_num_threads(3)
        kda.l2norm(np.ones((1, 512, 8, 128), np.float32))
        def blocked(task):
            mask = int(re.search("SigBlk:\\t(.*)", open(f"/proc/self/task/{task}/status").read())[1], 16)
            return [mask >> n - 1 & 1 for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGSEGV)]
        for task in set(os.listdir("/proc/self/task")) - before:
            for _ in range(500):  # while a thread begins, the system's library blocks everything
                if blocked(task) != [1, 1, 1, 1]: break
                time.sleep(0.01)
            print(*blocked(task))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background starts without
        os.kill(os.getpid(), signal.SIGINT)""", OPENBLAS_NUM_THREADS="1", check=False)
    assert done.stdout.split("\n") == ["1 1 1 0", "1 1 1 0", ""]
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("how", ["sys.exit(5)", "os._exit(5)"])
def test_the_program_ends_in_the_middle_of_a_call(how):
    """Nobody waits for the workers, and they do not go on in memory that is gone."""
    code = """if True:
        import os, sys, threading, time, kda, numpy as np
        kda.set_num_threads(3)
        one = np.ones((1, 4096, 4, 128), np.float32)
        def call():
            while True:
                kda.fused_recurrent_kda(one, one, one, -one, one[..., 0])
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.05)
        """ + how
    for _ in range(3):
        assert python(code, check=False, timeout=60).returncode == 5


def test_show_runtime_tells(capsys):
    kda.show_runtime()
    shown = capsys.readouterr().out
    assert runtime.chosen_isa() in shown
    assert _core.threading() in shown
    for name in kda.isas():
        assert f"{name}: " in shown
    if not THREADED:
        assert "built without threads" in shown


def test_show_runtime_says_serial(capsys, monkeypatch):
    monkeypatch.setattr(_core, "threading", lambda: "serial")
    kda.show_runtime()
    assert "serial (built without threads: every call runs on one)" in capsys.readouterr().out


# ---- fork, the GIL, callers on many threads ----

BIG = {"seed": 5, "B": 1, "T": 24, "H": 4, "HV": 4, "K": 128, "V": 128, "N": 1}


def wait_for(pid, seconds):
    """Exit status of a child, which is killed after `seconds`."""
    for _ in range(int(seconds * 100)):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def tasks():
    """Threads of this process, where Linux tells; 0 elsewhere."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_after_a_parallel_region(threads):
    """The parent's threads do not come along; the child starts its own."""
    threads(3)
    x = make_inputs(**BIG)
    want = kda.fused_recurrent_kda(**x)[0]
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            alone = tasks()
            same = same_bits(kda.fused_recurrent_kda(**x)[0], want)
            # at least: an emulator has threads of its own
            right = sys.platform != "linux" or tasks() - alone >= expected(3) - 1
            status = 0 if same and right and kda.get_num_threads() == expected(3) else 1
        finally:
            os._exit(status)
    assert wait_for(pid, 60) == 0
    assert same_bits(kda.fused_recurrent_kda(**x)[0], want)  # the parent goes on with its threads
    assert kda.get_num_threads() == expected(3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_before_any_region_keeps_the_threads():
    done = python("""if True:
        import os, kda
        kda.set_num_threads(3)
        pid = os.fork()
        if pid == 0:
            os._exit(10 + kda.get_num_threads())
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))""")
    assert int(done.stdout) == 10 + expected(3)


MULTIPROCESSING = """if True:
    import multiprocessing, warnings
    import numpy as np, kda
    def work(seed):
        q, k, v = np.random.default_rng(seed).standard_normal((3, 1, 24, 4, 128)).astype(np.float32)
        beta = np.full((1, 24, 4), 0.5, np.float32)
        return kda.fused_recurrent_kda(q, k, v, -abs(k), beta, use_qk_l2norm_in_kernel=True)[0].tobytes()
    kda.set_num_threads(3)
    want = [work(seed) for seed in range(4)]
    warnings.simplefilter("ignore", DeprecationWarning)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map_async(work, range(4)).get(60) == want)"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_multiprocessing_by_fork():
    assert python(MULTIPROCESSING).stdout.strip() == "True"


def test_the_gil_is_released(threads):
    """While one long call runs, another Python thread goes on."""
    threads(1)
    T = 200
    while True:  # a call of at least 0.2 s of CPU on this machine, whatever else runs there
        x = make_inputs(6, 1, T, 1, 1, 128, 128)
        start = time.thread_time()
        kda.fused_recurrent_kda(**x, isa="scalar")
        if time.thread_time() - start > 0.2:
            break
        T *= 2

    def ticks_during_a_call():
        inside, done, ticks = threading.Event(), threading.Event(), 0

        def call():
            inside.set()
            kda.fused_recurrent_kda(**x, isa="scalar")
            done.set()

        caller = threading.Thread(target=call)
        caller.start()
        assert inside.wait(60)
        while not done.wait(0.002):
            ticks += 1
        caller.join()
        return ticks

    # with the GIL held it would be one or two; on a crowded machine a thread may get no more in one call
    assert any(ticks_during_a_call() >= 10 for _ in range(20))


def test_eight_python_threads_at_once(isa, threads):
    threads(2)
    inputs = [make_inputs(seed, 1, 24, 4, 4, 64, 128, N=1) for seed in range(8)]
    want = [kda.fused_recurrent_kda(**x, output_final_state=True, isa=isa) for x in inputs]
    start = threading.Barrier(8)

    def work(i):
        start.wait(60)
        return [kda.fused_recurrent_kda(**inputs[i], output_final_state=True, isa=isa) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        for (want_o, want_state), results in zip(want, pool.map(work, range(8), timeout=120), strict=True):
            for o, state in results:
                assert same_bits(o, want_o)
                assert same_bits(state, want_state)


@pytest.mark.parametrize("weight_format", ["f32", "q8g"])
def test_one_layer_in_many_threads(threads, weight_format):
    """Each thread has its own states; the layer, its scratch, the workers and the inputs are everybody's, and how many
    threads a call may use changes all the time."""
    config = kda.KDAConfig("kimi_linear", 256, 1, (0,), 2, 2, 128, 128, 4)
    rng = np.random.default_rng(8)
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) * 0.05
               for name, shape in kda.tensor_shapes(config).items()}
    layer = kda.KDALayer.from_tensors(config, tensors, prefix="", weight_format=weight_format, recurrent_max=8)
    x = rng.standard_normal((1, 40, 256), dtype=np.float32)
    pieces = [(0, 20), (20, 23), (23, 24), (24, 39), (39, 40)]

    def run(_=None):
        state = layer.new_state(rollback_window=8)
        y = [layer(x[:, start:end], state) for start, end in pieces]
        state.rollback(1)
        return np.concatenate([*y, layer(x[:, 39:], state)], axis=1), state.recurrent.copy()

    threads(1)
    want_y, want_state = run()
    over = threading.Event()

    def change():
        n = 0
        while not over.wait(0.001):
            n += 1
            threads(1 + n % 3)

    with ThreadPoolExecutor(9) as pool:
        changes = pool.submit(change)
        try:
            results = list(pool.map(run, range(24), timeout=120))
        finally:
            over.set()
        changes.result(60)
    for y, state in results:
        assert same_bits(y, want_y)
        assert same_bits(state, want_state)


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_gil_stays_off():
    code = "import sys, kda; print(sys._is_gil_enabled())"
    assert python(code, PYTHONWARNINGS="error").stdout.strip() == "False"


def test_no_warning_from_a_plain_import():
    assert python("import kda", PYTHONWARNINGS="error").stderr == ""


# ---- the ISA ----

CHOSEN = "from kda import runtime; print(runtime.chosen_isa())"


def test_kda_isa_chooses():
    """In its own interpreter, whose machine may offer more than an emulated parent does."""
    offered = python("import kda; print(*[n for n, ok in kda.isas().items() if ok])").stdout.split()
    assert "scalar" in offered
    assert python(CHOSEN).stdout.split() == offered[:1]
    for name in offered:
        done = python(f"{CHOSEN}; print(runtime.runtime_info()['isa_reason'])", KDA_ISA=name)
        assert done.stdout.split() == [name, "KDA_ISA"]
    assert python(CHOSEN, KDA_ISA="").stdout.split() == offered[:1]


def test_kda_isa_of_no_such_name():
    done = python("import kda", KDA_ISA="avx9000", check=False)
    assert done.returncode == 1
    assert "ImportError: KDA_ISA='avx9000': there is no such ISA in this build; available here: " in done.stderr
    assert done.stderr.rstrip().endswith("scalar")


def test_kda_isa_that_this_machine_lacks(monkeypatch):
    monkeypatch.setattr(runtime, "_ROWS", [("wide", False, 0b1001), ("scalar", True, 0)])
    monkeypatch.setattr(runtime, "_INDEX", {"scalar": 1})
    monkeypatch.setenv("KDA_ISA", "wide")
    with pytest.raises(ImportError, match="KDA_ISA='wide': this machine lacks avx2, avx512f; available here: scalar"):
        runtime._choose()
    with pytest.raises(ValueError, match="isa='wide': this machine lacks avx2, avx512f; available here: scalar"):
        runtime.isa_index("wide")
    monkeypatch.setenv("KDA_ISA", "scalar")
    assert runtime._choose() == 1
    monkeypatch.delenv("KDA_ISA")
    assert runtime._choose() == 1
    assert kda.isas() == {"wide": False, "scalar": True}


def test_isas_end_with_scalar_which_runs_anywhere():
    assert list(kda.isas())[-1] == "scalar"
    assert kda.isas()["scalar"] is True
    assert runtime.missing_features("scalar") == []
    for name, runs_here in kda.isas().items():
        assert runs_here == (runtime.missing_features(name) == [])


def test_the_core_refuses_an_isa_that_does_not_run_here():
    """An index past the table, or of an ISA whose instructions this machine lacks."""
    for index in [-1, len(kda.isas()), *[i for i, n in enumerate(kda.isas()) if n not in ISAS]]:
        with pytest.raises(ValueError, match="no such ISA on this machine"):
            _core.kernel_addresses(index)
