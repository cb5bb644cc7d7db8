"""The calls that `kda bench` and the benchmarks time: shapes of real models, inputs from one fixed seed.

States move on in place from call to call, as in a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kda
from kda import ops
from kda.config import KDAConfig
from kda.ops import aligned_empty
from kda.perf.ceilings import read_ns
from kda.perf.counts import Shape
from kda.runtime import cache_sizes
from kda.weights import tensor_shapes

SEED = 20251030
DISTINCT = 1024  # tokens that differ; a longer prompt repeats them, which costs no time to make

Floats = NDArray[np.float32]


def title(shape: Shape) -> str:
    """The shape in words: "Kimi-Linear, 20 layers"."""
    return f"{shape.name}, {shape.layers} layer{'s' if shape.layers > 1 else ''}"


def of_tokens(T: int) -> str:
    """T in words: "1 token", "1,024 tokens"."""
    return f"{T:,} token{'s' if T > 1 else ''}"


def nanoseconds(call: Callable[[], object], times: int) -> int:
    """What `times` calls take."""
    start = perf_counter_ns()
    for _ in range(times):
        call()
    return perf_counter_ns() - start


class Random:
    """Arrays of one fixed seed, float32."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(SEED)

    def normal(self, *dims: int) -> Floats:
        """Normal."""
        return self.rng.standard_normal(dims, dtype=np.float32)

    def uniform(self, *dims: int) -> Floats:
        """In [0, 1)."""
        return self.rng.random(dims, dtype=np.float32)

    def tokens(self, T: int, *dims: int) -> Floats:
        """[1, T, *dims], normal."""
        return np.resize(self.normal(1, min(T, DISTINCT), *dims), (1, T, *dims))

    def state(self, *dims: int) -> Floats:
        """A small state on a cache line."""
        state = aligned_empty(dims)
        state[:] = 0.1 * self.normal(*dims)
        return state


class Work:
    """A call to be timed: run() takes `tokens` tokens; `result` is what came out last."""

    kind: str
    name: str
    tokens: int
    result: NDArray[Any]
    parallel = True  # False: so little work that it stays on one thread

    def run(self) -> None:
        """One call."""
        raise NotImplementedError

    def ns(self, times: int) -> int:
        """Nanoseconds of `times` calls."""
        return nanoseconds(self.run, times)


class Decode(Work):
    """`T` tokens of each of `batch` sequences through every layer of a shape, token by token.

    Each layer has its own inputs and its own 64-byte aligned state [batch, HV, K, V], as in a model. left: each call
    leaves its last update of the state to the next one, as KDALayer's do.
    """

    kind = "decode"

    def __init__(self, shape: Shape, isa: str | None = None, left: bool = False, T: int = 1, batch: int = 1) -> None:
        rng = Random()
        L, H, HV, K, V = shape.layers, shape.H, shape.HV, shape.K, shape.V
        self.tokens = batch * T
        self.name = title(shape) + f", {batch} sequences" * (batch > 1) + f", {of_tokens(T)}" * (T > 1) + (
            ", updates left" * left)
        self.shape, self.isa, self.normalise = shape, isa, True
        self.q, self.k = rng.normal(L, batch, T, H, K), rng.normal(L, batch, T, H, K)
        self.v = rng.normal(L, batch, T, HV, V)
        self.g = -0.5 * rng.uniform(L, batch, T, HV, K)
        self.beta = 0.01 + 0.98 * rng.uniform(L, batch, T, HV)
        self.states = aligned_empty((L, batch, HV, K, V))
        self.states[:] = 0.1 * rng.normal(1, batch, HV, K, V)
        self.result = np.empty((L, batch, T, HV, V), np.float32)
        self.pending = [kda.no_updates(state) if left else None for state in self.states]
        self._calls = list(zip(self.q, self.k, self.v, self.g, self.beta, self.states, self.result, self.pending,
                               strict=True))

    def run(self) -> None:
        """One call for each layer; its outputs are in `result`, its state moves on in place."""
        for q, k, v, g, beta, state, o, pending in self._calls:
            kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=state, state_out=state, out=o, pending=pending,
                                    use_qk_l2norm_in_kernel=self.normalise, isa=self.isa)

    def settled(self) -> Floats:
        """The states, with whatever they lacked made."""
        for state, pending in zip(self.states, self.pending, strict=True):
            if pending is not None:
                kda.settle(state, pending, isa=self.isa)
        return self.states


class Prefill(Work):
    """T tokens of one layer in blocks, or through another function of the same arguments."""

    kind = "prefill"

    def __init__(self, shape: Shape, T: int, isa: str | None = None,
                 op: Callable[..., tuple[Any, ...]] = kda.chunk_kda) -> None:
        rng = Random()
        H, HV, K, V = shape.H, shape.HV, shape.K, shape.V
        self.name, self.tokens = f"{title(shape)}, {of_tokens(T)}", T
        self.shape, self.isa, self.op, self.normalise = shape, isa, op, True
        self.q, self.k, self.v = rng.tokens(T, H, K), rng.tokens(T, H, K), rng.tokens(T, HV, V)
        self.g = -0.5 * np.resize(rng.uniform(1, min(T, DISTINCT), HV, K), (1, T, HV, K))
        self.beta = 0.01 + 0.98 * rng.uniform(1, T, HV)
        self.state = rng.state(1, HV, K, V)
        self.result = np.empty_like(self.v)

    @staticmethod
    def nbytes(shape: Shape, T: int) -> int:
        """Bytes of q, k, v, g and o."""
        return 4 * T * (2 * shape.H * shape.K + shape.HV * (shape.K + 2 * shape.V))

    def inputs(self) -> dict[str, Floats]:
        """q, k, v, g, beta by name."""
        return {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta")}

    def run(self) -> None:
        """One call of all tokens; outputs in `result`, the state in place."""
        self.op(**self.inputs(), initial_state=self.state, state_out=self.state, out=self.result,
                use_qk_l2norm_in_kernel=self.normalise, isa=self.isa)


class Layer(Work):
    """T tokens through everything between the projections of one layer, in one pass (ops.fused_kda_layer).

    one_by_one() is the same through the public functions. The gate's parameters are such that g is near -0.1.
    """

    kind = "layer"

    def __init__(self, shape: Shape, T: int, isa: str | None = None, width: int = 4) -> None:
        rng = Random()
        H, HV, K, V = shape.H, shape.HV, shape.K, shape.V
        self.name, self.tokens = f"{title(shape)}, fused, {of_tokens(T)}", T
        self.shape, self.isa = shape, isa
        self.q, self.k, self.v = rng.tokens(T, H, K), rng.tokens(T, H, K), rng.tokens(T, HV, V)
        self.g, self.beta, self.gate = rng.tokens(T, HV, K), rng.tokens(T, HV), rng.tokens(T, HV, V)
        self.A_log = np.log(1 + 15 * rng.uniform(HV))
        self.dt_bias = rng.normal(HV * K) - 5
        self.norm_weight = 1 + 0.1 * rng.normal(V)
        channels = [H * K, H * K, HV * V]
        self.weights = [0.5 * rng.normal(D, width) for D in channels]
        self.taps = tuple(np.ascontiguousarray(w.T).reshape(-1) for w in self.weights)
        self.state = rng.state(1, HV, K, V)
        self.history = rng.normal((width - 1) * sum(channels))
        ends = np.cumsum([(width - 1) * D for D in channels])
        self.pasts = [part.reshape(1, width - 1, D)
                      for part, D in zip(np.split(self.history, ends[:-1]), channels, strict=True)]
        self.result = np.empty_like(self.v)
        self.cu_seqlens = np.array([0, T], np.int64)
        self.states = [(self.state[0], self.history)]
        self.fused = ops.fused_kda_layer(
            self.result, self.q, self.k, self.v, self.g, self.beta, self.gate, self.taps, self.norm_weight,
            self.A_log, self.dt_bias, None, isa=isa)

    def run(self) -> None:
        """One pass over all tokens; outputs in `result`, state and history in place."""
        self.fused.run(self.states, self.states, self.cu_seqlens, self.tokens > 1)

    def one_by_one(self) -> Floats:
        """The same through the public functions; the state and the histories move on here too."""
        rows: list[Any] = []
        for x, w, past in zip((self.q, self.k, self.v), self.weights, self.pasts, strict=True):
            flat, columns = x.reshape(1, self.tokens, -1), past.transpose(0, 2, 1)
            if self.tokens == 1:
                y = kda.causal_conv1d_update(flat[:, 0], columns, w, isa=self.isa)
            else:
                y, final = kda.causal_conv1d(flat, w, initial_state=columns, output_final_state=True, isa=self.isa)
                columns[:] = final
            rows.append(y.reshape(x.shape))
        delta: Callable[..., tuple[Any, ...]] = kda.chunk_kda if self.tokens > 1 else kda.fused_recurrent_kda
        o, _ = delta(*rows, self.g, self.beta, self.A_log, self.dt_bias, initial_state=self.state,
                     state_out=self.state, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                     use_beta_sigmoid_in_kernel=True, isa=self.isa)
        return kda.rms_norm_gated(o, self.gate, self.norm_weight, isa=self.isa)


class WholeLayer(Work):
    """T tokens through each of `layers` KDA layers of a model, projections included, one after the other.

    Every layer has its own weights and state, so that with enough layers they come from memory; all have the same
    values, drawn once.
    """

    kind = "whole layer"

    def __init__(self, config: KDAConfig, weight_format: str, T: int = 1, layers: int = 1, batch: int = 1,
                 rollback_window: int = 0, isa: str | None = None) -> None:
        rng = Random()
        self.config, self.weight_format, self.tokens, self.isa = config, weight_format, T * batch, isa
        model = {"kimi_linear": "Kimi-Linear", "kimi_k3": "Kimi K3"}.get(config.model_type, config.model_type)
        many = f"{layers} layer{'s' if layers > 1 else ''}"
        self.name = f"{model}, {many}, {weight_format}, {of_tokens(T * batch)}"
        tensors = {}
        for name, dims in tensor_shapes(config).items():
            w = rng.normal(*dims)
            if name.endswith("_proj.weight"):
                w *= dims[1]**-0.5
            elif name == "A_log":
                w = np.log(1 + 15 * rng.uniform(*dims))
            elif name == "dt_bias":
                w -= 4
            elif "conv1d" in name:
                w *= 0.5
            tensors[name] = w
        self.layers = [kda.KDALayer.from_tensors(config, tensors, "", weight_format, isa=isa) for _ in range(layers)]
        self.states = [layer.new_state(batch, rollback_window) for layer in self.layers]
        self.x = np.resize(rng.normal(1, min(T, DISTINCT), config.hidden_size), (batch, T, config.hidden_size))
        # read once a call: the weights and the states
        self.nbytes = sum(layer.nbytes for layer in self.layers) + layers * batch * self.state_bytes()

    def state_bytes(self) -> int:
        """Bytes of one sequence's state in one layer."""
        c = self.config
        histories = (c.conv_size - 1) * (2 * c.num_heads * c.head_dim + c.num_v_heads * c.v_head_dim)
        return 4 * (c.num_v_heads * c.head_dim * c.v_head_dim + histories)

    def projection_macs(self) -> int:
        """int8 or float32 multiply-adds of the projections of one token through one layer."""
        shapes = tensor_shapes(self.config)
        return sum(math.prod(dims) for name, dims in shapes.items() if name.endswith("_proj.weight"))

    @property
    def mac(self) -> int:
        """Multiply-adds of one run: projections and the delta rule."""
        return len(self.layers) * self.tokens * (self.projection_macs() + self.delta_macs())

    def delta_macs(self) -> int:
        """3 K V a head."""
        return 3 * self.config.num_v_heads * self.config.head_dim * self.config.v_head_dim

    def ideal_ns(self, products: float, lanes: float) -> float:
        """Nanoseconds of one run at the peaks: multiply-adds per nanosecond of the projections and of the rest."""
        per_token = self.projection_macs() / products + self.delta_macs() / lanes
        return len(self.layers) * self.tokens * per_token

    def run(self) -> None:
        """One call of each layer; the last output is in `result`, the states move on in place."""
        for layer, state in zip(self.layers, self.states, strict=True):
            self.result = layer(self.x, state)

    def projections(self) -> None:
        """What run does in its matrix products alone, on one pass of tokens."""
        rows = self.x.reshape(-1, self.config.hidden_size)
        for layer in self.layers:
            layer.project_only(rows)


class Conv(Work):
    """T tokens of the short convolution with SiLU over D channels; one token goes through the update in place."""

    kind = "epilogue"

    def __init__(self, D: int, T: int, isa: str | None = None, width: int = 4) -> None:
        rng = Random()
        self.name, self.tokens, self.isa = f"short convolution, {D:,} channels, {of_tokens(T)}", T, isa
        self.x, self.weight, self.state = rng.tokens(T, D), rng.normal(D, width), rng.normal(1, D, width - 1)
        self.parallel = T > 1
        self.result = np.empty_like(self.x)
        # x, weight and state are read, y and state written
        self.nbytes = 2 * self.x.nbytes + self.weight.nbytes + 2 * self.state.nbytes
        self.mac = T * D * width  # of the taps; SiLU is not counted

    def run(self) -> None:
        """One call: the update in place for one token, else the whole; outputs in `result`."""
        if self.tokens == 1:
            kda.causal_conv1d_update(self.x[:, 0], self.state, self.weight, out=self.result[:, 0], isa=self.isa)
        else:
            _, final = kda.causal_conv1d(self.x, self.weight, initial_state=self.state, output_final_state=True,
                                         out=self.result, isa=self.isa)
            assert final is not None
            self.state = final


class Norm(Work):
    """T tokens of the gated norm over heads of V values."""

    kind = "epilogue"

    def __init__(self, heads: int, V: int, T: int, isa: str | None = None) -> None:
        rng = Random()
        self.name, self.tokens, self.isa = f"gated norm, {heads} heads of {V}, {of_tokens(T)}", T, isa
        self.x, self.gate, self.weight = rng.tokens(T, heads, V), rng.tokens(T, heads, V), rng.normal(V)
        self.result = np.empty_like(self.x)
        self.nbytes = 4 * 3 * math.prod(self.x.shape)  # x and gate are read, y is written
        self.mac = 2 * math.prod(self.x.shape)  # squares summed, and scaled; root and sigmoid are not counted

    def run(self) -> None:
        """One call; outputs in `result`."""
        kda.rms_norm_gated(self.x, self.gate, self.weight, out=self.result, isa=self.isa)


class Product(Work):
    """T tokens times a quantised matrix [N, K] (IDOT), each call with the next of several equal ones.

    For up to 16 tokens the matrices together are twice the largest cache, so that the weights come from memory. Only
    256 rows are random; they repeat, which costs no time to make.
    """

    kind = "idot"

    def __init__(self, N: int, K: int, bits: int, T: int, isa: str | None = None, group: int = 128) -> None:
        rng = Random()
        self.name = f"Q{bits}G, {N} x {K}, {of_tokens(T)}" + ("" if group == 128 else f", groups of {group}")
        self.N, self.K, self.bits, self.group, self.tokens, self.isa = N, K, bits, group, T, isa
        small = kda.QuantizedMatrix.quantize(rng.normal(min(N, 256), K), bits, group, isa=isa)
        codes, scales = small.codes, small.scales
        codes, scales = np.resize(codes, (N, codes.shape[1])), np.resize(scales, (N, scales.shape[1]))
        largest = max(cache_sizes().values(), default=2**25)
        copies = max(2, -(-min(2 * largest, 2**29) // (codes.nbytes + scales.nbytes))) if T <= 16 else 1
        self.matrices = [kda.QuantizedMatrix.from_codes(codes, scales, (N, K), bits, group, isa=isa)
                         for _ in range(copies)]
        self.nbytes = self.matrices[0].nbytes
        self.x, self.result = rng.normal(T, K), np.empty((T, N), np.float32)
        self._turn = 0

    def run(self) -> None:
        """One product, by the next of the matrices; outputs in `result`."""
        self._turn = (self._turn + 1) % len(self.matrices)
        self.matrices[self._turn].matmul(self.x, out=self.result)

    def reader(self) -> Callable[[], int]:
        """A function that reads as many bytes as a call's weights, cycling as run() does: nanoseconds."""
        n = self.nbytes // 4
        ones = aligned_empty((len(self.matrices), n))
        ones[:] = 1
        turns = cycle(ones)
        return lambda: read_ns(next(turns), self.isa)
