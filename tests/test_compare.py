"""What two runs, or many, say of each other: `kda compare`, `kda history`, and how both deal with noise."""

import errno
import itertools
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from kda.cli import main
from kda.perf import bench, compare, history, instructions, noise, results, work
from kda.perf.results import Row, Run

MACHINE = {"cpu": "a CPU", "architecture": "x86_64", "cache_bytes": {"L2": 524288}, "cpus": 4, "threads": 4,
           "threading": "openmp", "isa": "avx2", "compiler": "gcc 12", "flags": "-O2", "system": "Linux", "python": "3",
           "numpy": "2", "kda": "0.1.0"}


# ---- noise ----

def test_intervals_of_known_samples():
    rng = np.random.default_rng(1)
    samples = rng.normal(100, 10, 300)
    low, high = noise.median_interval(samples)
    assert low < np.median(samples) < high
    # the median of n normal samples has a standard error of 1.2533 sigma / sqrt(n): 0.72, times 2 * 2.576
    assert 0.6 < (high - low) / (2 * 2.576 * 1.2533 * 10 / 300**0.5) < 1.4
    assert noise.median_interval([5.0]) == (5.0, 5.0)
    assert noise.median_interval([5.0] * 10) == (5.0, 5.0)
    assert noise.median_interval(samples) == noise.median_interval(samples)


def test_an_interval_holds_the_median_as_often_as_it_says():
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        low, high = noise.median_interval(rng.lognormal(0, 0.2, 60))
        held += low <= 1.0 <= high
    assert held >= 0.96 * 400  # asked: 99 %; blocks of few samples give a little less


def test_disturbances_that_last_widen_the_interval():
    """The same values, once mixed and once in slow waves."""
    values = 1 + 0.2 * np.sin(np.arange(120) / 8)
    mixed = np.random.default_rng(3).permutation(values)
    width = {name: np.subtract(*noise.median_interval(x)[::-1]) for name, x in (("lasting", values), ("mixed", mixed))}
    assert width["lasting"] > 1.5 * width["mixed"]


def test_log_error_undoes_the_level():
    assert noise.log_error(np.exp(-2.5758 * 0.03), np.exp(2.5758 * 0.03)) == pytest.approx(0.03, rel=1e-4)


def test_who_else_is_running(monkeypatch):
    now = iter([(0.0, 100.0, 7.0), (2.0, 103.5, 8.0)])
    wall, busy, own = zip(*now, strict=True)
    monkeypatch.setattr(noise, "perf_counter", iter(wall).__next__)
    monkeypatch.setattr(noise, "busy_seconds", iter(busy).__next__)
    monkeypatch.setattr(noise.os, "times", lambda: (next(owns), 0.25, 0.25, 0.5, 99.0))  # own, then children's
    owns = iter(own)
    assert noise.watch_others()() == (3.5 - 1.0) / 2
    monkeypatch.setattr(noise, "perf_counter", iter(wall).__next__)
    monkeypatch.setattr(noise, "busy_seconds", lambda: None)
    owns = iter(own)
    assert noise.watch_others()() is None


# ---- two runs ----

def a_row(us=100.0, relative=0.5, width=0.01, **more):
    wide = (1 - width, 1 + width)
    return Row("decode: x", "avx2", 1, us, (us * wide[0], us * wide[1]), 0.95 * us, relative,
               relative and (relative * wide[0], relative * wide[1]), "inplace", "decode",
               {"mac": 300.0, "flop": 600.0, "bytes": 800.0}, 0.0, **more)


def run_of(*rows, **machine):
    return Run(MACHINE | machine, "2026-01-01T00:00:00", "kda bench", rows)


def verdict(old, new, **machine):
    (change,) = compare.compare(run_of(old, **machine), run_of(new, **machine)).changes
    return change.verdict()


@pytest.mark.parametrize(("new", "expected"), [
    (a_row(), "same"),
    (a_row(130, 0.5 / 1.3), "slower"),
    (a_row(130 * 0.9, 0.5 / 1.3), "slower"),           # on a machine that now runs a little faster
    (a_row(130, 0.5), "same"),                         # the machine is slower, not the kernel
    (a_row(110, 0.5 / 1.1), "same"),                   # within the tolerance
    (a_row(70, 0.5 / 0.7), "faster"),
    (a_row(130, 0.5 / 1.3, width=0.2), "unclear"),     # too noisy to say
    (a_row(50, 0.5 / 1.3), "unclear"),                 # twice as fast, and less of its limit? the limit was disturbed
    (replace(a_row(130, 0.5 / 1.3), us_min=95.0), "unclear"),  # its fastest sample is as fast as before
    (a_row(130, None), "slower"),                      # nothing to relate to: by time
    (a_row(130, 1.7), "slower"),                       # 1.7 of a limit cannot be: by time
])
def test_verdicts(new, expected):
    assert verdict(a_row(), new) == expected


def test_threads_without_cpus_of_their_own_are_not_judged():
    crowded = replace(a_row(130, 0.5 / 1.3), threads=4, cpus_taken=0.5)
    assert verdict(replace(a_row(), threads=4), crowded) == "unclear"
    assert verdict(replace(a_row(), threads=4), replace(crowded, cpus_taken=0.2)) == "slower"
    assert verdict(a_row(), replace(a_row(130, 0.5 / 1.3), cpus_taken=3.0)) == "slower"  # one CPU was left
    assert verdict(a_row(), replace(a_row(130, 0.5 / 1.3), cpus_taken=None)) == "slower"


@pytest.mark.parametrize("counter", ["mac", "flop", "bytes", "instructions"])
def test_counters_have_no_tolerance(counter):
    old = replace(a_row(), counters={counter: 1e9})
    found = compare.compare(run_of(old), run_of(replace(old, counters={counter: 1e9 + 1})))
    assert found.failed
    assert f"COUNTER CHANGED: decode: x (avx2, 1 thread): {counter}: 1,000,000,000 before, 1,000,000,001 now" in (
        compare.render(found))
    assert not compare.compare(run_of(old), run_of(old)).failed


def test_another_machine_is_refused():
    with pytest.raises(ValueError, match=r"two machines: a CPU \(4 CPUs, \w{10}\) and a CPU \(8 CPUs"):
        compare.compare(run_of(a_row()), run_of(a_row(), cpus=8))
    found = compare.compare(run_of(a_row(), replace(a_row(5, None), name="y")),
                            run_of(a_row(300, 0.5), replace(a_row(50, None), name="y"), cpus=8), other_machine=True)
    assert [change.old.name for change in found.changes] == ["decode: x"]  # y has but times
    assert not found.failed
    assert "TWO MACHINES" in compare.render(found)


def test_a_new_compiler_is_the_same_machine():
    found = compare.compare(run_of(a_row()), run_of(a_row(), compiler="clang 20"))
    assert "compiler: gcc 12 before, clang 20 now" in found.remarks


def test_a_slower_machine_is_said_and_not_judged():
    limit = replace(a_row(100, None), name="DRAM read", kind="limit")
    found = compare.compare(run_of(a_row(), limit), run_of(a_row(), replace(limit, us=140.0, us_min=140.0)))
    assert found.remarks == ["the machine changed: DRAM read, 1 thread: 1.40 times the time before"]
    assert not found.failed


def test_rows_of_one_file_only():
    found = compare.compare(run_of(a_row(), replace(a_row(), isa="scalar")),
                            run_of(a_row(), replace(a_row(), threads=2)))
    text = compare.render(found)
    assert "only before: 1 rows: decode: x (scalar, 1)" in text
    assert "only now: 1 rows: decode: x (avx2, 2)" in text
    assert compare.compare(run_of(a_row()), run_of()).failed  # nothing compared is nothing proved


# ---- many runs ----

ROWS = 12


def simulated(rng, factors):
    """A run as `kda bench` would have it: every row's samples around its speed times the machine's drift.

    Drift: the machine as a whole runs up to a fifth faster or slower. Noise: 4 % log-normal that lasts over neighbours,
    and one sample in twenty interrupted for up to twice its time.
    """
    drift, rows = np.exp(rng.uniform(-0.2, 0.2)), []
    for i, factor in enumerate(factors):
        def times(mean, drift=drift):
            white = rng.normal(0, 0.04, 62)
            wave = 0.6 * white[2:] + 0.6 * white[1:-1] + 0.5 * white[:-2]
            late = np.where(rng.random(60) < 0.05, 1 + rng.random(60), 1)
            return mean * drift * np.exp(wave) * late
        own, limit = times(100.0 * (i + 1) * factor), times(50.0 * (i + 1))
        row = bench.times_of(own * 1e3) | bench.shares("inplace", list(limit / own)) | bench.macs(3)
        rows.append({"kind": "decode", "name": f"row {i}", "threads": 1, "traffic_bytes_per_token": 8,
                     "cpus_taken": 0.0} | row)
    return Run(MACHINE, "", "", [results.of_bench(row, "avx2") for row in rows])


def test_false_alarms_of_the_same_code_are_under_one_percent():
    rng = np.random.default_rng(11)
    runs = [simulated(rng, np.ones(ROWS)) for _ in range(36)]
    pairs = list(itertools.permutations(runs, 2))
    alarms = sum(compare.compare(a, b).failed for a, b in pairs)
    assert len(pairs) == 1260
    assert alarms < 0.01 * len(pairs)
    unclear = sum(len(compare.compare(a, b).of("unclear")) for a, b in pairs)
    assert unclear < 0.05 * ROWS * len(pairs)  # and not by saying nothing


def test_a_planted_slowdown_is_named():
    rng = np.random.default_rng(12)
    named = alone = 0
    for _ in range(40):
        old, new = simulated(rng, np.ones(ROWS)), simulated(rng, np.where(np.arange(ROWS) == 5, 1.3, 1.0))
        found = compare.compare(old, new)
        slower = [change.old.name for change in found.of("slower")]
        named += slower == ["decode: row 5"]
        alone += slower not in ([], ["decode: row 5"])
        assert found.failed == bool(slower)
        assert ("SLOWER: decode: row 5 (avx2, 1 thread): 1." in compare.render(found)) == bool(slower)
    assert named >= 36
    assert alone == 0


# ---- files ----

def bench_result(**row):
    row = {"kind": "decode", "name": "x", "threads": 1, "us_per_token": 100.0, "us_per_token_min": 95.0,
           "us_per_token_interval": [99.0, 101.0], "share_of_inplace": 0.5, "share_of_fma": 0.2,
           "share_interval": [0.495, 0.505], "mac_per_token": 300, "flop_per_token": 600,
           "traffic_bytes_per_token": 800, "cpus_taken": 0.0} | row
    return {"machine": MACHINE, "date": "2026-01-02T03:04:05+00:00", "command": "kda bench -o json", "rows": [row]}


def pytest_result(**info):
    info = {"isa": "avx2", "threads": 2, "tokens": 10, "mac": 3000, "flop": 6000, "bytes": 8000,
            "relative": {"to": "numpy", "value": 3.0, "interval": [2.9, 3.1]}} | info
    stats = {"data": [1e-3, 1.1e-3, 1.2e-3], "median": 1.1e-3}
    return {"machine_info": MACHINE, "datetime": "2026-01-02T03:04:05+00:00",
            "benchmarks": [{"name": "test_x[1]", "fullname": "a::test_x[1]", "extra_info": info, "stats": stats}]}


def written(folder, name, result):
    path = folder / name
    path.write_text(json.dumps(result))
    return str(path)


def test_a_row_of_kda_bench(tmp_path):
    run = results.read(written(tmp_path, "a", bench_result()))
    assert run.rows == [Row("decode: x", "avx2", 1, 100.0, (99.0, 101.0), 95.0, 0.5, (0.495, 0.505), "inplace",
                            "decode", {"mac": 300, "flop": 600, "bytes": 800}, 0.0)]
    assert run.fingerprint == results.fingerprint(MACHINE | {"compiler": "other", "isa": "scalar"})
    assert run.fingerprint != results.fingerprint(MACHINE | {"cpu": "another"})


def test_a_row_of_pytest_benchmark(tmp_path):
    (row,) = results.read(written(tmp_path, "a", pytest_result())).rows
    assert (row.name, row.isa, row.threads, row.us_min) == ("test_x[1]", "avx2", 2, pytest.approx(100.0))
    assert row.us == pytest.approx(110.0)  # of 10 tokens
    assert (row.relative, row.relative_interval, row.relative_to) == (3.0, (2.9, 3.1), "numpy")
    assert row.counters == {"mac": 300, "flop": 600, "bytes": 800}
    (row,) = results.read(written(tmp_path, "a", pytest_result(row="decode: x"))).rows
    assert row.name == "decode: x"


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"machine": {"isa": "avx2"}, "date": "", "command": "", "rows": [{}]}'])
def test_what_is_no_result(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match="expected a result of `kda bench -o json`"):
        results.read(tmp_path / "x")


def without(table, path):
    """A result with one value, at a dotted path, replaced."""
    *path, last, value = path
    table = json.loads(json.dumps(table))
    inner = table
    for key in path:
        inner = inner[key]
    inner[last] = value
    return table


@pytest.mark.parametrize(("result", "path", "message"), [
    ("bench", ("machine", []), "list indices"),
    ("bench", ("machine", "cpus", "2"), "machine.cpus: expected a number from 0 to 1e"),
    ("bench", ("rows", 0, "threads", "1"), "threads: expected an integer"),
    ("bench", ("rows", 0, "threads", 1.5), "threads: expected an integer"),
    ("bench", ("rows", 0, "us_per_token", 0), "us: expected a number from 1e-30"),
    ("bench", ("rows", 0, "us_per_token", float("nan")), "us: expected a number .*, got nan"),
    ("bench", ("rows", 0, "us_per_token", 10**400), "us: expected a number .*, got 10000"),
    ("bench", ("rows", 0, "us_per_token_min", None), "us_min: expected a number .*, got None"),
    ("bench", ("rows", 0, "us_per_token_interval", [0, 1]), "us_interval: expected a number .*, got 0"),
    ("bench", ("rows", 0, "us_per_token_interval", [2, 1]), "us_interval: expected the lower number first"),
    ("bench", ("rows", 0, "us_per_token_interval", [10**400, 1]), "interval: expected a number .*, got 10000"),
    ("bench", ("rows", 0, "share_of_inplace", True), "relative: expected a number .*, got True"),
    ("bench", ("rows", 0, "mac_per_token", {}), "mac: expected a number .*, got {}"),
    ("bench", ("rows", 0, "cpus_taken", -1), "cpus_taken: expected a number from 0 .*, got -1"),
    ("pytest", ("benchmarks", 0, "extra_info", "tokens", 0), "tokens: expected a number from 1e-30 .*, got 0"),
    ("pytest", ("benchmarks", 0, "stats", "data", ["1"]), "stats: expected a number .*, got '1'"),
    ("pytest", ("benchmarks", 0, "name", 7), "name: expected text, got 7"),
])
def test_values_that_are_none(tmp_path, result, path, message):
    """Each would have ended in a traceback, or in a comparison of nonsense."""
    whole = bench_result() if result == "bench" else pytest_result()
    if result == "pytest":
        whole["benchmarks"][0]["extra_info"].pop("relative", None)
    file = written(tmp_path, "x", without(whole, path))
    with pytest.raises(ValueError, match=message):
        results.read(file)
    with pytest.raises(ValueError, match=message):
        history.lines_of(file, COMMIT, DATE)
    assert main(["compare", file, file]) == 2


def test_deep_nesting_is_no_result(tmp_path):
    (tmp_path / "x").write_text("[" * 100_000)
    for read in (results.read, lambda path: history.lines_of(path, COMMIT, DATE)):
        with pytest.raises(ValueError, match=r"x: .*recursion"):
            read(tmp_path / "x")


def test_kda_compare(tmp_path, capsys):
    old = written(tmp_path, "old.json", bench_result())
    assert main(["compare", old, old]) == 0
    assert "1 benchmarks: 0 slower, 0 faster, 1 same, 0 unclear" in capsys.readouterr().out
    slow = bench_result(us_per_token=131.0, us_per_token_min=125.0, us_per_token_interval=[130.0, 132.0],
                        share_of_inplace=0.38, share_interval=[0.376, 0.384])
    new = written(tmp_path, "new.json", slow)
    assert main(["compare", old, new, "-o", "md"]) == 1
    out = capsys.readouterr().out
    assert "| decode: x | avx2 | 1 | 100 | 131 | 1.31 | inplace | 1.32 |" in out
    assert "SLOWER: decode: x (avx2, 1 thread): 1.32 times" in out
    assert main(["compare", old, new, "--tolerance", "0.5"]) == 0
    other = written(tmp_path, "other.json", slow | {"machine": MACHINE | {"cpu": "another"}})
    assert main(["compare", old, other]) == 2
    assert "kda compare: two machines" in capsys.readouterr().err
    assert main(["compare", old, other, "--other-machine"]) == 1
    assert main(["compare", old, str(tmp_path / "none.json")]) == 2


# ---- instructions ----

CHILD = """
from functools import partial
from kda.perf import counts, instructions, work
shape = counts.Shape("small", 2, 2, 16, 24)
instructions.run_all([partial(work.Decode, shape), partial(work.Decode, counts.Shape("more", 2, 2, 16, 24, layers=3)),
                      partial(work.Product, 300, 200, 8, 1)])
"""


@pytest.mark.slow
def test_instructions_are_counted_and_stay_the_same():
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is not installed")
    first = instructions.counted(CHILD, 3)
    assert len(first) == 3
    assert instructions.counted(CHILD, 3) == first
    assert first[0] > 100
    assert first[1] == pytest.approx(3 * first[0], rel=0.05)
    with pytest.raises(OSError, match=r"callgrind: ValueError: isa=.mmx.: there is no such ISA"):
        instructions.count(True, "mmx")


def test_instructions_of_kda_bench(monkeypatch, capsys):
    monkeypatch.setattr(bench, "plan_rows", lambda quick, isa: ([lambda: work.Product(300, 200, 8, 20)], []))
    monkeypatch.setattr(bench, "SECONDS", {"idot": 0.01})
    monkeypatch.setattr(instructions, "count", lambda quick, isa: [5000])
    assert main(["bench", "--instructions", "-o", "json", "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"][0]["instructions_per_token"] == 250
    assert result["command"].endswith(" --instructions")
    assert results.of_bench(result["rows"][0], "avx2").counters["instructions"] == 250
    monkeypatch.undo()
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert main(["bench", "--instructions"]) == 2
    assert "needs valgrind" in capsys.readouterr().err


# ---- history ----

def ceiling_result():
    rows = [{"policy": policy, "cache_bytes": n * 2**28, "records": n, "hit_rate": 0.01 * n, "hit_rate_cold": 0.0,
             "bytes_read": 1.0, "io_s": 1.0, "serial": 1.23456789 * n, "overlapped": 2.0 * n,
             "bound_by": "multiply-adds", "kda_share_overlapped": 0.00412345678}
            for policy in ("LRU", "LFU") for n in range(1, 15)]
    return {
        "machine": MACHINE, "date": "2026-01-02T03:04:05+00:00", "command": "kda ceiling",
        "ceilings": [{"name": "DRAM read", "threads": n, "median": 19.87654321 * n, "best": 22.0 * n, "unit": "GB/s",
                      "samples": 9} for n in (1, 4)],
        "disk": [{"pattern": "random", "record_bytes": 4194304, "queue_depth": 4, "bypassed": False, "GB_per_s": 6.0,
                  "us_per_read": 500.0}],
        "model": {"model": "kimi_linear", "expert_format": "q4g", "bytes_per_token": 759_955_456, "compute_s": 0.06,
                  "machine": {"disk": "6 GB/s", "kda_s": 0.003}, "trace": {"name": "a trace"}, "rows": rows}}


COMMIT, DATE = "0123456789abcdef" * 2 + "01234567", "2026-01-02T00:00:00+00:00"


def test_lines_are_compact_and_hold_no_samples(tmp_path):
    lines = [*history.lines_of(written(tmp_path, "a", pytest_result()), COMMIT),
             *history.lines_of(written(tmp_path, "b", bench_result()), COMMIT, DATE),
             *history.lines_of(written(tmp_path, "c", ceiling_result()), COMMIT, DATE)]
    assert [line["kind"] for line in lines] == ["machine", "benchmark", "machine", "decode", "machine", "ceiling",
                                                "ceiling", "disk", "nvme", "nvme"]
    assert max(len(history.dumped(line)) for line in lines) < 2000
    assert lines[1]["us"] == 110.0
    assert lines[1]["date"] == "2026-01-02T03:04:05+00:00"
    assert lines[3] == {
        "commit": COMMIT, "date": DATE, "fingerprint": results.fingerprint(MACHINE), "kind": "decode",
        "name": "decode: x", "isa": "avx2", "threads": 1, "us": 100.0, "us_interval": [99.0, 101.0], "us_min": 95.0,
        "relative": 0.5, "relative_to": "inplace", "relative_interval": [0.495, 0.505], "cpus_taken": 0.0, "mac": 300,
        "flop": 600, "bytes": 800}
    assert (lines[5]["value"], lines[7]["bypassed"], lines[8]["serial"][0]) == (19.877, False, 1.2346)


def test_a_line_that_would_be_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a line of 2\d{3} bytes, at most 2000 may be"):
        history.lines_of(written(tmp_path, "a", bench_result(name="x" * 2000)), COMMIT, DATE)


def test_a_history_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    lines = history.lines_of(written(tmp_path, "a", bench_result()), COMMIT, DATE)
    history.add(path, lines)
    before, names = path.read_bytes(), sorted(os.listdir(tmp_path))

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        history.add(path, [line | {"commit": COMMIT[::-1]} for line in lines])
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == names


def test_adding_twice_changes_nothing(tmp_path):
    path = tmp_path / "history.jsonl"
    lines = history.lines_of(written(tmp_path, "a", bench_result()), COMMIT, DATE)
    assert history.add(path, lines) == (2, 0)
    first = path.read_bytes()
    assert history.add(path, lines) == (0, 2)
    assert path.read_bytes() == first
    faster = history.lines_of(written(tmp_path, "a", bench_result(us_per_token=90.0)), COMMIT, DATE)
    assert history.add(path, faster) == (0, 2)
    assert [line["us"] for line in history.read(path) if "us" in line] == [90.0]
    assert history.add(path, history.lines_of(tmp_path / "a", "f" * 40, DATE)) == (2, 0)
    assert [line["commit"][:1] for line in history.read(path)] == ["0", "0", "f", "f"]
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".new")] == []


def test_what_is_no_history(tmp_path):
    path = tmp_path / "history.jsonl"
    assert history.read(path) == []
    path.write_text('{"commit": "a"}\n')
    with pytest.raises(ValueError, match="line 1: no line of a history"):
        history.read(path)
    for raw, message in ((b"\xff\n", "no history: 'utf-8' codec"), (b"[" * 100_000, "line 1: .*recursion")):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=f"history.jsonl.*{message}"):
            history.read(path)


@pytest.mark.parametrize(("number", "change", "message"), [
    (1, {"us": "x"}, "us: expected a number"),
    (1, {"us": float("inf")}, "us: expected a number"),
    (1, {"relative_interval": None}, "relative: expected with relative_interval"),
    (1, {"commit": 1}, "commit: expected text, got 1"),
    (1, {"name": ["x"]}, "name: expected text"),
    (1, {"threads": "1"}, "threads: expected an integer"),
    (1, {"date": "yesterday"}, "Invalid isoformat"),
    (1, {"note": float("nan")}, "not JSON compliant"),
    (0, {"cpus": []}, "machine.cpus: expected a number"),
])
def test_lines_that_exports_and_the_page_would_stumble_over(tmp_path, number, change, message):
    lines = history.lines_of(written(tmp_path, "a", bench_result()), COMMIT, DATE)
    assert [line["kind"] for line in lines[:2]] == ["machine", "decode"]
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(lines[number] | change))
    with pytest.raises(ValueError, match=f"line 1: no line of a history.*{message}"):
        history.read(path)


@pytest.mark.parametrize("change", [
    {"machine": None}, {"machine": {"isa": "avx2"}}, {"ceilings": [{}]}, {"ceilings": 1}, {"disk": None},
    {"model": {"rows": [1]}}, {"model": 1},
    {"ceilings": [{"name": "x", "threads": 1, "median": float("nan"), "best": 1, "unit": ""}]},
    {"ceilings": [{"name": "x", "threads": 1, "median": "1", "best": 1, "unit": ""}]},
])
def test_what_is_no_ceiling(tmp_path, change):
    machine = MACHINE | {"isa": "avx2", "threads": 2}
    whole = {"machine": machine, "date": DATE, "ceilings": [], "disk": [], "model": None}
    assert len(history.lines_of(written(tmp_path, "a", whole), COMMIT, DATE)) == 1
    with pytest.raises(ValueError, match="x: not what `kda bench`, `kda ceiling` or pytest-benchmark write: "):
        history.lines_of(written(tmp_path, "x", whole | change), COMMIT, DATE)


def test_exports(tmp_path):
    lines = history.benchmarks(history.lines_of(written(tmp_path, "a", bench_result()), COMMIT, DATE))
    assert history.github_action_benchmark(lines) == [{
        "name": "decode: x, avx2, 1 thread", "unit": "us/token", "value": 100.0, "range": "99 to 101",
        "extra": "relative: 0.5\nmac: 300\nflop: 600\nbytes: 800"}]
    assert history.bencher(lines) == {"decode: x, avx2, 1 thread": {
        "latency": {"value": 100_000.0, "lower_value": 99_000.0, "upper_value": 101_000.0},
        "relative-speed": {"value": 0.5, "lower_value": 0.495, "upper_value": 0.505},
        "mac": {"value": 300}, "flop": {"value": 600}, "bytes": {"value": 800}}}


def test_kda_history(tmp_path, capsys):
    path, result = str(tmp_path / "history.jsonl"), written(tmp_path, "a", bench_result())
    model = written(tmp_path, "c", ceiling_result())
    assert main(["history", "add", path, result, model, "--commit", COMMIT]) == 0
    assert capsys.readouterr().out == f"{path}: 7 lines added, 1 replaced, commit 0123456789\n"
    assert main(["history", "export", path, "--to", "github-action-benchmark"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["value"] == 100.0
    assert main(["history", "export", path, "--to", "bencher", "--commit", COMMIT[:8]]) == 0
    assert "latency" in capsys.readouterr().out
    assert main(["history", "export", path, "--to", "bencher", "--commit", "abc"]) == 2
    assert "no benchmark of commit abc" in capsys.readouterr().err
    assert main(["history", "add", path, path, "--commit", COMMIT]) == 2
    assert "no JSON of `kda bench`" in capsys.readouterr().err


def test_the_commit_comes_from_git(tmp_path, monkeypatch):
    monkeypatch.setattr(history.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": f"{COMMIT} {DATE}\n"}))
    assert history.git_commit() == (COMMIT, DATE)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="--commit HASH"):
        history.git_commit(tmp_path)
