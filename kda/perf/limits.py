"""The ceilings of this machine as a table: memory, caches, multiply-adds, per number of threads."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from kda.ops import aligned_empty
from kda.perf.ceilings import fma_rate, fma_rounds, idot_rate, idot_rounds, inplace_ns, read_ns, threads
from kda.runtime import cache_sizes, get_num_threads

PROBE_NS = 2_000_000  # one sample, about: hides the waking of threads, and is short beside other work's time slices

# What each ceiling is; the JSON carries this text. Higher is better in all.
MEANING = {
    "DRAM read": "reading memory that no cache holds, 10^9 bytes per second",
    "DRAM in-place": "s = a*s + b over memory that no cache holds, bytes read and written, 10^9 per second",
    "L3 read": "reading what the last cache holds and the one before does not, 10^9 bytes per second",
    "L2 read": "reading what each core's second cache holds and the first does not, 10^9 bytes per second",
    "float32 FMA": "10^9 FLOP per second of multiply-adds in registers, 2 FLOP each",
    "int8 dot": "10^9 int8 multiply-adds per second in registers, as the 8-bit product makes them",
}
UNITS = {"float32 FMA": "GFLOP/s", "int8 dot": "GMAC/s"}


def team_sizes(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})


def buffer_bytes(team: int) -> dict[str, int]:
    """Bytes over which each ceiling of memory is measured; a cache that is unknown or too small has none.

    Half of each core's second cache; for the third what is at least four times the second caches together and at
    most half of it; for memory four times the largest cache, 64 MiB to 1 GiB.
    """
    caches = cache_sizes()
    l2, l3 = caches.get("L2", 0), caches.get("L3", 0)
    dram = min(max(4 * max(caches.values(), default=0), 2**26), 2**30)
    sizes = {"DRAM read": dram, "DRAM in-place": dram}
    if l3 and l3 // 2 >= 4 * l2 * team:
        sizes["L3 read"] = l3 // 2
    if l2:
        sizes["L2 read"] = l2 // 2 * team
    return sizes


def probes(isa: str | None, team: int) -> dict[str, Callable[[], float]]:
    """A function for each ceiling of `team` threads that returns one sample in its unit."""
    sizes = buffer_bytes(team)
    ones = aligned_empty((max(sizes.values()) // 4,))
    ones[:] = 1
    found: dict[str, Callable[[], float]] = {}
    for name, nbytes in sizes.items():
        part = ones[:nbytes // 4]
        moved, ns = (2 * nbytes, inplace_ns) if name == "DRAM in-place" else (nbytes, read_ns)
        passes = 1 if name.startswith("DRAM") else max(2, PROBE_NS // max(1, ns(part, isa)))
        found[name] = partial(_rate, moved * passes, partial(ns, part, isa, passes))
    fma, dot = fma_rounds(isa, PROBE_NS), idot_rounds(isa, PROBE_NS)
    found["float32 FMA"] = lambda: 2 * fma_rate(fma, isa)
    found["int8 dot"] = lambda: idot_rate(dot, isa)
    return found


def _rate(nbytes: int, ns: Callable[[], int]) -> float:
    """Bytes per nanosecond, which are 10^9 bytes per second."""
    return nbytes / ns()


def measure(isa: str | None = None, seconds: float = 0.5,
            progress: Callable[[int, int, str], None] | None = None) -> list[dict[str, Any]]:
    """Rows {name, threads, median, best, unit, samples}: every ceiling on 1, 2, 4, ... and all threads.

    The ceilings of one number of threads take turns, each at least 5 times and for about `seconds` in all, so that
    what else the machine does falls on all of them.
    """
    rows = []
    teams = team_sizes(get_num_threads())
    for done, team in enumerate(teams):
        if progress:
            progress(done, len(teams), f"ceilings, {team} thread{'s' if team > 1 else ''}")
        with threads(team) as used:
            found = probes(isa, used)
            samples: dict[str, list[float]] = {name: [] for name in found}
            end = perf_counter() + seconds
            while len(samples["int8 dot"]) < 5 or perf_counter() < end:
                for name, sample in found.items():
                    samples[name].append(sample())
        rows += [{"name": name, "threads": used, "median": statistics.median(values), "best": max(values),
                  "unit": UNITS.get(name, "GB/s"), "samples": len(values)} for name, values in samples.items()]
    if progress:
        progress(len(teams), len(teams), "done")
    return rows

