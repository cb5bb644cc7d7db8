"""What the benchmarks share that is not a fixture."""

import statistics
import time

import numpy as np

import kda
from kda.perf import bench
from kda.perf.ceilings import fma_rate, fma_rounds, inplace_ns
from kda.perf.noise import median_interval
from kda.perf.results import SHARES
from kda.perf.work import Prefill, nanoseconds
from kda.runtime import cache_sizes

ISAS = [name for name, runs_here in kda.isas().items() if runs_here]
THREADS = sorted({1, kda.get_num_threads()})
QUICK = []  # not empty with --quick
LAST_CACHE = max(cache_sizes().values(), default=2**25)
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
    benchmark.pedantic(run, setup=probe, rounds=rounds_of(rounds))
    describe(benchmark, shape, isa, team, tokens)
    if stats(benchmark) is None:
        return None
    step_ns = [ns / tokens for ns in own_ns(benchmark)]
    numbers = bench.derive(shape, step_ns, pass_ns[-len(step_ns):], peak[-len(step_ns):])
    take(benchmark, numbers)
    return numbers


def beside_peak(benchmark, work, team, rounds):
    """Benchmark work.run(), blocks of tokens, in turn with the FMA peak; as beside_ceilings."""
    peak, fma = [], fma_rounds(work.isa)
    work.run()
    benchmark.pedantic(work.run, setup=lambda: peak.append(fma_rate(fma, work.isa)), rounds=rounds_of(rounds))
    describe(benchmark, work.shape, work.isa, team, work.tokens, calls=1)
    benchmark.extra_info["bytes"] += Prefill.nbytes(work.shape, work.tokens)
    if stats(benchmark) is None:
        return None
    token_ns = [ns / work.tokens for ns in own_ns(benchmark)]
    numbers = bench.derive_blocks(work.shape, work.tokens, token_ns, peak[-len(token_ns):])
    take(benchmark, numbers)
    return numbers


def take(benchmark, numbers):
    """What bench.derive and its like found, into extra_info; the share that rows are compared by also as "relative"."""
    share = next(name for name in SHARES if name in numbers)
    benchmark.extra_info.update(numbers)
    benchmark.extra_info["relative"] = {"to": share.removeprefix("share_of_"), "value": numbers[share],
                                        "interval": numbers["share_interval"]}


def counted(benchmark, isa, team, tokens, shape, mac, nbytes, held):
    """The part of extra_info that is counted, not measured, of one round: it takes `tokens` tokens.

    held: bytes that rounds go through again and again. cold: whether the last cache cannot hold them, so that they
    come from memory.
    """
    benchmark.extra_info.update(isa=isa, threads=team, tokens=tokens, shape=shape, mac=mac, flop=2 * mac, bytes=nbytes,
                                MFLOP_per_token=2 * mac / tokens / 1e6, cold=held > LAST_CACHE)


def describe(benchmark, shape, isa, team, tokens, calls=None):
    """The counted part of the delta rule: its state read and written once per call, default: by every token."""
    counted(benchmark, isa, team, tokens,
            {"layers": shape.layers, "H": shape.H, "HV": shape.HV, "K": shape.K, "V": shape.V}, shape.mac * tokens,
            shape.traffic_bytes * (tokens if calls is None else calls), shape.state_bytes)


def rounds_of(n):
    """How many rounds to take: with --quick a third of n, at least 5."""
    return min(n, max(5, n // 3)) if QUICK else n


def stats(benchmark):
    """The statistics that pytest-benchmark took; None under --benchmark-disable, and with pytest-codspeed, which keeps
    its own."""
    return getattr(benchmark, "stats", None)


def disabled(benchmark):
    """Whether each benchmark runs but once."""
    return getattr(benchmark, "disabled", False)


def own_ns(benchmark):
    """Nanoseconds of each round."""
    return [seconds * 1e9 for seconds in benchmark.stats.stats.data]


def median_ratio(others, ours):
    """Median of others[i] / ours[i] over the last len(ours) pairs (a warm-up may have run the other once more)."""
    return statistics.median(other / own for other, own in zip(others[-len(ours):], ours, strict=True))


def relate(benchmark, to, others, ours):
    """median_ratio, which with its interval goes into extra_info: how fast ours is beside `to`, higher is better."""
    ratio = median_ratio(others, ours)
    ratios = [other / own for other, own in zip(others[-len(ours):], ours, strict=True)]
    benchmark.extra_info["relative"] = {"to": to, "value": ratio, "interval": list(median_interval(ratios))}
    return ratio


def in_turn(benchmark, ours, other, rounds, to):
    """Benchmark ours() in turn with other(), which returns its nanoseconds; `to`: what other is.

    Returns the median of other's time / ours, or None under --benchmark-disable.
    """
    other_ns = []
    benchmark.pedantic(ours, setup=lambda: other_ns.append(other()), rounds=rounds_of(rounds))
    return None if stats(benchmark) is None else relate(benchmark, to, other_ns, own_ns(benchmark))


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

    benchmark.pedantic(lambda: work.ns(times), setup=setup, rounds=rounds_of(rounds))
    benchmark.extra_info.update(isa=ISAS[0], threads=team, tokens=times * work.tokens)
    if stats(benchmark) is None:
        return None
    token_ns = [ns / times / work.tokens for ns in own_ns(benchmark)]
    return record(benchmark, summary, rival.NAME, what, team, rival_ns, token_ns)


def record(benchmark, summary, rival, what, team, rival_ns, token_ns):
    """Nanoseconds per token of both, and their ratio, into extra_info and the summary; returns the ratio."""
    ratio, us = relate(benchmark, rival, rival_ns, token_ns), np.median(rival_ns) / 1e3
    benchmark.extra_info.update(rival=rival, what=what, rival_over_kda=ratio, rival_us_per_token=us,
                                **bench.times_of(token_ns))
    summary(f"{what}, {team} thread(s): {rival} takes {ratio:.2f} x kda ({us:,.1f} us/token)")
    return ratio


def assert_near(got, want, bound):
    """max|got - want| <= bound * max|want|."""
    error = error_of(got, want)
    assert error <= bound, error


def error_of(got, want):
    """max|got - want| / max|want|."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def errors(benchmark, want, ours, rival, bound=1e-5):
    """How far both results are from float64, into extra_info; neither may be further than `bound`."""
    found = {"error": error_of(ours, want), "rival_error": error_of(rival, want)}
    assert max(found.values()) <= bound, found
    benchmark.extra_info.update(found)
