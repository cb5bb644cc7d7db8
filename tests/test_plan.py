"""The planner's figures against values worked out by hand, its tables, `kda plan`, and the disk's bound."""

import json
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
from test_config import GLM, K3, KIMI, changed

import kda
from kda import KDAConfig
from kda.cli import main
from kda.plan import Shape, expert_bytes, matrix_bytes

MODELS = {"k3": KDAConfig.from_hf(K3), "kimi": KDAConfig.from_hf(KIMI), "glm": KDAConfig.from_hf(GLM)}
# The tiny model of transformers' kimi_linear whose tensors are stored for the layer's tests: 307,188 floats.
TINY = KIMI | {
    "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 257, "num_attention_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 128, "num_experts": 8,
    "num_experts_per_token": 2, "moe_intermediate_size": 32,
    "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3],
                           "full_attn_layers": [4]}}


def part(plan, name):
    (found,) = [c for c in plan.components if c.name == name]
    return found


# ---- state ----

@pytest.mark.parametrize(("model", "context", "state", "conv", "mla"), [
    ("k3", 4096, 434_110_464, 30_523_392, 226_492_416),
    ("k3", 1_048_576, 434_110_464, 30_523_392, 54 * 2**30),
    ("kimi", 4096, 41_943_040, 2_949_120, 66_060_288),
    ("kimi", 1, 41_943_040, 2_949_120, 16_128),
    ("glm", 4096, 34 * 64 * 128 * 128 * 4, 34 * 3 * 3 * 64 * 128 * 4, 11 * 4096 * 512 * 4),
])
def test_state_bytes(model, context, state, conv, mla):
    p = kda.plan(MODELS[model], context)
    assert (p.kda_state_bytes, p.conv_state_bytes, p.mla_cache_bytes) == (state, conv, mla)
    assert p.state_bytes == state + conv + mla


def test_state_of_k3_at_4096_tokens():
    p = kda.plan(MODELS["k3"])
    assert (p.context, p.batch, p.weight_format) == (4096, 1, "q8g")
    assert p.state_bytes == 691_126_272
    assert p.state_traffic_bytes_per_token == 2 * (434_110_464 + 30_523_392) + 226_492_416


def test_a_batch_multiplies_the_state_and_nothing_per_token():
    one, four = kda.plan(MODELS["kimi"], 1000), kda.plan(MODELS["kimi"], np.int64(1000), batch=4)
    assert four.state_bytes == 4 * one.state_bytes
    for name in ("mac_per_token", "weight_bytes", "weight_bytes_per_token", "cache_bytes_per_token",
                 "attention_mac_per_token", "state_traffic_bytes_per_token", "bytes_per_token"):
        assert getattr(four, name) == getattr(one, name), name


def test_only_the_full_attention_layers_grow():
    a, b = (kda.plan(MODELS["k3"], n) for n in (1000, 1001))
    changing = {k for k, v in a.to_dict().items() if v != b.to_dict()[k]}
    assert changing == {"context", "mla_cache_bytes", "state_bytes", "attention_mac_per_token", "total_mac_per_token",
                        "state_traffic_bytes_per_token", "bytes_per_token"}
    assert b.state_bytes - a.state_bytes == a.cache_bytes_per_token == 55_296
    assert b.attention_mac_per_token - a.attention_mac_per_token == 24 * 96 * (512 + 64 + 512)


def test_value_heads_and_value_width_of_their_own():
    c = KDAConfig.from_hf(changed(KIMI, linear_attn_config__num_v_heads=64, linear_attn_config__v_head_dim=256))
    p = kda.plan(c, weight_format="f32")
    assert p.kda_state_bytes == 20 * 64 * 128 * 256 * 4
    assert p.conv_state_bytes == 20 * 3 * (2 * 32 * 128 + 64 * 256) * 4
    assert p.mac_per_token == 3 * 20 * 64 * 128 * 256
    assert part(p, "KDA q, k, v projections").bytes_per_layer == 4 * 2304 * (2 * 4096 + 64 * 256)
    assert part(p, "KDA decay gate").bytes_per_layer == 4 * (128 * 2304 + 64 * 128 * 128 + 64 * 128 + 64)
    assert part(p, "KDA output gate").bytes_per_layer == 4 * (128 * 2304 + 64 * 256 * 128)
    assert part(p, "KDA output norm, projection").bytes_per_layer == 4 * (2304 * 64 * 256 + 256)


# ---- work ----

@pytest.mark.parametrize(("model", "mac"), [("k3", 325_582_848), ("kimi", 31_457_280), ("glm", 34 * 3_145_728)])
def test_work_of_the_delta_rule(model, mac):
    p = kda.plan(MODELS[model])
    assert (p.mac_per_token, p.flop_per_token) == (mac, 2 * mac)
    assert p.flop_with_decay_per_token == 2 * mac + mac // 3


def test_work_agrees_with_the_published_sizes():
    """One MAC per active weight: K3 is published as 2.8 T weights with 104 B active, Kimi-Linear as 48 B and 3 B."""
    k3, kimi = (kda.plan(MODELS[name], weight_format="bf16") for name in ("k3", "kimi"))
    assert k3.weight_mac_per_token == 104_184_266_752
    assert kimi.weight_mac_per_token == 3_106_750_464
    assert 2.75e12 < k3.weight_bytes / 2 < 2.85e12
    assert 48e9 < kimi.weight_bytes / 2 < 50e9


def test_attention_work_counts_absorbed_queries():
    p = kda.plan(MODELS["kimi"], 100)
    assert p.attention_mac_per_token == 7 * 32 * 100 * (512 + 64 + 512)
    assert p.total_mac_per_token == p.mac_per_token + p.weight_mac_per_token + p.attention_mac_per_token


def test_counts_and_plan_share_their_arithmetic():
    from kda.perf import counts

    assert counts.Shape is Shape
    assert counts.K3.mac == kda.plan(MODELS["k3"]).mac_per_token


# ---- weights ----

@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 127), (5, 128), (7, 129), (16, 300)])
@pytest.mark.parametrize("bits", [8, 4])
def test_matrix_bytes_are_those_of_a_quantised_matrix(rows, columns, bits):
    w = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    matrix = kda.QuantizedMatrix.quantize(w, bits)
    assert matrix_bytes(rows, columns, f"q{bits}g") == matrix.codes.nbytes + matrix.scales.nbytes
    assert matrix_bytes(rows, columns, "f32") == w.nbytes
    assert matrix_bytes(rows, columns, "bf16") == w.astype(ml_dtypes.bfloat16).nbytes


def test_bits_per_weight():
    assert matrix_bytes(100, 1280, "q8g") * 8 / 128_000 == 8.125
    assert matrix_bytes(100, 1280, "q4g") * 8 / 128_000 == 4.125


def test_every_tensor_of_a_real_checkpoint_is_counted():
    """transformers' tiny model: all its tensors, and those of one layer of each kind."""
    p = kda.plan(KDAConfig.from_hf(TINY), weight_format="f32")
    assert p.weight_bytes == 4 * 307_188
    assert sum(c.bytes_per_layer for c in p.components if c.name.startswith("KDA")) == 4 * 21_588
    assert part(p, "MLA projections, norms").bytes_per_layer == 4 * 16_928
    moe = ["router", "shared experts", "routed experts"]
    assert sum(part(p, name).bytes_per_layer for name in moe) == 4 * 55_816


@pytest.mark.parametrize(("name", "layers", "floats"), [
    ("KDA q, k, v projections", 69, 3 * 12288 * 7168),
    ("KDA short convolutions", 69, 3 * 12288 * 4),
    ("KDA decay gate", 69, 128 * 7168 + 12288 * 128 + 12288 + 96),
    ("KDA beta", 69, 96 * 7168),
    ("KDA output gate", 69, 12288 * 7168),  # full rank
    ("KDA output norm, projection", 69, 7168 * 12288 + 128),
    ("MLA projections, norms", 24, 1536 * 7168 + 1536 + 96 * 192 * 1536 + 576 * 7168 + 512 + 96 * 256 * 512
     + 7168 * 12288 + 12288 * 7168),  # low-rank queries, an output gate
    ("dense MLP", 1, 3 * 33792 * 7168),
    ("router", 92, 896 * 7168 + 896),
    ("expert latent projections", 92, 2 * 3584 * 7168 + 3584),
    ("shared experts", 92, 3 * 6144 * 7168),
    ("routed experts", 92, 896 * 3 * 3072 * 3584),
    ("layer norms", 93, 6 * 7168),  # two norms, and two residual scores with a norm and a vector each
    ("final norm", 1, 3 * 7168),
    ("embedding", 1, 163840 * 7168),
    ("lm_head", 1, 163840 * 7168),
])
def test_weights_of_k3_by_component(name, layers, floats):
    p = kda.plan(MODELS["k3"], weight_format="f32")
    c = part(p, name)
    assert (c.layers, c.bytes_per_layer, c.bytes) == (layers, 4 * floats, 4 * floats * layers)
    if name == "routed experts":
        assert c.read_bytes_per_layer == 4 * 16 * 3 * 3072 * 3584
    elif name == "embedding":
        assert (c.read_bytes, c.mac) == (4 * 7168, 0)
    else:
        assert c.read_bytes == c.bytes
    assert len(p.components) == 16


def test_one_kimi_linear_layer_in_q8g_by_hand():
    p = kda.plan(MODELS["kimi"])
    q8 = {"KDA q, k, v projections": 3 * 4096 * 18 * 130, "KDA short convolutions": 3 * 4096 * 4 * 4,
          "KDA decay gate": 128 * 18 * 130 + 4096 * 130 + 4 * (4096 + 32), "KDA beta": 32 * 18 * 130,
          "KDA output gate": 128 * 18 * 130 + 4096 * 130, "KDA output norm, projection": 2304 * 32 * 130 + 4 * 128}
    assert {c.name: c.bytes_per_layer for c in p.components if c.name.startswith("KDA")} == q8
    assert part(p, "routed experts").read_bytes_per_layer == 8 * (2 * 1024 * 18 * 130 + 2304 * 8 * 130)
    assert p.weight_bytes_per_token == sum(c.read_bytes for c in p.components)
    q4 = kda.plan(MODELS["kimi"], weight_format="q4g")
    assert part(q4, "KDA q, k, v projections").bytes_per_layer == 3 * 4096 * 18 * 66


def test_tied_embeddings_are_stored_once_and_read_as_the_head():
    p = kda.plan(KDAConfig.from_hf(KIMI | {"tie_word_embeddings": True}), weight_format="bf16")
    head = part(p, "lm_head (the embedding)")
    assert (head.bytes, head.read_bytes, head.mac) == (0, 2 * 163840 * 2304, 163840 * 2304)
    assert p.weight_bytes == kda.plan(MODELS["kimi"], weight_format="bf16").weight_bytes - 2 * 163840 * 2304


def test_what_the_config_lacks_is_unknown_and_said():
    c = KDAConfig.from_hf(changed(K3, text_config__moe_intermediate_size=..., text_config__intermediate_size=...))
    p = kda.plan(c)
    assert p.unknown == ("intermediate_size", "moe_intermediate_size")
    assert part(p, "routed experts").bytes is None
    assert (p.weight_bytes, p.weight_bytes_per_token, p.bytes_per_token, p.total_mac_per_token) == (None,) * 4
    assert (p.expert_record_bytes, p.expert_read_bytes_per_token) == (None, None)
    assert p.state_bytes == 691_126_272
    assert "lacks: intermediate_size, moe_intermediate_size" in str(p)
    assert kda.plan(MODELS["k3"]).unknown == ()


def test_what_is_not_counted_is_said():
    assert "attention is counted over all tokens" in str(kda.plan(MODELS["glm"]))
    assert "hyper-connections" in str(kda.plan(MODELS["glm"]))
    assert "indexer" not in str(kda.plan(MODELS["k3"]))


def test_a_model_of_kda_layers_alone():
    config = {"model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 10,
              "intermediate_size": 32, "linear_attn_config": {"num_heads": 2, "head_dim": 16, "kda_layers": [1, 2],
                                                              "short_conv_kernel_size": 4, "full_attn_layers": []}}
    p = kda.plan(KDAConfig.from_hf(config))
    assert (p.mla_cache_bytes, p.attention_mac_per_token, p.expert_record_bytes) == (0, 0, None)
    assert p.expert_read_bytes_per_token is None
    assert "grows" not in str(p)
    assert "MLA" not in str(p)


# ---- records of experts ----

def test_expert_records():
    k3, kimi = (kda.plan(MODELS[name], expert_format="vq3r") for name in ("k3", "kimi"))
    assert (k3.expert_record_bytes, k3.expert_read_bytes_per_token) == (12_406_784, 18_262_786_048)
    assert (kimi.expert_record_bytes, kimi.expert_read_bytes_per_token) == (2_666_496, 2_666_496 * 8 * 26)
    q4 = kda.plan(MODELS["k3"], weight_format="q4g")
    payload = 2 * 3072 * 28 * 66 + 3584 * 24 * 66
    assert expert_bytes(MODELS["k3"], "q4g") == payload
    assert q4.expert_record_bytes == -(-(48 + payload) // 4096) * 4096


# ---- arguments ----

@pytest.mark.parametrize(("arguments", "message"), [
    ({"context": 0}, "context: expected an integer >= 1, got 0"),
    ({"context": 10**400}, "context: expected at most 9007199254740992"),  # no float holds its bytes
    ({"context": 4096.0}, "context: expected an integer >= 1, got 4096.0"),
    ({"context": True}, "context: expected an integer"),
    ({"batch": -1}, "batch: expected an integer >= 1, got -1"),
    ({"weight_format": "int8"}, "weight_format: expected one of f32, bf16, q8g, q4g, got 'int8'"),
    ({"weight_format": "vq3r"}, "weight_format: expected one of f32, bf16, q8g, q4g, got"),
    ({"expert_format": "q5"}, "expert_format: expected one of f32, bf16, q8g, q4g, vq3r, got 'q5'"),
    ({"state_dtype": "float16"}, "state_dtype: expected one of float32, bfloat16, got 'float16'"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kda.plan(MODELS["kimi"], **arguments)


def test_a_config_is_required():
    with pytest.raises(TypeError, match=r"KDAConfig\.from_hf"):
        kda.plan(KIMI)


def test_a_bfloat16_state_takes_half():
    """As KDAState does; the histories stay float32."""
    full, half = (kda.plan(MODELS["kimi"], state_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert (full.kda_state_bytes, half.kda_state_bytes) == (41_943_040, 20_971_520)
    assert half.conv_state_bytes == full.conv_state_bytes
    assert full.state_traffic_bytes_per_token - half.state_traffic_bytes_per_token == 41_943_040
    state = kda.KDAState(MODELS["kimi"], state_dtype="bfloat16")
    assert 20 * state.nbytes == half.kda_state_bytes + half.conv_state_bytes


# ---- tables and JSON ----

def test_the_table_names_its_units():
    text = str(kda.plan(MODELS["k3"]))
    for row in (r"KDA state, float32 +434,110,464 +414\.0 MiB +434\.1 MB +constant",
                r"MLA latents, 4,096 tokens +226,492,416 +216\.0 MiB +226\.5 MB +55,296 B per token",
                r"all state, 4,096 tokens +691,126,272 +659\.1 MiB +691\.1 MB",
                r"delta rule +4,718,592 +325,582,848 +651,165,696 +constant"):
        assert re.search(row, text), row
    assert "69 KDA + 24 full attention" in text
    assert "MB is 10^6 bytes, GB 10^9, MiB 2^20, GiB 2^30" in text


def test_to_dict_is_json_and_has_every_figure():
    p = kda.plan(MODELS["k3"], 2048, 2, "q4g")
    d = json.loads(json.dumps(p.to_dict()))
    assert d["state_bytes"] == p.state_bytes
    assert (d["context"], d["batch"], d["weight_format"], d["identity"]) == (2048, 2, "q4g", MODELS["k3"].identity)
    assert d["components"][0]["bytes"] == p.components[0].bytes
    assert sum(c["bytes"] for c in d["components"]) == d["weight_bytes"]
    assert d["config"]["mla"]["kv_lora_rank"] == 512


def test_kda_plan_as_text_and_markdown(capsys):
    assert main(["plan", "kimi_k3", "--context", "4096,1048576", "--format", "q8g"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"all state, 1,048,576 tokens +58,446,692,352 +54\.43 GiB +58\.45 GB", text)
    assert re.search(r"MLA latents, 1,048,576 tokens +57,982,058,496 +54\.00 GiB", text)
    assert main(["plan", "kimi_k3", "--context", "4096,1048576", "-o", "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| KDA state, float32 | 434,110,464 | 414.0 MiB | 434.1 MB | constant |" in lines
    for head in (i for i, line in enumerate(lines) if line.startswith("| ---")):
        table = [line.count("|") for line in lines[head - 1:] if line]
        width = table[0]
        assert table[:3] == [width] * 3


def test_kda_plan_as_json(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KIMI))
    assert main(["plan", str(tmp_path), "--context", "1,4096", "--batch", "2", "--format", "q4g", "-o", "json"]) == 0
    d = json.loads(capsys.readouterr().out)
    assert [p["context"] for p in d["plans"]] == [1, 4096]
    assert d["plans"][1] == json.loads(json.dumps(kda.plan(MODELS["kimi"], 4096, 2, "q4g").to_dict()))
    assert d["nvme"] is None
    assert main(["plan", str(tmp_path), "--state", "bfloat16", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["kda_state_bytes"] == 20_971_520


def test_kda_plan_with_a_disk(capsys):
    arguments = ["plan", "kimi_k3", "--experts", "vq3r", "--bandwidth", "12.78GB/s"]
    assert main(arguments) == 0
    assert "18,262,786,048 B per token, at most 0.6998 tokens/s" in capsys.readouterr().out
    assert main([*arguments, "--hit-rate", "0.5", "-o", "json"]) == 0
    nvme = json.loads(capsys.readouterr().out)["nvme"]
    assert nvme["tokens_per_s"] == pytest.approx(2 * 12.78e9 / 18_262_786_048)


@pytest.mark.parametrize(("arguments", "message"), [
    (["no/such.json"], "no/such.json"),
    (["kimi_k3", "--context", "0"], "context: expected an integer >= 1"),
    (["kimi_k3", "--bandwidth", "12.78"], "bandwidth: expected a number with its unit"),
    (["kimi_k3", "--bandwidth", "12.78GB/s", "--hit-rate", "75"], "hit_rate"),
])
def test_kda_plan_refuses_with_status_2(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_kda_plan_refuses_contexts_that_are_no_numbers(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "kimi_k3", "--context", "4k"])
    assert "expected token counts like 4096,1048576, got '4k'" in capsys.readouterr().err


# ---- the disk ----

@pytest.mark.parametrize(("bandwidth", "tokens"), [
    (12.78e9, 0.6998), (12_780_000_000, 0.6998), ("12.78GB/s", 0.6998), (" 12.78 GB/s", 0.6998),
    ("12780MB/s", 0.6998), ("12.78GiB/s", 0.7514), ("13086.72MiB/s", 0.7514), (np.float64(12.78e9), 0.6998)])
def test_nvme_ceiling_keeps_gb_and_gib_apart(bandwidth, tokens):
    assert round(kda.nvme_ceiling(18_262_786_048, bandwidth), 4) == tokens


def test_nvme_ceiling_is_a_number_with_its_parts():
    bound = kda.nvme_ceiling(1e9, "2GB/s")
    assert isinstance(bound, float)
    assert (bound, bound.serial, bound.overlapped, bound.io_s, bound.bytes_read) == (2.0, 2.0, 2.0, 0.5, 1e9)
    assert bound.bound_by == "disk"
    assert pickle.loads(pickle.dumps(bound)).io_s == 0.5


def test_hits_read_nothing():
    bound = kda.nvme_ceiling(1e9, 1e9, hit_rate=0.75)
    assert (bound, bound.bytes_read) == (4.0, 0.25e9)


def test_serial_and_overlapped_bounds_name_what_binds():
    slow_disk = kda.nvme_ceiling(1e9, "1GB/s", compute_s=0.25, rest_s=0.25)
    assert (slow_disk.serial, slow_disk.overlapped, slow_disk.bound_by) == (1 / 1.5, 1 / 1.25, "disk")
    slow_cpu = kda.nvme_ceiling(1e9, "10GB/s", compute_s=0.9)
    assert slow_cpu.serial == pytest.approx(1.0)
    assert (slow_cpu.overlapped, slow_cpu.bound_by) == (1 / 0.9, "compute")
    assert slow_cpu == slow_cpu.overlapped


def test_without_reads_compute_is_the_bound():
    all_hits = kda.nvme_ceiling(1e9, "1GB/s", 1.0, compute_s=0.5)
    assert (all_hits, all_hits.serial, all_hits.bound_by) == (2.0, 2.0, "compute")
    with pytest.raises(ValueError, match="reads nothing from the disk"):
        kda.nvme_ceiling(1e9, "1GB/s", 1.0)


@pytest.mark.parametrize(("arguments", "message"), [
    ((18.26, 12.78e9), "bytes_per_token: .* is it in GB"),
    ((0, 1e9), "bytes_per_token"), ((-1e9, 1e9), "bytes_per_token"), ((float("nan"), 1e9), "bytes_per_token"),
    ((float("inf"), 1e9), "bytes_per_token"),
    ((1e9, 12.78), "bandwidth: expected bytes/s"), ((1e9, 0), "bandwidth"), ((1e9, -1e9), "bandwidth"),
    ((1e9, float("inf")), "bandwidth"), ((1e9, float("nan")), "bandwidth"), ((1e9, "12.78"), "bandwidth: .* its unit"),
    ((1e9, "12.78Gb/s"), "bandwidth: .* its unit"), ((1e9, "12.78GB"), "bandwidth: .* its unit"),
    ((1e9, "-1GB/s"), "bandwidth: .* its unit"), ((1e9, "0GB/s"), "bandwidth"), ((1e9, "nanGB/s"), "bandwidth"),
    ((1e9, "5TB/s"), "bandwidth"), ((1e9, 1e9, -0.1), "hit_rate"), ((1e9, 1e9, 1.5), "hit_rate: .* percent"),
    ((1e9, 1e9, float("nan")), "hit_rate"),
])
def test_nvme_ceiling_refuses_the_absurd(arguments, message):
    with pytest.raises(ValueError, match=message):
        kda.nvme_ceiling(*arguments)


@pytest.mark.parametrize("name", ["compute_s", "rest_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_nvme_ceiling_refuses_times_that_are_none(name, value):
    with pytest.raises(ValueError, match=name):
        kda.nvme_ceiling(1e9, 1e9, **{name: value})


def test_nvme_ceiling_takes_numbers_and_has_no_default_bytes():
    for arguments in (("18GB", 1e9), (1e9, None), (True, 1e9), (1e9, 1e9, "0.5")):
        with pytest.raises(TypeError, match="expected a number"):
            kda.nvme_ceiling(*arguments)
    with pytest.raises(TypeError, match="bytes_per_token"):
        kda.nvme_ceiling(bandwidth="12.78GB/s")
