"""Loop and Scan for the ONNX reference evaluator, as the standard describes them.

Its own Loop takes an absent condition for false and joins scan outputs along an axis that they
have; its own Scan knows neither directions nor axes.
"""

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray


class Loop(OpRun):  # type: ignore[misc]
    def need_context(self) -> bool:
        return True

    def _run(self, *inputs: Any, context: Any = None, body: Any = None, **_: Any) -> Any:
        trips, going, *states = (*inputs, *[None] * (2 - len(inputs)))
        going = True if going is None else bool(going)
        names = body.input_names
        stacks: list[list[Array]] = [[] for _ in body.output_names[1 + len(states) :]]
        turn = 0
        while going and (trips is None or turn < trips):
            given = [np.array(turn, np.int64), np.array(going), *states]
            feeds = {**(context or {}), **dict(zip(names, given, strict=True))}
            going, *results = body.run(None, feeds)
            states = results[: len(states)]
            for stack, part in zip(stacks, results[len(states) :], strict=True):
                stack.append(part)
            turn += 1
        dims = [_dims(value) for value in body.output_types_[1 + len(states) :]] if not turn else []
        empty = [np.zeros((0, *shape)) for shape in dims]
        return (*states, *(empty or [np.stack(stack) for stack in stacks]))


def _dims(proto: Any) -> list[int]:
    return [dim.dim_value for dim in proto.tensor_type.shape.dim]


class Scan(OpRun):  # type: ignore[misc]
    def need_context(self) -> bool:
        return True

    def _run(self, *inputs: Array, context: Any = None, body: Any = None,
             num_scan_inputs: int = 0, scan_input_axes: Any = None,
             scan_input_directions: Any = None, scan_output_axes: Any = None,
             scan_output_directions: Any = None, **_: Any) -> Any:  # fmt: skip
        count = len(inputs) - num_scan_inputs
        states, wholes = list(inputs[:count]), list(inputs[count:])
        stacks: list[list[Array]] = [[] for _ in body.output_names[count:]]
        axes = scan_input_axes or [0] * len(wholes)
        ways = scan_input_directions or [0] * len(wholes)
        wholes = [np.moveaxis(w, axis, 0)[:: -1 if way else 1]
                  for w, axis, way in zip(wholes, axes, ways, strict=True)]  # fmt: skip
        for parts in zip(*wholes, strict=True):
            given = [*states, *(np.asarray(part) for part in parts)]
            feeds = {**(context or {}), **dict(zip(body.input_names, given, strict=True))}
            results = body.run(None, feeds)
            states = results[:count]
            for stack, part in zip(stacks, results[count:], strict=True):
                stack.append(part)
        axes = scan_output_axes or [0] * len(stacks)
        ways = scan_output_directions or [0] * len(stacks)
        joined = [np.stack(stack[:: -1 if way else 1], axis)
                  for stack, axis, way in zip(stacks, axes, ways, strict=True)]  # fmt: skip
        return (*states, *joined)
