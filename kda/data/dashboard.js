"use strict";
// The page's data, its state (in the address after #), and a function for each part. No network, nothing stored.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const unique = (list) => [...new Set(list)];
const last = (list) => list[list.length - 1];
const short = (commit) => commit.slice(0, 9);
const COLORS = {
  light: ["#1d5fbf", "#b45309", "#0f766e", "#7c3aed", "#be185d", "#4d7c0f", "#475569"],
  dark: ["#7fb2ff", "#f5a35c", "#5fd4c4", "#c0a3ff", "#ff8fc0", "#b5d86a", "#a9b4c6"],
};
const commitPlace = new Map(data.commits.map((c, i) => [c.commit, i]));

// ---- state ----

const state = {machine: "", isa: "all", threads: "all", by: "us", bench: "", model: "", theme: "system"};

function readState() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const fingerprints = unique([...data.machines, ...data.series].map((x) => x.fingerprint));
  const choose = (value, options, otherwise) => (options.includes(value) ? value : otherwise);
  state.machine = choose(asked.get("machine"), fingerprints, last(fingerprints));
  const mine = data.series.filter((s) => s.fingerprint === state.machine);
  state.isa = choose(asked.get("isa"), unique(mine.map((s) => s.isa)), "all");
  state.threads = choose(asked.get("threads"), unique(mine.map((s) => String(s.threads))), "all");
  state.by = choose(asked.get("by"), ["us", "relative"], "us");
  const names = unique(shown().map((s) => s.name));
  const worst = regressions(shown())[0];
  state.bench = choose(asked.get("bench"), names, worst ? worst.s.name : names[0] || "");
  const models = unique(nvmeLines().map(modelOf));
  state.model = choose(asked.get("model"), models, models[0] || "");
  state.theme = choose(asked.get("theme"), ["light", "dark"], "system");
}

function setState(change) {
  const next = new URLSearchParams();
  for (const [name, value] of Object.entries({...state, ...change})) {
    if (value && value !== "all" && value !== "system") next.set(name, value);
  }
  history.replaceState(null, "", "#" + next);
  draw();
}

const shown = () => data.series.filter((s) => s.fingerprint === state.machine
  && (state.isa === "all" || s.isa === state.isa) && (state.threads === "all" || String(s.threads) === state.threads));
// Points that became slower or whose counters changed, the newest first.
const regressions = (all) => all.flatMap((s) => s.points
  .filter((p) => p.verdict === "slower" || (p.counters_changed || []).length).map((p) => ({s, p})))
  .sort((a, b) => commitPlace.get(b.p.commit) - commitPlace.get(a.p.commit));
const nvmeLines = () => data.nvme.filter((n) => n.fingerprint === state.machine);
const modelOf = (n) => n.name.slice(0, n.name.lastIndexOf(", "));

// ---- words and tables ----

function number(x) {
  if (x === undefined || x === null) return "";
  const digits = Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : Math.abs(x) >= 0.1 ? 2 : 4;
  return x.toLocaleString("en-US", {maximumFractionDigits: digits, minimumFractionDigits: Math.min(digits, 2)});
}

const threadWords = (n) => (n === 1 ? "1 thread" : `${n} threads`);
const percent = (x) => `${number(100 * x)} %`;

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function table(where, caption, head, rows, current = () => false) {
  const made = element("table");
  made.append(element("caption", caption));
  const top = made.createTHead().insertRow();
  head.forEach((text) => top.append(element("th", text, {scope: "col"})));
  const body = made.createTBody();
  rows.forEach((cells, i) => {
    const row = body.insertRow();
    if (current(i)) row.setAttribute("aria-current", "true");
    cells.forEach((cell) => {
      const td = row.insertCell();
      if (cell instanceof Node) td.append(cell);
      else td.textContent = cell;
    });
  });
  at(where).replaceChildren(made);
  at(where).setAttribute("role", "region");
  at(where).setAttribute("aria-label", caption);
}

function select(id, options, value, words = (x) => x) {
  const list = at(id);
  list.replaceChildren(...options.map((o) => element("option", words(o), {value: o})));
  list.value = value;
  list.disabled = options.length === 0;
}

function badge(point) {
  const sign = {slower: "\u25b2 ", faster: "\u25bc ", unclear: "? "}[point.verdict] || "";
  const made = element("span", sign + point.verdict, {class: `badge ${point.verdict}`});
  if (point.disturbed) made.title = point.disturbed;
  return made;
}

// ---- charts ----

let dark = false;
const color = (i) => COLORS[dark ? "dark" : "light"][i % 7];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faint = (hex) => hex + "2b";

function plot(id, traces, layout, words) {
  const narrow = window.innerWidth < 640;
  const axis = {gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true,
    fixedrange: narrow};
  at(id).setAttribute("aria-label", words);
  Plotly.react(at(id), traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 12, r: 12, t: 12, b: 12},
    font: {family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 13, color: css("--ink")},
    hoverlabel: {align: "left", bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink")}},
    legend: {orientation: "h", y: narrow ? -0.3 : -0.26, yanchor: "top"}, ...layout,
    xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis},
  }, {displayModeBar: false, responsive: true});
}

function drawTrend() {
  const mine = shown().filter((s) => s.name === state.bench);
  const relative = state.by === "relative" && mine.some((s) => last(s.points).relative !== undefined);
  const value = (p) => (relative ? p.relative : p.us);
  const interval = (p) => (relative ? p.relative_interval : p.us_interval);
  const traces = [], marks = [], rows = [];
  const commits = data.commits.filter((c) => mine.some((s) => s.points.some((p) => p.commit === c.commit)));
  mine.forEach((s, i) => {
    const points = s.points.filter((p) => value(p) !== undefined);
    const x = points.map((p) => short(p.commit)), name = `${s.isa}, ${threadWords(s.threads)}`;
    const band = {x, mode: "lines", line: {width: 0}, hoverinfo: "skip", showlegend: false, legendgroup: name};
    traces.push({...band, y: points.map((p) => interval(p)[0])});
    traces.push({...band, y: points.map((p) => interval(p)[1]), fill: "tonexty", fillcolor: faint(color(i))});
    traces.push({
      x, y: points.map(value), name, legendgroup: name, mode: "lines+markers", line: {color: color(i), width: 2},
      marker: {
        color: points.map((p) => ({slower: css("--bad"), faster: css("--good")}[p.verdict] || color(i))),
        symbol: points.map((p) => ({slower: "triangle-up", faster: "triangle-down", unclear: "circle-open"}[p.verdict]
          || "circle")),
        size: points.map((p) => (["slower", "faster"].includes(p.verdict) ? 14 : 7)),
      },
      text: points.map((p) => `${name}<br>${short(p.commit)}, ${dateOf(p.commit)}<br>${number(value(p))}`
        + ` (${number(interval(p)[0])} to ${number(interval(p)[1])})<br>${p.verdict}`
        + (p.ratio ? `, ${number(p.ratio)} times the commit before` : "")),
      hovertemplate: "%{text}<extra></extra>",
    });
    points.forEach((p) => {
      if (p.verdict === "slower") {
        marks.push({x: short(p.commit), y: value(p), text: `<b>${number(p.ratio)} x slower</b>`,
          showarrow: false, font: {color: css("--bad")}, yshift: relative ? -20 : 20});
      }
      rows.push([short(p.commit), dateOf(p.commit), s.isa, String(s.threads), number(p.us),
        p.us_interval.map(number).join(" to "), p.relative === undefined ? "" : percent(p.relative),
        p.ratio ? number(p.ratio) : "", badge(p)]);
    });
  });
  const unit = relative ? `speed relative to ${limitWords(mine[0].relative_to)} (higher is better)`
    : "microseconds per token (lower is better)";
  const axis = relative ? "relative, higher is better" : "us/token, lower is better";
  const words = mine.length ? `${state.bench}: ${unit}, ${commits.length} commits. ` + mine.map((s) => {
    const p = last(s.points), slow = s.points.filter((q) => q.verdict === "slower");
    return `${s.isa}, ${threadWords(s.threads)}: latest ${relative ? percent(p.relative) : number(p.us) + " us"}, `
      + (slow.length ? `slower at ${slow.map((q) => `${short(q.commit)} (${number(q.ratio)} times)`).join(", ")}`
        : "no regression");
  }).join("; ") + ". Bands: 99 % intervals of the median." : "No benchmark of this choice.";
  at("trend-words").textContent = words;
  plot("trend-chart", traces, {
    annotations: marks,
    xaxis: {type: "category", categoryorder: "array", categoryarray: commits.map((c) => short(c.commit)), nticks: window.innerWidth < 640 ? 4 : 12},
    yaxis: {title: {text: axis}, rangemode: "tozero", tickformat: relative ? ".0%" : undefined},
  }, words);
  table("trend-table", `${state.bench}, every commit`, ["commit", "date", "ISA", "threads", "us/token", "99 % interval",
    "relative", "change", "verdict"], rows);
}

const dateOf = (commit) => data.commits[commitPlace.get(commit)].date.slice(0, 10);
const limitWords = (to) => ({inplace: "an in-place pass over the same bytes", read: "reading the same bytes",
  copy: "a copy of the same bytes", int8: "the int8 peak", fma_by_definition: "the multiply-add peak"}[to]
  || to || "its limit");

function drawNews() {
  const mine = data.series.filter((s) => s.fingerprint === state.machine);
  const head = last(data.commits.filter((c) => mine.some((s) => last(s.points).commit === c.commit)));
  const now = head ? mine.filter((s) => last(s.points).commit === head.commit) : [];
  const of = (verdict) => now.filter((s) => last(s.points).verdict === verdict);
  const tiles = [[of("slower").length, "slower", of("slower").length ? "bad" : ""], [of("faster").length, "faster", ""],
    [of("same").length + of("first").length, "same or new", ""], [of("unclear").length, "unclear", ""],
    [regressions(mine).length, `regressions in ${data.commits.length} commits`, regressions(mine).length ? "bad" : ""]];
  at("tiles").replaceChildren(...tiles.map(([n, words, kind]) => {
    const tile = element("div", undefined, {class: `tile ${kind}`});
    tile.append(element("b", String(n)), element("span", words));
    return tile;
  }));
  const news = regressions(mine).slice(0, 6);
  at("news").replaceChildren(...(news.length ? news.map(({s, p}) => {
    const line = element("p");
    const go = element("button", `${s.name}, ${s.isa}, ${threadWords(s.threads)}`, {type: "button"});
    go.addEventListener("click", () => { setState({bench: s.name, isa: "all", threads: "all"}); at("bench").focus(); });
    line.append(go, ` at ${short(p.commit)} (${dateOf(p.commit)}): `, p.verdict === "slower"
      ? `${number(p.ratio)} times slower` : `counter changed: ${p.counters_changed.join("; ")}`);
    return line;
  }) : [element("p", "No regression in this history.", {class: "fine"})]));
  const machine = data.machines.find((m) => m.fingerprint === state.machine) || {};
  at("where").textContent = [head ? `commit ${short(head.commit)}, ${dateOf(head.commit)}` : "", machine.cpu,
    machine.threads ? threadWords(machine.threads) : "", machine.kda ? `kda ${machine.kda}` : ""].filter(Boolean)
    .join("  \u00b7  ");
}

function drawAll() {
  const mine = shown();
  table("all", "Latest result of every benchmark", ["benchmark", "ISA", "threads", "us/token", "relative", "to",
    "change", "verdict", "commit"], mine.map((s) => {
    const p = last(s.points);
    const go = element("button", s.name, {type: "button"});
    go.addEventListener("click", () => { setState({bench: s.name}); at("trend").scrollIntoView(); at("bench").focus(); });
    return [go, s.isa, String(s.threads), number(p.us), p.relative === undefined ? "" : percent(p.relative),
      s.relative_to.replace("fma_by_definition", "fma"), p.ratio ? number(p.ratio) : "", badge(p), short(p.commit)];
  }), (i) => mine[i].name === state.bench);
}

function drawRoofline() {
  const points = shown().map((s) => ({s, p: last(s.points)})).filter(({p}) => p.flop && p.bytes);
  const roofs = data.ceilings.filter((c) => c.fingerprint === state.machine);
  const teams = unique(roofs.map((c) => c.threads)).sort((a, b) => a - b);
  const asked = Number(state.threads), team = teams.includes(asked) ? asked : last(teams);
  const x = points.map(({p}) => p.flop / p.bytes);
  const range = [Math.min(0.1, ...x) / 1.6, Math.max(100, ...x) * 1.6], traces = [];
  const mine = roofs.filter((c) => c.threads === team);
  const fma = mine.find((c) => c.name === "float32 FMA"), dot = mine.find((c) => c.name === "int8 dot");
  const top = Math.max(fma ? fma.value : 0, dot ? 2 * dot.value : 0);
  const line = (name, xs, ys, dash) => traces.push({x: xs, y: ys, name, mode: "lines", hoverinfo: "name",
    line: {color: css("--soft"), width: 1.5, dash}, showlegend: false, hoverlabel: {namelength: -1}});
  const labels = [];
  const label = (text, lx, ly, more) => labels.push({x: Math.log10(lx), y: Math.log10(ly), text, showarrow: false,
    font: {size: 11, color: css("--soft")}, bgcolor: css("--card"), ...more});
  const places = mine.filter((c) => c.unit === "GB/s").sort((a, b) => b.value - a.value).map((c) => c.name);
  mine.filter((c) => c.unit === "GB/s").forEach((c, i) => {
    const knee = top / c.value;
    line(`${c.name}: ${number(c.value)} GB/s`, [range[0], knee], [range[0] * c.value, top], i ? "dot" : "solid");
    const lx = range[0] * 2.3 * 1.8 ** (places.indexOf(c.name) + 1);
    label(`${c.name} ${number(c.value)} GB/s`, lx, lx * c.value, {xanchor: "right", yanchor: "bottom"});
  });
  [[fma, fma && fma.value, "float32 FMA", "GFLOP/s"], [dot, dot && 2 * dot.value, "int8 dot", "Gop/s"]]
    .forEach(([c, value, name, unit]) => {
      if (!c) return;
      line(`${name}: ${number(value)} ${unit}`, [range[0], range[1]], [value, value], name === "int8 dot" ? "dash" : "solid");
      label(`${name} ${number(value)} ${unit}`, range[1], value,
        {xanchor: "right", yanchor: value === top ? "bottom" : "top"});
    });
  unique(points.map(({s}) => s.kind)).forEach((kind, i) => {
    const own = points.filter(({s}) => s.kind === kind);
    traces.push({
      x: own.map(({p}) => p.flop / p.bytes), y: own.map(({p}) => p.flop / p.us / 1e3), name: kind, mode: "markers",
      marker: {color: color(i), size: 10, symbol: own.map(({s}) => (s.threads > 1 ? "diamond" : "circle")),
        line: {color: css("--card"), width: 1}},
      text: own.map(({s, p}) => `${s.name}<br>${s.isa}, ${threadWords(s.threads)}<br>`
        + `${number(p.flop / p.us / 1e3)} GFLOP/s, ${number(p.flop / p.bytes)} FLOP/byte`),
      hovertemplate: "%{text}<extra></extra>",
    });
  });
  const words = points.length ? `${points.length} kernels; circles: 1 thread, diamonds: more. `
    + (mine.length ? `The lines are this machine's ceilings on ${threadWords(team)}: reading or updating memory and the `
      + "caches (slanted), multiply-adds (level). A kernel may lie over the memory line if its state stays in a cache."
      : "This history has no ceilings of this machine: `kda ceiling -o json` measures them.")
    : "No kernel of this choice has its FLOP and bytes counted.";
  at("roof-words").textContent = words;
  plot("roof-chart", traces, {
    annotations: window.innerWidth < 640 ? [] : labels, legend: {orientation: "h", y: -0.2, yanchor: "top"},
    xaxis: {type: "log", range: range.map(Math.log10), title: {text: "FLOP per byte of traffic"}, dtick: 1},
    yaxis: {type: "log", title: {text: "GFLOP/s, higher is better"}, dtick: 1},
  }, `Roofline. ${words}`);
}

function drawCounts() {
  const seen = new Map();
  shown().forEach((s) => { if (last(s.points).bytes) seen.set(s.name, last(s.points)); });
  table("counts", "MFLOP and bytes per token", ["benchmark", "MFLOP/token", "MAC/token", "MB/token", "bytes/token",
    "FLOP/byte"], [...seen].map(([name, p]) => [name, p.flop ? number(p.flop / 1e6) : "", p.mac
    ? p.mac.toLocaleString("en-US") : "", number(p.bytes / 1e6), p.bytes.toLocaleString("en-US"),
  p.flop ? number(p.flop / p.bytes) : ""]));
}

function drawNvme() {
  const mine = nvmeLines().filter((n) => modelOf(n) === state.model);
  const traces = [], rows = [];
  mine.forEach((n, i) => {
    [["overlapped", "solid"], ["serial", "dot"]].forEach(([kind, dash]) => traces.push({
      x: n.cache_gib, y: n[kind], name: `${n.policy}, ${kind}`, mode: "lines+markers",
      line: {color: color(i), width: 2, dash}, marker: {size: 6},
      text: n.cache_gib.map((gib, j) => `${n.policy}, ${kind}<br>${number(gib)} GiB, ${percent(n.hit_rate[j])} hits<br>`
        + `${number(n[kind][j])} tokens/s, bound by ${n.bound_by[j]}<br>KDA ${percent(n.kda_share[j])} of a token`),
      hovertemplate: "%{text}<extra></extra>",
    }));
    n.cache_gib.forEach((gib, j) => rows.push([n.policy, number(gib), percent(n.hit_rate[j]), number(n.serial[j]),
      number(n.overlapped[j]), n.bound_by[j], percent(n.kda_share[j])]));
  });
  const n = mine[0];
  const words = n ? `${state.model}: ${n.bytes_per_token.toLocaleString("en-US")} bytes per token from a disk of ${n.disk}. `
    + `Without the disk a token takes at least ${number(n.compute_ms)} ms, of which KDA's delta rule ${number(n.kda_ms)} `
    + `ms, measured. Without a cache KDA costs ${percent(n.kda_share[0])} of a token, bound by ${n.bound_by[0]}. `
    + (n.trace ? `Hit rates: ${n.trace}.` : "No routing trace: no cache is shown.")
    : "This history has no model on a disk: `kda ceiling --config CONFIG --disk DIR -o json` measures one.";
  at("nvme-words").textContent = words;
  at("nvme-chart").hidden = !n;
  if (n) {
    plot("nvme-chart", traces, {
      xaxis: {title: {text: "cache for experts, GiB"}, rangemode: "tozero"},
      yaxis: {title: {text: "tokens/s, higher is better"}, rangemode: "tozero"},
    }, words);
  }
  table("nvme-table", `${state.model}, tokens/s by cache size`, ["policy", "cache GiB", "hit rate", "serial",
    "overlapped", "bound by", "KDA's share"], rows);
}

function drawMachine() {
  const machine = data.machines.find((m) => m.fingerprint === state.machine);
  const facts = machine ? {
    CPU: `${machine.cpu}, ${machine.architecture}`, "CPUs, threads": `${machine.cpus}, ${machine.threads} (${machine.threading})`,
    Caches: Object.entries(machine.cache_bytes).map(([name, n]) => `${name} ${n / 1024} KiB`).join(", "),
    ISA: machine.isa, System: machine.system, Compiler: `${machine.compiler} ${machine.flags}`,
    Versions: `kda ${machine.kda}, Python ${machine.python}, numpy ${machine.numpy}`, Fingerprint: machine.fingerprint,
  } : {};
  at("machine-facts").replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [element("dt", name),
    element("dd", text)]));
  const mine = data.ceilings.filter((c) => c.fingerprint === state.machine);
  const teams = unique(mine.map((c) => c.threads)).sort((a, b) => a - b);
  table("ceilings", mine.length ? "Ceilings: medians, in brackets the best sample; higher is better" : "No ceilings",
    ["ceiling", "unit", ...teams.map(threadWords)], unique(mine.map((c) => c.name)).map((name) => {
      const own = mine.filter((c) => c.name === name);
      return [name, own[0].unit, ...teams.map((n) => own.find((c) => c.threads === n))
        .map((c) => (c ? `${number(c.value)} (${number(c.best)})` : ""))];
    }));
  const disks = data.disks.filter((d) => d.fingerprint === state.machine);
  table("disks", disks.length ? "Disk: GB/s, 10^9 bytes; higher is better" : "No disk", ["reads", "queue depth", "GB/s",
    "us/read", "page cache bypassed"], disks.map((d) => [d.name, String(d.threads), number(d.value),
    number(d.us_per_read), d.bypassed ? "yes" : element("span", "NO: memory was measured", {class: "loud"})]));
}

// ---- all of it ----

function draw() {
  readState();
  dark = state.theme === "dark" || (state.theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  at("theme").textContent = `Theme: ${state.theme}`;
  const all = data.series.filter((s) => s.fingerprint === state.machine);
  const machines = unique([...data.machines, ...data.series].map((x) => x.fingerprint));
  select("machine", machines, state.machine, (f) => {
    const m = data.machines.find((x) => x.fingerprint === f);
    return m ? `${m.cpu}, ${m.cpus} CPUs (${f.slice(0, 4)})` : f;
  });
  select("isa", ["all", ...unique(all.map((s) => s.isa))], state.isa);
  select("threads", ["all", ...unique(all.map((s) => String(s.threads))).sort((a, b) => a - b)], state.threads);
  select("bench", unique(shown().map((s) => s.name)), state.bench);
  select("model", unique(nvmeLines().map(modelOf)), state.model);
  document.querySelector(`input[name=by][value=${state.by}]`).checked = true;
  [drawNews, drawTrend, drawAll, drawRoofline, drawCounts, drawNvme, drawMachine].forEach((part) => part());
}

for (const id of ["machine", "isa", "threads", "bench", "model"]) {
  at(id).addEventListener("change", () => setState({[id]: at(id).value}));
}
document.querySelectorAll("input[name=by]").forEach((radio) => radio.addEventListener("change",
  () => setState({by: radio.value})));
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("theme").addEventListener("click", () => setState({theme: {system: "light", light: "dark", dark: "system"}[state.theme]}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
window.addEventListener("hashchange", draw);
draw();
