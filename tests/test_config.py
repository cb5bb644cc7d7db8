"""KDAConfig: what is read from config.json, and what is refused with the key named."""

import copy
import dataclasses
import json
import tracemalloc
from pathlib import Path

import pytest

import kda
from kda import KDAConfig

DATA = Path(kda.__file__).parent / "data"
KIMI = json.loads((DATA / "kimi_linear_48b.json").read_text())
K3 = json.loads((DATA / "kimi_k3.json").read_text())
# GLM-5.3-Flash as its config.json has it: lists that count from 0, experts under DeepSeek's names.
GLM = {
    "model_type": "glm5_next",
    "text_config": {
        "model_type": "glm5_next_text", "hidden_size": 4096, "num_hidden_layers": 45, "vocab_size": 154880,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_attention_heads": 64, "rms_norm_eps": 1e-5,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
        "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(45) if i % 4 != 3], "full_attn_layers": list(range(3, 45, 4))},
        "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "first_k_dense_replace": 3,
        "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1, "hc_mult": 4,
        "index_n_heads": 32, "index_head_dim": 128, "index_kpool": 4, "indexer_types": ["full"] * 45,
    },
    "vision_config": {"model_type": "glm5_next_vision", "hidden_size": 1024},
}
LINEAR = "linear_attn_config"


def changed(config, **edits):
    """A copy with dotted keys set (double underscore for the dot), or deleted where the value is `...`."""
    config = copy.deepcopy(config)
    for path, value in edits.items():
        *tables, key = path.split("__")
        table = config
        for name in tables:
            table = table[name]
        if value is ...:
            del table[key]
        else:
            table[key] = value
    return config


def refused(config, *words):
    with pytest.raises(ValueError, match=r".") as error:
        KDAConfig.from_hf(config)
    for word in words:
        assert word in str(error.value), str(error.value)


# ---- the three families ----

def test_kimi_linear():
    c = KDAConfig.from_hf(DATA / "kimi_linear_48b.json")
    assert (c.model_type, c.hidden_size, c.num_layers, c.vocab_size) == ("kimi_linear", 2304, 27, 163840)
    assert (c.num_heads, c.num_v_heads, c.head_dim, c.v_head_dim, c.conv_size) == (32, 32, 128, 128, 4)
    assert (c.gate, c.gate_lower_bound, c.full_rank_gate, c.norm_eps) == ("softplus", None, False, 1e-5)
    assert c.kda_layers == (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25)
    assert c.mla.layers == (3, 7, 11, 15, 19, 23, 26)
    assert (c.mla.num_heads, c.mla.kv_lora_rank, c.mla.q_lora_rank) == (32, 512, None)
    assert (c.mla.qk_nope_head_dim, c.mla.qk_rope_head_dim, c.mla.v_head_dim) == (128, 64, 128)
    assert not c.mla.output_gate
    assert c.dense_layers == (0,)
    assert c.moe.layers == tuple(range(1, 27))
    assert (c.moe.num_experts, c.moe.top_k, c.moe.num_shared_experts) == (256, 8, 1)
    assert (c.moe.intermediate_size, c.moe.expert_hidden_size) == (1024, 2304)


def test_k3():
    c = KDAConfig.from_hf(K3)
    assert (c.model_type, c.hidden_size, c.num_layers) == ("kimi_k3", 7168, 93)
    assert (c.num_heads, c.num_v_heads, c.head_dim, c.v_head_dim, c.conv_size) == (96, 96, 128, 128, 4)
    assert (c.gate, c.gate_lower_bound, c.full_rank_gate) == ("bounded", -5.0, True)
    assert (len(c.kda_layers), c.kda_layers[:4], c.kda_layers[-1]) == (69, (0, 1, 2, 4), 90)
    assert c.mla.layers == (*range(3, 92, 4), 92)
    assert (c.mla.q_lora_rank, c.mla.output_gate) == (1536, True)
    assert (len(c.moe.layers), c.moe.num_experts, c.moe.top_k, c.moe.num_shared_experts) == (92, 896, 16, 2)
    assert (c.moe.intermediate_size, c.moe.expert_hidden_size, c.moe.latent_norm) == (3072, 3584, True)


def test_glm5_next():
    c = KDAConfig.from_hf(GLM)
    assert (c.model_type, c.hidden_size, c.num_layers) == ("glm5_next", 4096, 45)
    assert (c.num_heads, c.head_dim, c.conv_size) == (64, 128, 4)
    assert (c.gate, c.gate_lower_bound, c.full_rank_gate) == ("bounded", -5.0, False)
    assert c.mla.layers == tuple(range(3, 45, 4))
    assert (len(c.kda_layers), c.kda_layers[:4]) == (34, (0, 1, 2, 4))
    assert (c.mla.qk_rope_head_dim, c.mla.indexer_layers, c.mla.index_kpool) == (0, tuple(range(3, 45, 4)), 4)
    assert (c.dense_layers, c.moe.num_experts, c.moe.top_k) == ((0, 1, 2), 288, 8)


def test_glm5_next_as_transformers_writes_it():
    """Flat, linear_* keys, no lists; and its default bound where the key is missing, which Kimi does not have."""
    text = {k: v for k, v in GLM["text_config"].items() if k != LINEAR}
    text |= {"linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    text["layer_types"] = [t.replace("deepseek_sparse", "indexed") for t in text["layer_types"]]
    assert KDAConfig.from_hf(text) == KDAConfig.from_hf(GLM)
    assert KDAConfig.from_hf(text | {"linear_lower_bound": -3}).gate_lower_bound == -3.0
    assert KDAConfig.from_hf(text | {"linear_lower_bound": None}).gate == "softplus"
    # inside linear_attn_config, null means the default unless safe_gate is false
    assert KDAConfig.from_hf(changed(GLM, text_config__linear_attn_config__gate_lower_bound=None)).gate == "bounded"
    assert KDAConfig.from_hf(changed(GLM, text_config__linear_attn_config__gate_lower_bound=None,
                                     text_config__linear_attn_config__safe_gate=False)).gate == "softplus"


def test_glm_lists_that_count_from_one_are_read_too():
    lists = GLM["text_config"][LINEAR]
    one = {key: [i + 1 for i in lists[key]] for key in ("kda_layers", "full_attn_layers")}
    assert KDAConfig.from_hf(changed(GLM, text_config__linear_attn_config=lists | one)) == KDAConfig.from_hf(GLM)


def test_kimi_linear_as_transformers_writes_it():
    types = ["full_attention" if i in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for i in range(27)]
    flat = {k: v for k, v in KIMI.items() if k not in (LINEAR, "num_experts", "num_experts_per_token",
                                                       "num_shared_experts", "first_k_dense_replace")}
    flat |= {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": types,
             "num_local_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
             "mlp_layer_types": ["dense"] + ["sparse"] * 26}
    assert KDAConfig.from_hf(flat) == KDAConfig.from_hf(KIMI)
    assert KDAConfig.from_hf(KIMI | flat) == KDAConfig.from_hf(KIMI)  # both spellings, agreeing


def test_file_directory_and_dict(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(K3))
    want = KDAConfig.from_hf(K3)
    assert KDAConfig.from_hf(tmp_path) == KDAConfig.from_hf(str(tmp_path / "config.json")) == want
    assert KDAConfig.from_hf(K3["text_config"]) == want  # without the wrapper
    assert KDAConfig.from_hf(KIMI | {"text_config": None}) == KDAConfig.from_hf(KIMI)


def test_the_gates_decide_between_kimi_linear_and_k3():
    """K3's text_config calls itself kimi_linear."""
    assert K3["text_config"]["model_type"] == "kimi_linear"
    bound = KDAConfig.from_hf(changed(KIMI, linear_attn_config__gate_lower_bound=-5))
    assert (bound.model_type, bound.gate_lower_bound, bound.full_rank_gate) == ("kimi_k3", -5.0, False)
    full = KDAConfig.from_hf(changed(KIMI, linear_attn_config__use_full_rank_gate=True))
    assert (full.model_type, full.gate, full.full_rank_gate) == ("kimi_k3", "softplus", True)
    neither = changed(KIMI, linear_attn_config__gate_lower_bound=None, linear_attn_config__use_full_rank_gate=False)
    assert KDAConfig.from_hf(neither) == KDAConfig.from_hf(KIMI)


def test_value_heads_where_present():
    c = KDAConfig.from_hf(changed(KIMI, linear_attn_config__num_v_heads=64, linear_attn_config__v_head_dim=256))
    assert (c.num_heads, c.num_v_heads, c.head_dim, c.v_head_dim) == (32, 64, 128, 256)
    refused(changed(KIMI, linear_attn_config__num_v_heads=48), "num_v_heads", "multiple of num_heads = 32", "48")


def test_defaults_are_those_of_transformers():
    for config in (KIMI, changed(K3, text_config__rms_norm_eps=...)["text_config"], GLM["text_config"]):
        config = {k: v for k, v in config.items() if k not in ("rms_norm_eps", "tie_word_embeddings")}
        c = KDAConfig.from_hf(config)
        assert (c.norm_eps, c.tie_word_embeddings) == (1e-5, False)


def test_what_only_the_planner_needs_may_be_missing():
    c = KDAConfig.from_hf(changed(K3, text_config__moe_intermediate_size=..., text_config__vocab_size=...))
    assert (c.moe.intermediate_size, c.vocab_size) == (None, None)
    dense = KDAConfig.from_hf({k: v for k, v in KIMI.items() if "expert" not in k})
    assert dense.moe is None
    assert dense.dense_layers == tuple(range(27))


# ---- identity ----

def test_identity_is_stable_and_of_the_state_alone():
    """Pinned: files of earlier versions hold it."""
    assert KDAConfig.from_hf(KIMI).identity == "kimi_linear-b8b3323e350efbc6"
    assert KDAConfig.from_hf(K3).identity == KDAConfig.from_hf(K3["text_config"]).identity == "kimi_k3-555f46d335a22605"
    base = KDAConfig.from_hf(KIMI)
    for same in ({"vocab_size": 1}, {"moe": None}, {"intermediate_size": 7}):
        assert dataclasses.replace(base, **same).identity == base.identity


@pytest.mark.parametrize("change", [
    {"hidden_size": 2305}, {"num_layers": 28}, {"kda_layers": (0, 1, 2)}, {"num_heads": 16}, {"num_v_heads": 64},
    {"head_dim": 64}, {"v_head_dim": 64}, {"conv_size": 3}, {"gate_lower_bound": -5.0}, {"full_rank_gate": True},
    {"norm_eps": 1e-6}, {"model_type": "kimi_k3"}], ids=lambda change: next(iter(change)))
def test_identity_changes_with_everything_that_a_state_depends_on(change):
    base = KDAConfig.from_hf(KIMI)
    assert dataclasses.replace(base, **change).identity != base.identity


def test_identity_does_not_depend_on_how_a_number_is_written():
    base = KDAConfig.from_hf(K3)
    again = dataclasses.replace(base, gate_lower_bound=-5, kda_layers=list(base.kda_layers))
    assert again == base
    assert again.identity == base.identity


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KDAConfig.from_hf(KIMI).num_heads = 1


# ---- refusals ----

@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "kv_lora_rank", "qk_nope_head_dim",
                                 "qk_rope_head_dim", "v_head_dim", "num_attention_heads", "first_k_dense_replace",
                                 "num_experts_per_token", "model_type"])
def test_missing_key(key):
    refused(changed(KIMI, **{key: ...}), f"missing key {key}", "looked for", "expected")


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "short_conv_kernel_size"])
def test_missing_key_of_linear_attn_config(key):
    refused(changed(KIMI, **{f"{LINEAR}__{key}": ...}), f"missing key {key}", f"{LINEAR}.{key} and linear_")


def test_missing_layer_lists():
    refused(changed(KIMI, linear_attn_config__kda_layers=...), "kda_layers: missing", "full_attn_layers is there")
    refused(changed(KIMI, linear_attn_config__full_attn_layers=...), "full_attn_layers: missing")
    refused(changed(KIMI, linear_attn_config__kda_layers=..., linear_attn_config__full_attn_layers=...),
            "missing key kda_layers", "layer_types")
    refused(KIMI | {LINEAR: None}, "missing key kda_layers")


@pytest.mark.parametrize(("edit", "words"), [
    ({"kda_layers": [*KIMI[LINEAR]["kda_layers"], 4]}, ["kda_layers", "layer 4 also in full_attn_layers"]),
    ({"kda_layers": KIMI[LINEAR]["kda_layers"][:-2]}, ["kda_layers", "layers 25, 26 in neither"]),
    ({"kda_layers": [*KIMI[LINEAR]["kda_layers"], 28]}, ["kda_layers", "layer 28 out of range"]),
    ({"kda_layers": [*KIMI[LINEAR]["kda_layers"], 26]}, ["kda_layers", "layer 26 listed twice"]),
    ({"kda_layers": [i - 1 for i in KIMI[LINEAR]["kda_layers"]],
      "full_attn_layers": [i - 1 for i in KIMI[LINEAR]["full_attn_layers"]]},
     ["layer 27 in neither", "layer 0 out of range"]),  # Kimi's lists count from 1, always
    ({"kda_layers": [1.0]}, ["kda_layers", "list of layer numbers"]),
    ({"kda_layers": "1,2"}, ["kda_layers", "list of layer numbers"]),
    ({"num_heads": 0}, ["num_heads", "integer >= 1", "got 0"]),
    ({"num_heads": True}, ["num_heads", "integer >= 1", "True"]),
    ({"head_dim": "128"}, ["head_dim", "'128'"]),
    ({"short_conv_kernel_size": 4.0}, ["short_conv_kernel_size", "4.0"]),
    ({"gate_lower_bound": 5.0}, ["gate_lower_bound", "negative"]),
    ({"gate_lower_bound": 0}, ["gate_lower_bound", "negative"]),
    ({"gate_lower_bound": float("nan")}, ["gate_lower_bound", "negative"]),
    ({"gate_lower_bound": "-5"}, ["gate_lower_bound", "a number or null"]),
    ({"use_full_rank_gate": 1}, ["use_full_rank_gate", "true or false"]),
])
def test_contradictory_and_malformed_keys_of_linear_attn_config(edit, words):
    refused(KIMI | {LINEAR: KIMI[LINEAR] | edit}, *words)


@pytest.mark.parametrize(("edit", "words"), [
    ({"linear_num_heads": 16}, ["num_heads", "contradictory", "32", "16", "linear_num_heads"]),
    ({"n_routed_experts": 128}, ["num_experts", "contradictory", "256", "128"]),
    ({"layer_types": ["linear_attention"] * 27}, ["layer_types", "contradictory", "kda_layers"]),
    ({"layer_types": ["linear_attention"] * 26}, ["layer_types", "27 layers"]),
    ({"layer_types": ["mamba"] * 27}, ["layer_types", "layer 0", "mamba"]),
    ({"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "27 layers"]),
    ({"num_experts_per_token": 257}, ["num_experts_per_token", "257 of num_experts = 256"]),
    ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
    ({"rms_norm_eps": None}, ["rms_norm_eps", "None"]),
    ({"num_hidden_layers": 28}, ["num_hidden_layers = 28", "layer 28 in neither"]),
    ({"linear_attn_config": [1]}, ["linear_attn_config", "an object"]),
    ({"model_type": "llama"}, ["model_type", "'llama'", "kimi_linear"]),
    ({"text_config": 3}, ["text_config", "an object"]),
])
def test_contradictory_and_malformed_keys(edit, words):
    refused(KIMI | edit, *words)


@pytest.mark.parametrize("edits", [{"num_hidden_layers": 10**18}, {"num_hidden_layers": 2**31 - 1},
                                   {"vocab_size": 10**400}, {"rms_norm_eps": 10**400}])
def test_a_large_number_is_not_believed(edits):
    """Refused at once: nothing as long as the number says is built, and no float has to hold it."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"expected .*at most 2147483647|kda_layers: contra"):
        KDAConfig.from_hf(KIMI | edits)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_layer_list_that_says_one_layer_very_often():
    """In time that grows with its length, not with the square."""
    lists = KIMI["linear_attn_config"] | {"kda_layers": [1] * 300_000}
    with pytest.raises(ValueError, match="kda_layers: contradictory: layer 1 listed twice"):
        KDAConfig.from_hf(KIMI | {"linear_attn_config": lists})


def test_deep_nesting_is_no_config(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json: expected JSON: .*recursion"):
        KDAConfig.from_hf(tmp_path)


def test_unknown_architectures_in_a_wrapper():
    refused(changed(K3, model_type="kimi_k25"), "model_type", "'kimi_k25'", "expected one of")
    refused(changed(K3, text_config__model_type="deepseek_v3"), "text_config.model_type", "'deepseek_v3'")
    refused(changed(GLM, text_config__model_type="kimi_linear"), "contradictory model_type", "glm5_next")
    refused(changed(K3, text_config__hidden_size=...), "text_config: missing key hidden_size")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        KDAConfig.from_hf(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="config"):
        KDAConfig.from_hf(tmp_path)
    bad = tmp_path / "bad.json"
    for text, word in (("{", "expected JSON"), ("[1]", "expected a JSON object, got list"), ("\xff", "expected JSON")):
        bad.write_bytes(text.encode("latin-1"))
        refused(bad, str(bad), word)
    with pytest.raises(TypeError, match="path or a dict, got int"):
        KDAConfig.from_hf(3)


@pytest.mark.parametrize(("edit", "word"), [
    ({"num_heads": 0}, "num_heads"), ({"num_v_heads": 48}, "num_v_heads"), ({"conv_size": 4.0}, "conv_size"),
    ({"gate_lower_bound": 1.0}, "gate_lower_bound"), ({"norm_eps": 2.0}, "norm_eps"),
    ({"kda_layers": (1, 0)}, "kda_layers"), ({"kda_layers": (27,)}, "kda_layers")])
def test_fields_that_cannot_belong_together(edit, word):
    with pytest.raises(ValueError, match=rf"KDAConfig\.{word}: expected"):
        dataclasses.replace(KDAConfig.from_hf(KIMI), **edit)
