"""What the benchmarks share that is not a fixture."""

import statistics
import time

import numpy as np

import kda
from kda.perf import bench
from kda.perf.ceilings import fma_rate, fma_rounds, inplace_ns
from kda.perf.work import nanoseconds

ISAS = [name for name, runs_here in kda.isas().items() if runs_here]
THREADS = sorted({1, kda.get_num_threads()})
BETWEEN = 0.12  # seconds for another library's threads to stop spinning; two threads still suffer, see README


def beside_ceilings(benchmark, shape, isa, team, run, state, tokens, rounds):
    """Benchmark run(), which takes `tokens` tokens over the layers of `shape`, in turn with the ceilings.

    The in-place pass goes over `state`, the same bytes. Fills extra_info; returns the derived numbers, or None
    under --benchmark-disable.
    """
    pass_ns, peak, fma = [], [], fma_rounds(isa)

    def probe():
        pass_ns.append(sum(inplace_ns(state, isa) for _ in range(tokens)) / tokens)
        peak.append(fma_rate(fma, isa))

    run()
    benchmark.pedantic(run, setup=probe, rounds=rounds)
    describe(benchmark, shape, isa, team, tokens)
    if benchmark.stats is None:
        return None
    step_ns = [ns / tokens for ns in own_ns(benchmark)]
    numbers = bench.derive(shape, step_ns, pass_ns[-len(step_ns):], peak[-len(step_ns):])
    benchmark.extra_info.update(numbers)
    return numbers


def beside_peak(benchmark, work, team, rounds):
    """Benchmark work.run(), blocks of tokens, in turn with the FMA peak; as beside_ceilings."""
    peak, fma = [], fma_rounds(work.isa)
    work.run()
    benchmark.pedantic(work.run, setup=lambda: peak.append(fma_rate(fma, work.isa)), rounds=rounds)
    describe(benchmark, work.shape, work.isa, team, work.tokens)
    if benchmark.stats is None:
        return None
    token_ns = [ns / work.tokens for ns in own_ns(benchmark)]
    numbers = bench.derive_blocks(work.shape, work.tokens, token_ns, peak[-len(token_ns):])
    benchmark.extra_info.update(numbers)
    return numbers


def describe(benchmark, shape, isa, team, tokens):
    """The counted part of extra_info: what ran, and its MAC, FLOP and bytes of state read and written."""
    benchmark.extra_info.update(
        isa=isa, threads=team, shape={"layers": shape.layers, "H": shape.H, "HV": shape.HV, "K": shape.K, "V": shape.V},
        tokens=tokens, mac=shape.mac * tokens, flop=shape.flop * tokens, bytes=shape.traffic_bytes * tokens,
        MFLOP_per_token=shape.flop / 1e6)


def own_ns(benchmark):
    """Nanoseconds of each round."""
    return [seconds * 1e9 for seconds in benchmark.stats.stats.data]


def median_ratio(others, ours):
    """Median of others[i] / ours[i] over the last len(ours) pairs (a warm-up may have run the other once more)."""
    return statistics.median(other / own for other, own in zip(others[-len(ours):], ours, strict=True))


def in_turn(benchmark, ours, other, rounds):
    """Benchmark ours() in turn with other(), which returns its nanoseconds.

    Returns the median of other's time / ours, or None under --benchmark-disable.
    """
    other_ns = []
    benchmark.pedantic(ours, setup=lambda: other_ns.append(other()), rounds=rounds)
    return None if benchmark.stats is None else median_ratio(other_ns, own_ns(benchmark))


def timed(step, times):
    """Nanoseconds per step, after one that wakes the threads."""
    time.sleep(BETWEEN)
    step()
    return nanoseconds(step, times) / times


def beside_rival(benchmark, summary, what, team, work, rival, times, rounds):
    """Benchmark work.run() in turn with the rival's step; what: words for the row. Returns as in_turn."""
    rival_ns = []

    def setup():
        rival_ns.append(timed(rival.step, times) / work.tokens)
        time.sleep(BETWEEN)
        work.run()

    benchmark.pedantic(lambda: work.ns(times), setup=setup, rounds=rounds)
    benchmark.extra_info.update(isa=ISAS[0], threads=team, tokens=times * work.tokens)
    if benchmark.stats is None:
        return None
    token_ns = [ns / times / work.tokens for ns in own_ns(benchmark)]
    return record(benchmark, summary, rival.NAME, what, team, rival_ns, token_ns)


def record(benchmark, summary, rival, what, team, rival_ns, token_ns):
    """Nanoseconds per token of both, and their ratio, into extra_info and the summary; returns the ratio."""
    ratio, us = median_ratio(rival_ns, token_ns), np.median(rival_ns) / 1e3
    benchmark.extra_info.update(rival=rival, what=what, rival_over_kda=ratio, rival_us_per_token=us,
                                us_per_token=np.median(token_ns) / 1e3)
    summary(f"{what}, {team} thread(s): {rival} takes {ratio:.2f} x kda ({us:,.1f} us/token)")
    return ratio


def assert_near(got, want, bound):
    """max|got - want| <= bound * max|want|."""
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error <= bound, error
