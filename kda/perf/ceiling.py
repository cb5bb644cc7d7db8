"""`kda ceiling`: what this machine can do at most, its disk, and a model whose experts are on that disk."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kda.config import KDAConfig
from kda.perf import bench, disk, limits, nvme
from kda.perf.bench import lay_out, significant
from kda.perf.compare import CROWDED
from kda.perf.noise import watch_others
from kda.plan import Plan, bandwidth_of, plan
from kda.runtime import available_cpus

FORMATS = ("f32", "bf16", "q8g", "q4g", "vq3r")  # --quant

Progress = Callable[[int, int, str], None]


def planned(config: KDAConfig, quant: str, context: int) -> Plan:
    """The plan of a model with weights and experts in one format; vq3r is for experts only, the rest is q8g then."""
    return plan(config, context, weight_format="q8g" if quant == "vq3r" else quant, expert_format=quant)


def chosen_trace(name: str | None, config: KDAConfig) -> tuple[nvme.Trace | None, list[str]]:
    """(the trace to replay, remarks): a file, "synthetic", or the shipped one if it is of a model like this."""
    if name == "synthetic":
        return nvme.synthetic_trace(config), []
    trace = nvme.read_trace(Path(name) if name else None)
    try:
        nvme.check_trace(trace, config)
    except ValueError:
        if name:
            raise
        return None, ["No routing trace of this model is shipped, so only the row without a cache is shown. "
                      "--trace FILE replays one; --trace synthetic draws experts uniformly."]
    return trace, []


def run(config: KDAConfig | None = None, where: str | None = None, bandwidth: str | None = None, quant: str = "q8g",
        context: int = 4096, cache_gib: Sequence[float] = (), trace: str | None = None, isa: str | None = None,
        seconds: float = 1.0, file_bytes: int = 2**30, progress: Progress | None = None,
        command: str = "kda ceiling") -> dict[str, Any]:
    """{"machine", "command", "date", "ceilings", "meaning", "disk", "model", "remarks"}, ready for JSON.

    where : folder or file on the disk to be measured. bandwidth : its speed, instead of measuring. With a config one
    of them must be given. The record that the disk is read in is the model's expert, or 4 MiB.

    Raises OSError and ValueError as disk.measure and nvme.ceiling do.
    """
    remarks: list[str] = []
    model: Plan | None = None
    replayed: nvme.Trace | None = None
    record = 2**22
    if config is not None:
        if (where is None) == (bandwidth is None):
            raise ValueError("--config needs the disk that holds the experts: --disk DIR to measure it, or --bandwidth "
                             "SPEED")
        model = planned(config, quant, context)
        record = nvme.record_bytes(model)
        replayed, remarks = chosen_trace(trace, config)
    speed = 0.0 if bandwidth is None else bandwidth_of(bandwidth)
    others = watch_others()
    rows = limits.measure(isa, seconds / 2, progress)
    taken, cpus = others(), available_cpus()
    if taken is not None and taken > CROWDED:
        remarks.append(f"Other processes took {taken:.1f} of {cpus} CPUs meanwhile: these ceilings are too low, "
                       "measure again.")
    disk_rows: list[disk.DiskRow] = []
    if where is not None:
        disk_rows = disk.measure(where, record, seconds=seconds, file_bytes=file_bytes, progress=progress)
    source = f"{bandwidth} (given)"
    if disk_rows:
        best = disk.fastest(disk_rows)
        speed = best.GB_per_s * 1e9
        source = f"{best.GB_per_s:.2f} GB/s ({best.pattern}, queue depth {best.queue_depth}" + (
            "" if best.bypassed else f"; THROUGH THE PAGE CACHE: {best.why}") + ")"
    bound = None
    if model is not None:
        machine = nvme.measure_machine(model, speed, source, isa, seconds)
        sizes = nvme.cache_sizes(model, [n * 2**30 for n in cache_gib])
        bound = nvme.ceiling(model, machine, replayed, sizes)
    return {
        "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": bench.machine(isa),
        "ceilings": rows, "meaning": limits.MEANING, "disk": disk.to_dicts(disk_rows),
        "model": None if bound is None else bound.to_dict(), "remarks": remarks,
    }


# ---- tables ----

def render(result: dict[str, Any], form: str) -> str:
    """The result as "text" or "md"."""
    blocks = [bench.heading(result, form), machine_table(result, form)]
    blocks.append(note("Medians, in brackets the best sample. " + ". ".join(
        f"{name}: {text}" for name, text in result["meaning"].items()) + ".", form))
    if result["disk"]:
        blocks += disk_blocks(result["disk"], form)
    if result["model"]:
        blocks += model_blocks(result["model"], form)
    return "\n\n".join([*blocks, *(note(remark, form) for remark in result["remarks"])])


def machine_table(result: dict[str, Any], form: str) -> str:
    """The ceilings by number of threads."""
    teams = sorted({row["threads"] for row in result["ceilings"]})
    table = [["ceiling (higher is better)", "unit", *(f"{n} thread{'s' if n > 1 else ''} (best)" for n in teams)]]
    for name in limits.MEANING:
        found = {row["threads"]: row for row in result["ceilings"] if row["name"] == name}
        if found:
            table.append([name, next(iter(found.values()))["unit"],
                          *(f"{found[n]['median']:.1f} ({found[n]['best']:.1f})" if n in found else "-"
                            for n in teams)])
    return "\n".join(lay_out(table, form))


def note(text: str, form: str) -> str:
    """A paragraph."""
    return text if form == "md" else textwrap.fill(text, 110)


def disk_blocks(rows: Sequence[dict[str, Any]], form: str) -> list[str]:
    """The table of the disk, and a loud word if the page cache was read."""
    table = [["disk", "record B", "queue depth", "GB/s", "reads/s", "us/read (p99)", "bypassed", "fio GB/s"]]
    table += [[row["pattern"], f"{row['record_bytes']:,}", str(row["queue_depth"]), f"{row['GB_per_s']:.2f}",
               significant(row["reads_per_s"]), f"{significant(row['us_per_read'])} "
               f"({significant(row['us_per_read_p99'])})", str(row["bypassed"]).lower(),
               f"{row['fio_GB_per_s']:.2f}" if row["fio_GB_per_s"] else "-"] for row in rows]
    blocks = ["\n".join(lay_out(table, form)), note(
        "GB is 10^9 bytes; queue depth: threads that each wait for one read. bypassed: read with O_DIRECT past the "
        "page cache. What the disk or a virtual machine's host caches cannot be seen from here.", form)]
    loud = sorted({row["why"] for row in rows if not row["bypassed"]})
    if loud:
        blocks.append(note(f"WARNING: THE PAGE CACHE WAS NOT BYPASSED ({'; '.join(loud)}). These speeds are memory's, "
                           "not a disk's.", form))
    return blocks


def model_blocks(model: dict[str, Any], form: str) -> list[str]:
    """What a token costs, the table by cache size, and a bar for each."""
    machine, trace = model["machine"], model["trace"]
    head = (f"{model['model']}, experts {model['expert_format']}, other weights {model['weight_format']}: "
            f"{model['moe_layers']} layers x top {model['top_k']} of {model['experts']} x {model['record_bytes']:,} B "
            f"= {model['bytes_per_token']:,} B per token. Disk {machine['disk']}. Without the disk a token takes at "
            f"least {significant(1e3 * model['compute_s'])} ms: {significant(1e3 * machine['kda_s'])} ms are the delta "
            f"rule of all KDA layers, measured now; the rest is bound by {model['compute_bound_by']} "
            f"({machine['memory_bytes_per_s'] / 1e9:.1f} GB/s, {machine['mac_per_s'] / 1e9:.1f} GMAC/s measured).")
    blocks = [note(head, form)]
    if trace:
        blocks.append(note(
            f"Trace {trace['name']}: {trace['tokens']} tokens of {trace['records_per_token']} records; its working "
            f"set is {trace['working_set']:,} records, {gib(trace['working_set_bytes'])}. A cache smaller than one "
            f"token's {gib(trace['records_per_token'] * model['record_bytes'])} hits nothing under LRU. Hit rate: of "
            "the second half of the trace, and in brackets of the whole from an empty cache.", form))
    table = [["cache", "size", "records", "hit rate (cold)", "MB read/token", "tokens/s of the disk alone", "serial",
              "overlapped", "bound by", "KDA's share"]]
    for row in model["rows"]:
        alone = f"{row['disk_alone']:.4g}" if row["disk_alone"] else "-"
        table.append([row["policy"], gib(row["cache_bytes"]), f"{row['records']:,}",
                      f"{row['hit_rate']:.1%} ({row['hit_rate_cold']:.1%})", f"{row['bytes_read'] / 1e6:,.1f}", alone,
                      f"{row['serial']:.4g}", f"{row['overlapped']:.4g}", row["bound_by"],
                      f"{row['kda_share_overlapped']:.2%}"])
    blocks.append("\n".join(lay_out(table, form)))
    blocks.append(note("tokens/s at most, higher is better; serial: reading and computing take turns; overlapped: the "
                       "longer of the two. KDA's share: of a token's time, overlapped.", form))
    if form == "text" and len(model["rows"]) > 2:
        top = max(row["overlapped"] for row in model["rows"])
        bars = [[f"{row['policy']} {gib(row['cache_bytes'])}",
                 f"{row['overlapped']:8.4g}  " + "#" * max(1, round(50 * row["overlapped"] / top))]
                for row in model["rows"]]
        width = max(len(label) for label, _ in bars)
        blocks.append("\n".join(["cache against tokens/s, overlapped:", *(f"{a:{width}}  {b}" for a, b in bars)]))
    first = model["rows"][0]
    blocks.append(note(f"KDA costs {100 * first['kda_share_overlapped']:.2g} % of a token without a cache, bound by "
                       f"{first['bound_by']}.", form))
    return blocks


def gib(nbytes: float) -> str:
    """A size in GiB, 2^30 bytes."""
    return f"{nbytes / 2**30:.2f} GiB"
