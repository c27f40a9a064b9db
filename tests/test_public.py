"""The package as others see it: its public names, its docstrings, what importing it pulls in, and who may import whom."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wavetrain

ROOT = Path(wavetrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LEVELS = {
    "errors": 0,
    "files": 1,
    "devices": 1,
    "schedule": 2,
    "cluster": 2,
    "workload": 2,
    "profile": 2,
    "models": 2,
    "data": 2,
    "optim": 2,
    "plan": 3,
    "view": 4,
    "runtime": 4,
    "serve": 5,
    "cli": 6,
    "__main__": 7,
}
"""A part imports itself and parts of lower levels only."""

LIGHT = ("errors", "files", "devices", "schedule", "cluster", "workload", "view", "cli")
WITHOUT_TORCH = (*LIGHT, "profile", "plan")
"""Parts that work where neither torch nor numpy is installed."""


def module_name(path: Path) -> str:
    parts = ("wavetrain", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(f) for f in FILES]


def part(module: str) -> str:
    """The part of the package a module belongs to; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_all_is_what_is_exported() -> None:
    assert len(set(wavetrain.__all__)) == len(wavetrain.__all__)
    assert set(wavetrain.__all__) <= set(dir(wavetrain))
    stubs = next(n for n in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(n, ast.If))
    typed = {alias.asname or alias.name for node in stubs.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(wavetrain.__all__), "what type checkers see and what is exported differ"


@pytest.mark.parametrize("name", wavetrain.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(wavetrain, name)
    assert name in (wavetrain.__doc__ or "") or name == "WavetrainError"
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)
        assert value.__module__.startswith("wavetrain.")


def test_a_name_that_is_not_public() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = wavetrain.nothing


def test_types_are_shipped() -> None:
    assert (ROOT / "py.typed").is_file()


@pytest.mark.parametrize("path", FILES, ids=MODULES)
def test_public_functions_and_classes_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []
    assert ast.get_docstring(tree) or not tree.body, "a module tells its story"


def imports(path: Path) -> Iterator[str]:
    """The wavetrain modules that a file imports, at any depth, but for type checkers only."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from walk(other)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            if node.module == "wavetrain":
                yield from (f"wavetrain.{a.name}" for a in node.names if f"wavetrain.{a.name}" in MODULES)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    found = walk(ast.parse(path.read_text(encoding="utf-8")))
    return (name for name in found if name.split(".")[0] == "wavetrain")


@pytest.mark.parametrize("path", [f for f in FILES if f.parent != ROOT or f.name != "__init__.py"], ids=module_name)
def test_arrows_of_import_point_one_way(path: Path) -> None:
    own = part(module_name(path))
    assert own in LEVELS, f"{own} is new: give it a level above all that it imports"
    for name in imports(path):
        other = part(name)
        assert other in ("", own) or LEVELS[other] < LEVELS[own], f"{module_name(path)} imports {name}"


def test_importing_all_that_is_light_pulls_in_neither_torch_nor_numpy() -> None:
    light = [m for m in MODULES if part(m) in ("", *LIGHT)]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}: importlib.import_module(name)\n"
        "import wavetrain\n"
        "heavy = {'LLM', 'OptEx', 'Pipeline', 'SamplingParams', 'launch', 'rehearse'}\n"
        "for name in wavetrain.__all__: name in heavy or getattr(wavetrain, name)\n"
        "wavetrain.simulate(wavetrain.build('zb-wave', num_ranks=2, num_micro_batches=2))\n"
        "print(sorted({'torch', 'numpy', 'ortools'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout.strip(), run.stderr, run.returncode) == ("[]", "", 0)


def test_planning_needs_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {[m for m in MODULES if part(m) in WITHOUT_TORCH]!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout.strip(), run.stderr, run.returncode) == ("False", "", 0)


def test_importing_the_package_loads_none_of_its_parts() -> None:
    code = "import sys, wavetrain; print([m for m in sys.modules if m.startswith('wavetrain.')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
