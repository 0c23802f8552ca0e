"""What a node of the domain ``odtpack.native`` computes: its body, read as a kernel's program."""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package import native_conv, native_product, native_trial
from odtpack_runtime.session.native import DOMAIN

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.package.manifest import Manifest

SLOTS: Final = {"Kernel": 64, "Codes": 20, "SignedCodes": 4}
"""Operators ``Kernel0``, ``Kernel1``, ... of the library; a model has one for each body. The first
input of the others is uint8 and int8."""
ELEMENTWISE: Final = "elementwise"
CHANNELS: Final = "channels"

MOST_INPUTS: Final = 32
MOST_NODES: Final = 64

OPERATORS: Final = (
    "Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Min", "Max", "Relu", "Less", "LessOrEqual",
    "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Where", "Cast", "Clip", "Reciprocal",
    "Gemm", "HardSigmoid", "Identity", "Sign", "Exp", "Erf", "Tanh", "Sigmoid", "Log", "RowSum",
    "RowMean", "RowMax", "ColumnSum", "ChannelSum", "Spread", "Shift",
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
    program = _Program(inputs, outputs, len(nodes))
    for node in nodes:
        if node.op_type == "Constant":
            program.constant(node)
        elif node.op_type in REDUCTIONS and not node.domain:
            fields = _reduction(node, program.constants_of(node))
            program.add(fields[0], program.read(node, 1), *fields[1:], result=program.result(node))
        else:
            program.elementwise(node)
    return [len(inputs), len(outputs), *program.results(outputs), *program.code]


def channels_program_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> list[int]:
    """The program of the kernel ``channels`` for the nodes of a body, in their order.

    As :func:`program_of`, with the rank of values [N, C, ...] after the number of outputs, 0 for
    any. Two sums, over space and then over samples, are one ``ChannelSum``, a ``Reshape`` of [C] is
    a ``Spread``, and ``BatchNormalization`` is x a + (bias - mean a) with a = scale / sqrt(variance
    + epsilon), as ONNX Runtime computes it.

    Raises:
        NotAProgramError: The body has something else, or a value that is of [C] and of the whole.
    """
    program = _Program(inputs, outputs, len(nodes))
    partial: dict[str, int] = {}  # sums over space
    ranks = set[int]()
    for node in nodes:
        kind, given = node.op_type if not node.domain else "", program.constants_of(node)
        if kind == "Constant":
            program.constant(node)
        elif kind == "ReduceSum":
            axes, keeps = _axes_of_sum(node, given)
            if axes == [0] and node.input[0] in partial and not keeps:
                whole = [partial[node.input[0]]]
                program.add(OPERATORS.index("ChannelSum"), whole, result=program.result(node))
            elif axes and axes == [*range(2, 2 + len(axes))] and not keeps:
                (summed,) = program.read(node, 1)
                partial[program.result(node)] = summed
                ranks.add(2 + len(axes))
            else:
                raise NotAProgramError("the axes of ReduceSum")
        elif kind == "Reshape":
            if len(given) != 1 or given[0] != [-1, *[1] * (len(given[0]) - 1)] or node.attribute:
                raise NotAProgramError("the shape of Reshape")
            ranks.add(1 + len(given[0]))
            numbers = program.read(node, 1)
            program.add(OPERATORS.index("Spread"), numbers, result=program.result(node))
        elif kind == "BatchNormalization":
            _normalize(program, node)
        else:
            program.elementwise(node)
    if len(ranks) > 1 or min(ranks, default=3) < 3:
        raise NotAProgramError("two ranks")
    _check_forms(program)
    rank = ranks.pop() if ranks else 0
    return [len(inputs), len(outputs), rank, *program.results(outputs), *program.code]


def _axes_of_sum(node: onnx.NodeProto, given: list[list[int]]) -> tuple[list[int], bool]:
    """The axes of a sum, and whether it keeps them."""
    found = {each.name: each for each in node.attribute}
    if "axes" in found:
        given = [*given, list(found["axes"].ints)]
    if (
        len(given) != 1
        or not _has_only(node, "axes", "keepdims")
        or len(node.input) != 2 - ("axes" in found)
    ):
        raise NotAProgramError(f"the attributes of {node.op_type}")
    return given[0], "keepdims" not in found or found["keepdims"].i == 1


def _has_only(node: onnx.NodeProto, *names: str) -> bool:
    """Whether a node has at most these attributes, each once and as a value."""
    found = {each.name for each in node.attribute}
    return (
        found <= {*names}
        and len(found) == len(node.attribute)
        and not any(each.ref_attr_name for each in node.attribute)
    )


def _normalize(program: _Program, node: onnx.NodeProto) -> None:
    """Write a BatchNormalization with given statistics."""
    found = {each.name: each for each in node.attribute}
    trains = "training_mode" in found and found["training_mode"].i != 0
    if not _has_only(node, "epsilon", "momentum", "training_mode") or trains:
        raise NotAProgramError("the attributes of BatchNormalization")
    x, scale, bias, mean, variance = program.read(node, 5)
    epsilon = found["epsilon"].f if "epsilon" in found else 1e-5

    def add(kind: str, *read: int, result: str | None = None) -> int:
        bits = [_bits(epsilon)] if kind == "Shift" else []
        return program.add(OPERATORS.index(kind), read, *bits, result=result)

    gain = add("Mul", scale, add("Reciprocal", add("Sqrt", add("Shift", variance))))
    shift = add("Sub", bias, add("Mul", mean, gain))
    product = add("Mul", x, add("Spread", gain))
    add("Add", product, add("Spread", shift), result=program.result(node))


def _check_forms(program: _Program) -> None:
    """Check that each value is either of [C] or of the whole, as the kernel does."""
    same = list(range(len(program.truth)))

    def root(value: int) -> int:
        while same[value] != value:
            value = same[value]
        return value

    ends: list[tuple[int, str]] = []
    first = len(same) - len(program.steps)
    for result, (kind, read) in enumerate(program.steps, first):
        if kind in ("ChannelSum", "Spread"):
            sums = kind == "ChannelSum"
            ends += [(read[0], "whole" if sums else "channel"),
                     (result, "channel" if sums else "whole")]  # fmt: skip
        else:
            for value in read:
                same[root(value)] = root(result)
    known: dict[int, str] = {}
    for value, form in ends:
        if known.setdefault(root(value), form) != form:
            raise NotAProgramError("a value is of channels and of the whole")


class _Program:
    """Instructions of a program, and what its values are."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], nodes: int) -> None:
        self._numbers = {name: index for index, name in enumerate(inputs)}
        self._constants: dict[str, list[int]] = {}
        self._others: set[str] = set()  # results that are no values of the program
        self.truth = [False] * len(inputs)
        self.code: list[int] = []
        self.steps: list[tuple[str, Sequence[int]]] = []
        if not (0 < len(inputs) <= MOST_INPUTS and len(outputs) > 0 and nodes <= MOST_NODES):
            raise NotAProgramError("too many or too few values")
        if len(self._numbers) != len(inputs):
            raise NotAProgramError("an input twice")

    def result(self, node: onnx.NodeProto) -> str:
        """The name of a node's only result, which nothing had before."""
        name = node.output[0] if len(node.output) == 1 else ""
        if name in {"", *self._numbers, *self._constants, *self._others}:
            raise NotAProgramError(f"the result of {node.op_type}")
        self._others.add(name)
        return name

    def constant(self, node: onnx.NodeProto) -> None:
        """Take note of axes or of a shape."""
        self._constants[self.result(node)] = _axes(node)

    def constants_of(self, node: onnx.NodeProto) -> list[list[int]]:
        """The axes or shapes that a node reads."""
        return [self._constants[name] for name in node.input if name in self._constants]

    def read(self, node: onnx.NodeProto, count: int) -> list[int]:
        """The numbers that a node reads."""
        found = [self._numbers.get(n, -1) for n in node.input if n not in self._constants]
        if len(found) != count or -1 in found or any(self.truth[each] for each in found):
            raise NotAProgramError(f"what {node.op_type} reads")
        return found

    def add(
        self, operator: int, read: Sequence[int], *settings: int,
        result: str | None = None, truth: bool = False,
    ) -> int:  # fmt: skip
        """Write an instruction; return the number of its value."""
        fields = [operator, *read, *settings]
        self.code += [*fields, *[0] * (4 - len(fields))]
        self.steps.append((OPERATORS[operator], tuple(read)))
        if result is not None:
            self._numbers[result] = len(self.truth)
        self.truth.append(truth)
        return len(self.truth) - 1

    def elementwise(self, node: onnx.NodeProto) -> None:
        """Write an elementwise node."""
        kind = node.op_type
        read = [self._numbers.get(name, -1) for name in node.input if name not in self._constants]
        operands = 1 if kind in _UNARY else 3 if kind in _TERNARY else 2
        if node.domain or kind not in ELEMENTWISE_OPERATORS or len(read) != operands or -1 in read:
            raise NotAProgramError(f"{kind} of {len(read)}")
        wanted = [kind in _OF_TRUTH or (kind == "Where" and i == 0) for i in range(operands)]
        found = [self.truth[each] for each in read]
        if found != wanted and kind not in ("Cast", "Identity"):
            raise NotAProgramError(f"what {kind} reads")
        if len(node.input) > operands:
            raise NotAProgramError(f"{kind} of axes")
        truth = kind in _TRUTH or (kind == "Identity" and found[0])
        self.add(
            OPERATORS.index(kind), read, *_settings(node), result=self.result(node), truth=truth
        )

    def results(self, outputs: Sequence[str]) -> list[int]:
        """The value of each output."""
        found = [self._numbers.get(name, -1) for name in outputs]
        if min(found) < len(self.truth) - len(self.steps) or len({*found}) < len(found):
            raise NotAProgramError("an output that is not computed, or twice")
        if any(self.truth[each] for each in found):
            raise NotAProgramError("an output that is not a number")
        return found


def _reduction(node: onnx.NodeProto, given: list[list[int]]) -> tuple[int, int]:
    """The operator of a reduction, and its axis from 1 on, 0 for the last, or how many it sums."""
    axes, keeps = _axes_of_sum(node, given)
    if node.op_type == "ReduceSum" and not keeps and axes and axes == [*range(len(axes))]:
        return OPERATORS.index("ColumnSum"), len(axes)
    if not keeps or len(axes) != 1 or axes[0] < -1:
        raise NotAProgramError(f"the axes of {node.op_type}")
    return OPERATORS.index(REDUCTIONS[node.op_type]), axes[0] + 1


def _axes(node: onnx.NodeProto) -> list[int]:
    """What a node of axes has."""
    import onnx.numpy_helper

    found = {each.name: each for each in node.attribute}
    tensor = found["value"].t if found.keys() == {"value"} else None
    if tensor is None or len(node.attribute) != 1 or node.domain or node.input:
        raise NotAProgramError("a constant")
    if tensor.data_type != 7 or len(tensor.dims) != 1 or not 0 < tensor.dims[0] <= 8:
        raise NotAProgramError("a constant")
    return [int(each) for each in onnx.numpy_helper.to_array(tensor)]


def _settings(node: onnx.NodeProto) -> list[int]:
    """What a node's attributes add to its program: two numbers as bits, or nothing."""
    found = {each.name: each for each in node.attribute}
    if any(each.ref_attr_name for each in found.values()) or len(found) != len(node.attribute):
        raise NotAProgramError(f"the attributes of {node.op_type}")
    if node.op_type == "HardSigmoid" and found.keys() <= {"alpha", "beta"}:
        numbers = [
            found[name].f if name in found else usual
            for name, usual in (("alpha", 0.2), ("beta", 0.5))
        ]
        return [_bits(number) for number in numbers]
    if node.op_type == "Cast" and found.keys() == {"to"} and found["to"].i == 1:
        return []
    if found:
        raise NotAProgramError(f"the attributes of {node.op_type}")
    return []


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little")


def check_functions(model: onnx.ModelProto, where: str) -> None:
    """Check that each native node says of itself what its body computes.

    With the library a session runs the node's kernel, without it the body: a package whose two
    differ would compute one thing here and another there.

    Raises:
        OdtpackError: ``package-limits``, where they do, or where a body is not one of odtpack's.
    """
    from odtpack_runtime.package.onnx_files import graphs_of

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
        from odtpack_runtime.package.onnx_files import graphs_of

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
        if kernel == CHANNELS:
            return program == channels_program_of(body.node, body.input, body.output)
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
        f"The operator {name!r} of the domain {DOMAIN!r} has no body, or another one than its "
        "kernel computes.",
        where=where,
    )
