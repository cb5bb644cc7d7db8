"""Write the measured tables into README.md, between its markers, from the files in benchmarks/results.

    kda bench -o json > benchmarks/results/bench.json
    kda ceiling --config kimi_linear_48b --quant q4g --disk . --cache-gib 8 -o json > benchmarks/results/ceiling.json
    pytest benchmarks/test_rivals.py benchmarks/test_epilogue.py --benchmark-json=benchmarks/results/rivals.json
    pytest benchmarks/test_torch.py --benchmark-json=benchmarks/results/torch.json
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


def updated(readme):
    """README text with fresh tables."""
    for name, text in (("results", tables()), ("transformers", transformers())):
        readme = re.sub(rf"(<!-- {name} -->\n).*(\n<!-- end of {name} -->)", lambda m, text=text: m[1] + text + m[2],
                        readme, flags=re.DOTALL)
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text()))
