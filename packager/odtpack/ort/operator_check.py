"""The closed-world check: what sessions really run against what a configuration keeps.

A configuration is made from graphs in ORT format. The check takes other ways to the same
facts: the operators are those of the graph that a session saves in ONNX format, with their
versions from the standard's own schemas; and each model is run, and every kernel that ran
must be one of that graph, with types that the configuration allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from odtpack.choices import Types
from odtpack.errors import OdtpackError
from odtpack.ort.format import open_optimized, session_options
from odtpack.ort.kernel_count import CPP_NAMES
from odtpack.ort.operator_config import Operator, OperatorConfig, config_of, main_graph
from odtpack.ort.session_runs import SessionRun, final_graph

Feeds = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]

_ALWAYS_THERE = {("ai.onnx", "Cast", f"{side} 0", "bool") for side in ("inputs", "outputs")}
"""Types that a build has in any case: every Cast to and from bool, which If and Where need."""


@dataclass(frozen=True)
class Ran:
    """What one session did.

    Attributes:
        run: How the model was run.
        operators: Operators of all its nodes, those of subgraphs included.
        nodes: How many nodes the main graph has, each of which ran.
        kernels_run: How many kernels ran, each iteration of a loop counted.
        types: C++ names of the types that ran, by domain, name and ``inputs`` or ``outputs``
            and index.
    """

    run: SessionRun
    operators: frozenset[Operator]
    nodes: int
    kernels_run: int
    types: frozenset[tuple[str, str, str, str]]


@dataclass(frozen=True)
class Verdict:
    """Result of the check.

    Attributes:
        ran: What was run.
        missing: What sessions need and the configuration lacks, in words.
        unused: What the configuration holds and no session needs, in words.
    """

    ran: tuple[Ran, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

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
    """Run models and compare with a configuration.

    Args:
        config: The configuration.
        runs: Every way in which a session may run a model.
        feeds: Gives the inputs to run a model with, by name.
        scratch: Folder for what sessions save.

    Raises:
        OdtpackError: A model cannot be run, or what ran is not what the session saved.
    """
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
        missing += [_words(entry) for entry in sorted(wanted - given - _ALWAYS_THERE)]
        unused += [_words(entry) for entry in sorted(given - wanted)]
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


def _words(entry: tuple[str, str, str, str]) -> str:
    domain, name, where, type_ = entry
    return f"{domain};{name}: type {type_} of {where}"


def _run(run: SessionRun, graph: Path | None, feeds: Feeds, scratch: Path) -> Ran:
    """Run a model once, and say which kernels there are and which ran."""
    options = session_options(run.level or "all", run.platform)
    options.enable_profiling = True
    options.profile_file_prefix = str(scratch / "profile")
    saved = scratch / "saved.onnx"
    if run.level is not None:
        options.optimized_model_filepath = str(saved)
    if run.replay:
        options.add_session_config_entry("session.enable_saved_runtime_optimizations", "1")
    try:
        session = open_optimized(run.path, options, run.platform)
        session.run(None, {node.name: feeds[node.name] for node in session.get_inputs()})
        profile = Path(session.end_profiling())
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise OdtpackError(
            "check-run-failed",
            f"ONNX Runtime cannot run the model for the check: {error}",
            where=str(run.path),
        ) from error
    events = [event for event in json.loads(profile.read_bytes()) if event.get("cat") == "Node"]
    profile.unlink()
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    if run.level is None:
        assert graph is not None  # noqa: S101 - made for every model in ORT format
        operators = config_of([graph]).operators
        main = main_graph(graph)
    else:
        model = onnx.load(saved, load_external_data=False)
        saved.unlink()
        opsets = {entry.domain: entry.version for entry in model.opset_import}
        operators = frozenset(_operators(model.graph, opsets))
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


def _operators(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Iterable[Operator]:
    """Operators of every node, those of subgraphs included."""
    for node in graph.node:
        yield Operator(node.domain or "ai.onnx", _since(node, opsets), node.op_type)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _operators(inner, opsets)


def _since(node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = opsets[domain]
    if onnx.defs.has(node.op_type, version, domain):
        return int(onnx.defs.get_schema(node.op_type, version, domain).since_version)
    return version  # of ONNX Runtime's own domains there is one version so far


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
