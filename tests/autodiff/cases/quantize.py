"""DequantizeLinear; simulated quantization is held to its formula in ``tests/passes``."""

import numpy as np
import torch

from tests.autodiff.oracle import Array, Case, cases, joined, spread

LEVELS = np.random.default_rng(0).integers(-100, 100, (2, 3, 8))


def dequantized(x: torch.Tensor, scale: torch.Tensor, *zero: torch.Tensor) -> torch.Tensor:
    """With scale and zero point of as many axes as ``x``, or of none."""
    return (x.double() - (zero[0].double() if zero else 0)) * scale


def along(axis: int, block: int = 0):  # type: ignore[no-untyped-def]
    def function(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        wide = [
            p.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
            if block
            else p.reshape(-1, *[1] * (x.ndim - 1 - axis))
            for p in parameters
        ]
        return dequantized(x, *wide)

    return function


def inputs(dtype: str, shape: tuple[int, ...], zero: bool = True) -> dict[str, Array | None]:
    """Levels, scales and zero points."""
    unsigned = np.dtype(dtype).kind == "u"
    found: dict[str, Array | None] = {
        "x": (LEVELS + 100 * unsigned).astype(dtype),
        "scale": spread(*shape, low=0.1) if shape else np.float32(0.7),
    }
    if zero:
        count = int(np.prod(shape))
        found["zero"] = np.arange(5, 5 + count).reshape(shape).astype(dtype)
    return found


# opsets, type, axis, block size, shape of scale
ROWS = [
    ((12, 13, 19, 21, 23, 24, 25), "int8", None, 0, ()),
    ((13, 21, 25), "uint8", None, 0, ()),
    ((21, 25), "int16", None, 0, ()),
    ((21, 25), "uint16", 1, 0, (3,)),
    ((13, 19, 21, 23, 24, 25), "int8", 1, 0, (3,)),
    ((13, 21), "uint8", 2, 0, (8,)),
    ((13, 21), "int8", 0, 0, (2,)),
    ((21, 23, 24, 25), "int8", 2, 4, (2, 3, 2)),
    ((21, 25), "uint8", 1, 2, (2, 2, 8)),
]

CASES: list[Case] = [
    *joined(cases("DequantizeLinear", inputs(dtype, shape),
                  dequantized if axis is None else along(axis, block), opsets,
                  **({} if axis is None else {"axis": axis if axis else -3}),
                  **({"block_size": block} if block else {}),
                  batch=["x"] if not block and axis != 0 else [], differences="torch",
                  label=f"{dtype}-axis{axis}-block{block}")
            for opsets, dtype, axis, block, shape in ROWS),
    *cases("DequantizeLinear", inputs("int8", (), zero=False), dequantized, (12, 21),
           differences="torch", label="no-zero-point"),
    *cases("DequantizeLinear", inputs("int32", (), zero=False), dequantized, (12, 21),
           differences="torch", label="int32"),
]  # fmt: skip
