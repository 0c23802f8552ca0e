"""What a node of the domain ``odtpack.native`` computes: its body, read as a kernel's program."""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package import native_conv, native_product, native_trial
from odtpack_runtime.package.onnx_files import graphs_of
from odtpack_runtime.session.native import DOMAIN

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.package.manifest import Manifest

SLOTS: Final = {"Kernel": 64, "Codes": 20, "SignedCodes": 4}
"""Operators ``Kernel0``, ``Kernel1``, ... of the library; a model has one for each body. The first
input of the others is uint8 and int8."""
ELEMENTWISE: Final = "elementwise"

MOST_INPUTS: Final = 32
MOST_NODES: Final = 64

OPERATORS: Final = (
    "Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Min", "Max", "Relu", "Less", "LessOrEqual",
    "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Where", "Cast", "Clip", "Reciprocal",
    "Gemm", "HardSigmoid", "Identity", "Sign", "Exp", "Erf", "Tanh", "Sigmoid", "Log", "RowSum",
    "RowMean", "RowMax", "ColumnSum",
)  # fmt: skip
"""Operators of programs by their number; ``Op`` in ``runtime/native``."""
ELEMENTWISE_OPERATORS: Final = OPERATORS[: OPERATORS.index("RowSum")]
REDUCTIONS: Final = {"ReduceSum": "RowSum", "ReduceMean": "RowMean", "ReduceMax": "RowMax"}
"""Of the last axis, which is kept; a ``ReduceSum`` over all other axes is a ``ColumnSum``."""

_UNARY = {
    "Sqrt", "Neg", "Abs", "Relu", "Not", "Cast", "Reciprocal", "HardSigmoid", "Identity", "Sign",
    "Exp", "Erf", "Tanh", "Sigmoid", "Log",
}  # fmt: skip
_TERNARY = {"Where", "Clip", "Gemm"}
_TRUTH = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or"}
_OF_TRUTH = {"Not", "And", "Or"}


def has_native_nodes(manifest: Manifest) -> bool:
    """Whether a package has nodes that native kernels can run."""
    return any(DOMAIN in domains for domains in manifest.operators.by_model().values())


class NotAProgramError(ValueError):
    """A body has something that no kernel computes."""


def program_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> list[int]:
    """The program of the kernel ``elementwise`` for the nodes of a body, in their order.

    Numbers of inputs and outputs, what each output is, then four numbers for each node: its
    operator and what it reads. Values are numbered: the inputs, then what each node computes.
    Constants are axes; they are no values.

    Raises:
        NotAProgramError: The body has something else than such nodes.
    """
    numbers = {name: index for index, name in enumerate(inputs)}
    truth = [False] * len(inputs)
    constants: dict[str, list[int]] = {}
    code: list[int] = []
    if not (0 < len(inputs) <= MOST_INPUTS and len(outputs) > 0 and len(nodes) <= MOST_NODES):
        raise NotAProgramError("too many or too few values")
    if len(numbers) != len(inputs):
        raise NotAProgramError("an input twice")
    for node in nodes:
        kind = node.op_type
        if len(node.output) != 1 or node.output[0] in {"", *numbers, *constants}:
            raise NotAProgramError(f"the result of {kind}")
        if kind == "Constant":
            constants[node.output[0]] = _axes(node)
            continue
        read = [numbers.get(name, -1) for name in node.input if name not in constants]
        operands = 1 if kind in _UNARY or kind in REDUCTIONS else 3 if kind in _TERNARY else 2
        known = kind in ELEMENTWISE_OPERATORS or kind in REDUCTIONS
        if node.domain or not known or len(read) != operands or -1 in read:
            raise NotAProgramError(f"{kind} of {len(read)}")
        wanted = [kind in _OF_TRUTH or (kind == "Where" and i == 0) for i in range(operands)]
        found = [truth[each] for each in read]
        if found != wanted and kind not in ("Cast", "Identity"):
            raise NotAProgramError(f"what {kind} reads")
        if kind in REDUCTIONS:
            fields = _reduction(node, [constants[n] for n in node.input if n in constants])
            code += [fields[0], *read, *fields[1:]]
        elif len(node.input) > operands:
            raise NotAProgramError(f"{kind} of axes")
        else:
            code += [OPERATORS.index(kind), *read, *_settings(node)]
        code += [0] * (-len(code) % 4)
        numbers[node.output[0]] = len(truth)
        truth.append(kind in _TRUTH or (kind == "Identity" and found[0]))
    results = [numbers.get(name, -1) for name in outputs]
    if min(results) < len(inputs) or len({*results}) < len(results):
        raise NotAProgramError("an output that is not computed, or twice")
    if any(truth[each] for each in results):
        raise NotAProgramError("an output that is not a number")
    return [len(inputs), len(outputs), *results, *code]


def _attributes(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    """The attributes of a node by name, each once and with a value of its own."""
    found = {each.name: each for each in node.attribute}
    if any(each.ref_attr_name for each in found.values()) or len(found) != len(node.attribute):
        raise NotAProgramError(f"the attributes of {node.op_type}")
    return found


def _reduction(node: onnx.NodeProto, given: list[list[int]]) -> tuple[int, int]:
    """The operator of a reduction, and its axis from 1 on, 0 for the last, or how many it sums."""
    found = _attributes(node)
    if "axes" in found:
        given = [*given, list(found["axes"].ints)]
    keeps = "keepdims" not in found or found["keepdims"].i == 1
    if (
        len(given) != 1
        or not found.keys() <= {"axes", "keepdims"}
        or (node.input[0] == "" or len(node.input) != 2 - ("axes" in found))
    ):
        raise NotAProgramError(f"the attributes of {node.op_type}")
    (axes,) = given
    if node.op_type == "ReduceSum" and not keeps and axes and axes == [*range(len(axes))]:
        return OPERATORS.index("ColumnSum"), len(axes)
    if not keeps or len(axes) != 1 or axes[0] < -1:
        raise NotAProgramError(f"the axes of {node.op_type}")
    return OPERATORS.index(REDUCTIONS[node.op_type]), axes[0] + 1


def _axes(node: onnx.NodeProto) -> list[int]:
    """What a node of axes has."""
    import onnx.numpy_helper

    found = _attributes(node)
    tensor = found["value"].t if found.keys() == {"value"} else None
    if tensor is None or node.domain or node.input:
        raise NotAProgramError("a constant")
    if tensor.data_type != 7 or len(tensor.dims) != 1 or not 0 < tensor.dims[0] <= 8:
        raise NotAProgramError("a constant")
    return [int(each) for each in onnx.numpy_helper.to_array(tensor)]


def _settings(node: onnx.NodeProto) -> list[int]:
    """What a node's attributes add to its program: two numbers as bits, or nothing."""
    found = _attributes(node)
    if node.op_type == "HardSigmoid" and found.keys() <= {"alpha", "beta"}:
        numbers = [
            found[name].f if name in found else usual
            for name, usual in (("alpha", 0.2), ("beta", 0.5))
        ]
        return [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    if node.op_type == "Cast" and found.keys() == {"to"} and found["to"].i == 1:
        return []
    if found:
        raise NotAProgramError(f"the attributes of {node.op_type}")
    return []


def check_functions(model: onnx.ModelProto, where: str) -> None:
    """Check that each native node says of itself what its body computes.

    With the library a session runs the node's kernel, without it the body: a package whose two
    differ would compute one thing here and another there.

    Raises:
        OdtpackError: ``package-limits``, where they do, or where a body is not one of odtpack's.
    """
    bodies: dict[str, onnx.FunctionProto] = {}
    for function in model.functions:
        if function.domain == DOMAIN:
            if function.name in bodies or function.overload:
                raise _strange(function.name, where)
            bodies[function.name] = function
    calls = [n for _, nodes in graphs_of(model) for n in nodes if n.domain == DOMAIN]
    values = _Constants(model) if calls else None
    for node in calls:
        body = bodies.get(node.op_type)
        if body is None or values is None or not _says(node, body, values):
            raise _strange(node.op_type, where)


class _Constants:
    """Values of a model's constants, by name; what is named twice is not one."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.writers: dict[str, onnx.NodeProto] = {}
        self.known: set[tuple[object, ...]] = set()
        written = collections.Counter[str]()
        for graph, nodes in graphs_of(model):
            if graph in model.functions:
                continue
            written.update(each.name for each in graph.input)
            for tensor in graph.initializer:
                self.tensors[tensor.name] = tensor
                written[tensor.name] += 1
            for node in nodes:
                for name in filter(None, node.output):
                    self.writers[name] = node
                    written[name] += 1
        for name, times in written.items():
            if times > 1:
                self.tensors.pop(name, None)
                self.writers.pop(name, None)


def _says(node: onnx.NodeProto, body: onnx.FunctionProto, values: _Constants) -> bool:
    """Whether the attributes of a call are what its body computes."""
    found = {each.name: each for each in node.attribute}
    if len(found) != len(node.attribute) or found.keys() != {"kernel", "program"}:
        return False
    if (len(node.input), len(node.output)) != (len(body.input), len(body.output)):
        return False
    kernel, program = found["kernel"].s.decode("utf-8", "replace"), list(found["program"].ints)
    try:
        if kernel == ELEMENTWISE:
            return program == program_of(body.node, body.input, body.output)
        if len(body.output) != 1 or kernel not in (native_conv.DEPTHWISE, native_product.PRODUCT):
            return False
        others = (
            node.input[native_conv.inputs_of(program) :] if kernel == native_conv.DEPTHWISE else []
        )
        key = (kernel, node.op_type, *program, *others)
        if key in values.known:
            return True
        if kernel == native_product.PRODUCT:
            computes = native_product.computes(body, program)
        else:
            tensors = [
                native_trial.unpacked(each, values.tensors, values.writers) for each in others
            ]
            computes = native_conv.computes(body, program, tensors)
        if computes:
            values.known.add(key)
        return computes
    except (NotAProgramError, native_trial.RefusedError):
        return False


def _strange(name: str, where: str) -> OdtpackError:
    return OdtpackError(
        "package-limits",
        f"The operator {name!r} of the domain {DOMAIN!r} has no body, or a body that "
        "differs from its kernel.",
        where=where,
    )
