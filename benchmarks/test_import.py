"""What `import kda` takes beyond `import numpy`, in a process of its own each time."""

import os
import statistics
import subprocess
import sys

from common import ISAS, counted, relate, rounds_of, stats


def cpu_ns(before, module):
    """Nanoseconds of CPU that importing `module` takes after `before`, in a new interpreter that finds bytecode."""
    code = (f"import time, {before}; start = time.process_time_ns(); import {module}; "
            "print(time.process_time_ns() - start)")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONDONTWRITEBYTECODE": ""}
    return int(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)


def test_import(benchmark, target, summary):
    """The benchmark's own times are those of whole processes; `relative` and `import_ms` are of the import alone."""
    numpy_ns, kda_ns = [], []
    cpu_ns("numpy", "kda")
    benchmark.pedantic(lambda: kda_ns.append(cpu_ns("numpy", "kda")),
                       setup=lambda: numpy_ns.append(cpu_ns("sys", "numpy")), rounds=rounds_of(20))
    counted(benchmark, ISAS[0], 1, 1, {}, 0, 0, 0)
    if stats(benchmark) is None:
        return
    relate(benchmark, "import numpy", numpy_ns, kda_ns)
    ms = statistics.median(kda_ns) / 1e6
    benchmark.extra_info["import_ms"] = ms
    summary(f"import kda: {ms:.1f} ms of CPU beyond numpy's {statistics.median(numpy_ns) / 1e6:.1f} ms")
    target("import kda, ms beyond numpy's", ms, most=60)
