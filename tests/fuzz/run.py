"""Runs the targets of targets.py: with atheris, guided by coverage, or without it, by a fixed sequence of mutations.

    python tests/fuzz/run.py                               every target, 2,000 inputs each, no atheris needed
    python tests/fuzz/run.py -k session --runs 100000 --seed 7
    python tests/fuzz/run.py --atheris --seconds 300       five minutes for each target

An input that breaks a promise is written to crash-TARGET-SEED (by atheris to crash-HASH) and its traceback printed;
give it as --replay FILE, with -k TARGET, to see it again. Exit status 1 if there was one. For the C below, build with
sanitizers first, as CONTRIBUTING.md says.
"""
import argparse
import faulthandler
import os
import random
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
HANGS = 60  # seconds for one input
LARGEST = 1 << 16  # bytes of an input


def targets(args):
    """{name: Target} of those asked for; the package instrumented where atheris is to guide."""
    if args.atheris:
        import atheris
        with atheris.instrument_imports(include=["kda"]):
            import targets
    else:
        import targets
    return {name: target for name, target in targets.TARGETS.items() if args.k in name}


def plain(name, target, args):
    """Mutations of the seeds, and of those mutations; returns whether a promise was broken."""
    from targets import mutated

    rng = random.Random(args.seed)
    pool = list(target.seeds())
    tried, end = 0, time.monotonic() + args.seconds
    inputs = iter(pool[:])
    while tried < args.runs and time.monotonic() < end:
        data = next(inputs, None) or mutated(rng.choice(pool), rng)[:LARGEST]
        tried += 1
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            target.one(data)
        except Exception:
            path = Path(f"crash-{name}-{args.seed}")
            path.write_bytes(data)
            traceback.print_exc()
            print(f"{name}: input {tried} breaks a promise; it is in {path}")
            return True
        finally:
            faulthandler.cancel_dump_traceback_later()
        if rng.random() < 0.05 and len(pool) < 100:
            pool.append(data)
    print(f"{name}: {tried:,} inputs")
    return False


def guided(name, target, args):
    """atheris in a process of its own, which it ends itself; returns whether a promise was broken."""
    import atheris
    from targets import mutated

    corpus = Path(args.corpus) / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)

    def mutator(data, max_size, seed):
        if seed % 2:
            return atheris.Mutate(data, max_size)
        return mutated(data, random.Random(seed))[:max_size]

    process = os.fork()
    if process == 0:
        atheris.Setup([sys.argv[0], f"-runs={args.runs}", f"-seed={args.seed}", f"-max_total_time={args.seconds:.0f}",
                       f"-timeout={HANGS}", "-rss_limit_mb=4096", f"-max_len={LARGEST}", "-print_final_stats=1",
                       "-verbosity=1", str(corpus)], target.one, custom_mutator=mutator)
        atheris.Fuzz()
        os._exit(0)
    status = os.waitpid(process, 0)[1]
    print(f"{name}: {'BREAKS A PROMISE' if status else 'as promised'}", flush=True)
    return status != 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="TEXT", help="targets whose name holds this")
    parser.add_argument("--runs", type=int, default=None, metavar="N", help="inputs for each target")
    parser.add_argument("--seconds", type=float, default=None, metavar="N", help="at most, for each target")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage: pip install atheris")
    parser.add_argument("--corpus", default="fuzz-corpus", metavar="DIR", help="what atheris keeps, and goes on from")
    parser.add_argument("--replay", metavar="FILE", help="one input")
    args = parser.parse_args()
    args.runs = args.runs or (10**9 if args.seconds else 2000)
    args.seconds = args.seconds or 1e9
    chosen = targets(args)
    if args.replay:
        for target in chosen.values():
            target.one(Path(args.replay).read_bytes())
        return 0
    run = guided if args.atheris else plain
    return int(any([run(name, target, args) for name, target in chosen.items()]))


if __name__ == "__main__":
    sys.exit(main())
