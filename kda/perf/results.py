"""Result files read as one kind of row: those of `kda bench -o json` and of pytest-benchmark's --benchmark-json."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda.perf.noise import median_interval

# In a row of `kda bench`, the share by which it is compared: the first of these that it has.
SHARES = ("share_of_inplace", "share_of_read", "share_of_copy", "share_of_int8", "share_of_peaks",
          "share_of_fma_by_definition")
COUNTERS = ("mac", "flop", "bytes", "instructions")  # exact: any difference is a change of the code
LEAST, MOST = 1e-30, 1e30  # of every amount: quotients of two stay finite
MOST_THREADS = 2**31       # also depths of a disk's queue
# What reading a file of anything at all may raise, besides OSError.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def amount(name: str, value: Any, least: float = 0.0) -> None:
    """ValueError for what is no finite number of at least this."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST:
        raise ValueError(f"{name}: expected a number from {least:g} to {MOST:g}, got {value!r}")


def interval(name: str, values: Any) -> None:
    """ValueError for what are no two positive numbers, the lower one first."""
    if not isinstance(values, tuple) or len(values) != 2:
        raise ValueError(f"{name}: expected two numbers, got {values!r}")
    for value in values:
        amount(name, value, LEAST)
    if values[0] > values[1]:
        raise ValueError(f"{name}: expected the lower number first, got {values!r}")


@dataclass(frozen=True)
class Row:
    """One benchmark. Times are microseconds per token, or per call where a benchmark knows no tokens.

    relative : how fast it is beside what was timed in turn with it (`relative_to`): that one's time / its own; higher
        is better. A machine that runs slower as a whole leaves it as it is. Intervals are those of noise.LEVEL.

    ValueError, with the field, for what is no such value.
    """

    name: str
    isa: str
    threads: int
    us: float
    us_interval: tuple[float, float]
    us_min: float  # the fastest sample
    relative: float | None = None
    relative_interval: tuple[float, float] | None = None
    relative_to: str = ""
    kind: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    cpus_taken: float | None = None  # by others meanwhile

    def __post_init__(self) -> None:
        for name in ("name", "isa", "relative_to", "kind"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: expected text, got {getattr(self, name)!r}")
        if type(self.threads) is not int or not 0 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads: expected an integer from 0 to {MOST_THREADS}, got {self.threads!r}")
        amount("us", self.us, LEAST)
        amount("us_min", self.us_min, LEAST)
        interval("us_interval", self.us_interval)
        if (self.relative is None) != (self.relative_interval is None):
            raise ValueError("relative: expected with relative_interval, or neither")
        if self.relative is not None:
            amount("relative", self.relative, LEAST)
        if self.relative_interval is not None:
            interval("relative_interval", self.relative_interval)
        if self.cpus_taken is not None:
            amount("cpus_taken", self.cpus_taken)
        for name, value in self.counters.items():
            amount(name, value)

    @property
    def key(self) -> tuple[str, str, int]:
        """What two runs are joined by."""
        return self.name, self.isa, self.threads


@dataclass(frozen=True)
class Run:
    """A result file. ValueError for a machine that is not described as `kda bench` does."""

    machine: Mapping[str, Any]
    date: str
    command: str
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        if not isinstance(self.machine, Mapping):
            raise ValueError(f"machine: expected an object, got {self.machine!r}")
        if self.machine.get("cpus") is not None:
            amount("machine.cpus", self.machine["cpus"])

    @property
    def fingerprint(self) -> str:
        """Of the machine: see fingerprint()."""
        return fingerprint(self.machine)


def fingerprint(machine: Mapping[str, Any]) -> str:
    """Ten hex digits that two machines share if they have the same CPU, architecture, caches and CPUs to run on.

    Compiler, flags, ISA and versions are left out: they may change with a commit, and then the times may.
    """
    parts = [machine.get(key) for key in ("cpu", "architecture", "cache_bytes", "cpus")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def read(path: str | Path) -> Run:
    """A result file. ValueError for what is none; OSError for one that cannot be read."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        if "benchmarks" in result:
            return Run(result["machine_info"], result["datetime"], "pytest benchmarks",
                       [of_pytest(entry) for entry in result["benchmarks"]])
        isa = result["machine"]["isa"]
        return Run(result["machine"], result["date"], result["command"], [of_bench(row, isa) for row in result["rows"]])
    except MALFORMED as wrong:
        what = f"no {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        raise ValueError(f"{path}: expected a result of `kda bench -o json` of this version, or of pytest-benchmark's "
                         f"--benchmark-json ({what})") from wrong


def of_bench(row: Mapping[str, Any], isa: str) -> Row:
    """A row of `kda bench`."""
    share = next((name for name in SHARES if name in row), "share_of_inplace")  # missing: a KeyError below
    counters = {"mac": row["mac_per_token"], "flop": row["flop_per_token"], "bytes": row["traffic_bytes_per_token"]}
    if "instructions_per_token" in row:
        counters["instructions"] = row["instructions_per_token"]
    return Row(f"{row['kind']}: {row['name']}", isa, row["threads"], row["us_per_token"],
               pair(row["us_per_token_interval"]), row["us_per_token_min"], row[share], pair(row["share_interval"]),
               share.removeprefix("share_of_"), row["kind"], counters, row["cpus_taken"])


def of_pytest(entry: Mapping[str, Any]) -> Row:
    """A benchmark of pytest-benchmark; its extra_info is what benchmarks/ write."""
    info, tokens = entry["extra_info"], entry["extra_info"].get("tokens", 1)
    amount("tokens", tokens, LEAST)
    if "us_per_token_interval" in info:
        us, interval, fastest = info["us_per_token"], pair(info["us_per_token_interval"]), info["us_per_token_min"]
    else:
        taken = entry["stats"].get("data") or [entry["stats"]["median"]]
        for seconds in taken:
            amount("stats", seconds)
        all_us = [1e6 * seconds / tokens for seconds in taken]
        us, interval, fastest = statistics.median(all_us), median_interval(all_us), min(all_us)
    relative = info.get("relative")
    for name in COUNTERS:
        amount(name, info.get(name, 0))
    counters = {name: info[name] / tokens for name in COUNTERS if name in info}
    return Row(info.get("row", entry["name"]), info.get("isa", ""), info.get("threads", 1), us, interval, fastest,
               relative and relative["value"], relative and pair(relative["interval"]),
               relative["to"] if relative else "", info.get("kind", ""), counters, info.get("cpus_taken"))


def pair(values: Sequence[float]) -> tuple[float, float]:
    """Two numbers of a JSON list."""
    low, high = values
    amount("interval", low)
    amount("interval", high)
    return float(low), float(high)
