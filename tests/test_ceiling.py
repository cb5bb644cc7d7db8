"""Ceilings of the machine, of the disk, and of a model whose experts are on it; `kda ceiling`."""

import gzip
import json
import os
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from test_config import K3, KIMI, changed

import kda
from kda import KDAConfig
from kda.cli import main
from kda.perf import bench, ceiling, disk, limits, nvme

CONFIGS = {"k3": KDAConfig.from_hf(K3), "kimi": KDAConfig.from_hf(KIMI)}
MACHINE = nvme.Machine(disk_bytes_per_s=1e9, disk="1 GB/s (given)", memory_bytes_per_s=20e9, mac_per_s=100e9,
                       kda_s=0.005)


# ---- the machine ----

def test_team_sizes():
    assert [limits.team_sizes(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_buffers_fit_the_caches_they_are_for(monkeypatch):
    monkeypatch.setattr(limits, "cache_sizes", lambda: {"L1d": 2**15, "L2": 2**19, "L3": 2**25})
    assert limits.buffer_bytes(2) == {"DRAM read": 2**27, "DRAM in-place": 2**27, "L3 read": 2**24, "L2 read": 2**19}
    assert "L3 read" not in limits.buffer_bytes(16)  # its second caches hold as much
    monkeypatch.setattr(limits, "cache_sizes", dict)
    assert limits.buffer_bytes(4) == {"DRAM read": 2**26, "DRAM in-place": 2**26}


@pytest.fixture
def small_machine(monkeypatch):
    """Short probes over little memory."""
    monkeypatch.setattr(limits, "PROBE_NS", 20_000)
    monkeypatch.setattr(limits, "buffer_bytes", lambda team: {"DRAM read": 2**20, "DRAM in-place": 2**20,
                                                              "L2 read": 2**18 * team})


def test_measured_limits(small_machine, threads):
    threads(2)
    rows = limits.measure(seconds=0.01)
    both = [1, 2] if kda.get_num_threads() == 2 else [1]
    assert [(row["threads"], row["name"]) for row in rows] == [
        (n, name) for n in both for name in ("DRAM read", "DRAM in-place", "L2 read", "float32 FMA", "int8 dot")]
    for row in rows:
        assert 0 < row["median"] <= row["best"]
        assert row["samples"] >= 5
        assert row["unit"] == {"float32 FMA": "GFLOP/s", "int8 dot": "GMAC/s"}.get(row["name"], "GB/s")
        assert row["name"] in limits.MEANING


def test_passes_over_the_same_bytes(isa):
    s = np.ones(100_003, np.float32)
    kda._core.probe_update(kda.runtime.isa_index(isa), s, 3)
    np.testing.assert_allclose(s, 1.0, rtol=1e-6)  # a fixed point of 0.99 s + 0.01
    s[:] = 2
    kda._core.probe_update(kda.runtime.isa_index(isa), s, 3)
    np.testing.assert_allclose(s, 1 + 0.99**3, rtol=1e-6)
    kda._core.probe_read(kda.runtime.isa_index(isa), s, 3)
    np.testing.assert_allclose(s, 1 + 0.99**3, rtol=1e-6)


# ---- the disk ----

def test_what_may_be_read_directly():
    assert disk.eligible(12_406_784)  # K3's record
    assert disk.eligible(4096, 8192)
    assert not disk.eligible(12_406_784 + 512)
    assert not disk.eligible(4096, 100)
    assert not disk.eligible(0)


def has_a_disk(path):
    return bool(disk.O_DIRECT) and disk.file_system(path) not in disk.MEMORY


SMALL = {"record_bytes": 2**20, "queue_depths": (1, 3), "seconds": 0.05, "file_bytes": 2**23, "referee": False}


def test_a_folder(tmp_path):
    rows = disk.measure(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []  # the test file is gone
    assert [(row.pattern, row.queue_depth) for row in rows] == [
        ("sequential", 1), ("sequential", 3), ("random", 1), ("random", 3)]
    for row in rows:
        assert row.bypassed == has_a_disk(tmp_path) == (not row.why)
        assert row.GB_per_s == pytest.approx(row.bytes_read / row.seconds / 1e9)
        assert row.bytes_read == pytest.approx(row.reads_per_s * row.seconds * 2**20)
        assert 0 < row.us_per_read <= row.us_per_read_p99
    best = disk.fastest(rows)
    assert (best.pattern, best.GB_per_s) == ("random", max(row.GB_per_s for row in rows[2:]))


def test_a_file_is_read_and_left_alone(tmp_path):
    path = tmp_path / "records"
    disk.write_file(path, 5 * 2**20 + 7)
    before = path.read_bytes()
    assert len(before) == 5 * 2**20 + 7
    assert len(disk.measure(path, **SMALL)) == 4
    assert path.read_bytes() == before


def test_every_record_is_read_once_before_any_again(tmp_path, monkeypatch):
    path, seen = tmp_path / "records", []
    path.write_bytes(bytes(4 * 4096))
    monkeypatch.setattr(disk.os, "preadv", lambda fd, buffers, offset: seen.append(offset) or len(buffers[0]))
    with path.open("rb") as file:
        times, _ = disk.read_records(file.fileno(), 4096, [0, 8192, 4096, 12288], 1, 0.01)
    assert seen[:8] == [0, 8192, 4096, 12288] * 2
    assert len(times) == len(seen)


def test_every_thread_reads_at_least_once(tmp_path):
    (tmp_path / "records").write_bytes(bytes(4096))
    with (tmp_path / "records").open("rb") as file:
        times, _ = disk.read_records(file.fileno(), 4096, [0], 3, seconds=0.0)
        assert len(times) == 3
        assert len(disk.read_records(file.fileno(), 4096, [0], 3, seconds=9.0, most=7)[0]) == 7


def test_memory_is_no_disk():
    if disk.file_system(disk.Path("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    rows = disk.measure("/dev/shm", **SMALL)
    assert not any(row.bypassed for row in rows)
    assert {row.why for row in rows} == {"tmpfs is memory"}
    assert "WARNING: THE PAGE CACHE WAS NOT BYPASSED (tmpfs is memory)" in ceiling.disk_blocks(
        disk.to_dicts(rows), "md")[-1]


def test_a_refused_o_direct_is_said(tmp_path, monkeypatch):
    if disk.file_system(tmp_path) in disk.MEMORY:
        pytest.skip("the temporary folder is memory")
    right = os.open

    def refuse(path, flags, *rest, **more):
        if flags & disk.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return right(path, flags, *rest, **more)

    monkeypatch.setattr(disk.os, "open", refuse)
    rows = disk.measure(tmp_path, **SMALL)
    assert {row.why for row in rows} == {"O_DIRECT refused (Invalid argument)"}
    assert not any(row.bypassed for row in rows)


def test_reading_through_the_page_cache_is_found_out(tmp_path, monkeypatch):
    """A file system that takes O_DIRECT and reads through the cache all the same."""
    if not has_a_disk(tmp_path):
        pytest.skip("the temporary folder is memory")

    @disk.contextmanager
    def buffered(path):
        with path.open("rb") as file:
            yield file.fileno(), ""

    monkeypatch.setattr(disk, "opened", buffered)
    rows = disk.measure(tmp_path, **SMALL)
    assert not any(row.bypassed for row in rows)
    assert all(row.why.endswith("of the file were in the page cache afterwards") for row in rows)


def test_the_cached_share_of_a_file(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(bytes(64 * 4096))
    assert disk.cached_share(path) == 1.0  # just written
    if has_a_disk(tmp_path):
        os.sync()
        disk.drop_cache(path)
        assert disk.cached_share(path) == 0.0


def test_fio_agrees(tmp_path):
    if not shutil.which("fio"):
        pytest.skip("fio is not installed")
    path = tmp_path / "records"
    disk.write_file(path, 2**24)
    speed = disk.fio_speed(path, "random", 2**20, 2, 1.0)
    if has_a_disk(tmp_path):
        ours = disk.fastest(disk.measure(path, 2**20, (2,), 0.5, referee=False)).GB_per_s
        assert 0.1 < speed / ours < 10  # the same unit; the rest is the disk's mood
    row = disk.measure(path, 2**20, (1, 2), 0.05)[-1]
    assert (row.fio_GB_per_s is not None) == row.bypassed


@pytest.mark.parametrize(("more", "error", "message"), [
    ({"record_bytes": 1000}, ValueError, "record_bytes: direct reads need a multiple of 4096, got 1000"),
    ({"queue_depths": ()}, ValueError, "queue_depths"),
    ({"file_bytes": 2**60}, OSError, "twice that free"),
])
def test_disk_refusals(tmp_path, more, error, message):
    with pytest.raises(error, match=message):
        disk.measure(tmp_path, **(SMALL | more))


def test_a_file_smaller_than_a_record(tmp_path):
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="smaller than one record of 1,048,576 bytes"):
        disk.measure(tmp_path / "short", **SMALL)
    with pytest.raises(OSError, match="no_such"):
        disk.measure(tmp_path / "no_such", **SMALL)


# ---- caches and traces ----

def test_lru_by_hand():
    accesses = [1, 2, 1, 3, 2, 1]
    assert nvme.lru_hits(accesses, 2) == [False, False, True, False, False, False]
    assert nvme.lru_hits(accesses, 3) == [False, False, True, False, True, True]
    assert not any(nvme.lru_hits(accesses, 0))


def test_lfu_by_hand():
    accesses = [1, 1, 2, 3, 1, 3, 2]  # 3 pushes out 2, then stays: used as often, but later
    assert nvme.lfu_hits(accesses, 2) == [False, True, False, False, True, True, False]
    assert not any(nvme.lfu_hits(accesses, 0))


def test_caches_against_plain_simulations():
    """The same policies written as naively as can be."""
    rng = np.random.default_rng(5)
    accesses = (rng.zipf(1.3, 2000) % 50).tolist()
    for capacity in (1, 7, 20, 60):
        for policy, key in (("LRU", lambda r, used, last: last[r]), ("LFU", lambda r, used, last: (used[r], last[r]))):
            cached, used, last, want = set(), dict.fromkeys(accesses, 0), {}, []
            for now, record in enumerate(accesses):
                want.append(record in cached)
                if record not in cached and len(cached) == capacity:
                    cached.remove(min(cached, key=lambda r: key(r, used, last)))
                cached.add(record)
                used[record] += 1
                last[record] = now
            assert nvme.POLICIES[policy](accesses, capacity) == want


def test_a_cache_smaller_than_a_token_hits_nothing_under_lru():
    """Every token uses the same experts, so one record less than a token's is always the one needed next."""
    trace = nvme.Trace("cyclic", np.tile(np.arange(4), (10, 3, 1)))
    assert trace.per_token == trace.working_set == 12
    assert not any(nvme.lru_hits(trace.accesses, 11))
    assert nvme.hit_rates(nvme.lru_hits(trace.accesses, 12)) == (0.9, 1.0)


def test_the_shipped_trace():
    trace = nvme.read_trace()
    assert trace.experts.shape == (300, 26, 8)
    assert (trace.per_token, trace.working_set) == (208, 5083)
    assert trace.experts[0, 0].tolist() == [36, 38, 85, 103, 116, 133, 138, 255]
    assert all(len(set(layer)) == 8 for token in trace.experts.tolist() for layer in token)
    nvme.check_trace(trace, CONFIGS["kimi"])
    assert "sqliteai/waste" in trace.name
    with pytest.raises(ValueError, match="the model has 92 layers with experts, top 16 of 896"):
        nvme.check_trace(trace, CONFIGS["k3"])


def test_traces_from_files(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tok": 0, "layers": [[1, 2], [0, 3]]}\n{"layers": [[1, 2], [3, 4]]}\n')
    trace = nvme.read_trace(path)
    assert trace.experts.tolist() == [[[1, 2], [0, 3]], [[1, 2], [3, 4]]]
    assert trace.working_set == 5  # layers do not share records
    assert trace.name == str(path)


@pytest.mark.parametrize(("text", "message"), [
    ("", "no tokens"),
    ("[1, 2]\n", "line 1: expected"),
    ('{"layers": [[1, 2], [3]]}\n', "line 1: expected"),
    ('{"layers": [[1, -2]]}\n', "line 1: expected .* ids from 0"),
    ('{"layers": [[1, 2]]}\n{"layers": [[1]]}\n', r"line 2: .* as in line 1, got shape \[1, 1\]"),
    # numpy would take these for ids
    ('{"layers": [[1.5]]}\n', "line 1: .* ids from 0 to 4294967295, got 1.5"),
    ('{"layers": [["12"]]}\n', "line 1: .* got '12'"),
    ('{"layers": [[true]]}\n', "line 1: .* got True"),
    ('{"layers": [[4294967296]]}\n', "line 1: .* ids from 0 to 4294967295, got 4294967296"),  # another layer's 0
    ('{"layers": [[10000000000000000000000]]}\n', "line 1: .* got 10000000000000000000000"),
    (json.dumps({"layers": [["x" * 100_000] + [""] * 100_000]}), "line 1: .* got 'xxx"),  # 40 GB as an array of text
    ("[" * 100_000, "line 1: .* recursion"),
    ("\x1f\x8b\x08", "is not a whole gzip file: "),
])
def test_what_is_no_trace(tmp_path, text, message):
    (tmp_path / "trace").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as refusal:
        nvme.read_trace(tmp_path / "trace")
    assert str(refusal.value).startswith(str(tmp_path / "trace"))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:-6] + b"123456",
                                    lambda raw: raw[:12] + b"\xff\xff" + raw[14:], lambda raw: raw + b"x"])
def test_a_damaged_gzip_file(tmp_path, damage):
    """Cut short, with a wrong checksum, with bytes that mean nothing, with something behind it."""
    (tmp_path / "trace").write_bytes(damage(gzip.compress(b'{"layers": [[1, 2]]}\n' * 100)))
    with pytest.raises(ValueError, match="trace: is not a whole gzip file: "):
        nvme.read_trace(tmp_path / "trace")


def test_a_small_file_that_expands_to_much(tmp_path, monkeypatch):
    """It is not expanded further than needed to see that."""
    monkeypatch.setattr(nvme, "MOST_TRACE_BYTES", 1 << 20)
    (tmp_path / "trace").write_bytes(gzip.compress(b"\n" * (1 << 26)))
    tracemalloc.start()
    with pytest.raises(ValueError, match="trace: has more than 1,048,576 bytes, expanded"):
        nvme.read_trace(tmp_path / "trace")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_synthetic_trace_says_so():
    trace = nvme.synthetic_trace(CONFIGS["k3"], tokens=5)
    assert trace.experts.shape == (5, 92, 16)
    assert trace.name.startswith("SYNTHETIC")
    assert all(len(set(layer)) == 16 for token in trace.experts.tolist() for layer in token)
    nvme.check_trace(trace, CONFIGS["k3"])


# ---- the model ----

def test_the_token_of_k3():
    model = ceiling.planned(CONFIGS["k3"], "vq3r", 4096)
    assert disk.eligible(nvme.record_bytes(model))
    fast = replace(MACHINE, disk_bytes_per_s=12.78e9, memory_bytes_per_s=1e15, mac_per_s=1e18, kda_s=0.0)
    got = nvme.ceiling(model, fast, None, [])
    assert got.to_dict()["record_bytes"] == 12_406_784
    assert got.to_dict()["bytes_per_token"] == 18_262_786_048
    row = got.rows[0]
    assert (row.bytes_read, row.bound_by, row.records) == (18_262_786_048, "disk", 0)
    assert round(row.disk_alone, 4) == round(row.overlapped, 4) == 0.6998


def test_the_parts_of_a_token():
    model = kda.plan(CONFIGS["kimi"], weight_format="q4g")
    got = nvme.ceiling(model, MACHINE, nvme.read_trace(), [0, 2 * 2**30, 24 * 2**30])
    memory = (model.weight_bytes_per_token + model.mla_cache_bytes) / 20e9
    assert got.compute_s == pytest.approx(memory + 0.005)
    assert got.compute_bound_by == "memory"
    assert got.working_set_bytes == 5083 * model.expert_record_bytes
    none, some, all_ = got.rows[:3]
    size = model.expert_read_bytes_per_token
    assert (none.hit_rate, none.bytes_read) == (0.0, size)
    assert none.disk_alone == pytest.approx(1e9 / size)
    assert none.serial == pytest.approx(1 / (size / 1e9 + got.compute_s))
    assert none.overlapped == pytest.approx(1e9 / size)
    assert none.kda_share_overlapped == pytest.approx(0.005 * 1e9 / size)
    assert some.records == 2 * 2**30 // model.expert_record_bytes
    assert some.bytes_read == pytest.approx(size * (1 - some.hit_rate))
    assert 0.3 < some.hit_rate < all_.hit_rate < 1
    assert (all_.bound_by, all_.overlapped) == ("memory", pytest.approx(1 / got.compute_s))
    # of 62,400 accesses 5,083 are the first of their record: no cache hits those
    assert all_.hit_rate_cold == 1 - 5083 / 62_400


def test_multiply_adds_can_bind():
    model = kda.plan(CONFIGS["kimi"], weight_format="q4g")
    slow = replace(MACHINE, mac_per_s=1e9, disk_bytes_per_s=1e11)
    row = nvme.ceiling(model, slow, None, []).rows[0]
    assert row.bound_by == "multiply-adds"
    work = (model.weight_mac_per_token + model.attention_mac_per_token) / 1e9
    assert row.overlapped == pytest.approx(1 / (work + 0.005))


def test_cache_sizes():
    model = kda.plan(CONFIGS["kimi"], weight_format="q4g")
    record = model.expert_record_bytes
    assert nvme.cache_sizes(model, [2**30]) == sorted(
        [*(n * record for n in (0, 104, 208, 416, 832, 1664, 3328, 6656)), 2**30])


def test_models_without_experts(monkeypatch):
    dense = KDAConfig.from_hf(changed(KIMI, num_experts=None))
    with pytest.raises(ValueError, match="no routed experts"):
        nvme.record_bytes(kda.plan(dense))
    with pytest.raises(ValueError, match="moe_intermediate_size"):
        nvme.record_bytes(kda.plan(KDAConfig.from_hf(changed(KIMI, moe_intermediate_size=None))))


def test_the_measured_machine_scales_the_layers_it_could_hold(monkeypatch, small_machine):
    one_layer = replace(kda.perf.counts.KIMI_LINEAR_LAYER)
    monkeypatch.setattr(bench, "available_bytes", lambda: 8 * one_layer.state_bytes)  # two layers at a quarter
    layers = []
    monkeypatch.setattr(nvme, "Decode", lambda shape, isa, left: layers.append(shape.layers) or FakeDecode(shape))
    machine = nvme.measure_machine(kda.plan(CONFIGS["kimi"]), 2e9, "2 GB/s", seconds=0.0)
    assert layers == [2]
    assert machine.kda_s == pytest.approx(20 * 1e-3)
    assert (machine.disk_bytes_per_s, machine.disk) == (2e9, "2 GB/s")
    assert machine.memory_bytes_per_s > 1e8
    assert machine.mac_per_s > 1e8


class FakeDecode:
    """Takes 1 ms per layer."""

    def __init__(self, shape):
        self.shape = shape

    def run(self):
        pass

    def ns(self, times):
        return 1_000_000 * times * self.shape.layers


# ---- the command ----

def command(*arguments):
    return main(["ceiling", "--seconds", "0.02", "--file-gib", "0.01", *arguments])


def test_kda_ceiling(small_machine, capsys):
    assert command() == 0
    text = capsys.readouterr().out
    assert "DRAM in-place" in text
    assert "queue depth" not in text
    assert command("-o", "json", "--isa", "scalar") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["isa"] == "scalar"
    assert result["disk"] == []
    assert result["model"] is None


@pytest.mark.parametrize(("taken", "said"), [(1.5, True), (0.1, False), (None, False)])
def test_a_busy_machine_is_said(small_machine, capsys, monkeypatch, taken, said):
    monkeypatch.setattr(ceiling, "watch_others", lambda: lambda: taken)
    assert command() == 0
    assert ("Other processes took 1.5 of" in " ".join(capsys.readouterr().out.split())) == said


def test_kda_ceiling_of_a_model(small_machine, tmp_path, capsys):
    arguments = ["--config", "kimi_linear_48b", "--disk", str(tmp_path), "--quant", "q4g", "--cache-gib", "3"]
    assert command(*arguments, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["record_bytes"] for row in result["disk"]} == {3_653_632}
    model = result["model"]
    assert model["bytes_per_token"] == 26 * 8 * 3_653_632
    assert model["trace"]["working_set"] == 5083
    assert 3 * 2**30 in {row["cache_bytes"] for row in model["rows"]}
    best = max(row["GB_per_s"] for row in result["disk"] if row["pattern"] == "random")
    assert model["machine"]["disk_bytes_per_s"] == pytest.approx(best * 1e9)
    assert command(*arguments) == 0
    text = capsys.readouterr().out
    assert "KDA costs " in text
    assert "its working set is 5,083 records" in " ".join(text.split())
    assert text.count("LRU 3.00 GiB  ") == 1  # the bar
    assert command(*arguments, "-o", "md") == 0
    md = capsys.readouterr().out
    assert "| LRU | 3.00 GiB | 881 |" in md


def test_kda_ceiling_of_a_disk_that_is_not_here(small_machine, capsys):
    assert command("--config", "kimi_k3", "--quant", "vq3r", "--bandwidth", "12.78GB/s", "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [round(row["disk_alone"], 4) for row in result["model"]["rows"]] == [0.6998, 0.6998]
    assert any("No routing trace of this model is shipped" in remark for remark in result["remarks"])


@pytest.mark.parametrize(("arguments", "message"), [
    (["--config", "kimi_k3"], "--config needs the disk"),
    (["--config", "kimi_k3", "--bandwidth", "12"], "bandwidth: expected a number with its unit"),
    (["--config", "no/such.json", "--bandwidth", "1GB/s"], "no/such.json"),
    (["--config", "kimi_linear_48b", "--bandwidth", "1GB/s", "--trace", "/no/such"], "/no/such"),
    (["--disk", "/no/such"], "/no/such"),
    (["--plot", "x.html"], "--plot: needs --config"),
])
def test_kda_ceiling_refuses_with_status_2(small_machine, capsys, arguments, message):
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_plot(small_machine, tmp_path, capsys):
    pytest.importorskip("plotly")
    page = tmp_path / "ceiling.html"
    assert command("--config", "kimi_linear_48b", "--bandwidth", "3GB/s", "--plot", str(page)) == 0
    assert "LFU, overlapped" in page.read_text()


def test_the_plot_without_plotly(small_machine, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    assert command("--config", "kimi_linear_48b", "--bandwidth", "3GB/s", "--plot", str(tmp_path / "x.html")) == 2
    assert "pip install 'kda-kernels[dashboard]'" in capsys.readouterr().err
