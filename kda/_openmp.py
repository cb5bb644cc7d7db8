"""Loads the core, and with it OpenMP's library, so that idle threads soon sleep.

GNU's library lets a thread that has finished its share spin for a millisecond and more before it sleeps. Where
another program wants the core, the scheduler then charges that spinning to the thread and lets it wait when
there is work again: a decode step of 0.1 ms on two threads took 16 ms beside one busy process. A spin of some
20 us still bridges the gap from call to call. The library reads its setting once, when it is loaded, so the
variable is taken back at once: no child process sees it. Whoever sets either variable has the last word.
"""

import importlib
import os

SPINS = "2000"


def load() -> None:
    """Import kda._core with GOMP_SPINCOUNT set, unless the environment already says how threads wait."""
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["GOMP_SPINCOUNT"] = SPINS
    try:
        importlib.import_module("kda._core")
    finally:
        del os.environ["GOMP_SPINCOUNT"]


load()
