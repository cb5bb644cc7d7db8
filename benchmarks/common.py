"""What the benchmarks share that is not a fixture."""

import statistics

import kda
from kda.perf import bench
from kda.perf.ceilings import fma_rate, fma_rounds, inplace_ns

ISAS = [name for name, runs_here in kda.isas().items() if runs_here]
THREADS = sorted({1, kda.get_num_threads()})


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
    step_ns = [seconds * 1e9 / tokens for seconds in benchmark.stats.stats.data]
    numbers = bench.derive(shape, step_ns, pass_ns[-len(step_ns):], peak[-len(step_ns):])
    benchmark.extra_info.update(numbers)
    return numbers


def describe(benchmark, shape, isa, team, tokens):
    """The counted part of extra_info: what ran, and its MAC, FLOP and bytes of state read and written."""
    benchmark.extra_info.update(
        isa=isa, threads=team, shape={"layers": shape.layers, "H": shape.H, "HV": shape.HV, "K": shape.K, "V": shape.V},
        tokens=tokens, mac=shape.mac * tokens, flop=shape.flop * tokens, bytes=shape.traffic_bytes * tokens,
        MFLOP_per_token=shape.flop / 1e6)


def median_ratio(others, ours):
    """Median of others[i] / ours[i] over the last len(ours) pairs (a warm-up may have run the other once more)."""
    return statistics.median(other / own for other, own in zip(others[-len(ours):], ours, strict=True))
