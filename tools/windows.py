"""Compile and link the kernels for Windows on x86-64 with mingw-w64, warnings as errors: python tools/windows.py FOLDER

No compiler of Microsoft's runs here. This one finds at least what does not hold with Windows' types, headers and
threads; its AVX code is not for use: GCC does not align the stack there.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools._distutils.ccompiler import new_compiler

COMPILER = ["x86_64-w64-mingw32-gcc"]

os.chdir(Path(__file__).parents[1])
os.environ["KDA_CFLAGS"] = "-O1 -Werror -Wvla"  # MSVC has no arrays of variable length
spec = importlib.util.spec_from_file_location("kda_setup", "setup.py")
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)
compiler = new_compiler(compiler="unix")
compiler.set_executables(compiler_so=COMPILER, linker_so=[*COMPILER, "-shared", "-Wl,--no-undefined"])
objects = setup.compile_objects(compiler, "X86_64", Path(sys.argv[1]))
compiler.link_shared_object(objects, str(Path(sys.argv[1], "kernels.dll")))
