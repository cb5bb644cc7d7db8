"""kda.adapters.torch: the numbers of the numpy functions over torch tensors, without copies; gradients; tracing."""
import copy
import itertools
import subprocess
import sys

import numpy as np
import pytest
from helpers import make_inputs, python, relative_error, same_bits

import kda
from kda import ops, reference

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
kt = pytest.importorskip("kda.adapters.torch")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def tensors(seed=0, B=2, T=21, H=2, HV=4, K=16, V=24, dtype=torch.float32, **options):
    x = make_inputs(seed, B, T, H, HV, K, V, N=options.pop("N", B))
    return {name: torch.from_numpy(a).to(torch.float32 if name == "initial_state" else dtype)
            for name, a in x.items()} | options


def arrays(x):
    return {name: kt.as_array(a) if isinstance(a, torch.Tensor) else a for name, a in x.items()}


def raw(seed=0, **options):
    """Raw gate and beta logits and their parameters."""
    x = tensors(seed, **options)
    generator = torch.Generator().manual_seed(seed)
    HV, K = x["g"].shape[2:]
    x["g"], x["beta"] = (torch.randn(x[name].shape, generator=generator).to(x[name].dtype) for name in ("g", "beta"))
    x |= {"A_log": torch.randn(HV, generator=generator), "dt_bias": torch.randn(HV * K, generator=generator),
          "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    return x


# ---- views ----

@pytest.mark.parametrize("name", DTYPES)
def test_tensors_and_arrays_share_memory(name):
    x = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).to(DTYPES[name])
    for view in (x, x[:, ::2], x.transpose(0, 2), x[..., 1:3]):
        a = kt.as_array(view)
        assert a.dtype.name == name
        assert a.shape == tuple(view.shape)
        assert a.ctypes.data == view.data_ptr()
        assert a.astype(np.float32).tolist() == view.float().tolist()
        back = kt.as_tensor(a)
        assert back.data_ptr() == view.data_ptr()
        assert back.dtype == view.dtype
        assert torch.equal(back, view)


def test_a_parameter_is_read_where_it_lies():
    weight = torch.nn.Parameter(torch.ones(3))
    assert kt.as_array(weight).ctypes.data == weight.data_ptr()


def test_lazy_negation_is_resolved():
    x = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).conj().imag
    assert x.is_neg()
    assert kt.as_array(x).tolist() == [-2, -4]


def test_tensors_elsewhere_are_refused():
    x = tensors()
    meta = {name: a.to("meta") for name, a in x.items()}
    with pytest.raises(ValueError, match=r"tensor: expected a tensor on the CPU, got one on meta; move it"):
        kt.as_array(meta["q"])
    with pytest.raises(ValueError, match=r"q: expected a dense tensor, got torch.sparse_coo"):
        kt.as_array(torch.ones(2, 2).to_sparse(), "q")
    with pytest.raises(TypeError, match=r"v: expected float32, float16 or bfloat16, got torch.float64 "
                                        r"\[2, 21, 4, 24\]; convert with v.float\(\)"):
        kt.chunk_kda(**(x | {"v": x["v"].double()}))
    with pytest.raises(TypeError, match="k: expected a torch tensor, got ndarray"):
        kt.chunk_kda(**(x | {"k": x["k"].numpy()}))
    with pytest.raises(ValueError, match=r"beta: expected \[2, 21, 4\]"):
        kt.chunk_kda(**(x | {"beta": x["beta"][:, :, :2]}))


# ---- the same bits as numpy ----

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fused_recurrent_kda", "chunk_kda"])
def test_delta_rule(name, dtype):
    x = raw(dtype=DTYPES[dtype], lower_bound=-5.0, allow_neg_eigval=True, scale=0.4, output_final_state=True)
    x["q"] = x["q"].transpose(1, 2).contiguous().transpose(1, 2)
    o, final = getattr(kt, name)(**x)
    want_o, want_final = getattr(kda, name)(**arrays(x))
    assert o.dtype == DTYPES[dtype]
    assert same_bits(kt.as_array(o), want_o)
    assert final.dtype == torch.float32
    assert same_bits(kt.as_array(final), want_final)
    assert getattr(kt, name)(**(x | {"output_final_state": False}))[1] is None


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5, 21], torch.tensor([0, 5, 5, 21]),
                                        torch.tensor([0, 5, 5, 21], dtype=torch.int32)], ids=["list", "i64", "i32"])
def test_sequences_and_v_first(cu_seqlens):
    x = tensors(B=1, N=3, output_final_state=True, state_v_first=True)
    x["initial_state"] = x["initial_state"].transpose(2, 3)
    before = x["initial_state"].clone()
    o, final, states = kt.chunk_kda(**x, cu_seqlens=cu_seqlens, chunk_size=4, return_intermediate_states=True)
    want = kda.chunk_kda(**arrays(x), cu_seqlens=[0, 5, 5, 21], chunk_size=4, return_intermediate_states=True)
    for got, wanted in zip((o, final, states), want, strict=True):
        assert same_bits(kt.as_array(got), wanted)
    assert states.shape == (3, 4, 4, 24, 16)
    assert torch.equal(x["initial_state"], before)


def test_what_stands_around():
    torch.manual_seed(5)
    x, gate, weight = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 4, 8), torch.randn(8)
    for dtype in DTYPES.values():
        y = kt.rms_norm_gated(x.to(dtype), gate.to(dtype), weight, 1e-6, "silu")
        assert same_bits(kt.as_array(y), kda.rms_norm_gated(
            kt.as_array(x.to(dtype)), kt.as_array(gate.to(dtype)), weight.numpy(), 1e-6, "silu"))
        assert same_bits(kt.as_array(kt.l2norm(x.to(dtype))), kda.l2norm(kt.as_array(x.to(dtype))))
        A_log, dt_bias = weight[:4], torch.ones(32)
        for bound in (None, -5.0):
            g = kt.fused_kda_gate(x.to(dtype), A_log, dt_bias, lower_bound=bound)
            assert same_bits(kt.as_array(g), kda.fused_kda_gate(kt.as_array(x.to(dtype)), A_log.numpy(),
                                                                dt_bias.numpy(), bound))
        rows, taps = x.reshape(2, 9, 32).to(dtype), torch.randn(32, 1, 4)
        past = torch.randn(2, 32, 3)
        y, final = kt.causal_conv1d(rows, taps, torch.ones(32), initial_state=past, output_final_state=True)
        want = kda.causal_conv1d(kt.as_array(rows), taps.numpy(), np.ones(32, np.float32), initial_state=past.numpy(),
                                 output_final_state=True)
        assert same_bits(kt.as_array(y), want[0])
        assert same_bits(kt.as_array(final), want[1])
        assert kt.causal_conv1d(rows, taps)[1] is None
        state, want_state = past.clone(), past.numpy().copy()
        y = kt.causal_conv1d_update(rows[:, 0], state, taps)
        assert same_bits(kt.as_array(y), kda.causal_conv1d_update(kt.as_array(rows[:, 0]), want_state, taps.numpy()))
        assert same_bits(state.numpy(), want_state)


# ---- gradients ----

def recurrence(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, lower_bound=None,
               use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
               allow_neg_eigval=False, cu_seqlens=None, state_v_first=False):
    """The plain recurrence in torch operations, token by token."""
    HV, K = v.shape[2], q.shape[3]
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // q.shape[2], dim=2) for x in (q * (K**-0.5 if scale is None else scale), k))
    if use_gate_in_kernel:
        z = g if dt_bias is None else g + dt_bias.reshape(HV, K)
        a = 1.0 if A_log is None else A_log.reshape(HV, 1).exp()
        g = -a * torch.nn.functional.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(a * z)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    rows = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if cu_seqlens is not None:
        rows = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens)]
    parts, finals = [], []
    for n, (b, start, end) in enumerate(rows):
        S = initial_state[n].mT if state_v_first else initial_state[n]
        for t in range(start, end):
            S = g[b, t].exp()[:, :, None] * S
            d = beta[b, t][:, None] * (v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t]))
            S = S + k[b, t][:, :, None] * d[:, None, :]
            parts.append(torch.einsum("hkv,hk->hv", S, q[b, t]))
        finals.append(S.mT if state_v_first else S)
    return torch.stack(parts).reshape(v.shape), torch.stack(finals)


OPTIONS = [
    {},
    {"raw": True, "lower_bound": -5.0, "allow_neg_eigval": True},
    {"raw": True, "scale": 0.7, "cu_seqlens": [0, 30, 30, 70], "B": 1, "N": 3},
    {"raw": True, "state_v_first": True, "B": 1, "H": 1, "HV": 1},
]


def leaves(x, dtype=torch.float32):
    return {name: a.to(dtype).requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for name, a in x.items()}


def problem(options):
    options = {"T": 70, "K": 12, "V": 20} | options
    x = (raw if options.pop("raw", False) else tensors)(3, **options)
    if options.get("state_v_first"):
        x["initial_state"] = x["initial_state"].transpose(2, 3).contiguous()
    return x


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
def test_gradients_against_autograd_through_the_recurrence(options, function):
    """In float64 for the recurrence, whose own float32 gradients are no better than ours."""
    x, want = leaves(problem(options)), leaves(problem(options), torch.float64)
    o, final = getattr(kt, function)(**x, output_final_state=True)
    want_o, want_final = recurrence(**want)
    generator = torch.Generator().manual_seed(9)
    by_o, by_final = torch.randn(o.shape, generator=generator), torch.randn(final.shape, generator=generator)
    ((o * by_o).sum() + (final * by_final).sum()).backward()
    ((want_o * by_o).sum() + (want_final * by_final).sum()).backward()
    names = [name for name, a in x.items() if isinstance(a, torch.Tensor) and a.requires_grad]
    assert len(names) == (8 if "A_log" in x else 6)
    for name in names:
        assert x[name].grad.dtype == torch.float32
        assert relative_error(x[name].grad.numpy(), want[name].grad.numpy()) <= 3e-6, name


class Reference(torch.autograd.Function):
    """The float64 reference, forwards and backwards."""

    @staticmethod
    def forward(ctx, options, *values):
        names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")[:len(values)]
        ctx.arguments = options | {n: a.detach().numpy() for n, a in zip(names, values, strict=True)}
        ctx.names = names
        o, final = reference.chunk_kda(**ctx.arguments, output_final_state=True)
        return torch.from_numpy(o.copy()), torch.from_numpy(final.copy())

    @staticmethod
    def backward(ctx, d_o, d_final):
        gradients = reference.chunk_kda_backward(d_o.numpy(), d_final.numpy(), **ctx.arguments)
        return None, *(torch.from_numpy(np.array(gradients[name])) for name in ctx.names)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_of_the_reference(options):
    small = {"T": 5, "K": 3, "V": 2, "H": 1, "HV": 2} | options
    if "cu_seqlens" in small:
        small["cu_seqlens"] = [0, 2, 2, 5]
    x = leaves(problem(small), torch.float64)
    names = [n for n in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias") if n in x]
    rest = {name: a for name, a in x.items() if name not in names}
    assert torch.autograd.gradcheck(lambda *values: Reference.apply(rest, *values), [x[n] for n in names], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_tensors(dtype):
    """Computed in float32 and rounded once."""
    x = leaves(raw(dtype=dtype), torch.float32)
    half = {name: a.detach().to(dtype).requires_grad_() if name in ("q", "k", "v", "g", "beta") else a
            for name, a in leaves(raw(dtype=dtype)).items()}
    kt.chunk_kda(**x)[0].sum().backward()
    kt.chunk_kda(**half)[0].float().sum().backward()
    for name in ("q", "k", "v", "g", "beta"):
        assert half[name].grad.dtype == dtype
        assert torch.equal(half[name].grad, x[name].grad.to(dtype)), name
    assert torch.equal(half["A_log"].grad, x["A_log"].grad)


def test_only_wanted_gradients_and_only_then_states():
    x = tensors()
    x["v"].requires_grad_()
    o, final = kt.chunk_kda(**x)
    assert final is None
    o.sum().backward()
    assert x["v"].grad is not None
    assert x["q"].grad is None
    with torch.no_grad():
        assert not kt.chunk_kda(**x)[0].requires_grad
    o, _, states = kt.chunk_kda(**x, return_intermediate_states=True, chunk_size=10)
    assert o.requires_grad
    assert not states.requires_grad
    assert states.shape == (2, 2, 4, 16, 24)


def test_a_second_derivative_is_refused():
    x = leaves(tensors())
    o, _ = kt.chunk_kda(**x)
    (gradient,) = torch.autograd.grad(o.square().sum(), x["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="delta_rule_backward"):
        gradient.sum().backward()


def test_gradients_of_what_stands_around():
    """The plain torch forms give the numbers of the kernels."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    x, gate, weight, A_log, dt_bias = randn(2, 9, 4, 8), randn(2, 9, 4, 8), randn(8), randn(4), randn(32)
    rows, taps, past, bias = randn(1, 9, 32), randn(32, 1, 4), randn(3, 32, 4), randn(32)
    cases = [
        (lambda x, gate, weight: kt.rms_norm_gated(x, gate, weight), (x, gate, weight)),
        (lambda x, gate, weight: kt.rms_norm_gated(x, gate, weight, activation="silu"), (x, gate, weight)),
        (kt.l2norm, (x,)),
        (kt.fused_kda_gate, (x, A_log, dt_bias)),
        (lambda x, A_log: kt.fused_kda_gate(x, A_log, lower_bound=-5.0), (x, A_log)),
        (lambda x: kt.fused_kda_gate(x, lower_bound=-5.0), (x,)),
        (lambda x, w, b, s: kt.causal_conv1d(x, w, b, "silu", s, True, [0, 2, 2, 9])[0], (rows, taps, bias, past)),
        (lambda x, w, s: kt.causal_conv1d(x, w, None, None, s, True, [0, 2, 2, 9])[1], (rows, taps, past)),
    ]
    for function, values in cases:
        wanted = function(*values)
        given = [a.clone().requires_grad_() for a in values]
        got = function(*given)
        assert relative_error(got.detach().numpy(), wanted.numpy()) <= 1e-6
        got.square().sum().backward()
        assert all(a.grad is not None for a in given[:1])
        assert torch.isfinite(given[0].grad).all()
    assert ops.BACKWARD_SPACING == 64


# ---- torch.library ----

def test_the_operators_keep_their_word():
    """Schema, fake shapes and autograd registration, by torch's own check."""
    x = raw(T=5, H=1, HV=2, K=4, V=3)
    base = (x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["dt_bias"], x["initial_state"])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for cu, spacing, v_first in ((None, 2, False), (None, 0, False)):
        torch.library.opcheck(torch.ops.kda.delta_rule, (
            *base, cu, None, -5.0, True, True, True, False, v_first, True, spacing), test_utils=checks)
    gate = (x["v"], x["v"], torch.ones(3), 1e-5, "silu")
    torch.library.opcheck(torch.ops.kda.rms_norm_gated, gate, test_utils=checks)
    torch.library.opcheck(torch.ops.kda.gate, (x["g"], x["A_log"], x["dt_bias"], None), test_utils=checks)
    torch.library.opcheck(torch.ops.kda.l2norm, (x["q"], 1e-6), test_utils=checks)
    rows = torch.randn(2, 5, 8)
    torch.library.opcheck(torch.ops.kda.causal_conv1d, (rows, torch.randn(8, 4), None, None, None, "silu"),
                          test_utils=checks)
    torch.library.opcheck(torch.ops.kda.causal_conv1d_update, (
        rows[:, 0], torch.randn(2, 8, 3), torch.randn(8, 4), None, "silu"), test_utils=checks)


def test_fake_tensors_see_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = raw(dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for name, a in x.items()}
        o, final = kt.chunk_kda(**fake, output_final_state=True)
        y, past = kt.causal_conv1d(torch.empty(2, 7, 12), torch.empty(12, 4), output_final_state=True)
    assert (o.shape, o.dtype) == ((2, 21, 4, 24), torch.bfloat16)
    assert (final.shape, final.dtype) == ((2, 4, 16, 24), torch.float32)
    assert y.shape == (2, 7, 12)
    assert past.shape == (2, 12, 3)


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 70, 70, 140])], ids=["rows", "packed"])
def test_compiled_whole_and_trained(cu_seqlens):
    """One graph through torch.compile (its own tracer, no code generation), gradients included. How many states packed
    sequences keep for the backward pass is known only when it runs."""
    x = raw(T=140, B=1)

    def loss(q, k, v, g, beta):
        o, final = kt.chunk_kda(q, k, v, g, beta, *(x[n] for n in ("A_log", "dt_bias")), use_gate_in_kernel=True,
                                use_beta_sigmoid_in_kernel=True, output_final_state=True, cu_seqlens=cu_seqlens)
        return (kt.rms_norm_gated(o.detach(), o.detach(), torch.ones(24)) * o).sum() + final.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        values = [x[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")]
        value = function(*values)
        value.backward()
        results.append([value.detach(), *(a.grad for a in values)])
    for eager, traced in zip(*results, strict=True):
        assert relative_error(traced.numpy(), eager.numpy()) <= 1e-6


# ---- quantised layers ----

@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_linear(bits, dtype):
    torch.manual_seed(1)
    linear = torch.nn.Linear(100, 30)
    layer = kt.QuantizedLinear.from_linear(linear, bits, 32)
    x = torch.randn(2, 3, 100).to(DTYPES[dtype])
    matrix = kda.QuantizedMatrix.quantize(linear.weight.detach().numpy(), bits, 32)
    want = kt.as_tensor(matrix.matmul(kt.as_array(x))) + linear.bias.detach().to(x.dtype)
    y = layer(x)
    assert y.dtype == x.dtype
    assert torch.equal(y, want)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)
    assert layer(x[:0]).shape == (0, 3, 30)
    assert str(layer) == f"QuantizedLinear(in_features=100, out_features=30, bias=True, bits={bits}, group_size=32)"


def test_quantized_linear_keeps_its_state(tmp_path):
    torch.manual_seed(2)
    model = torch.nn.Sequential(kt.QuantizedLinear.from_linear(torch.nn.Linear(64, 16), 4, 64))
    other = torch.nn.Sequential(kt.QuantizedLinear.from_linear(torch.nn.Linear(64, 16), 4, 64))
    x = torch.randn(5, 64)
    assert not torch.equal(model(x), other(x))
    state = model.state_dict()
    assert {name: (a.dtype, tuple(a.shape)) for name, a in state.items()} == {
        "0.bias": (torch.float32, (16,)), "0.codes": (torch.uint8, (16, 32)), "0.scales": (torch.float16, (16, 1))}
    torch.save(state, tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(model(x), other(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    halved = copy.deepcopy(model).to(torch.bfloat16)  # the bias is rounded, the codes are what they were
    assert halved[0].bias.dtype == torch.bfloat16
    assert same_bits(halved[0].matrix.codes, model[0].matrix.codes)
    with pytest.raises(RuntimeError, match=r"0\.scales"):
        other.load_state_dict({name: a for name, a in state.items() if "scales" not in name})
    with pytest.raises(RuntimeError, match="codes: expected"):
        other.load_state_dict(state | {"0.codes": state["0.codes"][:8]})


# ---- what it does not bring along ----

def test_import_kda_without_torch():
    """Nothing of torch is imported by `import kda`, and the adapter says by name what it lacks."""
    python("import sys, kda; assert 'torch' not in sys.modules and 'kda.adapters' not in sys.modules")
    code = "import sys; sys.modules['torch'] = None\nimport kda\nimport kda.adapters.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": ":".join(p for p in sys.path if p)})
    assert "ModuleNotFoundError" in done.stderr
    assert "torch" in done.stderr
