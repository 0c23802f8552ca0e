"""The operators that a reduced build of ONNX Runtime must contain, as its build reads them.

A line is ``domain;opset;Operator,Operator...``, where opset is the version of the standard in
which the operator last changed as the model uses it: the build keeps the kernel whose range
of versions holds it. With types, an operator may be followed by JSON that says which types of
which input or output it needs. ``!globally_allowed_types;T,T...`` limits all operators at once.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from odtpack.choices import Types
from odtpack.errors import OdtpackError

CONFIG_NAME: Final = "required_operators.config"
TYPES_CONFIG_NAME: Final = "required_operators_and_types.config"

_ALLOWED_TYPES: Final = "!globally_allowed_types"
_MAX_BYTES: Final = 2**24


@dataclass(frozen=True, order=True)
class Operator:
    """One version of an operator: domain (``ai.onnx`` for the standard), version and name."""

    domain: str
    version: int
    name: str

    def __str__(self) -> str:
        """Return it as messages name it."""
        return f"{self.domain};{self.version};{self.name}"


@dataclass(frozen=True)
class OperatorConfig:
    """A configuration.

    Attributes:
        operators: The operators.
        types: For operators by domain and name: what their JSON holds. An operator that is
            not there is not limited.
        allowed_types: C++ names of the types of all operators; None without a limit.
    """

    operators: frozenset[Operator]
    types: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    allowed_types: frozenset[str] | None = None

    def text(self, comments: Sequence[str] = ()) -> str:
        """Return the file's content: comments, then lines sorted by domain and version."""
        lines = [f"# {comment}" for comment in comments]
        if self.allowed_types is not None:
            lines.append(f"{_ALLOWED_TYPES};{','.join(sorted(self.allowed_types))}")
        for domain, version in sorted({(o.domain, o.version) for o in self.operators}):
            names = sorted(
                o.name for o in self.operators if (o.domain, o.version) == (domain, version)
            )
            entries = [name + self._json(domain, name) for name in names]
            lines.append(f"{domain};{version};{','.join(entries)}")
        return "\n".join(lines) + "\n"

    def _json(self, domain: str, name: str) -> str:
        types = self.types.get((domain, name))
        return json.dumps(types) if types else ""


def config_of(models: Iterable[Path], types: Types = Types.NONE) -> OperatorConfig:
    """Return what models in ORT format need.

    Args:
        models: Files in ORT format; their graphs are final.
        types: How to limit types.

    Raises:
        OdtpackError: A file is not in ORT format.
    """
    # Its package must come first: it makes the bindings of the format importable.
    from onnxruntime.tools.ort_format_model import (
        GloballyAllowedTypesOpTypeImplFilter,
        OperatorTypeUsageManager,
        OrtFormatModelProcessor,
    )

    class SeesAll(OperatorTypeUsageManager):  # type: ignore[misc] # it has no types
        """Also sees the type of every value, which takes much longer."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def process_node(self, node: Any, value_name_to_typeinfo: dict[Any, Any]) -> None:
            super().process_node(node, value_name_to_typeinfo)
            self.seen.update(_types_of(node, value_name_to_typeinfo))

    found: dict[str, dict[int, set[str]]] = {}
    manager: Any = None  # names alone need no look at types
    if types is not Types.NONE:
        manager = SeesAll() if types is Types.GLOBAL else OperatorTypeUsageManager()
    for model in models:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # it forgets to close the file
                OrtFormatModelProcessor(str(model), found, manager).process()
        except Exception as error:  # anything may be wrong with a file from outside
            raise OdtpackError(
                "not-ort-format",
                f"{model.name!r} is not a readable model in ORT format: {error}",
                where=str(model),
            ) from error
    operators = frozenset(
        Operator(domain, version, name)
        for domain, versions in found.items()
        for version, names in versions.items()
        for name in names
    )
    if types is Types.OPERATOR:
        entries = {
            (o.domain, o.name): manager.get_config_entry(o.domain, o.name) for o in operators
        }
        return OperatorConfig(operators, {k: json.loads(v) for k, v in entries.items() if v})
    if types is Types.GLOBAL:
        nameable = GloballyAllowedTypesOpTypeImplFilter._valid_allowed_types
        return OperatorConfig(operators, allowed_types=frozenset(manager.seen & nameable))
    return OperatorConfig(operators)


def main_graph(model: Path) -> list[str]:
    """Return the operator names of the nodes of a model in ORT format, subgraphs left out."""
    import onnxruntime.tools.ort_format_model  # noqa: F401 - makes the bindings importable

    bindings = importlib.import_module("ort_flatbuffers_py.fbs.InferenceSession")
    root = bindings.InferenceSession.GetRootAsInferenceSession(model.read_bytes(), 0)
    graph = root.Model().Graph()
    return [graph.Nodes(index).OpType().decode() for index in range(graph.NodesLength())]


def _types_of(node: Any, known: Mapping[Any, Any]) -> set[str]:
    from onnxruntime.tools.ort_format_model.types import value_name_to_typestr

    names = [node.Inputs(i) for i in range(node.InputsLength())]
    names += [node.Outputs(i) for i in range(node.OutputsLength())]
    return {value_name_to_typestr(n, known) for n in names if n and known.get(n) is not None}


def read_config(path: Path) -> OperatorConfig:
    """Read a configuration.

    Raises:
        OdtpackError: ``config-not-found``, or ``config-invalid`` naming the line.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OdtpackError(
            "config-not-found",
            f"the configuration {str(path)!r} cannot be read: {error.strerror or error}",
            hint=f"odtpack config PKG --out {path}",
        ) from error
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        lines = data.decode().splitlines()
    except ValueError as error:
        raise _invalid(path, None, str(error)) from error
    operators: set[Operator] = set()
    types: dict[tuple[str, str], dict[str, Any]] = {}
    allowed: frozenset[str] | None = None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        try:
            if line.startswith(f"{_ALLOWED_TYPES};"):
                if allowed is not None:
                    raise ValueError("allowed types stand there twice")
                allowed = frozenset(name.strip() for name in line.split(";")[1].split(","))
                continue
            for operator, entry in _parse_line(line):
                operators.add(operator)
                if entry is not None:
                    types[operator.domain, operator.name] = entry
        except (ValueError, RecursionError) as error:
            raise _invalid(path, number, str(error)) from error
    if allowed is not None and types:
        raise _invalid(path, None, "types of all operators and types of one exclude each other")
    return OperatorConfig(frozenset(operators), types, allowed)


_ENTRY = re.compile(r"\s*([A-Za-z_]\w*)\s*")


def _parse_line(line: str) -> list[tuple[Operator, dict[str, Any] | None]]:
    parts = line.split(";", 2)
    if len(parts) != 3:
        raise ValueError("it is not domain;opset;operators")
    domain, versions = parts[0].strip(), [int(text) for text in parts[1].split(",")]
    found: list[tuple[Operator, dict[str, Any] | None]] = []
    at, text = 0, parts[2]
    while True:
        match = _ENTRY.match(text, at)
        if match is None:
            raise ValueError(f"no operator at {text[at : at + 20]!r}")
        at, entry = match.end(), None
        if text.startswith("{", at):
            entry, at = json.JSONDecoder().raw_decode(text, at)
            _check_entry(entry)
        found += [(Operator(domain, version, match[1]), entry) for version in versions]
        rest = text[at:].lstrip()
        if not rest:
            return found
        if not rest.startswith(","):
            raise ValueError(f"a comma is missing before {rest[:20]!r}")
        at = len(text) - len(rest) + 1


def _check_entry(entry: Any) -> None:
    sides = {key: value for key, value in entry.items() if key in ("inputs", "outputs")}
    lists = [names for side in sides.values() if isinstance(side, dict) for names in side.values()]
    custom = entry.get("custom", [])
    if (
        entry.keys() - {"inputs", "outputs", "custom"}
        or not all(isinstance(side, dict) for side in sides.values())
        or not isinstance(custom, list)
        or not all(isinstance(names, list) for names in (*lists, *custom))
        or not all(isinstance(name, str) for names in (*lists, *custom) for name in names)
    ):
        raise ValueError("the types are not lists of names by input or output")


def _invalid(path: Path, line: int | None, why: str) -> OdtpackError:
    return OdtpackError(
        "config-invalid",
        f"the configuration is not valid: {why}",
        where=str(path) if line is None else f"{path}:{line}",
    )
