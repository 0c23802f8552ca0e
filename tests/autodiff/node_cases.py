"""Holds what odtpack makes of the onnx package's own node cases to finite differences.

Every float input of a case becomes a parameter to train, every other one a constant, and
the loss is the sum of the case's float outputs, each element times a fixed random number.
The model goes the whole way of a build. Its gradients are held to central differences of
the case's own model: in ONNX Runtime, or, where that has no kernel, in the onnx package's
reference implementation in float64.
"""

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from odtpack import targets
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_model
from odtpack.package import training
from odtpack.package.task import Graphs, Task
from tests.autodiff.node_functions import REFERENCE, RUNTIME, Feeds, function_of, in_reference
from tests.autodiff.oracle import session

VERDICTS = ("right", "not differentiable", "refused", "random", "not run", "wrong")
DIRECTIONS = 3
SINGLE = 16  # elements that are moved alone, where some others lie on a kink
POINTS = 6  # near a case, where that lies on a kink
LARGEST = 1 << 16  # elements of an input
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
           "RandomUniformLike"}  # fmt: skip
_WEIGHT = "sweep_weight"
_LOSS = "sweep_loss"
_MASKED = 1e30  # from here on a number stands for infinity
_PLACES = {"Resize": (1, 2)}
"""Inputs that say where an operator reads, and are not trainable (docs/operators.md)."""
_NO_SLOPE = "at a kink, or beside a jump, there and at the points near by"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a case: one of :data:`VERDICTS`, and why."""

    kind: str
    why: str = ""


def collect() -> list[Any]:
    """The cases of the installed onnx package, which draws them with fixed seeds."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it computes overflows and divides by zero on purpose
        return sorted(collect_testcases(None), key=lambda case: case.name)


def judge(case: Any) -> Verdict:
    """Try a case of :func:`collect`."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        model = _under_known_opset(case.model)
        pairs = zip(model.graph.input, case.data_sets[0][0], strict=True)
        feeds = {value.name: _array(given) for value, given in pairs}
        floats = [v.name for v in model.graph.input if _is_float(v, feeds[v.name])]
        if not floats or not any(_is_float(v) for v in model.graph.output):
            return Verdict("not differentiable", "no float goes in, or none comes out")
        if any(_draws(node, feeds) for node in model.graph.node):
            return Verdict("random")
        return _Trial(model, feeds, floats).verdict()


def _array(given: Any) -> Any:
    """A case's input as an array, or as a list of them."""
    if isinstance(given, TensorProto):
        return numpy_helper.to_array(given)
    return [_array(each) for each in given] if isinstance(given, list) else np.asarray(given)


def _under_known_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """A case of an opset that no runtime loads under the newest that one does, if it may be."""
    changed = copy.deepcopy(model)
    for entry in changed.opset_import:
        if (
            entry.domain == ""
            and entry.version > targets.MAX_OPSET
            and all(
                onnx.defs.has(node.op_type, targets.MAX_OPSET, "")
                and onnx.defs.get_schema(node.op_type, entry.version, "").since_version
                <= targets.MAX_OPSET
                for node in model.graph.node
                if not node.domain
            )
        ):
            entry.version = targets.MAX_OPSET
            changed.ir_version = min(changed.ir_version, 13)
    return changed


def _is_float(value: onnx.ValueInfoProto, array: Any = None) -> bool:
    if not value.type.HasField("tensor_type"):
        return False
    size = 1 if array is None else array.size
    return value.type.tensor_type.elem_type in _FLOATS and size > 0


def _draws(node: onnx.NodeProto, feeds: Feeds) -> bool:
    if node.op_type == "Dropout" and len(node.input) > 2:
        return bool(np.any(feeds.get(node.input[2], True)))
    return node.op_type in _RANDOM


class _Trial:
    """One case on its way."""

    def __init__(self, model: onnx.ModelProto, feeds: Feeds, floats: list[str]) -> None:
        self.model = model
        self.feeds = feeds
        self.floats = [name for name in floats if feeds[name].size <= LARGEST]
        self.train = list(self.floats)
        self.outputs = [value.name for value in model.graph.output]
        types = {value.type.tensor_type.elem_type for value in model.graph.output}
        self.wide = types == {TensorProto.DOUBLE}  # whether the function computes in float64
        self.coarse = False  # whether float32 was too coarse, so that all is float64

    def verdict(self) -> Verdict:
        function, oracle = function_of(self.model, self.feeds)
        if function is None:
            return Verdict("not run", oracle)
        self.function, first = function, function(self.feeds)
        self.weights = self._weights(first)
        self.finite = {
            name: np.abs(np.asarray(y, np.float64)) < _MASKED
            for name, y in zip(self.outputs, first, strict=True)
            if name in self.weights
        }
        if not any(finite.any() for finite in self.finite.values()):
            return Verdict("not differentiable", "its outputs are not finite")
        if oracle == RUNTIME:
            try:
                session(self._with_loss(), "all")
            except (Fail, NoKernel) as error:
                return Verdict("not run", f"with constants: {str(error)[:200]}")
        try:
            gradient = self._build()
        except OdtpackError as error:
            if error.code == "nothing-to-train":
                return self._without_gradient()
            return Verdict("refused", f"{error.code}: {error.what}")
        except NoKernel as error:
            if oracle == RUNTIME:
                raise
            return Verdict("not run", str(error))  # nor is the case itself
        if not self.train:
            return self._without_gradient()
        if why := self._sloped_without_gradient():
            return Verdict("wrong", why)
        why = self._mismatches(gradient)
        if why and oracle == RUNTIME:
            # Sums of float32 may be too coarse to difference: the reference computes in float64.
            self.function = in_reference(self.model, np.float64)
            self.wide = self.coarse = True
            try:
                why = self._mismatches(gradient) and why
            except Exception as error:  # of whatever kind: it does not run the case
                why += f"; {REFERENCE}: {error}"
        return Verdict("wrong", why) if why else Verdict("right", oracle)

    def _without_gradient(self) -> Verdict:
        if why := self._sloped_without_gradient():
            return Verdict("wrong", why)
        return Verdict("not differentiable", "no gradient reaches an input")

    def _sloped_without_gradient(self) -> str:
        """Which input that no gradient reaches has a slope other than zero, if one has."""
        random = np.random.default_rng(2)
        places = {
            node.input[at]
            for node in self.model.graph.node
            for at in _PLACES.get(node.op_type, ())
            if at < len(node.input)
        }
        for name in self.floats:
            if name in self.train or name in places or not np.isfinite(self.feeds[name]).all():
                continue
            shape = self.feeds[name].shape
            for _ in range(DIRECTIONS):
                way = random.choice([-1.0, 1.0], shape)
                try:
                    slope = self._slope(self.feeds, name, way)
                except Fail:  # a frequency out of range, say
                    continue
                if slope is not None and abs(slope) > 1e-2:
                    return f"no gradient reaches {name}, along a way of slope {slope}"
        return ""

    def _mismatches(self, gradient: Callable[[Feeds], dict[str, np.ndarray]]) -> str:
        """In what way the gradients are wrong at the case's point, or if it has no slope, near."""
        why = self._mismatch(gradient, self.feeds)
        for seed in range(POINTS):
            near = self._beside(seed)
            if why == _NO_SLOPE and np.isfinite(self._loss(near)):
                why = self._mismatch(gradient, near)
        return why

    def _weights(self, outputs: Sequence[Any]) -> dict[str, np.ndarray]:
        """The fixed random number for each element of each float output."""
        random = np.random.default_rng(0)
        return {
            value.name: random.uniform(0.5, 1.5, np.shape(y)) * random.choice([-1, 1], np.shape(y))
            for value, y in zip(self.model.graph.output, outputs, strict=True)
            if _is_float(value)
        }

    def _loss(self, feeds: Feeds) -> float:
        found = dict(zip(self.outputs, self.function(feeds), strict=True))
        if any(np.shape(found[name]) != weight.shape for name, weight in self.weights.items()):
            return np.nan  # a Range of another length
        # An element that is infinite, as a masked score, has no slope.
        return float(
            sum(
                (np.asarray(found[name], np.float64) * weight)[self.finite[name]].sum()
                for name, weight in self.weights.items()
            )
        )

    # Building

    def _build(self) -> Callable[[Feeds], dict[str, np.ndarray]]:
        """Build the model; return what computes its gradients."""
        graphs = self._graphs()
        if graphs is None:
            return lambda feeds: {}
        running = session(ir.to_proto(graphs.training), "all")
        declared = {value.name: value for value in graphs.training.graph.inputs}

        def gradients(feeds: Feeds) -> dict[str, np.ndarray]:
            given = {}
            for name, value in declared.items():
                dtype = (value.dtype or ir.DataType.FLOAT).numpy()
                if name == training.RESET:
                    given[name] = np.array([True])
                elif name in feeds:
                    array = feeds[name]
                    given[name] = array if isinstance(array, list) else np.asarray(array, dtype)
                elif name.endswith(training.BUFFER_SUFFIX):
                    of = name.removesuffix(training.BUFFER_SUFFIX)
                    given[name] = np.zeros(feeds[of].shape, dtype)
                else:
                    given[name] = next(p for p in graphs.parameters if p.name == name).value()
            names = [value.name for value in running.get_outputs()]
            found = dict(zip(names, running.run(None, given), strict=True))
            return {name: found[f"{name}{training.OUTPUT_SUFFIX}"] for name in self.train} | {
                _LOSS: found[names[0]]
            }

        return gradients

    def _graphs(self) -> Graphs | None:
        """The training graph for all inputs that a gradient reaches."""
        while self.train:
            task = Task(load_model(self._with_loss()), tuple(self.train), (), None)
            try:
                return training.build_graphs(task)
            except OdtpackError as error:
                if error.code != "not-reached":
                    raise
                self.train.remove(error.what.split("'")[1])
        return None

    def _with_loss(self) -> onnx.ModelProto:
        """The model with its loss as only output; what is not a sequence is stored in it."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        kept = [v for v in graph.input if isinstance(self.feeds[v.name], list)]
        for value in graph.input:
            if value not in kept and value.type.HasField("tensor_type"):
                graph.initializer.append(_tensor(np.asarray(self.feeds[value.name]), value))
        del graph.input[:]
        graph.input.extend(kept)
        terms = []
        for value in graph.output:
            if value.name not in self.weights:
                continue
            name, source = f"{_WEIGHT}_{value.name}", value.name
            weight = self.weights[value.name].astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(weight, name))
            if value.type.tensor_type.elem_type != TensorProto.FLOAT:
                source = f"{name}_wide"
                graph.node.append(
                    helper.make_node("Cast", [value.name], [source], to=TensorProto.FLOAT)
                )
            finite, product = self.finite[value.name], f"{name}_product"
            graph.node.append(helper.make_node("Mul", [source, name], [product]))
            if not finite.all():
                zero = np.zeros((), np.float32)
                graph.initializer.append(numpy_helper.from_array(finite, f"{name}_finite"))
                graph.initializer.append(numpy_helper.from_array(zero, f"{name}_zero"))
                picked = [f"{name}_finite", product, f"{name}_zero"]
                product = f"{name}_kept"
                graph.node.append(helper.make_node("Where", picked, [product]))
            graph.node.append(helper.make_node("ReduceSum", [product], [f"{name}_sum"], keepdims=0))
            terms.append(f"{name}_sum")
        graph.node.append(helper.make_node("Sum", terms, [_LOSS]))
        del graph.output[:]
        graph.output.append(helper.make_tensor_value_info(_LOSS, TensorProto.FLOAT, []))
        return model

    # Comparing

    def _beside(self, seed: int) -> Feeds:
        """A point near by."""
        random = np.random.default_rng(seed)
        moved = dict(self.feeds)
        for name in self.train:
            x = np.asarray(self.feeds[name], np.float64)
            step = 0.05 * random.uniform(0.5, 1, x.shape) * random.choice([-1, 1], x.shape)
            moved[name] = np.asarray(x + step, self.feeds[name].dtype)
        return moved

    def _mismatch(self, gradient: Callable[[Feeds], dict[str, np.ndarray]], feeds: Feeds) -> str:
        """In what way the gradients are not the slopes of the function; empty if they are."""
        found, loss = gradient(feeds), self._loss(feeds)
        if not np.isclose(found[_LOSS], loss, rtol=1e-3, atol=1e-3, equal_nan=True):
            return f"the loss is {found[_LOSS]} and not {loss}"
        random = np.random.default_rng(1)
        for name in self.train:
            g, movable = np.asarray(found[name], np.float64), np.isfinite(feeds[name])
            ways = random.choice([-1.0, 1.0], (DIRECTIONS, *g.shape))
            if g.size <= DIRECTIONS:
                ways = np.eye(g.size).reshape(g.size, *g.shape)
            compared = 0
            for whole in ways * movable:
                # Some element may be on a kink: then fewer of them move.
                shares = (random.random(g.shape) < share for share in (1, 0.3, 0.1, 0.03))
                some = random.permutation(g.size)[:SINGLE]
                single = (np.arange(g.size).reshape(g.shape) == element for element in some)
                fewer = (whole * moving for moving in itertools.chain(shares, single))
                tried = ((way, self._slope(feeds, name, way)) for way in fewer if way.any())
                way, slope = next(((w, s) for w, s in tried if s is not None), (whole, None))
                if slope is None:
                    continue
                parts = g[way != 0] * way[way != 0]
                compared += 1
                if not np.isfinite(parts).all():
                    return f"the gradient of {name} is not finite along a way of slope {slope}"
                bound = 5e-3 * max(float(np.abs(parts).sum()), abs(slope)) + 1e-3
                if abs(parts.sum() - slope) > bound:
                    return f"the gradient of {name} is {parts.sum()} along a way of slope {slope}"
            if compared < movable.any():
                return _NO_SLOPE
        return ""

    def _slope(self, feeds: Feeds, name: str, way: np.ndarray) -> float | None:
        """A central difference, extrapolated from two steps; None at a kink and beside a jump."""
        x = np.asarray(feeds[name], np.float64)
        dtype = np.float64 if feeds[name].dtype == np.float64 or self.coarse else np.float32
        wide = self.wide and dtype == np.float64
        largest = float(np.abs(x[way != 0]).max(initial=0.0))
        step = (1e-6 if wide else 1e-2) * max(0.2, min(1.0, largest))
        here, central, bends = self._loss(feeds), [], []
        for h in (step, step / 2):
            sides = []
            for end in (h, -h):
                moved = np.asarray(x + end * way, dtype)
                length = float(np.abs(moved.astype(np.float64) - x)[way != 0].mean())
                sides.append((self._loss({**feeds, name: moved}) - here) / length)
            central.append((sides[0] - sides[1]) / 2)
            bends.append(abs(sides[0] + sides[1]))
        slope = (4 * central[1] - central[0]) / 3
        noise = 1e-3 * abs(slope) + 1e-2 + abs(here) * (1e-14 if wide else 1e-6) / step
        smooth = bends[1] < 0.75 * bends[0] or bends[1] < noise
        steady = abs(central[1] - central[0]) < 1e-2 * abs(slope) + noise
        return slope if np.isfinite(slope) and smooth and steady else None


def _tensor(array: np.ndarray, value: onnx.ValueInfoProto) -> TensorProto:
    """An initializer of the declared type, which numpy may know by another name."""
    dtype = value.type.tensor_type.elem_type
    if dtype == TensorProto.STRING:
        return helper.make_tensor(value.name, dtype, array.shape, [str(s) for s in array.flat])
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), value.name)
