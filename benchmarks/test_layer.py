"""The whole KDA layer at Kimi-Linear's size: beside reading its bytes, beside its own projections, beside itself."""

import statistics
from functools import lru_cache

import numpy as np
import pytest
from common import ISAS, counted, in_turn, own_ns, relate, rounds_of, stats

from kda import KDAConfig
from kda.ops import aligned_empty
from kda.perf.ceilings import fma_rate, fma_rounds, idot_rate, idot_rounds, read_ns
from kda.perf.counts import KIMI_LINEAR_CONFIG
from kda.perf.work import WholeLayer, nanoseconds

SMALL = KDAConfig("kimi_linear", 64, 1, (0,), 2, 2, 16, 16, 4)
FORMATS = ["q8g", "q4g"]


@lru_cache(maxsize=2)
def twenty(weight_format, rollback_window=0):
    """One token through 20 layers, whose weights no cache holds."""
    return WholeLayer(KIMI_LINEAR_CONFIG, weight_format, layers=20, rollback_window=rollback_window)


def described(benchmark, work, team, runs=1):
    """The counted part of extra_info, of `runs` runs."""
    c = work.config
    counted(benchmark, ISAS[0], team, work.tokens * runs,
            {"layers": len(work.layers), "hidden": c.hidden_size, "HV": c.num_v_heads, "K": c.head_dim,
             "weights": work.weight_format}, work.mac * runs, work.nbytes * runs, work.nbytes)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_decode(benchmark, weight_format, team, target, summary):
    """20 layers, each from memory, in turn with reading as many bytes as weights and states have."""
    work = twenty(weight_format)
    memory = aligned_empty((work.nbytes // 4,))
    memory[:] = 1
    work.run()
    assert np.isfinite(work.result).all()
    ratio = in_turn(benchmark, work.run, lambda: read_ns(memory), rounds=15, to="read")
    described(benchmark, work, team)
    if ratio:
        summary(f"{work.name}, {team} thread(s): {1 / ratio:.2f} x reading weights and states once, "
                f"{statistics.median(own_ns(benchmark)) / 20e3:,.0f} us a layer")
        target("time over reading the bytes", 1 / ratio, most=1.15)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_no_projection(benchmark, weight_format, team, target, summary):
    """Convolutions, gates, norm, recurrence and Python, as a share of the layer's time."""
    work = twenty(weight_format)
    work.run()
    ratio = in_turn(benchmark, work.run, lambda: nanoseconds(work.projections, 1), rounds=15, to="projections")
    described(benchmark, work, team)
    if ratio:
        summary(f"{work.name}, {team} thread(s): {1 - ratio:.0%} of the time is not projections")
        if weight_format == "q8g":
            target("share that is no projection", 1 - ratio, most=0.15)


def test_python(benchmark, target):
    """A layer so small that little but the call is left: hidden 64, two heads of 16."""
    work = WholeLayer(SMALL, "q8g")
    benchmark(work.run)
    described(benchmark, work, 1)
    if stats(benchmark) is not None:
        target("microseconds per call", benchmark.stats.stats.median * 1e6, most=15.0)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_rollback_window_costs_little(benchmark, weight_format, team, target, summary):
    """Decode with a window of 8, in turn with decode without."""
    work, plain = twenty(weight_format, 8), twenty(weight_format)
    work.run()
    ratio = in_turn(benchmark, lambda: nanoseconds(work.run, 4), lambda: nanoseconds(plain.run, 4), rounds=10,
                    to="no window")
    described(benchmark, work, team, runs=4)
    if ratio:
        summary(f"{work.name}, {team} thread(s): a rollback window of 8 costs {1 / ratio - 1:+.1%}")
        target("time over that without a window", 1 / ratio, most=1.03)


@pytest.mark.parametrize("weight_format", ["q8g", "f32"])
def test_prefill(benchmark, weight_format, team, target, summary):
    """1,024 tokens of one layer against the time that the peaks alone would take."""
    work = WholeLayer(KIMI_LINEAR_CONFIG, weight_format, T=1024)
    idot, fma, ideal = idot_rounds(), fma_rounds(), []

    def setup():
        lanes = fma_rate(fma)
        ideal.append(work.ideal_ns(idot_rate(idot) if weight_format == "q8g" else lanes, lanes))

    work.run()
    assert np.isfinite(work.result).all()
    benchmark.pedantic(work.run, setup=setup, rounds=rounds_of(7))
    described(benchmark, work, team)
    if stats(benchmark) is not None:
        share = relate(benchmark, "peaks", ideal, own_ns(benchmark))
        summary(f"{work.name}, {team} thread(s): {share:.0%} of the peaks, "
                f"{statistics.median(own_ns(benchmark)) / 1e6:,.0f} ms")
        if weight_format == "q8g":
            target("share of the peaks", share, least=0.65)


def test_eight_sessions(benchmark, team, target, summary):
    """Eight sessions in one call against one: time per token."""
    one, eight = twenty("q8g"), WholeLayer(KIMI_LINEAR_CONFIG, "q8g", layers=20, batch=8)
    eight.run()
    one.run()
    ratio = in_turn(benchmark, eight.run, lambda: nanoseconds(one.run, 1), rounds=10, to="one session")
    described(benchmark, eight, team)
    if ratio:
        summary(f"{eight.name}, {team} thread(s): a token costs {1 / ratio / 8:.2f} of one session's")
        target("time per token over one session's", 1 / ratio / 8, most=1.0)
