"""What the codes of a quantized file stand for, and the module with these values."""

import dataclasses

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from tests.adapters import genai

LINEAR = ("Conv1D", "Linear")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """What codes of few bits stand for: [out, in], [out, in, width] of a convolution, or rows."""

    values: torch.Tensor
    rounds: bool = False  # data are rounded too
    table: bool = False  # rows are taken from it, and no product reads it


def matrices(proto: onnx.ModelProto) -> list[Matrix]:
    """The matrices that a file stores in codes of few bits."""
    stored = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    found = []

    def by_tensor(name: str, codes: str) -> np.ndarray:
        scale, zero = (
            stored[f"{name}_{end}"].astype(np.float32) for end in ("scale", "zero_point")
        )
        return (stored[codes].astype(np.float32) - zero) * scale

    for node in proto.graph.node:
        first, *others = *node.input, ""
        if node.op_type == "MatMulNBits":
            found.append(Matrix(genai.numbers(proto, node)))
        elif node.op_type == "GatherBlockQuantized" and first in stored:  # not tied
            codes, scales = stored[first], stored[others[1]]
            rows = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1) - 8.0
            wide = scales.repeat(-(-rows.shape[1] // scales.shape[1]), 1)[:, : rows.shape[1]]
            found.append(Matrix(torch.from_numpy((rows * wide).astype(np.float32)), table=True))
        elif node.op_type == "DequantizeLinear" and first in stored:
            codes, scales, *zero = (stored[name].astype(np.float32) for name in node.input)
            if codes.ndim == 2 and scales.ndim == 2:  # by blocks of rows
                scales = np.repeat(scales, len(codes) // len(scales), 0)
                zeros = np.repeat(zero[0], len(codes) // len(zero[0]), 0) if zero else 0
                found.append(Matrix(torch.from_numpy(((codes - zeros) * scales).T.copy())))
        elif node.op_type == "MatMulInteger" and others[0] in stored:
            values = by_tensor(others[0].removesuffix("_quantized"), others[0])
            found.append(Matrix(torch.from_numpy(values.T.copy()), rounds=True))
        elif node.op_type == "ConvInteger" and others[0] in stored:
            values = by_tensor(others[0].removesuffix("_quantized"), others[0])
            found.append(Matrix(torch.from_numpy(values), rounds=True))
        elif node.op_type == "Gather" and first.endswith("_quantized") and first in stored:
            values = by_tensor(first.removesuffix("_quantized"), first)
            found.append(Matrix(torch.from_numpy(values), table=True))
    return found


class Undecided(Exception):
    """A value lies so near the middle of two codes that float32 may take the other one."""


NEAR = 1e-5
"""How near in codes: what float32 is off at codes of 255."""


def in_bytes(_: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Round what a layer reads as DynamicQuantizeLinear does; gradients pass.

    Of values in float64 that may be rounded otherwise it raises Undecided.
    """
    x = given[0].detach()
    least, most = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (most - least) / 255
    zero, codes = -least / scale, x / scale
    both = torch.cat([codes.flatten(), zero.reshape(1)])
    if x.dtype == torch.float64 and (both - both.floor() - 0.5).abs().min() < NEAR:
        raise Undecided
    zero = zero.round()
    rounded = (codes.round() + zero).clamp(0, 255).sub(zero).mul(scale)
    return (given[0] + (rounded - x),)


def take_over(module: nn.Module, weights: list[Matrix]) -> None:
    """Give a module's layers the values of the rows that are nearest, by value and not by name."""
    products = [each for each in module.modules() if type(each).__name__ in LINEAR]
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    both = [*products, *tables]
    if any(each.table for each in weights):  # it is not tied to the product's
        both = products
        for layer in products:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    convolutions = [each for each in module.modules() if isinstance(each, nn.Conv1d)]
    for matrix in weights:
        values, count = matrix.values, 0
        if values.ndim > 2:
            (layer,) = (
                each
                for each in convolutions
                if each.weight.shape == values.shape
                and (each.weight - values).norm() < 0.2 * values.norm()
            )
            layer.weight = nn.Parameter(values)
            layer.register_forward_pre_hook(in_bytes)
            continue
        for layer in tables if matrix.table else both:
            weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
            if weight.shape[1] != values.shape[1]:
                continue
            with torch.no_grad():
                whole = len(weight) <= len(values)
                inner, outer = (weight, values) if whole else (values, weight)
                first = int((outer - inner[0]).norm(dim=1).argmin())
                rows = outer[first : first + len(inner)]
                if rows.shape != inner.shape or (rows - inner).norm() > 0.2 * inner.norm():
                    continue
                (weight if whole else rows).copy_(rows if whole else values)
                count += 1
            if matrix.rounds and not layer._forward_pre_hooks:
                layer.register_forward_pre_hook(in_bytes)
        assert count, f"the {tuple(values.shape)} of a quantized tensor are no layer's"
