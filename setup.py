"""Builds kda._core: one C file per ISA, each with its own flags, linked into one extension.

The rows of kda/_simd/isa_table.h decide what is compiled; pyproject.toml holds everything else. Needs a C
compiler and nothing more. Environment, for tests and packagers:

    KDA_CFLAGS="..."    flags added to every file and to the link (warnings as errors, sanitizers, -g)
    KDA_THREADS=0       build without threads
    KDA_ABI3=0          build for one Python version only
    KDA_EMULATE=avx512  build the AVX-512 rows and amx as portable C over SIMD Everywhere, see tools/emulate/*.h
"""
import os
import platform
import re
import shlex
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SIMD = Path("kda/_simd")
BASE_SOURCES = ["cpu.c", "dispatch.c", "threads.c", "jobs.c", "quant.c", "dense.c"]
MACHINES = {"amd64": "X86_64", "x86_64": "X86_64", "aarch64": "AARCH64", "arm64": "AARCH64"}
ABI3 = os.environ.get("KDA_ABI3", "1") != "0" and not sysconfig.get_config_var("Py_GIL_DISABLED")

# Python's own flags carry -g, and some distributions' -flto, which could move wide code into narrow functions.
# -ffp-contract=off: a * b + c is rounded twice on every machine unless the code asks for a fused one.
# -fno-math-errno: a square root is the instruction, without a call of sqrtf() that would set errno.
GNU_FLAGS = ["-O2", "-g0", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-lto", "-fvisibility=hidden"]
GNU_WARNINGS = ["-Wall", "-Wextra", "-Wconversion"]  # not for the C that Cython writes
EMULATION = ["-mavx2", "-mfma", "-mf16c", "-Wno-psabi", "-include"]
EMULATED = {"avx512": [*EMULATION, "tools/emulate/avx512.h"],
            "avx512vnni": [*EMULATION, "tools/emulate/avx512.h"],
            "avx512bf16": ["-DHAVE_PAIRS=1", *EMULATION, "tools/emulate/avx512.h"],
            "amx": ["-DHAVE_PAIRS=1", "-DHAVE_TILES=1", *EMULATION, "tools/emulate/amx.h"]}
MSVC_FLAGS = ["/O2", "/std:c11", "/fp:precise"]

if sys.platform == "darwin" and sysconfig.get_platform().endswith("universal2") and "ARCHFLAGS" not in os.environ:
    # A Python for two machines compiles each file for both at once, which AVX2 code is not: build for this one.
    os.environ["ARCHFLAGS"] = f"-arch {platform.machine()}"
    os.environ["_PYTHON_HOST_PLATFORM"] = sysconfig.get_platform().replace("universal2", platform.machine())


def machine_of(plat_name):
    """isa_table.h's word for the machine of linux-x86_64, macosx-11.0-arm64, win-amd64; ANY for one without a row."""
    return MACHINES.get(plat_name.rpartition("-")[2].lower(), "ANY")


def isa_rows(machine):
    """[(name, GCC flags, MSVC flags)] of isa_table.h for one machine."""
    rows = re.findall(r'^ISA\((\w+),\s(\w+),\s[^"]*"([^"]*)",\s+"([^"]*)"\)', (SIMD / "isa_table.h").read_text(), re.M)
    return [(name, gnu.split(), msvc.split()) for name, where, gnu, msvc in rows if where in (machine, "ANY")]


def extra_flags():
    return shlex.split(os.environ.get("KDA_CFLAGS", ""))


def thread_flags(compiler):
    """(compile flags, link flags) of the pool of threads in threads.c."""
    if os.environ.get("KDA_THREADS", "1") == "0":
        return ["-DKDA_SERIAL"], []
    if compiler.compiler_type == "msvc":
        return ["/experimental:c11atomics"], []
    # Workers never end, so their code must stay: nodelete keeps the library in memory for good.
    return ["-pthread"], ["-pthread", *(["-Wl,-z,nodelete"] if sys.platform == "linux" else [])]


def compile_objects(compiler, machine, folder):
    """Compiles kda/_simd for one machine into `folder`; returns the object files."""
    msvc = compiler.compiler_type == "msvc"
    flags = MSVC_FLAGS if msvc else GNU_FLAGS
    shown = " ".join(flags + extra_flags()).replace("\\", "\\\\").replace('"', '\\"')
    macros = [(f"KDA_MACHINE_{machine}", None), ("KDA_FLAGS", f'"{shown}"')]  # the latter for kda_flags() alone
    flags = flags if msvc else flags + GNU_WARNINGS
    emulated = EMULATED if os.environ.get("KDA_EMULATE") == "avx512" else {}
    jobs = [(SIMD / name, thread_flags(compiler)[0] if name == "threads.c" else []) for name in BASE_SOURCES]
    if emulated:
        jobs[BASE_SOURCES.index("cpu.c")] = (Path("tools/emulate/cpu.c"), [])
    jobs += [(SIMD / f"isa_{name}.c", ms if msvc else emulated.get(name, gnu)) for name, gnu, ms in isa_rows(machine)]
    return [
        compiled
        for source, own_flags in jobs
        for compiled in compiler.compile(
            [str(source)], output_dir=str(folder), include_dirs=[str(SIMD)], macros=macros,
            extra_postargs=flags + own_flags + extra_flags())
    ]


class BuildExt(build_ext):
    """Compiles the C files itself, then lets setuptools compile the .pyx and link.

    Every build compiles every file: flags come from the environment too, so file times cannot tell what is
    up to date, and the whole takes a few seconds.
    """

    def build_extension(self, ext):
        self.force = True
        flags = MSVC_FLAGS if self.compiler.compiler_type == "msvc" else GNU_FLAGS
        ext.extra_objects = compile_objects(self.compiler, machine_of(self.plat_name), self.build_temp)
        ext.extra_compile_args = flags + extra_flags()
        ext.extra_link_args = thread_flags(self.compiler)[1] + extra_flags()
        super().build_extension(ext)


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "kda._core",
                sources=["kda/_core.pyx"],
                depends=["kda/_kernels.pxd", *sorted(str(p) for p in SIMD.iterdir())],
                include_dirs=[str(SIMD)],
                define_macros=[("Py_LIMITED_API", "0x030B0000")] if ABI3 else [],
                py_limited_api=ABI3,
            )
        ],
        cmdclass={"build_ext": BuildExt},
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
    )
