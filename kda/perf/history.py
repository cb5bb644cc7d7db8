"""Results over commits: JSON lines, one for each benchmark and commit, and what other tools take.

A line is under 2 KB and holds no samples. Adding the same commit again, from the same machine, replaces its lines.
`kda history add` takes what `kda bench`, `kda ceiling` and pytest-benchmark write.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kda.files import replacing
from kda.perf import results
from kda.perf.results import COUNTERS, MALFORMED, Row, Run, fingerprint

Line = dict[str, Any]
KEY = ("commit", "fingerprint", "kind", "name", "isa", "threads")  # what makes a line the same one
LONGEST = 2000  # bytes
OTHERS = ("machine", "ceiling", "disk", "nvme")  # kinds of lines that are no benchmarks
MACHINE = ("cpu", "architecture", "cache_bytes", "cpus", "threading", "system", "compiler", "flags", "python", "numpy",
           "kda")


def git_commit(folder: Path | None = None) -> tuple[str, str]:
    """(hash, date of the commit in ISO 8601) of the checkout that `folder` is in. ValueError where there is none."""
    try:
        done = subprocess.run(["git", "show", "-s", "--format=%H %cI", "HEAD"], cwd=folder, capture_output=True,
                              text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as wrong:
        raise ValueError("no git checkout here: say --commit HASH") from wrong
    commit, date = done.stdout.split()
    return commit, date


def lines_of(path: str | Path, commit: str, date: str | None = None) -> list[Line]:
    """The lines of a result file; date: of the commit, default: of the result.

    ValueError for what is no result, or a line that is too long.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        ceilings = result.get("ceilings")
    except (ValueError, AttributeError, RecursionError) as wrong:
        raise ValueError(f"{path}: no JSON of `kda bench`, `kda ceiling` or pytest-benchmark ({wrong})") from wrong
    run = results.read(path) if ceilings is None else None
    try:
        machine = result.get("machine") or result.get("machine_info")
        rows = [of_row(row) for row in run.rows] if run else of_ceilings(result)
        date = date or result.get("date") or result.get("datetime")
        where: Line = {"commit": commit, "date": date, "fingerprint": fingerprint(machine)}
        described = {"kind": "machine", "name": "machine", "isa": machine["isa"], "threads": machine["threads"]}
        lines = [where | described | {key: machine[key] for key in MACHINE if key in machine},
                 *(where | row for row in rows)]
        for line in lines:
            check(line)
            if len(dumped(line)) > LONGEST:
                raise ValueError(f"{line['name']}: a line of {len(dumped(line))} bytes, at most {LONGEST} may be")
    except MALFORMED as wrong:
        why = wrong if isinstance(wrong, ValueError) else repr(wrong)
        raise ValueError(f"{path}: not what `kda bench`, `kda ceiling` or pytest-benchmark write: {why}") from wrong
    return lines


def check(line: Any) -> None:
    """ValueError, TypeError or KeyError for what is no line of a history: what it is, whose and of when, and, for a
    benchmark, what a Row takes."""
    for name in (*KEY[:-1], "date"):
        if not isinstance(line[name], str):
            raise ValueError(f"{name}: expected text, got {line[name]!r}")
    if type(line["threads"]) is not int or not 0 <= line["threads"] <= results.MOST_THREADS:
        raise ValueError(f"threads: expected an integer from 0 to {results.MOST_THREADS}, got {line['threads']!r}")
    datetime.fromisoformat(line["date"]).timestamp()
    if line["kind"] == "machine":
        Run(line, "", "", ())
    elif is_benchmark(line):
        row_of(line)


def is_benchmark(line: Line) -> bool:
    """Whether a line is of a benchmark."""
    return line["kind"] not in OTHERS


def row_of(line: Line) -> Row:
    """The benchmark that a line of a history holds."""
    interval = line.get("relative_interval")
    return Row(line["name"], line["isa"], line["threads"], line["us"], tuple(line["us_interval"]), line["us_min"],
               line.get("relative"), interval and tuple(interval), line.get("relative_to", ""), line["kind"],
               {name: line[name] for name in COUNTERS if name in line}, line.get("cpus_taken"))


def of_row(row: Row) -> Line:
    """A benchmark."""
    line: Line = {"kind": row.kind or "benchmark", "name": row.name, "isa": row.isa, "threads": row.threads,
                  "us": rounded(row.us), "us_interval": [rounded(x) for x in row.us_interval],
                  "us_min": rounded(row.us_min)}
    if row.relative is not None and row.relative_interval is not None:
        line |= {"relative": rounded(row.relative), "relative_to": row.relative_to,
                 "relative_interval": [rounded(x) for x in row.relative_interval]}
    if row.cpus_taken is not None:
        line["cpus_taken"] = row.cpus_taken
    return line | dict(row.counters)


def of_ceilings(result: Mapping[str, Any]) -> list[Line]:
    """The limits of a machine, its disk, and the model that the disk bounds."""
    isa = result["machine"]["isa"]
    lines: list[Line] = [{"kind": "ceiling", "name": row["name"], "isa": isa, "threads": row["threads"],
                          "value": rounded(row["median"]), "best": rounded(row["best"]), "unit": row["unit"]}
                         for row in result["ceilings"]]
    lines += [{"kind": "disk", "name": f"{row['pattern']}, {row['record_bytes']:,} B", "isa": "",
               "threads": row["queue_depth"], "value": rounded(row["GB_per_s"]), "unit": "GB/s",
               "bypassed": row["bypassed"], "us_per_read": rounded(row["us_per_read"])} for row in result["disk"]]
    model = result["model"]
    for policy in sorted({row["policy"] for row in model["rows"]}) if model else ():
        assert model
        rows = [row for row in model["rows"] if row["policy"] == policy]
        lines.append({
            "kind": "nvme", "name": f"{model['model']}, experts {model['expert_format']}, {policy}", "isa": isa,
            "threads": result["machine"]["threads"], "policy": policy, "disk": model["machine"]["disk"],
            "trace": model["trace"] and model["trace"]["name"], "bytes_per_token": model["bytes_per_token"],
            "compute_ms": rounded(1e3 * model["compute_s"]), "kda_ms": rounded(1e3 * model["machine"]["kda_s"]),
            "cache_gib": [rounded(row["cache_bytes"] / 2**30) for row in rows],
            "hit_rate": [rounded(row["hit_rate"]) for row in rows],
            "serial": [rounded(row["serial"]) for row in rows],
            "overlapped": [rounded(row["overlapped"]) for row in rows],
            "bound_by": [row["bound_by"] for row in rows],
            "kda_share": [rounded(row["kda_share_overlapped"]) for row in rows],
        })
    return lines


def rounded(x: float) -> float:
    """Five significant digits."""
    return float(f"{x:.5g}")


def dumped(line: Line) -> str:
    """One line of the file."""
    return json.dumps(line, separators=(",", ":"), allow_nan=False)


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two lines share if they are the same measurement of the same commit."""
    return tuple(line[name] for name in KEY)


def read(path: str | Path) -> list[Line]:
    """The lines of a history; none if there is no such file. ValueError, with the line, for anything else."""
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    try:
        whole = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{path}: no history: {wrong}") from wrong
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
            check(line)
            dumped(line)
        except MALFORMED as wrong:
            raise ValueError(f"{path}, line {number}: no line of a history ({wrong!r})") from wrong
        lines.append(line)
    return lines


def add(path: str | Path, new: Iterable[Line]) -> tuple[int, int]:
    """Put lines into a history, in place of those with the same key: (number added, number replaced).

    The file is replaced as a whole, so that a reader or a crash finds it old or new.
    """
    path = Path(path)
    merged = {key_of(line): line for line in read(path)}
    before, count = len(merged), 0
    for line in new:
        merged[key_of(line)] = line
        count += 1
    added = len(merged) - before
    with replacing(path) as file:
        file.write("".join(dumped(line) + "\n" for line in merged.values()).encode())
    return added, count - added


# ---- for other tools ----

def benchmarks(lines: Sequence[Line], commit: str | None = None) -> list[Line]:
    """The benchmarks of one commit, default: the last one in the file that has any."""
    timed = [line for line in lines if is_benchmark(line)]
    if not timed:
        raise ValueError("the history holds no benchmarks")
    commit = commit or timed[-1]["commit"]
    found = [line for line in timed if line["commit"].startswith(commit)]
    if not found:
        raise ValueError(f"the history holds no benchmark of commit {commit}")
    return found


def title(line: Line) -> str:
    """A benchmark's name for people."""
    return f"{line['name']}, {line['isa']}, {line['threads']} thread{'s' if line['threads'] > 1 else ''}"


def github_action_benchmark(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """What github-action-benchmark takes as tool "customSmallerIsBetter"."""
    return [{"name": title(line), "unit": "us/token", "value": line["us"],
             "range": f"{line['us_interval'][0]:g} to {line['us_interval'][1]:g}",
             "extra": "\n".join(f"{name}: {line[name]:,}" for name in ("relative", *results.COUNTERS) if name in line)}
            for line in lines]


def bencher(lines: Sequence[Line]) -> dict[str, Any]:
    """Bencher Metric Format (BMF): latency in nanoseconds; the relative speed; the counters."""
    found = {}
    for line in lines:
        low, high = line["us_interval"]
        measures = {"latency": {"value": 1e3 * line["us"], "lower_value": 1e3 * low, "upper_value": 1e3 * high}}
        if "relative" in line:
            low, high = line["relative_interval"]
            measures["relative-speed"] = {"value": line["relative"], "lower_value": low, "upper_value": high}
        measures |= {name: {"value": line[name]} for name in results.COUNTERS if name in line}
        found[title(line)] = measures
    return found


EXPORTS = {"github-action-benchmark": github_action_benchmark, "bencher": bencher}
