"""kda.adapters.hf: tiny random models of transformers, with and without our layers."""
import copy
import socket
import sys

import numpy as np
import pytest
from helpers import python, relative_error, same_bits

from kda import QuantizedMatrix

torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
hf = pytest.importorskip("kda.adapters.hf")
kt = pytest.importorskip("kda.adapters.torch")

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
         "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
         "v_head_dim": 16, "qk_nope_head_dim": 16, "num_experts_per_tok": 2, "linear_head_dim": 16,
         "linear_num_heads": 4, "pad_token_id": 0, "initializer_range": 0.1}


def kimi(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    config = transformers.KimiLinearConfig(**SIZES, qk_rope_head_dim=8, num_local_experts=4, bos_token_id=1,
                                           eos_token_id=None)
    model = transformers.KimiLinearForCausalLM(config).eval().to(dtype)
    with torch.no_grad():  # logits far enough apart that rounding does not choose between them
        model.lm_head.weight.mul_(3)
    return model


def glm(seed=0):
    torch.manual_seed(seed)
    config = transformers.Glm5NextTextConfig(**SIZES, q_lora_rank=32, n_routed_experts=4, index_topk=64,
                                             index_head_dim=16, index_n_heads=2, hc_mult=2)
    model = transformers.Glm5NextTextModel(config).eval()
    with torch.no_grad():
        for layer in model.layers:
            if hasattr(layer.self_attn, "forget_gate"):  # zero in a fresh model; the bounded gate should feel it
                layer.self_attn.forget_gate.A_log.uniform_(-1, 1)
    return model


def linear_layer(model):
    return getattr(model, "model", model).layers[1].self_attn


def tokens(*shape, seed=1):
    return torch.randint(2, 128, shape, generator=torch.Generator().manual_seed(seed))


def result(model, *args, **kwargs):
    out = model(*args, **kwargs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def distance(got, want):
    return relative_error(got.detach().float().numpy(), want.detach().float().numpy())


def generated(model, ids, new=20, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)[:, ids.shape[1]:]


# ---- the same model ----

@torch.no_grad()
@pytest.mark.parametrize("make", [kimi, glm])
@pytest.mark.parametrize("T", [1, 3, 40, 90])
def test_the_same_results(make, T):
    ids = tokens(2, T)
    want = result(make(), ids)
    model = make()
    report = hf.accelerate(model)
    assert len(report.layers) == 4
    assert str(report).startswith("kda: 4 KDA layers (f32); weights")
    assert distance(result(model, ids), want) <= 1e-5


@torch.no_grad()
def test_greedy_generation_gives_the_same_tokens():
    ids = tokens(2, 70)
    want = generated(kimi(), ids, 64)
    model = kimi()
    hf.accelerate(model)
    assert torch.equal(generated(model, ids, 64), want)
    assert len(want.unique()) > 10


@torch.no_grad()
@pytest.mark.parametrize("make", [kimi, glm])
def test_token_by_token_with_a_cache(make):
    """64 steps after a prompt of 40, both on the tokens that transformers' layers choose.

    Their own steps differ from their own whole runs by as much as from ours.
    """
    plain, model = make(), make()
    hf.accelerate(model)
    head = torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    caches = [transformers.DynamicCache(config=m.config) for m in (plain, model)]
    ids = tokens(2, 40)
    for _ in range(65):
        want, got = (result(m, ids, cache=cache, use_cache=True)[:, -1] for m, cache in zip((plain, model), caches,
                                                                                           strict=True))
        assert distance(got, want) <= 3e-5
        if make is glm:
            want, got = want @ head, got @ head
        ids = want.argmax(-1, keepdim=True)
        assert torch.equal(got.argmax(-1, keepdim=True), ids)
    assert caches[1].get_seq_length(4 if make is kimi else 3) == 104
    assert all(isinstance(caches[1].layers[i], hf.KDACacheLayer) for i in range(3))


@torch.no_grad()
@pytest.mark.parametrize("make", [kimi, glm])
def test_bfloat16_layers(make):
    """Ours computes in float32 from the same bfloat16 weights: nearer to the float32 layer, and of the same dtype."""
    model = make().to(torch.bfloat16)
    layer = linear_layer(model)
    x = torch.randn(2, 80, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact, plain = linear_layer(copy.deepcopy(model).float())(x.float()), layer(x)
    hf.accelerate(model)
    got = layer(x)
    assert got.dtype == torch.bfloat16
    assert distance(got, exact) <= 2.0**-8
    assert distance(got, exact) < distance(plain, exact)
    assert result(model, tokens(2, 30)).dtype == torch.bfloat16


# ---- padding ----

@torch.no_grad()
@pytest.mark.parametrize("make", [kimi, glm])
@pytest.mark.parametrize("side", ["left", "right", "both", "holes"])
def test_padded_rows_are_as_alone(make, side):
    """At the level of a layer: attention layers have their own ways with padding."""
    model = make()
    hf.accelerate(model)
    layer = linear_layer(model)
    torch.manual_seed(2)
    x = torch.randn(3, 80, 64)
    mask = torch.ones(3, 80, dtype=torch.bool)
    if side == "holes":
        mask[0, ::3] = mask[2, 40:43] = False
    elif side == "both":
        mask[0, :7], mask[1, 60:] = False, False
    else:
        for row, n in enumerate((0, 5, 66)):
            mask[row, slice(0, n) if side == "left" else slice(80 - n, 80)] = False
    x[~mask] = torch.nan
    cache = transformers.DynamicCache(config=model.config)
    y = layer(x, cache=cache, attention_mask=mask)
    for row in range(3):
        alone = transformers.DynamicCache(config=model.config)
        assert torch.equal(layer(x[row:row + 1, mask[row]], cache=alone)[0], y[row, mask[row]])
        assert torch.equal(alone.layers[1].recurrent_states[0][0], cache.layers[1].recurrent_states[0][row])
        assert torch.equal(alone.layers[1].conv_states[0][0], cache.layers[1].conv_states[0][row])
    assert not y[~mask].any()


@torch.no_grad()
def test_generation_from_padded_prompts():
    model = kimi()
    plain = [generated(model, ids) for ids in (tokens(1, 50), tokens(1, 30, seed=2))]
    hf.accelerate(model)
    ids, mask = torch.zeros(2, 50, dtype=torch.int64), torch.ones(2, 50, dtype=torch.int64)
    ids[0], ids[1, 20:], mask[1, :20] = tokens(1, 50)[0], tokens(1, 30, seed=2)[0], 0
    got = generated(model, ids, attention_mask=mask)
    assert torch.equal(got[0], plain[0][0])
    assert torch.equal(got[1], plain[1][0])


@torch.no_grad()
def test_right_padding_is_not_run_through():
    """transformers' own layers decay and shift over the padding; ours go on as the unpadded run does."""
    prompt = tokens(1, 30)
    ids, mask = torch.zeros(1, 42, dtype=torch.int64), torch.zeros(1, 42, dtype=torch.int64)
    ids[:, :30], mask[:, :30] = prompt, 1
    following, error = tokens(1, 1, seed=9), []
    want = None
    for ours in (False, True):
        model = kimi()
        if ours:
            hf.accelerate(model)
        whole = result(model, torch.cat([prompt, following], 1))
        if want is None:
            want = whole
        out = model(ids, attention_mask=mask, use_cache=True)
        assert distance(out.logits[:, :30], want[:, :30]) <= 1e-5
        step = result(model, following, attention_mask=torch.cat([mask, torch.ones(1, 1, dtype=torch.int64)], 1),
                      cache=out.cache, use_cache=True, position_ids=torch.tensor([[30]]))
        error.append(distance(step[:, 0], want[:, 30]))
    assert error[1] <= 1e-5
    assert error[0] > 1e-3  # where this fails, transformers has been repaired


# ---- what generate() does with caches ----

@torch.no_grad()
def test_beam_search():
    ids = tokens(2, 20)
    want = generated(kimi(), ids, num_beams=3, num_return_sequences=2)
    model = kimi()
    hf.accelerate(model)
    assert torch.equal(generated(model, ids, num_beams=3, num_return_sequences=2), want)


@torch.no_grad()
def test_assisted_decoding_drops_tokens_again():
    """Which transformers refuses for its own linear attention layers."""
    ids = tokens(1, 20).repeat(1, 3)
    model = kimi()
    with pytest.raises(ValueError, match="stateful"):
        generated(model, ids, 40, prompt_lookup_num_tokens=4)
    hf.accelerate(model)
    want = generated(model, ids, 40)
    assert torch.equal(generated(model, ids, 40, prompt_lookup_num_tokens=4), want)
    assistant = kimi(seed=3)
    hf.accelerate(assistant)
    assert torch.equal(generated(model, ids, 40, assistant_model=assistant), want)
    hf.restore(model)
    with pytest.raises(ValueError, match="stateful"):
        generated(model, ids, 40, prompt_lookup_num_tokens=4)


@torch.no_grad()
def test_crop_is_as_if_the_tokens_had_not_been():
    model = kimi()
    hf.accelerate(model, rollback_window=8)
    cache, other = (transformers.DynamicCache(config=model.config) for _ in range(2))
    cache.activate_past_recording()
    ids = tokens(1, 50)
    result(model, ids[:, :40], cache=cache)
    result(model, ids[:, 40:45], cache=cache)
    result(model, ids[:, :40], cache=other)
    cache.crop(-5)
    for t in range(45, 50):
        assert torch.equal(result(model, ids[:, t:t + 1], cache=cache), result(model, ids[:, t:t + 1], cache=other))
    layer, unrecorded = cache.layers[0], other.layers[0]
    assert layer.is_croppable
    assert not unrecorded.is_croppable
    with pytest.raises(ValueError, match="can drop 0 to"):
        layer.crop(-9)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        unrecorded.crop(-1)
    with pytest.raises(RuntimeError, match="<= 0"):
        layer.crop(1)
    unrecorded.crop(0)
    before = unrecorded.recurrent_states[0]
    unrecorded.activate_past_recording()
    assert torch.equal(unrecorded.recurrent_states[0], before)
    assert unrecorded.is_croppable


@torch.no_grad()
def test_rows_of_a_cache():
    model = kimi()
    hf.accelerate(model)
    cache = transformers.DynamicCache(config=model.config)
    layer = cache.layers[0]
    ids = tokens(2, 10)
    assert not cache.has_previous_state(0)
    result(model, ids, cache=cache)
    layer = cache.layers[0]
    assert cache.has_previous_state()
    assert layer.batch_size == cache.batch_size == 2
    assert layer.conv_states[0].shape == (2, 192, 4)
    S = layer.recurrent_states[0]
    twin = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    assert torch.equal(layer.recurrent_states[0], S[[0, 0, 1, 1]])
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(layer.recurrent_states[0], S[[1, 0]])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.recurrent_states[0], S[[0, 0]])
    with pytest.raises(ValueError, match="cache: holds 2 rows, got a batch of 1"):
        result(model, ids[:1], cache=cache)
    cache.reset()
    assert not cache.has_previous_state(0)
    assert torch.equal(result(model, ids, cache=cache), result(model, ids))
    assert torch.equal(twin.layers[0].recurrent_states[0], S)
    with pytest.raises(RuntimeError, match="accelerated model alone"):
        layer.update_conv_state(torch.zeros(2, 192, 1))
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 64), cache=transformers.DynamicCache())


@torch.no_grad()
def test_a_cache_of_transformers_is_taken_over():
    model = kimi()
    ids = tokens(2, 31)
    want = result(model, ids)
    cache = transformers.DynamicCache(config=model.config)
    result(model, ids[:, :30], cache=cache)
    hf.accelerate(model)
    assert distance(result(model, ids[:, 30:], cache=cache), want[:, 30:]) <= 1e-5


# ---- weights ----

@torch.no_grad()
def test_save_and_reload_without_a_network(tmp_path, monkeypatch):
    model = kimi()
    ids = tokens(2, 40)
    plain = result(model, ids)
    hf.accelerate(model)
    want = result(model, ids)
    model.save_pretrained(tmp_path)

    def offline(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", offline)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(result(again, ids), plain)
    hf.accelerate(again)
    assert torch.equal(result(again, ids), want)


@torch.no_grad()
@pytest.mark.parametrize("make", [kimi, glm])
@pytest.mark.parametrize(("weight_format", "bits"), [("q8g", 8), ("q4g", 4)])
def test_quantised(make, weight_format, bits):
    """Layer by layer: in a whole random model a small change makes a router choose other experts."""
    model = make()
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(linear_layer(model))
    for module in twin.modules():
        if type(module) is torch.nn.Linear:
            quantized = QuantizedMatrix.quantize(module.weight.numpy(), bits)
            module.weight.copy_(torch.from_numpy(quantized.dequantize()))
    want = twin(x)  # of the same weights; what remains are the activations in 8 bits
    linears = {name: m for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    report = hf.accelerate(model, weight_format)
    assert report.weight_format == weight_format
    assert not report.linears
    assert 0 < distance(linear_layer(model)(x), want) <= 0.025
    report = hf.accelerate(model, weight_format, quantize_rest=True)
    modules = dict(model.named_modules())
    assert set(report.linears) == {name for name in linears if not name.startswith(tuple(report.layers))
                                   and not name.endswith("indexer.weights_proj")}
    assert len(report.linears) > 10
    for name in report.linears:
        assert type(modules[name]) is kt.QuantizedLinear
        quantized = QuantizedMatrix.quantize(linears[name].weight.numpy(), bits)
        assert same_bits(modules[name].matrix.codes, quantized.codes)
    assert all(type(modules[name]) is hf.QuantizedExperts for name in report.experts)
    assert len(report.experts) == (4 if make is kimi else 2)
    assert report.bytes_after < report.bytes_before
    assert f"{len(report.experts)} sets of experts quantised" in str(report)
    assert torch.isfinite(result(model, tokens(2, 40))).all()


@torch.no_grad()
@pytest.mark.parametrize("make", [kimi, glm])
def test_quantised_experts_are_those_of_their_dequantised_weights(make):
    torch.manual_seed(4)
    experts = getattr(make(), "model", None) or make()
    experts = experts.layers[4].mlp.experts
    if make is glm:
        experts.swiglu_limit = 0.5  # so that some are clamped
    ours = hf.QuantizedExperts(experts, 8)
    for name, part in (("gate_up_proj", ours.gate_up), ("down_proj", ours.down)):
        getattr(experts, name).copy_(torch.stack([torch.from_numpy(m.matrix.dequantize()) for m in part]))
    x, chosen, weights = torch.randn(9, 64), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    chosen[:, 1] = (chosen[:, 0] + 1) % 4
    want = experts(x, chosen, weights)
    got = ours(x, chosen, weights)
    assert distance(got, want) <= 0.02
    absent = torch.cat([chosen, torch.full((9, 1), 4)], 1)  # the index past the last expert stands for none
    assert torch.equal(ours(x, absent, torch.cat([weights, torch.ones(9, 1)], 1)), got)


@torch.no_grad()
def test_released_weights_and_restored_models():
    ids = tokens(1, 20)
    model = kimi()
    plain = result(model, ids)
    hf.accelerate(model)
    want = result(model, ids)
    assert not torch.equal(want, plain)
    with pytest.raises(TypeError, match="restore"):
        copy.deepcopy(model)
    hf.restore(model)
    assert torch.equal(result(model, ids), plain)
    hf.accelerate(model, release_weights=True)
    assert sum(p.numel() for p in model.model.layers[0].self_attn.parameters()) == 0
    assert torch.equal(result(model, ids), want)
    with torch.enable_grad(), pytest.raises(ValueError, match="released"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 64, requires_grad=True))
    with pytest.raises(ValueError, match="released"):
        hf.restore(model)


def test_what_it_refuses():
    model = kimi()
    with pytest.raises(ValueError, match="has no KDA layers"):
        hf.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="weight_format: expected None, 'q8g' or 'q4g', got 'f16'"):
        hf.accelerate(model, "f16")
    with pytest.raises(ValueError, match="quantize_rest"):
        hf.accelerate(model, quantize_rest=True)
    with pytest.raises(ValueError, match=r"expected a weight on the CPU, got one on meta"):
        hf.accelerate(kimi().to("meta"))
    model.model.layers[2].self_attn.activation = "gelu"
    with pytest.raises(ValueError, match=r"model.layers.2.self_attn: expected the activation 'silu', got 'gelu'"):
        hf.accelerate(model)
    assert not any("_kda_runner" in m.__dict__ for m in model.modules())


# ---- gradients ----

@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_the_plain_model(padded):
    """Of every parameter, through a padded batch too (left: there both agree on what padding is)."""
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.int64)
    if padded:
        mask[0, :9] = 0
    models = kimi(), kimi()
    hf.accelerate(models[1])
    losses = []
    for model in models:
        logits = result(model.train(), ids, attention_mask=mask)
        losses.append((logits.square() * mask[:, :, None]).mean())
        losses[-1].backward()
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-5)
    scale = max(float(p.grad.abs().max()) for p in models[0].parameters() if p.grad is not None)
    compared = 0
    for (name, want), (_, got) in zip(*(m.named_parameters() for m in models), strict=True):
        if want.grad is None:
            continue
        error = float((got.grad - want.grad).abs().max())
        assert error <= 1e-4 * float(want.grad.abs().max()) + 1e-6 * scale, name
        compared += 1
    assert compared > 80


def test_with_gradients_wanted_the_cache_goes_on():
    model = kimi()
    hf.accelerate(model)
    ids = tokens(2, 20)
    cache, other = (transformers.DynamicCache(config=model.config) for _ in range(2))
    result(model, ids[:, :15], cache=cache)
    last = result(model, ids[:, 15:], cache=cache)
    assert last.requires_grad
    with torch.no_grad():
        want = result(model, ids, cache=other)
    assert distance(last, want[:, 15:]) <= 1e-5
    for index in range(4):
        assert distance(cache.layers[index].recurrent_states[0], other.layers[index].recurrent_states[0]) <= 1e-5
        assert distance(cache.layers[index].conv_states[0], other.layers[index].conv_states[0]) <= 1e-5


@torch.no_grad()
def test_packed_sequences():
    model = kimi()
    hf.accelerate(model)
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(1))
    y = layer(x, cu_seqlens=torch.tensor([0, 12, 30]))
    for start, end in ((0, 12), (12, 30)):
        assert distance(y[:, start:end], layer(x[:, start:end])) <= 1e-5
    with pytest.raises(ValueError, match="seq_idx"):
        layer(x, seq_idx=torch.zeros(1, 30))
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 30]), attention_mask=torch.ones(1, 30))


# ---- beside fla ----

BESIDE_FLA = """
import sys, warnings
sys.path.insert(0, {tests!r})
{before}
import torch
from test_hf import hf, kimi, tokens
model, ids = kimi(), tokens(1, 20)
with torch.no_grad():
    try:
        plain = model(ids).logits
    except RuntimeError as error:
        plain = None
        print("failed:", error)
    hf.accelerate(model)
    logits = model(ids).logits
    if plain is not None:
        print(float((logits - plain).abs().max() / plain.abs().max()) < 1e-5)
print(logits.double().abs().sum().item())
"""


def beside_fla(before, path=""):
    code = BESIDE_FLA.format(tests=str(__file__).rpartition("/")[0], before=before)
    return python(code, timeout=240, PYTHONPATH=":".join([path, *sys.path]).strip(":")).stdout.splitlines()


def test_an_fla_that_cannot_run_does_not_matter(tmp_path):
    """A package of fla's names whose kernels want a GPU: transformers takes it at import and fails, ours does not."""
    ops = tmp_path / "fla" / "ops" / "kda"
    ops.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("__version__ = '0.6.0'")
    (tmp_path / "fla" / "ops" / "__init__.py").write_text("")
    (ops / "__init__.py").write_text("def chunk_kda(q, k, v, g, beta, **kwargs):\n    raise RuntimeError('no GPU')\n"
                                     "fused_recurrent_kda = chunk_kda\n")
    failed, total = beside_fla("", str(tmp_path))
    assert failed == "failed: no GPU"
    model = kimi()
    hf.accelerate(model)
    with torch.no_grad():
        want = model(tokens(1, 20)).logits.double().abs().sum().item()
    assert float(total) == pytest.approx(want, rel=1e-6)


def test_transformers_takes_our_fla():
    """install() before transformers' module is imported: its own layers call our kernels."""
    same, total = beside_fla("import kda.adapters.fla\n"
                             "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n"
                             "    kda.adapters.fla.install(force=True)\n"
                             "calls = []\nimport fla.ops.kda as ours\n"
                             "from transformers.models.kimi_linear import modeling_kimi_linear as m\n"
                             "assert m.chunk_kimi_delta_attention.__closure__ is not None")
    assert same == "True"
    assert np.isfinite(float(total))
