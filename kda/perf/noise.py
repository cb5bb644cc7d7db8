"""How sure a median is: bootstrap intervals of samples that follow each other in time, and who else was running."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from time import perf_counter

import numpy as np

LEVEL = 0.99   # of every interval in results and history
DRAWS = 1000
MOST = 400     # more samples than that are thinned: they are neighbours in time and say little new


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The interval that holds the median with LEVEL confidence, by a moving-block bootstrap of fixed seed.

    Blocks of neighbours are drawn, not single samples: what disturbs one sample disturbs the next as well. One sample
    gives an interval of no width, which says nothing.
    """
    x = np.asarray(samples, np.float64)
    x = x[::-(-len(x) // MOST)]
    block = max(1, round(len(x) ** (1 / 3)))
    starts = np.random.default_rng(len(x)).integers(0, len(x) - block + 1, (DRAWS, -(-len(x) // block)))
    drawn = x[(starts[:, :, None] + np.arange(block)).reshape(DRAWS, -1)[:, :len(x)]]
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def log_error(low: float, high: float) -> float:
    """The standard error of the logarithm of a median with this interval."""
    return float(np.log(high / low)) / (2 * NormalDist().inv_cdf((1 + LEVEL) / 2))


def busy_seconds() -> float | None:
    """CPU seconds that all processes together, and the host of a virtual machine (steal), have taken since boot."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def watch_others() -> Callable[[], float | None]:
    """Starts now; the function returned says how many CPUs others took on average since, None where nothing tells.

    Others are all processes but this one and those that it waited for, and the host. A call on every CPU that must
    share one of them is slower by more than its limits are, so such a row says little.
    """
    def now() -> tuple[float, float | None, float]:
        """Seconds on the clock, of all processes, of this one and those that it waited for."""
        return perf_counter(), busy_seconds(), sum(os.times()[:4])

    wall, busy, own = now()

    def taken() -> float | None:
        """CPUs that others took since watch_others()."""
        wall_now, busy_now, own_now = now()
        if busy is None or busy_now is None:
            return None
        return max(0.0, round((busy_now - busy - (own_now - own)) / (wall_now - wall), 2))

    return taken
