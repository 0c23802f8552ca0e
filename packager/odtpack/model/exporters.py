"""What PyTorch's exporters do to the names of parameters, and how to find them again.

A linear layer on a sequence is exported as MatMul with the transposed weight, a recurrent
layer with its gates in another order, a normalization inside the convolution before it:
the exporters compute these tensors and name them ``onnx::MatMul_324`` or ``val_14``. The
names that they had in the module follow from what is around them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import onnx.defs
import onnx_ir as ir

# Names of what they compute from parameters and constants while they export.
_GENERATED = re.compile(r"(val|tmp)(_\d+)*|onnx::\w+_\d+")

COMPUTED = "onnx::"
"""Starts the names of what the older exporter computes."""

# How torch.export notes what an initializer was in the module: PARAMETER, BUFFER, ...
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"

_NUMBERED = re.compile(r"_\d+$")

SCOPES = "pkg.torch.onnx.name_scopes"
"""How torch.export notes the modules around a node."""

_AFFINE = {1: "weight", 2: "bias"}
_ROLES = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _AFFINE),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "LayerNormalization"), _AFFINE),
    "BatchNormalization": {**_AFFINE, 3: "running_mean", 4: "running_var"},
    "Gemm": {0: "weight", **_AFFINE},
    "MatMul": {0: "weight", 1: "weight"},
    "PRelu": {1: "weight"},
}
RECURRENT = ("GRU", "LSTM", "RNN")

# Parts of a layer that is written in several nodes.
_LOOSE = {"Mul": "weight", "Add": "bias"}


def is_generated(name: str) -> bool:
    """Whether a name is one that exporters give to what they compute."""
    return _GENERATED.fullmatch(name) is not None


def made_up(graph: ir.Graph) -> set[str]:
    """Names of initializers that an exporter made up, so that they say nothing of the module.

    torch.export notes which initializers are parameters. What it has no note of was computed
    from them, and is named after the operation (``permute_1``, ``slice_1``, ``zeros_like``),
    where it did not keep the name of a parameter, which has a dot.
    """
    noted = any(KIND in value.metadata_props for value in graph.initializers.values())
    return {
        name
        for name, value in graph.initializers.items()
        if is_generated(name) or (noted and KIND not in value.metadata_props and "." not in name)
    }


def module_names(graph: ir.Graph) -> dict[str, str]:
    """Names in the module, such as ``blocks.0.qkv.weight``, by those that an exporter made up.

    A name that would mean two initializers means none.
    """
    found: dict[str, str] = {}
    for name in sorted(made_up(graph)):
        uses = graph.initializers[name].uses()
        guesses = {g for node, index in uses if (g := beside(node) or _within(node, index))}
        if len(guesses) == 1:
            found[name] = guesses.pop()
    counts = Counter([*found.values(), *graph.initializers])
    return {name: guess for name, guess in found.items() if counts[guess] == 1}


def matching(pattern: str, names: Iterable[str], original: Mapping[str, str]) -> list[str]:
    """The names that a pattern matches, as they are or as they were in the module.

    Args:
        pattern: A name, or a glob.
        names: Names of initializers.
        original: Names in the module, see :func:`module_names`.
    """
    return [
        name
        for name in names
        if fnmatchcase(name, pattern) or fnmatchcase(original.get(name, name), pattern)
    ]


def origin(node: ir.Node, index: int) -> str | None:
    """Which tensor of which module a node reads; one name for all calls of a module.

    The older exporter numbers what would have the same name, be it another call of the
    same module or another module, so that its numbers are left out.
    """
    kind, path = role(node, index), _path(node)
    return f"{path}.{kind}" if path and kind else None


def place(node: ir.Node) -> str | None:
    """Which node of which module a node is; one name for all calls of a module."""
    path = _path(node)
    return f"{path}/{(node.name or '').rpartition('/')[2]}" if path else None


def _path(node: ir.Node) -> str:
    scopes = _scopes(node)
    if SCOPES not in node.metadata_props:
        scopes = [_NUMBERED.sub("", scope) for scope in scopes]
    return _join(scopes)


def beside(node: ir.Node) -> str | None:
    """``layer.weight`` where ``layer.bias`` is added to the product."""
    if node.op_type != "MatMul":
        return None
    for add in node.outputs[0].consumers():
        for other in add.inputs if add.op_type == "Add" else ():
            name = "" if other is None or not other.is_initializer() else other.name or ""
            if name.endswith("bias"):
                return name.removesuffix("bias") + "weight"
    return None


def _within(node: ir.Node, index: int) -> str | None:
    """The module that a node was exported from, and which of its tensors this is."""
    kind = fixed_role(node, index)
    path = _join(_scopes(node)) if kind else ""
    return f"{path}.{kind}" if path else None


def role(node: ir.Node, index: int) -> str | None:
    """What a tensor is to its module, by the operator and the place among its inputs."""
    return fixed_role(node, index) or _LOOSE.get(node.op_type)


def fixed_role(node: ir.Node, index: int) -> str | None:
    """The same, where the operator alone decides."""
    if node.op_type in RECURRENT:
        return onnx.defs.get_schema(node.op_type).inputs[index].name
    return _ROLES.get(node.op_type, {}).get(index)


def _scopes(node: ir.Node) -> list[str]:
    """Modules around a node, from the outside in, each named from the root or its parent."""
    noted = node.metadata_props.get(SCOPES)
    if noted is None:
        name = node.name or ""
        return name.split("/")[1:-1] if name.startswith("/") else []
    scopes: list[str] = re.findall("'([^']*)'", noted)  # a list of texts, as Python writes it
    return scopes[-2:-1]  # the last is the operator, the one before it has the whole path


def _join(scopes: list[str]) -> str:
    """A child of a container has the container's name in its own: blocks, blocks.0."""
    inner = [*scopes[1:], ""]
    return ".".join(
        scope
        for scope, below in zip(scopes, inner, strict=False)
        if scope and not below.startswith(f"{scope}.")
    )
