"""Does every kernel of this machine compute KDA, and IDOT? `kda check` asks on seeded inputs and on stored results.

Every case is compared with the float64 reference, or with the float32 results that the kernels of
flash-linear-attention 0.6.0 gave (data/golden); the delta rule in both forms, token by token and in blocks. An
error is the largest difference divided by the largest value expected; NaN fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kda import ops, reference
from kda.config import KDAConfig
from kda.layer import KDALayer
from kda.quant import QuantizedMatrix
from kda.runtime import get_num_threads, isas, set_num_threads
from kda.weights import tensor_shapes

GOLDEN = ["softplus_D60_noh0", "softplus_gva_T70", "lb5_varlen"]
FLOAT32 = 2e-6  # ordinary inputs and stored results
HARD = 1e-5     # resets, correlated keys, long memories
BF16 = 2.0**-6  # precision="bf16": products with the state take operands of 8 bits
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # what an output loses when it is stored in 16 bits

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A call of the function `op` of kda, the output o and state S it should give, and the largest relative errors.

    S is None for functions without a state.
    """

    name: str
    op: str
    args: dict[str, Any]
    o: Array
    S: Array | None = None
    o_bound: float = FLOAT32
    S_bound: float = FLOAT32

    def run(self, isa: str) -> tuple[Any, Any]:
        """(o, S) of one ISA; an update in place works on a copy."""
        op, args = getattr(ops, self.op), dict(self.args)
        if self.op == "causal_conv1d_update":
            args["state"] = args["state"].copy()
            return op(**args, isa=isa), args["state"]
        return (op(**args, isa=isa), None) if self.S is None else op(**args, isa=isa)


class Product(Case):
    """A product with a quantised matrix: op "matmul", args x and those of QuantizedMatrix.from_codes."""

    def run(self, isa: str) -> tuple[Any, Any]:
        """(y, None) of one ISA."""
        args = dict(self.args)
        x = args.pop("x")
        return QuantizedMatrix.from_codes(**args, isa=isa).matmul(x), None


class Layer(Case):
    """A whole layer, prefill and then token by token: op "layer", args config, tensors, x and the length of the
    prompt. S is the recurrent state."""

    def run(self, isa: str) -> tuple[Any, Any]:
        """(y, S) of one ISA."""
        x, prompt = self.args["x"], self.args["prompt"]
        layer = KDALayer.from_tensors(self.args["config"], self.args["tensors"], "", recurrent_max=16, isa=isa)
        state = layer.new_state(len(x))
        parts = [layer(x[:, :prompt], state), *(layer(x[:, t:t + 1], state) for t in range(prompt, x.shape[1]))]
        return np.concatenate(parts, axis=1), state.recurrent


@dataclass(frozen=True)
class Result:
    """How far one ISA was from one case; the errors are relative to the largest expected value."""

    case: str
    isa: str
    o_error: float
    o_bound: float
    S_error: float
    S_bound: float

    @property
    def passed(self) -> bool:
        """False for NaN as well: no comparison with NaN holds."""
        return self.o_error <= self.o_bound and self.S_error <= self.S_bound


def error(got: Any, want: Array | None) -> float:
    """max|got - want| / max|want|, NaN if got holds any, inf for a wrong shape or a missing result."""
    if want is None:
        return 0.0
    if got is None or np.shape(got) != want.shape:
        return math.inf
    got = np.asarray(got, np.float64)
    return float(np.abs(got - want).max(initial=0.0) / max(np.abs(want).max(initial=0.0), 1e-30))


FORMS = {"fused_recurrent_kda": "", "chunk_kda": ", in blocks"}


def golden(name: str) -> Iterator[Case]:
    """The stored results of flash-linear-attention's two kernels; norm, gate and sigmoid in the kernel."""
    with files("kda").joinpath("data", "golden", f"{name}.npz").open("rb") as file, np.load(file) as stored:
        d = dict(stored)
    bound = float(d["lower_bound"])
    args = {name: d[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    args |= {
        "initial_state": d.get("initial_state"), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": bool(d["neg"]), "lower_bound": None if math.isnan(bound) else bound,
        "cu_seqlens": d["cu_seqlens"] if d["cu_seqlens"].size else None,
    }
    for op, suffix in (("fused_recurrent_kda", "rec"), ("chunk_kda", "chunk")):
        yield Case(f"stored: {name}{FORMS[op]}", op, args, d[f"o_{suffix}"], d[f"s_{suffix}"])


def seeded() -> Iterator[tuple[str, dict[str, Any], float]]:
    """(name, arguments of fused_recurrent_kda, bound) of the inputs made here, always the same ones."""
    rng = np.random.default_rng(7)

    def inputs(B: int = 1, T: int = 24, H: int = 2, HV: int | None = None, K: int = 64, V: int | None = None,
               N: int | None = None, **more: Any) -> dict[str, Any]:
        """q, k, v, g, beta and the state of fused_recurrent_kda, normal or uniform, and `more` arguments."""
        HV, V = HV or H, V or K

        def normal(*dims: int) -> Array:
            """Normal float32."""
            return rng.standard_normal(dims).astype(np.float32)

        args = {
            "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V),
            "g": -0.5 * rng.random((B, T, HV, K), dtype=np.float32), "beta": rng.random((B, T, HV), dtype=np.float32),
            "initial_state": normal(N or B, HV, K, V), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
        }
        return args | more

    def raw(scale: float = 1.0, **more: Any) -> dict[str, Any]:
        """inputs with the gate and the sigmoid left to the kernel."""
        args = inputs(**more)
        B, T, HV, K = args["g"].shape
        return args | {
            "g": scale * rng.standard_normal((B, T, HV, K)).astype(np.float32),
            "beta": rng.standard_normal((B, T, HV)).astype(np.float32),
            "A_log": rng.standard_normal(HV).astype(np.float32),
            "dt_bias": rng.standard_normal(HV * K).astype(np.float32),
            "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        }

    yield "decode, 32 heads of 128 x 128", inputs(T=1, H=32, K=128), FLOAT32
    yield "64 tokens, 4 heads of 128 x 128", inputs(T=64, H=4, K=128), FLOAT32
    yield "softplus gate", raw(), FLOAT32
    yield "softplus gate, logits to 300", raw(scale=100.0), FLOAT32
    yield "bounded gate", raw(lower_bound=-5.0), FLOAT32
    yield "bounded gate, no A_log", raw(lower_bound=-5.0) | {"A_log": None}, FLOAT32
    yield "beta in (0, 2)", raw(allow_neg_eigval=True), FLOAT32
    yield "GVA, 6 value heads on 2", inputs(H=2, HV=6), FLOAT32
    yield "K 60, V 100", inputs(B=2, K=60, V=100), FLOAT32
    yield "K 33, V 17, state V first", inputs(K=33, V=17) | {
        "initial_state": rng.standard_normal((1, 2, 17, 33)).astype(np.float32), "state_v_first": True}, FLOAT32
    yield "varlen, one sequence empty", inputs(T=60, N=4, cu_seqlens=np.array([0, 15, 15, 17, 60])), FLOAT32
    for dtype in (np.float16, ml_dtypes.bfloat16):
        args = raw(lower_bound=-5.0)
        yield np.dtype(dtype).name, args | {n: args[n].astype(dtype) for n in ("q", "k", "v", "g", "beta")}, FLOAT32

    args = inputs(T=64, K=32, V=48)
    args["g"][:, 8::16] = -np.inf
    args["g"][:, 4::16, :, ::2] = -1e6
    yield "hard resets, g to -1e6 and -inf", args, HARD
    args = inputs(T=64, K=64)
    args["k"][:] = args["k"][:, :1] + 1e-3 * args["k"]
    args["beta"][:] = 0.98
    args["g"][:] = 0.0
    yield "keys nearly the same, no decay", args, HARD
    args = inputs(T=2000, H=1, K=32, V=32)
    args["g"] *= 1e-4
    yield "2000 tokens, slow decay", args, HARD


def epilogues() -> Iterator[Case]:
    """The short convolution and the gated norm."""
    rng = np.random.default_rng(8)

    def normal(*dims: int) -> Array:
        """Normal float32."""
        return rng.standard_normal(dims).astype(np.float32)

    x, weight, bias, past = normal(1, 50, 200), normal(200, 4), normal(200), normal(3, 200, 3)
    args: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "initial_state": past, "output_final_state": True,
                            "cu_seqlens": np.array([0, 2, 2, 50])}
    yield Case("short convolution, packed", "causal_conv1d", args, *reference.causal_conv1d(**args))
    args = {"x": normal(3, 200), "state": past, "weight": weight, "bias": bias}
    state = past.astype(np.float64)
    yield Case("short convolution, one token", "causal_conv1d_update", args,
               reference.causal_conv1d_update(**(args | {"state": state})), state)
    for activation in ("sigmoid", "silu"):
        args = {"x": normal(5, 6, 100), "gate": 4 * normal(5, 6, 100), "weight": normal(100), "activation": activation}
        yield Case(f"gated norm, {activation}", "rms_norm_gated", args, reference.rms_norm_gated(**args))


def products() -> Iterator[Case]:
    """Products with quantised matrices of an odd shape, for one token and for blocks of them.

    Codes of every value, drawn here: quantising would leave some out.
    """
    rng = np.random.default_rng(9)
    N, K, T = 77, 333, 13
    for bits in (8, 4):
        for group in (128, 32):
            groups = -(-K // group)
            scales = rng.uniform(-0.1, 0.1, (N, groups)).astype(np.float16)
            codes = rng.integers(0, 256, (N, groups * group * bits // 8)).astype(np.int8 if bits == 8 else np.uint8)
            x = rng.standard_normal((T, K)).astype(np.float32)
            want = reference.quantized_matmul(x, codes, scales, bits)
            for tokens in (1, T):
                args = {"x": x[:tokens], "codes": codes, "scales": scales, "shape": (N, K), "bits": bits,
                        "group_size": group}
                yield Product(f"IDOT, {bits} bits, groups of {group}, {tokens} token{'s' if tokens > 1 else ''}",
                              "matmul", args, want[:tokens])


def layers() -> Iterator[Case]:
    """Whole layers with float32 weights: Kimi-Linear's form and K3's."""
    rng = np.random.default_rng(10)
    forms = {"softplus gate": KDAConfig("kimi_linear", 96, 1, (0,), 2, 4, 32, 24, 4),
             "bounded gate, full-rank output gate": KDAConfig("kimi_k3", 96, 1, (0,), 2, 2, 32, 24, 4, -5.0, True)}
    for name, c in forms.items():
        tensors = {}
        for tensor, dims in tensor_shapes(c).items():
            scale = dims[1]**-0.5 if tensor.endswith("_proj.weight") else 0.5
            tensors[tensor] = (rng.standard_normal(dims) * scale).astype(np.float32)
        x = rng.standard_normal((2, 41, c.hidden_size)).astype(np.float32)
        y, (S, _) = reference.kda_layer(x, tensors, c.num_heads, c.num_v_heads, c.gate_lower_bound, c.norm_eps)
        yield Layer(f"whole layer, {name}", "layer", {"config": c, "tensors": tensors, "x": x, "prompt": 37}, y, S,
                    2 * FLOAT32, 2 * FLOAT32)


@cache
def cases() -> tuple[Case, ...]:
    """The stored results, then the seeded inputs with their float64 results; computed once."""
    found = [case for name in GOLDEN for case in golden(name)]
    for name, args, bound in seeded():
        o, S = reference.fused_recurrent_kda(**args)
        for op, form in FORMS.items():
            if args["q"].shape[1] > 1 or op == "fused_recurrent_kda":
                found.append(Case(name + form, op, args, o, S, bound + ROUNDED.get(args["v"].dtype.name, 0.0), bound))
        if "64 tokens" in name:
            args = args | {"precision": "bf16"}
            found.append(Case(f"{name}, in blocks of bf16", "chunk_kda", args, o, S, BF16, BF16))
    return (*found, *epilogues(), *products(), *layers())


def run(names: list[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None) -> tuple[list[Result], float]:
    """Every case on every ISA of `names` (default: all that run here), and the seconds it took.

    The last rows compare 1 thread with all of them, and IDOT with the scalar kernels, bit for bit.
    """
    names = names or [name for name, runs_here in isas().items() if runs_here]
    start, results = perf_counter(), []
    for done, case in enumerate(cases()):
        if progress:
            progress(done, len(cases()), case.name)
        for isa in names:
            o, S = case.run(isa)
            results.append(Result(case.name, isa, error(o, case.o), case.o_bound, error(S, case.S), case.S_bound))
    large = [case for case in cases() if "64 tokens" in case.name]
    results += [same_on_all_threads(case, isa) for case in large for isa in names]
    results += [same_on_every_isa(case, isa) for case in cases() if isinstance(case, Product) for isa in names]
    if progress:
        progress(len(cases()), len(cases()), "done")
    return results, perf_counter() - start


def same_on_all_threads(case: Case, isa: str) -> Result:
    """Error 0 if a case gives the same bits on 1 thread and on all."""
    before = get_num_threads()
    o, S = case.run(isa)
    set_num_threads(1)
    try:
        o1, S1 = case.run(isa)
    finally:
        set_num_threads(before)
    return Result(f"{case.name}: 1 thread = {before} threads", isa, error(o1, o), 0.0, error(S1, S), 0.0)


def same_on_every_isa(case: Case, isa: str) -> Result:
    """Error 0 if a case gives the same bits as the scalar kernels, infinity if not."""
    (o, _), (scalar, _) = case.run(isa), case.run("scalar")
    return Result(f"{case.name}: same bits as scalar", isa, 0.0 if o.tobytes() == scalar.tobytes() else math.inf, 0.0,
                  0.0, 0.0)


def render(results: list[Result], seconds: float) -> str:
    """The table case x ISA: relative error of o and of S against its bound."""
    names = list(dict.fromkeys(r.isa for r in results))
    table = [["", *(f"{isa}: o, S" for isa in names), "bound: o, S", ""]]
    for case in dict.fromkeys(r.case for r in results):
        row = [r for r in results if r.case == case]
        failed = [r.isa for r in row if not r.passed]
        table.append([case, *(f"{r.o_error:.1e} {r.S_error:.1e}" for r in row),
                      f"{row[0].o_bound:.1e} {row[0].S_bound:.1e}",
                      f"FAILED on {', '.join(failed)}" if failed else "ok"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
    failures = sum(not r.passed for r in results)
    lines += ["", f"max|difference| / max|expected|, against the float64 reference or the stored result; "
                  f"{len(results)} checks, {failures} failed, {seconds:.1f} s"]
    return "\n".join(lines)
