"""Builds kda._core: one C file per ISA, each with its own flags, linked into one extension.

The rows of kda/_simd/isa_table.h decide what is compiled; pyproject.toml holds everything else.
Environment: KDA_OPENMP=0 builds without threads, KDA_ABI3=0 for one Python version only, KDA_CFLAGS adds
flags to every file (the sanitizer and warnings-as-errors builds of .ci/run).
"""
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

SIMD = Path("kda/_simd")
BASE_SOURCES = ["cpu.c", "dispatch.c", "threads.c", "jobs.c"]
MACHINES = {"amd64": "X86_64", "x86_64": "X86_64", "aarch64": "AARCH64", "arm64": "AARCH64"}
ABI3 = os.environ.get("KDA_ABI3", "1") != "0" and not sysconfig.get_config_var("Py_GIL_DISABLED")


def isa_rows(machine):
    """[(name, GCC flags, MSVC flags)] of isa_table.h for one machine."""
    rows = re.findall(r'^ISA\((\w+), (\w+), [^"]*"([^"]*)", "([^"]*)"\)', (SIMD / "isa_table.h").read_text(), re.M)
    return [(name, gnu.split(), msvc.split()) for name, where, gnu, msvc in rows if where in (machine, "ANY")]


class BuildExt(build_ext):
    """Compiles the C files itself, then lets setuptools compile the .pyx and link."""

    def build_extension(self, ext):
        machine = MACHINES.get(self.plat_name.rpartition("-")[2].rpartition("_")[2])
        machine = MACHINES.get(re.split(r"[-.]", self.plat_name)[-1].lower(), machine)
        msvc = self.compiler.compiler_type == "msvc"
        extra = shlex.split(os.environ.get("KDA_CFLAGS", ""))
        if msvc:
            flags = ["/O2", "/std:c11", "/fp:precise"]
        else:
            flags = ["-O2", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wconversion"]
        openmp_compile, openmp_link = self.openmp_flags(msvc)

        def compile_c(name, own_flags):
            return self.compiler.compile(
                [str(SIMD / name)], output_dir=self.build_temp, include_dirs=[str(SIMD)],
                extra_postargs=flags + own_flags + extra)

        objects = []
        for name in BASE_SOURCES:
            objects += compile_c(name, openmp_compile if name == "threads.c" else [])
        for name, gnu, ms in isa_rows(machine):
            objects += compile_c(f"isa_{name}.c", ms if msvc else gnu)
        ext.extra_objects = objects
        ext.extra_compile_args = [f for f in flags if not f.startswith("-W")] + extra
        ext.extra_link_args = openmp_link + extra
        super().build_extension(ext)

    def openmp_flags(self, msvc):
        """(compile flags, link flags) of the first OpenMP spelling that compiles and links; ([], []) without."""
        if os.environ.get("KDA_OPENMP", "1") == "0":
            return [], []
        if msvc:
            return ["/openmp"], []
        spellings = [(["-fopenmp"], ["-fopenmp"])]
        if sys.platform == "darwin":
            spellings.append((["-Xpreprocessor", "-fopenmp"], ["-lomp"]))
        for compile_flags, link_flags in spellings:
            with tempfile.TemporaryDirectory() as scratch:
                probe = Path(scratch, "probe.c")
                probe.write_text("#include <omp.h>\nint probe(void) { return omp_get_max_threads(); }\n")
                try:
                    objects = self.compiler.compile([str(probe)], output_dir=scratch, extra_postargs=compile_flags)
                    self.compiler.link_shared_object(objects, str(Path(scratch, "probe.so")), extra_postargs=link_flags)
                    return compile_flags, link_flags
                except (CompileError, LinkError):
                    continue
        print("kda: no OpenMP here; building without threads", file=sys.stderr)
        return [], []


setup(
    ext_modules=[
        Extension(
            "kda._core",
            sources=["kda/_core.pyx"],
            depends=["kda/_kernels.pxd", *sorted(str(p) for p in SIMD.iterdir() if p.suffix in (".c", ".h", ".inc"))],
            include_dirs=[str(SIMD)],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if ABI3 else [],
            py_limited_api=ABI3,
        )
    ],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
)
