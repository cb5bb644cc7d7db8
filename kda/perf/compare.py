"""`kda compare`: did a kernel become slower between two runs, or did the machine?

Each row has a median with its bootstrap interval, and one relative to what was timed in turn with it in the same
process: a limit of the machine, or another library. A machine that runs slower takes that down as well, so rows are
judged by the relative speed where both runs have a believable one, and by time elsewhere.

An interval knows only the noise inside a run. What else the machine did in one of the two runs is caught in three
ways: a row whose threads had to share CPUs with other processes is not judged; a kernel that became slower has a
slower fastest sample too, while a disturbed one mostly has not; and relative speed and time must not contradict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, median

from kda.perf.bench import NOISY, lay_out, significant
from kda.perf.noise import log_error
from kda.perf.results import Row, Run

TOLERANCE = 0.15     # slower by less is not called slower: two runs of the same code differ by so much
LIMIT = "limit"      # kind of the rows that time the machine and no kernel: reported, not judged
CROWDED = 0.25       # CPUs that others may take beyond what is free before a row counts as disturbed
FALSE_ALARMS = 0.01  # chance of any alarm from the samples' noise when nothing changed, all rows together
MISSED = 1.3         # a slowdown that a row should be able to show; "unclear" if its interval is wider than that


@dataclass(frozen=True)
class Change:
    """One row of both runs. Ratios over 1 are slower; the interval's level is such that FALSE_ALARMS holds."""

    old: Row
    new: Row
    by: str  # what it is judged by: "time", or what the speed is relative to
    ratio: float
    low: float
    high: float
    fastest: float  # slowdown of the fastest sample, by the same measure
    disturbed: str  # why the row cannot be judged, or ""
    counters: tuple[str, ...]  # those that changed, in words

    def verdict(self, tolerance: float = TOLERANCE) -> str:
        """"slower", "faster", "same", or "unclear".

        Unclear: disturbed, contradictory, or too noisy to exclude a slowdown of MISSED times.
        """
        time, most = self.new.us / self.old.us, 1 + tolerance
        if self.disturbed:
            return "unclear"
        if self.low > most:
            return "slower" if self.fastest > most and time > 1 / most else "unclear"
        if self.high < 1 / most:
            return "faster" if self.fastest < 1 / most and time < most else "unclear"
        return "unclear" if self.high > MISSED else "same"


@dataclass(frozen=True)
class Comparison:
    """Two runs joined by name, ISA and threads."""

    changes: list[Change]
    only_old: list[Row]
    only_new: list[Row]
    remarks: list[str]
    tolerance: float = TOLERANCE

    def of(self, verdict: str) -> list[Change]:
        """The rows with this verdict."""
        return [change for change in self.changes if change.verdict(self.tolerance) == verdict]

    @property
    def failed(self) -> bool:
        """Whether a row became slower, or a counter changed, or nothing could be compared."""
        return bool(self.of("slower") or any(change.counters for change in self.changes) or not self.changes)


def compare(old: Run, new: Run, tolerance: float = TOLERANCE, other_machine: bool = False) -> Comparison:
    """Join two runs and judge each row.

    Raises ValueError if they come from different machines, unless other_machine: then only what both have relative
    speeds for is judged, and the remarks say so.
    """
    remarks = []
    if old.fingerprint != new.fingerprint:
        names = " and ".join(f"{run.machine.get('cpu')} ({run.machine.get('cpus')} CPUs, {run.fingerprint})"
                             for run in (old, new))
        if not other_machine:
            raise ValueError(f"two machines: {names}; times of one say nothing of the other (--other-machine compares "
                             "relative speeds alone)")
        remarks.append(f"TWO MACHINES: {names}. Relative speeds are compared, and differ between machines as well.")
    for key in ("compiler", "flags", "threading", "python", "numpy"):
        if old.machine.get(key) != new.machine.get(key):
            remarks.append(f"{key}: {old.machine.get(key)} before, {new.machine.get(key)} now")
    before, after = ({row.key: row for row in run.rows} for run in (old, new))
    pairs = [(before[key], after[key]) for key in before if key in after]
    for a, b in pairs:
        if a.kind == LIMIT and not 1 / (1 + tolerance) < b.us / a.us < 1 + tolerance:
            remarks.append(f"the machine changed: {a.name}, {of_threads(a.threads)}: {b.us / a.us:.2f} times the time "
                           "before")
    pairs = [(a, b) for a, b in pairs if a.kind != LIMIT]
    z = NormalDist().inv_cdf(1 - FALSE_ALARMS / (2 * max(1, len(pairs))))
    changes = [judged(a, b, z, other_machine, crowded(a, old) or crowded(b, new)) for a, b in pairs]
    return Comparison([change for change in changes if change], [before[key] for key in before if key not in after],
                      [after[key] for key in after if key not in before], remarks, tolerance)


def crowded(row: Row, run: Run) -> str:
    """Why a row's threads had no CPUs of their own, "" if they had or if nothing tells."""
    cpus, taken = run.machine.get("cpus"), row.cpus_taken
    if cpus is None or taken is None or row.threads + taken <= cpus + CROWDED:
        return ""
    return f"others took {taken:.1f} of {cpus} CPUs"


def judged(old: Row, new: Row, z: float, relative_only: bool = False, disturbed: str = "") -> Change | None:
    """One row of both runs; z: half-width of its interval in standard errors. None if it cannot be judged."""
    counters = tuple(f"{name}: {old.counters[name]:,.15g} before, {new.counters[name]:,.15g} now"
                     for name in old.counters if name in new.counters and old.counters[name] != new.counters[name])
    by, ratio, fastest = "time", new.us / old.us, new.us_min / old.us_min
    errors = [log_error(*old.us_interval), log_error(*new.us_interval)]
    if believable(old) and believable(new) and old.relative_to == new.relative_to:
        assert old.relative
        assert new.relative
        assert old.relative_interval
        assert new.relative_interval
        by, ratio = old.relative_to, old.relative / new.relative
        fastest *= old.relative * old.us / (new.relative * new.us)  # by how much what it is relative to changed
        errors = [log_error(*old.relative_interval), log_error(*new.relative_interval)]
    elif relative_only:
        return None
    width = math.exp(z * math.hypot(*errors))
    return Change(old, new, by, ratio, ratio / width, ratio * width, fastest, disturbed, counters)


def believable(row: Row) -> bool:
    """Whether the relative speed is one to judge by: a kernel well over a limit means that the limit was disturbed."""
    limit = row.relative_to in ("inplace", "read", "copy", "int8", "fma_by_definition")
    return row.relative is not None and row.relative_interval is not None and (not limit or row.relative <= NOISY)


def render(found: Comparison, form: str = "text") -> str:
    """The table, and what it comes to."""
    table = [["benchmark", "ISA", "threads", "us before", "us now", "time now / before", "relative to", "slowdown",
              "interval", ""]]
    for change in found.changes:
        old, new = change.old, change.new
        verdict = change.verdict(found.tolerance)
        words = [verdict.upper() if verdict == "slower" else verdict, change.disturbed, *change.counters]
        table.append([old.name, old.isa, str(old.threads), significant(old.us), significant(new.us),
                      f"{new.us / old.us:.2f}", change.by, f"{change.ratio:.2f}",
                      f"{change.low:.2f} to {change.high:.2f}", "; ".join(filter(None, words))])
    blocks = ["\n".join(line.rstrip() for line in lay_out(table, form))]
    blocks.append(f"slowdown: before / now of the speed relative to what was timed in turn, or of the time; over 1 is "
                  f"slower. slower: by more than {found.tolerance:.0%} with the whole interval; false alarms from the "
                  f"samples' noise: {FALSE_ALARMS:.0%} for all rows together. unclear: disturbed, "
                  f"or a slowdown of {MISSED} times is inside the interval; measure again.")
    blocks += found.remarks
    for rows, where in ((found.only_old, "before"), (found.only_new, "now")):
        if rows:
            names = ", ".join(f"{row.name} ({row.isa}, {row.threads})" for row in rows[:5])
            blocks.append(f"only {where}: {len(rows)} rows: {names}{', ...' if len(rows) > 5 else ''}")
    blocks.append(summary(found))
    return "\n\n".join(blocks)


def summary(found: Comparison) -> str:
    """The last words: how many of what, and which rows are slower."""
    if not found.changes:
        return "Nothing to compare: no benchmark is in both files."
    times = median(change.new.us / change.old.us for change in found.changes)
    counts = ", ".join(f"{len(found.of(verdict))} {verdict}" for verdict in ("slower", "faster", "same", "unclear"))
    lines = [f"{len(found.changes)} benchmarks: {counts}; the median time is {times:.2f} times that before."]
    if len(found.of("unclear")) == len(found.changes):
        lines.append("NOTHING COULD BE JUDGED: measure again, with nothing else running.")
    lines += [f"SLOWER: {change.old.name} ({change.old.isa}, {of_threads(change.old.threads)}): {change.ratio:.2f} "
              f"times, at least {change.low:.2f}" for change in found.of("slower")]
    lines += [f"COUNTER CHANGED: {change.old.name} ({change.old.isa}, {of_threads(change.old.threads)}): {counter}"
              for change in found.changes for counter in change.counters]
    return "\n".join(lines)


def of_threads(n: int) -> str:
    """"1 thread", "2 threads"."""
    return f"{n} thread{'s' if n > 1 else ''}"
