"""What a model whose experts are on a disk can reach: bytes per token, what a cache saves, and what binds.

The routing trace decides how often a cache hits; no hit rate is assumed. The shipped trace is Kimi-Linear's, 300
tokens, recorded by the project sqliteai/waste (Apache-2.0).
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kda.config import KDAConfig
from kda.perf import bench
from kda.perf.limits import probes
from kda.perf.work import Decode
from kda.plan import Plan, delta_rule, nvme_ceiling
from kda.runtime import get_num_threads

SHIPPED_TRACE = "kimi_linear_routing.jsonl.gz"
SYNTHETIC_TOKENS = 100
MOST_TRACE_BYTES = 1 << 28  # of a trace, expanded: 200,000 tokens of Kimi-Linear
_MOST_ID = (1 << 32) - 1    # of an expert: layer and expert are one number in Trace.accesses


@dataclass(frozen=True)
class Trace:
    """Which experts each token used: experts[token, layer, i], ids from 0; `name` says where it comes from."""

    name: str
    experts: NDArray[np.int64]

    @property
    def accesses(self) -> list[int]:
        """layer * 2^32 + expert, in the order in which they are needed."""
        layers = np.arange(self.experts.shape[1], dtype=np.int64)[None, :, None] << 32
        found: list[int] = (layers + self.experts).reshape(-1).tolist()
        return found

    @property
    def per_token(self) -> int:
        """Records that one token needs: layers * top_k."""
        return int(self.experts.shape[1] * self.experts.shape[2])

    @property
    def working_set(self) -> int:
        """Different records in the whole trace."""
        return len(set(self.accesses))


def read_trace(path: Path | None = None) -> Trace:
    """A trace of one token a line, {"layers": [[expert ids], ...]}, perhaps gzipped; without a path the shipped one.
    Ids are below 2^32, and a trace, expanded, has at most MOST_TRACE_BYTES.

    Raises ValueError, with the line, for anything else; OSError for a file that cannot be read.
    """
    name = f"{SHIPPED_TRACE} (Kimi-Linear, recorded by sqliteai/waste)" if path is None else str(path)
    raw = files("kda").joinpath("data", SHIPPED_TRACE).read_bytes() if path is None else path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = _expanded(raw)
        except (OSError, EOFError, zlib.error) as wrong:
            raise ValueError(f"{name}: is not a whole gzip file: {wrong}") from wrong
    if len(raw) > MOST_TRACE_BYTES:
        raise ValueError(f"{name}: has more than {MOST_TRACE_BYTES:,} bytes, expanded")
    tokens: list[NDArray[np.int64]] = []
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            layers = _experts(json.loads(line)["layers"])
        except (ValueError, KeyError, TypeError, RecursionError) as wrong:
            raise ValueError(f'{name}, line {number}: expected {{"layers": [[expert ids], ...]}}, as many experts in '
                             f"every layer: {wrong}") from wrong
        if tokens and layers.shape != tokens[0].shape:
            raise ValueError(f"{name}, line {number}: expected layers x top_k = {list(tokens[0].shape)} expert "
                             f"ids, as in line 1, got shape {list(layers.shape)}")
        tokens.append(layers)
    if not tokens:
        raise ValueError(f"{name}: no tokens")
    return Trace(name, np.stack(tokens))


def _expanded(raw: bytes) -> bytes:
    """What gzip made `raw` of; of more than MOST_TRACE_BYTES the beginning, which is longer than that."""
    parts, size = [], 0
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        while size <= MOST_TRACE_BYTES and (part := file.read(1 << 16)):
            parts.append(part)
            size += len(part)
    return b"".join(parts)


def _experts(layers: Any) -> NDArray[np.int64]:
    """One token's [layers, top_k]. numpy alone would take text, floats and true for ids, and nothing for a layer."""
    if not isinstance(layers, list) or not layers or not all(isinstance(ids, list) and ids for ids in layers):
        raise ValueError("got no list of lists")
    for ids in layers:
        for expert in ids:
            if type(expert) is not int or not 0 <= expert <= _MOST_ID:
                raise ValueError(f"expected ids from 0 to {_MOST_ID}, got {expert!r}")
    if len({len(ids) for ids in layers}) > 1:
        raise ValueError("got layers of different lengths")
    return np.array(layers, np.int64)


def synthetic_trace(config: KDAConfig, tokens: int = SYNTHETIC_TOKENS) -> Trace:
    """Experts drawn uniformly, without locality: a stand-in where no trace of the model exists, and the worst case."""
    assert config.moe is not None
    rng = np.random.default_rng(3)
    layers, n, k = len(config.moe.layers), config.moe.num_experts, config.moe.top_k
    drawn = rng.random((tokens, layers, n)).argpartition(k, axis=-1)[..., :k] if k < n else np.broadcast_to(
        np.arange(n), (tokens, layers, n))
    return Trace(f"SYNTHETIC: {tokens} tokens, experts drawn uniformly; real routers repeat themselves more",
                 np.sort(drawn.astype(np.int64), axis=-1))


def check_trace(trace: Trace, config: KDAConfig) -> None:
    """Raises ValueError for a trace of another model: other layers, top_k, or ids that the model does not have."""
    assert config.moe is not None
    _, layers, top_k = trace.experts.shape
    wanted = (len(config.moe.layers), config.moe.top_k)
    if (layers, top_k) != wanted or trace.experts.max() >= config.moe.num_experts:
        raise ValueError(
            f"trace {trace.name}: {layers} layers of top {top_k}, ids up to {trace.experts.max()}; the model has "
            f"{wanted[0]} layers with experts, top {wanted[1]} of {config.moe.num_experts}. Give a trace of this "
            "model, or `--trace synthetic`")


# ---- caches ----

def lru_hits(accesses: Iterable[int], capacity: int) -> list[bool]:
    """Whether each access finds its record, in a cache of `capacity` records that drops what was used longest ago."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for record in accesses:
        hit = record in cached
        hits.append(hit)
        if hit:
            cached.move_to_end(record)
        elif capacity:
            if len(cached) == capacity:
                cached.popitem(last=False)
            cached[record] = None
    return hits


def lfu_hits(accesses: Iterable[int], capacity: int) -> list[bool]:
    """The same with a cache that drops what was used least often so far, of those what was used longest ago.

    Uses are counted from the start, also of records that were dropped since. A record is taken in even if all others
    were used more often.
    """
    used: Counter[int] = Counter()
    stamp: dict[int, tuple[int, int]] = {}  # of what is cached: (times used, when last)
    queue: list[tuple[int, int, int]] = []  # the same with the record, and outdated entries
    hits = []
    for now, record in enumerate(accesses):
        used[record] += 1
        hit = record in stamp
        hits.append(hit)
        if not capacity:
            continue
        if not hit and len(stamp) == capacity:
            while True:
                times, when, oldest = heapq.heappop(queue)
                if stamp.get(oldest) == (times, when):
                    del stamp[oldest]
                    break
        stamp[record] = (used[record], now)
        heapq.heappush(queue, (used[record], now, record))
    return hits


POLICIES: dict[str, Callable[[Iterable[int], int], list[bool]]] = {"LRU": lru_hits, "LFU": lfu_hits}


def hit_rates(hits: Sequence[bool]) -> tuple[float, float]:
    """(share of hits from an empty cache on, share in the second half, which finds the cache filled by the first)."""
    half = len(hits) // 2
    return sum(hits) / len(hits), sum(hits[half:]) / (len(hits) - half)


# ---- the ceiling ----

@dataclass(frozen=True)
class Machine:
    """What the ceiling of a model needs to know of a machine; measured or given."""

    disk_bytes_per_s: float
    disk: str                    # where that comes from
    memory_bytes_per_s: float    # reading memory
    mac_per_s: float             # multiply-adds in the arithmetic of the weights' format
    kda_s: float                 # one token through the delta rule of every KDA layer, measured


@dataclass(frozen=True)
class CacheRow:
    """Tokens/s at most with a cache of one size. The hit rates are those of hit_rates(); the second one is used."""

    policy: str
    cache_bytes: int
    records: int
    hit_rate_cold: float
    hit_rate: float
    bytes_read: float       # per token
    io_s: float             # per token
    disk_alone: float | None     # tokens/s if nothing else took time; None if nothing is read
    serial: float           # tokens/s if reading and computing take turns
    overlapped: float       # tokens/s if they overlap
    bound_by: str           # "disk", "memory" or "multiply-adds"
    kda_share_serial: float      # of a token's time, the delta rule's
    kda_share_overlapped: float


@dataclass(frozen=True)
class Ceiling:
    """The ceiling of one model on one machine, for several caches."""

    plan: Plan
    machine: Machine
    trace: Trace | None
    working_set_bytes: int | None
    compute_s: float
    compute_bound_by: str
    rows: list[CacheRow]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, times in seconds, speeds in tokens/s; higher is better."""
        p, moe = self.plan, self.plan.config.moe
        assert moe is not None
        trace = self.trace and {"name": self.trace.name, "tokens": len(self.trace.experts),
                                "records_per_token": self.trace.per_token, "working_set": self.trace.working_set,
                                "working_set_bytes": self.working_set_bytes}
        return {
            "model": p.config.model_type, "weight_format": p.weight_format, "expert_format": p.expert_format,
            "moe_layers": len(moe.layers), "experts": moe.num_experts, "top_k": moe.top_k,
            "record_bytes": p.expert_record_bytes, "bytes_per_token": p.expert_read_bytes_per_token,
            "trace": trace, "machine": asdict(self.machine), "compute_s": self.compute_s,
            "compute_bound_by": self.compute_bound_by, "rows": [asdict(row) for row in self.rows],
        }


def record_bytes(plan: Plan) -> int:
    """Bytes of one expert's record. ValueError for a model without experts, or whose config lacks a size."""
    if plan.config.moe is None:
        raise ValueError("the config has no routed experts: there is nothing to read from a disk")
    if plan.expert_record_bytes is None or plan.weight_bytes_per_token is None:
        raise ValueError(f"the config lacks {', '.join(plan.unknown)}")
    return plan.expert_record_bytes


def compute_bound(plan: Plan, machine: Machine) -> tuple[float, str]:
    """(seconds per token at least without any disk, what binds them).

    The weights a token uses and the latents of its context read from memory, or its multiply-adds, whichever takes
    longer; and the measured delta rule.
    """
    assert plan.weight_bytes_per_token is not None
    assert plan.weight_mac_per_token is not None
    memory = (plan.weight_bytes_per_token + plan.mla_cache_bytes / plan.batch) / machine.memory_bytes_per_s
    work = (plan.weight_mac_per_token + plan.attention_mac_per_token) / machine.mac_per_s
    return max(memory, work) + machine.kda_s, "memory" if memory >= work else "multiply-adds"


def ceiling(plan: Plan, machine: Machine, trace: Trace | None, cache_bytes: Sequence[int]) -> Ceiling:
    """Tokens/s at most for each cache size, by LRU and LFU; without a trace only the row without a cache.

    Raises ValueError for a model without experts, or without their size, and for a trace of another model.
    """
    record, size = record_bytes(plan), plan.expert_read_bytes_per_token
    assert size is not None
    compute_s, bound_by = compute_bound(plan, machine)
    if trace is not None:
        check_trace(trace, plan.config)
    accesses = trace.accesses if trace else []
    rows = []
    for policy, simulate in POLICIES.items():
        for capacity in sorted(set(cache_bytes)) if trace else [0]:
            records = capacity // record
            cold, warm = hit_rates(simulate(accesses, records)) if trace else (0.0, 0.0)
            bound = nvme_ceiling(size, machine.disk_bytes_per_s, warm, compute_s=compute_s)
            rows.append(CacheRow(
                policy, capacity, records, cold, warm, bound.bytes_read, bound.io_s,
                1 / bound.io_s if bound.io_s else None, bound.serial, bound.overlapped,
                "disk" if bound.bound_by == "disk" else bound_by, machine.kda_s * bound.serial,
                machine.kda_s * bound.overlapped))
    working_set = None if trace is None else trace.working_set * record
    return Ceiling(plan, machine, trace, working_set, compute_s, bound_by, rows)


def cache_sizes(plan: Plan, asked: Sequence[float] = ()) -> list[int]:
    """Bytes of the caches to show: none, half a token's records, 1, 2, 4, ... tokens' records, all; and `asked`."""
    moe, record = plan.config.moe, plan.expert_record_bytes
    assert moe is not None
    assert record is not None
    token, everything = len(moe.layers) * moe.top_k, len(moe.layers) * moe.num_experts
    records = [0, token // 2, everything]
    while token < everything:
        records.append(token)
        token *= 2
    return sorted({*(n * record for n in records), *(round(size) for size in asked)})


def measure_machine(plan: Plan, disk_bytes_per_s: float, disk: str, isa: str | None = None,
                    seconds: float = 1.0) -> Machine:
    """The rest of a Machine, measured now on all threads, in turn: reading memory, multiply-adds, the delta rule.

    The delta rule runs through as many layers as fit a quarter of the free memory, at least one, with a state of its
    own each; the time of all is in proportion.
    """
    shape = delta_rule(plan.config)
    one = replace(shape, layers=1)
    free = bench.available_bytes() or 2**33
    layers = max(1, min(shape.layers, free // 4 // one.state_bytes))
    decode = Decode(replace(shape, layers=layers), isa, left=True)
    found = probes(isa, get_num_threads())
    peak = found["int8 dot"] if plan.weight_format in ("q8g", "q4g") else found["float32 FMA"]
    read: list[float] = []
    step: list[float] = []
    mac: list[float] = []
    decode.run()
    end = perf_counter() + seconds
    while len(read) < 5 or perf_counter() < end:
        read.append(found["DRAM read"]())
        step.append(decode.ns(1))
        mac.append(peak())
    flop_per_mac = 1 if plan.weight_format in ("q8g", "q4g") else 2
    return Machine(disk_bytes_per_s, disk, 1e9 * median(read), 1e9 * median(mac) / flop_per_mac,
                   1e-9 * median(step) * shape.layers / layers)


def figure(model: dict[str, Any]) -> Any:
    """A plotly figure of Ceiling.to_dict(): cache size against tokens/s. ImportError without plotly."""
    from plotly import graph_objects

    chart = graph_objects.Figure()
    for policy in POLICIES:
        rows = [row for row in model["rows"] if row["policy"] == policy]
        for kind, dash in (("overlapped", "solid"), ("serial", "dot")):
            chart.add_scatter(x=[row["cache_bytes"] / 2**30 for row in rows], y=[row[kind] for row in rows],
                              mode="lines+markers", name=f"{policy}, {kind}", line_dash=dash)
    chart.update_layout(
        title=f"{model['model']}, experts {model['expert_format']}, disk {model['machine']['disk']}",
        xaxis_title="cache for experts, GiB", yaxis_title="tokens/s at most (higher is better)",
        yaxis_rangemode="tozero")
    return chart
