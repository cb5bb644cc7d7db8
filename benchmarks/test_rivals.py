"""The decode step beside what one would otherwise call: ONNX Runtime's LinearAttention, and numpy.

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
from common import ISAS, THREADS, describe, median_ratio
from onnx import TensorProto, helper

import kda
from kda.perf import counts
from kda.perf.bench import Decode, title

LAYERS = [1, counts.KIMI_LINEAR.layers]
BETWEEN = 0.02  # seconds for the other library's threads to stop spinning


class OnnxDecode:
    """com.microsoft.LinearAttention over the layers of a Decode, the state double-buffered through io_binding."""

    def __init__(self, decode, team):
        shape = decode.shape
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = team
        session = onnxruntime.InferenceSession(self.model(shape), options, providers=["CPUExecutionProvider"])
        self.o = np.zeros_like(decode.o)
        self.states = [decode.states.copy(), np.zeros_like(decode.states)]
        self.bindings = ([], [])  # from state 0 to 1, from 1 to 0
        self.tokens = 0
        self.session = session
        for layer in range(shape.layers):
            inputs = {name: getattr(decode, name)[layer].reshape(1, 1, -1) for name in ("q", "k", "v", "g", "beta")}
            for source, bindings in enumerate(self.bindings):
                binding = session.io_binding()
                for name, array in [*inputs.items(), ("past", self.states[source][layer])]:
                    binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
                outputs = [("o", self.o[layer].reshape(1, 1, -1)), ("present", self.states[1 - source][layer])]
                for name, array in outputs:
                    binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
                bindings.append(binding)
        self.decode = decode  # its inputs are bound by address

    @staticmethod
    def model(shape):
        H, K = shape.HV, shape.K

        def info(name, *dims):
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

        node = helper.make_node(
            "LinearAttention", ["q", "k", "v", "past", "g", "beta"], ["o", "present"], domain="com.microsoft",
            update_rule="gated_delta", scale=K**-0.5, q_num_heads=H, kv_num_heads=H)
        inputs = [info(name, 1, 1, H * K) for name in ("q", "k", "v", "g")]
        inputs += [info("beta", 1, 1, H), info("past", 1, H, K, K)]
        graph = helper.make_graph([node], "kda", inputs, [info("o", 1, 1, H * K), info("present", 1, H, K, K)])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()

    @property
    def state(self):
        return self.states[self.tokens % 2]

    def step(self):
        for binding in self.bindings[self.tokens % 2]:
            self.session.run_with_iobinding(binding)
        self.tokens += 1


def timed(step, tokens):
    """Nanoseconds per token after one that wakes the threads."""
    time.sleep(BETWEEN)
    step()
    start = perf_counter_ns()
    for _ in range(tokens):
        step()
    return (perf_counter_ns() - start) / tokens


@pytest.mark.parametrize("layers", LAYERS)
def test_onnxruntime(benchmark, layers, team, summary):
    shape = replace(counts.KIMI_LINEAR, layers=layers)
    ours = Decode(shape)
    ours.q[:], ours.k[:] = kda.l2norm(ours.q), kda.l2norm(ours.k)
    rival = OnnxDecode(ours, team)
    ours.normalise = False
    for _ in range(3):
        ours.step()
        rival.step()
    assert np.abs(ours.o - rival.o).max() <= 1e-5 * np.abs(rival.o).max()
    assert np.abs(ours.states - rival.state).max() <= 1e-5 * np.abs(rival.state).max()

    tokens = max(1, 20 // shape.layers)
    rival_ns = []

    def setup():
        rival_ns.append(timed(rival.step, tokens))
        time.sleep(BETWEEN)
        ours.step()

    benchmark.pedantic(lambda: ours.ns(tokens), setup=setup, rounds=25)
    describe(benchmark, shape, ISAS[0], team, tokens)
    if benchmark.stats is not None:
        step_ns = [seconds * 1e9 / tokens for seconds in benchmark.stats.stats.data]
        ratio = median_ratio(rival_ns, step_ns)
        benchmark.extra_info.update(
            rival=f"ONNX Runtime {onnxruntime.__version__} LinearAttention", rival_over_kda=ratio,
            rival_us_per_token=np.median(rival_ns) / 1e3, us_per_token=np.median(step_ns) / 1e3)
        summary(f"{title(shape)}, {team} thread(s): ONNX Runtime takes {ratio:.2f} x kda "
                f"({np.median(rival_ns) / 1e3:,.0f} us)")


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
    ratio = median_ratio(got["numpy_ns"], got["kda_ns"])
    shape = replace(counts.KIMI_LINEAR, layers=layers)
    describe(benchmark, shape, ISAS[0], team, 1)
    benchmark.extra_info.update(rival=f"numpy {np.__version__}", rival_us_per_token=np.median(got["numpy_ns"]) / 1e3,
                                us_per_token=np.median(got["kda_ns"]) / 1e3, rival_over_kda=ratio)
    if not benchmark.disabled:
        summary(f"{title(shape)}, {team} thread(s): numpy takes {ratio:.1f} x kda "
                f"({np.median(got['numpy_ns']) / 1e3:,.0f} us)")
