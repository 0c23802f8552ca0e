"""Optimizer steps and their state."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.format import OptimizerState
from odtpack_runtime.checkpoint.parameters import (
    CHUNK_ELEMENTS,
    Array,
    Layout,
    Slot,
    allocate,
    view,
)
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, WrongTypeError
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.mapped_weights import give_back_freed_memory
from odtpack_runtime.session.session import bind_here, first_line, open_session
from odtpack_runtime.training.module import Module, loss_value
from odtpack_runtime.training.optimizer_contract import (
    Group,
    OptimizerContract,
    Privacy,
    StepGraph,
    check_signature,
    matrix,
    read_contract,
)
from odtpack_runtime.training.parameter_vector import MOST_NAMES, NotFinite, gradient_norm

# Give an optimizer's state its place in memory, and take over what a checkpoint holds of it.

DEFAULT_LEARNING_RATE = 0.001

Memory = npt.NDArray[np.uint8]


def place_state(
    module: Module, contract: OptimizerContract, layouts: Sequence[Layout], where: str
) -> tuple[OptimizerState, list[Memory]]:
    """Return a new optimizer state in flat vectors, continuing the loaded one if there is one."""
    # `layouts`: that of each state vector.
    # Returns the state, whose moments are views, and the memory of each state vector.
    layout = module.flat.trainable
    loaded = module.state.optimizer
    if loaded is None:
        loaded = OptimizerState(0, to_float32(DEFAULT_LEARNING_RATE), {})
    taken = _fits(loaded, contract.kind, layouts, where)
    memories = [allocate(each.nbytes) for each in layouts]
    moments: dict[str, list[Array]] = {}
    for index, slot in enumerate(layout.slots):
        # Popped one by one: what is moved is freed.
        old = loaded.moments.pop(slot.name, [])
        new = [
            view(memory, each.slots[index]) for memory, each in zip(memories, layouts, strict=True)
        ]
        if taken:
            for target, source in zip(new, old, strict=False):
                np.copyto(target, source)
        if new:
            moments[slot.name] = new
    groups = tuple(group.parameters for group in contract.groups)
    state = OptimizerState(loaded.step, loaded.learning_rate, moments, groups, contract.kind)
    return state, memories


def state_layout(parameters: Layout, contract: OptimizerContract, index: int) -> Layout:
    """Return the layout of one state vector: that of the parameters, unless it is reduced."""
    vector = contract.state[index]
    if vector.axes is None:
        return parameters
    return Layout.pack(
        (slot.name, vector.stored_shape(slot.shape), slot.dtype) for slot in parameters.slots
    )


def _fits(loaded: OptimizerState, kind: str | None, layouts: Sequence[Layout], where: str) -> bool:
    """Check a loaded state against what the optimizer keeps; return whether it is taken over."""
    count = len(next(iter(loaded.moments.values()), ()))
    idle = not any(moment.any() for own in loaded.moments.values() for moment in own)
    # The reference saves one moment per parameter with SGD, and never uses it.
    unused = idle and (loaded.step == 0 or (count == 1 and not layouts))
    if count != len(layouts):
        problem = f"{count} moments per parameter, and this one keeps {len(layouts)}"
    else:
        shapes = {
            (slot.name, i): slot.shape for i, each in enumerate(layouts) for slot in each.slots
        }
        odd = next(
            (
                name
                for name, own in loaded.moments.items()
                for i, moment in enumerate(own)
                if moment.shape != shapes.get((name, i))
            ),
            None,
        )
        if odd is not None:
            problem = f"moments of '{odd}' of other shapes than this one keeps"
        elif None not in (loaded.kind, kind) and loaded.kind != kind:
            problem = f"the kind {loaded.kind!r:.40}, and this one is {kind!r:.40}"
        else:
            return True
    if unused:
        return False
    raise OdtpackError(
        "optimizer-mismatch",
        f"The checkpoint holds the state of an optimizer with {problem}.",
        where=where,
        hint="use the optimizer the checkpoint was saved with, or a checkpoint without "
        "optimizer state",
    )


def to_float32(value: float) -> float:
    """Return a learning rate as float32 holds it."""
    kind = OdtpackError
    try:
        with np.errstate(over="ignore"):
            rate = float(np.float32(float(value)))
    except OverflowError:
        rate = math.inf
    except (TypeError, ValueError):
        rate, kind = math.nan, WrongTypeError
    if not 0 <= rate < math.inf:
        raise kind(
            "bad-learning-rate",
            f"The learning rate must be a finite number of at least 0, not {value!r:.40}.",
            hint=f"take for example {DEFAULT_LEARNING_RATE}",
        )
    return rate


# Change the parameters by their gradients.


class Optimizer:
    """The optimizer of a package: ``onnxruntime.training.api.Optimizer`` on stock ONNX Runtime.

    The optimizer model knows one flat vector of parameters, one of gradients
    and one per moment. It is run over the state's flat buffers chunk by chunk,
    group by group, and writes in place; one that needs the shapes of the
    parameters is run parameter by parameter. Gradients, also those that the model
    clips, remain as they are until :meth:`Module.lazy_reset_grad`.

    If the module's state came with an optimizer's state, step count, moments
    and learning rate continue from there.

    Args:
        optimizer_uri: Optimizer model, ``.onnx`` or ``.ort``.
        module: The module whose state is trained.

    Raises:
        OdtpackError: The model is missing, does not load or is not an optimizer
            model; nothing is trainable; its groups name other parameters
            (``model-mismatch``); or the state holds another optimizer's moments
            (``optimizer-mismatch``).
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        if not isinstance(module, Module):
            raise WrongTypeError(
                "not-a-module", f"An Optimizer needs a Module, not a {type(module).__name__}."
            )
        module.require_open()
        where = str(optimizer_uri)
        flat = module.flat
        if not flat.trainable.slots:
            what = "The checkpoint marks no parameter as trainable: there is nothing to optimize."
            raise OdtpackError("nothing-trainable", what)
        self._module = module
        self._device = module.device
        self._session = open_session(optimizer_uri, module.session_options, self._device)
        inputs = self._session.get_inputs()
        metadata = self._session.get_modelmeta().custom_metadata_map
        contract = read_contract(metadata, [node.name for node in inputs], where)
        dtype = flat.trainable.slots[0].dtype
        check_signature(contract, inputs, self._session.get_outputs(), dtype, where)
        contract.check_groups([slot.name for slot in flat.trainable.slots], where)
        if self._device is not None and (contract.whole or contract.privacy is not None):
            raise OdtpackError(
                "unsupported-device",
                "Private training, and optimizers that read all parameters as one vector, run "
                "on the processor only.",
                where=where,
            )
        self._contract = contract
        self._checkpoint_state = state = module.state
        self._step = np.zeros(1, np.int64)
        self._norm = np.zeros(1, dtype)
        self._gradients = flat.gradients.view(dtype)
        groups = contract.groups or (Group(1.0, 0.0, ()),)
        self._groups = groups
        self._rates = np.zeros(len(groups), np.float32)
        kept = state.optimizer
        self._set_rates(to_float32(DEFAULT_LEARNING_RATE) if kept is None else kept.learning_rate)
        layouts = [state_layout(flat.trainable, contract, i) for i in range(len(contract.state))]
        if module.step_graph is not None:
            sizes = {
                f"{slot.name}.{vector.name}": slot.size
                for vector, layout in zip(contract.state, layouts, strict=True)
                for slot in layout.slots
            }
            module.step_graph.check_optimizer(sizes, len(groups), where)
        # Nothing has been changed so far: an Optimizer that cannot be made leaves the state alone.
        self._state, memories = place_state(module, contract, layouts, where)
        state.optimizer, state.settled = self._state, True
        if module.step_graph is not None:
            vectors = {
                f"{slot.name}.{vector.name}": moment
                for slot in flat.trainable.slots
                for vector, moment in zip(
                    contract.state, self._state.moments.get(slot.name, ()), strict=True
                )
            }
            module.step_graph.bind_optimizer(vectors, self._rates, self._step)
        # Vectors and scalars are also kept alive here: ONNX Runtime holds bare addresses.
        names = [vector.name for vector in contract.state]
        self._vectors = {
            "params": (flat.parameters, flat.trainable),
            "gradients": (flat.gradients, flat.trainable),
            **dict(zip(names, zip(memories, layouts, strict=True), strict=True)),
        }
        self._kept: list[Array] = []
        self._runs: list[tuple[Any, dict[str, Array], dict[str, Array]]] = []
        module.when_closed(self._close)
        give_back_freed_memory()  # what the sessions needed to load, and what was moved

    @functools.cached_property
    def _bindings(self) -> list[Any]:
        """Every run of a step; not made where a step model makes all steps."""
        scalars = [self._scalars(index, group) for index, group in enumerate(self._groups)]
        by_parameter = self._contract.by_parameter or self._device is not None
        runs = self._parameter_runs if by_parameter else self._flat_runs
        return [self._bind(scalars[group] | extra, slices) for group, extra, slices in runs()]

    def __repr__(self) -> str:
        rate = f"learning rate {self._state.learning_rate:g}"
        return (
            f"Optimizer({self._contract.kind or 'custom'}, {rate}, {self._state.step:,} steps made)"
        )

    @property
    def privacy(self) -> Privacy | None:
        """What gradients must be made private with before a step; None if they need not."""
        return self._contract.privacy

    def step(self, *, privatized: bool = False) -> None:
        """Make one step with the accumulated gradients; they remain as they are.

        If the loss or a gradient of every batch since the last reset was not finite, or its
        training step failed, it does nothing, and is not counted.

        Args:
            privatized: The gradients are those of
                :func:`~odtpack_runtime.training.private.private_gradient`; where the package
                asks for them, others are refused.

        Raises:
            OdtpackError: ``run-failed`` with ONNX Runtime's reason, ``nominal-state`` if the
                parameters have no values yet, ``private-training``; ``busy``, ``closed``.
        """
        with self._checkpoint_state.lock:
            self._module.require_open()
            self._require_private(privatized)
            self._require_own_state()
            self._module.require_values()
            if not self._checkpoint_state.spoilt:
                self._make_step()

    def _require_own_state(self) -> None:
        now = self._checkpoint_state.optimizer
        if now is not None and now is not self._state:
            raise OdtpackError(
                "optimizer-mismatch",
                "Another Optimizer was made on this state, and has its moments and step count now.",
                hint="make the steps with that one, or with a new Optimizer if its Module is "
                "closed; evaluate with a Module alone",
            )

    def _require_private(self, privatized: bool) -> None:
        if self.privacy is not None and not privatized:
            raise OdtpackError(
                "private-training",
                "The package asks for gradients that are clipped sample by sample and noisy.",
                hint="make steps with train_step(module, optimizer, [batch]) of "
                "odtpack_runtime.training.loop",
            )

    @property
    def has_step_model(self) -> bool:
        """Whether :meth:`step_on` makes its steps in a step model, which the module was given."""
        return self._module.step_graph is not None

    def step_on(self, *user_inputs: Any) -> Any:
        """Compute the loss of one batch, and update the parameters by its gradient at once.

        The same as a call of the module, :meth:`step` and :meth:`Module.lazy_reset_grad`. With a
        step model it is one model: each parameter is updated as soon as its gradient is complete,
        and gradients take no memory of their own; accumulated gradients are neither used nor
        changed then.

        If the loss is not finite, nothing is changed, and the step is not counted. If it is and
        a gradient is not, the parameter that it belongs to and its moments keep their values;
        without a step model, and in mixed precision, all do, and the step is not counted.

        Args:
            user_inputs: One batch, as a call of the module takes it.

        Returns:
            What a call of the module in training mode returns; the loss is that before the step.

        Raises:
            OdtpackError: ``step-of-several`` if the package accumulates the gradients of several
                batches; as a call of the module, before anything is changed; as :meth:`step`;
                ``run-failed`` if ONNX Runtime fails in the middle: with a step model some
                parameters may have been updated then, so go back to the last checkpoint.
        """
        module = self._module
        with self._checkpoint_state.lock:
            module.require_open()
            module.require_values()
            self._require_private(privatized=False)
            self._require_own_state()
            if module.accumulation_steps > 1:
                raise OdtpackError(
                    "step-of-several",
                    f"A step of this package takes {module.accumulation_steps} batches, and each "
                    "gradient is divided by so many: one batch makes no step.",
                    hint="train_step(module, optimizer, batches) of odtpack_runtime.training.loop",
                )
            if module.step_graph is not None:
                results = self._step_on(module.step_graph, user_inputs)
                return results[0] if len(results) == 1 else tuple(results)
            mode = module.training
            try:
                outputs = module.train()(*user_inputs)
            finally:
                module.train(mode)
            self.step()
            module.lazy_reset_grad()
            return outputs

    def _step_on(self, graph: StepGraph, user_inputs: Sequence[object]) -> list[Any]:
        module = self._module
        number = self._state.step + 1
        self._step[0] = number
        module.check_first_step(user_inputs, graph)
        module.undo.keep(gradients=False)
        try:
            results = graph.graph(user_inputs)
        except BaseException as error:
            module.undo.put_back(gradients=False)
            if isinstance(error, OdtpackError) and error.code == "run-failed":
                error.hint = "load the last checkpoint: parameters may hold part of the step"
            raise
        if not np.isfinite(loss_value(results)).all():
            module.undo.put_back(gradients=False)
            module.note(NotFinite("loss-not-finite", number))
            return results
        if not graph.kept.all() or not graph.kept.size:
            self._state.step = number
        if graph.kept.any():
            names = [n for n, kept in zip(module.trained, graph.kept, strict=True) if kept]
            module.note(NotFinite("gradient-not-finite", number, tuple(names[:MOST_NAMES])))
        return results

    def _close(self) -> None:
        """Free the model, and what is bound to it."""
        del self._session
        self.__dict__.pop("_bindings", None)
        self._runs.clear()

    def _make_step(self) -> None:
        self._step[0] = self._state.step + 1
        device, bindings = self._device, self._bindings
        if device is not None:
            device.before_run()
        if self._contract.clips_norm:
            self._norm[0] = (
                gradient_norm(self._gradients)
                if device is None
                else device.norm(self._module.undo.gradients())
            )
        run = self._session.run_with_iobinding
        try:
            if device is not None:
                self._to_device(device)
            for binding in bindings:
                run(binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            what = f"ONNX Runtime failed in the middle of an optimizer step: {first_line(error)}"
            raise OdtpackError("run-failed", what) from error
        self._state.step += 1

    def _to_device(self, device: Device) -> None:
        """Bring scalars up to date, and bind anew what a binding copied when it was made."""
        device.push({id(a): a for a in self._kept if a is not self._step}.values())
        for binding, scalars, slices in self._runs:
            bind_here(binding.bind_input, "step", self._step)
            for name, array in (scalars | slices).items() if not device.resident else ():
                device.bind_input(binding, name, array)
        device.ran = True

    def get_learning_rate(self) -> float:
        """Return the learning rate, with the precision of float32. The default is 0.001."""
        return self._state.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the steps to come; a group's scale multiplies it.

        Raises:
            OdtpackError: ``bad-learning-rate`` if it is negative or not a finite float32, also
                multiplied by a group's scale; nothing is changed then. ``busy``, ``closed``.
        """
        with self._checkpoint_state.lock:
            self._module.require_open()
            rate = to_float32(learning_rate)
            self._set_rates(rate)
            self._state.learning_rate = rate

    @property
    def step_count(self) -> int:
        """Number of steps made, those before a resumed checkpoint included."""
        return self._state.step

    @property
    def checkpoint_state(self) -> CheckpointState:
        """The state that is trained."""
        return self._checkpoint_state

    def _set_rates(self, rate: float) -> None:
        self._rates[:] = [to_float32(rate * group.learning_rate_scale) for group in self._groups]

    def _scalars(self, index: int, group: Group) -> dict[str, Array]:
        rate = self._rates[index : index + 1]
        scalars: dict[str, Array] = {"learning_rate": rate, "step": self._step}
        if self._contract.clips_norm:
            scalars["gradient_norm"] = self._norm
        if self._contract.takes_decay:
            scalars["weight_decay"] = np.full(1, group.weight_decay, self._gradients.dtype)
        return scalars

    def _flat_runs(self) -> list[tuple[int, dict[str, Array], Any]]:
        """Group, further scalars and slices of the vectors of every run."""
        layout, dtype = self._vectors["params"][1], self._gradients.dtype
        vectors = {name: memory.view(dtype) for name, (memory, _) in self._vectors.items()}
        runs: list[tuple[int, dict[str, Array], Any]] = []
        for group, first, last in _ranges(layout, self._contract.groups):
            start, stop = first // dtype.itemsize, last // dtype.itemsize
            chunk = max(stop - start, 1) if self._contract.whole else CHUNK_ELEMENTS
            for at in range(start, stop, chunk):
                part = slice(at, min(at + chunk, stop))
                runs.append((group, {}, {name: v[part] for name, v in vectors.items()}))
        return runs

    def _parameter_runs(self) -> list[tuple[int, dict[str, Array], Any]]:
        """As :meth:`_flat_runs`, with the vectors of one parameter in every run."""
        flat = not self._contract.by_parameter
        flags = {kind: np.full(1, kind) for kind in (False, True)}
        states = {vector.name: vector for vector in self._contract.state}
        owners = _owners(self._contract.groups)
        runs: list[tuple[int, dict[str, Array], Any]] = []
        for index, slot in enumerate(self._vectors["params"][1].slots):
            if not slot.size:
                continue
            slices = {}
            for name, (memory, layout) in self._vectors.items():
                state = states.get(name)
                shape = matrix(slot.shape) if state is None else state.bound_shape(slot.shape)
                shape = (slot.size,) if flat else shape
                slices[name] = view(memory, layout.slots[index]).reshape(shape)
            flag: dict[str, Array] = {} if flat else {"factored": flags[len(slot.shape) > 1]}
            runs.append((owners.get(slot.name, 0), flag, slices))
        return runs

    def _bind(self, scalars: dict[str, Array], slices: dict[str, Array]) -> Any:
        binding = self._session.io_binding()
        self._kept += scalars.values()
        if self._device is not None:
            bind_here(binding.bind_input, "step", self._step)  # which it takes from the processor
            del scalars["step"]
            for name, array in {**scalars, **slices}.items():
                self._device.bind_input(binding, name, array)
            for name, array in slices.items():
                if name != "gradients":
                    self._device.bind_output(binding, f"{name}.out", array)
            self._runs.append((binding, scalars, slices))
            return binding
        for name, array in {**scalars, **slices}.items():
            bind_here(binding.bind_input, name, array)
        for name, array in slices.items():
            if name != "gradients":
                bind_here(binding.bind_output, f"{name}.out", array)
        return binding


def _owners(groups: tuple[Group, ...]) -> dict[str, int]:
    """Index of the group of each parameter."""
    return {name: index for index, group in enumerate(groups) for name in group.parameters}


def _ranges(layout: Layout, groups: tuple[Group, ...]) -> list[tuple[int, int, int]]:
    """Group, and first and last byte, of stretches of the flat vectors that are of one group."""
    owners = _owners(groups)
    starts: list[tuple[int, Slot]] = []
    for slot in layout.slots:
        group = owners.get(slot.name, 0)
        if not starts or starts[-1][0] != group:
            starts.append((group, slot))
    ends = [slot.offset for _, slot in starts[1:]] + [layout.nbytes]
    return [(group, slot.offset, end) for (group, slot), end in zip(starts, ends, strict=True)]
