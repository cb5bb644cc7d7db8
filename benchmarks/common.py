"""What the benchmarks share that is not a fixture."""

import statistics

import numpy as np

import kda
from kda.ops import aligned_empty
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


class Prefill:
    """T tokens of one layer through chunk_kda or fused_recurrent_kda; q and k are normalised, the state moves on."""

    def __init__(self, shape, T, op=kda.chunk_kda, isa=None):
        rng = np.random.default_rng(bench.SEED)
        H, K, V = shape.HV, shape.K, shape.V
        self.q, self.k = (kda.l2norm(rng.standard_normal((1, T, H, K), dtype=np.float32)) for _ in range(2))
        self.v = rng.standard_normal((1, T, H, V), dtype=np.float32)
        self.g = -0.5 * rng.random((1, T, H, K), dtype=np.float32)
        self.beta = 0.01 + 0.98 * rng.random((1, T, H), dtype=np.float32)
        self.state = aligned_empty((1, H, K, V))
        self.state[:] = rng.standard_normal(self.state.shape, dtype=np.float32)
        self.o = np.empty_like(self.v)
        self.shape, self.T, self.op, self.isa = shape, T, op, isa

    def inputs(self):
        return {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta")}

    def run(self):
        self.op(**self.inputs(), initial_state=self.state, state_out=self.state, out=self.o, isa=self.isa)


def describe(benchmark, shape, isa, team, tokens):
    """The counted part of extra_info: what ran, and its MAC, FLOP and bytes of state read and written."""
    benchmark.extra_info.update(
        isa=isa, threads=team, shape={"layers": shape.layers, "H": shape.H, "HV": shape.HV, "K": shape.K, "V": shape.V},
        tokens=tokens, mac=shape.mac * tokens, flop=shape.flop * tokens, bytes=shape.traffic_bytes * tokens,
        MFLOP_per_token=shape.flop / 1e6)


def median_ratio(others, ours):
    """Median of others[i] / ours[i] over the last len(ours) pairs (a warm-up may have run the other once more)."""
    return statistics.median(other / own for other, own in zip(others[-len(ours):], ours, strict=True))
