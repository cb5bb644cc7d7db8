"""Instructions that the kernels execute, counted by valgrind's callgrind: the same number on every run, whatever else
the machine does.

A child process runs each call once under callgrind, on one thread. Only what kda_parallel_for calls is counted, that is
the kernels and what walks them, not Python. _core.threading() calls a function that nothing else does, at which
callgrind writes down what it has counted and starts again from zero.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import kda
from kda import _core
from kda.perf import bench
from kda.perf.work import Work
from kda.runtime import isa_index

TIMEOUT = 1800  # seconds


def run_all(works: Sequence[Callable[[], Work]]) -> None:
    """In the child: every call once to settle, then once between two marks."""
    kda.set_num_threads(1)
    for make in works:
        work = make()
        work.run()
        _core.threading()
        work.run()
        _core.threading()


def child(quick: bool, isa: str | None) -> None:
    """What the child process does: the calls of `kda bench`."""
    isa_index(isa)
    run_all(bench.plan_rows(quick, isa)[0])


def count(quick: bool, isa: str) -> list[int]:
    """Instructions of each call of bench.plan_rows(quick, isa), in its order. Raises OSError as counted() does."""
    code = f"from kda.perf import instructions; instructions.child({quick!r}, {isa!r})"
    return counted(code, len(bench.plan_rows(quick, isa)[0]))


def counted(code: str, calls: int) -> list[int]:
    """Instructions of each of the `calls` calls that run_all makes in a child that executes `code`.

    Raises OSError without valgrind, or where the child fails: valgrind knows no AVX-512.
    """
    valgrind = shutil.which("valgrind")
    if not valgrind:
        raise OSError("counting instructions needs valgrind")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [valgrind, "--tool=callgrind", f"--callgrind-out-file={folder}/out", "--toggle-collect=kda_parallel_for",
             "--dump-before=kda_threading", sys.executable, "-c", code],
            capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not line.startswith("==")] or ["no message"]
            raise OSError(f"callgrind: {said[-1]}")
        totals = [total(Path(folder, f"out.{i}")) for i in range(1, 1 + len(list(Path(folder).glob("out.*"))))]
    return totals[-2 * calls:][1::2]  # before those: what importing kda marked


def total(path: Path) -> int:
    """What one dump of callgrind counted."""
    found = re.search(r"^(?:totals|summary): (\d+)", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return int(found[1]) if found else 0
