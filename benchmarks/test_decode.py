"""The recurrent step on real shapes, beside the in-place pass over the same bytes and the FMA peak."""

import numpy as np
import pytest
from common import ISAS, assert_near, beside_ceilings, beside_peak, describe, in_turn, stats

import kda
from kda import reference
from kda.perf import counts
from kda.perf.work import Decode, Prefill, title

SHAPES = {title(shape): shape for shape in (counts.KIMI_LINEAR_LAYER, counts.KIMI_LINEAR, counts.K3_LAYER)}


def check_first_layer(decode):
    """One step of the first layer against float64."""
    q, k, v, g, beta = (x[0] for x in (decode.q, decode.k, decode.v, decode.g, decode.beta))
    o, S = reference.fused_recurrent_kda(q, k, v, g, beta, initial_state=decode.states[0], output_final_state=True,
                                         use_qk_l2norm_in_kernel=True)
    decode.run()
    assert_near(decode.result[0], o, 2e-6)
    assert_near(decode.settled()[0], S, 2e-6)


@pytest.mark.parametrize("left", [False, True], ids=["made_at_once", "updates_left"])
@pytest.mark.parametrize("name", SHAPES)
def test_decode(benchmark, name, left, isa, team, target):
    shape = SHAPES[name]
    decode = Decode(shape, isa, left)
    check_first_layer(decode)
    tokens = max(1, 8 // shape.layers)

    def run():
        for _ in range(tokens):
            decode.run()

    benchmark.extra_info.update(kind="decode", row=f"decode: {decode.name}")
    got = beside_ceilings(benchmark, shape, isa, team, run, decode.states, tokens, rounds=60)
    if got and isa == ISAS[0] and left and shape == counts.KIMI_LINEAR_LAYER and team == 1:
        target("share of the FMA bound", got["share_of_fma"], least=0.9 if isa.startswith("avx512") else 0.6)
    if got and isa == ISAS[0] and left and shape == counts.KIMI_LINEAR:
        target("share of the in-place pass", got["share_of_inplace"], least=0.8 if isa.startswith("avx512") else 0.6)


@pytest.mark.parametrize("T", [2, 4, 8, 16])
def test_drafted_tokens(benchmark, T, team, target, summary):
    """T tokens of one call, as when drafted tokens are verified, in turn with one token; 20 layers, from memory."""
    several, one = Decode(counts.KIMI_LINEAR, T=T), Decode(counts.KIMI_LINEAR)
    check_first_layer(several)
    one.run()
    ratio = in_turn(benchmark, several.run, lambda: one.ns(1), rounds=25, to="one token")
    describe(benchmark, counts.KIMI_LINEAR, ISAS[0], team, tokens=T, calls=1)
    benchmark.extra_info["row"] = f"decode: {several.name}"
    if ratio:
        summary(f"decode, {several.name}, {team} thread(s): {1 / ratio:.2f} x one token")
        if T == 4:
            target("time over that of one token", 1 / ratio, most=2.2)


def test_eight_sequences(benchmark, team, target, summary):
    """One token of eight sequences in one call, in turn with one of one; 20 layers, from memory."""
    eight, one = Decode(counts.KIMI_LINEAR, left=True, batch=8), Decode(counts.KIMI_LINEAR, left=True)
    check_first_layer(eight)
    one.run()
    ratio = in_turn(benchmark, eight.run, lambda: one.ns(1), rounds=10, to="one sequence")
    describe(benchmark, counts.KIMI_LINEAR, ISAS[0], team, tokens=8)
    benchmark.extra_info["row"] = f"decode: {eight.name}"
    if ratio:
        summary(f"decode, {eight.name}, {team} thread(s): a token costs {1 / ratio / 8:.2f} of one sequence's")
        target("time per token over one sequence's", 1 / ratio / 8, most=1.0)


@pytest.mark.parametrize("other", ISAS[1:])
def test_isas_side_by_side(benchmark, other, team, target, summary):
    """20 layers on the best ISA, in turn with another: from memory they should be near each other."""
    best, rival = Decode(counts.KIMI_LINEAR, ISAS[0]), Decode(counts.KIMI_LINEAR, other)
    best.run()
    rival.run()
    assert_near(best.result, rival.result, 2e-6)
    ratio = in_turn(benchmark, best.run, lambda: rival.ns(1), rounds=40, to=other)
    describe(benchmark, counts.KIMI_LINEAR, ISAS[0], team, tokens=1)
    benchmark.extra_info["other_isa"] = other
    if ratio:
        benchmark.extra_info["times_the_best_isa"] = ratio
        summary(f"decode, 20 layers, {team} thread(s): {other} takes {ratio:.2f} x {ISAS[0]}")
        if ISAS[0].startswith("avx512") and other == "avx2":
            target("avx2 over avx512 from memory", ratio, 1.3)


@pytest.mark.parametrize("T", [1, 64])
def test_subnormal_states(benchmark, isa, T, target, summary):
    """States of which every element is subnormal, and stays so, in turn with ordinary ones."""
    shape = counts.KIMI_LINEAR_LAYER
    if T == 1:
        ours, ordinary = Decode(shape, isa), Decode(shape, isa)
        states = ours.states
    else:
        ours, ordinary = Prefill(shape, T, isa), Prefill(shape, T, isa)
        states = ours.state
    ours.v[...], ours.g[...] = 0, -1e-6
    states *= 1e-38  # around 1e-39
    ratio = in_turn(benchmark, ours.run, lambda: ordinary.ns(1), rounds=40, to="ordinary states")
    describe(benchmark, shape, isa, kda.get_num_threads(), tokens=T)
    assert 0 < np.abs(states).max() < np.finfo(np.float32).tiny
    if ratio:
        benchmark.extra_info["times_ordinary"] = 1 / ratio
        summary(f"subnormal states, T = {T}, {isa}: {1 / ratio:.2f} x the time of ordinary ones")
        target("time of subnormal states over ordinary ones", 1 / ratio, most=2.0)


@pytest.mark.parametrize("op", [kda.fused_recurrent_kda, kda.chunk_kda], ids=lambda op: op.__name__)
def test_64_tokens(benchmark, op, isa, team):
    """Token by token and in blocks, where a layer changes from one to the other."""
    prefill = Prefill(counts.KIMI_LINEAR_LAYER, 64, isa, op)
    want, _ = reference.fused_recurrent_kda(**prefill.inputs(), initial_state=prefill.state,
                                            use_qk_l2norm_in_kernel=True)
    prefill.run()
    assert_near(prefill.result, want, 2e-6)
    beside_peak(benchmark, prefill, team, rounds=20)


@pytest.mark.parametrize("form", ["functional", "in place"])
def test_smallest_call(benchmark, target, form):
    """T = 1, H = 1, K = V = 16: what a call costs from Python before it has any work."""
    decode = Decode(counts.Shape("call overhead", 1, 1, 16, 16))
    check_first_layer(decode)
    q, k, v, g, beta = (x[0] for x in (decode.q, decode.k, decode.v, decode.g, decode.beta))

    def call():
        kda.fused_recurrent_kda(q, k, v, g, beta)

    run = decode.run if form == "in place" else call
    benchmark(run)
    describe(benchmark, decode.shape, ISAS[0], 1, tokens=1)
    if stats(benchmark) is not None:
        target("microseconds per smallest call", benchmark.stats.stats.median * 1e6, 8.0)
