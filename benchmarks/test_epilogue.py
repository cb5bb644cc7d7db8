"""The short convolution, the gated norm, and the pass that fuses them with the delta rule."""

import numpy as np
import pytest
from common import ISAS, assert_near, beside_rival, counted, describe, errors, in_turn
from ort import CausalConv

from kda import reference
from kda.perf import counts
from kda.perf.ceilings import copier
from kda.perf.work import Conv, Layer, Norm, nanoseconds, of_tokens

CHANNELS = counts.K3_LAYER.HV * counts.K3_LAYER.K


@pytest.mark.parametrize("T", [1, 1024])
def test_short_convolution(benchmark, T, team, target, summary):
    ours = Conv(CHANNELS, T)
    rival = CausalConv(ours.x, ours.weight, ours.state, team)
    past = ours.state
    for _ in range(2):
        want, past = reference.causal_conv1d(ours.x.reshape(1, T, CHANNELS), ours.weight, None, "silu", past, True)
        ours.run()
        rival.step()
    assert_near(ours.result, rival.y.transpose(0, 2, 1), 1e-5)
    assert np.array_equal(ours.state, rival.state)  # raw inputs: kept, not computed
    errors(benchmark, want, ours.result.reshape(want.shape), rival.y.transpose(0, 2, 1))
    times = 100 if T == 1 else 1
    ratio = beside_rival(benchmark, summary, ours.name, team, ours, rival, times, rounds=11)
    counted(benchmark, ISAS[0], team, times * T, {"D": CHANNELS, "W": 4}, times * ours.mac, times * ours.nbytes,
            ours.nbytes)
    if ratio:
        target("ONNX Runtime's time over ours", ratio, least=10 if T == 1 else 5)


def test_gated_norm(benchmark, isa, team, target, summary):
    ours = Norm(counts.KIMI_LINEAR_LAYER.HV, counts.KIMI_LINEAR_LAYER.V, 1024, isa)
    ours.run()
    assert_near(ours.result[:, :8], reference.rms_norm_gated(ours.x[:, :8], ours.gate[:, :8], ours.weight), 2e-6)
    with copier(ours.nbytes, team) as copy_ns:
        copy_ns()
        ratio = in_turn(benchmark, ours.run, copy_ns, rounds=30, to="copy")
    counted(benchmark, isa, team, ours.tokens, {"heads": ours.x.shape[2], "V": ours.x.shape[3]}, ours.mac, ours.nbytes,
            ours.nbytes)
    benchmark.extra_info.update(kind="epilogue", row=f"epilogue: {ours.name}")
    if ratio:
        benchmark.extra_info["share_of_copy"] = ratio
        summary(f"{ours.name}, {isa}, {team} thread(s): {1 / ratio:.2f} x a copy of the same bytes")
        if isa != "scalar":
            target("time over a copy of the same bytes", 1 / ratio, most=1.5)


@pytest.mark.parametrize("T", [1, 1024])
def test_fused_layer(benchmark, T, team, summary):
    """One pass in turn with the public functions one by one."""
    shape = counts.KIMI_LINEAR_LAYER
    fused, plain = Layer(shape, T), Layer(shape, T)
    fused.run()
    assert_near(fused.result, plain.one_by_one(), 4e-6)
    assert_near(fused.state, plain.state, 2e-6)
    times = 20 if T == 1 else 1
    ratio = in_turn(benchmark, lambda: fused.ns(times), lambda: nanoseconds(plain.one_by_one, times),
                    rounds=20 if T == 1 else 8, to="the functions one by one")
    describe(benchmark, shape, ISAS[0], team, times * T, calls=times)
    benchmark.extra_info["kind"] = "layer"
    if ratio:
        benchmark.extra_info["functions_over_fused"] = ratio
        summary(f"{shape.name}, everything between the projections, {of_tokens(T)}, {team} thread(s): "
                f"the functions one by one take {ratio:.2f} x the fused pass")
