"""What this machine does when nothing but the limit is in the way: probes in the same C as the kernels, and a copy.

A ceiling says something about a kernel only when both are timed in the same process, alternating: on a shared
machine either moves by tens of percent from second to second, and their ratio by a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from kda import _core
from kda.ops import aligned_empty
from kda.runtime import get_num_threads, isa_index, set_num_threads


@contextmanager
def threads(n: int) -> Iterator[int]:
    """At most n threads per call inside the block; yields how many a large call really uses."""
    before = get_num_threads()
    set_num_threads(n)
    try:
        yield get_num_threads()
    finally:
        set_num_threads(before)


def inplace_ns(s: NDArray[np.float32], isa: str | None = None, passes: int = 1) -> int:
    """Nanoseconds of `passes` times s = 0.99 s + 0.01 in place over contiguous float32 of any shape."""
    flat, row = s.reshape(-1), isa_index(isa)
    start = perf_counter_ns()
    _core.probe_update(row, flat, passes)
    return perf_counter_ns() - start


def read_ns(s: NDArray[np.float32], isa: str | None = None, passes: int = 1) -> int:
    """Nanoseconds of reading contiguous float32 `passes` times. Ones are fast everywhere; subnormal numbers are not.

    Several passes: each thread goes over one part again and again, which stays in its caches if it fits.
    """
    row = isa_index(isa)
    start = perf_counter_ns()
    _core.probe_read(row, s, passes)
    return perf_counter_ns() - start


def fma_rounds(isa: str | None = None, ns: int = 400_000) -> int:
    """Rounds of the FMA probe that take at least `ns`: long enough to hide the waking of threads."""
    return _rounds(_core.probe_fma, isa_index(isa), ns)


def idot_rounds(isa: str | None = None, ns: int = 400_000) -> int:
    """Rounds of the int8 probe that take at least `ns`."""
    return _rounds(_core.probe_idot, isa_index(isa), ns)


def idot_rate(rounds: int, isa: str | None = None) -> float:
    """int8 multiply-adds per nanosecond over all threads, in registers, as the 8-bit product makes them."""
    row = isa_index(isa)
    start = perf_counter_ns()
    return _core.probe_idot(row, rounds) / (perf_counter_ns() - start)


def _rounds(probe: Callable[[int, int], int], row: int, ns: int) -> int:
    """Rounds, doubled until they take `ns`."""
    rounds = 500
    start = end = perf_counter_ns()
    while end - start < ns:
        rounds *= 2
        start = perf_counter_ns()
        probe(row, rounds)
        end = perf_counter_ns()
    return rounds


def fma_rate(rounds: int, isa: str | None = None) -> float:
    """Multiply-add lanes per nanosecond over all threads: `rounds` of 12 independent vector FMA in registers.

    One lane of a multiply-add instruction counts as one; the FLOP rate is twice this.
    """
    row = isa_index(isa)
    start = perf_counter_ns()
    lanes = _core.probe_fma(row, rounds)
    return lanes / (perf_counter_ns() - start)


@contextmanager
def copier(nbytes: int, n: int) -> Iterator[Callable[[], int]]:
    """Yields a function that copies nbytes / 2, so that nbytes are read or written, and returns the nanoseconds.

    The copy is numpy's, that is the C library's, on n threads of Python, which copy without the GIL.
    """
    source, target = aligned_empty((nbytes // 8,)), aligned_empty((nbytes // 8,))
    source[:] = target[:] = 1
    sources, targets = np.array_split(source, n), np.array_split(target, n)
    with ThreadPoolExecutor(n) as pool:
        def ns() -> int:
            """One copy."""
            start = perf_counter_ns()
            if n == 1:
                np.copyto(targets[0], sources[0])
            else:
                list(pool.map(np.copyto, targets, sources))
            return perf_counter_ns() - start

        yield ns
