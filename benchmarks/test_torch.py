"""A KDA layer of Kimi-Linear's size in transformers, before and after kda.adapters.hf.accelerate.

    pip install -e '.[bench,hf]'
    pytest benchmarks/test_torch.py --benchmark-json=benchmarks/results/torch.json

Before is transformers' own layer in torch operations, on as many threads. The two run in turn in one process, and
their results are compared first. On a machine that others use, take one thread (KDA_NUM_THREADS=1): torch's threads
wait by spinning, and with no CPU of their own they make a ratio look ten times better than it is.
"""

import copy
import functools
import time

import numpy as np
import pytest
from common import ISAS, counted, median_ratio, own_ns

import kda
from kda.perf import counts

torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")

FORMATS = [None, "q8g"]
ERRORS = {None: 1e-5, "q8g": 0.05}  # of the largest output; the inputs are noise, which int8 does not flatter


@functools.lru_cache(1)
def layers(weight_format):
    """(transformers' layer, the same accelerated, their config)."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    from kda.adapters import hf

    config = transformers.KimiLinearConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = KimiLinearDeltaAttention(config, 0).eval()
        with torch.no_grad():
            layer.forget_gate.A_log.uniform_(1, 16).log_()
            layer.forget_gate.dt_bias.uniform_(-7, -2)
        both.append(layer)
    hf.accelerate(both[1], weight_format)
    return *both, config


def hidden(T):
    return torch.randn(1, T, 2304, generator=torch.Generator().manual_seed(T))


def compared(benchmark, summary, target, what, weight_format, tokens, before, after, rounds, least):
    """Benchmark after() in turn with before(), both returning their outputs."""
    torch.set_num_threads(kda.get_num_threads())
    want, got = before(), after()
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= ERRORS[weight_format], error
    before_ns = []

    def setup():
        start = time.perf_counter_ns()
        before()
        before_ns.append((time.perf_counter_ns() - start) / tokens)
        after()  # torch's threads have gone to sleep when ours are timed

    benchmark.pedantic(after, setup=setup, rounds=rounds)
    name = f"{what}, {weight_format or 'f32'}"
    times = 3 if "backward" in what else 1  # a backward pass is twice the forward's products
    weights = 0 if "delta rule" in what else sum(p.numel() for p in layers(weight_format)[0].parameters())
    kept = weights * (1 if weight_format else 4) + counts.KIMI_LINEAR_LAYER.state_bytes
    counted(benchmark, ISAS[0], kda.get_num_threads(), tokens,
            {"layers": 1, "HV": 32, "K": 128, "weights": weight_format or "f32"},
            times * tokens * (weights + counts.KIMI_LINEAR_LAYER.mac), kept, kept)
    benchmark.extra_info.update(what=name, error=error, torch=torch.__version__, transformers=transformers.__version__)
    if benchmark.stats is None:
        return
    own = [ns / tokens for ns in own_ns(benchmark)]
    ratio = median_ratio(before_ns, own)
    benchmark.extra_info.update(before_us_per_token=float(np.median(before_ns)) / 1e3,
                                us_per_token=float(np.median(own)) / 1e3, before_over_kda=ratio)
    summary(f"{name}: transformers takes {ratio:.1f} x kda ({np.median(before_ns) / 1e3:,.0f} and "
            f"{np.median(own) / 1e3:,.0f} us/token)")
    target("transformers' time over kda's", ratio, least=least)


def size(request, tokens):
    """Few tokens where nothing is timed: a thousand of transformers' take ten seconds."""
    return 65 if request.config.getoption("--benchmark-disable") else tokens


@pytest.mark.parametrize("weight_format", FORMATS, ids=["f32", "q8g"])
def test_prefill(benchmark, request, summary, target, weight_format):
    T = size(request, 1024)
    plain, ours, _ = layers(weight_format)
    x = hidden(T)
    with torch.no_grad():
        compared(benchmark, summary, target, f"layer, prefill of {T:,} tokens", weight_format, T, lambda: plain(x),
                 lambda: ours(x), 2, 5)


@pytest.mark.parametrize("weight_format", FORMATS, ids=["f32", "q8g"])
def test_decode(benchmark, summary, target, weight_format):
    """One token behind a prompt of 16, in transformers' cache."""
    plain, ours, config = layers(weight_format)
    x, prompt = hidden(1), hidden(16)
    caches = [transformers.DynamicCache(config=config) for _ in range(2)]
    with torch.no_grad():
        plain(prompt, cache=caches[0])
        ours(prompt, cache=caches[1])
        compared(benchmark, summary, target, "layer, decode", weight_format, 1, lambda: plain(x, cache=caches[0]),
                 lambda: ours(x, cache=caches[1]), 30, 1.3)


def test_decode_beside_bfloat16(benchmark, summary, target):
    """The model in bfloat16, as checkpoints are stored and most people load them, against int8 weights."""
    plain, ours, config = layers("q8g")
    half = copy.deepcopy(plain).to(torch.bfloat16)
    x, prompt = hidden(1), hidden(16)
    caches = [transformers.DynamicCache(config=config) for _ in range(2)]
    with torch.no_grad():
        half(prompt.bfloat16(), cache=caches[0])
        ours(prompt, cache=caches[1])
        compared(benchmark, summary, target, "layer in bfloat16, decode", "q8g", 1,
                 lambda: half(x.bfloat16(), cache=caches[0]), lambda: ours(x, cache=caches[1]), 30, 3)


def test_forward_and_backward(benchmark, request, summary, target):
    """A training step's pass over the layer: outputs and the gradients of its parameters."""
    T = size(request, 256)
    plain, ours, _ = layers(None)
    x = hidden(T)

    def trained(layer):
        layer.zero_grad()
        y = layer(x)
        y.sum().backward()
        return y.detach()

    compared(benchmark, summary, target, f"layer, forward and backward of {T} tokens", None, T,
             lambda: trained(plain), lambda: trained(ours), 2, 4)


@pytest.mark.parametrize("tokens", [1024, 1])
def test_delta_rule(benchmark, request, summary, target, tokens):
    """What lies between the projections alone: the functions that transformers' layer calls, after gate and sigmoid."""
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    from kda.adapters import torch as ours

    T = size(request, tokens) if tokens > 1 else 1
    generator = torch.Generator().manual_seed(T)
    q, k, v, g = (torch.randn(1, T, 32, 128, generator=generator) for _ in range(4))
    beta, state = torch.rand(1, T, 32, generator=generator), torch.randn(1, 32, 128, 128, generator=generator)
    options = {"g": -torch.nn.functional.softplus(g), "beta": beta, "initial_state": state, "output_final_state": True,
               "use_qk_l2norm_in_kernel": True}
    plain = theirs.chunk_kimi_delta_attention if T > 1 else theirs.recurrent_kimi_delta_attention
    fast = ours.chunk_kda if T > 1 else ours.fused_recurrent_kda
    with torch.no_grad():
        compared(benchmark, summary, target, f"delta rule, prefill of {T:,} tokens" if T > 1 else "delta rule, decode",
                 None, T, lambda: plain(q, k, v, **options)[0], lambda: fast(q, k, v, **options)[0],
                 2 if T > 1 else 40, 100 if T > 1 else 3)
