"""The runtime needs three libraries. Who imports whom is in pyproject.toml (import-linter)."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from scripts import lines

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "runtime/odtpack_runtime").rglob("*.py"))

# What the runtime may import beside the standard library, and what one module of it may besides.
ITS_THREE = {"numpy", "onnxruntime", "flatbuffers", "odtpack_runtime"}
WHERE_INSTALLED = {
    "trust.py": {"cryptography"},
    "native.py": {"onnx"},  # bodies are run by verify
    "checks.py": {"onnx"},
    "verify.py": {"onnx"},
}


def test_the_runtime_imports_three_libraries():
    used = set()
    for path in SOURCES:
        found = set(_imported(path)) - sys.stdlib_module_names
        used |= found
        assert found <= ITS_THREE | WHERE_INSTALLED.get(path.name, set()), path
    assert used >= ITS_THREE


def _imported(path: Path) -> Iterator[str]:
    """Top names of all imports of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level
            yield node.module.partition(".")[0]


def test_files_do_not_import_each_other_in_a_circle():
    """Also by what functions import, and by what is imported for types alone."""
    graph = grimp.build_graph("odtpack", "odtpack_runtime", "odtpack_simulator", cache_dir=None)
    assert len(graph.modules) > 300
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    TopologicalSorter(imports).prepare()  # a circle is an error that names its files


@pytest.mark.parametrize("platform", ["node", "web"])
def test_files_of_the_javascript_kit_do_not_either(platform):
    """But for types, which a compiled file does not import."""
    one = re.compile(r"^(?:import|export) [{*][^;]* from '(?:\./(.+)|#platform)';", re.M)
    imports = {
        path.with_suffix(".js").name: {
            name or f"platform_{platform}.js" for name in one.findall(path.read_text("utf-8"))
        }
        for path in (ROOT / "runtime/js/src").glob("*.ts")
    }
    assert imports["platform_node.js"] == {"errors.js", "saves_node.js"}
    TopologicalSorter(imports).prepare()


def test_what_benchmarks_and_scripts_import_of_each_other_is_there():
    """Also what functions import; benchmarks are not run by other tests."""
    rooms = ("benchmarks", "scripts", "tests")
    one = re.compile(rf"^ *from ((?:{'|'.join(rooms)})[.\w]*) import (\([^)]*\)|.*)", re.M)
    imported = [
        (path, module, name)
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        for module, names in one.findall(re.sub("#.*", "", path.read_text("utf-8")))
        for name in re.findall(r"(\w+)(?: as \w+)?", names)
    ]
    assert len(imported) > 2000
    missing = [
        f"{path.relative_to(ROOT)} imports {module}.{name}"
        for path, module, name in imported
        if not _is_there(ROOT.joinpath(*module.split(".")), name)
    ]
    assert missing == []


def _is_there(module: Path, name: str) -> bool:
    """Whether a module of this tree has a name, by its text."""
    if module.is_dir():
        inside = (module / f"{name}.py", module / name)
        return any(path.exists() for path in inside) or _names(module / "__init__.py", name)
    return _names(module.with_suffix(".py"), name)


@functools.cache
def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _names(path: Path, name: str) -> bool:
    return name in _text(path)


def test_the_tools_do_not_grow():
    """Benchmarks, scripts and examples, outside of the gallery."""
    assert 5000 < lines.total(lines.tools()) <= 9500
