"""The ceilings themselves: memory, caches, multiply-adds, and the disk that holds the temporary folder.

What `kda ceiling` measures, as benchmarks: a history of them tells a change of the machine from one of the code.
"""

import pytest
from common import ISAS, LAST_CACHE, counted, rounds_of, stats

from kda import _core
from kda.ops import aligned_empty
from kda.perf import disk, limits
from kda.perf.ceilings import inplace_ns, read_ns
from kda.runtime import isa_index

MEMORY = ["DRAM read", "DRAM in-place", "L3 read", "L2 read"]


@pytest.mark.parametrize("name", MEMORY)
def test_memory(benchmark, name, team, summary):
    nbytes = limits.buffer_bytes(team).get(name)
    if nbytes is None:
        pytest.skip(f"this machine has no {name} of its own on {team} threads")
    ones = aligned_empty((nbytes // 4,))
    ones[:] = 1
    ns, moved, mac = (inplace_ns, 2 * nbytes, nbytes // 4) if name == "DRAM in-place" else (read_ns, nbytes, 0)
    passes = 1 if nbytes > LAST_CACHE else max(2, limits.PROBE_NS // max(1, ns(ones)))
    benchmark.pedantic(lambda: ns(ones, passes=passes), rounds=rounds_of(20))
    counted(benchmark, ISAS[0], team, passes, {"floats": ones.size}, mac * passes, moved * passes, nbytes)
    benchmark.extra_info.update(kind="limit", row=name)
    assert benchmark.extra_info["cold"] == name.startswith("DRAM")
    if stats(benchmark):
        summary(f"{name}, {team} thread(s): {moved * passes / 1e9 / benchmark.stats.stats.median:.1f} GB/s")


@pytest.mark.parametrize(("name", "probe"), [
    ("float32 FMA", _core.probe_fma), ("int8 dot", _core.probe_idot)], ids=["fma", "int8"])
def test_multiply_adds(benchmark, name, probe, isa, team, summary):
    row, rounds = isa_index(isa), 400_000
    mac = probe(row, rounds)
    benchmark.pedantic(lambda: probe(row, rounds), rounds=rounds_of(20))
    counted(benchmark, isa, team, 1, {"rounds": rounds}, mac, 0, 0)
    benchmark.extra_info.update(kind="limit", row=name)
    assert mac >= rounds * team
    if stats(benchmark):
        summary(f"{name}, {isa}, {team} thread(s): {mac / 1e9 / benchmark.stats.stats.median:.1f} GMAC/s")


@pytest.mark.parametrize("pattern", ["sequential", "random"])
@pytest.mark.parametrize("depth", [1, 4])
def test_disk(benchmark, pattern, depth, tmp_path, summary):
    """Records of K3's experts from the temporary folder, past the page cache where that is no memory."""
    record, count = 12_406_784, 8
    path = tmp_path / "records"
    disk.write_file(path, count * record)
    offsets = [record * i for i in ([3, 0, 6, 2, 7, 5, 1, 4] if pattern == "random" else range(count))]
    with disk.opened(path) as (descriptor, why):
        benchmark.pedantic(lambda: disk.read_records(descriptor, record, offsets, depth, 60.0, most=count), rounds=5)
    cached = disk.cached_share(path)
    bypassed = not why and not cached
    assert bypassed == (disk.O_DIRECT != 0 and disk.file_system(path) not in disk.MEMORY)
    counted(benchmark, ISAS[0], depth, count, {"record": record, "queue_depth": depth}, 0, count * record,
            count * record)
    benchmark.extra_info.update(kind="limit", row=f"disk, {pattern}", bypassed=bypassed)
    if stats(benchmark):
        speed = count * record / 1e9 / benchmark.stats.stats.median
        summary(f"disk, {pattern}, queue depth {depth}: {speed:.2f} GB/s, page cache "
                + ("bypassed" if bypassed else f"NOT BYPASSED: {why or 'it holds the file'}"))
