"""Assembles the training and evaluation graphs from a forward graph and a specification."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack import losses, targets
from odtpack.autodiff import differentiate
from odtpack.autodiff.expand import expand
from odtpack.choices import WEBGPU
from odtpack.errors import OdtpackError, UnknownNameError, quoted
from odtpack.graph.graphs import (
    Ops,
    ancestors,
    carried,
    dims_of,
    mark_constant,
    nodes_of,
    reads,
    redirect,
    static_dims,
    typed,
)
from odtpack.graph.inference import infer_shapes, is_known
from odtpack.losses import make_loss
from odtpack.losses.common.base import Classes, dims, rank, shaped
from odtpack.model.exporters import known_names, module_names
from odtpack.package.parameters import (
    SCALE_SUFFIX,
    Parameter,
    choose_parameters,
    lift_parameters,
    store_frozen,
    without_float16,
)
from odtpack.package.task import Graphs, InferenceTemplate, LossInfo, Task
from odtpack.passes import aliases, gradient_buffers, pipeline, precision
from odtpack.passes.batch_norm import RunningStatistic
from odtpack.passes.compact import compact
from odtpack.passes.gradient_buffers import BUFFER_SUFFIX, OUTPUT_SUFFIX
from odtpack.spec import LossPart
from odtpack_runtime.session.graph_signature import (
    COTANGENT_SUFFIX,
    OWN_TYPE_SUFFIX,
    UNSCALED_SUFFIX,
)


def value_names(graph: ir.Graph) -> set[str]:
    """Names of all values of a graph."""
    names = {value.name or "" for value in graph.inputs} | set(graph.initializers)
    return names | {value.name or "" for node in nodes_of(graph) for value in node.outputs}


def find_value(graph: ir.Graph, name: str, what: str) -> ir.Value:
    """The value of a graph that ``what`` names."""
    for value in (*graph.outputs, *graph.inputs, *(y for node in graph for y in node.outputs)):
        if value.name == name:
            return value
    outputs = ", ".join(repr(value.name) for value in graph.outputs)
    raise UnknownNameError(
        "unknown-value", f"{what} names {name!r}, which the graph does not have",
        hint=f"its outputs are {outputs}",
    )  # fmt: skip


def attach_loss(graph: ir.Graph, task: Task) -> LossInfo:
    """Append a loss; the graph's outputs become the loss and the additional ones."""
    what = "--output or additional_output_names"
    extra = [find_value(graph, name, what) for name in task.spec.outputs]
    what = "--loss-input or loss_input_names"
    read = [find_value(graph, name, what) for name in task.spec.loss_inputs]
    if task.loss is None:
        result, info = _own_loss(graph, read, task.attached), task.attached or LossInfo()
    else:
        result, info, _ = write_loss(graph, task.loss, read)
    if result in extra:
        hint = f"leave {result.name!r} out of the additional outputs"
        raise OdtpackError("named-twice", f"the loss {result.name!r} is returned anyway", hint=hint)
    graph.outputs[:] = [result, *extra]
    return info


def _own_loss(graph: ir.Graph, read: Sequence[ir.Value], attached: LossInfo | None) -> ir.Value:
    if len(read) > 1:
        raise OdtpackError(
            "too-many-loss-inputs",
            f"loss_input_names names {len(read)} values, but no loss reads them",
            hint="name the value that is the loss, or pass a loss (--loss cross_entropy)",
        )
    loss = read[0] if read else graph.outputs[0]
    dims = static_dims(loss)
    if dims is None or int(np.prod(dims)) != 1:
        what = f"without a loss the first output must be the loss, a scalar; {loss.name!r} is not"
        hint = "pass a loss (--loss cross_entropy), or a model whose first output is one"
        if attached is not None:
            what = f"the loss must be a scalar; {loss.name!r} is not"
            hint = "take its mean or sum, for example with reduction='mean'"
        raise OdtpackError("loss-not-scalar", what, hint=hint)
    return loss


def write_loss(
    graph: ir.Graph, loss: losses.Loss, read: Sequence[ir.Value], suffix: str = ""
) -> tuple[ir.Value, LossInfo, list[ir.Value]]:
    """Write a loss over values of the model, with a graph input for each target that it lacks."""
    # suffix: End of the names of such inputs.
    # Returns the loss, what is known of it, and all that it reads.
    if loss.reduction == "none":
        raise OdtpackError(
            "loss-not-scalar",
            f"{loss.name} with reduction 'none' gives a number for each sample; training needs one",
        )
    count = len(loss.reads)
    values = [*(read or graph.outputs[:count])]
    if len(values) < count:
        raise OdtpackError(
            "too-few-loss-inputs",
            f"{loss.name} reads {count} values, {', '.join(loss.reads)}; "
            + (f"{len(read)} are named" if read else f"the model has {len(values)} outputs"),
            hint="name them in this order as the loss's inputs (--loss-input NAME, repeated)",
        )
    for value in values[:count]:
        _name_sizes(graph, value)
    loss = loss.settled(values)
    targets = loss.targets(values[:count])
    if len(values) > count + len(targets):
        wanted = ", ".join([*loss.reads, *(target.name for target in targets)])
        raise OdtpackError(
            "too-many-loss-inputs",
            f"loss_input_names names {len(values)} values; {loss.name} reads at most "
            f"{count + len(targets)}: {wanted}",
            hint="leave some out",
        )
    taken = value_names(graph)
    needed = set().union(*map(read_by, values[:count]))
    for target in targets[len(values) - count :]:
        name = target.name + suffix
        own = next((v for v in graph.inputs if v.name == name), None)
        if own is not None and name not in needed and _fits(own, target):
            own.shape = ir.Shape(target.dims)  # sizes of one name are checked to be equal
        elif name in taken:
            raise OdtpackError(
                "reserved-name",
                f"the model already has {name!r}, the name of the input that the loss adds",
                hint="rename it in the model; if it is the target, name prediction and target "
                "as the loss's inputs",
            )
        else:
            own = target.value(name)
            graph.inputs.append(own)
        values.append(own)
    fixed = loss.fixed(values[:count])
    op = Ops(graph, "loss/")
    result = loss.write(op, *values)
    if result.producer() is None:
        result = op.Identity(result)
    result.name, result.shape = op.fresh_name("loss"), ir.Shape(())
    roles = {
        value.name or "": target.role
        for target, value in zip(targets, values[count:], strict=True)
        if value in graph.inputs
    }
    facts = loss.label_facts(values[:count])
    labels = {name: facts for name, role in roles.items() if role == "labels"}
    return result, LossInfo(loss.name, loss.settings(), roles, labels, fixed), values


def _fits(value: ir.Value, target: losses.Target) -> bool:
    """Whether an input of the model has the type and the shape of a target."""
    dims = dims_of(value)
    if value.dtype != target.dtype or dims is None or len(dims) != len(target.dims):
        return False
    pairs = zip(dims, target.dims, strict=True)
    return all(a == b or not (isinstance(a, int) or isinstance(b, int)) for a, b in pairs)


def _name_sizes(graph: ir.Graph, prediction: ir.Value) -> None:
    """Name the open axes of a prediction: its target has them, too."""
    dims = dims_of(prediction) or ()
    if prediction.producer() is None or all(map(is_known, dims)):
        return
    shape = [d if is_known(d) else f"{prediction.name}.{axis}" for axis, d in enumerate(dims)]
    prediction.shape = ir.Shape(shape)
    names = {old: new for old, new in zip(dims, shape, strict=True) if old and old != new}
    for value in (v for node in nodes_of(graph) for v in node.outputs):
        found = dims_of(value)
        if found is not None and not names.keys().isdisjoint(found):
            value.shape = ir.Shape([names.get(d, d) if d else d for d in found])


def returned_scores(graph: ir.Graph, name: str, loss: losses.Loss | None, *, append: bool) -> str:
    """The output with the scores of classes on axis 1, which may be added; "" if there is none."""
    value = {value.name: value for node in graph for value in node.outputs}.get(name)
    shape = None if value is None else dims_of(value)
    if value is None or shape is None or len(shape) < 2:
        return ""
    axis = loss.class_axis(value) if isinstance(loss, Classes) else 1
    if not isinstance(shape[axis], int) or (axis != 1 and not append):
        return ""
    if isinstance(loss, Classes) and axis != 1:
        op = Ops(graph, "loss/")
        (moved,) = loss.arranged(op, [value])
        moved.name, moved.type, value = op.fresh_name("loss/scores"), value.type, moved
    if append and not value.is_graph_output():
        graph.outputs.append(value)
    return str(value.name) if value.is_graph_output() else ""


def select(
    graph: ir.Graph, wanted: Sequence[str], loss: str | None, targets: Collection[str]
) -> list[str]:
    """The values that inference gives: what neither is the loss nor reads it."""
    values = {value.name: value for node in graph for value in node.outputs}
    found = []
    for name in dict.fromkeys(wanted):
        read = read_by(values[name]) if name in values else set()
        if name != loss and read and not read & ({loss} | set(targets)):
            found.append(name)
    return found


def detach(
    graph: ir.Graph, outputs: Sequence[str], parameters: Collection[str], states: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leave the named outputs, the inputs that they need, and no value of any parameter."""
    # Carried states stay in any case: by that the manifest tells them from running statistics.
    values = {value.name: value for node in graph for value in node.outputs}
    graph.outputs[:] = [values[name] for name in outputs]
    needed = set(states).union(*(read_by(value) for value in graph.outputs))
    used = []
    for name in list(graph.initializers):
        if name in parameters:
            graph.initializers.pop(name).const_value = None
            used += [name] if name in needed else []
    graph.inputs[:] = [v for v in graph.inputs if v.name in needed and v.name not in used]
    return tuple(value.name or "" for value in graph.inputs), tuple(used)


def read_by(value: ir.Value) -> set[str | None]:
    """Names of every value that one is computed from, itself included."""
    return {value.name, *(v.name for node in ancestors([value]) for v in reads(node))}


RESET = "lazy_reset_grad"


STATE_SUFFIX = ".update.out"


_RESERVED = (
    *(BUFFER_SUFFIX, OUTPUT_SUFFIX, STATE_SUFFIX),
    *(OWN_TYPE_SUFFIX, UNSCALED_SUFFIX, SCALE_SUFFIX, COTANGENT_SUFFIX),
)


def prepare(task: Task) -> tuple[Graphs, ir.Model]:
    """Attach the loss to a loaded model, and make inputs of its parameters."""
    # Returns the graphs, where that for training is not differentiated yet, and the forward model
    # without the loss.
    spec = task.spec
    forward = task.model.clone()
    pipeline.on_reading(forward, targets.newest_opset(spec.onnxruntime))
    # Names by the nodes of the model alone: a loss adds nodes.
    modules, known = module_names(forward.graph), known_names(forward.graph)
    _check_names(forward.graph)
    _check_inputs(forward.graph, task.input_gradients)
    prediction = (*spec.loss_inputs, str(forward.graph.outputs[0].name))[0]
    plain = (task.served or forward).clone()
    if task.served is not None:
        pipeline.on_reading(plain, targets.newest_opset(spec.onnxruntime))
    info = attach_loss(forward.graph, task)
    if states := carried(forward.graph):
        _return_states(forward.graph, states, task)
    for name in info.fixed:
        if name in task.train:
            raise OdtpackError(
                "trained-and-frozen",
                f"{name!r} is trained, but the loss {info.name} does not let a gradient through it",
                hint=f"freeze it (--freeze {quoted(name)}), or leave the loss's option words out",
            )
    sources = (*task.train, *task.input_gradients, *states)
    if sources:
        forward = expand(infer_shapes(forward, new_only=True), sources)
    parameters = choose_parameters(forward.graph, task.train, task.frozen, modules, known)
    if spec.precision == "mixed":
        _check_mixed(task, parameters)
        parameters += tuple(
            Parameter(name, "state", ir.tensor([value], ir.DataType.FLOAT), ir.DataType.FLOAT)
            for name, value in precision.STATES.items()
        )
    if not task.backend.is_stock:
        parameters = without_float16(parameters, spec.frozen_storage)
    if spec.frozen_storage is not None:
        parameters = store_frozen(forward.graph, parameters, spec.frozen_storage, spec.base)
    lift_parameters(forward.graph, parameters)
    evaluation = forward.clone()
    if states:
        kept = [v for v in evaluation.graph.outputs if not str(v.name).endswith(STATE_SUFFIX)]
        evaluation.graph.outputs[:] = kept
    loss, scores = make_loss(info.name, info.options) if info.name in losses.LOSSES else None, ""
    if "labels" in info.roles.values() and (loss is None or loss.classifies):
        scores = returned_scores(
            evaluation.graph, info.prediction or prediction, loss, append=spec.prediction
        )
    return Graphs(forward, evaluation, parameters, task, info, scores), plain


def _check_mixed(task: Task, parameters: Sequence[Parameter]) -> None:
    """Refuse what has no float16, or no one to keep the loss scale."""
    spec, problem, hint = task.spec, "", ""
    if not task.backend.is_stock:
        problem, hint = "onnxruntime-training keeps no loss scale", "leave --target out"
    elif spec.segments:
        problem, hint = "segments compute as the model does", "leave --segments out"
    elif spec.privacy_clip is not None:
        problem = "the loss scale follows single samples and would reveal them"
        hint = "leave --privacy-clip out"
    elif any(p.dtype == ir.DataType.DOUBLE for p in parameters if p.role == "trainable"):
        problem, hint = "float64 parameters are trained", "export the model in float32"
    if problem:
        raise OdtpackError("mixed-precision", problem, hint=f"{hint}, or leave --precision out")


def _return_states(graph: ir.Graph, states: Mapping[str, str], task: Task) -> None:
    """Let a forward graph give what each state is in the next step."""
    if not task.backend.is_stock:
        what = "artifacts for onnxruntime-training carry no state over"
        hint = "leave --target out, or start from zero in every step (--input NAME=zeros)"
        raise OdtpackError("bad-input-setting", what, hint=hint)
    op = Ops(graph, "carry/")
    for name, output in states.items():
        new = op.Identity(find_value(graph, output, "--input"))
        new.name, new.shape = name + STATE_SUFFIX, graph.initializers[name].shape
        graph.outputs.append(new)


def _carry(op: Ops, graph: ir.Graph, names: Collection[str]) -> list[RunningStatistic]:
    """Let a training graph read a copy of each state, as the next one is written over it."""
    found = []
    for state in [value for value in graph.inputs if value.name in names]:
        new = next(v for v in graph.outputs if v.name == f"{state.name}{STATE_SUFFIX}")
        readers = [*state.uses()]
        with op.before(graph[0]):
            copy = op.Tile(state, op.constant(np.ones(len(dims_of(state) or ()), np.int64)))
        redirect(readers, typed(copy, state))
        graph.outputs.remove(new)
        found.append(RunningStatistic(str(state.name), new))
    return found


def build_graphs(task: Task) -> Graphs:
    """Differentiate a loaded model."""
    ready, plain = prepare(task)
    stock = task.backend.is_stock
    forward, evaluation, parameters = ready.training, ready.evaluation, ready.parameters
    served = _served(ready, plain)
    returned = len(evaluation.graph.outputs)
    if not stock:  # its runtime exports values of the evaluation model alone
        values = [value for node in evaluation.graph for value in node.outputs]
        unread = [v for v in values if v.name in served and not v.is_graph_output()]
        evaluation.graph.outputs.extend(unread)
    pipeline.before_gradient(forward, mixed_precision=task.spec.precision == "mixed")
    for model in (evaluation, *([plain] if served else [])):
        pipeline.for_evaluation(model)
    if not served and (states := carried(forward.graph)):
        raise OdtpackError(
            "bad-input-setting",
            f"{min(states)!r} is carried over, and all that the model gives is computed from its "
            "loss: no inference template tells the state from a running statistic",
            hint="name a value that is not (--output NAME)",
        )
    _differentiate(forward, task)
    properties = properties_of(ready.loss)
    level = optimization_level(forward.graph, parameters)
    models = {
        "training": (forward, properties | of_training(task, level)),
        "evaluation": (evaluation, properties),
    }
    template, states = None, carried(forward.graph)
    if served:
        inputs, used = detach(plain.graph, served, [p.name for p in parameters], states)
        models["inference"] = (plain, {})
        template = InferenceTemplate(plain, inputs, served, used)
    finish(models)
    evaluation.graph.outputs[:] = evaluation.graph.outputs[:returned]
    if task.backend.on_gpu:
        forward, evaluation = task.backend.lower(forward), task.backend.lower(evaluation)
    memory = None
    if task.memory is not None and stock and not task.backend.on_gpu:
        from odtpack.memory.compile import compile_memory

        shown = {p.name: p.module or p.name for p in parameters}
        memory = compile_memory(forward, shown, task.memory)
    for model in (forward, evaluation, *([plain] if served else [])):
        # The reference distinguishes values by name.
        compact(model, keep_names=model is not forward or not stock)
    return dataclasses.replace(
        ready, training=forward, evaluation=evaluation, inference=template, memory=memory
    )


def properties_of(info: LossInfo) -> dict[str, str]:
    """What the metadata of models say of their loss."""
    metadata = {"odtpack.format": "1", "odtpack.loss": info.name}
    for name, facts in info.labels.items():
        if len(info.labels) == 1 and name != "labels":
            metadata["odtpack.labels"] = name
        of = "" if len(info.labels) == 1 else f".{name}"
        metadata |= {f"odtpack.{fact}{of}": str(value) for fact, value in facts.items()}
    return metadata


def of_training(task: Task, level: str) -> dict[str, str]:
    """What those of a training model say besides."""
    found = {"odtpack.optimization_level": level}
    if task.spec.runtime == WEBGPU:
        found["odtpack.target"] = WEBGPU
    if task.spec.accumulation_steps > 1:
        found["odtpack.accumulation_steps"] = str(task.spec.accumulation_steps)
    return found


def _served(ready: Graphs, plain: ir.Model) -> tuple[str, ...]:
    """Outputs of the model for inference, the forward one as it was before a loss was attached."""
    task = ready.task
    own_loss = ready.training.graph.outputs[0].name if task.loss is None else None
    beyond = tuple(() if task.attached is None else task.attached.roles)
    if task.loss is not None:
        beyond = (*task.spec.loss_inputs[len(task.loss.reads) :], *ready.loss.roles)
    wanted = [*(value.name or "" for value in plain.graph.outputs), *task.spec.outputs]
    return tuple(select(plain.graph, wanted, own_loss, beyond))


def _check_names(graph: ir.Graph) -> None:
    """Names that odtpack gives to its own inputs and outputs must be free."""
    for name in sorted(value_names(graph)):
        if name in (RESET, *precision.STATES) or name.endswith(_RESERVED):
            what = f"the model already has a value {name!r}, a name that the training graph needs"
            hint = "this looks like a training model; pass the forward model"
            raise OdtpackError("reserved-name", what, hint=hint)


def _check_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Check that gradients are wanted of existing float32 inputs only."""
    inputs = {value.name: value for value in graph.inputs}
    for name in names:
        if name not in inputs:
            what = f"the model has no initializer or input {name!r}"
            raise UnknownNameError("unknown-parameter", what)
        if inputs[name].dtype != ir.DataType.FLOAT:
            what = f"the gradient of input {name!r} was requested, but only float32 inputs have one"
            hint = f"do not ask for the gradient of {name!r}"
            raise OdtpackError("dtype-not-trainable", what, hint=hint)


def _differentiate(model: ir.Model, task: Task) -> None:
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    op = Ops(graph, "grad/")
    loss = graph.outputs[0]
    names = {*task.train, *task.input_gradients}
    trained = [value for value in graph.inputs if value.name in names]
    gradients: dict[ir.Value, ir.Value] = {}
    scale = precision.LossScale(op, graph) if task.spec.precision == "mixed" else None
    if trained:
        share = 1 / task.spec.accumulation_steps
        dtype = (loss.dtype or ir.DataType.FLOAT).numpy()
        seed = op.constant(np.full(static_dims(loss) or (), share, dtype))
        seed = seed if scale is None else scale.seed(seed)
        gradients = differentiate(graph, {loss: seed}, trained, op)
    require_reached(trained, gradients)
    updates = _carry(op, graph, carried(graph))
    updates += pipeline.after_gradient(op, model, task.backend.passes)
    if scale is not None:
        gradients = scale.unscale(gradients)
        updates += scale.updates(gradients.values())
    if trained:
        accumulate_gradients(graph, op, trained, gradients, task)
    for update in updates:
        # A layer used twice updates its statistics twice, the second time from the first.
        update.update.name = update.name + STATE_SUFFIX
        update.update.shape = inputs[update.name].shape
        graph.outputs.append(update.update)
        aliases.verify(graph, inputs[update.name], update.update)


def require_reached(trained: Iterable[ir.Value], gradients: Collection[ir.Value]) -> None:
    """Check that each of some parameters has a gradient."""
    names = [str(parameter.name) for parameter in trained if parameter not in gradients]
    if names:
        raise OdtpackError(
            "not-reached",
            f"the loss does not depend on what is trained: {', '.join(map(repr, names))}",
            hint=f"freeze it ({' '.join(f'--freeze {quoted(name)}' for name in names)}), or check "
            "loss_input_names",
        )


def accumulate_gradients(
    graph: ir.Graph,
    op: Ops,
    trained: Sequence[ir.Value],
    gradients: dict[ir.Value, ir.Value],
    task: Task,
) -> None:
    """Let a graph add the gradients of parameters to buffers, which become inputs and outputs."""
    buffers = [ir.val(f"{p.name}{BUFFER_SUFFIX}", dtype=p.dtype, shape=p.shape) for p in trained]
    reset = ir.val(RESET, dtype=ir.DataType.BOOL, shape=[1])
    graph.inputs.extend([*buffers, reset])
    accumulate = task.backend.accumulator(op, reset)
    shares = collections.Counter(gradients[parameter] for parameter in trained)
    for parameter, buffer in zip(trained, buffers, strict=True):
        gradient = gradients[parameter]
        node = gradient.producer()
        if shares[gradient] > 1 or node is None or gradient.is_graph_output():
            gradient = op.Identity(gradient)
        else:
            gradient = gradient_buffers.merge(op, gradient)
        if rows := task.frozen_rows.get(str(parameter.name)):
            still = np.zeros(
                (len(rows), *(static_dims(parameter) or ())[1:]), op.type_of(parameter).numpy()
            )
            gradient = op.ScatterND(gradient, op.constant(np.array(rows)[:, None]), still)
        gradient.name = op.fresh_name(f"{parameter.name}_grad")
        gradient.type, gradient.shape = parameter.type, parameter.shape
        out = accumulate(parameter, gradient, buffer)
        out.name = f"{parameter.name}{OUTPUT_SUFFIX}"
        graph.outputs.append(out)
    gradient_buffers.zeros_at_run_time(op, graph, reset)


def finish(models: Mapping[str, tuple[ir.Model, Mapping[str, str]]]) -> None:
    """Drop what no output needs, stamp versions and record what a runtime must know."""
    # models: each by the name of its graph, with its properties.
    for name, (model, properties) in models.items():
        pipeline.finish(model)
        model.graph.name = name
        model.producer_name, model.producer_version = "odtpack", None
        model.metadata_props.clear()
        model.metadata_props.update(properties)
        targets.stamp(model)


def optimization_level(graph: ir.Graph, parameters: Sequence[Parameter]) -> str:
    """The level of ONNX Runtime that suits a training graph, for the runtime to use."""
    if any(parameter.dtype == ir.DataType.DOUBLE for parameter in parameters):
        # Beyond it scales become attributes of fused products, which are float32.
        return "basic"
    # At its highest level ONNX Runtime repacks the weight of a convolution that is a constant.
    weights = [node.inputs[1] for node in graph if node.op_type == "Conv" and len(node.inputs) > 1]
    return "all" if any(w is not None and w.is_initializer() for w in weights) else "extended"


def attach_losses(graph: ir.Graph, parts: Sequence[LossPart]) -> tuple[LossInfo, list[str]]:
    """Write losses, and let their weighted sum be the first output."""
    # Targets that the model does not have are inputs: ``labels.NAME``, ``target.NAME``.
    # Returns what is known of the loss, and names of the scalars that say it in parts: each loss,
    # ``loss.NAME``, and ``accuracy.NAME`` where it compares classes with labels.
    names = [name for name, *_ in parts]
    if again := [name for name in names if names.count(name) > 1]:
        raise OdtpackError("named-twice", f"two losses have the name {again[0]!r}")
    outputs, said, total = list(graph.outputs), list[str](), None
    own, info = set(graph.initializers), LossInfo("several")
    for name, kind, weight, inputs, options in parts:
        loss = make_loss(kind, options)
        read = [find_value(graph, each, f"the loss {name!r}") for each in inputs]
        value, found, read = write_loss(graph, loss, read or outputs[: len(loss.reads)], f".{name}")
        op = Ops(graph, "loss/")
        values = {f"loss.{name}": value}
        if isinstance(loss, Classes) and "labels" in found.roles.values():
            loss = loss.settled(read)
            assert isinstance(loss, Classes)  # noqa: S101 - as it was
            values[f"accuracy.{name}"] = _accuracy(op, loss, read[0], read[len(loss.reads)])
        for stem, each in values.items():
            if stem in value_names(graph):
                what = f"the model already has {stem!r}, the name of one of its losses"
                raise OdtpackError("reserved-name", what)
            each.name = stem
            said.append(stem)
        part = op.Mul(value, weight)
        total = part if total is None else op.Add(total, part)
        total.shape = ir.Shape(())
        info = LossInfo(
            info.name,
            {**info.options, name: {"kind": kind, "weight": weight, **found.options}},
            {**info.roles, **found.roles},
            {**info.labels, **found.labels},
            (*info.fixed, *found.fixed),
        )
    assert total is not None  # noqa: S101 - there is a part
    total.name = op.fresh_name("loss")
    graph.outputs[:] = [total, *outputs]
    for name in set(graph.initializers) - own:  # class weights do not train
        mark_constant(graph.initializers[name], setting=True)
    return info, said


def _accuracy(op: Ops, loss: Classes, scores: ir.Value, labels: ir.Value) -> ir.Value:
    """Share of the labels that count which the highest score names."""
    axes = range(rank(labels))
    named = op.ArgMax(scores, axis=loss.class_axis(scores), keepdims=0)
    right = op.cast(op.Equal(shaped(named, dims(labels)), labels), ir.DataType.FLOAT)
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None:
        return shaped(op.reduce_mean(right, axes, keepdims=False), ())
    counted = op.cast(op.Not(op.Equal(labels, op.constant(ignored))), ir.DataType.FLOAT)
    total = op.Max(op.reduce_sum(counted, axes, keepdims=False), 1.0)
    hits = op.reduce_sum(op.Mul(right, counted), axes, keepdims=False)
    return shaped(op.Div(hits, total), ())
