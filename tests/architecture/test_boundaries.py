"""Who may import what, and what may not be written anywhere: read from the source, not run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from axes import ROOT

PACKAGES = ("paxserve", "kernels_pallas", "hydra_plugins")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
ACCELERATOR = {"jax", "jaxlib", "flax", "orbax"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "torch"}

per_file = pytest.mark.parametrize(
    "file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES]
)


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_levels(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(tree_of(file))}


def may_import_jax(file: Path) -> bool:
    path = file.relative_to(ROOT).as_posix()
    return path.startswith(("paxserve/device/", "kernels_pallas/")) or (
        path == "paxserve/executor/real.py"
    )


def called_names(tree: ast.AST) -> Iterator[str]:
    """`eval` of `eval(x)`, `jinja2.Template` of `jinja2.Template(x)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_there_is_something_to_look_at():
    names = {str(file.relative_to(ROOT)) for file in FILES}
    assert {"paxserve/scheduler.py", "paxserve/executor/real.py"} <= names
    assert len(FILES) > 60


@per_file
def test_jax_stays_behind_its_boundary(file):
    if not may_import_jax(file):
        assert not top_levels(file) & ACCELERATOR


def test_the_boundary_is_not_empty():
    assert any("jax" in top_levels(file) for file in FILES if may_import_jax(file))
    assert not may_import_jax(ROOT / "paxserve/scheduler.py")


@per_file
def test_kernels_do_not_know_the_engine(file):
    if file.relative_to(ROOT).parts[0] == "kernels_pallas":
        assert "paxserve" not in top_levels(file)


POLICY_FREE = ("scheduler", "planning", "batch", "ledger", "engine", "pack", "policies")


@pytest.mark.parametrize("stem", POLICY_FREE)
def test_mechanism_knows_protocols_and_no_policy(stem):
    axes = ("admission", "gate", "batching", "reservation", "placement", "victim", "preemption")
    for name in imported_modules(tree_of(ROOT / "paxserve" / f"{stem}.py")):
        parts = name.split(".")
        is_axis = len(parts) > 2 and parts[0] == "paxserve" and parts[1] in axes
        assert not is_axis or not (ROOT / "paxserve" / parts[1] / f"{parts[2]}.py").exists(), name


POLICY_AXES = ("admission", "gate", "batching", "reservation", "victim", "preemption")


def first_sequences(tree: ast.AST) -> list[str]:
    """Where a request's first sequence is asked, whether it has ended or not."""
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Subscript)]
    return [
        text for text in map(ast.unparse, asked) if text.endswith((".sequence", ".sequences[0]"))
    ]


def test_policies_ask_the_sequences_that_go_on():
    files = [file for axis in POLICY_AXES for file in (ROOT / "paxserve" / axis).rglob("*.py")]
    assert len(files) > 30
    for file in files:
        assert not first_sequences(tree_of(file)), file
    wrong = ast.parse("request.sequence.row, r.sequences[0].row, r.sequences[1], r.live[0]")
    assert set(first_sequences(wrong)) == {"request.sequence", "r.sequences[0]"}


@per_file
def test_no_code_is_made_from_data(file):
    tree = tree_of(file)
    assert not {name.split(".")[0] for name in imported_modules(tree)} & UNSAFE_MODULES
    for name in called_names(tree):
        assert name not in {"eval", "exec", "compile", "__import__"}, name
        assert name.split(".")[-1] not in {"Environment", "SandboxedEnvironment"}, name
        assert name not in {"Template", "jinja2.Template"}, name
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


@per_file
def test_only_the_command_line_reads_the_environment(file):
    if file.name not in ("cli.py", "check_kernels_command.py"):
        source = file.read_text(encoding="utf-8")
        assert "os.environ" not in source
        assert "getenv" not in source


@per_file
def test_every_module_says_what_it_is(file):
    docstring = ast.get_docstring(tree_of(file))
    assert docstring
    assert len(docstring) > 20


@per_file
def test_sources_are_ascii(file):
    assert file.read_bytes().isascii()


@per_file
def test_no_module_keeps_state_that_changes(file):
    """Module-level names are constants: no empty list, dict or set waits to be filled."""
    for node in tree_of(file).body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None:
            is_empty = isinstance(value, ast.List | ast.Set) and not value.elts
            is_empty |= isinstance(value, ast.Dict) and not value.keys
            is_empty |= ast.unparse(value) in {"dict()", "list()", "set()"}
            assert not is_empty, ast.unparse(node)
