"""Count what the kernels' inner loops are made of, and what whole calls execute; write benchmarks/results/counts.json.

    python benchmarks/counts.py [ISA...]

Nothing is timed and no CPU but an x86-64 one is needed, so the counts are the same on every machine with the same
compilers. Per ISA:

* loops: gcc's object file is taken apart, and in each kernel the innermost loop that does its work is counted:
  multiplies, loads, stores, and what should not be there (stack accesses, copies between registers). llvm-mca predicts
  its cycles on some CPUs, everything in L1, and what the multiplies alone would take there.
* calls (avx2 and aarch64): instructions that a whole call executes, by calls.c, counted by valgrind's callgrind and by
  QEMU in steps of one instruction: those of two calls less those of one.

Debian: gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross binutils llvm-19 valgrind qemu-user-static
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIMD = ROOT / "kda/_simd"
OUT = ROOT / "benchmarks/results/counts.json"
MCA = next((path for path in map(shutil.which, ("llvm-mca-19", "llvm-mca")) if path), "llvm-mca-19")

# ISA: (float lanes, the CPUs that llvm-mca is asked about)
ISAS = {
    "avx2": (8, ["znver3", "haswell", "skylake"]),
    "avx512": (16, ["skylake-avx512", "znver4"]),
    "avx512vnni": (16, ["icelake-server", "sapphirerapids", "znver4"]),
    "avx512bf16": (16, ["sapphirerapids", "znver4"]),
    "neon": (4, ["neoverse-n1", "neoverse-v1"]),
    "dotprod": (4, ["neoverse-n1", "neoverse-v1"]),
    "i8mm": (4, ["neoverse-v1", "neoverse-n2"]),
}
ARM = {"neon", "dotprod", "i8mm"}


class Loop:
    """An innermost loop: its instructions as text, and how many there are of each kind."""

    MULTIPLY = re.compile(r"vf(n?m)(add|sub)\d+|vmul[ps]s|vpmadd|vpdp|vdpbf16|fml[as]\b|fmul\b|sdot|smmla|smull|sadalp")
    DOT = re.compile(r"vpmaddubsw|vpdpbusd|vdpbf16|sdot|smmla|sadalp")
    FMA = re.compile(r"vf(n?m)(add|sub)\d+|fml[as]\b|vdpbf16")
    INTEGER = re.compile(r"(add|sub|cmp|test|inc|dec|lea|mov|movs[lx]\w*|movz\w*|shl|and|xor|j\w+|nop\w*|cs|data16|"
                         r"b|b\.\w+|cbn?z|sxtw|lsl|neg|subs|adds|madd|mul|imul\w*|sar|shr|tst|orr)\b")

    def __init__(self, lines):
        self.lines = lines
        self.counts = dict.fromkeys(("instructions", "multiplies", "loads", "stores", "prefetches", "vector_other",
                                     "integer", "stack", "copies"), 0)
        self.fma = self.dots = 0
        for line in lines:
            self.add(*[*line.split(None, 1), ""][:2])

    def add(self, name, operands):
        c = self.counts
        c["instructions"] += 1
        self.fma += bool(self.FMA.match(name))
        self.dots += bool(self.DOT.match(name))
        if name.startswith(("prefetch", "prfm")):
            c["prefetches"] += 1
            return
        arm_load, arm_store = re.match(r"ld", name), re.match(r"st", name)
        memory = ("(" in operands and not name.startswith(("lea", "nop"))) or arm_load or arm_store
        if memory:
            last = operands.rsplit(",", operands.count(",") and 1)[-1]
            is_store = bool(arm_store) or (not arm_load and operands.endswith(")") and "{1to" not in last
                                           and not name.startswith(("cmp", "test", "j")))
            number = 2 if name in ("ldp", "stp") else 1
            c["stores" if is_store else "loads"] += number
            c["stack"] += bool(re.search(r"\(%r[sb]p|\[sp", operands))
        if self.MULTIPLY.match(name):
            c["multiplies"] += 1
        elif self.INTEGER.match(name) and not re.search(r"%[xyz]mm|\bv\d+\.", operands):
            c["integer"] += 1
        elif not memory or not re.match(r"vmov|vbroadcast|ld|st|vpbroadcast", name):
            c["vector_other"] += 1
            c["copies"] += not memory and bool(re.match(r"vmov(ap|up|dq)\w*$", name)
                                               or (name == "mov" and re.fullmatch(r"(v\d+\.16b(, )?){2}", operands)))


def loops_of(objdump, path, function):
    """The innermost loops of a function, in the order of their addresses."""
    text = subprocess.run([objdump, "-d", "--no-show-raw-insn", "-w", f"--disassemble={function}", path], check=True,
                          capture_output=True, text=True).stdout
    code = []
    for line in text.splitlines():
        found = re.match(r"\s+([0-9a-f]+):\t(.*)", line)
        if found:
            code.append((int(found[1], 16), re.sub(r"\s+(# |//).*", "", found[2]).strip()))
    where = {address: i for i, (address, _) in enumerate(code)}
    targets, before = [], [[] for _ in code]  # where each instruction may jump; from where each is reached
    for i, (_, line) in enumerate(code):
        jump = re.match(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s+(?:.*,\s*)?([0-9a-f]+)(?: <|$)", line)
        targets.append(where.get(int(jump[1], 16)) if jump else None)
        if targets[i] is not None:
            before[targets[i]].append(i)
        if i + 1 < len(code) and not re.match(r"(jmp|b|ret\w*)\b(?!\.)", line):
            before[i + 1].append(i)
    loops = {}
    for i, target in enumerate(targets):
        if target is not None and target <= i:  # all from which the jump back is reached without passing its target
            body, ahead = {target, i}, [i] * (target != i)
            while ahead:
                new = [j for j in before[ahead.pop()] if j not in body]
                body.update(new)
                ahead += new
            if 0 not in body or target == 0:
                loops[target, i] = body
    inner = [body for at, body in loops.items() if not any(other < body for other in loops.values())]
    return [Loop([code[i][1] for i in sorted(body)]) for body in inner]


def most(loops, value, condition=lambda loop: True):
    """The loop with the largest value, of those that meet the condition."""
    return max((loop for loop in loops if condition(loop)), key=value, default=None)


def working_loops(objdump, path, lanes, isa):
    """{what: (loop, what one iteration takes, its unit)}."""
    def of(function):
        return loops_of(objdump, path, function)

    def stores(loop):
        return loop.counts["stores"]

    found = {}

    def take(what, loop, number, unit):
        if loop is not None:
            found[what] = (loop, number(loop), unit)

    macs = 32 if isa == "i8mm" else 4 * lanes  # of a dot in a full block
    step = of("step")
    take("step, read", most(step, lambda x: x.fma, lambda x: not stores(x)), lambda x: x.fma * lanes / 2,
         "state element")
    take("step, write", most(step, stores, lambda x: x.fma == stores(x)), lambda x: stores(x) * lanes, "state element")
    take("step with a pending update", most(step, stores, lambda x: x.fma == 3 * stores(x)),
         lambda x: stores(x) * lanes, "state element")
    block = of("block")
    take("block, tile", most(block, lambda x: x.fma, lambda x: not stores(x)), lambda x: x.fma * lanes, "MAC")
    if isa == "avx512bf16":
        take("block_bf16, tile", most(of("block_bf16"), lambda x: x.dots, lambda x: not stores(x)),
             lambda x: x.dots * 2 * lanes, "MAC")
    take("dense, tile", most(of("dense"), lambda x: x.fma, lambda x: not stores(x)), lambda x: x.fma * lanes, "MAC")
    take("dense, one token", most(of("dense"), lambda x: x.fma, lambda x: x.counts["prefetches"]),
         lambda x: x.fma * lanes, "weight")
    conv = of("conv")
    take("conv, sums", most(conv, lambda x: -x.counts["instructions"], lambda x: stores(x) and x.fma == 4),
         lambda x: stores(x) * lanes, "value")
    take("conv, SiLU", most(conv, lambda x: -x.counts["instructions"], lambda x: stores(x) and x.fma >= 7),
         lambda x: stores(x) * lanes, "value")
    for what, function in (("exp", "exp_map"), ("sigmoid", "sigmoid_map")):
        take(what, most(of(function), lambda x: -x.counts["instructions"], lambda x: stores(x) and x.fma >= 7),
             lambda x: stores(x) * lanes, "value")
    take("gated norm", most(of("norm_gated"), lambda x: -x.counts["instructions"],
                            lambda x: stores(x) and x.fma >= 7), lambda x: stores(x) * lanes,
         "value")
    for bits in (8, 4):
        idot = of(f"idot_q{bits}")
        one = min((x for x in idot if x.dots and x.counts["prefetches"]), key=lambda x: x.dots, default=None)
        take(f"idot q{bits}, one token", one, lambda x: x.dots * 4 * lanes, "weight")
        # up to four tokens ask for weights ahead, and only avx2's full block is one of those
        full = most(idot, lambda x: x.dots, lambda x: isa == "avx2" or not x.counts["prefetches"])
        take(f"idot q{bits}, full block", full, lambda x: x.dots * macs, "MAC")
    return found


def predicted(lines, cpu, arm):
    """(cycles of an iteration, those of its multiplies alone, what is busiest) on a CPU, as llvm-mca models it."""
    text = "\n".join(re.sub(r"^(j\w+|b|b\.\w+)\s.*", r"\1 .Lagain", re.sub(
        r"^(cbn?z|tbn?z)(\s.*,\s*)[0-9a-f]+ <.*", r"\1\2.Lagain", line)) for line in lines)

    def run(body):
        done = subprocess.run(
            [MCA, f"-mtriple={'aarch64' if arm else 'x86_64'}-linux-gnu", f"-mcpu={cpu}", "-json", "-iterations=200"],
            input=".Lagain:\n" + body + "\n", capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"llvm-mca {cpu}: {done.stderr}")
        # what comes before the JSON's brace is a warning; some versions write several regions
        result = json.loads(done.stdout[done.stdout.index("{"):])
        region = result["CodeRegions"][0]
        summary = region["SummaryView"]
        pressure = {}
        resources = result["TargetInfo"]["Resources"]
        for entry in region["ResourcePressureView"]["ResourcePressureInfo"]:
            if entry["InstructionIndex"] == len(region["Instructions"]):
                pressure[resources[entry["ResourceIndex"]]] = entry["ResourceUsage"]
        busiest = re.sub(r"\.[\0-\x1f]", "", max(pressure, key=pressure.get, default=""))  # a unit of a group
        return summary["TotalCycles"] / summary["Iterations"], summary["BlockRThroughput"], busiest

    cycles, _, busiest = run(text)
    multiplies = [line for line in lines if Loop.MULTIPLY.match(line)]
    bound = run("\n".join(multiplies))[1] if multiplies else 0
    return {"cycles": round(cycles, 1), "multiplies_alone": round(bound, 1), "busiest": busiest}


# ---- whole calls ----

# kernel of calls.c: (what it takes, unit, of the ISA's full block where it depends on that)
CALLS = {
    "step": (128 * 128, "state element"),
    "step_pending": (128 * 128, "state element"),
    "block": (16 * 128 * 128, "state element and token"),
    "conv": (16 * 256, "value"),
    "conv_step": (256, "channel"),
    "norm_gated": (256, "value"),
    "exp": (256, "value"),
    "dense": (16 * 128, "MAC"),  # times the lanes of a panel
    "idot_q8_1": (1024, "weight"),  # times the lanes of a tile
    "idot_q4_1": (1024, "weight"),
    "idot_q8": (1024, "MAC"),  # times lanes and tokens
    "idot_q4": (1024, "MAC"),
}
FULL_BLOCK = {"avx2": 4, "neon": 8, "dotprod": 8, "i8mm": 8}


def executed(isa, binary, kernel, times):
    """Instructions that the program executes with that many calls."""
    if isa in ARM:
        run = subprocess.Popen(["qemu-aarch64-static", "-cpu", "max", "-singlestep", "-d", "nochain,exec", "-D",
                                "/dev/stderr", binary, kernel, str(times)], stderr=subprocess.PIPE)
        lines = 0
        for part in iter(lambda: run.stderr.read(2**20), b""):
            lines += part.count(b"\n")
        if run.wait():
            raise SystemExit(f"qemu: {binary} {kernel}: exit status {run.returncode}")
        return lines
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    done = subprocess.run([*valgrind, binary, kernel, str(times)], capture_output=True, text=True, check=True)
    return int(re.search(r"Collected : (\d+)", done.stderr)[1])


def calls(isa, compiler, flags, objects, folder):
    binary = folder / f"calls_{isa}"
    subprocess.run([compiler, *flags, "-static", f"-DISA=kda_{isa}", f"-I{SIMD}", ROOT / "benchmarks/calls.c", objects,
                    "-o", binary], check=True)
    result = {}
    for kernel, (number, unit) in CALLS.items():
        if isa in ("dotprod", "i8mm") and not kernel.startswith("idot"):
            continue  # neon's
        lanes = ISAS[isa][0]
        if kernel == "dense":
            number *= 2 * lanes
        elif kernel.startswith("idot"):
            number *= lanes * (1 if kernel.endswith("_1") else FULL_BLOCK[isa])
        instructions = executed(isa, binary, kernel, 2) - executed(isa, binary, kernel, 1)
        result[kernel] = {"instructions": instructions, "of": number, "unit": unit,
                          "per_unit": round(instructions / number, 4)}
    return result


def version(command):
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout


def main(wanted):
    spec = importlib.util.spec_from_file_location("kda_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    rows = {name: gnu for machine in ("X86_64", "AARCH64") for name, gnu, _ in setup.isa_rows(machine)}
    result = json.loads(OUT.read_text()) if wanted and OUT.exists() else {"loops": {}, "calls": {}}
    result["gcc"] = version("gcc").splitlines()[0].split()[-1]
    result["llvm-mca"] = re.search(r"LLVM version (\S+)", version(MCA))[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for isa in wanted or ISAS:
            lanes, cpus = ISAS[isa]
            prefix = "aarch64-linux-gnu-" if isa in ARM else ""
            flags = [*setup.GNU_FLAGS, "-fPIC", "-fwrapv", "-DNDEBUG"]
            path = folder / f"isa_{isa}.o"
            subprocess.run([prefix + "gcc", *flags, *rows[isa], f"-I{SIMD}", "-c", SIMD / f"isa_{isa}.c", "-o", path],
                           check=True, cwd=ROOT)
            table = result["loops"][isa] = {}
            for what, (loop, number, unit) in working_loops(prefix + "objdump", path, lanes, isa).items():
                table[what] = {"takes": number, "unit": unit, "dots": loop.dots, "fma": loop.fma, **loop.counts,
                               "mca": {cpu: predicted(loop.lines, cpu, isa in ARM) for cpu in cpus}}
                print(isa, what, {k: v for k, v in table[what].items() if k != "mca"},
                      {cpu: tuple(p.values()) for cpu, p in table[what]["mca"].items()}, sep=" | ")
            if isa in FULL_BLOCK:
                result["calls"][isa] = calls(isa, prefix + "gcc", flags, path, folder)
                print(isa, {kernel: call["per_unit"] for kernel, call in result["calls"][isa].items()})
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
