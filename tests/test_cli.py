"""The kda command: what it prints, its exit status, and the numbers it counts with."""

import io
import json

import numpy as np
import pytest
from helpers import python

import kda
from kda import _core, check, ops
from kda.cli import main
from kda.perf import bench, ceilings, counts, work

HERE = [name for name, runs_here in kda.isas().items() if runs_here]
THREADED = _core.threading() != "serial"


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = kda.get_num_threads()
    yield
    kda.set_num_threads(before)


# ---- counts ----

def test_counts_of_one_kimi_linear_layer():
    shape = counts.KIMI_LINEAR_LAYER
    assert (shape.H, shape.HV, shape.K, shape.V, shape.layers) == (32, 32, 128, 128, 1)
    assert shape.mac == 1_572_864
    assert shape.flop == 3_145_728
    assert shape.flop_with_decay == 3_670_016
    assert shape.state_bytes == 2_097_152
    assert shape.traffic_bytes == 4_194_304
    assert shape.lane_ops == 2_097_152


def test_counts_of_all_layers():
    assert (counts.KIMI_LINEAR.layers, counts.KIMI_LINEAR.state_bytes) == (20, 41_943_040)
    assert (counts.K3.layers, counts.K3.H, counts.K3.state_bytes) == (69, 96, 434_110_464)
    assert counts.K3_LAYER.mac == 4_718_592


def test_counts_with_uneven_heads_and_sizes():
    shape = counts.Shape("x", H=2, HV=6, K=3, V=5, layers=2)
    assert (shape.elements, shape.mac, shape.flop, shape.flop_with_decay) == (180, 540, 1080, 1260)


@pytest.mark.parametrize(("name", "layers", "full"), [
    ("kimi_linear_48b", 27, [4, 8, 12, 16, 20, 24, 27]),
    ("kimi_k3", 93, [*range(4, 93, 4), 93]),
])
def test_layer_lists_count_from_one_and_cover_the_model(name, layers, full):
    config = counts.model_config(name)
    kda_layers, full_layers = (config["linear_attn_config"][key] for key in ("kda_layers", "full_attn_layers"))
    assert full_layers == full
    assert sorted(kda_layers + full_layers) == list(range(1, layers + 1))
    assert config["num_hidden_layers"] == layers


def test_the_two_models_differ_in_their_gates():
    k3, linear = (counts.model_config(name)["linear_attn_config"] for name in ("kimi_k3", "kimi_linear_48b"))
    assert (k3["gate_lower_bound"], k3["use_full_rank_gate"]) == (-5.0, True)
    assert "gate_lower_bound" not in linear
    assert "use_full_rank_gate" not in linear


# ---- info ----

def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert kda.__version__ in out
    assert all(name in out for name in kda.isas())


def test_info_json(capsys):
    assert main(["info", "-o", "json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == kda.__version__
    assert info["isa"] in HERE
    assert info["threads"] == kda.get_num_threads()
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert "-O2 " in info["flags"]
    assert "-ffp-contract=off" in info["flags"]
    for name, state in info["isas"].items():
        assert (state == "runs here") == (name in HERE)


# ---- check ----

def test_check_passes_and_covers_every_isa(capsys):
    assert main(["check"]) == 0
    out, err = capsys.readouterr()
    header = out.splitlines()[0]
    assert all(f"{isa}: o, S" in header for isa in HERE)
    assert "0 failed" in out
    assert "FAILED" not in out
    assert err == ""  # no progress bar where stderr is not a terminal
    for case in ("softplus gate", "bounded gate", "GVA", "K 60, V 100", "varlen", "float16", "bfloat16", "-inf",
                 "bfloat16, in blocks", "in blocks of bf16", "short convolution", "gated norm, sigmoid",
                 "IDOT, 8 bits, groups of 128, 1 token", "IDOT, 4 bits, groups of 32, 13 tokens: same bits as scalar",
                 *check.GOLDEN):
        assert case in out


def spoiled(change, name="fused_recurrent_kda"):
    """A function of kda with its (o, S) changed."""
    right = getattr(ops, name)

    def op(*args, **kwargs):
        o, S = right(*args, **kwargs)
        return change(o, S)
    return op


@pytest.mark.parametrize("change", [
    pytest.param(lambda o, S: (o * np.float32(1.00001), S), id="o"),
    pytest.param(lambda o, S: (o, S * np.float32(1.00001)), id="S"),
    pytest.param(lambda o, S: (np.where(np.arange(o.size).reshape(o.shape) == 5, np.nan, o), S), id="a NaN in o"),
    pytest.param(lambda o, S: (o, np.full_like(S, np.nan)), id="NaN in S"),
    pytest.param(lambda o, S: (o[..., :1], S), id="shape"),
    pytest.param(lambda o, S: (o, None), id="no state"),
])
def test_check_fails_when_a_result_is_wrong(monkeypatch, capsys, change):
    monkeypatch.setattr(ops, "fused_recurrent_kda", spoiled(change))
    assert main(["check", "--isa", "scalar"]) == 1
    assert "FAILED on scalar" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "case"), [
    ("chunk_kda", "softplus gate, in blocks"),
    ("causal_conv1d", "short convolution, packed"),
    ("causal_conv1d_update", "short convolution, one token"),
    ("rms_norm_gated", "gated norm, silu"),
])
def test_check_covers_every_function(monkeypatch, name, case):
    right = getattr(ops, name)

    def wrong(*args, **kwargs):
        got = right(*args, **kwargs)
        return (np.float32(1.0001) * got[0], *got[1:]) if isinstance(got, tuple) else np.float32(1.0001) * got

    monkeypatch.setattr(ops, name, wrong)
    results, _ = check.run(["scalar"])
    failed = {r.case for r in results if not r.passed}
    assert case in failed
    assert len(failed) < len(results)


def test_check_covers_products(monkeypatch):
    """A wrong product is off from the definition on every ISA; one that differs in the last bit only from scalar."""
    right = kda.QuantizedMatrix.matmul
    monkeypatch.setattr(kda.QuantizedMatrix, "matmul", lambda self, x: np.float32(1.0001) * right(self, x))
    failed = {r.case for r in check.run(["scalar"])[0] if not r.passed}
    assert len(failed) == 8
    assert all(name.startswith("IDOT") and "same bits" not in name for name in failed)

    def other(self, x):
        return right(self, x) if self.isa == "scalar" else np.nextafter(right(self, x), np.float32(9))

    monkeypatch.setattr(kda.QuantizedMatrix, "matmul", other)
    for isa in HERE:
        failed = {r.case for r in check.run([isa])[0] if not r.passed}
        assert len(failed) == (0 if isa == "scalar" else 8)
        assert all(name.startswith("IDOT") and name.endswith("same bits as scalar") for name in failed)


@pytest.mark.skipif(not THREADED, reason="built without threads: there is nothing to compare")
def test_check_fails_when_threads_change_a_bit(monkeypatch):
    def change(o, S):
        return (np.nextafter(o, np.float32(9)) if kda.get_num_threads() == 1 else o), S

    with ceilings.threads(2):  # on one CPU as well
        monkeypatch.setattr(ops, "chunk_kda", spoiled(change, "chunk_kda"))
        results, _ = check.run(["scalar"])
    assert [r.case for r in results if not r.passed] == [
        f"64 tokens, 4 heads of 128 x 128, in blocks{of}: 1 thread = 2 threads" for of in ("", " of bf16")]


def test_check_of_one_isa_leaves_the_others_out(capsys):
    assert main(["check", "--isa", "scalar", "--threads", "1"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert "scalar" in header
    assert not [name for name in HERE if name != "scalar" and name in header]


def test_relative_error():
    want = np.array([1.0, -4.0])
    assert check.error(np.array([1.0, -4.0]), want) == 0.0
    assert check.error(np.array([1.0, -3.0]), want) == 0.25
    assert np.isnan(check.error(np.array([1.0, np.nan]), want))
    assert check.error(np.array([1.0]), want) == np.inf


# ---- bench ----

SMALL = [counts.Shape("small", 2, 2, 16, 24), counts.Shape("small", 2, 4, 16, 24, layers=3)]
SMALL_LAYER = kda.KDAConfig("kimi_linear", 40, 1, (0,), 2, 2, 16, 24, 4)
WORKS = [lambda: work.Decode(SMALL[0]), lambda: work.Decode(SMALL[1]), lambda: work.Prefill(SMALL[0], 40),
         lambda: work.Layer(SMALL[0], 1), lambda: work.Layer(SMALL[0], 40),
         lambda: work.WholeLayer(SMALL_LAYER, "q4g", 1, 2), lambda: work.WholeLayer(SMALL_LAYER, "q8g", 40),
         lambda: work.Conv(48, 1),
         lambda: work.Conv(48, 20), lambda: work.Norm(2, 24, 20),
         lambda: work.Product(300, 200, 8, 1), lambda: work.Product(300, 200, 4, 20)]
NAMES = ["small, 1 layer", "small, 3 layers", "small, 1 layer, 40 tokens", "small, 1 layer, fused, 1 token",
         "small, 1 layer, fused, 40 tokens", "Kimi-Linear, 2 layers, q4g, 1 token",
         "Kimi-Linear, 1 layer, q8g, 40 tokens", "short convolution, 48 channels, 1 token",
         "short convolution, 48 channels, 20 tokens", "gated norm, 2 heads of 24, 20 tokens",
         "Q8G, 300 x 200, 1 token", "Q4G, 300 x 200, 20 tokens"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "plan_rows", lambda quick, isa: (WORKS, ["something: left out"]))
    monkeypatch.setattr(bench, "SECONDS", dict.fromkeys(bench.SECONDS, 0.03))


def test_bench_json(small, capsys):
    assert main(["bench", "--quick", "-o", "json", "--threads", "2"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert result["command"] == "kda bench -o json --quick --threads 2"
    assert result["machine"]["isa"] in HERE
    assert result["machine"]["compiler"] == _core.build_info()["compiler"]
    assert result["left_out"] == ["something: left out"]
    assert [(row["name"], row["threads"]) for row in result["rows"]] == [
        (name, n) for name in NAMES for n in ([1, 2] if THREADED and name != NAMES[7] else [1])]
    assert {field for row in result["rows"] for field in row} == set(result["fields"])
    for row in result["rows"]:
        assert 0 < row["us_per_token_min"] <= row["us_per_token"]
        assert row["samples"] >= 3
        shares = [row[field] for field in row if field.startswith("share_of_")]
        assert shares
        assert min(shares) > 0
        if row["kind"] == "decode":
            assert row["traffic_bytes_per_token"] == row["layers"] * row["heads"] * 16 * 24 * 8
        if row["kind"] == "idot":
            assert row["mac_per_token"] == 300 * 200
            assert row["GMAC_per_s"] * row["us_per_token"] * 1e3 == pytest.approx(300 * 200)
        elif row["kind"] == "whole layer":
            layers = 2 if "2 layers" in row["name"] else 1  # q, k, v, beta, decay gate, output gate, output
            assert row["mac_per_token"] == layers * (
                40 * (32 + 32 + 48 + 2 + 16 + 16 + 48) + 16 * (32 + 48) + 2 * 3 * 16 * 24)
        elif row["kind"] != "epilogue":
            assert row["mac_per_token"] == row["layers"] * row["heads"] * 3 * 16 * 24
            assert row["flop_per_token"] == 2 * row["mac_per_token"]
            assert row["GFLOP_per_s"] * row["us_per_token"] * 1e3 == pytest.approx(row["flop_per_token"])
        if "GB_per_s" in row:
            assert row["GB_per_s"] * row["us_per_token"] * 1e3 == pytest.approx(row["traffic_bytes_per_token"])


def heads(line):
    """How a table of bench begins in Markdown."""
    return "| " + " | ".join(head for head, _ in bench.TABLES[line]) + " |"


def test_bench_tables(small, capsys):
    assert main(["bench", "--quick", "--isa", "scalar"]) == 0
    text = capsys.readouterr().out
    assert "ISA scalar" in text
    assert all(name in text for name in NAMES)
    assert main(["bench", "--quick", "-o", "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    firsts = {kinds: NAMES[i] for kinds, i in zip(bench.TABLES, (0, 2, 5, 7, 10), strict=True)}
    for kinds, first in firsts.items():
        start = lines.index(heads(kinds))
        assert lines[start + 1].count("|") == lines[start].count("|") == lines[start + 2].count("|")
        assert lines[start + 2].startswith(f"| {first} |")
    assert "something: left out" in lines


def test_a_noisy_row_is_named():
    row = {"kind": "decode", "name": "small, 1 layer", "threads": 2, "us_per_token_min": 10.0, "state_bytes": 2**20,
           "mac_per_token": 3, "flop_per_token": 6, "GB_per_s": 1.0, "share_of_inplace": 0.5, "share_of_fma": 0.25}
    result = {"machine": bench.machine(None), "command": "kda bench", "date": "2026-01-01T00:00:00", "left_out": []}
    quiet = bench.render(result | {"rows": [row | {"us_per_token": 14.9}]}, "md")
    assert "| small, 1 layer | 1 MiB | 2 | 14.9 (10.0) | 3 | 6 | 1.0 | 50% | 25% |" in quiet
    assert "measure again" not in quiet
    noisy = bench.render(result | {"rows": [row | {"us_per_token": 14.9, "share_of_fma": 8.14}]}, "md")
    assert noisy.endswith("small, 1 layer, 2 threads: faster than its limit, so the limit was measured while something "
                          "else was running, measure again")
    noisy = bench.render(result | {"rows": [row | {"us_per_token": 30.0}]}, "text")
    assert noisy.endswith("small, 1 layer, 2 threads: the median is 3.0 times the fastest sample; something else was "
                          "running, measure again")


class Named:
    """Stands for a class of work.py: remembers what would have been made, and makes nothing."""

    def __init__(self, kind):
        self.kind, self.nbytes = kind, work.Prefill.nbytes

    def __call__(self, *args):
        return self.kind, *args


@pytest.fixture
def planned(monkeypatch):
    """plan_rows as tuples (class, arguments)."""
    for kind in ("Decode", "Prefill", "Layer", "WholeLayer", "Conv", "Norm", "Product"):
        monkeypatch.setattr(bench, kind, Named(kind))

    def plan(quick):
        works, left_out = bench.plan_rows(quick)
        return [make() for make in works], left_out

    return plan


DECODE = [("Decode", shape, None, left)
          for shape in (counts.KIMI_LINEAR_LAYER, counts.KIMI_LINEAR, counts.K3_LAYER) for left in (False, True)]
BLOCKS = [("Prefill", counts.KIMI_LINEAR_LAYER, T, None) for T in (64, 1024)]
FUSED = [("Layer", counts.KIMI_LINEAR_LAYER, 1, None), ("Layer", counts.KIMI_LINEAR_LAYER, 1024, None)]
WHOLE = [("WholeLayer", counts.KIMI_LINEAR_CONFIG, fmt, 1, 20, 1, 0, None) for fmt in ("q8g", "q4g")]
REST = [("WholeLayer", counts.KIMI_LINEAR_CONFIG, "q8g", 1024, 1, 1, 0, None),
        ("Conv", 12288, 1, None), ("Conv", 12288, 1024, None), ("Norm", 32, 128, 1024, None)]
IDOT = [("Product", N, K, bits, 1, None) for N, K in ((4096, 2304), (2304, 4096), (12704, 2304), (12288, 7168))
        for bits in (8, 4)]
MANY = [("Product", 4096, 2304, bits, 512, None) for bits in (8, 4)]


def test_bench_runs_the_models(planned):
    works, left_out = planned(quick=True)
    assert works == [*DECODE, *BLOCKS, *FUSED, *REST, *IDOT[:2], *MANY]
    assert left_out == ["Kimi K3, 69 layers: left out by --quick",
                        "Kimi-Linear, 20 layers, with weights: left out by --quick",
                        "Kimi-Linear, 1 layer, 8,192 tokens: left out by --quick",
                        "IDOT of other shapes: left out by --quick"]


def test_bench_takes_what_memory_allows(monkeypatch, planned):
    monkeypatch.setattr(bench, "available_bytes", lambda: 2**31)
    works, left_out = planned(quick=False)
    assert left_out == []
    assert works == [*DECODE, *(("Decode", counts.K3, None, left) for left in (False, True)), *BLOCKS,
                     ("Prefill", counts.KIMI_LINEAR_LAYER, 8192, None), *FUSED, *WHOLE, *REST, *IDOT, *MANY]
    weights = "Kimi-Linear, 20 layers, with weights: left out, it needs 1073741824 bytes and only"
    monkeypatch.setattr(bench, "available_bytes", lambda: 1_342_177_280)
    assert planned(quick=False)[1] == [f"{weights} 1342177280 are free"]
    monkeypatch.setattr(bench, "available_bytes", lambda: 1_342_177_279)
    assert planned(quick=False)[1] == [
        f"{weights} 1342177279 are free",
        "Kimi-Linear, 1 layer, 8,192 tokens: left out, it needs 671088640 bytes and only 1342177279 are free"]
    monkeypatch.setattr(bench, "available_bytes", lambda: 868_220_927)
    works, left_out = planned(quick=False)
    assert works == [*DECODE, *BLOCKS, *FUSED, *REST, *IDOT, *MANY]
    assert left_out[0] == "Kimi K3, 69 layers: left out, it needs 434110464 bytes and only 868220927 are free"


def test_derived_numbers():
    shape = counts.Shape("x", H=1, HV=1, K=10, V=10)  # 400 bytes, 300 MAC, 400 lane operations
    row = bench.derive(shape, step_ns=[100, 200, 400], pass_ns=[50, 50, 400], peak=[8.0, 8.0, 8.0])
    assert row["us_per_token"] == 0.2
    assert row["us_per_token_min"] == 0.1
    assert row["GB_per_s"] == 4.0
    assert row["GFLOP_per_s"] == 3.0
    assert row["share_of_inplace"] == 0.5  # of 0.5, 0.25 and 1
    assert row["share_of_fma"] == 0.25     # of 0.5, 0.25 and 0.125


def test_derived_numbers_of_blocks():
    shape = counts.Shape("x", H=1, HV=1, K=10, V=10)  # 300 MAC
    row = bench.derive_blocks(shape, 8, token_ns=[100, 200, 400], peak=[6.0, 6.0, 6.0])
    assert (row["tokens"], row["us_per_token"], row["GFLOP_per_s"]) == (8, 0.2, 3.0)
    assert row["share_of_fma_by_definition"] == 0.25  # of 0.5, 0.25 and 0.125


def test_derived_numbers_of_bytes():
    row = bench.derive_bytes(4000, 10, token_ns=[100, 200, 400], limit_ns=[500, 500, 4000], limit="copy")
    assert (row["traffic_bytes_per_token"], row["GB_per_s"], row["copy_us"]) == (400, 2.0, 0.5)
    assert row["share_of_copy"] == 0.5  # of 0.5, 0.25 and 1


@pytest.mark.parametrize(("left", "T", "batch"), [(False, 1, 1), (True, 1, 1), (False, 3, 2), (True, 3, 2)])
def test_decode_advances_the_states_as_the_reference_does(left, T, batch):
    from kda import reference
    decode = bench.Decode(SMALL[1], None, left, T, batch)
    assert decode.states.shape == (3, batch, 4, 16, 24)
    assert decode.tokens == T * batch
    want = [reference.fused_recurrent_kda(
        decode.q[i], decode.k[i], decode.v[i], decode.g[i], decode.beta[i], initial_state=decode.states[i],
        output_final_state=True, use_qk_l2norm_in_kernel=True) for i in range(3)]
    decode.run()
    for i, (o, S) in enumerate(want):
        np.testing.assert_allclose(decode.result[i], o, rtol=0, atol=2e-6 * np.abs(o).max())
        np.testing.assert_allclose(decode.settled()[i], S, rtol=0, atol=2e-6 * np.abs(S).max())


@pytest.mark.parametrize("T", [1, 40])
def test_the_fused_layer_is_the_functions_one_by_one(T):
    fused, plain = work.Layer(SMALL[0], T), work.Layer(SMALL[0], T)
    for _ in range(2):  # the second call sees the states of the first
        fused.run()
        want = plain.one_by_one()
        np.testing.assert_allclose(fused.result, want, rtol=0, atol=4e-6 * np.abs(want).max())
    np.testing.assert_allclose(fused.state, plain.state, rtol=0, atol=2e-6 * np.abs(plain.state).max())
    assert np.array_equal(fused.history, plain.history)


def test_products_cycle_over_more_than_the_caches_hold():
    product = work.Product(1030, 640, 4, 2)
    largest = max(kda.runtime.runtime_info()["caches"].values(), default=2**25)
    assert len(product.matrices) * product.nbytes >= min(2 * largest, 2**29)
    weights = product.matrices[0].dequantize()
    assert np.array_equal(weights[1024:], weights[:6])
    for i in range(1, 4):
        product.matrices[i].matmul = lambda x, out, i=i: out.fill(i)
    got = []
    for _ in range(3):
        product.run()
        got.append(product.result[0, 0])
    assert got == [1, 2, 3]
    assert len(work.Product(1030, 640, 4, 512).matrices) == 1
    assert product.reader()() > 0


def test_long_prompts_repeat_their_tokens():
    prefill = work.Prefill(SMALL[0], work.DISTINCT + 7)
    for x in (prefill.q, prefill.k, prefill.v, prefill.g):
        assert np.array_equal(x[:, work.DISTINCT:], x[:, :7])
        assert not np.array_equal(x[:, 0], x[:, 1])


def test_large_states_start_on_a_cache_line():
    assert bench.Decode(counts.KIMI_LINEAR_LAYER).states.ctypes.data % 64 == 0


def test_bench_refuses_numbers_of_a_broken_kernel(monkeypatch):
    decode = bench.Decode(SMALL[0])
    decode.v[:] = np.nan
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        bench.measure(decode, 1, seconds=0.0)


# ---- ceilings ----

@pytest.mark.parametrize("isa", HERE)
def test_the_in_place_pass_touches_every_element_once(isa):
    s = np.full((3, 1001), 2.0, np.float32)
    assert ceilings.inplace_ns(s, isa) > 0
    np.testing.assert_allclose(s, 0.99 * 2.0 + 0.01, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_the_copy_takes_time_that_grows_with_the_bytes(n):
    with ceilings.copier(8_000, n) as small, ceilings.copier(64_000_000, n) as large:
        assert 0 < min(small() for _ in range(5)) < min(large() for _ in range(3))


@pytest.mark.parametrize("isa", HERE)
def test_the_fma_probe_takes_as_long_as_asked(isa):
    rounds = ceilings.fma_rounds(isa, ns=50_000)
    assert rounds >= 1000
    assert ceilings.fma_rate(rounds, isa) > 0


@pytest.mark.parametrize("isa", HERE)
def test_the_int8_probe_takes_as_long_as_asked(isa):
    rounds = ceilings.idot_rounds(isa, ns=50_000)
    assert rounds >= 1000
    assert ceilings.idot_rate(rounds, isa) > 0


def test_threads_are_restored():
    before = kda.get_num_threads()
    with ceilings.threads(1) as n:
        assert n == kda.get_num_threads() == 1
    assert kda.get_num_threads() == before


# ---- progress, errors, the process ----

class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_only_on_a_terminal():
    assert bench.progress_bar(io.StringIO()) is None
    terminal = Terminal()
    draw = bench.progress_bar(terminal)
    draw(1, 4, "half a row")
    assert "[######..................] 1/4 half a row" in terminal.getvalue()
    draw(4, 4, "done")
    assert terminal.getvalue().endswith("\r\x1b[K")  # the line is left empty


@pytest.mark.parametrize("command", ["check", "bench", "ceiling"])
@pytest.mark.parametrize(("option", "value", "message"), [
    ("--isa", "mmx", "there is no such ISA in this build; available here:"),
    ("--threads", "0", "expected 1 to 1024 threads, got 0"),
])
def test_impossible_requests(capsys, command, option, value, message):
    assert main([command, option, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kda {command} {option}: ")
    assert message in err


@pytest.mark.parametrize("argv", [[], ["measure"], ["bench", "-o", "xml"], ["check", "--threads", "many"]])
def test_usage_errors(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: kda" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kda {kda.__version__}\n"


def as_a_process(*argv):
    return python(f"import runpy, sys; sys.argv = ['kda', *{argv!r}]; runpy.run_module('kda', run_name='__main__')",
                  check=False)


def test_as_a_process():
    done = as_a_process("check", "--isa", "scalar")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 failed" in done.stdout
    done = as_a_process("check", "--isa", "mmx")
    assert done.returncode == 2
    assert done.stderr.startswith("kda check --isa: isa='mmx'")


@pytest.mark.parametrize("argv", ["['kda', 'info']", "['-m', 'info']"])
def test_a_wrong_isa_in_the_environment_is_one_line(argv):
    code = f"import sys; sys.argv = {argv}; sys.orig_argv = ['python', '-m', 'kda']; import kda"
    done = python(code, check=False, KDA_ISA="mmx")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kda: KDA_ISA='mmx': there is no such ISA in this build; available here: ")
    assert done.stderr.count("\n") == 1
    done = python("import kda", check=False, KDA_ISA="mmx")  # a program of someone else's gets the exception
    assert (done.returncode, "ImportError: KDA_ISA='mmx'" in done.stderr) == (1, True)


def test_a_reader_that_leaves_is_no_error():
    """kda plan ... | head"""
    done = python("import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1); "
                  "from kda.cli import main; sys.exit(main(['plan', 'kimi_k3']))", check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_failed_check_fails_the_process():
    done = python("import sys; from kda import ops, cli; right = ops.fused_recurrent_kda; "
                  "ops.fused_recurrent_kda = lambda *a, **k: tuple(2 * x for x in right(*a, **k)); "
                  "sys.exit(cli.main(['check', '--isa', 'scalar']))", check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAILED on scalar" in done.stdout
