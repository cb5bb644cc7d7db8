"""The recurrent step on real shapes, beside the in-place pass over the same bytes and the FMA peak."""

import numpy as np
import pytest
from common import ISAS, beside_ceilings, describe, median_ratio

import kda
from kda import reference
from kda.perf import counts
from kda.perf.bench import Decode, title

SHAPES = {title(shape): shape for shape in (counts.KIMI_LINEAR_LAYER, counts.KIMI_LINEAR, counts.K3_LAYER)}


def check_first_layer(decode):
    """One step of the first layer against float64."""
    q, k, v, g, beta = (x[0] for x in (decode.q, decode.k, decode.v, decode.g, decode.beta))
    o, S = reference.fused_recurrent_kda(q, k, v, g, beta, initial_state=decode.states[0], output_final_state=True,
                                         use_qk_l2norm_in_kernel=True)
    decode.step()
    assert np.abs(decode.o[0] - o).max() <= 2e-6 * np.abs(o).max()
    assert np.abs(decode.states[0] - S).max() <= 2e-6 * np.abs(S).max()


@pytest.mark.parametrize("name", SHAPES)
def test_decode(benchmark, name, isa, team, target):
    shape = SHAPES[name]
    decode = Decode(shape, isa)
    check_first_layer(decode)
    tokens = max(1, 8 // shape.layers)

    def run():
        for _ in range(tokens):
            decode.step()

    got = beside_ceilings(benchmark, shape, isa, team, run, decode.states, tokens, rounds=60)
    if got and isa == "avx512" and shape == counts.KIMI_LINEAR_LAYER and team == 1:
        target("time over the FMA bound", 1 / got["share_of_fma"], 1.5)
    if got and isa == ISAS[0] and shape == counts.KIMI_LINEAR and team == kda.get_num_threads() > 1:
        target("time over the in-place pass", 1 / got["share_of_inplace"], 1.5)


@pytest.mark.parametrize("other", ISAS[1:])
def test_isas_side_by_side(benchmark, other, team, target, summary):
    """20 layers on the best ISA, in turn with another: from memory they should be near each other."""
    best, rival = Decode(counts.KIMI_LINEAR, ISAS[0]), Decode(counts.KIMI_LINEAR, other)
    best.step()
    rival.step()
    assert np.abs(best.o - rival.o).max() <= 2e-6 * np.abs(rival.o).max()
    rival_ns = []
    benchmark.pedantic(best.step, setup=lambda: rival_ns.append(rival.ns(1)), rounds=40)
    describe(benchmark, counts.KIMI_LINEAR, ISAS[0], team, tokens=1)
    benchmark.extra_info["other_isa"] = other
    if benchmark.stats is not None:
        ratio = median_ratio(rival_ns, [seconds * 1e9 for seconds in benchmark.stats.stats.data])
        benchmark.extra_info["times_the_best_isa"] = ratio
        summary(f"decode, 20 layers, {team} thread(s): {other} takes {ratio:.2f} x {ISAS[0]}")
        if (ISAS[0], other) == ("avx512", "avx2"):
            target("avx2 over avx512 from memory", ratio, 1.3)


def test_prefill_64_tokens(benchmark, isa, team):
    """64 tokens of one Kimi-Linear layer, token by token."""
    shape, T = counts.KIMI_LINEAR_LAYER, 64
    rng = np.random.default_rng(1)

    def normal(*dims):
        return rng.standard_normal(dims, dtype=np.float32)

    H, K = shape.H, shape.K
    q, k, v, o, state = *(normal(1, T, H, K) for _ in range(4)), normal(1, H, K, K)
    g, beta = -0.5 * rng.random((1, T, H, K), dtype=np.float32), rng.random((1, T, H), dtype=np.float32)
    want, _ = reference.fused_recurrent_kda(q, k, v, g, beta, initial_state=state, use_qk_l2norm_in_kernel=True)

    def run():
        kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=state, state_out=state, out=o,
                                use_qk_l2norm_in_kernel=True, isa=isa)

    run()
    assert np.abs(o - want).max() <= 2e-6 * np.abs(want).max()
    beside_ceilings(benchmark, shape, isa, team, run, state, tokens=T, rounds=20)


@pytest.mark.parametrize("form", ["functional", "in place"])
def test_smallest_call(benchmark, target, form):
    """T = 1, H = 1, K = V = 16: what a call costs from Python before it has any work."""
    decode = Decode(counts.Shape("call overhead", 1, 1, 16, 16))
    check_first_layer(decode)
    q, k, v, g, beta = (x[0] for x in (decode.q, decode.k, decode.v, decode.g, decode.beta))

    def call():
        kda.fused_recurrent_kda(q, k, v, g, beta)

    run = decode.step if form == "in place" else call
    benchmark(run)
    describe(benchmark, decode.shape, ISAS[0], 1, tokens=1)
    if benchmark.stats is not None:
        target("microseconds per smallest call", benchmark.stats.stats.median * 1e6, 8.0)
