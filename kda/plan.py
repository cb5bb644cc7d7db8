"""What a model needs: memory for state and weights, work and bytes per token, and what a disk allows.

A MAC is one multiply-add; a FLOP is one multiply or one add, so 2 FLOP make a MAC. GB is 10^9 bytes; MiB is 2^20,
GiB 2^30. The counts are those of the definition, whatever a kernel does to compute it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from kda.config import KDAConfig

# Floating-point instructions' lanes that the recurrent kernel spends on one state element and token: the
# multiply-adds of S^T k, of S^T q and of the rank-1 update, and the multiplication by the decay.
LANE_OPS_PER_ELEMENT = 4

WEIGHT_FORMATS = ("f32", "bf16", "q8g", "q4g")
EXPERT_FORMATS = (*WEIGHT_FORMATS, "vq3r")
STATE_DTYPES = ("float32", "bfloat16")  # of KDAState
_BITS = {"f32": 32, "bf16": 16, "q8g": 8, "q4g": 4}
_GROUP = 128  # columns that share a float16 scale in q8g and q4g
_MOST = 1 << 53  # tokens or sequences
_PAGE, _RECORD_HEADER = 4096, 48  # of an expert's record on disk: alignment of direct reads, bytes before the matrices


@dataclass(frozen=True)
class Shape:
    """`layers` KDA layers of HV value heads, each with a float32 state of K x V, served by H query/key heads."""

    name: str
    H: int
    HV: int
    K: int
    V: int
    layers: int = 1

    @property
    def elements(self) -> int:
        """State elements: layers * HV * K * V."""
        return self.layers * self.HV * self.K * self.V

    @property
    def state_bytes(self) -> int:
        """Bytes of the float32 state."""
        return 4 * self.elements

    @property
    def mac(self) -> int:
        """Multiply-adds per token of the delta rule: S^T k, the rank-1 update and S^T q are K * V each."""
        return 3 * self.elements

    @property
    def flop(self) -> int:
        """2 FLOP per MAC, without the decay."""
        return 2 * self.mac

    @property
    def flop_with_decay(self) -> int:
        """flop and the K * V multiplications per head of diag(exp(g)) S."""
        return self.flop + self.elements

    @property
    def traffic_bytes(self) -> int:
        """Bytes per token that a step must move if the state is read once and written once."""
        return 2 * self.state_bytes

    @property
    def lane_ops(self) -> int:
        """Floating-point instruction lanes per token of the recurrent kernel; a multiply-add lane counts as 1."""
        return LANE_OPS_PER_ELEMENT * self.elements


def delta_rule(config: KDAConfig, name: str = "") -> Shape:
    """The state and the delta rule of all KDA layers of a model."""
    return Shape(name or config.model_type, config.num_heads, config.num_v_heads, config.head_dim, config.v_head_dim,
                 len(config.kda_layers))


def matrix_bytes(rows: int, columns: int, weight_format: str) -> int:
    """Exact bytes of a weight matrix.

    f32, bf16: 4 or 2 bytes a weight. q8g, q4g: rows padded to whole groups of 128 columns, 8 or 4 bits a weight and a
    float16 scale per row and group, as kda.QuantizedMatrix has them in canonical form. vq3r (experts in the records of
    the engine WASTE): three 8-bit codebook indices for every 8 columns, rows padded to 64, and a float16 scale per
    row; the codebooks, shared by a layer, not counted.
    """
    if weight_format == "vq3r":
        return _up(rows, 64) * _up(columns, 8) * 3 // 8 + 2 * rows
    bits = _BITS[weight_format]
    if weight_format in ("f32", "bf16"):
        return rows * columns * bits // 8
    groups = -(-columns // _GROUP)
    return rows * groups * (_GROUP * bits // 8 + 2)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Component:
    """The weights of one kind, in each of `layers` layers. None: the config lacks a number that is needed.

    bytes_per_layer       stored
    read_bytes_per_layer  read for one token: the active experts, one row of the embedding
    mac_per_layer         multiply-adds per token in products with these weights
    """

    name: str
    layers: int
    bytes_per_layer: int | None
    read_bytes_per_layer: int | None
    mac_per_layer: int | None

    @property
    def bytes(self) -> int | None:
        """Stored, all layers."""
        return _times(self.bytes_per_layer, self.layers)

    @property
    def read_bytes(self) -> int | None:
        """Read for one token, all layers."""
        return _times(self.read_bytes_per_layer, self.layers)

    @property
    def mac(self) -> int | None:
        """Multiply-adds per token, all layers."""
        return _times(self.mac_per_layer, self.layers)


def _times(value: int | None, n: int) -> int | None:
    return None if value is None else value * n


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


Matrices = Sequence[tuple[int | None, int | None]]


def _component(name: str, layers: int, weight_format: str, matrices: Matrices = (), vectors: int = 0, *,
               copies: int = 1, active: int = 1) -> Component:
    """`copies` times these matrices [rows, columns] in the format, of which a token uses `active`, and `vectors`
    floats that stay float32: norms, biases, A_log."""
    known = [(r, c) for r, c in matrices if r is not None and c is not None]
    if len(known) < len(matrices):
        return Component(name, layers, None, None, None)
    size = sum(matrix_bytes(r, c, weight_format) for r, c in known)
    return Component(name, layers, copies * size + 4 * vectors, active * size + 4 * vectors,
                     active * sum(r * c for r, c in known))


def _components(config: KDAConfig, weight_format: str, expert_format: str) -> tuple[Component, ...]:
    c, fmt, n = config, weight_format, len(config.kda_layers)
    qk, v, rank, hidden = c.num_heads * c.head_dim, c.num_v_heads * c.v_head_dim, c.head_dim, c.hidden_size
    decay, taps = c.num_v_heads * c.head_dim, c.conv_size * (2 * qk + v)
    gate: Matrices = [(v, hidden)] if c.full_rank_gate else [(rank, hidden), (v, rank)]
    parts = [
        _component("KDA q, k, v projections", n, fmt, [(qk, hidden), (qk, hidden), (v, hidden)]),
        Component("KDA short convolutions", n, 4 * taps, 4 * taps, taps),
        _component("KDA decay gate", n, fmt, [(rank, hidden), (decay, rank)], decay + c.num_v_heads),
        _component("KDA beta", n, fmt, [(c.num_v_heads, hidden)]),
        _component("KDA output gate", n, fmt, gate),
        _component("KDA output norm, projection", n, fmt, [(hidden, v)], c.v_head_dim),
    ]
    if c.mla:
        m, heads = c.mla, c.mla.num_heads
        q_dim, o_dim = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim), heads * m.v_head_dim
        query: Matrices = ([(q_dim, hidden)] if m.q_lora_rank is None
                           else [(m.q_lora_rank, hidden), (q_dim, m.q_lora_rank)])
        parts.append(_component("MLA projections, norms", len(m.layers), fmt, [
            *query, (m.kv_lora_rank + m.qk_rope_head_dim, hidden),
            (heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank), (hidden, o_dim),
            *([(o_dim, hidden)] if m.output_gate else [])], m.kv_lora_rank + (m.q_lora_rank or 0)))
    if c.dense_layers:
        inner = c.intermediate_size
        parts.append(_component("dense MLP", len(c.dense_layers), fmt,
                                [(inner, hidden), (inner, hidden), (hidden, inner)]))
    if c.moe:
        e, moe_layers, latent = c.moe, len(c.moe.layers), c.moe.expert_hidden_size
        shared = None if e.intermediate_size is None else e.num_shared_experts * e.intermediate_size
        parts.append(_component("router", moe_layers, "f32", [(e.num_experts, hidden)], e.num_experts))
        if latent != hidden:
            parts.append(_component("expert latent projections", moe_layers, fmt, [(latent, hidden), (hidden, latent)],
                                    latent if e.latent_norm else 0))
        if e.num_shared_experts:
            parts.append(_component("shared experts", moe_layers, fmt,
                                    [(shared, hidden), (shared, hidden), (hidden, shared)]))
        parts.append(_component("routed experts", moe_layers, expert_format, _expert(c),
                                copies=e.num_experts, active=e.top_k))
    residuals = 4 if c.attn_res_block_size else 0
    parts.append(_component("layer norms", c.num_layers, fmt, vectors=(2 + residuals) * hidden))
    parts.append(_component("final norm", 1, fmt, vectors=(1 + residuals // 2) * hidden))
    vocabulary = _component("", 1, fmt, [(c.vocab_size, hidden)])
    row = None if c.vocab_size is None else matrix_bytes(1, hidden, fmt)
    parts.append(Component("embedding", 1, vocabulary.bytes, row, _times(row, 0)))
    parts.append(Component("lm_head (the embedding)" if c.tie_word_embeddings else "lm_head", 1,
                           0 if c.tie_word_embeddings else vocabulary.bytes, vocabulary.bytes, vocabulary.mac))
    return tuple(parts)


def _expert(config: KDAConfig) -> Matrices:
    """w1, w3 and w2 of a routed expert."""
    if config.moe is None:
        return ()
    inner, latent = config.moe.intermediate_size, config.moe.expert_hidden_size
    return [(inner, latent), (inner, latent), (latent, inner)]


def expert_bytes(config: KDAConfig, expert_format: str) -> int | None:
    """Exact bytes of one routed expert's matrices; None without experts or without their size."""
    size = _component("", 1, expert_format, _expert(config)).bytes
    return size or None


@dataclass(frozen=True)
class Plan:
    """Memory, work and traffic of a model; `print` it, or take `to_dict()`. Made by `kda.plan`.

    Weights and work are those of one token of one sequence; the state is that of `batch` sequences. Every size is in
    bytes and exact. None where the config lacks a number; `unknown` says which key. `not_counted` says what the model
    has besides.
    """

    config: KDAConfig
    context: int
    batch: int
    weight_format: str
    expert_format: str
    components: tuple[Component, ...]
    state_dtype: str = "float32"

    # ---- state ----

    @property
    def kda_state_bytes(self) -> int:
        """States of the KDA layers: batch * n_kda * HV * K * V * 4, or * 2 in bfloat16. Does not grow with the
        context."""
        return self.batch * delta_rule(self.config).state_bytes // (1 if self.state_dtype == "float32" else 2)

    @property
    def conv_state_bytes(self) -> int:
        """The last W - 1 float32 inputs of q's, k's and v's convolutions. Does not grow with the context."""
        c = self.config
        channels = 2 * c.num_heads * c.head_dim + c.num_v_heads * c.v_head_dim
        return self.batch * len(c.kda_layers) * (c.conv_size - 1) * channels * 4

    @property
    def cache_bytes_per_token(self) -> int:
        """What each token of context adds to one sequence: n_mla * (kv_lora_rank + qk_rope_head_dim) * 4."""
        mla = self.config.mla
        return 0 if mla is None else len(mla.layers) * (mla.kv_lora_rank + mla.qk_rope_head_dim) * 4

    @property
    def mla_cache_bytes(self) -> int:
        """The float32 latents of the full-attention layers, for `context` tokens. The only part that grows."""
        return self.batch * self.context * self.cache_bytes_per_token

    @property
    def state_bytes(self) -> int:
        """kda_state_bytes + conv_state_bytes + mla_cache_bytes."""
        return self.kda_state_bytes + self.conv_state_bytes + self.mla_cache_bytes

    # ---- work per token ----

    @property
    def mac_per_token(self) -> int:
        """Multiply-adds of the delta rule, all KDA layers: 3 * n_kda * HV * K * V, without the decay."""
        return delta_rule(self.config).mac

    @property
    def flop_per_token(self) -> int:
        """2 * mac_per_token."""
        return delta_rule(self.config).flop

    @property
    def flop_with_decay_per_token(self) -> int:
        """flop_per_token and the n_kda * HV * K * V multiplications by the decay."""
        return delta_rule(self.config).flop_with_decay

    @property
    def weight_mac_per_token(self) -> int | None:
        """Multiply-adds in products with weights, the active experts only."""
        return _sum(c.mac for c in self.components)

    @property
    def attention_mac_per_token(self) -> int:
        """Multiply-adds of the full-attention layers with `context` cached latents (queries and outputs absorbed into
        kv_b): n_mla * heads * context * (2 * kv_lora_rank + qk_rope_head_dim). Grows with the context."""
        m = self.config.mla
        return 0 if m is None else (len(m.layers) * m.num_heads * self.context
                                    * (2 * m.kv_lora_rank + m.qk_rope_head_dim))

    @property
    def total_mac_per_token(self) -> int | None:
        """Delta rule, products with weights, attention."""
        return _sum([self.mac_per_token, self.weight_mac_per_token, self.attention_mac_per_token])

    # ---- bytes ----

    @property
    def weight_bytes(self) -> int | None:
        """All weights: matrices in weight_format (routed experts in expert_format, the router float32); norms, biases
        and convolution taps float32."""
        return _sum(c.bytes for c in self.components)

    @property
    def weight_bytes_per_token(self) -> int | None:
        """Weights that one token of one sequence reads: of the routed experts the top_k, one row of the embedding."""
        return _sum(c.read_bytes for c in self.components)

    @property
    def state_traffic_bytes_per_token(self) -> int:
        """State that one token of one sequence moves: KDA and convolution read and written, `context` latents read."""
        return (2 * (self.kda_state_bytes + self.conv_state_bytes) + self.mla_cache_bytes) // self.batch

    @property
    def bytes_per_token(self) -> int | None:
        """weight_bytes_per_token + state_traffic_bytes_per_token: one sequence, weights read once from memory."""
        return _sum([self.weight_bytes_per_token, self.state_traffic_bytes_per_token])

    @property
    def expert_record_bytes(self) -> int | None:
        """One routed expert on disk in expert_format: 48 bytes of header, w1, w3, w2, rounded up to 4096 bytes.
        None without experts or without their size."""
        size = expert_bytes(self.config, self.expert_format)
        return None if size is None else _up(_RECORD_HEADER + size, _PAGE)

    @property
    def expert_read_bytes_per_token(self) -> int | None:
        """n_moe_layers * top_k * expert_record_bytes: what `kda.nvme_ceiling` takes when experts are on disk."""
        moe = self.config.moe
        return None if moe is None else _times(self.expert_record_bytes, len(moe.layers) * moe.top_k)

    # ---- what is missing ----

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys that the config lacks and that some figures need."""
        c = self.config
        wanted = {
            "intermediate_size": bool(c.dense_layers) and c.intermediate_size is None,
            "moe_intermediate_size": c.moe is not None and c.moe.intermediate_size is None,
            "vocab_size": c.vocab_size is None,
        }
        return tuple(key for key, missing in wanted.items() if missing)

    @property
    def not_counted(self) -> tuple[str, ...]:
        """Parts of the model that no figure here holds."""
        parts = []
        if self.config.mla and self.config.mla.indexer_layers:
            parts.append("the sparse attention's indexer (weights, cache, and what it saves: attention is counted over "
                         "all tokens)")
        if self.config.hc_mult:
            parts.append("hyper-connections")
        return (*parts, "layers for multi-token prediction", "vision")

    def to_dict(self) -> dict[str, Any]:
        """Every figure by its name here, for JSON: integers, bytes unless the name says mac or flop."""
        names = [name for name, value in vars(Plan).items() if isinstance(value, property)]
        own = {"config": asdict(self.config), "identity": self.config.identity, "context": self.context,
               "batch": self.batch, "weight_format": self.weight_format, "expert_format": self.expert_format,
               "state_dtype": self.state_dtype}
        parts = [asdict(c) | {"bytes": c.bytes, "read_bytes": c.read_bytes, "mac": c.mac} for c in self.components]
        return own | {name: getattr(self, name) for name in names} | {"components": parts}

    def __str__(self) -> str:
        return render([self])


def plan(config: KDAConfig, context: int = 4096, batch: int = 1, weight_format: str = "q8g", *,
         expert_format: str | None = None, state_dtype: str = "float32") -> Plan:
    """Count the memory, the work and the traffic of a model from its config.

    context : tokens of each sequence. batch : sequences. weight_format : "f32", "bf16", "q8g" or "q4g" of the weight
    matrices. expert_format : of the routed experts; also "vq3r". Default: weight_format. state_dtype : of the KDA
    layers' states, "float32" or "bfloat16", as KDAState takes it.

    Raises TypeError for a config that is not a KDAConfig; ValueError for other formats, or sizes below 1.
    """
    if not isinstance(config, KDAConfig):
        raise TypeError(f"config: expected a KDAConfig (KDAConfig.from_hf reads a config.json), "
                        f"got {type(config).__name__}")
    expert_format = weight_format if expert_format is None else expert_format
    for name, value, formats in (("weight_format", weight_format, WEIGHT_FORMATS),
                                 ("expert_format", expert_format, EXPERT_FORMATS),
                                 ("state_dtype", state_dtype, STATE_DTYPES)):
        if value not in formats:
            raise ValueError(f"{name}: expected one of {', '.join(formats)}, got {value!r}")
    return Plan(config, _size("context", context), _size("batch", batch), weight_format, expert_format,
                _components(config, weight_format, expert_format), state_dtype)


def _size(name: str, value: int) -> int:
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = -1
    if size < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
    if size > _MOST:
        raise ValueError(f"{name}: expected at most {_MOST}, got more")
    return size


# ---- tables ----

def _binary(n: int | None) -> str:
    """A size in KiB, MiB or GiB, by name."""
    if n is None:
        return "unknown"
    power, unit, digits = (30, "GiB", 2) if n >= 2**30 else (20, "MiB", 1) if n >= 2**20 else (10, "KiB", 1)
    return f"{n / 2**power:,.{digits}f} {unit}"


def _decimal(n: int | None) -> str:
    """A size in kB, MB or GB, by name."""
    if n is None:
        return "unknown"
    size, unit, digits = (1e9, "GB", 2) if n >= 1e9 else (1e6, "MB", 1) if n >= 1e6 else (1e3, "kB", 1)
    return f"{n / size:,.{digits}f} {unit}"


def _number(n: int | None) -> str:
    return "unknown" if n is None else f"{n:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """The first column to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    if markdown:
        lines.insert(1, ["---", *["---:"] * (len(head) - 1)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip()
                     for line in lines)


def render(plans: Sequence[Plan], markdown: bool = False) -> str:
    """Plans of one model and format at several contexts as tables, in text or Markdown."""
    first, c = plans[0], plans[0].config
    full = len(c.mla.layers) if c.mla else 0
    sparse = len(c.moe.layers) if c.moe else 0
    title = (f"{c.model_type}: {c.num_layers} layers = {len(c.kda_layers)} KDA + {full} full attention, "
             f"{len(c.dense_layers)} with a dense MLP and {sparse} with experts. Batch {first.batch}, "
             f"weights {first.weight_format}"
             + (f", routed experts {first.expert_format}" if first.expert_format != first.weight_format else "")
             + ".\nMB is 10^6 bytes, GB 10^9, MiB 2^20, GiB 2^30; a MAC is one multiply-add, 2 FLOP.")

    def size(name: str, n: int | None, *more: str) -> list[str]:
        return [name, _number(n), _binary(n), _decimal(n), *more]

    memory = [size(f"KDA state, {first.state_dtype}", first.kda_state_bytes, "constant"),
              size("convolution history", first.conv_state_bytes, "constant")]
    growth = f"{_number(first.batch * first.cache_bytes_per_token)} B per token" if full else "constant"
    for p in plans:
        at = f"{p.context:,} tokens"
        if full:
            memory.append(size(f"MLA latents, {at}", p.mla_cache_bytes, growth))
        memory.append(size(f"all state, {at}", p.state_bytes, growth))
    weights = [[part.name, str(part.layers), _number(part.bytes_per_layer), _number(part.bytes), _binary(part.bytes),
                _decimal(part.bytes), _number(part.read_bytes), _number(part.mac)] for part in first.components]
    weights.append(["all weights", "", "", _number(first.weight_bytes), _binary(first.weight_bytes),
                    _decimal(first.weight_bytes), _number(first.weight_bytes_per_token),
                    _number(first.weight_mac_per_token)])

    def work(name: str, mac: int | None, layers: int, growing: str) -> list[str]:
        each = "" if not layers or mac is None else _number(mac // layers)
        return [name, each, _number(mac), _number(_times(mac, 2)), growing]

    compute = [work("delta rule", first.mac_per_token, len(c.kda_layers), "constant"),
               work("products with weights", first.weight_mac_per_token, 0, "constant")]
    for p in plans if full else ():
        compute.append(work(f"attention, {p.context:,} tokens", p.attention_mac_per_token, full, "grows"))
    traffic = [size("weights, active experts only", first.weight_bytes_per_token, "constant")]
    grows = "grows" if full else "constant"
    for p in plans:
        traffic.append(size(f"state, {p.context:,} tokens", p.state_traffic_bytes_per_token, grows))
        traffic.append(size(f"both, {p.context:,} tokens", p.bytes_per_token, grows))
    if first.expert_record_bytes:
        record = f"one expert's record on disk, {first.expert_format}"
        traffic.append(size(record, first.expert_record_bytes, "constant"))
        traffic.append(size("all experts of a token from disk", first.expert_read_bytes_per_token, "constant"))
    blocks = [
        title,
        _table(["memory for state", "bytes", "binary", "decimal", "with the context"], memory, markdown),
        _table(["weights", "layers", "bytes per layer", "bytes", "binary", "decimal", "bytes read per token",
                "MAC per token"], weights, markdown),
        _table(["work per token", "MAC per layer", "MAC", "FLOP", "with the context"], compute, markdown),
        _table(["bytes moved per token, one sequence", "bytes", "binary", "decimal", "with the context"], traffic,
               markdown),
        *([f"Unknown, because the config lacks: {', '.join(first.unknown)}."] if first.unknown else []),
        f"Not counted: {', '.join(first.not_counted)}.",
    ]
    return "\n\n".join(blocks)


# ---- the disk ----

class NvmeCeiling(float):
    """Tokens/s that a disk allows at most; a float with its parts.

    bytes_read   bytes per token that come from the disk
    io_s         seconds per token for them
    serial       tokens/s if reading and computing take turns: 1 / (io_s + compute_s + rest_s)
    overlapped   tokens/s if they overlap: 1 / (max(io_s, compute_s) + rest_s); the value itself
    bound_by     "disk" or "compute": the longer of io_s and compute_s
    """

    bytes_read: float
    io_s: float
    serial: float
    overlapped: float
    bound_by: str


def nvme_ceiling(bytes_per_token: float, bandwidth: float | str, hit_rate: float = 0.0, *, compute_s: float = 0.0,
                 rest_s: float = 0.0) -> NvmeCeiling:
    """Tokens/s at most when each token reads weights from a disk: bandwidth / (bytes_per_token * (1 - hit_rate)).

    bytes_per_token : bytes that a token needs, for experts n_moe_layers * top_k * record_bytes
        (`Plan.expert_read_bytes_per_token`). There is no default: it is the model's.
    bandwidth : bytes/s, or text with its unit: "12.78GB/s" (10^9), "12.78GiB/s" (2^30); also k, M and T.
    hit_rate : share of the bytes found in memory, 0 <= hit_rate < 1. A cache smaller than one token's bytes hits
        nothing if it drops what was used longest ago. 1 is taken only with compute_s or rest_s: without reads, they
        are the bound.
    compute_s : seconds per token of work that reading can overlap with. rest_s : of work that it cannot.

    The value is the bound for overlapped reading; its attributes `serial`, `io_s` and `bound_by` say more.

    Raises TypeError for what is not a number; ValueError for units that are missing or unknown, and for sizes and
    speeds that no disk and no model has (under 4096 bytes per token; under 1 MB/s or over 1 TB/s): usually a number
    in GB where bytes were expected.
    """
    size = _real("bytes_per_token", bytes_per_token)
    if not 4096 <= size < 1e15:
        raise ValueError(f"bytes_per_token: expected bytes, from 4096 (one block) to 10^15, got {bytes_per_token!r}"
                         + ("; is it in GB?" if 0 < size < 4096 else ""))
    speed = bandwidth_of(bandwidth)
    hits, compute, rest = _real("hit_rate", hit_rate), _real("compute_s", compute_s), _real("rest_s", rest_s)
    for name, seconds in (("compute_s", compute), ("rest_s", rest)):
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{name}: expected seconds >= 0, got {seconds!r}")
    if hits == 1 and compute + rest == 0:
        raise ValueError("hit_rate: 1 reads nothing from the disk, which then bounds nothing; give compute_s")
    if not 0 <= hits <= 1:
        raise ValueError(f"hit_rate: expected a share, 0 <= hit_rate < 1, got {hit_rate!r}"
                         + ("; is it in percent?" if 1 < hits <= 100 else ""))
    read = size * (1 - hits)
    io = read / speed
    overlapped = 1 / (max(io, compute) + rest)
    result = NvmeCeiling(overlapped)
    result.bytes_read, result.io_s, result.overlapped = read, io, overlapped
    result.serial = 1 / (io + compute + rest)
    result.bound_by = "disk" if io >= compute else "compute"
    return result


def _real(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return float(value)


_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def bandwidth_of(value: float | str) -> float:
    """Bytes/s of a number or a text with its unit, as nvme_ceiling takes it."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kMGT])|([KMGT])i)B/s\s*", value)
        if not match:
            raise ValueError(f"bandwidth: expected a number with its unit, like '12.78GB/s' (10^9 bytes) or "
                             f"'12.78GiB/s' (2^30), got {value!r}")
        number, decimal, binary = match.groups()
        speed = float(number) * (1000 ** _POWERS[decimal] if decimal else 1024 ** _POWERS[binary])
    else:
        speed = _real("bandwidth", value)
    if not 1e6 <= speed <= 1e12:
        raise ValueError(f"bandwidth: expected bytes/s, from 10^6 to 10^12, or text with its unit like '12.78GB/s', "
                         f"got {value!r}")
    return speed
