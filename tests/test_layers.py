"""House rules: who may import whom, what `import kda` costs, what the public names carry."""
import ast
import inspect
from pathlib import Path

import pytest
from helpers import python

import kda
from kda import _core, reference

PACKAGE = Path(kda.__file__).parent

# Data goes left to right; a file imports only from its own column or one to its left.
COLUMNS = [
    ["_core"],
    ["runtime", "reference"],
    ["files", "ops", "quant", "dense"],
    ["config", "weights", "state", "layer"],
    ["session", "plan"],
    ["__init__"],
    ["adapters", "check", "cli", "perf", "__main__"],
]
COLUMN = {name: i for i, names in enumerate(COLUMNS) for name in names}
HEAVY = {"torch", "transformers", "onnx", "onnxruntime", "tensorflow", "jax", "pandas", "matplotlib", "pytest"}
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def room(path):
    """The part of the package that a file belongs to: kda/perf/disk.py is of perf."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(source):
    """The parts of the package that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "kda":
                found.add(parts[1] if len(parts) > 1 and parts[1] in COLUMN else "__init__")
    return found


def top_level_imports(source):
    return {a.name.split(".")[0] for node in ast.parse(source).body if isinstance(node, ast.Import)
            for a in node.names} | {node.module.split(".")[0] for node in ast.parse(source).body
                                    if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_left(path):
    assert room(path) in COLUMN, "a new file needs its column in this test"
    for other in imported_rooms(path.read_text()):
        assert COLUMN[other] <= COLUMN[room(path)], f"{path.name} may not import kda.{other}"


def test_the_rule_can_fail():
    assert imported_rooms("from kda import _core\nimport kda.ops\nfrom kda.plan import x\ndef f():\n import kda") == {
        "_core", "ops", "plan", "__init__"}
    assert imported_rooms("from kda import chunk_kda") == {"__init__"}
    assert len(FILES) >= 4


@pytest.mark.parametrize("path", [p for p in FILES if room(p) != "adapters"],
                         ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_heavy_import_at_the_top(path):
    assert not top_level_imports(path.read_text()) & HEAVY


def test_import_brings_nothing_heavy():
    loaded = set(python("import sys, kda; print(*sys.modules)").stdout.split())
    assert "numpy" in loaded
    assert not loaded & HEAVY


# What `import kda` brings beyond numpy: every program that imports it pays for that, so what one function needs is
# imported in that function. Other versions of numpy bring some of these themselves.
OURS = {"kda", *(f"kda.{name}" for name in ("_core", "config", "dense", "files", "layer", "ops", "plan", "quant",
                                             "runtime", "session", "state", "weights"))}
OTHERS = {"ml_dtypes", "json", "dataclasses", "copy", "threading", "mmap", "errno",
          "cython_runtime", "org"}  # of Cython's modules; of copy, for Jython


def test_import_brings_these_modules():
    code = "import sys, numpy.typing; before = {*sys.modules}; import kda; print(*{*sys.modules} - before)"
    brought = set(python(code).stdout.split())
    assert {name for name in brought if name.partition(".")[0] == "kda"} == OURS
    assert {name.partition(".")[0] for name in brought if name[0] != "_"} - {"kda"} <= OTHERS


def test_public_names():
    assert kda.__all__ == sorted(kda.__all__)
    pinned = {"fused_recurrent_kda", "fused_kda_gate", "l2norm", "isas", "set_num_threads", "get_num_threads",
              "show_runtime"}
    assert pinned <= set(kda.__all__)
    for name in kda.__all__:
        doc = inspect.getdoc(getattr(kda, name))
        assert doc, name
        assert doc.split("\n")[0].rstrip().endswith((".", ":")), f"{name}: the first line is a sentence"


def test_signatures_are_the_pinned_ones():
    """fla's names and order first, our own keywords after; reference.py takes fla's."""
    fla = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
           "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
           "lower_bound", "state_v_first", "cu_seqlens"]
    ours = inspect.signature(kda.fused_recurrent_kda).parameters
    assert list(ours)[:len(fla)] == fla
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(fla):])
    own = inspect.signature(reference.fused_recurrent_kda).parameters.values()
    assert [p.name for p in own if p.kind is not p.KEYWORD_ONLY] == fla
    gate = inspect.signature(kda.fused_kda_gate).parameters
    assert list(gate)[:4] == ["g", "A_log", "dt_bias", "lower_bound"]
    for name in ("fused_recurrent_kda", "fused_kda_gate", "l2norm"):
        parameter = inspect.signature(getattr(kda, name)).parameters["isa"]
        assert parameter.default is None
        assert parameter.kind is parameter.KEYWORD_ONLY


def test_the_stub_describes_the_core():
    """_core.pyi has the names and the parameters of the compiled module, no more and no fewer."""
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    functions = {n.name: [a.arg for a in n.args.args] for n in stub.body if isinstance(n, ast.FunctionDef)}
    classes = {n.name: {m.name for m in n.body} for n in stub.body if isinstance(n, ast.ClassDef)}
    constants = {n.target.id: ast.unparse(n.annotation) for n in stub.body if isinstance(n, ast.AnnAssign)}
    assert {n for n in dir(_core) if not n.startswith("_")} == set(functions) | set(constants) | set(classes)
    for name, methods in classes.items():
        shown = {m for m in vars(getattr(_core, name)) if m[0] != "_" or m in ("__new__", "__enter__", "__exit__")}
        assert shown == methods
    for name, annotation in constants.items():
        assert type(getattr(_core, name)).__name__ == annotation.split("[")[0]
    for name, parameters in functions.items():
        assert list(inspect.signature(getattr(_core, name)).parameters) == parameters
