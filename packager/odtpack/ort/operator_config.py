"""Operator configurations of reduced builds: written, read, and checked against what runs."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

from odtpack.choices import Types
from odtpack.errors import OdtpackError
from odtpack.ort.format import open_optimized, session_options
from odtpack.ort.kernel_needs import operators_of
from odtpack.ort.session_runs import SessionRun, final_graph
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.files.atomic import open_regular
from odtpack_runtime.package.checks import read_model

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
    """A configuration."""

    operators: frozenset[Operator]
    # For operators by domain and name: what their JSON holds. An operator that is not there is not
    # limited.
    types: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    # C++ names of the types of all operators; None without a limit.
    allowed_types: frozenset[str] | None = None

    def text(self, comments: Sequence[str] = ()) -> str:
        """Return the file's content: comments, then lines sorted by domain and version."""
        lines = [f"# {comment}" for comment in comments]
        if self.allowed_types is not None:
            lines.append(f"{_ALLOWED_TYPES};{','.join(sorted(self.allowed_types))}")
        by_opset = itertools.groupby(sorted(self.operators), lambda o: (o.domain, o.version))
        for (domain, version), own in by_opset:
            found = [(each.name, self.types.get((domain, each.name))) for each in own]
            entries = [name + (json.dumps(types) if types else "") for name, types in found]
            lines.append(f"{domain};{version};{','.join(entries)}")
        return "\n".join(lines) + "\n"


def config_of(models: Iterable[Path], types: Types = Types.NONE) -> OperatorConfig:
    """Return what models in ORT format need."""
    # Its package must come first: it makes the bindings of the format importable.
    from onnxruntime.tools.ort_format_model import (
        GloballyAllowedTypesOpTypeImplFilter,
        OperatorTypeUsageManager,
        OrtFormatModelProcessor,
    )
    from onnxruntime.tools.ort_format_model.types import value_name_to_typestr

    class SeesAll(OperatorTypeUsageManager):  # type: ignore[misc] # it has no types
        """Also sees the type of every value, which takes much longer."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def process_node(self, node: Any, known: dict[Any, Any]) -> None:
            super().process_node(node, known)
            names = [node.Inputs(i) for i in range(node.InputsLength())]
            names += [node.Outputs(i) for i in range(node.OutputsLength())]
            typed = [n for n in names if n and known.get(n) is not None]
            self.seen.update(value_name_to_typestr(n, known) for n in typed)

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


def read_config(path: Path) -> OperatorConfig:
    """Read a configuration."""
    try:
        with open_regular(path) as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OdtpackError(
            "config-not-found",
            f"the configuration {str(path)!r} cannot be read: {error.strerror or error}",
            hint=f"odtpack config PKG --out {quote(str(path))}",
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


Feeds = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]

_ALWAYS_THERE = {("ai.onnx", "Cast", f"{side} 0", "bool") for side in ("inputs", "outputs")}
"""Types that a build has in any case: every Cast to and from bool, which If and Where need."""


@dataclass(frozen=True)
class Ran:
    """What one session did."""

    run: SessionRun  # how the model was run
    operators: frozenset[Operator]  # operators of all its nodes, those of subgraphs included
    nodes: int  # how many nodes the main graph has, each of which ran
    kernels_run: int  # how many kernels ran, each iteration of a loop counted
    # C++ names of the types that ran, by domain, name and ``inputs`` or ``outputs`` and index.
    types: frozenset[tuple[str, str, str, str]]


@dataclass(frozen=True)
class Verdict:
    """Result of the check."""

    ran: tuple[Ran, ...]  # what was run
    missing: tuple[str, ...]  # what sessions need and the configuration lacks, in words
    unused: tuple[str, ...]  # what the configuration holds and no session needs, in words

    @property
    def passed(self) -> bool:
        """Whether the configuration holds what is needed, and nothing else."""
        return not self.missing and not self.unused


def check_config(
    config: OperatorConfig,
    runs: Sequence[SessionRun],
    feeds: Callable[[SessionRun], Feeds],
    scratch: Path,
) -> Verdict:
    """Run models and compare with a configuration."""
    limited = bool(config.types) or config.allowed_types is not None
    ran, graphs = [], []
    for number, run in enumerate(runs):
        graph = None
        if limited or run.level is None:
            graph = final_graph(run, scratch / f"final-{number}.ort")
            graphs.append(graph)
        ran.append(_run(run, graph, feeds(run), scratch))
    needed = frozenset().union(*(each.operators for each in ran))
    missing = [str(operator) for operator in sorted(needed - config.operators)]
    unused = [str(operator) for operator in sorted(config.operators - needed)]
    seen = frozenset().union(*(each.types for each in ran))
    if config.types:
        static = _flat(config_of(graphs, Types.OPERATOR).types)
        given = _flat(config.types)
        listed = {(domain, name) for domain, name, _, _ in given}
        tracked = {entry[:3] for entry in given if entry[2] != "custom"}
        run_types = {entry for entry in seen if entry[:3] in tracked}
        wanted = {entry for entry in static if entry[:2] in listed} | run_types
        words = "{0};{1}: type {3} of {2}"
        missing += [words.format(*entry) for entry in sorted(wanted - given - _ALWAYS_THERE)]
        unused += [words.format(*entry) for entry in sorted(given - wanted)]
    if config.allowed_types is not None:
        in_graphs = config_of(graphs, Types.GLOBAL).allowed_types or frozenset()
        wanted_types = in_graphs | {type_ for *_, type_ in seen}
        missing += [f"type {name}" for name in sorted(wanted_types - config.allowed_types)]
        unused += [f"type {name}" for name in sorted(config.allowed_types - wanted_types)]
    return Verdict(tuple(ran), tuple(missing), tuple(unused))


def _flat(types: Mapping[tuple[str, str], Mapping[str, Any]]) -> set[tuple[str, str, str, str]]:
    flat = set()
    for (domain, name), entry in types.items():
        for side in ("inputs", "outputs"):
            for index, names in entry.get(side, {}).items():
                flat |= {(domain, name, f"{side} {index}", type_) for type_ in names}
        for triple in entry.get("custom", ()):
            flat.add((domain, name, "custom", ", ".join(triple)))
    return flat


def _run(run: SessionRun, graph: Path | None, feeds: Feeds, scratch: Path) -> Ran:
    """Run a model once, and say which kernels there are and which ran."""
    saved, given = scratch / "saved.onnx", scratch / "feeds"
    given.mkdir(exist_ok=True)
    files = {}
    for index, (name, array) in enumerate(feeds.items()):
        files[name] = str(given / f"{index}.npy")
        # Text as an array of its own type: objects would be pickled.
        np.save(files[name], array.astype(np.str_) if array.dtype == object else array)
    profile = Path(
        apart.call(
            "odtpack.ort.operator_config:run_profiled",
            apart.Limits.of([run.path, *files.values()]),
            model=str(run.path),
            level=run.level,
            platform=run.platform,
            replay=bool(run.replay),
            feeds=files,
            saved=str(saved),
            profile=str(scratch / "profile"),
        )
    )
    events = [event for event in json.loads(profile.read_bytes()) if event.get("cat") == "Node"]
    profile.unlink()
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    if run.level is None:
        assert graph is not None  # noqa: S101 - made for every model in ORT format
        operators = config_of([graph]).operators
        main = main_graph(graph)
    else:
        model = read_model(saved)
        saved.unlink()
        opsets = {entry.domain: entry.version for entry in model.opset_import}
        found = operators_of(model.graph, opsets, {})
        operators = frozenset(
            Operator(domain or "ai.onnx", version, name) for domain, name, version, *_ in found
        )
        main = [node.op_type for node in model.graph.node]
    names = {event["args"]["op_name"] for event in kernels}
    known = {operator.name for operator in operators}
    strange = (names - known) | (set(main) - names)
    if strange:
        raise OdtpackError(
            "check-graph-differs",
            f"what ONNX Runtime ran is not the graph that it saved: {', '.join(sorted(strange))}",
            where=str(run),
        )
    types = frozenset(_types(kernels, operators))
    return Ran(run, operators, len(main), len(kernels), types)


def run_profiled(
    model: str, level: str | None, platform: str | None, replay: bool,
    feeds: Mapping[str, str], saved: str, profile: str,
) -> str:  # fmt: skip
    """Run a model once and return the path of its profile; to be called apart."""
    # level: Optimization level; None in ORT format. platform: Processors that it is optimized for;
    # None for all. feeds: Paths of ``.npy`` files by name of input. saved: Where the optimized
    # model goes, of one with a level. profile: Start of the profile's path.
    options = session_options(level or "all", platform)
    options.enable_profiling = True
    options.profile_file_prefix = profile
    if level is not None:
        options.optimized_model_filepath = saved
    if replay:
        options.add_session_config_entry("session.enable_saved_runtime_optimizations", "1")
    try:
        session = open_optimized(Path(model), options, platform)
        arrays = {
            node.name: np.load(feeds[node.name], allow_pickle=False)
            for node in session.get_inputs()
        }
        session.run(None, arrays)
        return str(session.end_profiling())
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise OdtpackError(
            "check-run-failed",
            f"ONNX Runtime cannot run the model for the check: {error}",
            where=model,
        ) from error


def _types(
    events: Iterable[Mapping[str, Any]], operators: Iterable[Operator]
) -> Iterable[tuple[str, str, str, str]]:
    domains: dict[str, set[str]] = {}
    for operator in operators:
        domains.setdefault(operator.name, set()).add(operator.domain)
    for event in events:
        arguments = event["args"]
        for side in ("input", "output"):
            for index, described in enumerate(arguments.get(f"{side}_type_shape", ())):
                for type_ in described:
                    for domain in domains[arguments["op_name"]]:
                        name = CPP_NAMES.get(type_, type_)
                        yield domain, arguments["op_name"], f"{side}s {index}", name


def version() -> str:
    """Return the version of ONNX Runtime that the check ran on."""
    return str(onnxruntime.__version__)


CPP_NAMES: Final = {
    "float16": "MLFloat16", "bfloat16": "BFloat16", "string": "std::string",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Types as a configuration writes them, where ONNX has another name."""


def count_kernels(config: OperatorConfig) -> tuple[int, int] | None:
    """Return how many kernels of this ONNX Runtime's CPU provider a configuration keeps, of all."""
    # As its build does: a kernel whose range of versions holds that of an operator is kept, and,
    # where the configuration limits types, one that is registered for an allowed type.
    from onnxruntime.capi import onnxruntime_pybind11_state

    kernel_defs = getattr(onnxruntime_pybind11_state, "get_all_opkernel_def", None)
    if kernel_defs is None:
        return None
    kernels = [kernel for kernel in kernel_defs() if kernel.provider == "CPUExecutionProvider"]
    versions: dict[tuple[str, str], list[Operator]] = {}
    for each in config.operators:
        versions.setdefault((each.domain, each.name), []).append(each)
    kept = [
        kernel
        for kernel in kernels
        if any(
            kernel.version_range[0] <= operator.version <= kernel.version_range[1]
            and _has_types(kernel.type_constraints, operator, config)
            for operator in versions.get((kernel.domain or "ai.onnx", kernel.op_name), ())
        )
    ]
    return len(kept), len(kernels)


def _has_types(
    registered: Mapping[str, Collection[str]], operator: Operator, config: OperatorConfig
) -> bool:
    """Whether each type that a kernel is registered for may be one that is allowed."""
    names = {
        constraint: {
            CPP_NAMES.get(name, name)
            for each in types
            for name in [each.removeprefix("tensor(").removesuffix(")")]
        }
        for constraint, types in registered.items()
    }
    if config.allowed_types is not None:
        nameable = {name for types in names.values() for name in types} & _NAMEABLE
        allowed = config.allowed_types
        return all(types & allowed for types in names.values() if types <= nameable)
    entry = config.types.get((operator.domain, operator.name))
    domain = "" if operator.domain == "ai.onnx" else operator.domain
    if not entry or not onnx.defs.has(operator.name, operator.version, domain):
        return True
    schema = onnx.defs.get_schema(operator.name, operator.version, domain)
    for side, formals in (("inputs", schema.inputs), ("outputs", schema.outputs)):
        for index, allowed_names in entry.get(side, {}).items():
            formal = formals[min(int(index), len(formals) - 1)]
            types = names.get(formal.type_str) or names.get(formal.name)
            if types and not types & set(allowed_names):
                return False
    return True


_NAMEABLE: Final = {"bool", "float", "double", *CPP_NAMES.values()}
"""What a list of globally allowed types can name."""
