"""The rows of `kda bench`: the decode step on the shapes of real models, beside this machine's ceilings."""

from __future__ import annotations

import platform
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kda
from kda.ops import aligned_empty
from kda.perf import counts
from kda.perf.ceilings import fma_rate, fma_rounds, inplace_ns, threads
from kda.perf.counts import Shape
from kda.runtime import get_num_threads, runtime_info

SEED = 20251030

# What each field of a row is, and which way is better. The JSON carries this text.
FIELDS = {
    "name": "model and how many of its KDA layers one token passes through",
    "threads": "threads used",
    "layers": "KDA layers",
    "heads": "value heads per layer",
    "K": "key dimension", "V": "value dimension",
    "us_per_token": "microseconds per token, median; lower is better",
    "us_per_token_min": "microseconds per token, fastest sample; lower is better",
    "mac_per_token": "MAC (multiply-adds) of the delta rule: 3*K*V per head",
    "flop_per_token": "FLOP of the delta rule: 2 per MAC",
    "flop_per_token_with_decay": "FLOP with the K*V multiplications of the decay",
    "state_bytes": "bytes of float32 state",
    "traffic_bytes_per_token": "bytes of state read once and written once",
    "GB_per_s": "traffic over time, 10^9 bytes per second, median; higher is better",
    "GFLOP_per_s": "flop_per_token over time, 10^9 per second, median; higher is better",
    "share_of_inplace": "time of s = a*s + b in place over the same bytes / time of the step, median of the "
                        "ratios of neighbouring samples; 1 is the limit of memory; higher is better",
    "share_of_fma": "time of 4 lanes of floating-point instructions per state element at the FMA peak / time of "
                    "the step, median of ratios, a multiply-add lane counted as one; higher is better",
    "inplace_us": "microseconds of the in-place pass, median",
    "fma_peak_G_lanes_per_s": "10^9 multiply-add lanes per second at the FMA peak, median; higher is better",
    "samples": "samples, each of decode, in-place pass and FMA probe in turn",
    "tokens_per_sample": "tokens in one sample",
}


class Decode:
    """A decode step of every layer of a shape: inputs from one fixed seed, states updated in place.

    Each layer has its own inputs and its own 64-byte aligned state [1, HV, K, V], as in a model.
    """

    def __init__(self, shape: Shape, isa: str | None = None) -> None:
        rng = np.random.default_rng(SEED)
        L, H, HV, K, V = shape.layers, shape.H, shape.HV, shape.K, shape.V
        self.shape, self.isa, self.normalise = shape, isa, True

        def normal(*dims: int) -> NDArray[np.float32]:
            return rng.standard_normal(dims, dtype=np.float32)

        self.q, self.k, self.v = normal(L, 1, 1, H, K), normal(L, 1, 1, H, K), normal(L, 1, 1, HV, V)
        self.g = -0.5 * rng.random((L, 1, 1, HV, K), dtype=np.float32)
        self.beta = 0.01 + 0.98 * rng.random((L, 1, 1, HV), dtype=np.float32)
        self.states = aligned_empty((L, 1, HV, K, V))
        self.states[:] = 0.1 * normal(1, 1, HV, K, V)
        self.o = np.empty((L, 1, 1, HV, V), np.float32)
        self._calls = list(zip(self.q, self.k, self.v, self.g, self.beta, self.states, self.o, strict=True))

    def step(self) -> None:
        """One token through every layer, by the public function."""
        for q, k, v, g, beta, state, o in self._calls:
            kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=state, state_out=state, out=o,
                                    use_qk_l2norm_in_kernel=self.normalise, isa=self.isa)

    def ns(self, tokens: int) -> int:
        """Nanoseconds of `tokens` steps."""
        start = perf_counter_ns()
        for _ in range(tokens):
            self.step()
        return perf_counter_ns() - start


def measure(shape: Shape, n_threads: int, isa: str | None = None, seconds: float = 1.5,
            decode: Decode | None = None) -> dict[str, Any]:
    """One row: decode, in-place pass and FMA probe in turn, for about `seconds`, at least 5 times each.

    Returns the fields of FIELDS.
    """
    decode = decode or Decode(shape, isa)
    with threads(n_threads) as used:
        decode.ns(1)
        once = min(decode.ns(1), decode.ns(1))
        tokens = max(1, round(400_000 / once))  # 0.4 ms and more: the clock and one interruption weigh little
        rounds = fma_rounds(isa)
        step_ns: list[float] = []
        pass_ns: list[float] = []
        peak: list[float] = []
        end = perf_counter_ns() + int(seconds * 1e9)
        while len(step_ns) < 5 or perf_counter_ns() < end:
            step_ns.append(decode.ns(tokens) / tokens)
            pass_ns.append(sum(inplace_ns(decode.states, isa) for _ in range(tokens)) / tokens)
            peak.append(fma_rate(rounds, isa))
    if not np.isfinite(decode.o).all():
        raise RuntimeError(f"{title(shape)}: the decode step returned NaN or infinity; run kda check")
    return {"name": title(shape), "threads": used, **derive(shape, step_ns, pass_ns, peak), "tokens_per_sample": tokens}


def derive(shape: Shape, step_ns: Sequence[float], pass_ns: Sequence[float], peak: Sequence[float]) -> dict[str, Any]:
    """The fields of FIELDS that follow from samples taken in turn.

    step_ns: nanoseconds per token; pass_ns: nanoseconds of one in-place pass over the same state; peak:
    multiply-add lanes per nanosecond.
    """
    ns = statistics.median(step_ns)
    return {
        "layers": shape.layers,
        "heads": shape.HV,
        "K": shape.K, "V": shape.V,
        "us_per_token": ns / 1e3,
        "us_per_token_min": min(step_ns) / 1e3,
        "mac_per_token": shape.mac,
        "flop_per_token": shape.flop,
        "flop_per_token_with_decay": shape.flop_with_decay,
        "state_bytes": shape.state_bytes,
        "traffic_bytes_per_token": shape.traffic_bytes,
        "GB_per_s": shape.traffic_bytes / ns,
        "GFLOP_per_s": shape.flop / ns,
        "share_of_inplace": statistics.median(p / s for p, s in zip(pass_ns, step_ns, strict=True)),
        "share_of_fma": statistics.median(shape.lane_ops / f / s for f, s in zip(peak, step_ns, strict=True)),
        "inplace_us": statistics.median(pass_ns) / 1e3,
        "fma_peak_G_lanes_per_s": statistics.median(peak),
        "samples": len(step_ns),
    }


def title(shape: Shape) -> str:
    """The shape in words: "Kimi-Linear, 20 layers"."""
    return f"{shape.name}, {shape.layers} layer{'s' if shape.layers > 1 else ''}"


def plan_rows(quick: bool) -> tuple[list[Shape], list[str]]:
    """The shapes to measure and, in words, those left out and why."""
    shapes = [counts.KIMI_LINEAR_LAYER, counts.KIMI_LINEAR, counts.K3_LAYER]
    if quick:
        return shapes, [f"{title(counts.K3)}: left out by --quick"]
    free = available_bytes()
    if free is not None and free < 2 * counts.K3.state_bytes:
        return shapes, [f"{title(counts.K3)}: left out, {counts.K3.state_bytes} bytes of state and only {free} free"]
    return [*shapes, counts.K3], []


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
        "isa": isa or info["isa"], "threads": info["threads"], "threading": info["threading"],
        "cache_bytes": info["caches"], "compiler": info["compiler"], "flags": info["flags"], "python": platform.python_version(), "numpy": np.__version__,
        "kda": kda.__version__,
    }


def run(quick: bool = False, isa: str | None = None, progress: Callable[[int, int, str], None] | None = None,
        command: str = "kda bench") -> dict[str, Any]:
    """Measure every row: {"machine", "command", "date", "fields", "left_out", "rows"}, ready for JSON.

    Each shape runs on 1 thread and on all that kda.get_num_threads() grants. `progress` is called before each
    row with the number done, the number of rows and the row's name.
    """
    shapes, left_out = plan_rows(quick)
    each = 0.3 if quick else 1.5
    team = sorted({1, get_num_threads()})
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        decode = Decode(shape, isa)
        for n in team:
            if progress:
                progress(len(rows), len(shapes) * len(team), f"{title(shape)}, {n} thread{'s' if n > 1 else ''}")
            rows.append(measure(shape, n, isa, each, decode))
    if progress:
        progress(len(rows), len(rows), "done")
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(isa),
        "fields": FIELDS,
        "left_out": left_out,
        "rows": rows,
    }


# ---- tables ----

COLUMNS = ["", "state", "threads", "us/token (min)", "MAC/token", "FLOP/token", "state GB/s", "of in-place", "of FMA"]


def cells(row: dict[str, Any]) -> list[str]:
    """One row of COLUMNS."""
    return [
        row["name"],
        f"{row['state_bytes'] / 2**20:.0f} MiB",
        str(row["threads"]),
        f"{significant(row['us_per_token'])} ({significant(row['us_per_token_min'])})",
        f"{row['mac_per_token']:,}",
        f"{row['flop_per_token']:,}",
        f"{row['GB_per_s']:.1f}",
        f"{row['share_of_inplace']:.0%}",
        f"{row['share_of_fma']:.0%}",
    ]


def significant(x: float) -> str:
    """Three significant digits, thousands separated."""
    if x >= 100:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


NOISY = 1.5  # a median this many times the fastest sample says more about the machine's other work than about ours

NOTE = (
    "us/token: median of samples (fastest in brackets). MAC and FLOP: the delta rule, 3*K*V multiply-adds per head, "
    "without the decay. state GB/s: state read and written once per token, 10^9 bytes. "
    "of in-place: the time of s = a*s + b over the same bytes / the time of the step. "
    "of FMA: the time of 4 lanes of floating-point instructions per state element at the multiply-add peak (one lane "
    "counts as one) / the time of the step. Both shares are medians of ratios of neighbouring samples in one process."
)


def render(result: dict[str, Any], form: str) -> str:
    """The result as "text" or "md"."""
    table = [COLUMNS, *map(cells, result["rows"])]
    m = result["machine"]
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in m["cache_bytes"].items())
    where = f"{m['cpu']} ({caches or 'caches unknown'}), {m['threads']} threads, ISA {m['isa']}, {m['system']}, " \
            f"Python {m['python']}, numpy {m['numpy']}, kda {m['kda']}"
    what = f"{result['command']}, {result['date']}"
    if form == "md":
        lines = ["| " + " | ".join(line) + " |" for line in table]
        lines.insert(1, "|---|" + "---:|" * (len(COLUMNS) - 1))
        lines = [f"`{result['command']}`, {result['date'][:10]}: {where}.", "", *lines, "", NOTE]
    else:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [f"{what}\n{where}", ""]
        for first, *others in table:
            padded = [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *padded]))
        lines += ["", *textwrap.wrap(NOTE, 110)]
    remarks = list(result["left_out"])
    for row in result["rows"]:
        spread = row["us_per_token"] / row["us_per_token_min"]
        which = f"{row['name']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        if spread > NOISY:
            remarks.append(f"{which}: the median is {spread:.1f} times the fastest "
                           "sample; something else was running, measure again")
        elif max(row["share_of_inplace"], row["share_of_fma"]) > NOISY:
            remarks.append(f"{which}: faster than its limit, so the limit was measured "
                           "while something else was running, measure again")
    return "\n".join([*lines, *(line for remark in remarks for line in ("", remark))])


def progress_bar(stream: Any = None) -> Callable[[int, int, str], None] | None:
    """A callback that draws on stderr, or None where that is not a terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return None

    def draw(done: int, total: int, label: str) -> None:
        filled = 24 * done // total
        stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (24 - filled)}] {done}/{total} {label}"
                     if done < total else "\r\x1b[K")
        stream.flush()

    return draw
