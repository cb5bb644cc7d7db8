"""kda.adapters.fla: modelling code that imports fla runs on the CPU and gives the right numbers."""
import importlib
import sys
import warnings

import numpy as np
import pytest
from helpers import python, relative_error

from kda import reference

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
adapter = pytest.importorskip("kda.adapters.fla")

# Written for this test in the manner of the modelling code that Kimi-Linear checkpoints carry: the same imports, the
# older form of the gate, packed sequences from a padding mask, caches of the short convolutions.
REMOTE_CODE = '''
import torch
from torch import nn
from fla.layers.utils import get_unpad_data, index_first_axis, pad_input
from fla.modules import FusedRMSNormGated, ShortConvolution
from fla.modules.fused_norm_gate import rms_norm_gated
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.gate import fused_kda_gate
from fla.ops.utils.index import prepare_cu_seqlens_from_mask, prepare_lens_from_mask
from fla.utils import tensor_cache

@tensor_cache
def lengths(mask):
    return prepare_cu_seqlens_from_mask(mask), prepare_lens_from_mask(mask)

class Attention(nn.Module):
    def __init__(self, hidden, heads, size):
        super().__init__()
        self.heads, self.size = heads, size
        width = heads * size
        self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj = (
            nn.Linear(hidden, width, bias=False) for _ in range(5))
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.q_conv, self.k_conv, self.v_conv = (ShortConvolution(width, 4, activation="silu") for _ in range(3))
        self.A_log = nn.Parameter(torch.log(torch.empty(1, 1, heads, 1).uniform_(1, 16)))
        self.dt_bias = nn.Parameter(torch.randn(width))
        self.o_norm = FusedRMSNormGated(size, eps=1e-5, activation="sigmoid")
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x, attention_mask=None, cache=None):
        batch, tokens, _ = x.shape
        cu_seqlens = None
        if attention_mask is not None:
            indices, cu_seqlens, _ = get_unpad_data(attention_mask)
            assert torch.equal(cu_seqlens, lengths(attention_mask)[0])
            x = index_first_axis(x.flatten(0, 1), indices).unsqueeze(0)
        past = cache or {"q": None, "k": None, "v": None, "S": None}
        q, past_q = self.q_conv(self.q_proj(x), cache=past["q"], output_final_state=True, cu_seqlens=cu_seqlens)
        k, past_k = self.k_conv(self.k_proj(x), cache=past["k"], output_final_state=True, cu_seqlens=cu_seqlens)
        v, past_v = self.v_conv(self.v_proj(x), cache=past["v"], output_final_state=True, cu_seqlens=cu_seqlens)
        g = fused_kda_gate(self.f_proj(x), self.A_log, self.size, g_bias=self.dt_bias)
        beta = self.b_proj(x).float().sigmoid()
        q, k, v = (a.unflatten(-1, (self.heads, self.size)) for a in (q, k, v))
        run = chunk_kda if tokens > 64 or self.training else fused_recurrent_kda
        o, S = run(q=q, k=k, v=v, g=g, beta=beta, initial_state=past["S"], output_final_state=True,
                   use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        o = self.o_norm(o, self.g_proj(x).unflatten(-1, (self.heads, self.size)))
        o = self.o_proj(o.flatten(2))
        if attention_mask is not None:
            o = pad_input(o.squeeze(0), indices, batch, tokens)
        return o, {"q": past_q, "k": past_k, "v": past_v, "S": S}
'''


@pytest.fixture
def installed():
    """fla's names, ours for the test."""
    adapter._warned = True
    assert adapter.install(force=True)
    yield
    adapter.uninstall()


@pytest.fixture
def model(installed, tmp_path, monkeypatch):
    (tmp_path / "remote_modelling.py").write_text(REMOTE_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("remote_modelling")
    torch.manual_seed(0)
    yield module.Attention(24, 2, 8).eval()
    del sys.modules["remote_modelling"]


def expected(model, x):
    """The layer over x [1, T, hidden] by the float64 reference."""
    def weight(linear):
        return linear.weight.detach().double().numpy().T

    x = x.double().numpy()
    heads = (1, x.shape[1], model.heads, model.size)
    q, k, v = (reference.causal_conv1d(x @ weight(proj), conv.weight.detach().numpy())[0].reshape(heads)
               for proj, conv in ((model.q_proj, model.q_conv), (model.k_proj, model.k_conv),
                                  (model.v_proj, model.v_conv)))
    o, S = reference.chunk_kda(
        q, k, v, (x @ weight(model.f_proj)).reshape(heads), x @ weight(model.b_proj),
        A_log=model.A_log.detach().numpy(), dt_bias=model.dt_bias.detach().numpy(), output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    o = reference.rms_norm_gated(o, (x @ weight(model.g_proj)).reshape(heads), model.o_norm.weight.detach().numpy())
    return o.reshape(1, x.shape[1], -1) @ weight(model.o_proj), S


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 40, 90])
def test_remote_code_runs_and_is_right(model, tokens):
    x = torch.randn(1, tokens, 24)
    o, cache = model(x)
    want, S = expected(model, x)
    assert relative_error(o.numpy(), want) <= 3e-6
    assert relative_error(cache["S"].numpy(), S) <= 3e-6
    assert cache["q"].shape == (1, 16, 4)


@torch.no_grad()
def test_remote_code_decodes_in_place_and_packs(model):
    """Token by token as the whole; rows of a padded batch as alone."""
    x = torch.randn(2, 12, 24)
    whole, last = model(x)
    _, cache = model(x[:, :7])
    for t in range(7, 12):
        held = cache["q"]
        o, cache = model(x[:, t:t + 1], cache=cache)
        assert cache["q"] is held
        assert relative_error(o.numpy(), whole[:, t:t + 1].numpy()) <= 3e-6
    for name in last:
        assert relative_error(cache[name].numpy(), last[name].numpy()) <= 3e-6, name
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    mask[1, 10:] = 0
    padded, _ = model(x, mask)
    assert torch.equal(padded[0, :5], torch.zeros(5, 24))
    assert torch.equal(padded[1, 10:], torch.zeros(2, 24))
    assert relative_error(padded[0, 5:].numpy(), model(x[:1, 5:])[0][0].numpy()) <= 3e-6
    assert relative_error(padded[1, :10].numpy(), model(x[1:, :10])[0][0].numpy()) <= 3e-6


def test_remote_code_trains(model):
    """Every parameter gets a gradient, that of the loss's slope along it."""
    x = torch.randn(1, 70, 24)
    model.train()
    model(x)[0].square().sum().backward()
    generator = torch.Generator().manual_seed(3)
    slope, step = 0.0, 1e-3
    directions = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        directions[name] = torch.randn(parameter.shape, generator=generator) * parameter.detach().abs().mean()
        slope += float((parameter.grad.double() * directions[name]).sum())
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            for name, parameter in model.named_parameters():
                parameter += sign * step * directions[name]
            values.append(float(np.square(expected(model, x)[0]).sum()))
            for name, parameter in model.named_parameters():
                parameter -= sign * step * directions[name]
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-3)


# ---- the single names ----

def test_gate_in_both_forms():
    torch.manual_seed(1)
    g, A, bias, b = torch.randn(2, 5, 24), torch.randn(1, 1, 3, 1), torch.randn(24), torch.randn(2, 5, 3)
    want = reference.fused_kda_gate(g.numpy().reshape(2, 5, 3, 8), A.numpy(), bias.numpy())
    for y in (adapter.fused_kda_gate(g.unflatten(-1, (3, 8)), A.reshape(3), bias),
              adapter.fused_kda_gate(g, A, 8, bias),
              adapter.fused_kda_gate(g, A, 8, g_bias=bias),
              adapter.fused_kda_gate(g=g, A=A, head_k_dim=8, g_bias=bias)):
        assert y.shape == (2, 5, 3, 8)
        assert relative_error(y.numpy(), want) <= 1e-6
    y, beta = adapter.fused_kda_gate(g, A, 8, bias, b)
    assert relative_error(beta.numpy(), reference.sigmoid(b.numpy())) <= 1e-6
    bounded = adapter.fused_kda_gate(g.unflatten(-1, (3, 8)), A.reshape(3), bias, -5.0, torch.bfloat16)
    assert bounded.dtype == torch.bfloat16
    assert relative_error(bounded.float().numpy(), reference.fused_kda_gate(
        g.numpy().reshape(2, 5, 3, 8), A.numpy(), bias.numpy(), -5.0)) <= 2.0**-8
    with pytest.raises(ValueError, match=r"threshold 20\.0"):
        adapter.fused_kda_gate(g, A, 8, threshold=1.0)


def test_chunk_takes_flas_order_and_refuses_what_needs_a_gpu():
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, 9, 2, 8).bfloat16()
    g, beta, h0 = -torch.rand(1, 9, 2, 8), torch.rand(1, 9, 2), torch.randn(1, 2, 8, 8)
    o, final = adapter.chunk_kda(q, k, v, g, beta, 0.5, h0, True)
    want, S = reference.chunk_kda(*(x.float().numpy() for x in (q, k, v, g, beta)), scale=0.5, initial_state=h0.numpy(),
                                  output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert relative_error(o.float().numpy(), want) <= 2.0**-8
    assert relative_error(final.numpy(), S) <= 1e-6
    turned = adapter.chunk_kda(q, k, v, g, beta, 0.5, h0.mT, True, transpose_state_layout=True)[1]
    assert torch.equal(turned, final.mT)
    assert adapter.chunk_kda(q, k, v.float(), g, beta)[0].dtype == torch.bfloat16  # q's, as fla
    assert adapter.chunk_kda(q, k, v, g, beta, cp_context=None, chunk_indices=torch.zeros(1))[1] is None
    with pytest.raises(TypeError, match="chunk_kda: cp_context is not supported on the CPU"):
        adapter.chunk_kda(q, k, v, g, beta, cp_context=object())
    with pytest.raises(TypeError, match="ssm_state_indices"):
        adapter.fused_recurrent_kda(q, k, v, g, beta, ssm_state_indices=torch.zeros(1))
    assert torch.equal(adapter.fused_recurrent_kda(q, k, v, g, beta, initial_state=h0.bfloat16())[0],
                       adapter.fused_recurrent_kda(q, k, v, g, beta, initial_state=h0.bfloat16().float())[0])


def test_norm_with_a_residual():
    torch.manual_seed(3)
    x, g, r = torch.randn(3, 2, 5, 16)
    norm = adapter.FusedRMSNormGated(16, activation="swish")
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16))
        y, total = norm(x, g, residual=r, prenorm=True)
        bare = adapter.FusedRMSNormGated(16, elementwise_affine=False, activation="sigmoid")
        plain = bare(x, g)
    assert torch.equal(total, x + r)
    assert relative_error(y.numpy(), reference.rms_norm_gated((x + r).numpy(), g.numpy(), norm.weight.detach().numpy(),
                                                             activation="silu")) <= 1e-6
    assert relative_error(plain.numpy(), reference.rms_norm_gated(x.numpy(), g.numpy(), np.ones(16))) <= 1e-6
    assert list(norm.state_dict()) == ["weight"]
    assert not list(bare.parameters())
    with pytest.raises(ValueError, match="activation"):
        adapter.FusedRMSNormGated(16, activation="relu")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_convolution(dtype):
    torch.manual_seed(4)
    conv = adapter.ShortConvolution(8, 4, bias=True, activation=None)
    x, r = torch.randn(2, 6, 8).to(dtype), torch.randn(2, 6, 8).to(dtype)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    y, cache = conv(x, mask=mask, residual=r, output_final_state=True)
    kept = x * mask[:, :, None].to(dtype)
    want = reference.causal_conv1d(kept.float().numpy(), conv.weight.numpy(), conv.bias.numpy(), None)[0]
    assert y.dtype == dtype
    assert relative_error((y - r).float().numpy(), want) <= (1e-6 if dtype == torch.float32 else 0.02)
    assert torch.equal(cache, kept[:, 2:].mT)
    assert cache.dtype == dtype
    assert conv(x)[1] is None
    _, cache = conv(x[:, :2], output_final_state=True)
    assert torch.equal(cache[:, :, 2:], x[:, :2].mT)
    assert not cache[:, :, :2].any()
    assert conv.state_size == 32
    with pytest.raises(ValueError, match="mask"):
        conv(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 6]))


def test_tensor_cache_by_identity():
    calls = []

    @adapter.tensor_cache
    def total(x, scale=1):
        calls.append(1)
        return x.sum() * scale

    x = torch.ones(3)
    assert total(x) is total(x)
    assert len(calls) == 1
    assert total(x, scale=2) == 6
    assert total(x.clone()) == 3
    assert len(calls) == 3


# ---- install and uninstall ----

def test_it_says_once_what_it_did_and_puts_things_back(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("real = True")
    (tmp_path / "fla" / "utils.py").write_text("mine = 1")
    monkeypatch.syspath_prepend(tmp_path)
    import fla
    import fla.utils as real_utils

    assert fla.real
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not adapter.install()  # it can run: left alone
    assert sys.modules["fla"] is fla
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(adapter, "_warned", False)
    with pytest.warns(UserWarning, match="flash-linear-attention is installed but finds no accelerator; .*fla.ops.kda"):
        assert adapter.install()
    from fla.utils import tensor_cache

    assert tensor_cache is adapter.tensor_cache
    assert not hasattr(sys.modules["fla"], "real")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert adapter.install()
        adapter.uninstall()
        assert sys.modules["fla"] is fla
        assert sys.modules["fla.utils"] is real_utils
        assert "fla.ops.kda" not in sys.modules
        adapter.uninstall()
        assert adapter.install()
    adapter.uninstall()
    del sys.modules["fla"], sys.modules["fla.utils"]


def test_every_listed_name_imports(installed):
    for module, names in {
        "fla.ops.kda": "chunk_kda fused_recurrent_kda", "fla.ops.kda.gate": "fused_kda_gate",
        "fla.modules": "FusedRMSNormGated ShortConvolution l2norm", "fla.modules.l2norm": "l2norm l2_norm",
        "fla.modules.fused_norm_gate": "rms_norm_gated FusedRMSNormGated",
        "fla.layers.utils": "get_unpad_data index_first_axis pad_input",
        "fla.ops.utils.index": "prepare_cu_seqlens_from_mask prepare_lens_from_mask", "fla.utils": "tensor_cache",
    }.items():
        for name in names.split():
            space = {}
            exec(f"from {module} import {name}", space)
            assert space[name].__module__ == "kda.adapters.fla"
    assert importlib.util.find_spec("fla") is not None
    with pytest.raises(ImportError, match="gla"):
        importlib.import_module("fla.ops.gla")
    with pytest.raises(ImportError, match="RotaryEmbedding"):
        exec("from fla.modules import RotaryEmbedding")


def test_importing_the_adapter_installs_nothing():
    done = python("import sys, kda.adapters.fla; print('fla' in sys.modules)")
    assert done.stdout == "False\n"
