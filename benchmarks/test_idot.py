"""Products with quantised weights (IDOT) beside this machine's limits and ONNX Runtime's MatMulNBits.

4096 x 4096, groups of 128; for few tokens the calls of both go over several matrices, which the caches do not hold
together.
"""

import statistics
import time
from functools import lru_cache

import numpy as np
import pytest
from common import BETWEEN, ISAS, counted, in_turn, median_ratio, own_ns, record, relate, rounds_of, stats, timed
from ort import MatMulNBits

from kda import QuantizedMatrix
from kda.perf.ceilings import idot_rate, idot_rounds
from kda.perf.work import Product

N = K = 4096
VNNI = "avx512vnni" in ISAS


@lru_cache(maxsize=1)
def rival_of(bits, copies, team):
    """ONNX Runtime's operator, its own quantisation of the weights that Product(N, K, bits, ...) has."""
    return MatMulNBits(Product(N, K, bits, 512).matrices[0].dequantize(), bits, copies, team)


def described(benchmark, work, isa, team, calls=1):
    """The counted part of extra_info, of one round."""
    counted(benchmark, isa, team, calls * work.tokens,
            {"N": work.N, "K": work.K, "bits": work.bits, "group": work.group},
            calls * work.N * work.K * work.tokens, calls * work.nbytes, len(work.matrices) * work.nbytes)
    benchmark.extra_info["kind"] = "idot"


@pytest.mark.parametrize("T", [1, 2, 4, 8, 16, 512])
@pytest.mark.parametrize("bits", [8, 4])
def test_onnxruntime(benchmark, bits, T, team, target, summary):
    ours = Product(N, K, bits, T)
    copies = len(ours.matrices)
    rival, read, rounds = rival_of(bits, copies, team), ours.reader(), idot_rounds(ns=5_000_000)
    rival.take(ours.x)
    ours.run()
    rival.step()
    # Both quantise the weights alike, but activations by groups of their own; not the 4-bit weights' error of 10 %.
    error = np.sqrt(np.mean((ours.result - rival.y) ** 2) / np.mean(ours.result**2))
    assert error <= 0.02, error
    rival_ns, read_ns, peak = [], [], []

    def setup():
        rival_ns.append(timed(rival.step, 1) / copies / T)
        time.sleep(BETWEEN)
        idot_rate(rounds)  # wakes the threads
        peak.append(idot_rate(rounds))
        read_ns.append(sum(read() for _ in range(copies)) / copies / T)
        ours.run()

    benchmark.pedantic(lambda: ours.ns(copies), setup=setup, rounds=rounds_of(15 if T <= 16 else 5))
    described(benchmark, ours, ISAS[0], team, copies)
    if stats(benchmark) is None:
        return
    token_ns = [ns / copies / T for ns in own_ns(benchmark)]
    ratio = record(benchmark, summary, rival.NAME, f"IDOT, {ours.name}", team, rival_ns, token_ns)
    read_share = median_ratio(read_ns, token_ns)
    int8_share = statistics.median(N * K / f / t for f, t in zip(peak[-len(token_ns):], token_ns, strict=True))
    benchmark.extra_info.update(share_of_read=read_share, share_of_int8=int8_share,
                                GB_per_s=ours.nbytes / T / statistics.median(token_ns))
    summary(f"    {read_share:.0%} of reading the weights, {int8_share:.0%} of the int8 peak")
    one = team == 1
    if VNNI:
        if T == 1:
            target("share of reading", read_share, least=0.95 if one else 0.90)
            target("ONNX Runtime's time over ours", ratio, least=(1.25 if bits == 8 else 1.5) if one else 1)
        elif T == 512 and one:
            target("share of the int8 peak", int8_share, least=0.80)
            target("ONNX Runtime's time over ours", ratio, least=1.5 if bits == 8 else 1.8)
    elif ISAS[0] == "avx2" and T in (1, 512):
        target("ONNX Runtime's time over ours", ratio, least=1)


@pytest.mark.skipif("avx2" not in ISAS, reason="an x86 ISA")
@pytest.mark.parametrize("bits", [8, 4])
def test_avx2_streams_the_weights(benchmark, bits, team, target, summary):
    """Within 1.3 times avx512vnni from memory; without that ISA, of what it must reach: 0.95 / 1.3 of reading."""
    ours = Product(N, K, bits, 1, "avx2")
    times = len(ours.matrices)
    other = Product(N, K, bits, 1, "avx512vnni") if VNNI else None
    read = ours.reader()
    ours.run()
    ratio = in_turn(benchmark, lambda: ours.ns(times),
                    lambda: other.ns(times) if other else sum(read() for _ in range(times)), rounds=20,
                    to="avx512vnni" if other else "read")
    described(benchmark, ours, "avx2", team, times)
    if other:
        other.run()
        assert np.array_equal(ours.result, other.result)
    assert np.isfinite(ours.result).all()
    if ratio:
        benchmark.extra_info["share_of_avx512vnni" if other else "share_of_read"] = ratio
        summary(f"IDOT, {ours.name}, avx2, {team} thread(s): "
                f"{ratio:.0%} of {'avx512vnni' if other else 'reading the weights'}")
        reading = 0.95 if team == 1 else 0.90
        target("share of avx512vnni or of reading", ratio, least=(1 if other else reading) / 1.3)


@pytest.mark.parametrize("T", [2, 4, 8, 16])
@pytest.mark.parametrize("bits", [8, 4])
def test_few_tokens_read_the_weights_once(benchmark, bits, T, team, target, summary):
    """The time of a call grows less than linearly from that of one token."""
    few, one = Product(N, K, bits, T), Product(N, K, bits, 1)
    one.x[:] = few.x[-1:]
    few.run()
    one.run()
    assert np.array_equal(few.result[-1:], one.result)
    times = len(few.matrices)
    ratio = in_turn(benchmark, lambda: few.ns(times), lambda: one.ns(times), rounds=10, to="one token")
    described(benchmark, few, ISAS[0], team, times)
    if ratio:
        benchmark.extra_info["time_over_one_token"] = 1 / ratio
        summary(f"IDOT, {few.name}, {team} thread(s): {1 / ratio:.2f} x the call of one token")
        target("time over that of one token", 1 / ratio, most=T)


@pytest.mark.parametrize("bits", [8, 4])
def test_small_groups(benchmark, bits, team, target, summary):
    """Groups of 32, 512 tokens, against the int8 peak."""
    ours = Product(N, K, bits, 512, group=32)
    peak, rounds = [], idot_rounds(ns=5_000_000)
    ours.run()
    assert np.isfinite(ours.result).all()
    benchmark.pedantic(ours.run, setup=lambda: peak.append(idot_rate(rounds)), rounds=5)
    described(benchmark, ours, ISAS[0], team)
    if stats(benchmark) is None:
        return
    ns = own_ns(benchmark)
    share = relate(benchmark, "int8", [N * K * 512 / f for f in peak], ns)
    benchmark.extra_info["share_of_int8"] = share
    summary(f"IDOT, {ours.name}, {team} thread(s): {share:.0%} of the int8 peak")
    if VNNI and team == 1:
        target("share of the int8 peak", share, least=0.65)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_a_gibibyte(benchmark, bits, team, target):
    """1 GiB of float32 weights to codes, scales and the packed form."""
    w = np.resize(np.random.default_rng(0).standard_normal((1024, 16384), dtype=np.float32), (16384, 16384))
    matrix = benchmark.pedantic(QuantizedMatrix.quantize, (w, bits), rounds=2)
    assert abs(matrix.dequantize()[-1] - w[-1]).max() <= matrix.scales[-1].max() / 2
    counted(benchmark, ISAS[0], team, 1, {"N": 16384, "K": 16384, "bits": bits}, 0, w.nbytes, w.nbytes)
    if stats(benchmark) is not None and team == 2:
        target("seconds for 1 GiB", benchmark.stats.stats.median, most=3.0)
