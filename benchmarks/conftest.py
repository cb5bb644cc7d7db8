"""What every benchmark shares: ISAs, threads, ceilings taken in turn with the thing measured, and a summary.

    pytest benchmarks                          everything, some three minutes
    pytest benchmarks --quick                  the best ISA, fewer rounds and sizes: under two minutes
    pytest benchmarks --benchmark-disable      each once, with its checks of the results: some 40 seconds
    pytest benchmarks --targets                and fail where a speed target is missed
    pytest benchmarks --codspeed               by pytest-codspeed instead of pytest-benchmark

Each round of a benchmark first runs what it is compared with (the ceilings, or a rival), then the function
measured: the ratios in extra_info are medians over such neighbours.
"""

import pytest
from common import ISAS, QUICK, THREADS, disabled, stats

from kda.perf import bench
from kda.perf.ceilings import threads
from kda.perf.noise import watch_others

# What extra_info has for every benchmark, beside what it measured; the counts are those of one round.
COUNTED = {"isa", "threads", "tokens", "shape", "mac", "flop", "bytes", "MFLOP_per_token", "cold"}


# What --quick leaves out: these on several threads, and these at all.
ALONE = {"test_epilogue", "test_idot", "test_layer", "test_rivals"}
LONG = {"test_a_rollback_window_costs_little", "test_eight_sequences", "test_eight_sessions",
        "test_quantising_a_gibibyte", "test_small_groups", "test_what_is_no_projection"}


def pytest_addoption(parser):
    parser.addoption("--targets", action="store_true", help="fail where a speed target of the kernels is missed")
    parser.addoption("--quick", action="store_true", help="the best ISA, fewer rounds and sizes: under two minutes")


def pytest_collection_modifyitems(config, items):
    """--quick leaves out the other ISAs, sizes between the others, rivals on several threads, and what is LONG."""
    if not config.getoption("--quick"):
        return
    QUICK.append(True)

    def kept(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return (params.get("isa", ISAS[0]) == ISAS[0] and "other" not in params and params.get("T") not in (2, 4, 8)
                and not (params.get("team", 1) > 1 and item.path.stem in ALONE) and item.originalname not in LONG)

    config.hook.pytest_deselected(items=[item for item in items if not kept(item)])
    items[:] = [item for item in items if kept(item)]


@pytest.fixture(params=ISAS)
def isa(request):
    """Every ISA that runs here."""
    return request.param


@pytest.fixture(params=THREADS, ids=lambda n: f"{n}_threads")
def team(request):
    """1 thread and all of them."""
    with threads(request.param) as n:
        yield n


@pytest.fixture
def target(request):
    """target(what, value, most=... or least=...): with --targets, a failure where value is beyond that."""
    def check(what, value, most=float("inf"), least=0.0):
        if request.config.getoption("--targets"):
            assert least <= value <= most, f"{what}: {value:.3g}, target {least:.3g} to {most:.3g}"
    return check


@pytest.fixture(autouse=True)
def _extra_info(benchmark):
    """Every benchmark says what it counted, how fast it was beside what, and what others took of the CPUs meanwhile."""
    taken = watch_others()
    yield
    info = benchmark.extra_info
    info["cpus_taken"] = taken()
    assert set(info) >= COUNTED, f"extra_info lacks {COUNTED - set(info)}"
    assert info["flop"] == 2 * info["mac"]
    if stats(benchmark) is not None and not disabled(benchmark):
        ns = 1e9 * benchmark.stats.stats.median
        info.update({"GB_per_s": info["bytes"] / ns, "GFLOP_per_s": info["flop"] / ns})


LINES = []


@pytest.fixture
def summary():
    """summary(line): a line to print after the run."""
    return LINES.append


def pytest_terminal_summary(terminalreporter):
    if LINES:
        terminalreporter.section("ratios, medians of neighbouring rounds")
        for line in LINES:
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info():
    """What --benchmark-json says of the machine: as in `kda bench -o json`, without the host's name."""
    return bench.machine(None)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_commit_info():
    return {}
