"""The page of `kda dashboard`: the data it holds, and what a person sees of it in a browser."""

import json
import re

import pytest
from browser import chromium
from test_compare import MACHINE, bench_result, ceiling_result, written

from kda.cli import main
from kda.perf import dashboard, history

COMMITS = [f"{i:x}" * 40 for i in range(1, 9)]
SLOW = 5  # from this commit on one kernel takes 1.3 times as long; a commit moves all kernels by up to 2 %


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """A history of eight commits, two ISAs and two threads, in which one kernel becomes slower."""
    folder = tmp_path_factory.mktemp("history")
    path = folder / "history.jsonl"
    for i, commit in enumerate(COMMITS):
        date = f"2026-01-{i + 1:02d}T00:00:00+00:00"
        rows = []
        for isa, base in (("avx2", 100.0), ("scalar", 900.0)):
            for threads in (1, 2):
                for kind, name in (("decode", "Kimi-Linear, 1 layer"), ("prefill", "Kimi-Linear, 1 layer, 64 tokens")):
                    slow = i >= SLOW and (kind, isa, threads) == ("prefill", "avx2", 1)
                    f = (1 + 0.01 * (i % 3)) * (1.3 if slow else 1)
                    us = base * f / threads
                    rows.append((isa, bench_result(
                        kind=kind, name=name, threads=threads, us_per_token=us, us_per_token_min=0.97 * us,
                        us_per_token_interval=[0.99 * us, 1.01 * us], share_of_inplace=0.5 / f,
                        share_interval=[0.495 / f, 0.505 / f], mac_per_token=1_572_864, flop_per_token=3_145_728,
                        traffic_bytes_per_token=4_194_304)["rows"][0]))
        for isa in ("avx2", "scalar"):
            result = bench_result() | {"machine": MACHINE | {"isa": isa}, "rows": [r for own, r in rows if own == isa]}
            history.add(path, history.lines_of(written(folder, "result.json", result), commit, date))
    history.add(path, history.lines_of(written(folder, "ceiling.json", ceiling_result()), COMMITS[-1], date))
    return path


def test_the_planted_regression_is_the_only_one(past):
    data = dashboard.page_data(history.read(past))
    assert [c["commit"] for c in data["commits"]] == COMMITS
    found = {(s["name"], s["isa"], s["threads"], p["commit"]) for s in data["series"] for p in s["points"]
             if p["verdict"] == "slower"}
    assert found == {("prefill: Kimi-Linear, 1 layer, 64 tokens", "avx2", 1, COMMITS[SLOW])}
    assert len(data["series"]) == 8
    assert all(len(s["points"]) == 8 for s in data["series"])
    assert {s["points"][0]["verdict"] for s in data["series"]} == {"first"}
    assert [c["threads"] for c in data["ceilings"]] == [1, 4]
    assert {n["policy"] for n in data["nvme"]} == {"LRU", "LFU"}


def test_commits_are_in_the_order_of_their_dates(past):
    lines = history.read(past)
    assert dashboard.page_data(lines[::-1])["commits"] == dashboard.page_data(lines)["commits"]


def test_a_disturbed_point_is_neither_judged_nor_judged_against(tmp_path):
    path = tmp_path / "h"
    for i, (us, taken) in enumerate([(100.0, 0.0), (200.0, 4.0), (101.0, 0.0), (140.0, 0.0)]):
        result = bench_result(us_per_token=us, us_per_token_min=us, us_per_token_interval=[us, us * 1.001],
                              cpus_taken=taken, share_of_inplace=50 / us, share_interval=[50 / us, 50.001 / us])
        lines = history.lines_of(written(tmp_path, "r", result), COMMITS[i], f"2026-01-0{i + 1}T00:00:00+00:00")
        history.add(path, lines)
    (series,) = dashboard.page_data(history.read(path))["series"]
    assert [p["verdict"] for p in series["points"]] == ["first", "unclear", "same", "slower"]
    assert series["points"][1]["disturbed"] == "others took 4.0 of 4 CPUs"


def test_a_changed_counter_is_said(tmp_path):
    path = tmp_path / "h"
    for i, mac in enumerate([300, 301]):
        lines = history.lines_of(written(tmp_path, "r", bench_result(mac_per_token=mac)), COMMITS[i],
                                 f"2026-01-0{i + 1}T00:00:00+00:00")
        history.add(path, lines)
    (series,) = dashboard.page_data(history.read(path))["series"]
    assert series["points"][1]["counters_changed"] == ["mac: 300 before, 301 now"]


def test_kda_dashboard(past, tmp_path, capsys):
    pytest.importorskip("plotly")
    assert main(["dashboard", str(past), "-o", str(tmp_path / "site" / "perf")]) == 0
    path = tmp_path / "site" / "perf" / "index.html"
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert len(json.loads(data)["series"]) == 8
    assert "/* CSS */" not in text
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', text)  # nothing is fetched


def test_names_cannot_leave_the_data(tmp_path):
    pytest.importorskip("plotly")
    result = bench_result(name="</script><script>alert(1)</script> /* SCRIPT */")
    text = dashboard.page(history.lines_of(written(tmp_path, "r", result), COMMITS[0], "2026-01-01T00:00:00+00:00"))
    assert "<script>alert(1)" not in text


def test_refusals(past, tmp_path, capsys, monkeypatch):
    assert main(["dashboard", str(tmp_path / "none"), "-o", str(tmp_path)]) == 2
    assert "the history is empty or not there" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    assert main(["dashboard", str(past), "-o", str(tmp_path)]) == 2
    assert "pip install 'kda-kernels[dashboard]'" in capsys.readouterr().err


# ---- in a browser ----

@pytest.fixture(scope="module")
def site(past, tmp_path_factory):
    pytest.importorskip("plotly")
    return dashboard.write(history.read(past), tmp_path_factory.mktemp("site")).as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


TRACES = """return document.getElementById('trend-chart').data.filter(t => t.name)
            .map(t => ({name: t.name, x: t.x, y: t.y, symbols: t.marker.symbol}))"""
NOTES = "return document.getElementById('trend-chart').layout.annotations.map(a => [a.x, a.text])"
TEXT = "return document.getElementById(arguments[0]).innerText"


@pytest.mark.slow
def test_the_page_loads_without_a_word_on_the_console(browser, site):
    browser.open(site)
    assert browser.messages() == []
    assert browser.run("return document.title") == "kda performance"
    assert "commit 888888888, 2026-01-08" in browser.run(TEXT, "where")
    for chart in ("trend-chart", "roof-chart", "nvme-chart"):
        width, drawn = browser.run("const c = document.getElementById(arguments[0]);"
                                   "return [c.clientWidth, c.querySelector('.main-svg').clientWidth]", chart)
        assert width == drawn > 600


@pytest.mark.slow
def test_the_regression_is_marked(browser, site):
    browser.open(site)
    assert browser.run("return document.getElementById('bench').value") == "prefill: Kimi-Linear, 1 layer, 64 tokens"
    assert browser.run(NOTES) == [["666666666", "<b>1.31 x slower</b>"]]
    (line,) = [t for t in browser.run(TRACES) if t["name"] == "avx2, 1 thread"]
    assert line["symbols"] == ["circle"] * 5 + ["triangle-up"] + ["circle"] * 2
    news = browser.run(TEXT, "news")
    assert news.count("slower") == 1
    assert "prefill: Kimi-Linear, 1 layer, 64 tokens, avx2, 1 thread at 666666666 (2026-01-06): 1.31 times slower" in (
        " ".join(news.split()))
    assert "slower at 666666666 (1.31 times)" in browser.run(TEXT, "trend-words")


@pytest.mark.slow
def test_a_filter_changes_the_chart_and_the_address(browser, site):
    browser.open(site)
    assert len(browser.run(TRACES)) == 4
    browser.choose("isa", "scalar")
    browser.choose("threads", "2")
    (line,) = browser.run(TRACES)
    assert line["name"] == "scalar, 2 threads"
    assert line["y"][0] == 450.0
    assert browser.run(NOTES) == []
    address = browser.run("return location.hash")
    assert "isa=scalar" in address
    assert "threads=2" in address
    table = browser.run("return document.querySelectorAll('#all tbody tr').length")
    assert table == 2
    browser.open(site + address)  # the address alone brings it all back
    assert [t["name"] for t in browser.run(TRACES)] == ["scalar, 2 threads"]
    assert browser.run("return document.getElementById('isa').value") == "scalar"


@pytest.mark.slow
def test_relative_speed_and_nonsense_in_the_address(browser, site):
    browser.open(site + "#by=relative&isa=avx2&threads=1")
    (line,) = browser.run(TRACES)
    assert line["y"][-1] == pytest.approx(0.5 / 1.3 / 1.01, rel=1e-4)
    assert "an in-place pass over the same bytes" in browser.run(TEXT, "trend-words")
    browser.open(site + "#isa=z80&bench=%3Cb%3E&by=x&machine=none&threads=99")
    assert len(browser.run(TRACES)) == 4
    assert browser.messages() == []


@pytest.mark.slow
def test_tables_say_what_the_planner_counts(browser, site):
    browser.open(site)
    counts = browser.run(TEXT, "counts")
    assert "1,572,864" in counts
    assert "3.15" in counts
    assert "4,194,304" in counts
    assert "NO: memory was measured" in browser.run(TEXT, "disks")
    assert "759,955,456 bytes per token" in browser.run(TEXT, "nvme-words")
    roofs = browser.run("return document.getElementById('roof-chart').data.map(t => [t.name, t.x.length])")
    assert roofs == [["DRAM read: 79.5 GB/s", 2], ["decode", 4], ["prefill", 4]]


@pytest.mark.slow
def test_keyboard_alone(browser, site):
    """Tab reaches everything; a benchmark is chosen from the table with Enter."""
    browser.open(site)
    browser.run("document.querySelector('#all button').focus()")
    browser.press("\ue007")
    assert browser.run("return document.getElementById('bench').value") == "decode: Kimi-Linear, 1 layer"
    assert browser.run("return document.activeElement.id") == "bench"
    browser.open(site)
    seen = []
    for _ in range(9):
        browser.press("\ue004")
        seen.append(browser.run("const e = document.activeElement; return e.id || e.name || e.className"))
    assert seen[:7] == ["skip", "theme", "machine", "isa", "threads", "by", seen[6]]


@pytest.mark.slow
def test_for_a_screen_reader(browser, site):
    browser.open(site)
    unnamed = browser.run("""return [...document.querySelectorAll('select, input, button, summary')]
        .filter(e => !(e.labels && e.labels.length) && !e.innerText.trim()).map(e => e.outerHTML)""")
    assert unnamed == []
    for chart in ("trend-chart", "roof-chart", "nvme-chart"):
        role, label = browser.run("const c = document.getElementById(arguments[0]);"
                                  "return [c.getAttribute('role'), c.getAttribute('aria-label')]", chart)
        assert role == "img"
        assert len(label) > 60
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return document.querySelectorAll('th:not([scope])').length") == 0
    assert browser.run("return document.querySelectorAll('#trend-table tbody tr').length") == 4 * 8


CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = (c) => c.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
const behind = (e) => { while (e) { const c = getComputedStyle(e).backgroundColor;
    if (!c.startsWith('rgba(0, 0, 0, 0') && !c.startsWith('color(')) return c; e = e.parentElement; } };
return [...document.querySelectorAll('h1, h2, p, label, td, th, button, select, .tile b, .tile span, .badge, dt, dd')]
    .filter(e => e.offsetParent && e.innerText.trim()).map(e => {
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(rgb(behind(e)))];
        return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 80)]; })
    .sort((a, b) => a[0] - b[0])[0]"""


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "page"), [("light", "rgb(246, 247, 249)"), ("dark", "rgb(17, 21, 28)")])
def test_both_themes_can_be_read(browser, site, theme, page):
    """At least 4.5 to 1, as WCAG asks of text."""
    browser.open(f"{site}#theme={theme}")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == page
    worst, where = browser.run(CONTRAST)
    assert worst >= 4.5, where
    browser.run("document.getElementById('theme').click()")
    assert ("theme=dark" in browser.run("return location.hash")) == (theme == "light")  # dark, then the system's


@pytest.mark.slow
def test_a_phone(site, tmp_path):
    with chromium(tmp_path / "profile", (500, 900)) as phone:
        phone.ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": {
            "width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}})
        phone.open(site)
        assert phone.run("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        small = phone.run("""return [...document.querySelectorAll('#filters select, #theme')]
            .filter(e => e.getBoundingClientRect().height < 32).length""")
        assert small == 0
        assert phone.messages() == []
