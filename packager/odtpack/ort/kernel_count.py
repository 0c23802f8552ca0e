"""How many kernels a reduced build of ONNX Runtime keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import onnx

from odtpack.ort.operator_config import Operator, OperatorConfig

CPP_NAMES: Final = {
    "float16": "MLFloat16", "bfloat16": "BFloat16", "string": "std::string",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Types as a configuration writes them, where ONNX has another name."""


def count_kernels(config: OperatorConfig) -> tuple[int, int] | None:
    """Return how many kernels of this ONNX Runtime's CPU provider a configuration keeps, of all.

    As its build does, this keeps a kernel whose range of versions holds that of an operator,
    and, where the configuration limits types, one that is registered for a type that it allows.
    None if this ONNX Runtime does not list its kernels.
    """
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
    names = {constraint: set(map(_cpp_name, types)) for constraint, types in registered.items()}
    if config.allowed_types is not None:
        nameable = {name for types in names.values() for name in types} & _NAMEABLE
        allowed = config.allowed_types
        return all(types & allowed for types in names.values() if types <= nameable)
    entry = config.types.get((operator.domain, operator.name))
    if not entry:
        return True
    domain = "" if operator.domain == "ai.onnx" else operator.domain
    if not onnx.defs.has(operator.name, operator.version, domain):
        formals: dict[str, Any] = {}
    else:
        schema = onnx.defs.get_schema(operator.name, operator.version, domain)
        formals = {"inputs": schema.inputs, "outputs": schema.outputs}
    for side, by_index in entry.items():
        if side == "custom" or side not in formals:
            continue
        for index, allowed_names in by_index.items():
            formal = formals[side][min(int(index), len(formals[side]) - 1)]
            types = names.get(formal.type_str) or names.get(formal.name)
            if types and not types & set(allowed_names):
                return False
    return True


def _cpp_name(onnx_name: str) -> str:
    name = onnx_name.removeprefix("tensor(").removesuffix(")")
    return CPP_NAMES.get(name, name)


_NAMEABLE: Final = {"bool", "float", "double", *CPP_NAMES.values()}
"""What a list of globally allowed types can name."""
