"""The rows of `kda bench`: what a model's KDA layers cost on this machine, beside this machine's limits."""

from __future__ import annotations

import platform
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

import kda
from kda.ops import aligned_empty
from kda.perf import counts
from kda.perf.ceilings import copier, fma_rate, fma_rounds, idot_rate, idot_rounds, inplace_ns, read_ns, threads
from kda.perf.counts import Shape
from kda.perf.noise import median_interval, watch_others
from kda.perf.work import Conv, Decode, Layer, Norm, Prefill, Product, WholeLayer, Work, of_tokens, title
from kda.runtime import available_cpus, get_num_threads, runtime_info

# What each field of a row is, and which way is better. The JSON carries this text; a row has the fields of its kind.
FIELDS = {
    "kind": "decode: the delta rule token by token; prefill: in blocks; layer: everything between a layer's "
            "projections in one pass; whole layer: with its projections; epilogue: short convolution or gated norm; "
            "idot: a product with a quantised matrix, int8 activations",
    "name": "model, how many of its KDA layers one token passes through, tokens per call",
    "threads": "threads used",
    "layers": "KDA layers",
    "heads": "value heads per layer",
    "K": "key dimension", "V": "value dimension",
    "weight_rows": "rows of the quantised matrix", "weight_columns": "its columns",
    "weight_bits": "bits of a code", "weight_group": "columns that share a scale",
    "tokens": "tokens in one call",
    "us_per_token": "microseconds per token, median; lower is better",
    "us_per_token_min": "microseconds per token, fastest sample; lower is better",
    "us_per_token_interval": "bootstrap interval of us_per_token, 99 %",
    "share_interval": "bootstrap interval of the row's first share_of_..., 99 %",
    "mac_per_token": "MAC (multiply-adds): of the delta rule 3*K*V per head, of IDOT rows * columns, of the "
                     "convolution one per tap and channel, of the norm 2 per value; without exp and roots",
    "flop_per_token": "FLOP: 2 per MAC",
    "flop_per_token_with_decay": "FLOP with the K*V multiplications of the decay",
    "state_bytes": "bytes of float32 state",
    "traffic_bytes_per_token": "bytes that must be read or written per token: the state once each way per call, in "
                               "blocks q, k, v, g and o too; the epilogue's arrays; the quantised weights once per "
                               "call",
    "GB_per_s": "traffic over time, 10^9 bytes per second, median; higher is better",
    "GFLOP_per_s": "flop_per_token over time, 10^9 per second, median; higher is better",
    "share_of_inplace": "time of s = a*s + b in place with the same traffic / time of the call, median of the "
                        "ratios of neighbouring samples; 1 is the limit of memory; higher is better",
    "share_of_fma": "time of 4 lanes of floating-point instructions per state element at the FMA peak / time of "
                    "the step, median of ratios, a multiply-add lane counted as one; higher is better",
    "share_of_fma_by_definition": "time of mac_per_token at the FMA peak / time per token, median of ratios; higher "
                                  "is better",
    "share_of_copy": "time of a copy with the same traffic / time of the call, median of ratios; higher is better",
    "GMAC_per_s": "mac_per_token over time, 10^9 per second, median; higher is better",
    "share_of_read": "time of reading as many bytes / time of the call, median of ratios; 1 is the limit of memory; "
                     "higher is better",
    "share_of_int8": "time of mac_per_token at the int8 peak / time per token, median of ratios; higher is better",
    "share_of_peaks": "time of the projections at the int8 peak and of the delta rule at the FMA peak / time of the "
                      "call, median of ratios; higher is better",
    "read_us": "microseconds of the reading, median",
    "int8_peak_GMAC_per_s": "10^9 int8 multiply-adds per second in registers, median; higher is better",
    "inplace_us": "microseconds of the in-place pass, median",
    "copy_us": "microseconds of the copy, median",
    "fma_peak_G_lanes_per_s": "10^9 multiply-add lanes per second at the FMA peak, median; higher is better",
    "cpus_taken": "CPUs that other processes, or the host of a virtual machine, took meanwhile, where Linux tells",
    "instructions_per_token": "instructions of the kernels on one thread, counted by callgrind; with --instructions",
    "samples": "samples, each of the call and of its limits in turn",
    "tokens_per_sample": "tokens in one sample",
}


def measure(work: Work, n_threads: int, isa: str | None = None, seconds: float = 1.0) -> dict[str, Any]:
    """One row: the call and its limits in turn, for about `seconds`, at least 5 times each (3 times if it is long).

    Returns the fields of FIELDS that its kind has.
    """
    taken = watch_others()
    with threads(n_threads) as used:
        work.run()
        once = work.ns(1)
        if once < 50_000_000:
            once = min(once, work.ns(1))
        times = max(1, round(400_000 / once))  # 0.4 ms and more: the clock and one interruption weigh little
        rounds = fma_rounds(isa)
        sample = partial(in_turn, work, times, seconds, 5 if once < 100_000_000 else 3)
        row: dict[str, Any]
        if isinstance(work, Decode):
            step, passes, peak = sample([lambda: mean(times, lambda: inplace_ns(work.states, isa)),
                                         lambda: fma_rate(rounds, isa)])
            row = derive(work.shape, step, passes, peak)
        elif isinstance(work, Prefill | Layer):
            step, peak = sample([lambda: fma_rate(rounds, isa)])
            row = derive_blocks(work.shape, work.tokens, step, peak)
        elif isinstance(work, Conv):
            buffer = aligned_empty((work.nbytes // 8,))
            buffer[:] = 1
            step, passes = sample([lambda: mean(times, lambda: inplace_ns(buffer, isa))])
            row = derive_bytes(work.nbytes, work.tokens, step, passes, "inplace") | macs(work.mac / work.tokens)
        elif isinstance(work, Norm):
            with copier(work.nbytes, used) as copy_ns:
                copy_ns()
                step, copies = sample([lambda: mean(times, copy_ns)])
            row = derive_bytes(work.nbytes, work.tokens, step, copies, "copy") | macs(work.mac / work.tokens)
        elif isinstance(work, WholeLayer) and work.tokens == 1:
            memory = aligned_empty((work.nbytes // 4,))
            memory[:] = 1
            step, reads = sample([lambda: mean(times, lambda: read_ns(memory, isa))])
            row = derive_bytes(work.nbytes, 1, step, reads, "read") | macs(work.mac)
        elif isinstance(work, WholeLayer):
            products = idot_rounds(isa)
            step, idot, peak = sample([lambda: idot_rate(products, isa), lambda: fma_rate(rounds, isa)])
            ideal = [work.ideal_ns(i, f) / work.tokens for i, f in zip(idot, peak, strict=True)]
            row = {"tokens": work.tokens, **times_of(step), **macs(work.mac / work.tokens),
                   "traffic_bytes_per_token": work.nbytes / work.tokens,
                   "GMAC_per_s": work.mac / work.tokens / statistics.median(step),
                   **shares("peaks", [limit / own for limit, own in zip(ideal, step, strict=True)])}
        elif isinstance(work, Product) and work.tokens == 1:
            read = work.reader()
            step, reads = sample([lambda: mean(times, read)])
            row = derive_product(work, step) | derive_bytes(work.nbytes, 1, step, reads, "read")
        elif isinstance(work, Product):
            rounds = idot_rounds(isa)
            step, peak = sample([lambda: idot_rate(rounds, isa)])
            row = derive_product(work, step) | shares("int8", [
                work.N * work.K / f / t for f, t in zip(peak, step, strict=True)]) | {
                "int8_peak_GMAC_per_s": statistics.median(peak),
            }
        else:
            raise TypeError(f"no limits for {type(work).__name__}")
    if not np.isfinite(work.result).all():
        raise RuntimeError(f"{work.name}: the call returned NaN or infinity; run kda check")
    return {"kind": work.kind, "name": work.name, "threads": used, **row, "cpus_taken": taken(),
            "samples": len(step), "tokens_per_sample": times * work.tokens}


def macs(per_token: float) -> dict[str, Any]:
    """The fields that count multiply-adds."""
    whole = round(per_token)
    assert whole == per_token
    return {"mac_per_token": whole, "flop_per_token": 2 * whole}


def times_of(token_ns: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that its own time makes, from nanoseconds per token."""
    return {
        "us_per_token": statistics.median(token_ns) / 1e3,
        "us_per_token_min": min(token_ns) / 1e3,
        "us_per_token_interval": [ns / 1e3 for ns in median_interval(token_ns)],
    }


def shares(limit: str, ratios: Sequence[float]) -> dict[str, Any]:
    """The share of a limit that a row is compared by, from the ratios of neighbouring samples."""
    return {f"share_of_{limit}": statistics.median(ratios), "share_interval": list(median_interval(ratios))}


def mean(times: int, ns: Callable[[], float]) -> float:
    """The mean of `times` calls."""
    return sum(ns() for _ in range(times)) / times


def in_turn(work: Work, times: int, seconds: float, least: int,
            limits: Sequence[Callable[[], float]]) -> list[list[float]]:
    """[nanoseconds per token of `work`, what the first limit returned, ...], `times` calls and each limit in turn."""
    samples: list[list[float]] = [[] for _ in range(1 + len(limits))]
    end = perf_counter_ns() + int(seconds * 1e9)
    while len(samples[0]) < least or perf_counter_ns() < end:
        samples[0].append(work.ns(times) / times / work.tokens)
        for own, limit in zip(samples[1:], limits, strict=True):
            own.append(limit())
    return samples


def derive(shape: Shape, step_ns: Sequence[float], pass_ns: Sequence[float], peak: Sequence[float]) -> dict[str, Any]:
    """The fields of a decode row that follow from samples taken in turn.

    step_ns: nanoseconds per token; pass_ns: nanoseconds of one in-place pass over the same state; peak:
    multiply-add lanes per nanosecond.
    """
    ns = statistics.median(step_ns)
    return {
        "layers": shape.layers,
        "heads": shape.HV,
        "K": shape.K, "V": shape.V,
        **times_of(step_ns),
        "mac_per_token": shape.mac,
        "flop_per_token": shape.flop,
        "flop_per_token_with_decay": shape.flop_with_decay,
        "state_bytes": shape.state_bytes,
        "traffic_bytes_per_token": shape.traffic_bytes,
        "GB_per_s": shape.traffic_bytes / ns,
        "GFLOP_per_s": shape.flop / ns,
        **shares("inplace", [p / s for p, s in zip(pass_ns, step_ns, strict=True)]),
        "share_of_fma": statistics.median(shape.lane_ops / f / s for f, s in zip(peak, step_ns, strict=True)),
        "inplace_us": statistics.median(pass_ns) / 1e3,
        "fma_peak_G_lanes_per_s": statistics.median(peak),
    }


def derive_blocks(shape: Shape, tokens: int, token_ns: Sequence[float], peak: Sequence[float]) -> dict[str, Any]:
    """The fields of a prefill or layer row, from nanoseconds per token and multiply-add lanes per nanosecond."""
    ns = statistics.median(token_ns)
    return {
        "layers": shape.layers,
        "heads": shape.HV,
        "K": shape.K, "V": shape.V,
        "tokens": tokens,
        **times_of(token_ns),
        "mac_per_token": shape.mac,
        "flop_per_token": shape.flop,
        "flop_per_token_with_decay": shape.flop_with_decay,
        "GFLOP_per_s": shape.flop / ns,
        "traffic_bytes_per_token": (Prefill.nbytes(shape, tokens) + shape.traffic_bytes) / tokens,
        **shares("fma_by_definition", [shape.mac / f / t for f, t in zip(peak, token_ns, strict=True)]),
        "fma_peak_G_lanes_per_s": statistics.median(peak),
    }


def derive_bytes(nbytes: int, tokens: int, token_ns: Sequence[float], limit_ns: Sequence[float],
                 limit: str) -> dict[str, Any]:
    """The fields of a row that memory bounds: a call of `tokens` tokens reads or writes nbytes, and so does the limit.

    limit: "inplace", "copy" or "read".
    """
    ns = statistics.median(token_ns)
    return {
        "tokens": tokens,
        **times_of(token_ns),
        "traffic_bytes_per_token": nbytes / tokens,
        "GB_per_s": nbytes / tokens / ns,
        **shares(limit, [x / t / tokens for x, t in zip(limit_ns, token_ns, strict=True)]),
        f"{limit}_us": statistics.median(limit_ns) / 1e3,
    }


def derive_product(work: Product, token_ns: Sequence[float]) -> dict[str, Any]:
    """The fields that every row of IDOT has, from nanoseconds per token."""
    ns = statistics.median(token_ns)
    return {
        "weight_rows": work.N, "weight_columns": work.K, "weight_bits": work.bits, "weight_group": work.group,
        "tokens": work.tokens,
        **times_of(token_ns),
        **macs(work.N * work.K),
        "traffic_bytes_per_token": work.nbytes / work.tokens,
        "GB_per_s": work.nbytes / work.tokens / ns,
        "GMAC_per_s": work.N * work.K / ns,
    }


# Rows and columns: Kimi-Linear's q, k and v, its output, all its projections of the input as one; and K3's q, k and v.
PRODUCTS = [(4096, 2304), (2304, 4096), (12704, 2304), (12288, 7168)]


def plan_rows(quick: bool, isa: str | None = None) -> tuple[list[Callable[[], Work]], list[str]]:
    """What to measure, each to be made when its turn comes, and in words what is left out and why."""
    layer, prompt = counts.KIMI_LINEAR_LAYER, 8192
    decodes, prefills = (layer, counts.KIMI_LINEAR, counts.K3_LAYER, counts.K3), (64, 1024, prompt)
    large = {  # in bytes
        title(counts.K3): counts.K3.state_bytes,
        f"{title(counts.KIMI_LINEAR)}, with weights": 2**30,
        f"{title(layer)}, {of_tokens(prompt)}": Prefill.nbytes(layer, prompt),
    }
    free = available_bytes()
    left_out = {name: " by --quick" if quick else f", it needs {size} bytes and only {free} are free"
                for name, size in large.items() if quick or (free is not None and free < 2 * size)}
    works: list[Callable[[], Work]] = [
        *(partial(Decode, shape, isa, left) for shape in decodes for left in (False, True)
          if title(shape) not in left_out),
        *(partial(Prefill, layer, T, isa) for T in prefills if f"{title(layer)}, {of_tokens(T)}" not in left_out),
        *(partial(Layer, layer, T, isa) for T in (1, 1024)),
        *(partial(WholeLayer, counts.KIMI_LINEAR_CONFIG, fmt, 1, counts.KIMI_LINEAR.layers, 1, 0, isa)
          for fmt in ("q8g", "q4g") if f"{title(counts.KIMI_LINEAR)}, with weights" not in left_out),
        partial(WholeLayer, counts.KIMI_LINEAR_CONFIG, "q8g", 1024, 1, 1, 0, isa),
        *(partial(Conv, counts.K3_LAYER.HV * counts.K3_LAYER.K, T, isa) for T in (1, 1024)),
        partial(Norm, layer.HV, layer.V, 1024, isa),
        *(partial(Product, N, K, bits, 1, isa) for N, K in PRODUCTS[:1 if quick else None] for bits in (8, 4)),
        *(partial(Product, *PRODUCTS[0], bits, 512, isa) for bits in (8, 4)),
    ]
    remarks = [f"{name}: left out{why}" for name, why in left_out.items()]
    if quick:
        remarks.append("IDOT of other shapes: left out by --quick")
    return works, remarks


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, where Linux tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def machine(isa: str | None) -> dict[str, Any]:
    """Where the numbers come from: CPU, ISA, threads, caches, compiler and versions."""
    info = runtime_info()
    return {
        "cpu": info["cpu"], "architecture": platform.machine(), "system": f"{platform.system()} {platform.release()}",
        "isa": isa or info["isa"], "cpus": available_cpus(), "threads": info["threads"], "threading": info["threading"],
        "cache_bytes": info["caches"], "compiler": info["compiler"], "flags": info["flags"],
        "python": platform.python_version(), "numpy": np.__version__, "kda": kda.__version__,
    }


# About, for each row.
SECONDS = {"decode": 0.8, "prefill": 0.5, "layer": 0.5, "whole layer": 0.8, "epilogue": 0.4, "idot": 0.12}


def run(quick: bool = False, isa: str | None = None, progress: Callable[[int, int, str], None] | None = None,
        command: str = "kda bench", instructions: Sequence[int] = ()) -> dict[str, Any]:
    """Measure every row: {"machine", "command", "date", "fields", "left_out", "rows"}, ready for JSON.

    Each call runs on 1 thread and on all that kda.get_num_threads() grants. `progress` is called before each row
    with the number done, the number of rows and the row's name. instructions: of one call of each row, as
    instructions.count gives them; for the rows of one thread.
    """
    works, left_out = plan_rows(quick, isa)
    team = sorted({1, get_num_threads()})
    total = len(works) * len(team)
    rows: list[dict[str, Any]] = []
    for i, make in enumerate(works):
        if progress:
            progress(len(rows), total, "inputs of the next row")
        work = make()
        for n in team if work.parallel else [1]:
            if progress:
                progress(len(rows), total, f"{work.name}, {n} thread{'s' if n > 1 else ''}")
            rows.append(measure(work, n, isa, SECONDS[work.kind] * (0.3 if quick else 1)))
            if instructions and n == 1:
                rows[-1]["instructions_per_token"] = instructions[i] / work.tokens
        del work
    if progress:
        progress(total, total, "done")
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(isa),
        "fields": {name: text for name, text in FIELDS.items() if any(name in row for row in rows)},
        "left_out": left_out,
        "rows": rows,
    }


# ---- tables ----

def median_and_best(row: dict[str, Any]) -> str:
    """us/token and, in brackets, that of the fastest sample."""
    return f"{significant(row['us_per_token'])} ({significant(row['us_per_token_min'])})"


# A table per group of kinds: its columns, and how each is read from a row.
Column = tuple[str, Callable[[dict[str, Any]], str]]
TABLES: dict[tuple[str, ...], list[Column]] = {
    ("decode",): [
        ("decode, one token", lambda row: row["name"]),
        ("state", lambda row: f"{row['state_bytes'] / 2**20:.0f} MiB"),
        ("threads", lambda row: str(row["threads"])),
        ("us/token (min)", median_and_best),
        ("MAC/token", lambda row: f"{row['mac_per_token']:,}"),
        ("FLOP/token", lambda row: f"{row['flop_per_token']:,}"),
        ("state GB/s", lambda row: f"{row['GB_per_s']:.1f}"),
        ("of in-place", lambda row: f"{row['share_of_inplace']:.0%}"),
        ("of FMA", lambda row: f"{row['share_of_fma']:.0%}"),
    ],
    ("prefill", "layer"): [
        ("prefill; the fused layer", lambda row: row["name"]),
        ("threads", lambda row: str(row["threads"])),
        ("us/token (min)", median_and_best),
        ("MAC/token", lambda row: f"{row['mac_per_token']:,}"),
        ("FLOP/token", lambda row: f"{row['flop_per_token']:,}"),
        ("GFLOP/s", lambda row: f"{row['GFLOP_per_s']:.1f}"),
        ("of FMA peak", lambda row: f"{row['share_of_fma_by_definition']:.0%}"),
    ],
    ("whole layer",): [
        ("the whole layer", lambda row: row["name"]),
        ("threads", lambda row: str(row["threads"])),
        ("us/token (min)", median_and_best),
        ("MAC/token", lambda row: f"{row['mac_per_token']:,}"),
        ("bytes/call", lambda row: f"{row['traffic_bytes_per_token'] * row['tokens']:,.0f}"),
        ("of its bound", lambda row: f"{row['share_of_read']:.0%} of read" if "share_of_read" in row else
         f"{row['share_of_peaks']:.0%} of the peaks"),
    ],
    ("epilogue",): [
        ("short convolution; gated norm", lambda row: row["name"]),
        ("threads", lambda row: str(row["threads"])),
        ("us/token (min)", median_and_best),
        ("bytes/token", lambda row: f"{row['traffic_bytes_per_token']:,.0f}"),
        ("GB/s", lambda row: f"{row['GB_per_s']:.1f}"),
        ("of its limit", lambda row: f"{row['share_of_copy']:.0%} of copy" if "share_of_copy" in row else
         f"{row['share_of_inplace']:.0%} of in-place"),
    ],
    ("idot",): [
        ("IDOT, groups of 128", lambda row: row["name"]),
        ("threads", lambda row: str(row["threads"])),
        ("us/token (min)", median_and_best),
        ("MAC/token", lambda row: f"{row['mac_per_token']:,}"),
        ("GMAC/s", lambda row: f"{row['GMAC_per_s']:.1f}"),
        ("weights GB/s", lambda row: f"{row['GB_per_s']:.1f}"),
        ("of its bound", lambda row: f"{row['share_of_read']:.0%} of read" if "share_of_read" in row else
         f"{row['share_of_int8']:.0%} of int8 peak"),
    ],
}


def significant(x: float) -> str:
    """Three significant digits, thousands separated."""
    if x >= 100:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


NOISY = 1.5  # a median this many times the fastest sample says more about the machine's other work than about ours

NOTES = [
    "us/token: median of samples (fastest in brackets). MAC and FLOP: the delta rule, 3*K*V multiply-adds per head, "
    "without the decay. Every share is the median of ratios of neighbouring samples in one process: the time of a "
    "limit / the time of the call.",
    "updates left: a token's update of the state is made by the pass of the next one, as KDALayer does it "
    "(fused_recurrent_kda's argument `pending`). of in-place: s = a*s + b over the bytes of the state; state GB/s: "
    "state read and written once per token, 10^9 bytes. of FMA: 4 lanes of floating-point instructions per state "
    "element at the multiply-add peak (one lane counts as one).",
    "of FMA peak: the MAC of the delta rule at the multiply-add peak, whatever else the call does (the fused layer: "
    "convolutions, norms, gates).",
    "the whole layer: projections, convolutions, gates, delta rule, norm, from Python. Its bound: reading the weights "
    "and states once, from memory; for many tokens the projections at the int8 peak and the delta rule at the FMA "
    "peak.",
    "of its limit: s = a*s + b over as many bytes, read and written, as the convolution must read or write; for the "
    "norm numpy's copy between two arrays of as many bytes.",
    "of its bound: reading as many bytes as the quantised weights have, like them from memory; for many tokens int8 "
    "multiply-adds in registers, as the 8-bit product makes them (4-bit codes can take fewer instructions: avx2).",
]


def heading(result: dict[str, Any], form: str) -> str:
    """What ran, when and where."""
    m = result["machine"]
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in m["cache_bytes"].items())
    where = f"{m['cpu']} ({caches or 'caches unknown'}), {m['threads']} threads, ISA {m['isa']}, {m['system']}, " \
            f"Python {m['python']}, numpy {m['numpy']}, kda {m['kda']}"
    if form == "md":
        return f"`{result['command']}`, {result['date'][:10]}: {where}."
    return f"{result['command']}, {result['date']}\n{where}"


def render(result: dict[str, Any], form: str) -> str:
    """The result as "text" or "md"."""
    lines = [heading(result, form)]
    notes = NOTES[:1]
    for (kinds, columns), note in zip(TABLES.items(), NOTES[1:], strict=True):
        rows = [[read(row) for _, read in columns] for row in result["rows"] if row["kind"] in kinds]
        if rows:
            notes.append(note)
            lines += ["", *lay_out([[head for head, _ in columns], *rows], form)]
    for note in notes:
        lines += ["", *([note] if form == "md" else textwrap.wrap(note, 110))]
    for remark in [*result["left_out"], *doubts(result["rows"])]:
        lines += ["", remark]
    return "\n".join(lines)


def lay_out(table: list[list[str]], form: str) -> list[str]:
    """The lines of a table, its first row the head and its first column text."""
    if form == "md":
        lines = ["| " + " | ".join(line) + " |" for line in table]
        lines.insert(1, "|---|" + "---:|" * (len(table[0]) - 1))
        return lines
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))])
            for first, *others in table]


def doubts(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each row that says more about the machine's other work than about ours."""
    found = []
    for row in rows:
        spread = row["us_per_token"] / row["us_per_token_min"]
        shares = [row[name] for name in row if name.startswith("share_of_")]
        which = f"{row['name']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        if spread > NOISY:
            found.append(f"{which}: the median is {spread:.1f} times the fastest "
                         "sample; something else was running, measure again")
        elif max(shares) > NOISY:
            found.append(f"{which}: faster than its limit, so the limit was measured "
                         "while something else was running, measure again")
    return found


def progress_bar(stream: Any = None) -> Callable[[int, int, str], None] | None:
    """A callback that draws on stderr, or None where that is not a terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return None

    def draw(done: int, total: int, label: str) -> None:
        """The bar and the label over what stood there; an empty line at the end."""
        filled = 24 * done // total
        stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (24 - filled)}] {done}/{total} {label}"
                     if done < total else "\r\x1b[K")
        stream.flush()

    return draw
