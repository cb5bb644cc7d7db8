"""What the README says can be pasted, is pasted; what it says was measured, is in the result files."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers import python

import kda
from kda import session

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_quickstarts_run_as_pasted():
    first, layer = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    for code, printed in ((first, "(1, 1, 32, 128) (1, 32, 128, 128)\n"), (layer, "(1, 4, 256) 9\n")):
        done = python(code, PYTHONWARNINGS="error")
        assert done.stderr == ""
        assert done.stdout == printed


def test_the_two_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)
    assert commands[:2] == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/kda bench",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
    ]


def test_every_public_function_and_isa_is_listed():
    for name in kda.__all__:
        assert re.search(rf"`kda\.{name}[(.]", README), name
    table = (ROOT / "kda" / "_simd" / "isa_table.h").read_text()
    names = re.findall(r"^ISA\((\w+),", table, flags=re.MULTILINE)
    assert len(names) >= 4
    for name in names:
        assert f"| `{name}` |" in README, name


def test_the_measured_tables_come_from_the_result_files():
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    for name in ("README.md", "docs/performance.md"):
        assert render.updated(name) == (ROOT / name).read_text()
    assert README.count("| Kimi-Linear, 20 layers |") >= 2
    assert (ROOT / "docs/performance.md").read_text().count("| block, tile |") >= 3


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/performance.md"])
def test_files_that_documents_name_exist(name):
    text = (ROOT / name).read_text()
    paths = re.findall(r"`((?:kda|benchmarks|tests|tools)/[\w./]*)`", text)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_security_names_every_variable_and_bound():
    text = (ROOT / "SECURITY.md").read_text()
    code = [(ROOT / "setup.py").read_text(), *(p.read_text() for p in (ROOT / "kda").rglob("*.py"))]
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', "\n".join(code)))
    assert {"KDA_ISA", "KDA_CFLAGS"} <= read
    for name in read - {"ARCHFLAGS", "_PYTHON_HOST_PLATFORM"}:  # setuptools' own
        assert f"`{name}`" in text, name
    assert f"header up to {session._MOST_HEADER // 2**20} MiB" in text
    for module in ("pickle", "socket", "urllib"):
        assert not any(re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE) for source in code), module
