"""The `kda` command: info, check, plan, ceiling, bench, compare, history, dashboard."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import kda
from kda import check, runtime
from kda.perf import bench, ceiling, compare, dashboard, history, instructions, nvme, results
from kda.plan import EXPERT_FORMATS, STATE_DTYPES, WEIGHT_FORMATS, render

SHIPPED = ("kimi_linear_48b", "kimi_k3")  # in kda/data


CONFIG = f"a config.json, a directory that holds one, or one of the shipped {', '.join(SHIPPED)}"


def contexts(text: str) -> list[int]:
    """The argument of --context."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token counts like 4096,1048576, got {text!r}") from None


def parser() -> argparse.ArgumentParser:
    """The arguments of every subcommand."""
    top = argparse.ArgumentParser(prog="kda", description="Kimi Delta Attention on CPUs.")
    top.add_argument("--version", action="version", version=f"kda {kda.__version__}")
    commands = top.add_subparsers(dest="command", required=True,
                                  metavar="info | check | plan | ceiling | bench | compare | history | dashboard")

    info = commands.add_parser("info", help="the ISA chosen and why, the others, threads and caches")
    info.add_argument("-o", "--output", choices=["text", "json"], default="text")
    info.set_defaults(run=run_info)

    checks = commands.add_parser(
        "check", help="compare every ISA of this machine with the float64 reference and stored results",
        description="Exit status 1 if any error exceeds its bound or is NaN.")
    checks.set_defaults(run=run_check)

    planner = commands.add_parser(
        "plan", help="memory, work and traffic of a model, from its config.json",
        description="Memory for state and weights, MAC, FLOP and bytes per token, and what grows with the context; "
                    "with --bandwidth also what a disk allows that holds the routed experts.")
    planner.add_argument("config", metavar="CONFIG", help=CONFIG)
    planner.add_argument("--context", type=contexts, default=[4096], metavar="N[,N...]", help="tokens; default: 4096")
    planner.add_argument("--batch", type=int, default=1, metavar="N", help="sequences; default: 1")
    planner.add_argument("--format", choices=WEIGHT_FORMATS, default="q8g", help="of the weights; default: q8g")
    planner.add_argument("--experts", choices=EXPERT_FORMATS, help="of the routed experts; default: --format")
    planner.add_argument("--state", choices=STATE_DTYPES, default="float32", help="dtype of S; default: float32")
    planner.add_argument("--bandwidth", metavar="SPEED", help="of the disk, like 12.78GB/s or 11.9GiB/s")
    planner.add_argument("--hit-rate", type=float, default=0.0, metavar="SHARE", help="of expert bytes found in memory")
    planner.add_argument("-o", "--output", choices=["text", "md", "json"], default="text")
    planner.set_defaults(run=run_plan)

    limits = commands.add_parser(
        "ceiling", help="this machine's limits: memory, caches, multiply-adds, a disk, and a model bound by that disk",
        description="Reading memory and the caches, in-place passes, float32 and int8 multiply-adds in registers, per "
                    "number of threads. --disk also measures a disk, past the page cache. --config adds what a model "
                    "whose experts are on that disk can reach: a routing trace replayed over caches of several sizes, "
                    "what binds, and how much of a token's time is KDA's.")
    limits.add_argument("--disk", metavar="PATH", help="a folder, where a test file is written and deleted, or a file "
                                                       "to be read")
    limits.add_argument("--file-gib", type=float, default=1.0, metavar="N", help="of the test file; default: 1")
    limits.add_argument("--config", metavar="CONFIG", help=CONFIG)
    limits.add_argument("--bandwidth", metavar="SPEED", help="of a disk that is not here, like 12.78GB/s")
    limits.add_argument("--quant", choices=ceiling.FORMATS, default="q8g",
                        help="format of experts and weights; vq3r: of the experts, other weights q8g; default: q8g")
    limits.add_argument("--context", type=int, default=4096, metavar="N", help="tokens; default: 4096")
    limits.add_argument("--cache-gib", type=float, action="append", default=[], metavar="N",
                        help="a size of the experts' cache in memory, in GiB, besides those shown anyway; repeatable")
    limits.add_argument("--trace", metavar="FILE", help="routing to replay, one token a line: {\"layers\": [[expert "
                        "ids], ...]}; or `synthetic`; default: the shipped one, if it fits the model")
    limits.add_argument("--plot", metavar="FILE.html", help="the model's curve as a page (needs plotly)")
    limits.add_argument("--seconds", type=float, default=1.0, metavar="N", help="for each measurement; default: 1")
    limits.add_argument("-o", "--output", choices=["text", "md", "json"], default="text")
    limits.set_defaults(run=run_ceiling)

    measure = commands.add_parser(
        "bench", help="time decode, prefill and the epilogues of Kimi-Linear and K3 beside this machine's limits",
        description="One decode step of Kimi-Linear (one KDA layer, all 20) and of K3 (one layer, all 69); prefill of "
                    "one Kimi-Linear layer, and everything between its projections in one pass; the short convolution "
                    "and the gated norm; on 1 thread and on all. The limits are measured in the same process, in turn "
                    "with the calls.")
    measure.add_argument("-o", "--output", choices=["text", "md", "json"], default="text")
    measure.add_argument("--quick", action="store_true",
                         help="6 seconds instead of 25, without K3's 69 layers and the prompt of 8,192 tokens")
    measure.add_argument("--instructions", action="store_true",
                         help="also count the kernels' instructions with valgrind (minutes; no AVX-512); for -o json")
    measure.set_defaults(run=run_bench)

    against = commands.add_parser(
        "compare", help="two result files: what became slower, the machine's own drift taken out",
        description="Joins two files of `kda bench -o json` or of pytest-benchmark by name, ISA and threads. A row is "
                    "judged by its speed relative to what was timed in turn with it, where both files have that. Exit "
                    "status 1 if a row is slower or a counter (MAC, FLOP, bytes, instructions) changed, 2 if the files "
                    "are of different machines.")
    against.add_argument("old", metavar="OLD.json")
    against.add_argument("new", metavar="NEW.json")
    against.add_argument("--tolerance", type=float, default=compare.TOLERANCE, metavar="SHARE",
                         help=f"slower by less is not reported; default: {compare.TOLERANCE:g}")
    against.add_argument("--other-machine", action="store_true", help="compare relative speeds of different machines")
    against.add_argument("-o", "--output", choices=["text", "md"], default="text")
    against.set_defaults(run=run_compare)

    past = commands.add_parser("history", help="results over commits in one file, and exports of it")
    deeds = past.add_subparsers(dest="deed", required=True, metavar="add | export")
    adding = deeds.add_parser("add", help="put result files into a history, in place of those of the same commit",
                              description="Takes JSON of `kda bench`, `kda ceiling` and pytest-benchmark.")
    adding.add_argument("history", metavar="HISTORY.jsonl")
    adding.add_argument("results", nargs="+", metavar="RESULT.json")
    adding.add_argument("--commit", metavar="HASH", help="default: HEAD of the git checkout here")
    adding.add_argument("--date", metavar="ISO8601", help="of the commit; with --commit; default: that of the result")
    export = deeds.add_parser("export", help="the benchmarks of one commit for another tool, on standard output")
    export.add_argument("history", metavar="HISTORY.jsonl")
    export.add_argument("--to", choices=list(history.EXPORTS), required=True)
    export.add_argument("--commit", metavar="HASH", help="default: the last in the file")
    past.set_defaults(run=run_history)

    page = commands.add_parser("dashboard", help="one static page of a history: trends, roofline, counts, the disk",
                               description="Needs plotly: pip install 'kda-kernels[dashboard]'. The page needs nothing "
                                           "else and no network.")
    page.add_argument("history", metavar="HISTORY.jsonl")
    page.add_argument("-o", "--output", required=True, metavar="DIR", help="index.html is written there")
    page.set_defaults(run=run_dashboard)

    for command in (checks, limits, measure):
        command.add_argument("--isa", metavar="NAME", help="one of kda.isas(); default: "
                             + ("all that run here" if command is checks else "the one of kda info"))
        command.add_argument("--threads", type=int, metavar="N", help="at most N threads; default: kda info's")
    return top


def run_info(args: argparse.Namespace) -> int:
    """`kda info`"""
    if args.output == "json":
        print(json.dumps({"version": kda.__version__, **runtime.runtime_info()}, indent=2))
    else:
        print(f"kda        {kda.__version__}")
        runtime.show_runtime()
    return 0


def run_check(args: argparse.Namespace) -> int:
    """`kda check`"""
    results, seconds = check.run([args.isa] if args.isa else None, progress=bench.progress_bar())
    print(check.render(results, seconds))
    return 0 if all(r.passed for r in results) else 1


def read_config(name: str) -> kda.KDAConfig:
    """The model that CONFIG names."""
    path = Path(name)
    if name in SHIPPED and not path.exists():
        path = Path(str(files("kda").joinpath("data", f"{name}.json")))
    return kda.KDAConfig.from_hf(path)


def run_plan(args: argparse.Namespace) -> int:
    """`kda plan`"""
    try:
        config = read_config(args.config)
        plans = [kda.plan(config, n, args.batch, args.format, expert_format=args.experts, state_dtype=args.state)
                 for n in args.context]
        disk = None
        if args.bandwidth is not None:
            read = plans[0].expert_read_bytes_per_token
            if read is None:
                raise ValueError("--bandwidth: the config has no routed experts, or not their size")
            disk = kda.nvme_ceiling(read, args.bandwidth, args.hit_rate)
    except (OSError, ValueError) as wrong:
        return refused("plan", wrong)
    if args.output == "json":
        bound = None if disk is None else {"tokens_per_s": float(disk), "bandwidth": args.bandwidth,
                                           "hit_rate": args.hit_rate, "bytes_read_per_token": disk.bytes_read}
        print(json.dumps({"plans": [p.to_dict() for p in plans], "nvme": bound}, indent=2))
        return 0
    print(render(plans, args.output == "md"))
    if disk is not None:
        print(f"\nExperts on a disk of {args.bandwidth}, hit rate {args.hit_rate:g}: "
              f"{disk.bytes_read:,.0f} B per token, at most {disk:.4f} tokens/s (disk alone).")
    return 0


def refused(command: str, why: object) -> int:
    """Exit status 2, after a line that says why."""
    print(f"kda {command}: {why}", file=sys.stderr)
    return 2


def run_ceiling(args: argparse.Namespace) -> int:
    """`kda ceiling`"""
    words = ["kda ceiling"]
    for name in ("disk", "config", "bandwidth", "quant", "trace", "isa", "threads"):
        value = getattr(args, name)
        if value is not None and not (name == "quant" and args.config is None):
            words.append(f"--{name} {value}")
    words += [f"--cache-gib {n:g}" for n in args.cache_gib]
    try:
        config = None if args.config is None else read_config(args.config)
        result = ceiling.run(config, args.disk, args.bandwidth, args.quant, args.context, args.cache_gib, args.trace,
                             args.isa, args.seconds, round(args.file_gib * 2**30), bench.progress_bar(),
                             " ".join(words))
        if args.plot:
            if result["model"] is None:
                raise ValueError("--plot: needs --config")
            nvme.figure(result["model"]).write_html(args.plot, include_plotlyjs=True)
    except ImportError:
        return refused("ceiling", "--plot needs plotly: pip install 'kda-kernels[dashboard]'")
    except (OSError, ValueError) as wrong:
        return refused("ceiling", wrong)
    print(json.dumps(result, indent=2) if args.output == "json" else ceiling.render(result, args.output))
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """`kda bench`"""
    words = ["kda bench", f"-o {args.output}" if args.output != "text" else "", "--quick" if args.quick else "",
             f"--isa {args.isa}" if args.isa else "", f"--threads {args.threads}" if args.threads else "",
             "--instructions" if args.instructions else ""]
    counted: list[int] = []
    if args.instructions:
        try:
            counted = instructions.count(args.quick, args.isa or runtime.chosen_isa())
        except OSError as wrong:
            return refused("bench --instructions", wrong)
    result = bench.run(args.quick, args.isa, bench.progress_bar(), " ".join(filter(None, words)), counted)
    print(json.dumps(result, indent=2) if args.output == "json" else bench.render(result, args.output))
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """`kda compare`"""
    try:
        found = compare.compare(results.read(args.old), results.read(args.new), args.tolerance, args.other_machine)
    except (OSError, ValueError) as wrong:
        return refused("compare", wrong)
    print(compare.render(found, args.output))
    return 1 if found.failed else 0


def run_history(args: argparse.Namespace) -> int:
    """`kda history`"""
    try:
        if args.deed == "export":
            lines = history.benchmarks(history.read(args.history), args.commit)
            print(json.dumps(history.EXPORTS[args.to](lines), indent=2))
            return 0
        commit, date = (args.commit, args.date) if args.commit else history.git_commit()
        new = [line for path in args.results for line in history.lines_of(path, commit, date)]
        added, replaced = history.add(args.history, new)
    except (OSError, ValueError) as wrong:
        return refused(f"history {args.deed}", wrong)
    print(f"{args.history}: {added} lines added, {replaced} replaced, commit {commit[:10]}")
    return 0


def run_dashboard(args: argparse.Namespace) -> int:
    """`kda dashboard`"""
    try:
        path = dashboard.write(history.read(args.history), Path(args.output))
    except ImportError:
        return refused("dashboard", "needs plotly: pip install 'kda-kernels[dashboard]'")
    except (OSError, ValueError) as wrong:
        return refused("dashboard", wrong)
    print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status.

    0; 1 for a failed check or a slower kernel; 2 for a request that cannot be met; 141 (128 + SIGPIPE, as the shell
    has it) if whoever read the output stopped reading.
    """
    args = parser().parse_args(argv)
    for option, use in (("isa", runtime.isa_index), ("threads", runtime.set_num_threads)):
        value = getattr(args, option, None)
        try:
            if value is not None:
                use(value)
        except ValueError as wrong:
            print(f"kda {args.command} --{option}: {wrong}", file=sys.stderr)
            return 2
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails too
        return 141
    return status
