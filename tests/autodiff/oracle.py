"""Differentiates a node or a model and compares the result with two independent oracles.

For y = f(x) and a fixed random cotangent w, the gradient graph computes the gradients
of L = sum(w y). It runs in ONNX Runtime with graph optimizations off and on, and is held to

- PyTorch's autograd in float64, of the function that the case names, and
- central finite differences in float64 of the ONNX reference implementation of the node.

The points are chosen away from kinks by the cases (see ``spread``), not by the tolerances.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

from odtpack import contrib, targets
from odtpack.autodiff import differentiate
from odtpack.autodiff.expand import expand
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes
from odtpack.model.loading import load_model
from odtpack.passes import precision
from tests.autodiff.points import (  # noqa: F401  (tables of cases take them from here)
    Array,
    cast_floats,
    ints,
    normal,
    spread,
    spread_apart,
)
from tests.autodiff.reference_loops import Loop, Scan
from tests.model_text import run, session  # noqa: F401  (and their tests these)

STEP = 1e-6
ELEMENTWISE_LIMIT = 24  # larger inputs are differenced along random directions
DIRECTIONS = 4
LEVELS = ("off", "all")


@dataclasses.dataclass(frozen=True)
class Case:
    """One node, or a model with control flow, with its inputs."""

    op: str  # the operator's type; the name of a model
    inputs: Mapping[str, Array | None]  # in the node's order; None for an absent optional one
    torch: Callable[..., Any]  # the same function; receives a tensor for each present input
    opset: int = 17  # of the domain ""
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wrt: Sequence[str] | None = None  # differentiated; default: floats that are not constants
    const: Sequence[str] = ()  # floats that are initializers; INT64 inputs always are, unless in
    runtime: Sequence[str] = ()  # INT64 inputs that are fed when the model runs
    batch: Sequence[str] = ()  # inputs whose first axis is declared as the symbol "batch"
    # Dimensions declared as symbols, by input: a name for each axis, or the axes.
    symbols: Mapping[str, Mapping[int, str] | Sequence[int]] = dataclasses.field(
        default_factory=dict
    )
    outputs: int = 1  # of the node
    absent: Sequence[int] = ()  # indices of the outputs that the node leaves out
    used: Sequence[int] | None = None  # indices of the outputs on which L depends
    domain: str = ""
    # "torch" where the reference implementation lacks the operator or is wrong; "none" at a kink,
    # where the convention is PyTorch's.
    differences: str = "onnx"
    double: bool = False  # run in float64 too, and hold that to a tighter tolerance
    expanded: bool = False  # expand function bodies before differentiation
    label: str = ""  # tells apart cases of one operator
    text: str = ""  # inputs, outputs and nodes of a model, which has no constants

    @functools.cached_property
    def id(self) -> str:
        parts = [self.op, self.label, f"opset{self.opset}", "batch" if self.batch else ""]
        parts += [name + "".join(map(str, axes)) for name, axes in self.symbols.items()]
        return "-".join(part for part in parts if part)

    @property
    def present(self) -> dict[str, Array]:
        return {name: array for name, array in self.inputs.items() if array is not None}

    @property
    def differentiated(self) -> list[str]:
        if self.wrt is not None:
            return list(self.wrt)
        return [n for n, a in self.present.items() if a.dtype.kind == "f" and n not in self.const]

    @property
    def constants(self) -> set[str]:
        if self.text:
            return set()
        integers = {n for n, a in self.present.items() if a.dtype == np.int64}
        return (integers | set(self.const)) - set(self.runtime)

    @functools.cached_property
    def output_names(self) -> list[str]:
        if self.text:
            return [str(value.name) for value in forward_model(self).graph.outputs]
        used = range(self.outputs) if self.used is None else self.used
        return [f"y{i}" for i in used]


_FIELDS = {field.name for field in dataclasses.fields(Case)}


def cases(op, inputs, function, opsets=(17,), **options):
    """One case for each opset; options that are not fields of :class:`Case` are attributes."""
    fields = {key: value for key, value in options.items() if key in _FIELDS}
    attrs = {key: value for key, value in options.items() if key not in _FIELDS}
    return [Case(op, inputs, function, opset=opset, attrs=attrs, **fields) for opset in opsets]


joined = itertools.chain.from_iterable
"""The cases of several calls of :func:`cases`."""


def forward_model(case: Case, floats: type = np.float32) -> ir.Model:
    """The model of a case, with its floats in the given precision."""
    if case.text:
        text = case.text if floats is np.float32 else re.sub(r"\bfloat\b", "double", case.text)
        header = f'<ir_version: 8, opset_import: ["" : {case.opset}]>\n'
        parsed = ir.from_proto(onnx.parser.parse_model(header + text))
        targets.stamp(parsed)
        return load_model(parsed)
    values: dict[str, ir.Value] = {}
    inputs, initializers = [], []
    for name, given in case.present.items():
        array = cast_floats(given, floats)
        if name in case.constants:
            values[name] = ir.val(name, const_value=ir.tensor(array, name=name))
            initializers.append(values[name])
        else:
            shape: list[int | str] = [*array.shape]
            if name in case.batch:
                shape[0] = "batch"
            axes = case.symbols.get(name, ())
            for axis in axes:
                shape[axis] = axes[axis] if isinstance(axes, Mapping) else f"{name}{axis}"
            values[name] = ir.val(name, ir.DataType.from_numpy(array.dtype), shape)
            inputs.append(values[name])
    operands = [None if array is None else values[name] for name, array in case.inputs.items()]
    node = ir.node(
        case.op, operands, case.attrs, domain=case.domain, num_outputs=case.outputs, name="node"
    )
    for index, output in enumerate(node.outputs):
        output.name = "" if index in case.absent else f"y{index}"
        if case.op == "Einsum":  # whose inference does not know all dots
            output.type = next(iter(values.values())).type
    if case.domain:  # of these no inference knows
        _declare_types(case, node, floats)
    imports = {"": case.opset} | ({case.domain: 1} if case.domain else {})
    outputs = [value for value in node.outputs if value.name in case.output_names]
    graph = ir.Graph(
        inputs, outputs, nodes=[node], initializers=initializers, opset_imports=imports, name="case"
    )
    model = ir.Model(graph, ir_version=8)
    targets.stamp(model)
    model = infer_shapes(model)
    for output in model.graph.outputs:
        if case.op == "MaxUnpool" and output.shape is None:  # as many axes as the input
            output.shape = ir.Shape([None] * len(inputs[0].shape or ()))
    return model


def _declare_types(case: Case, node: ir.Node, floats: type) -> None:
    """Give the outputs on which L depends the types and ranks that PyTorch says they have."""
    tensors = [torch.tensor(cast_floats(a, np.float64)) for a in case.present.values()]
    for name, y in torch_outputs(case, tensors).items():
        output = node.outputs[int(name[1:])]
        array = y.detach().numpy()
        dtype = np.dtype(floats) if array.dtype.kind == "f" else array.dtype
        output.type = ir.TensorType(ir.DataType.from_numpy(dtype))
        output.shape = ir.Shape([None] * array.ndim if case.batch else array.shape)


def gradient_model(case: Case, floats: type = np.float32) -> tuple[ir.Model, dict[str, str]]:
    """The model with the gradients as outputs, and their names by input."""
    model = forward_model(case, floats)
    precision.widen(model.graph)  # as a build does
    if case.domain == contrib.DOMAIN:
        model = contrib.decompose(model)
    model, names = add_gradients(
        expand(model, case.differentiated) if case.expanded or case.text else model,
        case.differentiated,
    )
    declare_ranks(case, model)
    return model, names


def declare_ranks(case: Case, model: ir.Model) -> None:
    """Give outputs and seeds of unknown rank the right one, for the checker; the rules are done."""
    unknown = [v for v in (*model.graph.inputs, *model.graph.outputs) if v.shape is None]
    if unknown:
        tensors = [torch.tensor(cast_floats(a, np.float64)) for a in case.present.values()]
        ranks = {name: y.ndim for name, y in torch_outputs(case, tensors).items()}
        for value in unknown:
            value.shape = ir.Shape([None] * ranks[str(value.name).removeprefix("seed_")])


def add_gradients(model, wrt, after=lambda op, graph: None):
    """Add an input ``seed_y`` for each output y, and a gradient output for each of ``wrt``.

    ``after`` runs on the graph with gradients, as the passes do that write internal operators out.
    """
    graph = model.graph
    by_name = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    seeds = {}
    for output in list(graph.outputs):
        if output.dtype is not None and output.dtype.is_floating_point():
            seeds[output] = ir.val(f"seed_{output.name}", output.dtype, output.shape)
            graph.inputs.append(seeds[output])
    op = Ops(graph, "g_")
    found = differentiate(graph, seeds, [by_name[name] for name in wrt], op)
    after(op, graph)
    names = {}
    for value, gradient in found.items():
        # An output needs a name of its own, and the shape that the checker asks for.
        copy = op.Identity(gradient)
        copy.type, copy.shape = value.type, value.shape
        graph.outputs.append(copy)
        names[str(value.name)] = str(copy.name)
    targets.stamp(model)
    return model, names


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What PyTorch says: outputs and gradients in float64, for the cotangents it was given."""

    outputs: dict[str, Array]
    gradients: dict[str, Array]


def cotangents(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """The fixed random w for every output."""
    generator = np.random.default_rng(7)
    return {
        name: np.asarray(generator.uniform(0.5, 1.5, shape) * generator.choice([-1, 1], shape))
        for name, shape in shapes.items()
    }


def torch_outputs(case: Case, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    named = dict(zip(case.present, tensors, strict=True))
    result = case.torch(**named) if case.text else case.torch(*tensors)
    listed = [result] if isinstance(result, torch.Tensor) else list(result)
    return dict(zip(case.output_names, listed, strict=True))


def ask_torch(case: Case) -> tuple[Oracle, dict[str, Array]]:
    tensors = {}
    for name, array in case.present.items():
        tensors[name] = torch.tensor(cast_floats(array, np.float64))
        if name in case.differentiated:
            tensors[name].requires_grad_()
    outputs = torch_outputs(case, list(tensors.values()))
    seeds = cotangents({name: tuple(y.shape) for name, y in outputs.items()})
    loss = sum((y * torch.tensor(seeds[name])).sum() for name, y in outputs.items())
    assert isinstance(loss, torch.Tensor)
    wanted = [tensors[name] for name in case.differentiated]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    computed = {name: y.detach().numpy() for name, y in outputs.items()}
    by_name = dict(zip(case.differentiated, (g.numpy() for g in gradients), strict=True))
    return Oracle(computed, by_name), seeds


def difference_gradients(case: Case, seeds: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Directions and slopes along them: (directions [k, *shape], slopes [k]) by input."""
    feeds = {name: cast_floats(array, np.float64) for name, array in case.present.items()}
    if case.differences == "torch":

        def loss(values: Mapping[str, Array]) -> float:
            outputs = torch_outputs(case, [torch.tensor(np.asarray(values[n])) for n in feeds])
            return float(sum((y.numpy() * seeds[name]).sum() for name, y in outputs.items()))
    else:
        proto = ir.to_proto(forward_model(case, np.float64))
        evaluator = ReferenceEvaluator(proto, new_ops=[Loop, Scan] if case.text else None)
        inputs = [value.name for value in proto.graph.input]

        def loss(values: Mapping[str, Array]) -> float:
            arrays = {name: np.asarray(values[name]) for name in inputs}
            outputs = evaluator.run(case.output_names, arrays)
            pairs = zip(case.output_names, outputs, strict=True)
            return float(sum((y * seeds[name]).sum() for name, y in pairs))

    generator = np.random.default_rng(11)
    result = {}
    for name in case.differentiated:
        x = feeds[name]
        if x.size <= ELEMENTWISE_LIMIT:
            directions = np.eye(x.size).reshape(x.size, *x.shape)
        else:
            directions = generator.standard_normal((DIRECTIONS, *x.shape))
        slopes = [
            (loss({**feeds, name: x + STEP * d}) - loss({**feeds, name: x - STEP * d})) / (2 * STEP)
            for d in directions
        ]
        result[name] = directions, np.array(slopes)
    return result


def run_gradient(case, seeds, levels, floats=np.float32):
    """Outputs and gradients by name, as ONNX Runtime computes them from one model, by level."""
    model, names = gradient_model(case, floats)
    onnx.checker.check_model(ir.to_proto(model)) if not case.domain else None
    feeds, found = feeds_of(case, model, seeds, floats), {}
    for level in levels:
        by_name = run(model, feeds, level)
        gradients = {name: by_name[gradient] for name, gradient in names.items()}
        found[level] = {name: by_name[name] for name in case.output_names}, gradients
    return found


def feeds_of(case, model, seeds, floats=np.float32):
    """What the model with gradients takes: the case's arrays, and the seeds in their types."""
    fed = {n: a for n, a in case.present.items() if n not in case.constants}
    feeds = {name: cast_floats(array, floats) for name, array in fed.items()}
    types = {value.name: value.dtype for value in model.graph.inputs}
    for name, seed in seeds.items():
        if (dtype := types.get(f"seed_{name}")) is not None:
            feeds[f"seed_{name}"] = np.asarray(seed, dtype.numpy())
    return feeds


def check(case: Case) -> None:
    """Hold one case to both oracles."""
    expected, seeds = ask_torch(case)
    if case.differences != "none":
        for name, (directions, slopes) in difference_gradients(case, seeds).items():
            along = (directions * expected.gradients[name]).reshape(len(slopes), -1).sum(1)
            np.testing.assert_allclose(
                along, slopes, rtol=1e-5, atol=1e-6, err_msg=f"{name}: torch against differences"
            )
    found = {}
    for level, (outputs, gradients) in run_gradient(case, seeds, [*LEVELS]).items():
        found[level] = gradients
        for name, y in outputs.items():
            np.testing.assert_allclose(
                y, expected.outputs[name], rtol=1e-4, atol=1e-5, err_msg=f"forward {name} ({level})"
            )
        compare(case, gradients, expected, np.float32, rtol=1e-4, atol=1e-5, level=level)
    for name, gradient in found["off"].items():
        np.testing.assert_allclose(gradient, found["all"][name], rtol=2e-5, atol=2e-6, err_msg=name)
    if case.double:
        outputs, doubles = run_gradient(case, seeds, ["off"], np.float64)["off"]
        rtol = 1e-9 if case.text else 1e-7
        for name, y in outputs.items():
            np.testing.assert_allclose(y, expected.outputs[name], rtol=rtol, atol=1e-9)
        compare(case, doubles, expected, np.float64, rtol=rtol, atol=rtol / 10, level="off")


def compare(case, found, expected, floats, *, rtol, atol, level):
    assert sorted(found) == sorted(case.differentiated)
    for name, gradient in found.items():
        assert gradient.dtype == cast_floats(case.present[name], floats).dtype
        assert gradient.shape == case.present[name].shape, name
        np.testing.assert_allclose(
            gradient, expected.gradients[name], rtol=rtol, atol=atol,
            err_msg=f"gradient of {name} ({level}, {np.dtype(floats)})",
        )  # fmt: skip
