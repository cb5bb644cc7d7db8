"""Write the tables of README.md and docs/performance.md, between their markers, from the files in benchmarks/results.

    kda bench -o json > benchmarks/results/bench.json
    kda ceiling --config kimi_linear_48b --quant q4g --disk . --cache-gib 8 -o json > benchmarks/results/ceiling.json
    pytest benchmarks/test_rivals.py benchmarks/test_epilogue.py --benchmark-json=benchmarks/results/rivals.json
    pytest benchmarks/test_torch.py --benchmark-json=benchmarks/results/torch.json
    python benchmarks/counts.py
    python benchmarks/render.py
"""

import json
import re
from pathlib import Path

from kda.perf import bench, ceiling
from kda.perf.bench import significant

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def rivals(result):
    """A row per rival, shape and thread count, from pytest-benchmark's JSON."""
    lines = ["|  | by | threads | us/token | kda us/token | ratio | error | kda's error |",
             "|---|---|---:|---:|---:|---:|---:|---:|"]
    for info in (entry["extra_info"] for entry in result["benchmarks"] if "rival" in entry["extra_info"]):
        lines.append(f"| {info['what']} | {info['rival']} | {info['threads']} "
                     f"| {significant(info['rival_us_per_token'])} | {significant(info['us_per_token'])} "
                     f"| {info['rival_over_kda']:.1f} | {info['rival_error']:.0e} | {info['error']:.0e} |")
    return "\n".join(lines)


def tables():
    """The text between the markers."""
    ours = json.loads((RESULTS / "bench.json").read_text())
    others = json.loads((RESULTS / "rivals.json").read_text())
    where = f"`pytest benchmarks/test_rivals.py benchmarks/test_epilogue.py`, {others['datetime'][:10]}, the same " \
            f"machine, ISA {others['machine_info']['isa']}; in turn in one process, ratios of neighbouring rounds " \
            "(median); errors against float64, relative to the largest value:"
    return "\n\n".join([bench.render(ours, "md"), where, rivals(others), ceilings()])


def ceilings():
    """The limits of the machine, and what a model whose experts are on its disk can reach."""
    result = json.loads((RESULTS / "ceiling.json").read_text())
    model = ceiling.model_blocks(result["model"], "md")
    return "\n\n".join([bench.heading(result, "md"), ceiling.machine_table(result, "md"), model[0], model[-1]])


def transformers():
    """Before and after kda.adapters.hf.accelerate, from torch.json."""
    result = json.loads((RESULTS / "torch.json").read_text())
    infos = [entry["extra_info"] for entry in result["benchmarks"]]
    lines = [f"`pytest benchmarks/test_torch.py`, {result['datetime'][:10]}: {result['machine_info']['cpu']}, "
             f"{infos[0]['threads']} threads, ISA {infos[0]['isa']}, torch {infos[0]['torch']}, transformers "
             f"{infos[0]['transformers']}; in turn in one process, ratios of neighbouring rounds (median):", "",
             "| Kimi-Linear's size, float32 model | transformers us/token | kda us/token | ratio |",
             "|---|---:|---:|---:|"]
    lines += [f"| {info['what']} | {significant(info['before_us_per_token'])} | {significant(info['us_per_token'])} "
              f"| {info['before_over_kda']:.1f} |" for info in infos]
    return "\n".join(lines)


# ---- docs/performance.md ----

BASE = {"avx512vnni": "avx512", "avx512bf16": "avx512vnni", "dotprod": "neon", "i8mm": "dotprod"}


def counts():
    return json.loads((RESULTS / "counts.json").read_text())


def loops_of(isa):
    """The counted loops of one ISA; of one that adds instructions to another, those that it has of its own."""
    every = counts()["loops"]
    rows, base = every[isa], every.get(BASE.get(isa), {})

    def own(what, row):
        return what not in base or {**row, "mca": 0} != {**base[what], "mca": 0}

    cpus = list(next(iter(rows.values()))["mca"])
    lines = ["| loop | a round takes | instructions | multiplies | loads | stores | on the stack | copies | "
             + " | ".join(f"{cpu}: cycles (multiplies alone), busiest" for cpu in cpus) + " |",
             "|---|---|---:|---:|---:|---:|---:|---:|" + "---|" * len(cpus)]
    for what, row in rows.items():
        if own(what, row):
            unit = row["unit"] + ("" if row["unit"] == "MAC" else "s")
            numbers = [str(row[name]) for name in ("instructions", "multiplies", "loads", "stores", "stack", "copies")]
            models = [f"{m['cycles']:g} ({m['multiplies_alone']:g}), {m['busiest']}" for m in row["mca"].values()]
            takes = f"{row['takes']:g} {unit}"
            lines.append(f"| {' | '.join([what, takes, *numbers, *models])} |")
    return "\n".join(lines)


def executed():
    """Instructions of whole calls, aarch64 beside avx2."""
    every = counts()["calls"]
    lines = ["| call | per | avx2 | neon | neon / avx2 | dotprod | i8mm |", "|---|---|---:|---:|---:|---:|---:|"]
    for kernel, ours in every["avx2"].items():
        cells = [f"{every[isa][kernel]['per_unit']:.3g}" if kernel in every[isa] else "as neon"
                 for isa in ("dotprod", "i8mm")]
        neon = every["neon"][kernel]["per_unit"]
        lines.append(f"| {kernel} | {ours['unit']} | {ours['per_unit']:.3g} | {neon:.3g} "
                     f"| {neon / ours['per_unit']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


LIMITS = {"share_of_fma": "multiply pipes, 4 operations a state element",
          "share_of_inplace": "in-place pass, same bytes",
          "share_of_fma_by_definition": "FMA peak, 3 K V a token", "share_of_read": "reading the same bytes",
          "share_of_int8": "int8 peak of q8", "share_of_copy": "copying as many bytes",
          "share_of_peaks": "int8 and FMA peaks"}


def measured():
    """Every share of bench.json, with its limit."""
    result = json.loads((RESULTS / "bench.json").read_text())
    lines = [bench.heading(result, "md"), "", "| call | threads | limit | share |", "|---|---:|---|---:|"]
    lines += [f"| {row['name']} | {row['threads']} | {LIMITS[name]} | {row[name]:.0%} |" for row in result["rows"]
              for name in row if name in LIMITS]
    return "\n".join(lines)


def avx512():
    """What the counts say of the cells that ask for AVX-512."""
    loops = counts()["loops"]
    pending, tile = loops["avx512"]["step with a pending update"], loops["avx512"]["block, tile"]
    two, half = loops["avx512"]["step, read"], loops["avx512bf16"]["block_bf16, tile"]
    silu, sums = loops["avx512"]["conv, SiLU"], loops["avx512"]["conv, sums"]
    one, full = loops["avx512vnni"]["idot q8, one token"], loops["avx512vnni"]["idot q8, full block"]
    ordinary = sum(row["mca"]["skylake-avx512"]["cycles"] for row in (two, loops["avx512"]["step, write"]))

    def share(row, cpu):
        return f"{row['mca'][cpu]['multiplies_alone'] / row['mca'][cpu]['cycles']:.0%}"

    def bytes_a_cycle(nbytes, cycles):
        return f"{nbytes / cycles:.0f} bytes a cycle"

    cycles = pending["mca"]["skylake-avx512"]["cycles"]
    conv_cycles = silu["mca"]["skylake-avx512"]["cycles"] + sums["mca"]["skylake-avx512"]["cycles"]
    rows = [
        ("decode, one layer: 90 % of the FMA bound",
         f"{pending['multiplies']} multiplies, {pending['loads']} loads, {pending['stores']} stores per "
         f"{pending['takes']:g} elements",
         f"in L1 {share(pending, 'skylake-avx512')} of two multiply pipes (skylake-avx512; two passes: "
         f"{16 / ordinary:.0%}); that needs {bytes_a_cycle(8 * pending['takes'], cycles)} of S in and out: the cache "
         "that holds its 2 MiB binds where it moves less"),
        ("decode, 20 layers: 80 % of the in-place pass", f"{8 * pending['takes']:g} bytes of S per round",
         "memory: the same bytes as the in-place pass, one pass over S"),
        ("decode of 8 sessions, T = 2..16", "as one layer; of a block S is read and written once",
         "memory, then the multiply pipes"),
        ("prefill float32: 75 % of the FMA peak",
         f"{tile['multiplies']} multiplies, {tile['loads']} loads per {tile['takes']:g} MAC",
         f"the tile {share(tile, 'skylake-avx512')} of two pipes, {share(tile, 'znver4')} of znver4's; beside it the "
         "coefficients and the substitution, about a tenth of the multiplies"),
        ("prefill bf16: 1.5x of that", f"{half['multiplies']} multiplies per {half['takes']:g} MAC",
         "vdpbf16ps does two MAC a lane, so 2x of the tile where it issues as often as vfmadd (Zen 4 by AMD's tables; "
         f"llvm-mca's znver4 takes {half['mca']['znver4']['cycles']:g} cycles for the {half['multiplies']} and "
         f"{tile['mca']['znver4']['cycles']:g} for as many vfmadd), 1x where half as often (its sapphirerapids: "
         f"{half['mca']['sapphirerapids']['cycles']:g}): there only tiles (amx) reach it"),
        ("conv + SiLU, T = 1024: 1.5x of a read and write pass",
         f"{sums['instructions'] + silu['instructions']} instructions per {silu['takes']:g} values",
         f"{bytes_a_cycle(8 * silu['takes'], conv_cycles)}: the pipes, where memory gives more to a core than that"),
        ("IDOT, one token", f"{one['loads']} loads, {one['dots']} dots per {one['takes']:g} weights",
         f"{bytes_a_cycle(one['takes'], one['mca']['icelake-server']['cycles'])} of weights: memory"),
        ("IDOT, 512 tokens", f"{full['loads']} loads, {full['dots']} dots per {full['takes']:g} MAC, none on the stack",
         f"{share(full, 'icelake-server')} of the dots' ports (icelake-server): loads, two a cycle, next to the dots"),
    ]
    return "\n".join(["| cell | counted | what it would meet (not timed) |", "|---|---|---|",
                      *(f"| {' | '.join(row)} |" for row in rows)])


def documents():
    """{file: {marker: text}}."""
    return {"README.md": {"results": tables(), "transformers": transformers()},
            "docs/performance.md": {"measured": measured(), "executed": executed(), "avx512 cells": avx512(),
                                    **{f"loops of {isa}": loops_of(isa) for isa in counts()["loops"]}}}


def updated(name):
    """The text of README.md or docs/performance.md with fresh tables. ValueError for a table without a place."""
    document = (ROOT / name).read_text()
    for marker, text in documents()[name].items():
        document, places = re.subn(rf"(<!-- {marker} -->\n).*(\n<!-- end of {marker} -->)",
                                   lambda m, text=text: m[1] + text + m[2], document, flags=re.DOTALL)
        if places != 1:
            raise ValueError(f"{name}: expected one place for {marker}, found {places}")
    return document


if __name__ == "__main__":
    for name in documents():
        (ROOT / name).write_text(updated(name))
