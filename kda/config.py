"""What a model's config.json says about its KDA layers, and about the rest as far as the planner needs it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NoReturn

# model_type of a config.json, or of its text_config, that this package knows.
_KIMI = ("kimi_linear", "kimi_k3")
_GLM = ("glm5_next", "glm5_next_text")
_MOST = (1 << 31) - 1  # of any number of things; products of several stay what a float can hold
_KDA_TYPES = ("linear_attention",)
_FULL_TYPES = ("full_attention", "indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True)
class MLAConfig:
    """The full-attention layers (multi-head latent attention); `layers` are counted from 0.

    q_lora_rank is None where one projection makes the queries. index_* describe GLM-5-Next's sparse indexer, whose
    layers are `indexer_layers`; None and empty elsewhere.
    """

    layers: tuple[int, ...]
    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = False
    indexer_layers: tuple[int, ...] = ()
    index_heads: int | None = None
    index_head_dim: int | None = None
    index_kpool: int | None = None


@dataclass(frozen=True)
class MoEConfig:
    """The mixture-of-experts layers; `layers` are counted from 0.

    An expert is w1 and w3 [intermediate_size, expert_hidden_size] and w2 [expert_hidden_size, intermediate_size];
    expert_hidden_size is the hidden size, or the narrower latent that K3 projects down to and up from. The shared
    experts are one MLP of num_shared_experts * intermediate_size at the hidden size. intermediate_size is None where
    the config does not say.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    num_shared_experts: int
    intermediate_size: int | None
    expert_hidden_size: int
    latent_norm: bool = False


@dataclass(frozen=True)
class KDAConfig:
    """A model with KDA layers. Made by `from_hf` from a config.json, or field by field.

    model_type          "kimi_linear", "kimi_k3" or "glm5_next"; Kimi-Linear and K3 are told apart by their gates
    kda_layers          indices of the KDA layers, counted from 0 (config.json counts Kimi's from 1)
    num_heads           H, query and key heads
    num_v_heads         HV, value heads; a multiple of H
    head_dim            K; also the rank of the low-rank gates
    v_head_dim          V
    conv_size           W, taps of the short convolution
    gate_lower_bound    None: g = -exp(A_log) softplus(z); negative: g = gate_lower_bound sigmoid(exp(A_log) z)
    full_rank_gate      the output gate is one matrix (g_proj), not two of rank K (g_a_proj, g_b_proj)
    norm_eps            of the gated output norm, 1e-5 where config.json has no rms_norm_eps

    The other fields (vocab_size, intermediate_size of the dense layers, attn_res_block_size, hc_mult, mla, moe) serve
    the planner and are None where the config does not have them.

    Raises ValueError for values that cannot belong together.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    kda_layers: tuple[int, ...]
    num_heads: int
    num_v_heads: int
    head_dim: int
    v_head_dim: int
    conv_size: int
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False
    norm_eps: float = 1e-5
    vocab_size: int | None = None
    intermediate_size: int | None = None
    tie_word_embeddings: bool = False
    attn_res_block_size: int | None = None
    hc_mult: int | None = None
    mla: MLAConfig | None = field(default=None)
    moe: MoEConfig | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kda_layers", tuple(self.kda_layers))
        for name in ("hidden_size", "num_layers", "num_heads", "num_v_heads", "head_dim", "v_head_dim", "conv_size"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"KDAConfig.{name}: expected an integer >= 1, got {value!r}")
            if value > _MOST:
                raise ValueError(f"KDAConfig.{name}: expected at most {_MOST}, got {value}")
        if self.num_v_heads % self.num_heads:
            raise ValueError(f"KDAConfig.num_v_heads: expected a multiple of num_heads = {self.num_heads}, "
                             f"got {self.num_v_heads}")
        if self.gate_lower_bound is not None and not -float("inf") < self.gate_lower_bound < 0:
            raise ValueError(f"KDAConfig.gate_lower_bound: expected None or a negative number, "
                             f"got {self.gate_lower_bound!r}")
        if not 0 <= self.norm_eps < 1:
            raise ValueError(f"KDAConfig.norm_eps: expected a number from 0 to 1, got {self.norm_eps!r}")
        for name in ("gate_lower_bound", "norm_eps"):  # -5 and -5.0 are one identity
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        if not all(map(_is_int, self.kda_layers)) or sorted(set(self.kda_layers)) != list(self.kda_layers) or any(
                not 0 <= i < self.num_layers for i in self.kda_layers):
            raise ValueError(f"KDAConfig.kda_layers: expected increasing indices from 0 to {self.num_layers - 1}, "
                             f"got {self.kda_layers}")

    @property
    def gate(self) -> str:
        """The decay gate: "softplus" or "bounded"."""
        return "softplus" if self.gate_lower_bound is None else "bounded"

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense MLP, counted from 0: those that are not in `moe.layers`."""
        sparse = frozenset(self.moe.layers if self.moe else ())
        return tuple(i for i in range(self.num_layers) if i not in sparse)

    @property
    def identity(self) -> str:
        """model_type and 16 hex digits of SHA-256 over everything that a saved state depends on: the fields down to
        norm_eps. A K3 config.json and its text_config alone have the same identity."""
        import hashlib

        values = {f.name: getattr(self, f.name) for f in fields(self)[:_STATE_FIELDS]}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return f"{self.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> KDAConfig:
        """Read the config.json of Kimi-Linear, Kimi K3 or GLM-5-Next.

        source : the file, a directory that holds config.json, or the parsed dict. A multimodal model's text_config is
            found. Both spellings are read: the checkpoints' (linear_attn_config with its layer lists) and that of
            transformers 5.24 (linear_num_heads, layer_types, ...); where a config has both they must agree.

        Kimi's layer lists count from 1, GLM-5-Next's from 0. Only these have a default where the key is missing:
        rms_norm_eps (1e-5, as in transformers' classes of both families), num_v_heads and v_head_dim of
        linear_attn_config (num_heads, head_dim), tie_word_embeddings (false), gate_lower_bound (Kimi: none, the
        softplus gate; GLM-5-Next: -5, as in transformers), use_full_rank_gate (false).

        Raises FileNotFoundError; ValueError for an unknown architecture and for a missing, malformed or contradictory
        key, with the key, where it was looked for and what was expected.
        """
        data, where = _load(source)
        outer, text = data, data
        if data.get("text_config") is not None:
            text = _table(data, "text_config", where)
        model_type = _model_type(outer, text, where)
        keys = _Keys(text, f"{where}: text_config" if text is not outer else where)
        glm = model_type in _GLM
        num_layers = keys.integer("num_hidden_layers")
        hidden = keys.integer("hidden_size")
        kda_layers, full_layers = _layer_lists(keys, num_layers, glm)
        heads = keys.integer("linear_attn_config.num_heads", "linear_num_heads")
        head_dim = keys.integer("linear_attn_config.head_dim", "linear_head_dim")
        bound = keys.number("linear_attn_config.gate_lower_bound", "linear_lower_bound", default=_MISSING)
        if glm and (bound is _MISSING or (bound is None and keys.has("linear_attn_config") and keys.flag(
                "linear_attn_config.safe_gate", default=True))):
            bound = -5.0  # transformers: Glm5NextTextConfig.linear_lower_bound, and safe_gate without a bound
        bound = None if bound is _MISSING else bound
        if bound is not None and not -float("inf") < bound < 0:
            keys.fail("gate_lower_bound", f"expected null or a negative number, got {bound!r}",
                      "linear_attn_config.gate_lower_bound", "linear_lower_bound")
        full_rank = keys.flag("linear_attn_config.use_full_rank_gate")
        num_v_heads = keys.integer("linear_attn_config.num_v_heads", default=heads)
        if num_v_heads % heads:
            keys.fail("num_v_heads", f"expected a multiple of num_heads = {heads}, got {num_v_heads}",
                      "linear_attn_config.num_v_heads")
        eps = keys.number("rms_norm_eps", default=1e-5)
        if eps is None or not 0 <= eps < 1:
            keys.fail("rms_norm_eps", f"expected a number from 0 to 1, got {eps!r}", "rms_norm_eps")
        family = "glm5_next" if glm else "kimi_linear" if bound is None and not full_rank else "kimi_k3"
        return cls(
            model_type=family, hidden_size=hidden, num_layers=num_layers, kda_layers=kda_layers, num_heads=heads,
            num_v_heads=num_v_heads, head_dim=head_dim,
            v_head_dim=keys.integer("linear_attn_config.v_head_dim", default=head_dim),
            conv_size=keys.integer("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
            gate_lower_bound=bound, full_rank_gate=full_rank, norm_eps=eps,
            vocab_size=keys.integer("vocab_size", default=None),
            intermediate_size=keys.integer("intermediate_size", default=None),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attn_res_block_size=keys.integer("attn_res_block_size", default=None),
            hc_mult=(keys.integer("hc_mult", default=None) if glm else None),
            mla=_mla(keys, full_layers, glm), moe=_moe(keys, num_layers, hidden))


_STATE_FIELDS = [f.name for f in fields(KDAConfig)].index("norm_eps") + 1


class _Missing:
    """What a key without a value in the file reads as, where null means something."""


_MISSING: Any = _Missing()
_REQUIRED: Any = _Missing()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The parsed config, and what messages call it."""
    from pathlib import Path

    if isinstance(source, Mapping):
        return source, "config"
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source: expected a path or a dict, got {type(source).__name__}")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise ValueError(f"{path}: expected JSON: {wrong}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data, str(path)


def _table(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = data[key]
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {key}: expected an object, got {value!r}")
    return value


def _model_type(outer: Mapping[str, Any], text: Mapping[str, Any], where: str) -> str:
    """The model_type that decides how keys are read; the wrapper's and the text_config's must be of one family."""
    known = ", ".join(_KIMI + _GLM)
    found = [(place, table["model_type"]) for place, table in (("model_type", outer), ("text_config.model_type", text))
             if "model_type" in table]
    if not found:
        raise ValueError(f"{where}: missing key model_type (looked for at the top and in text_config); "
                         f"expected one of {known}")
    for place, name in found:
        if name not in _KIMI + _GLM:
            raise ValueError(f"{where}: {place}: unknown architecture {name!r}; expected one of {known}")
    if len({name in _GLM for _, name in found}) > 1:
        raise ValueError(f"{where}: contradictory model_type: {found[0][1]!r} at the top, {found[1][1]!r} in "
                         "text_config")
    return str(found[-1][1])


class _Keys:
    """Reads keys of one config. A key has one or more dotted names; those that are present must agree."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, key: str, what: str, *names: str) -> NoReturn:
        """ValueError that names the config, the key, and the names that it was looked for under."""
        looked = f" (looked for as {' and '.join(names)})" if names else ""
        raise ValueError(f"{self.where}: {key}: {what}{looked}")

    def raw(self, name: str) -> Any:
        """The value under a dotted name, or _MISSING."""
        value: Any = self.data
        for part in name.split("."):
            if value is None:  # linear_attn_config: null
                return _MISSING
            if not isinstance(value, Mapping):
                self.fail(name.split(".")[0], f"expected an object, got {value!r}")
            if part not in value:
                return _MISSING
            value = value[part]
        return value

    def has(self, name: str) -> bool:
        """Whether there is a value, perhaps null, under a dotted name."""
        return self.raw(name) is not _MISSING

    def value(self, names: tuple[str, ...], kind: str, default: Any, nullable: bool) -> Any:
        """The value under these names, of this kind (in words), or the default. ValueError for a value of another kind,
        names that contradict each other, and a missing one without a default."""
        found = [(name, value) for name in names if (value := self.raw(name)) is not _MISSING]
        if default is not _REQUIRED and not nullable:
            found = [(name, value) for name, value in found if value is not None]
        key = names[0].split(".")[-1]
        if not found:
            if default is _REQUIRED:
                raise ValueError(f"{self.where}: missing key {key} (looked for as {' and '.join(names)}); "
                                 f"expected {kind}")
            return default
        for name, value in found:
            valid = (nullable and value is None) or {
                "true or false": isinstance(value, bool),
                "an integer >= 1": _is_int(value) and value >= 1,
                "an integer >= 0": _is_int(value) and value >= 0,
                "a number": isinstance(value, int | float) and not isinstance(value, bool),
            }[kind]
            if not valid:
                self.fail(name, f"expected {kind}{' or null' if nullable else ''}, got {value!r}")
        for name, value in found[1:]:
            if value != found[0][1]:
                self.fail(key, f"contradictory: {found[0][0]} is {found[0][1]!r}, {name} is {value!r}")
        return found[0][1]

    def integer(self, *names: str, default: Any = _REQUIRED, least: int = 1, nullable: bool = False) -> Any:
        """An int from `least` (0 or 1) to _MOST, the default, or where nullable None. ValueError as of `value`."""
        value = self.value(names, f"an integer >= {least}", default, nullable)
        if _is_int(value) and value > _MOST:
            self.fail(names[0], f"expected at most {_MOST}, got {value}")
        return value

    def number(self, *names: str, default: Any) -> Any:
        """A float, None for null, or the default. ValueError as of `value`."""
        value = self.value(names, "a number", default, True)
        if _is_int(value) and abs(value) > _MOST:
            self.fail(names[0], f"expected a number of at most {_MOST}, got {value}")
        return value if value is None or value is _MISSING else float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """A bool, or the default. ValueError as of `value`."""
        return bool(self.value(names, "true or false", default, False))

    def strings(self, name: str, num_layers: int, allowed: tuple[str, ...]) -> list[str] | None:
        """A list of one word per layer, or None where the key is missing or null."""
        values = self.raw(name)
        if values is _MISSING or values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != num_layers:
            self.fail(name, f"expected one of {', '.join(allowed)} for each of the {num_layers} layers of "
                            f"num_hidden_layers, got {values!r}")
        for i, value in enumerate(values):
            if value not in allowed:
                self.fail(name, f"layer {i}: expected one of {', '.join(allowed)}, got {value!r}")
        return list(values)


def _layer_lists(keys: _Keys, num_layers: int, glm: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """KDA and full-attention layers, counted from 0."""
    names = "linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"
    present = [name for name in names if keys.has(name)]
    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if len(present) == 1:
        missing = names[present == [names[0]]]
        keys.fail(missing.split(".")[-1], f"missing, though {present[0]} is there; expected a list of layers", missing)
    if present:
        both = []
        for name in names:
            layers = keys.raw(name)
            if not isinstance(layers, list | tuple) or not all(_is_int(i) for i in layers):
                keys.fail(name, f"expected a list of layer numbers, got {layers!r}")
            if len(set(layers)) != len(layers):
                twice = sorted(i for i, times in Counter(layers).items() if times > 1)
                keys.fail(name, f"contradictory: {_some(twice)} listed twice")
            both.append(set(layers))
        if both[0] & both[1]:
            keys.fail("kda_layers", f"contradictory: {_some(sorted(both[0] & both[1]))} also in full_attn_layers",
                      *names)
        union = both[0] | both[1]
        # Kimi counts from 1. GLM-5-Next's files count from 0; a list that covers the model shows which.
        # Only a set as long as the model is compared with one: num_hidden_layers may be any number.
        first = 0 if glm and len(union) == num_layers and union == set(range(num_layers)) else 1
        if len(union) != num_layers or union != set(range(first, first + num_layers)):
            expected = range(1, num_layers + 1)
            lacking = list(islice((i for i in expected if i not in union), 9))
            surplus = sorted(i for i in union if i not in expected)
            keys.fail("kda_layers", "contradictory: with full_attn_layers it must cover layers 1 to "
                      f"num_hidden_layers = {num_layers}" + (f"; {_some(lacking)} in neither" if lacking else "")
                      + (f"; {_some(surplus)} out of range" if surplus else ""), *names)
        answers.append((tuple(sorted(i - first for i in both[0])), tuple(sorted(i - first for i in both[1]))))
    types = keys.strings("layer_types", num_layers, _KDA_TYPES + _FULL_TYPES)
    if types is not None:
        answers.append((tuple(i for i, t in enumerate(types) if t in _KDA_TYPES),
                        tuple(i for i, t in enumerate(types) if t in _FULL_TYPES)))
    if not answers:
        raise ValueError(f"{keys.where}: missing key kda_layers (looked for {names[0]} with full_attn_layers, and for "
                         "layer_types); expected which layers are KDA, because no rule gives them for every model")
    if answers[0] != answers[-1]:
        keys.fail("layer_types", "contradictory: it names other KDA layers than kda_layers does", names[0],
                  "layer_types")
    return answers[0]


def _some(layers: list[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''}"


def _mla(keys: _Keys, layers: tuple[int, ...], glm: bool) -> MLAConfig | None:
    """The full-attention layers; None where there are none."""
    if not layers:
        return None
    indexers: tuple[int, ...] = ()
    if glm:
        count = keys.integer("num_hidden_layers")
        types = keys.strings("indexer_types", count, ("full", "shared")) or ["full"] * count
        indexers = tuple(i for i in layers if types[i] == "full")
    return MLAConfig(
        layers=layers, num_heads=keys.integer("num_attention_heads"), kv_lora_rank=keys.integer("kv_lora_rank"),
        q_lora_rank=keys.integer("q_lora_rank", default=None), qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim", least=0), v_head_dim=keys.integer("v_head_dim"),
        output_gate=keys.flag("mla_use_output_gate"), indexer_layers=indexers,
        index_heads=keys.integer("index_n_heads", default=None),
        index_head_dim=keys.integer("index_head_dim", default=None),
        index_kpool=keys.integer("index_kpool", default=None))


def _moe(keys: _Keys, num_layers: int, hidden: int) -> MoEConfig | None:
    """The mixture of experts; None where the config has no experts."""
    experts = keys.integer("num_experts", "num_local_experts", "n_routed_experts", default=0, least=0)
    if not experts:
        return None
    types = keys.strings("mlp_layer_types", num_layers, ("dense", "sparse"))
    if types is None:
        dense = keys.integer("first_k_dense_replace", least=0)
        frequency = keys.integer("moe_layer_freq", default=1)
        layers = tuple(i for i in range(num_layers) if i >= dense and i % frequency == 0)
    else:
        layers = tuple(i for i, kind in enumerate(types) if kind == "sparse")
    top_k = keys.integer("num_experts_per_token", "num_experts_per_tok")
    if top_k > experts:
        keys.fail("num_experts_per_token", f"contradictory: {top_k} of num_experts = {experts}")
    return MoEConfig(
        layers=layers, num_experts=experts, top_k=top_k,
        num_shared_experts=keys.integer("num_shared_experts", "n_shared_experts", default=0, least=0),
        intermediate_size=keys.integer("moe_intermediate_size", default=None),
        expert_hidden_size=keys.integer("routed_expert_hidden_size", default=hidden),
        latent_norm=keys.flag("latent_moe_use_norm"))
