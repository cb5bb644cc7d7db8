"""A decode step in plain numpy float32, in turn with ours; prints its times and errors as JSON.

    python benchmarks/numpy_rival.py LAYERS THREADS ROUNDS

A process of its own, so that OpenBLAS reads an environment without OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE and
with OPENBLAS_NUM_THREADS set, before numpy is imported.
"""

import json
import sys
from dataclasses import replace
from time import perf_counter_ns

import numpy as np

import kda
from kda import reference
from kda.perf import counts
from kda.perf.work import Decode


class NumpyDecode:
    """The same tokens through numpy: batched matrix products and in-place elementwise passes, nothing allocated
    of the state's size after the first call."""

    def __init__(self, decode):
        self.states = decode.states.copy()
        self.o = np.empty_like(decode.result)
        self.update = np.empty(decode.states.shape[2:], np.float32)
        self.inputs = [np.ascontiguousarray(x[:, 0, 0]) for x in (decode.q, decode.k, decode.v, decode.g, decode.beta)]
        self.scale = np.float32(decode.shape.K**-0.5)

    def run(self):
        eps = np.float32(1e-6)
        for layer, (q, k, v, g, beta) in enumerate(zip(*self.inputs, strict=True)):
            S = self.states[layer, 0]
            q = q * (self.scale / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + eps))
            k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + eps)
            S *= np.exp(g)[:, :, None]
            u = np.matmul(k[:, None, :], S)[:, 0]
            d = beta[:, None] * (v - u)
            np.multiply(k[:, :, None], d[:, None, :], out=self.update)
            S += self.update
            np.matmul(q[:, None, :], S, out=self.o[layer, 0, 0][:, None, :])

    def ns(self, tokens):
        start = perf_counter_ns()
        for _ in range(tokens):
            self.run()
        return perf_counter_ns() - start


def main():
    layers, team, rounds = map(int, sys.argv[1:])
    kda.set_num_threads(team)
    ours = Decode(replace(counts.KIMI_LINEAR, layers=layers), left=True)
    numpy = NumpyDecode(ours)
    inputs = {name: getattr(ours, name)[0] for name in ("q", "k", "v", "g", "beta")}
    want, _ = reference.fused_recurrent_kda(**inputs, initial_state=ours.states[0], use_qk_l2norm_in_kernel=True)
    ours.run()
    numpy.run()
    o_error = np.abs(ours.result - numpy.o).max() / np.abs(numpy.o).max()
    S_error = np.abs(ours.settled() - numpy.states).max() / np.abs(numpy.states).max()
    error, rival_error = (np.abs(x - want).max() / np.abs(want).max() for x in (ours.result[0], numpy.o[0]))
    tokens = max(1, 20 // layers)
    pairs = [(numpy.ns(tokens) / tokens, ours.ns(tokens) / tokens) for _ in range(rounds)]
    print(json.dumps({"o_error": float(o_error), "S_error": float(S_error), "threads": team,
                      "error": float(error), "rival_error": float(rival_error),
                      "numpy_ns": [n for n, _ in pairs], "kda_ns": [k for _, k in pairs]}))


if __name__ == "__main__":
    main()
