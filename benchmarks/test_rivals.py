"""Decode and prefill beside what one would otherwise call: ONNX Runtime's LinearAttention, and numpy.

Same inputs, same process, in turn; every rival's o and S are compared with ours first. The keys and queries are
normalised beforehand for ONNX Runtime, whose operator takes them so; there ours does not normalise either.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from common import ISAS, THREADS, assert_near, beside_rival, describe, disabled, errors, record
from ort import LinearAttention

import kda
from kda import reference
from kda.perf import counts
from kda.perf.work import Decode, Prefill, of_tokens, title

LAYERS = [1, counts.KIMI_LINEAR.layers]


def normalised(work):
    """`work` with q and k normalised beforehand."""
    work.q[:], work.k[:] = kda.l2norm(work.q), kda.l2norm(work.k)
    work.normalise = False
    return work


@pytest.mark.parametrize("layers", LAYERS)
def test_onnxruntime_decode(benchmark, layers, team, summary):
    shape = replace(counts.KIMI_LINEAR, layers=layers)
    ours = normalised(Decode(shape, left=True))
    inputs = [{name: getattr(ours, name)[i] for name in ("q", "k", "v", "g", "beta")} for i in range(layers)]
    rival = LinearAttention(shape, 1, inputs, ours.states, team)
    S = ours.states[-1].copy()
    for _ in range(3):
        ours.run()
        rival.step()
        want, S = reference.fused_recurrent_kda(**inputs[-1], initial_state=S, output_final_state=True)
    assert_near(ours.result, rival.o, 1e-5)
    assert_near(ours.settled(), rival.state, 1e-5)
    errors(benchmark, want, ours.result[-1], rival.o[-1])
    beside_rival(benchmark, summary, f"decode, {ours.name}", team, ours, rival, times=max(1, 20 // layers), rounds=25)
    describe(benchmark, shape, ISAS[0], team, max(1, 20 // layers))


def test_onnxruntime_prefill(benchmark, team, target, summary):
    shape, T = counts.KIMI_LINEAR_LAYER, 1024
    ours = normalised(Prefill(shape, T))
    rival = LinearAttention(shape, T, [ours.inputs()], ours.state[None], team)
    want, _ = reference.fused_recurrent_kda(**ours.inputs(), initial_state=ours.state)
    ours.run()
    rival.step()
    assert_near(ours.result, rival.o[0], 1e-5)
    assert_near(ours.state, rival.state[0], 1e-5)
    errors(benchmark, want, ours.result, rival.o[0])
    what = f"prefill of {of_tokens(T)}, {title(shape)}"
    ratio = beside_rival(benchmark, summary, what, team, ours, rival, times=1, rounds=9)
    describe(benchmark, shape, ISAS[0], team, T, calls=1)
    if ratio and ISAS[0].startswith("avx512"):
        target("ONNX Runtime's time over ours", ratio, least=2.4)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("team", THREADS)
def test_numpy(benchmark, layers, team, summary):
    env = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    env |= {"OPENBLAS_NUM_THREADS": str(team)}
    rounds = 1 if disabled(benchmark) else 20
    script = Path(__file__).with_name("numpy_rival.py")

    def run():
        done = subprocess.run([sys.executable, script, str(layers), str(team), str(rounds)], env=env, check=True,
                              stdout=subprocess.PIPE)
        return json.loads(done.stdout)

    got = benchmark.pedantic(run, rounds=1)
    assert got["o_error"] <= 1e-5
    assert got["S_error"] <= 1e-5
    shape = replace(counts.KIMI_LINEAR, layers=layers)
    describe(benchmark, shape, ISAS[0], team, 1)
    benchmark.extra_info.update(error=got["error"], rival_error=got["rival_error"])
    what = f"decode, {title(shape)}, updates left"
    if not disabled(benchmark):
        record(benchmark, summary, f"numpy {np.__version__}", what, team, got["numpy_ns"], got["kda_ns"])
