"""What ONNX Runtime offers for the same work, without copies: LinearAttention, CausalConvWithState, MatMulNBits."""

import numpy as np
import onnxruntime  # the `bench` extra brings it and onnx
from onnx import TensorProto, helper, numpy_helper

VERSION = f"ONNX Runtime {onnxruntime.__version__}"


def open_session(op, inputs, outputs, team, **attributes):
    """A session of one com.microsoft operator; inputs and outputs: {name: dimensions}, name "" for one left out."""
    def infos(dims):
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, d) for name, d in dims.items() if name]

    node = helper.make_node(op, list(inputs), list(outputs), domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "kda", infos(inputs), infos(outputs))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = team
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def bind(session, inputs, outputs):
    """An io_binding of arrays where they lie; inputs and outputs: {name: (array, dimensions)}."""
    binding = session.io_binding()
    for bound, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, (array, dims) in arrays.items():
            assert array.flags.c_contiguous
            bound(name, "cpu", 0, np.float32, dims, array.ctypes.data)
    return binding


class Stateful:
    """An operator whose state is double-buffered: one step reads states[0] and writes states[1], the next returns."""

    def __init__(self, session, state):
        self.session, self.states, self.steps = session, [state.copy(), np.zeros_like(state)], 0
        self.bindings = ([], [])  # from states 0 to 1, from 1 to 0

    @property
    def state(self):
        return self.states[self.steps % 2]

    def step(self):
        for binding in self.bindings[self.steps % 2]:
            self.session.run_with_iobinding(binding)
        self.steps += 1


class LinearAttention(Stateful):
    """Layers of T tokens each. inputs: {q, k, v, g, beta} of each layer; states: [layers, 1, HV, K, V], copied."""

    NAME = f"{VERSION} LinearAttention"

    def __init__(self, shape, T, inputs, states, team):
        H, K = shape.HV, shape.K
        flat, square = (1, T, H * K), (1, H, K, K)
        session = open_session(
            "LinearAttention", {"q": flat, "k": flat, "v": flat, "past": square, "g": flat, "beta": (1, T, H)},
            {"o": flat, "present": square}, team, update_rule="gated_delta", scale=K**-0.5, q_num_heads=H,
            kv_num_heads=H)
        super().__init__(session, states)
        self.inputs = inputs  # keeps alive what is bound by address
        self.o = np.zeros((shape.layers, 1, T, H, K), np.float32)
        for layer, arrays in enumerate(inputs):
            ready = {name: (x, (1, T, H) if name == "beta" else flat) for name, x in arrays.items()}
            for source, bindings in enumerate(self.bindings):
                bindings.append(bind(
                    session, ready | {"past": (self.states[source][layer], square)},
                    {"o": (self.o[layer], flat), "present": (self.states[1 - source][layer], square)}))


class CausalConv(Stateful):
    """The short convolution with SiLU, weight [C, W] and state [1, C, W - 1] as kda has them. x [1, T, C] is turned
    into [1, C, T] beforehand: the operator is some three times faster so than with channels_last=1."""

    NAME = f"{VERSION} CausalConvWithState"

    def __init__(self, x, weight, state, team):
        x = np.ascontiguousarray(x.transpose(0, 2, 1))
        taps = (len(weight), 1, weight.shape[1])
        session = open_session(
            "CausalConvWithState", {"x": x.shape, "w": taps, "": (), "past": state.shape},
            {"y": x.shape, "present": state.shape}, team, activation="silu", channels_last=0)
        super().__init__(session, state)
        self.inputs = x, weight  # keeps alive what is bound by address
        self.y = np.zeros_like(x)
        for source, bindings in enumerate(self.bindings):
            bindings.append(bind(
                session, {"x": (x, x.shape), "w": (weight, taps), "past": (self.states[source], state.shape)},
                {"y": (self.y, x.shape), "present": (self.states[1 - source], state.shape)}))


class MatMulNBits:
    """x [T, K] times w [N, K], quantised in blocks of 128 to 8 or 4 bits, with int8 activations (accuracy_level=4).

    A step multiplies by each of `copies` equal matrices: constants of the model, which the operator packs once.
    """

    NAME = f"{VERSION} MatMulNBits"

    def __init__(self, w, bits, copies, team, block=128):
        N, K = w.shape
        middle = 1 << (bits - 1)  # the operator's zero point where none is given
        blocks = w.reshape(N, K // block, block)
        scales = np.abs(blocks).max(2) / np.float32(middle - 1)
        codes = (np.rint(blocks / scales[:, :, None]) + middle).astype(np.uint8)
        if bits == 4:
            codes = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
        constants, nodes = [], []
        for i in range(copies):
            constants += [numpy_helper.from_array(codes, f"codes{i}"), numpy_helper.from_array(scales, f"scales{i}")]
            nodes.append(helper.make_node(
                "MatMulNBits", ["x", f"codes{i}", f"scales{i}"], [f"y{i}"], domain="com.microsoft", K=K, N=N,
                bits=bits, block_size=block, accuracy_level=4))
        self.names = [f"y{i}" for i in range(copies)]
        graph = helper.make_graph(
            nodes, "kda", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("T", K))],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("T", N)) for name in self.names], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = team
        # equal nodes stay apart: nothing may be shared between the copies
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(
            helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(), options,
            providers=["CPUExecutionProvider"])
        self.N = N

    def take(self, x):
        """From now on a step multiplies x, into y [T, N], which every copy writes."""
        self.x, self.y = x, np.zeros((len(x), self.N), np.float32)
        self.binding = bind(self.session, {"x": (x, x.shape)}, {name: (self.y, self.y.shape) for name in self.names})

    def step(self):
        self.session.run_with_iobinding(self.binding)
