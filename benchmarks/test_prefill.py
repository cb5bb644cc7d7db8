"""Prompts through one layer in blocks: bound by multiply-adds, counted as 3 * K * V per token and head.

The targets are for one layer of Kimi-Linear and, with 96 heads, of K3. Scalar C is the oracle and not timed here.
"""

from functools import partial

import pytest
from common import ISAS, assert_near, beside_peak, describe, in_turn

import kda
from kda.perf import counts
from kda.perf.work import Prefill

SHAPES = {shape.name: shape for shape in (counts.KIMI_LINEAR_LAYER, counts.K3_LAYER)}
TIMED = [name for name in ISAS if name != "scalar"] or ISAS


def in_blocks(shape, T, isa, precision="float32"):
    return Prefill(shape, T, isa, partial(kda.chunk_kda, precision=precision))


def checked(shape, T, isa, precision="float32", bound=1e-5):
    """A prefill whose first call gave what the recurrence gives."""
    prefill = in_blocks(shape, T, isa, precision)
    want, _ = kda.fused_recurrent_kda(**prefill.inputs(), initial_state=prefill.state, use_qk_l2norm_in_kernel=True,
                                      isa=isa)
    prefill.run()
    assert_near(prefill.result, want, bound)
    return prefill


@pytest.mark.parametrize("isa", TIMED)
@pytest.mark.parametrize("T", [64, 1024])
@pytest.mark.parametrize("model", SHAPES)
def test_prefill(benchmark, model, T, isa, team, target):
    prefill = checked(SHAPES[model], T, isa)
    benchmark.extra_info.update(kind="prefill", row=f"prefill: {prefill.name}")
    got = beside_peak(benchmark, prefill, team, rounds=8 if T > 64 else 40)
    if got and T == 1024:
        least = 0.7 if isa.startswith("avx512") else 0.6 if isa == "avx2" else 0.0
        target("share of the FMA peak", got["share_of_fma_by_definition"], least=least)


@pytest.mark.parametrize("isa", TIMED)
@pytest.mark.parametrize("model", SHAPES)
def test_a_short_prompt_costs_no_more_per_token(benchmark, model, isa, team, target, summary):
    short, long = (in_blocks(SHAPES[model], T, isa) for T in (64, 1024))
    long.run()
    ratio = in_turn(benchmark, lambda: short.ns(4), lambda: long.ns(1), rounds=8, to="1,024 tokens")
    describe(benchmark, short.shape, isa, team, 4 * short.tokens, calls=4)
    if ratio:
        speed = ratio * 4 * short.tokens / long.tokens
        benchmark.extra_info["per_token_speed_over_1024_tokens"] = speed
        summary(f"prefill, {model}, {isa}, {team} thread(s): 64 tokens at {speed:.0%} of the per-token speed of 1024")
        target("per-token speed of 64 tokens over that of 1024", speed, least=0.85)


@pytest.mark.parametrize("isa", TIMED)
def test_bf16(benchmark, isa, team, target, summary):
    """precision="bf16" in turn with float32; only AVX-512 BF16 and AMX should gain."""
    half = checked(counts.KIMI_LINEAR_LAYER, 1024, isa, "bf16", 2**-6)
    full = in_blocks(counts.KIMI_LINEAR_LAYER, 1024, isa)
    ratio = in_turn(benchmark, half.run, lambda: full.ns(1), rounds=8, to="float32")
    describe(benchmark, half.shape, isa, team, half.tokens, calls=1)
    if ratio:
        benchmark.extra_info["float32_over_bf16"] = ratio
        summary(f"prefill of 1024 tokens, {isa}, {team} thread(s): float32 takes {ratio:.2f} x bf16")
        if isa in ("avx512bf16", "amx"):
            target("float32 time over bf16 time", ratio, least=1.4)
