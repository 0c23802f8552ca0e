"""Change the parameters by their gradients."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint_format import OptimizerState
from odtpack_runtime.errors import OdtpackError, WrongTypeError
from odtpack_runtime.layout import Array, address, allocate, view
from odtpack_runtime.module import Module
from odtpack_runtime.session import first_line, open_session
from odtpack_runtime.signature import TensorSpec

DEFAULT_LEARNING_RATE = 0.001
CHUNK_ELEMENTS = 128 * 1024
"""Elements per run of the optimizer model.

Small enough that the vectors of a run, half a MiB each, stay in a processor's
caches, large enough that starting a run costs little and that two threads share
the work. AdamW over 20 million parameters takes half the time of one run over
the whole; chunks of 64 K or 256 K differ by a few percent either way.
"""

MOMENT_NAMES = ("first_order_moments", "second_order_moments")


class Optimizer:
    """The optimizer of a package: ``onnxruntime.training.api.Optimizer`` on stock ONNX Runtime.

    The optimizer model knows one flat vector of parameters, one of gradients
    and one per moment. It is run over the state's flat buffers chunk by chunk
    and writes in place. Gradients remain until :meth:`Module.lazy_reset_grad`.

    If the module's state came with an optimizer's state, step count, moments
    and learning rate continue from there.

    Args:
        optimizer_uri: Optimizer model, ``.onnx`` or ``.ort``.
        module: The module whose state is trained.

    Raises:
        OdtpackError: The model is missing, does not load or is no optimizer
            model; nothing is trainable; or the state holds another optimizer's
            moments (``optimizer-mismatch``).
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        if not isinstance(module, Module):
            raise WrongTypeError(
                "not-a-module", f"An Optimizer needs a Module, not a {type(module).__name__}."
            )
        where = str(optimizer_uri)
        flat = module.flat
        if not flat.trainable.slots:
            raise OdtpackError(
                "nothing-trainable",
                "The checkpoint marks no parameter as trainable: there is nothing to optimize.",
                hint="name parameters in requires_grad when building the package",
            )
        self._module = module
        self._session = open_session(optimizer_uri, module.session_options)
        moment_names = _moment_names(self._session, where, flat.dtype)
        self._state, moments = _place_moments(module, moment_names, where)
        module.state.optimizer = self._state
        self._learning_rate = np.full(1, self._state.learning_rate, np.float32)
        self._step = np.zeros(1, np.int64)
        vectors: dict[str, Array] = {
            "params": flat.parameters.view(flat.dtype),
            "gradients": flat.gradients.view(flat.dtype),
            **dict(zip(moment_names, moments, strict=True)),
        }
        # Also keeps the memory alive: ONNX Runtime holds bare addresses.
        self._vectors = vectors
        metadata = self._session.get_modelmeta().custom_metadata_map
        total = vectors["params"].size
        whole = metadata.get("odtpack.elementwise") == "false"
        chunk = max(total, 1) if whole else CHUNK_ELEMENTS
        self._bindings = [
            self._bind(start, min(start + chunk, total)) for start in range(0, total, chunk)
        ]

    def step(self) -> None:
        """Make one step with the accumulated gradients; they remain as they are.

        Raises:
            OdtpackError: ``run-failed`` with ONNX Runtime's reason, ``nominal-state`` if the
                parameters have no values yet.
        """
        self._module.require_values()
        self._step[0] = self._state.step + 1
        run = self._session.run_with_iobinding
        try:
            for binding in self._bindings:
                run(binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise OdtpackError(
                "run-failed",
                f"ONNX Runtime failed in the middle of an optimizer step: {first_line(error)}",
                hint="load the last checkpoint: parameters may hold part of the step",
            ) from error
        self._state.step += 1

    def get_learning_rate(self) -> float:
        """Return the learning rate, with the precision of float32. The default is 0.001."""
        return self._state.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the steps to come.

        Raises:
            OdtpackError: ``bad-learning-rate`` if it is no finite float32.
        """
        rate = _float32(learning_rate)
        self._learning_rate[0] = rate
        self._state.learning_rate = rate

    @property
    def step_count(self) -> int:
        """Number of steps made, those before a resumed checkpoint included."""
        return self._state.step

    def _bind(self, start: int, stop: int) -> Any:
        binding = self._session.io_binding()
        scalars: dict[str, Array] = {"learning_rate": self._learning_rate, "step": self._step}
        slices: dict[str, Array] = {n: vector[start:stop] for n, vector in self._vectors.items()}
        for name, array in {**scalars, **slices}.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, address(array))
        for name, array in slices.items():
            if name != "gradients":
                binding.bind_output(
                    f"{name}.out", "cpu", 0, array.dtype.type, array.shape, address(array)
                )
        return binding


def _moment_names(
    session: onnxruntime.InferenceSession, where: str, dtype: np.dtype[Any]
) -> tuple[str, ...]:
    """Check that a model is an optimizer model; return the names of its moments."""
    inputs = {node.name: TensorSpec.of_node(node, where) for node in session.get_inputs()}
    outputs = {node.name: TensorSpec.of_node(node, where) for node in session.get_outputs()}
    moments = tuple(name for name in MOMENT_NAMES if name in inputs)
    vector = (dtype, (CHUNK_ELEMENTS,))
    wanted: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "learning_rate": (np.dtype(np.float32), (1,)),
        "step": (np.dtype(np.int64), (1,)),
        **dict.fromkeys(("params", "gradients", *moments), vector),
    }
    results = dict.fromkeys((f"{name}.out" for name in ("params", *moments)), vector)
    for specs, expected in ((inputs, wanted), (outputs, results)):
        wrong = specs.keys() ^ expected.keys()
        wrong |= {name for name in expected.keys() - wrong if not specs[name].fits(*expected[name])}
        if wrong:
            raise OdtpackError(
                "not-an-optimizer",
                f"The model is no optimizer model of odtpack: '{min(wrong)}' is missing, not "
                "expected, or of another type or shape.",
                where=where,
                hint="pass the optimizer_model.onnx of the package",
            )
    return moments


def _place_moments(
    module: Module, names: tuple[str, ...], where: str
) -> tuple[OptimizerState, list[Array]]:
    """Return a new optimizer state in flat vectors, continuing the loaded one if there is one."""
    layout = module.flat.trainable
    loaded = module.state.optimizer
    if loaded is None:
        loaded = OptimizerState(0, _float32(DEFAULT_LEARNING_RATE), {})
    count = len(next(iter(loaded.moments.values()), ()))
    idle = not any(moment.any() for own in loaded.moments.values() for moment in own)
    # The reference saves one moment per parameter with SGD, and never uses it.
    unused = idle and (loaded.step == 0 or (count == 1 and not names))
    if count != len(names) and not unused:
        raise OdtpackError(
            "optimizer-mismatch",
            f"The checkpoint holds the state of an optimizer with {count} moments per parameter, "
            f"and this one keeps {len(names)}.",
            where=where,
            hint="use the optimizer the checkpoint was saved with, or a checkpoint without "
            "optimizer state",
        )
    memories = [allocate(layout.nbytes) for _ in names]
    moments: dict[str, list[Array]] = {}
    for slot in layout.slots:
        # Popped one by one: what is moved is freed.
        old = loaded.moments.pop(slot.name, [])
        new = [view(memory, slot) for memory in memories]
        if count == len(names):
            for target, source in zip(new, old, strict=False):
                np.copyto(target, source)
        if new:
            moments[slot.name] = new
    state = OptimizerState(loaded.step, loaded.learning_rate, moments)
    return state, [memory.view(module.flat.dtype) for memory in memories]


def _float32(value: float) -> float:
    try:
        with np.errstate(over="ignore"):
            rate = float(np.float32(value))
    except (TypeError, ValueError):
        rate = math.nan
    if not math.isfinite(rate):
        raise OdtpackError(
            "bad-learning-rate",
            f"The learning rate must be a finite number, not {value!r}.",
            hint=f"take for example {DEFAULT_LEARNING_RATE}",
        )
    return rate
