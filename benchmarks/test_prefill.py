"""1024 tokens of one Kimi-Linear layer in blocks: bound by multiply-adds, 3 * K * V per token and head."""

from functools import partial

import numpy as np
import pytest
from common import Prefill, beside_ceilings

import kda
from kda.perf import counts


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("bf16", 2**-6)])
def test_prefill(benchmark, isa, team, precision, bound):
    prefill = Prefill(counts.KIMI_LINEAR_LAYER, 1024, partial(kda.chunk_kda, precision=precision), isa)
    want, _ = kda.fused_recurrent_kda(**prefill.inputs(), initial_state=prefill.state, isa=isa)
    prefill.run()
    assert np.abs(prefill.o - want).max() <= bound * np.abs(want).max()
    got = beside_ceilings(benchmark, prefill.shape, isa, team, prefill.run, prefill.state, prefill.T, rounds=8)
    if got:
        # the share of the peak by the definition's multiply-adds; share_of_fma counts the decode kernel's lanes
        benchmark.extra_info["share_of_fma_by_definition"] = got["share_of_fma"] * 3 / counts.LANE_OPS_PER_ELEMENT
