"""What every benchmark shares: ISAs, threads, ceilings taken in turn with the thing measured, and a summary.

    pytest benchmarks                          everything, some three minutes
    pytest benchmarks --benchmark-disable      each once, with its checks of the results: some 40 seconds
    pytest benchmarks --targets                and fail where a speed target is missed

Each round of a benchmark first runs what it is compared with (the ceilings, or a rival), then the function
measured: the ratios in extra_info are medians over such neighbours.
"""

import pytest
from common import ISAS, THREADS

from kda.perf import bench
from kda.perf.ceilings import threads


def pytest_addoption(parser):
    parser.addoption("--targets", action="store_true", help="fail where a speed target of the kernels is missed")


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


def pytest_benchmark_generate_machine_info():
    """What --benchmark-json says of the machine: as in `kda bench -o json`, without the host's name."""
    return bench.machine(None)


def pytest_benchmark_generate_commit_info():
    return {}
