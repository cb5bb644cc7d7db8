"""Which ISA runs, and on how many threads."""

import math
import os
import sys

from kda import _core

_ROWS = _core.isa_rows()
_INDEX = {name: i for i, (name, runs_here, _) in enumerate(_ROWS) if runs_here}

# The bits of cpu.h, for people.
_FEATURES = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "neon", "avx512bf16",
             "avx512vnni", "avxvnni", "dotprod", "i8mm", "amx"]


def isas() -> dict[str, bool]:
    """The ISAs built into this package, best first: {name: whether this CPU and its OS run it}."""
    return {name: runs_here for name, runs_here, _ in _ROWS}


def missing_features(isa: str) -> list[str]:
    """The CPU features that `isa` needs and this machine lacks."""
    bits = {name: missing for name, _, missing in _ROWS}[isa]
    return [feature for i, feature in enumerate(_FEATURES) if bits >> i & 1]


def isa_index(isa: str | None) -> int:
    """The row of `isa` in the core's table; None is the ISA chosen at import. ValueError with the list otherwise."""
    if isa is None:
        return _chosen
    try:
        return _INDEX[isa]
    except (KeyError, TypeError):
        raise ValueError(_no_such_isa("isa", isa)) from None


def chosen_isa() -> str:
    """The ISA that runs when a call names none."""
    return _ROWS[_chosen][0]


def _no_such_isa(where: str, name: object) -> str:
    built = isas()
    runs = ", ".join(n for n, runs_here in built.items() if runs_here)
    why = f"this machine lacks {', '.join(missing_features(name))}" if isinstance(name, str) and name in built else (
        "there is no such ISA in this build")
    return f"{where}={name!r}: {why}; available here: {runs}"


def _choose() -> int:
    name = os.environ.get("KDA_ISA", "")
    if not name:
        return next(i for i, (_, runs_here, _) in enumerate(_ROWS) if runs_here)
    if name not in _INDEX:
        wrong = _no_such_isa("KDA_ISA", name)
        if os.path.basename(sys.argv[0]) == "kda" or sys.orig_argv[1:3] == ["-m", "kda"]:  # the command: no traceback
            print(f"kda: {wrong}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(wrong)
    return _INDEX[name]


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _cgroup_cpus() -> float:
    """The CPU quota of this process's cgroup in CPUs, inf without one (cgroup v2, then v1)."""
    quota = math.inf
    try:
        lines = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return quota
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, quota_of = "/sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            folder, quota_of = "/sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        quota = min(quota, quota_of(folder))
        for part in path.strip("/").split("/"):  # every level limits
            folder += "/" + part
            quota = min(quota, quota_of(folder))
    return quota


def _quota_v2(folder: str) -> float:
    try:
        limit, period = _read(f"{folder}/cpu.max").split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def _quota_v1(folder: str) -> float:
    try:
        limit = int(_read(f"{folder}/cpu.cfs_quota_us"))
        return math.inf if limit <= 0 else limit / int(_read(f"{folder}/cpu.cfs_period_us"))
    except (OSError, ValueError):
        return math.inf


def available_cpus() -> int:
    """CPUs this process may use: min(affinity, cgroup quota rounded up), at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        count = os.cpu_count() or 1
    quota = _cgroup_cpus()
    return max(1, count if quota == math.inf else min(count, math.ceil(quota)))


def _default_threads() -> int:
    """KDA_NUM_THREADS; or the CPUs that this process may use, OMP_NUM_THREADS if that is less. ImportError for a
    KDA_NUM_THREADS that is no such number."""
    own = os.environ.get("KDA_NUM_THREADS", "")
    if own:
        if not own.isdecimal() or not 1 <= int(own) <= 1024:
            raise ImportError(f"KDA_NUM_THREADS={own!r}: expected 1 to 1024 threads")
        return int(own)
    others = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": of nested regions
    return min(available_cpus(), int(others)) if others.isdecimal() and int(others) else available_cpus()


def set_num_threads(n: int) -> None:
    """Use at most `n` threads per call, in this process, whichever thread calls. ValueError below 1."""
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"n: expected an int, got {type(n).__name__}")
    n = n.__index__()
    if not 1 <= n <= 1024:
        raise ValueError(f"n: expected 1 to 1024 threads, got {n}")
    _core.set_thread_limit(n)


def get_num_threads() -> int:
    """The most threads a call uses now. Small calls use fewer; so does one made while another has the threads."""
    return _core.threads_now()


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    import platform
    import re

    try:
        found = re.search(r"model name\s*: (.+)", _read("/proc/cpuinfo"))
        if found:
            return found[1]
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_sizes() -> dict[str, int]:
    """{"L1d": bytes, "L2": bytes, "L3": bytes} of CPU 0, as far as the system tells."""
    import glob

    sizes = {}
    for folder in sorted(glob.glob("/sys/devices/system/cpu/cpu0/cache/index*")):
        try:
            level, kind, size = (_read(f"{folder}/{file}").strip() for file in ("level", "type", "size"))
            if kind != "Instruction":
                sizes[f"L{level}" + ("d" if kind == "Data" else "")] = int(size.rstrip("K")) * 1024
        except (OSError, ValueError):
            continue
    return sizes


def runtime_info() -> dict[str, object]:
    """What show_runtime prints, as a dict."""
    env = os.environ.get("KDA_ISA", "")
    return {
        "cpu": cpu_name(),
        "isa": chosen_isa(),
        "isa_reason": "KDA_ISA" if env else "the best that this CPU and its OS run",
        "isas": {n: "runs here" if ok else "needs " + ", ".join(missing_features(n)) for n, ok in isas().items()},
        **_core.build_info(),
        "threading": _core.threading(),
        "threads": get_num_threads(),
        "cpus_available": available_cpus(),
        "caches": cache_sizes(),
    }


def show_runtime() -> None:
    """Print the CPU, the ISA chosen and why, the others, the threads, and how the kernels were compiled."""
    info = runtime_info()
    print(f"cpu        {info['cpu']}")
    print(f"isa        {info['isa']} ({info['isa_reason']})")
    rows = info["isas"]
    assert isinstance(rows, dict)
    for name, state in rows.items():
        print(f"           {name}: {state}")
    note = " (built without threads: every call runs on one)" if info["threading"] == "serial" else ""
    print(f"threads    {info['threads']} of {info['cpus_available']} CPUs, {info['threading']}{note}")
    caches = info["caches"]
    assert isinstance(caches, dict)
    print(f"compiler   {info['compiler']}")
    print(f"flags      {info['flags']}")
    print(f"caches     {', '.join(f'{k} {v // 1024} KiB' for k, v in caches.items()) or 'unknown'}")


_chosen = _choose()
_core.set_thread_limit(_default_threads())
