"""Writes packager/odtpack/ort/kernels.json: since which release ONNX Runtime has which CPU kernel.

docs/runtimes.md says how releases are asked. Only what opset 12 and newer can contain is in the
table, and `com.microsoft…`, which ONNX Runtime writes into files in ORT format.

usage: python -m scripts.kernel_table        takes minutes, and 3 GB of disk
"""

import base64
import collections
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from scripts.old_runtimes import ROOT, environment

RELEASES = [f"1.{minor}" for minor in range(8, 33)]
TABLE = ROOT / "packager" / "odtpack" / "ort" / "kernels.json"
PROBE = Path(__file__).with_name("kernel_probe.py")
OLDEST_OPSET = 12
_CONTRIB = "com.microsoft"

Kernel = tuple[str, str, tuple[int, int], dict[str, list[str]]]
Found = set[tuple[str, str, int, str, str]]
"""Domain, operator, version, constraint and type."""


def ask(release: str, *arguments: str) -> Any:
    command = [environment(release), PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> Iterator[onnx.defs.OpSchema]:
    """Operators of the standard, each version that a model of today may contain."""
    known = sorted(
        (each for each in onnx.defs.get_all_schemas_with_history()
         if not each.domain and each.support_level.name == "COMMON"),
        key=lambda each: (each.name, each.since_version),
    )  # fmt: skip
    for schema, following in zip(known, [*known[1:], None], strict=True):
        last = following is None or following.name != schema.name
        if last or following.since_version > OLDEST_OPSET:
            yield schema


def _takes(kernel: Kernel, version: int) -> bool:
    """Whether a kernel is one of this version, as ONNX Runtime matches them."""
    first, last = kernel[2]
    return version == first or first <= version <= last < 2**31 - 1


def listed(kernels: list[Kernel]) -> Found:
    """What a list of kernels holds."""
    wanted = collections.defaultdict[tuple[str, str], list[int]](list)
    for schema in versions():
        wanted["ai.onnx", schema.name].append(schema.since_version)
    found: Found = set()
    for kernel in kernels:
        domain, name, _, constraints = kernel
        for version in [1] if domain == _CONTRIB else wanted[domain, name]:
            if _takes(kernel, version):
                found.add((domain, name, version, "", ""))
                for constraint, types in constraints.items():
                    found |= {(domain, name, version, constraint, each) for each in types}
    return found


def probes(kernels: list[Kernel]) -> dict[tuple[str, str, int, str, str], bytes]:
    """A model for each type of each kernel; domain, operator, version, constraint and type."""
    made = {}
    for schema, kernel in itertools.product(versions(), kernels):
        key, types = ("ai.onnx", schema.name), kernel[3]
        if kernel[:2] != key or not _takes(kernel, schema.since_version):
            continue
        others = {constraint: names[0] for constraint, names in types.items()}
        for constraint, names in types.items() or {"": [""]}.items():
            for each in names:
                model = probe(schema, {**others, constraint: each})
                if model is not None:
                    made[*key, schema.since_version, constraint, each] = model
    return made


def probe(schema: onnx.defs.OpSchema, types: dict[str, str]) -> bytes | None:
    """A model of one node; None if a type has no declaration or an attribute is a graph."""
    if schema.name in _BODIES:
        if declared(kind := types.get("V", "")) is None:
            return None
        named = re.sub(r"tensor\((\w+)\)", r"\1[]", kind)
        graph = re.sub(r"\bT\b", named, _BODIES[schema.name])
        return model_of(schema, onnx.parser.parse_graph(f"probe {graph}"))
    allowed = {c.type_param_str: sorted(c.allowed_type_strs)[0] for c in schema.type_constraints}
    needed = {formal.type_str for formal in schema.outputs}
    last = max(
        (index for index, formal in enumerate(schema.inputs)
         if formal.option.name != "Optional" or formal.type_str in types.keys() - needed),
        default=-1,
    )  # fmt: skip
    inputs = []
    for index, formal in enumerate(schema.inputs[: last + 1]):
        usual = types.get(formal.name, allowed.get(formal.type_str, formal.type_str))
        proto = declared(types.get(formal.type_str, usual))
        if proto is None:
            return None
        inputs.append(helper.make_value_info(f"x{index}", proto))
    outputs = [
        f"y{i}" for i, formal in enumerate(schema.outputs) if formal.option.name != "Optional"
    ]
    required = [each for each in schema.attributes.values() if each.required]
    attributes = {each.name: _ATTRIBUTES.get(each.type.name) for each in required}
    if None in attributes.values():
        return None
    if schema.name == "Cast":
        target = declared(types.get("T2", "tensor(float)"))
        attributes["to"] = 1 if target is None else target.tensor_type.elem_type
    if schema.name == "Einsum":
        attributes["equation"] = "ij->ij"
    node = helper.make_node(schema.name, [i.name for i in inputs], outputs or ["y0"], **attributes)
    nowhere = [helper.make_empty_tensor_value_info(name) for name in node.output]
    return model_of(schema, helper.make_graph([node], "probe", inputs, nowhere))


def model_of(schema: onnx.defs.OpSchema, graph: onnx.GraphProto) -> bytes:
    model = onnx.ModelProto(ir_version=7, graph=graph)
    model.opset_import.add(domain="", version=schema.since_version)
    return model.SerializeToString()


_BODIES = {
    "If": """(bool cond, T x) => (z) { z = If (cond) <
        then_branch = branch () => (T y) { y = Identity (x) },
        else_branch = branch () => (T y) { y = Identity (x) }> }""",
    "Loop": """(int64 M, bool start, T x0) => (z) { z = Loop (M, start, x0) <
        body = body (int64 i, bool go, T x) => (bool on, T y) {
            on = Identity (go) y = Identity (x) }> }""",
    "Scan": """(T xs) => (z) { z = Scan (xs) <
        num_scan_inputs = 1, body = body (T x) => (T y) { y = Identity (x) }> }""",
}
"""Graphs whose node has subgraphs, through which a value of a type T passes unchanged."""


_ATTRIBUTES = {"INT": 1, "INTS": [1, 1], "FLOAT": 1.0, "STRING": "x", "STRINGS": ["x"]}


def declared(type_name: str) -> onnx.TypeProto | None:
    if type_name.startswith("seq("):
        inner = declared(type_name[4:-1])
        return inner and helper.make_sequence_type_proto(inner)
    if not type_name.startswith("tensor("):
        return None
    try:
        number = TensorProto.DataType.Value(type_name[7:-1].upper())
    except ValueError:
        return None
    return helper.make_tensor_type_proto(number, None)


def formats(release: str) -> dict[str, int]:
    """The newest opset and IR version that a release loads."""
    tried = [(opset, 7) for opset in range(OLDEST_OPSET, 30)]
    tried += [(OLDEST_OPSET, version) for version in range(3, 20)]
    empty = [
        onnx.parser.parse_model(
            f'<ir_version: {version}, opset_import: ["" : {opset}]> g (float x) => (float y) '
            "{ y = Abs(x) }"
        ).SerializeToString()
        for opset, version in tried
    ]
    answers = zip(tried, load(release, empty), strict=True)
    held = [each for each, answer in answers if answer == "yes"]
    return dict(zip(("opset", "ir_version"), map(max, zip(*held, strict=True)), strict=True))


def load(release: str, models: Iterable[bytes]) -> list[str]:
    """Answers of a release, see kernel_probe.py."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as stream:
        json.dump([base64.b64encode(model).decode() for model in models], stream)
        stream.flush()
        return list(ask(release, "load", stream.name))


def main() -> None:
    lists = {release: ask(release, "list") for release in RELEASES}
    kernels = {
        release: [(domain, name, tuple(span), types) for domain, name, span, types in found]
        for release, found in lists.items()
        if found is not None
    }
    models = probes(next(iter(kernels.values())))
    since: dict[tuple[str, str, int, str, str], str] = {}
    for release in RELEASES:
        if release in kernels:
            found = listed(kernels[release])
        else:
            answers = dict(zip(models, load(release, models.values()), strict=True))
            found = {key for key, answer in answers.items() if answer == "yes"}
            found |= {(*key[:3], "", "") for key in found}
            strange = collections.Counter(
                a[:90] for a in answers.values() if a not in ("yes", "no")
            )
            print(release, len(found), "other errors:", strange.most_common(4), file=sys.stderr)
        gone = since.keys() - found
        print(release, len(found), "kernel types, gone:", sorted(gone)[:5], file=sys.stderr)
        since = {**dict.fromkeys(found, release), **since}
    tree: dict[str, Any] = {}
    for (domain, name, version, constraint, each), release in sorted(since.items()):
        entry = tree.setdefault(domain, {}).setdefault(f"{name};{version}", {})
        plain = each.removeprefix("tensor(").removesuffix(")") if "tensor(" in each[:7] else each
        entry.setdefault(constraint, {}).setdefault(release, []).append(plain)
    content = {"formats": {each: formats(each) for each in RELEASES}, "kernels": tree}
    TABLE.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
