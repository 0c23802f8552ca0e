"""What a node of the domain ``odtpack.native`` computes: its body, read as a kernel's program."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.native import DOMAIN

if TYPE_CHECKING:
    import onnx

SLOTS: Final = 64
"""Operators ``Kernel0``, ``Kernel1``, ... of the library; a model has one for each body."""
ELEMENTWISE: Final = "elementwise"

MOST_INPUTS: Final = 32
MOST_NODES: Final = 64

OPERATORS: Final = (
    "Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Min", "Max", "Relu", "Less", "LessOrEqual",
    "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Where", "Cast", "Clip", "Reciprocal",
    "Gemm", "HardSigmoid", "Identity", "Sign",
)  # fmt: skip
"""Operators of elementwise programs by their number; ``Op`` in ``runtime/native``."""

_UNARY = {
    "Sqrt", "Neg", "Abs", "Relu", "Not", "Cast", "Reciprocal", "HardSigmoid", "Identity", "Sign",
}  # fmt: skip
_TERNARY = {"Where", "Clip", "Gemm"}
_TRUTH = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or"}
_OF_TRUTH = {"Not", "And", "Or"}


class NotAProgramError(ValueError):
    """A body has something that no kernel computes."""


def program_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> list[int]:
    """The program of the kernel ``elementwise`` for the nodes of a body, in their order.

    Numbers of inputs and outputs, what each output is, then four numbers for each node: its
    operator and what it reads. Values are numbered: the inputs, then what each node computes.

    Raises:
        NotAProgramError: The body has something else than such nodes.
    """
    numbers = {name: index for index, name in enumerate(inputs)}
    truth = [False] * len(inputs)
    code: list[int] = []
    if not (0 < len(inputs) <= MOST_INPUTS and len(outputs) > 0 and len(nodes) <= MOST_NODES):
        raise NotAProgramError("too many or too few values")
    if len(numbers) != len(inputs):
        raise NotAProgramError("an input twice")
    for node in nodes:
        kind = node.op_type
        operands = 1 if kind in _UNARY else 3 if kind in _TERNARY else 2
        read = [numbers.get(name, -1) for name in node.input]
        if node.domain or kind not in OPERATORS or len(read) != operands or -1 in read:
            raise NotAProgramError(f"{kind} of {len(read)}")
        if len(node.output) != 1 or node.output[0] in numbers or not node.output[0]:
            raise NotAProgramError(f"the result of {kind}")
        wanted = [kind in _OF_TRUTH or (kind == "Where" and i == 0) for i in range(operands)]
        found = [truth[each] for each in read]
        if found != wanted and kind not in ("Cast", "Identity"):
            raise NotAProgramError(f"what {kind} reads")
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
    from odtpack_runtime.package.onnx_files import graphs_of

    programs: dict[str, list[int]] = {}
    for function in model.functions:
        if function.domain == DOMAIN:
            try:
                if function.name in programs or function.overload:
                    raise NotAProgramError("two functions of one name")
                programs[function.name] = program_of(function.node, function.input, function.output)
            except NotAProgramError as error:
                raise _strange(function.name, where) from error
    for _, nodes in graphs_of(model):
        for node in nodes:
            if node.domain == DOMAIN and not _says(node, programs.get(node.op_type)):
                raise _strange(node.op_type, where)


def _says(node: onnx.NodeProto, program: list[int] | None) -> bool:
    if program is None or (len(node.input), len(node.output)) != (program[0], program[1]):
        return False
    found = {each.name: each for each in node.attribute}
    return (
        len(found) == len(node.attribute)
        and found.keys() == {"kernel", "program"}
        and found["kernel"].s == ELEMENTWISE.encode()
        and list(found["program"].ints) == program
    )


def _strange(name: str, where: str) -> OdtpackError:
    return OdtpackError(
        "package-limits",
        f"The operator {name!r} of the domain {DOMAIN!r} has no body, or another one than its "
        "kernel computes.",
        where=where,
    )
