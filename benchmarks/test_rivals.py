"""Decode and prefill beside what one would otherwise call: ONNX Runtime's LinearAttention, and numpy.

Same inputs, same process, in turn; every rival's o and S are compared with ours first. The keys and queries are
normalised beforehand for ONNX Runtime, whose operator takes them so; there ours does not normalise either.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import onnxruntime  # the `bench` extra brings it and onnx
import pytest
from common import ISAS, THREADS, Prefill, describe, median_ratio
from onnx import TensorProto, helper

import kda
from kda.perf import counts
from kda.perf.bench import Decode, title

LAYERS = [1, counts.KIMI_LINEAR.layers]
BETWEEN = 0.02  # seconds for the other library's threads to stop spinning


class LinearAttention:
    """com.microsoft.LinearAttention over layers of T tokens each, the state double-buffered through io_binding.

    inputs: {q, k, v, g, beta} of each layer, bound where they lie; states: [layers, 1, HV, K, V], copied.
    """

    def __init__(self, shape, T, inputs, states, team):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = team
        self.session = onnxruntime.InferenceSession(self.model(shape, T), options, providers=["CPUExecutionProvider"])
        self.o = np.zeros((shape.layers, 1, T, shape.HV, shape.V), np.float32)
        self.states = [states.copy(), np.zeros_like(states)]
        self.bindings = ([], [])  # from states 0 to 1, from 1 to 0
        self.steps = 0
        self.inputs = inputs  # keeps alive what is bound by address
        for layer, arrays in enumerate(inputs):
            for source, bindings in enumerate(self.bindings):
                binding = self.session.io_binding()
                for name, array in [*arrays.items(), ("past", self.states[source][layer])]:
                    assert array.flags.c_contiguous
                    dims = array.shape if name == "past" else (1, T, array.size // T)
                    binding.bind_input(name, "cpu", 0, np.float32, dims, array.ctypes.data)
                for name, array in (("o", self.o[layer]), ("present", self.states[1 - source][layer])):
                    dims = array.shape if name == "present" else (1, T, array.size // T)
                    binding.bind_output(name, "cpu", 0, np.float32, dims, array.ctypes.data)
                bindings.append(binding)

    @staticmethod
    def model(shape, T):
        H, K = shape.HV, shape.K

        def info(name, *dims):
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

        node = helper.make_node(
            "LinearAttention", ["q", "k", "v", "past", "g", "beta"], ["o", "present"], domain="com.microsoft",
            update_rule="gated_delta", scale=K**-0.5, q_num_heads=H, kv_num_heads=H)
        inputs = [info(name, 1, T, H * K) for name in ("q", "k", "v", "g")]
        inputs += [info("beta", 1, T, H), info("past", 1, H, K, K)]
        graph = helper.make_graph([node], "kda", inputs, [info("o", 1, T, H * K), info("present", 1, H, K, K)])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()

    @property
    def state(self):
        return self.states[self.steps % 2]

    def step(self):
        for binding in self.bindings[self.steps % 2]:
            self.session.run_with_iobinding(binding)
        self.steps += 1


def timed(step, times):
    """Nanoseconds per step, after one that wakes the threads."""
    time.sleep(BETWEEN)
    step()
    start = perf_counter_ns()
    for _ in range(times):
        step()
    return (perf_counter_ns() - start) / times


def alternate(benchmark, summary, what, shape, team, T, ours, rival, times, rounds):
    """Benchmark ours(), T tokens a call, in turn with the rival's step."""
    rival_ns = []

    def setup():
        rival_ns.append(timed(rival.step, times) / T)
        time.sleep(BETWEEN)
        ours()

    def run():
        for _ in range(times):
            ours()

    benchmark.pedantic(run, setup=setup, rounds=rounds)
    describe(benchmark, shape, ISAS[0], team, T * times)
    if benchmark.stats is not None:
        own_ns = [seconds * 1e9 / times / T for seconds in benchmark.stats.stats.data]
        name = f"ONNX Runtime {onnxruntime.__version__} LinearAttention"
        record(benchmark, summary, name, what, team, rival_ns, own_ns)


def record(benchmark, summary, rival, what, team, rival_ns, own_ns):
    """Nanoseconds per token of both, and their ratio, into extra_info and the summary."""
    ratio, us = median_ratio(rival_ns, own_ns), np.median(rival_ns) / 1e3
    benchmark.extra_info.update(rival=rival, what=what, rival_over_kda=ratio, rival_us_per_token=us,
                                us_per_token=np.median(own_ns) / 1e3)
    summary(f"{what}, {team} thread(s): {rival} takes {ratio:.2f} x kda ({us:,.0f} us/token)")


@pytest.mark.parametrize("layers", LAYERS)
def test_onnxruntime_decode(benchmark, layers, team, summary):
    shape = replace(counts.KIMI_LINEAR, layers=layers)
    ours = Decode(shape)
    ours.q[:], ours.k[:] = kda.l2norm(ours.q), kda.l2norm(ours.k)
    ours.normalise = False
    inputs = [{name: getattr(ours, name)[i] for name in ("q", "k", "v", "g", "beta")} for i in range(layers)]
    rival = LinearAttention(shape, 1, inputs, ours.states, team)
    for _ in range(3):
        ours.step()
        rival.step()
    assert np.abs(ours.o - rival.o).max() <= 1e-5 * np.abs(rival.o).max()
    assert np.abs(ours.states - rival.state).max() <= 1e-5 * np.abs(rival.state).max()
    alternate(benchmark, summary, f"decode, {title(shape)}", shape, team, 1, ours.step, rival,
              times=max(1, 20 // layers), rounds=25)


def test_onnxruntime_prefill(benchmark, team, summary):
    shape, T = counts.KIMI_LINEAR_LAYER, 1024
    ours = Prefill(shape, T)
    rival = LinearAttention(shape, T, [ours.inputs()], ours.state[None], team)
    ours.run()
    rival.step()
    assert np.abs(ours.o - rival.o[0]).max() <= 1e-5 * np.abs(rival.o).max()
    assert np.abs(ours.state - rival.state[0]).max() <= 1e-5 * np.abs(rival.state).max()
    alternate(benchmark, summary, f"prefill of {T} tokens, {title(shape)}", shape, team, T, ours.run, rival,
              times=1, rounds=9)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("team", THREADS)
def test_numpy(benchmark, layers, team, summary):
    env = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    env |= {"OPENBLAS_NUM_THREADS": str(team)}
    rounds = 1 if benchmark.disabled else 20
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
    what = f"decode, {title(shape)}"
    record(benchmark, summary, f"numpy {np.__version__}", what, team, got["numpy_ns"], got["kda_ns"])
