"""What the compiler made of kda/_simd: wide instructions stay in the files that are chosen at run time.

A function that the linker shares between a wide and a narrow object, or a narrow file compiled with wide
flags, runs everywhere but on the oldest machine. So the objects are built once more, as setup.py builds
them, and taken apart.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kda
from kda import _core

ROOT = Path(__file__).parent.parent
SIMD = ROOT / "kda/_simd"
LIBRARY = {"expf", "log1pf", "sqrtf"}  # libm, from isa_scalar.c
COMPILER_MADE = {"_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail", "__stack_chk_guard"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF objects")


def load_setup():
    """setup.py as a module: it calls setup() only when it is run."""
    spec = importlib.util.spec_from_file_location("kda_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup_py():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name in ("KDA_CFLAGS", "KDA_EMULATE", "KDA_THREADS"):
            patch.delenv(name, raising=False)
        yield load_setup()


@pytest.fixture(scope="module")
def compiler(setup_py):
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    if shutil.which(compiler.compiler[0]) is None:
        pytest.skip(f"no C compiler: {compiler.compiler[0]}")
    return compiler


@pytest.fixture(scope="module")
def binutils(compiler):
    """Runs objdump or nm for the machine that the compiler compiles for; returns what it prints."""
    prefix = re.fullmatch(r"(.*-)?\w+", Path(compiler.compiler[0]).name)[1] or ""

    def run(tool, *arguments):
        tool = shutil.which(prefix + tool) or shutil.which(tool)
        if tool is None:
            pytest.skip("no binutils (objdump, nm)")
        return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True).stdout

    return run


@pytest.fixture(scope="module")
def machine(setup_py):
    return setup_py.machine_of(sysconfig.get_platform())


@pytest.fixture(scope="module")
def objects(setup_py, compiler, machine, tmp_path_factory):
    """{file name without .o: path} of everything under kda/_simd that this machine's build links."""
    folder = tmp_path_factory.mktemp("objects")
    paths = setup_py.compile_objects(compiler, machine, folder)
    return {Path(path).stem: Path(path) for path in paths}


def symbols(binutils, path, *arguments):
    return {line.split()[-1] for line in binutils("nm", *arguments, path).splitlines() if line.strip()}


def base_of(setup_py):
    """The names of the objects that run on every machine."""
    return {Path(name).stem for name in setup_py.BASE_SOURCES}


def wide_instructions(disassembly):
    """The VEX and EVEX instructions of an x86 disassembly in AT&T syntax, those of tiles too."""
    rows = [line.split("\t", 1)[1] for line in disassembly.splitlines() if re.match(r"\s+[0-9a-f]+:\t", line)]
    wide = re.compile(r"v(?!er[rw])|tile|tdp|(ld|st)tilecfg|.*(%[yz]mm|%k[0-7]\b)")
    return [row for row in rows if wide.match(row)]


def test_setup_and_dispatch_know_the_same_isas(setup_py, machine, objects):
    rows = [name for name, _, _ in setup_py.isa_rows(machine)]
    assert rows == list(kda.isas())
    assert rows[-1] == "scalar"
    assert set(objects) == base_of(setup_py) | {f"isa_{name}" for name in rows}


def test_no_wide_instruction_outside_the_files_of_wide_isas(setup_py, binutils, machine, objects):
    if machine != "X86_64":
        pytest.skip("VEX and EVEX are encodings of x86; AArch64's baseline has NEON")
    wide = {name: wide_instructions(binutils("objdump", "-d", "--no-show-raw-insn", "-w", path))
            for name, path in objects.items()}
    narrow = base_of(setup_py) | {"isa_scalar"}
    assert {name: wide[name][:3] for name in narrow if wide[name]} == {}
    assert {name for name in objects if wide[name]} == set(objects) - narrow
    assert any("%ymm" in row for row in wide["isa_avx2"])
    assert any("%zmm" in row for row in wide["isa_avx512"])
    assert any("tdpbsud" in row for row in wide["isa_amx"])


def test_an_isa_file_defines_its_table_and_nothing_else(binutils, objects):
    isa_files = {name: path for name, path in objects.items() if name.startswith("isa_")}
    defined = {name: symbols(binutils, path, "-g", "--defined-only") for name, path in isa_files.items()}
    assert defined == {name: {name.replace("isa_", "kda_")} for name in isa_files}


def test_kernels_call_memory_functions_and_libm_only(binutils, objects):
    for name, path in objects.items():
        if name.startswith("isa_"):
            called = symbols(binutils, path, "-u") - COMPILER_MADE
            strange = {s for s in called if not re.fullmatch(r"(__)?mem(cpy|set|move)(_chk)?", s)}
            assert strange <= (LIBRARY if name == "isa_scalar" else set()), name


def test_the_extension_exports_its_init_function_only(binutils):
    assert symbols(binutils, _core.__file__, "-D", "--defined-only") == {"PyInit__core"}


@pytest.mark.parametrize("flags", [[], ["-fsanitize=thread"]], ids=["plain", "thread_sanitizer"])
def test_the_pool_alone(setup_py, compiler, tmp_path, flags):
    """Every item once, whoever calls from where; workers wake; a forked child has its own."""
    command = [*compiler.compiler, *setup_py.GNU_FLAGS, "-pthread", *flags, f"-I{SIMD}", ROOT / "tests/pool_check.c",
               SIMD / "threads.c", "-o", tmp_path / "pool_check"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and flags:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "pool_check"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.skipif(_core.threading() == "serial", reason="built without threads")
def test_the_extension_stays_in_memory(binutils):
    """Sleeping workers wake in its code."""
    assert "NODELETE" in binutils("readelf", "-d", _core.__file__)


def test_a_machine_without_a_row_gets_scalar_alone(setup_py, compiler, binutils, tmp_path):
    unknown = setup_py.machine_of("linux-riscv64")
    paths = {Path(path).stem: path for path in setup_py.compile_objects(compiler, unknown, tmp_path)}
    assert {name for name in paths if name.startswith("isa_")} == {"isa_scalar"}
    assert {s for s in symbols(binutils, paths["dispatch"], "-u") if s.startswith("kda_")} == {
        "kda_cpu_features", "kda_scalar"}


@pytest.mark.parametrize(
    ("plat_name", "expected"),
    [
        ("linux-x86_64", "X86_64"),
        ("linux-aarch64", "AARCH64"),
        ("macosx-11.0-arm64", "AARCH64"),
        ("macosx-10.9-x86_64", "X86_64"),
        ("win-amd64", "X86_64"),
        ("win-arm64", "AARCH64"),
        ("linux-i686", "ANY"),
        ("linux-ppc64le", "ANY"),
    ],
)
def test_machine_of_a_platform(setup_py, plat_name, expected):
    assert setup_py.machine_of(plat_name) == expected


def test_flags_neither_assume_this_machine_nor_relax_arithmetic(setup_py):
    rows = setup_py.isa_rows("X86_64") + setup_py.isa_rows("AARCH64")
    flags = {flag for _, gnu, msvc in rows for flag in gnu + msvc} | {*setup_py.GNU_FLAGS, *setup_py.MSVC_FLAGS}
    assert {"-mavx2", "-mavx512f", "-ffp-contract=off"} <= flags
    assert [f for f in flags if re.match(r"-(march=native|mcpu|mtune|Ofast|ffast-math|funsafe)|/fp:fast", f)] == []
