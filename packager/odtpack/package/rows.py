"""Rows of parameters that stay as they are, as that of ``padding_idx`` in PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.errors import OdtpackError, UnknownNameError, near_names
from odtpack.model.exporters import matching, module_names
from odtpack.optimizers import Optimizer
from odtpack.spec import BuildSpec


def frozen_rows(
    model: ir.Model, spec: BuildSpec, trained: Sequence[str], optimizer: Optimizer
) -> dict[str, tuple[int, ...]]:
    """Which rows of which parameters stay as they are."""
    found: dict[str, tuple[int, ...]] = {}
    original = module_names(model.graph)
    for text in spec.freeze_rows:
        pattern, _, number = text.rpartition("=")
        names = matching(pattern, trained, original)
        if pattern and not names:
            raise UnknownNameError(
                "unknown-parameter",
                f"--freeze-row {text!r} matches no parameter that trains",
                hint=near_names(pattern, trained, "odtpack inspect MODEL.onnx lists them"),
            )
        for name in names or [""]:
            tensor = model.graph.initializers[name].const_value if name else None
            rows = tensor.shape.numpy()[:1] if tensor is not None else ()
            decay = next((g[2] for g in spec.groups if matching(g[0], [name], original)), None)
            problem, hint = None, "write for example: --freeze-row embedding.weight=0"
            if tensor is None or not rows or not number.isdecimal():
                problem = f"--freeze-row {text!r} is not NAME=ROW"
            elif int(number) >= rows[0]:
                problem = f"--freeze-row {text!r}: {name!r} has {rows[0]} rows, 0 to {rows[0] - 1}"
            elif spec.privacy_clip is not None:
                problem = "the noise of private training changes every row"
                hint = "leave --freeze-row or --privacy-clip out"
            elif np.any(tensor.numpy()[int(number)]) and (
                optimizer.weight_decay if decay is None else decay
            ):
                problem = f"row {number} of {name!r} is not zero, and weight decay would change it"
                hint = f"put it into a group without decay: --group {name + ':decay=0'!r}"
            if problem is not None:
                raise OdtpackError("bad-row", problem, hint=hint)
            found[name] = (*found.get(name, ()), int(number))
    return found


def zero_rows(
    model: ir.Model, trained: Sequence[str], frozen: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """A sentence for each embedding that trains and has rows that are exactly zero."""
    for name in trained:
        value = model.graph.initializers[name]
        tensor = value.const_value
        looked_up = all(use.node.op_type == "Gather" and use.idx == 0 for use in value.uses())
        if tensor is None or len(tensor.shape) != 2 or not looked_up:
            continue
        array = tensor.numpy()
        rows = [int(row) for row in np.flatnonzero(array[:, 0] == 0) if not array[row].any()]
        rows = [row for row in rows if row not in frozen.get(name, ())]
        if rows and len(rows) < len(array):
            yield (
                f"row {rows[0]} of {name} is exactly zero, as padding_idx leaves it, and trains; "
                f"--freeze-row {f'{name}={rows[0]}'!r} keeps it"
            )
