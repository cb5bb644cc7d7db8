"""`kda dashboard`: a history as one static page, plotly.js inside, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kda.perf import compare, history, limits
from kda.perf.history import Line
from kda.perf.results import COUNTERS, Row, Run

PARTS = ("dashboard.html", "dashboard.css", "dashboard.js")  # in kda/data; the first has a place for each other


def page_data(lines: Sequence[Line]) -> dict[str, Any]:
    """What the page shows: {"commits", "machines", "series", "ceilings", "disks", "nvme", "meaning"}.

    A series is one benchmark on one machine, its points in the order of the commits' dates; each point is judged
    against the one before that was not disturbed, as `kda compare` does. Of ceilings, disks and models the last
    commit's lines are kept for each machine.
    """
    if not lines:
        raise ValueError("the history is empty or not there: `kda history add` fills it")
    dates = {line["commit"]: line["date"] for line in lines}
    order = sorted(dates, key=lambda commit: datetime.fromisoformat(dates[commit]).timestamp())
    place = {commit: i for i, commit in enumerate(order)}
    in_order = sorted(lines, key=lambda line: place[line["commit"]])
    latest: dict[str, dict[tuple[Any, ...], Line]] = {kind: {} for kind in ("machine", "ceiling", "disk", "nvme")}
    grouped: dict[tuple[Any, ...], list[Line]] = {}
    for line in in_order:
        key = tuple(line[name] for name in history.KEY[1:])
        if line["kind"] == "machine":
            latest["machine"][line["fingerprint"],] = line
        elif line["kind"] in latest:
            latest[line["kind"]][key] = line
        else:
            grouped.setdefault(key, []).append(line)
    machines = {line["fingerprint"]: line for line in latest["machine"].values()}
    return {
        "commits": [{"commit": commit, "date": dates[commit]} for commit in order],
        "machines": list(machines.values()),
        "series": [series(points, machines.get(points[0]["fingerprint"], {})) for points in grouped.values()],
        "ceilings": list(latest["ceiling"].values()), "disks": list(latest["disk"].values()),
        "nvme": list(latest["nvme"].values()), "meaning": limits.MEANING,
    }


def series(points: Sequence[Line], machine: Line) -> dict[str, Any]:
    """One benchmark over commits, every point with its verdict."""
    z = NormalDist().inv_cdf(1 - compare.FALSE_ALARMS / 2 / max(1, len(points)))
    shown: list[dict[str, Any]] = []
    before: Row | None = None
    for line in points:
        row = history.row_of(line)
        crowded = compare.crowded(row, Run(machine, "", "", []))
        change = before and compare.judged(before, row, z, disturbed=crowded)
        point = {name: line[name] for name in (
            "commit", "us", "us_interval", "us_min", "relative", "relative_interval", "cpus_taken", *COUNTERS)
            if name in line}
        point["verdict"] = change.verdict() if change else "unclear" if crowded else "first"
        if change:
            point |= {"ratio": history.rounded(change.ratio), "counters_changed": list(change.counters)}
        if crowded:
            point["disturbed"] = crowded
        else:
            before = row
        shown.append(point)
    last = points[-1]
    return {name: last[name] for name in ("fingerprint", "kind", "name", "isa", "threads")} | {
        "relative_to": last.get("relative_to", ""), "points": shown}


def page(lines: Sequence[Line]) -> str:
    """The page as HTML. ImportError without plotly, ValueError for an empty history."""
    data = json.dumps(page_data(lines), separators=(",", ":")).replace("<", "\\u003c")
    from plotly.offline import get_plotlyjs

    html, css, script = (files("kda").joinpath("data", name).read_text(encoding="utf-8") for name in PARTS)
    for mark, text in (("/* CSS */", css), ("/* SCRIPT */", script), ("/* PLOTLY */", get_plotlyjs()),
                       ('"DATA"', data)):
        before, after = html.split(mark, 1)  # no str.replace: it would look into what was just put in
        html = before + text + after
    return html


def write(lines: Sequence[Line], folder: Path) -> Path:
    """Write index.html into `folder`, which is made if needed; returns its path."""
    text = page(lines)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(text, encoding="utf-8")
    return path
