"""Run the training and evaluation models of a package on the parameters of a state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array, nominal_error, view
from odtpack_runtime.checkpoint.state import CheckpointState, FlatState
from odtpack_runtime.errors import OdtpackError, WrongTypeError
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.graph_signature import (
    BUFFER_SUFFIX,
    GRADIENT_SUFFIX,
    LOSS_SCALE_NAMES,
    RESET_NAME,
    UPDATE_SUFFIX,
    GraphSignature,
    ModelMetadata,
    StepSignature,
    TensorSpec,
    model_mismatch,
)
from odtpack_runtime.session.options import manifest_beside, options_of
from odtpack_runtime.session.segments import (
    DeviceSegmentedGraph,
    SegmentedGraph,
    Segments,
    segments_of,
)
from odtpack_runtime.session.session import BoundGraph, open_session, owned_ortvalue
from odtpack_runtime.training.optimizer_contract import StepGraph, nominal_shapes, roles
from odtpack_runtime.training.parameter_vector import (
    NotFinite,
    NotFinitePolicy,
    Undo,
    gather,
    scatter,
)

Graph = BoundGraph | SegmentedGraph | DeviceSegmentedGraph


class Module:
    """A model that learns: ``onnxruntime.training.api.Module`` on a stock ONNX Runtime.

    In training mode, where a Module starts, a call computes the loss and adds
    the gradients of this batch to the accumulated ones; in evaluation mode it
    computes the loss only. Parameters live in the state, as flat buffers that
    both models and the optimizer work on in place. While a call runs, one from another thread
    is refused (``busy``).

    A batch whose loss or gradients are not finite changes nothing: see ``on_not_finite``.

    Args:
        train_model_uri: Training model, ``.onnx`` or ``.ort``.
        state: The parameters. Two Modules may share a state. A nominal one, which has no
            values, may get them later: :meth:`copy_buffer_to_parameters`, or
            :meth:`CheckpointState.load_parameters
            <odtpack_runtime.checkpoint.state.CheckpointState.load_parameters>`.
        eval_model_uri: Evaluation model; without one, calls in evaluation mode
            and exports raise.
        device: ``"cpu"``; ``"webgpu"`` or ``"cuda"``, or the name of another provider of ONNX
            Runtime, with ``:1`` behind it for the second such device. Parameters, gradients and
            moments live in its memory then, and the first step is compared with the processor's.
        session_options: Options of ONNX Runtime for every session made on
            behalf of this Module; :func:`default_session_options` if None.
        step_model_uri: Step model, with which :meth:`Optimizer.step_on
            <odtpack_runtime.training.optimizer.Optimizer.step_on>` trains; the training
            model is loaded only once a call asks for gradients then.
        activations: Folder for a temporary file in which a network in segments keeps what lies
            between them until the way back, in place of memory; other networks have no such
            values.
        on_not_finite: What to do about a batch whose loss or gradients are not finite, once
            everything is as it was before: ``"skip"`` counts it (:attr:`skipped_steps`,
            :attr:`last_not_finite`), ``"stop"`` raises ``loss-not-finite`` or
            ``gradient-not-finite``.

    Raises:
        OdtpackError: A model is missing, does not load, or does not go with the
            state (``model-mismatch``); the trainable parameters are not all
            float32 or all float64; the device is not there, the package cannot be trained on
            it, or the state lives elsewhere (``unsupported-device``).
    """

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: onnxruntime.SessionOptions | None = None,
        step_model_uri: str | os.PathLike[str] | None = None,
        activations: str | os.PathLike[str] | None = None,
        on_not_finite: NotFinitePolicy = "skip",
    ) -> None:
        if on_not_finite not in get_args(NotFinitePolicy):
            what = f"on_not_finite is 'skip' or 'stop', not {on_not_finite!r:.40}."
            hint = "leave it out to skip such batches and count them"
            raise OdtpackError("bad-policy", what, hint=hint)
        if not isinstance(state, CheckpointState):
            raise WrongTypeError(
                "not-a-checkpoint",
                f"A Module needs a CheckpointState, not a {type(state).__name__}.",
            )
        self._device = _device_of(state, device)
        self.state = state
        self.training = True
        self.on_not_finite = on_not_finite
        self._closed = False
        self._when_closed: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._train_path = path = Path(train_model_uri)
        self._eval_path = None if eval_model_uri is None else Path(eval_model_uri)
        self._activations = activations
        manifest = manifest_beside(path)
        # Sessions opened with the same options share an arena, where the package asks for it.
        self.session_options = session_options or options_of(manifest, path)
        beside = segments_of(manifest, path)
        if self._device is not None and activations is not None:
            what = "Only training on the processor can keep activations in a file."
            raise OdtpackError("unsupported-device", what, hint="leave activations out")
        self._in_segments = beside is not None  # such a network has no step model
        self._step_path = whole = (
            None if beside is not None or step_model_uri is None else Path(step_model_uri)
        )
        first = whole or self._train_path
        models: list[tuple[str, list[Any], list[Any]]] = []
        self._segments: Segments | None = None
        if beside is not None:
            ends = self._eval_path, beside[1]
            self._segments = Segments(path, beside[0], self.session_options, *ends, self._device)
            session, evaluation = self._segments.training, self._segments.evaluation
            models.append((str(first), *self._segments.nodes(training=True)))
            if evaluation is not None:
                models.append((str(self._eval_path), *self._segments.nodes(training=False)))
        else:
            session = open_session(first, self.session_options, self._device)
            models.append((str(first), session.get_inputs(), session.get_outputs()))
            if self._eval_path is not None:
                evaluation = open_session(self._eval_path, self.session_options, self._device)
                nodes = evaluation.get_inputs(), evaluation.get_outputs()
                models.append((str(self._eval_path), *nodes))
        shapes = nominal_shapes(state, models) if state.is_nominal else {}
        known = roles(state, shapes)
        step = None
        if whole is None:
            signature = GraphSignature.read(*models[0], *known)
            trained = signature.gradients
        else:
            step = StepSignature.read(*models[0], *known)
            signature = step.graph
            trained = tuple(name for name in signature.parameters if name in step.updates)
        others = [GraphSignature.read(*model, *known) for model in models[1:]]
        del known  # the arrays that place() below replaces, and whose memory it gives back
        if self._segments is not None:
            self._segments.check_inputs(each.inputs for each in (signature, *others))
        eval_signature = others[0] if others else None
        self._signature, self._eval_signature = signature, eval_signature
        extra = set(eval_signature.parameters if eval_signature else ())
        self._order = (*signature.parameters, *sorted(extra - set(signature.parameters)))
        self._check(trained, eval_signature, str(first))

        metadata = ModelMetadata.read(session, set(trained), str(first))
        self._accumulation_steps = metadata.accumulation_steps
        # Nothing has been changed so far: a Module that cannot be made leaves the state alone.
        self._flat = state.place(
            tuple(dict.fromkeys((*metadata.parameter_order, *self._order))), shapes
        )
        # The buffers are zero: starting again gives the same in one pass less.
        self._reset = np.ones(1, np.bool_)
        self._accumulated = 0
        statistics = {
            name: state.parameters.items[name].data
            for name in signature.updates
            if name not in LOSS_SCALE_NAMES
        }
        # For Optimizer's use: what puts back what a step changes; the names of the trainable
        # parameters in the order of the model's inputs; and the step model, if there is one.
        self.undo = Undo(self._flat, statistics, self._device)
        self.trained = [name for name in signature.parameters if name in set(trained)]
        self.step_graph: StepGraph | None = None
        self._skipped_steps = self._overflows = 0
        self._last_not_finite: NotFinite | None = None
        self._train: Graph | None = None
        if step is None:
            self._train = self._bind_training(session, signature, metadata)
        else:
            graph = self._bound(session, signature, metadata)
            assert isinstance(graph, BoundGraph)  # noqa: S101 - segments have no step model
            self.step_graph = StepGraph(graph, step)
            for name in trained:
                self.step_graph.bind_updated(name, state.parameters.items[name].data)
            self._bind_updates(graph, signature)
        self._eval: Graph | None = None
        if eval_signature is not None:
            self._eval = self._bound(evaluation, eval_signature, metadata)
        self._checked = self._device is None
        if self._device is not None and state.device is None:
            state.device = self._device
            for parameter in state.parameters.items.values():
                parameter.watch(self._device.asked)
        state.modules.add(self)

    def __repr__(self) -> str:
        mode = "training" if self.training else "evaluation"
        without = "" if self._eval_path else ", no evaluation model"
        without += "" if self.step_graph is None else ", step model"
        name, size = self._train_path.name, self.state.elements_text()
        return f"Module({name}, {size}, {mode} mode{without})"

    def __call__(self, *user_inputs: Any) -> Any:
        """Run one batch.

        Args:
            user_inputs: The model's inputs in the order of :meth:`input_names`,
                arrays (or lists) of the model's dtypes and shapes, or OrtValues
                all of them. Nothing is converted or copied.

        Returns:
            The loss, an array of shape ``()``; with further outputs, a tuple of
            arrays. OrtValues if OrtValues came in.

        Raises:
            OdtpackError: An input does not fit (``input-count``, ``input-type``,
                ``input-shape``, ``input-sizes-differ``), holds no samples
                (``empty-batch``), names a class that does not exist
                (``label-out-of-range``), or holds a token below 0 (``bad-prompt``);
                evaluation was asked for without an evaluation model (``no-eval-model``);
                the parameters have no values yet (``nominal-state``); ONNX Runtime failed
                (``run-failed``), and everything is as before; ``busy``, ``closed``;
                ``loss-not-finite`` or ``gradient-not-finite`` if that is to stop the training.
        """
        with self.state.lock:
            self.require_open()
            self.require_values()
            results = (
                self._training_step(user_inputs) if self.training else self._graph()(user_inputs)
            )
        return results[0] if len(results) == 1 else tuple(results)

    def _training_step(self, user_inputs: Sequence[object]) -> list[Any]:
        self.check_first_step(user_inputs)
        graph = self._graph()
        if self.state.spoilt:  # perhaps by another Module: there is nothing to add to
            self._reset[0] = True
        adds = not self._reset[0]
        self.undo.keep(gradients=adds)
        try:
            results = graph(user_inputs)
            done = 0 if self.state.optimizer is None else self.state.optimizer.step
            problem = self.undo.problem(loss_value(results), done + 1, self.trained)
        except BaseException:
            if graph.began:
                self._undo_step(adds)
            raise
        if problem is None:
            self._accumulated = self._accumulated + 1 if adds else 1
            self._reset[0] = self.state.spoilt = False
        else:
            self._undo_step(adds)
            self.note(problem)
        return results

    def _undo_step(self, adds: bool) -> None:
        """Put back what a training step changed that was bad, or failed."""
        self.undo.put_back(gradients=adds)
        if not adds:  # it was to replace the gradients, of which there is no copy
            self.spoil_gradients()

    def note(self, problem: NotFinite) -> None:
        """Count a step that was not finite, and stop if that is the policy. For Optimizer's use."""
        self._skipped_steps += 1
        self._last_not_finite = problem
        scaled = LOSS_SCALE_NAMES[0] in self.state.parameters
        self._overflows += scaled and problem.code == "gradient-not-finite"
        if self.on_not_finite == "stop":
            problem.raise_error()

    def close(self) -> None:
        """Wait for the running call, let no other begin, and free the models; again is allowed.

        Later calls of the module and its optimizer raise ``closed``. The state remains.
        """
        self._closed = True
        with self.state.lock.after_all():
            self._train = self._eval = self.step_graph = None
            self._segments = None
            for method in self._when_closed:
                if (close := method()) is not None:
                    close()
            self._when_closed.clear()
            self.state.modules.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Check that the module has not been closed, else raise ``closed``."""
        if self._closed:
            raise OdtpackError("closed", "The Module is closed.", hint="make a new one")

    def when_closed(self, close: Callable[[], None]) -> None:
        """Call a method on closing, if its object still lives. For Optimizer's use."""
        self._when_closed.append(weakref.WeakMethod(close))

    def train(self, mode: bool = True) -> Module:
        """Switch to training mode, or with ``False`` to evaluation mode; return self."""
        self.training = bool(mode)
        return self

    def eval(self) -> Module:
        """Switch to evaluation mode; return self."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training step replace the accumulated gradients, not add to them."""
        with self.state.lock:
            self.require_open()
            self._reset[0] = True

    def gradients_given(self, batches: int = 1) -> None:
        """Take what lies in the gradients' memory for those of so many batches."""
        self._accumulated = batches
        self._reset[0] = self.state.spoilt = False

    def spoil_gradients(self) -> None:
        """Let no step be made before the next training step, which replaces the gradients."""
        self._reset[0] = self.state.spoilt = True
        self.undo.clear_gradients()

    def input_names(self) -> list[str]:
        """Return the names of the inputs that a call takes in the current mode."""
        return [spec.name for spec in self.input_specs()]

    def output_names(self) -> list[str]:
        """Return the names of the outputs that a call returns in the current mode."""
        return [spec.name for spec in self._described().outputs]

    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Return name, dtype and shape of the inputs that a call takes in the current mode."""
        return self._described().inputs

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of all trainable parameters, or of all parameters."""
        return sum(array.size for array in self._in_order(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> onnxruntime.OrtValue:
        """Return a copy of the parameters as one vector.

        Parameters follow each other without gaps, in the order of the training
        model's inputs. The vector has the type of the trainable parameters, float32
        (float64 in a package that trains float64 parameters); frozen parameters of a
        narrower floating type are converted, which is exact.

        Raises:
            OdtpackError: ``parameter-type`` if one of them does not fit into that type,
                ``nominal-state`` if they have no values yet.
        """
        with self.state.lock:
            self.require_open()
            self.require_values()
            return owned_ortvalue(gather(self._in_order(trainable_only), self._flat.dtype))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set the parameters from one vector, as get_contiguous_parameters returns it.

        Raises:
            OdtpackError: ``buffer-type``, ``buffer-size`` or ``parameter-type``;
                ``nominal-state`` if some of the parameters would remain without a value.
                Nothing is changed then.
        """
        with self.state.lock:
            self.require_open()
            if trainable_only and self.state.is_nominal:
                raise nominal_error("its frozen parameters would remain without values")
            scatter(buffer, self._in_order(trainable_only), self._flat.dtype, trainable_only)
            self.state.parameters.nominal = False

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Write a plain inference model with the current parameters inside.

        Args:
            inference_model_uri: Destination; its folder must exist. A name that ends in
                ``.ort`` gives a model in ORT format.
            graph_output_names: Outputs of the model to write: any values that
                the evaluation model computes, or the package's forward model
                of the same inputs. What they do not need is left out.

        Raises:
            OdtpackError: No evaluation model was given, a name is unknown, or the file cannot
                be written.
        """
        self.require_open()
        if self._eval_path is None:
            raise _no_eval_model("A model can be exported only")
        if self._in_segments:
            what = "A package of segments has no single model to export."
            hint = "write its decoder with the adapter inside: odtpack export"
            raise OdtpackError("segments-unsupported", what, hint=hint)
        from odtpack_runtime.export.inference_model import Template, export_inference_model

        with self.state.lock:
            self.require_open()
            self.require_values()
            arrays = {**self.state.arrays(trainable=True), **self.state.arrays(trainable=False)}
            export_inference_model(
                self._eval_path,
                arrays,
                inference_model_uri,
                graph_output_names,
                lambda: Template.beside(self._train_path),
            )

    @property
    def accumulation_steps(self) -> int:
        """Batches per optimizer step: the gradient of each is divided by this number."""
        return self._accumulation_steps

    @property
    def accumulated_batches(self) -> int:
        """Number of batches whose gradients have been accumulated so far."""
        return 0 if self._reset[0] or self.state.spoilt else self._accumulated

    @property
    def skipped_steps(self) -> int:
        """Number of batches whose loss or gradients were not finite.

        Of a step model's batch some parameters may have been updated, see :attr:`last_not_finite`.
        """
        return self._skipped_steps

    @property
    def overflows(self) -> int:
        """Number of those that only lowered the loss scale of mixed precision."""
        return self._overflows

    @property
    def last_not_finite(self) -> NotFinite | None:
        """The last such batch; None without one."""
        return self._last_not_finite

    @property
    def flat(self) -> FlatState:
        """The memory of the parameters and gradients; the optimizer works on it."""
        if self._device is not None:
            self._device.asked()
        return self._flat

    @property
    def device(self) -> Device | None:
        """Where the models run; None for the processor."""
        return self._device

    def check_kernels(self) -> None:
        """Let the first step be compared with one without native kernels, as on a device."""
        self._checked = self._in_segments

    def check_first_step(
        self, user_inputs: Sequence[object], step: StepGraph | None = None
    ) -> None:
        """Compare one step on another device with the processor's, before the first one."""
        # `step`: the step model, if that is to make the step.
        # Raises OdtpackError: `device-wrong`; `self-check-failed` after check_kernels.
        if self._checked:
            return
        from odtpack_runtime.training.first_step import Run, compare_step, run_of

        content = manifest_beside(self._train_path)
        options = options_of(content, self._train_path)
        if step is None:
            path, graph = self._train_path, self._graph()
        else:
            path, graph = self._step_path or self._train_path, step.graph
        assert not isinstance(graph, SegmentedGraph)  # noqa: S101 - that is the processor's
        feeds = graph.feeds(user_inputs)
        if self._device is not None:
            self._device.asked()

        def here() -> Run:
            if isinstance(graph, BoundGraph):
                providers = ["CPUExecutionProvider"]
                return run_of(onnxruntime.InferenceSession(str(path), options, providers=providers))
            found = segments_of(content, path)
            assert found is not None  # noqa: S101 - the graph has been made of them
            segments = Segments(path, found[0], options, None, found[1])
            return lambda values: graph.once(values, segments)

        there = run_of(graph.session) if isinstance(graph, BoundGraph) else graph.once
        compare_step(self._device, path, feeds, there, here)
        self._checked = True

    def require_values(self) -> None:
        """Check that the parameters have values, else raise ``nominal-state``."""
        if self.state.is_nominal:
            raise nominal_error("nothing can be computed without its parameters' values")

    def _described(self) -> GraphSignature:
        """The user inputs and outputs of the current mode."""
        if self.training:
            return self._signature
        if self._eval_signature is None:
            raise _no_eval_model("Evaluation mode works only")
        return self._eval_signature

    def _graph(self) -> Graph:
        if self.training:
            if self._train is None:
                self._train = self._open_training()
            return self._train
        if self._eval is None:
            raise _no_eval_model("Evaluation mode works only")
        return self._eval

    def _open_training(self) -> Graph:
        """The training model, beside a step model."""
        where = str(self._train_path)
        session = open_session(self._train_path, self.session_options, self._device)
        nodes = session.get_inputs(), session.get_outputs()
        signature = GraphSignature.read(where, *nodes, *roles(self.state, {}))
        self._check(signature.gradients, None, where)
        metadata = ModelMetadata.read(session, set(signature.gradients), where)
        return self._bind_training(session, signature, metadata)

    def _bind_training(
        self,
        session: onnxruntime.InferenceSession,
        signature: GraphSignature,
        metadata: ModelMetadata,
    ) -> Graph:
        graph = self._bound(session, signature, metadata)
        for slot in self._flat.trainable.slots:
            gradient = view(self._flat.gradients, slot)
            graph.bind_input(slot.name + BUFFER_SUFFIX, gradient)
            graph.bind_output(slot.name + GRADIENT_SUFFIX, gradient)
        self._bind_updates(graph, signature)
        if signature.gradients:
            graph.bind_input(RESET_NAME, self._reset)
        return graph

    def _bind_updates(self, graph: Graph, signature: GraphSignature) -> None:
        """Let running statistics be updated where they lie."""
        for name in signature.updates:
            graph.bind_output(name + UPDATE_SUFFIX, self.state.parameters.items[name].data)

    def _check(self, trained: Sequence[str], evaluation: GraphSignature | None, where: str) -> None:
        """Check that models and checkpoint speak of the same parameters."""
        missing = self.state.arrays(trainable=True).keys() - set(trained)
        unused = self.state.arrays(trainable=False).keys() - set(self._order)
        if missing:
            raise model_mismatch(
                where, f"it computes no gradient for '{min(missing)}', which is marked as trainable"
            )
        if unused:
            raise model_mismatch(where, f"it has no input '{min(unused)}'")
        if evaluation is not None and evaluation.gradients:
            raise model_mismatch(str(self._eval_path), "an evaluation model computes no gradients")

    def _bound(
        self,
        session: onnxruntime.InferenceSession,
        signature: GraphSignature,
        metadata: ModelMetadata,
    ) -> Graph:
        """A model, or a list of them, that reads the parameters where they lie."""
        ends = signature.inputs, signature.outputs, metadata
        graph: Graph
        if self._segments is None:
            graph = BoundGraph(session, *ends, self._device)
        else:
            training = session is self._segments.training
            if self._device is None:
                graph = SegmentedGraph(
                    self._segments, *ends, training=training, activations=self._activations
                )
            else:
                graph = DeviceSegmentedGraph(
                    self._segments, *ends, device=self._device, training=training
                )
        for name in signature.parameters:
            graph.bind_input(name, self.state.parameters.items[name].data)
        return graph

    def _in_order(self, trainable_only: bool) -> list[Array]:
        parameters = [self.state.parameters.items[name] for name in self._order]
        return [p.data for p in parameters if p.requires_grad or not trainable_only]


def _device_of(state: CheckpointState, name: str) -> Device | None:
    """The device of that name, the one on which a state lives already; None for the processor."""
    lives = "cpu" if state.device is None else state.device.name
    wanted = "cpu" if name == "cpu:0" else name
    if state.placed and lives != wanted:
        what = f"The state belongs to a Module on {lives!r}, and this one is to be on {name!r:.40}."
        hint = "load the checkpoint again for the second Module"
        raise OdtpackError("unsupported-device", what, hint=hint)
    return state.device or (None if wanted == "cpu" else Device(wanted))


def loss_value(results: Sequence[Any]) -> Any:
    """The loss among the results of a graph, an array or an OrtValue, as an array."""
    loss = results[0]
    return loss.numpy() if isinstance(loss, onnxruntime.OrtValue) else loss


def _no_eval_model(what: str) -> OdtpackError:
    return OdtpackError(
        "no-eval-model", f"{what} with an evaluation model, and this Module has none."
    )
