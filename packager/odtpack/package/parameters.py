"""The parameters of a package: which there are, how they are chosen, stored and taken."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import influences
from odtpack.choices import Storage
from odtpack.errors import OdtpackError, UnknownNameError, near_names, some
from odtpack.graph.graphs import (
    TRAINABLE_TYPES,
    carried,
    is_lifted_constant,
    is_setting,
    producer,
    running_statistics,
)
from odtpack.model.exporters import (
    COMPUTED,
    Folded,
    fixed_role,
    folded,
    is_generated,
    kinds,
    made_up,
    matching,
    module_names,
)
from odtpack.optimizers import Optimizer
from odtpack.package.buffers import by_looks
from odtpack.package.like import said_by
from odtpack.quantized import to_int8
from odtpack.spec import BuildSpec
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX, UNSCALED_SUFFIX

# Inputs that set an operator up: no model trains them, though some have a gradient.
_SETTINGS = {
    "BatchNormalization": (3, 4),
    "CastLike": (1,),
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1,),
    "NegativeLogLikelihoodLoss": (2,),
    "OneHot": (2,),
    "Pad": (2,),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
}

# A name as a module gives it; converters write slashes, colons and running numbers.
_PATH = re.compile(r"(?!.*__\d+$)[A-Za-z_]\w*(\.\w+)*")
_GUARD = 1e-3  # up to here a number keeps a division or a root from its pole
# The second input and those beyond are settings, where they are scalars.
_ARITHMETIC_SETTINGS = ("Pow",)
# Inputs that are weights and biases, whatever their values: a bias may have one element.
_LAYERS = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "GRU": (1, 2, 3),
    "LSTM": (1, 2, 3),
    "PRelu": (1,),
    "RNN": (1, 2, 3),
}

_HUGE = 1e30  # beyond lie the values with which masks shut out
_CHUNK = 1 << 20  # elements that are looked at at once: an initializer may have billions


def candidates(model: ir.Model) -> list[str]:
    """Initializers that look like parameters, in the order of the model."""
    # They are float tensors that a gradient reaches. Running statistics, settings of an operator,
    # masks, buffers by the exporter's note and constants are not, unless the model keeps everything
    # in constants, or the matrix and the bias of a layer. A scalar is one where the exporter noted
    # it as a parameter, or where its name is as a module gives it and it is neither an exponent,
    # nor a whole factor, nor a small number that guards a division or a root.
    return reached(model, look_alikes(model))


def reached(model: ir.Model, names: Sequence[str], read: Sequence[str] = ()) -> list[str]:
    """Those of some initializers that a gradient reaches."""
    graph = model.graph
    values = [*graph.outputs, *graph.inputs, *(y for node in graph for y in node.outputs)]
    starts = [value for value in values if value.name in read] if read else graph.outputs
    reaching = influences(graph, starts)
    return [name for name in names if graph.initializers[name] in reaching]


def look_alikes(model: ir.Model) -> list[str]:
    """As :func:`candidates`, whether a gradient reaches them or not."""
    return sort_out(model)[0]


def sort_out(model: ir.Model) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Those of :func:`look_alikes`; buffers by their looks; and what may be one, and trains."""
    # It reads the values of all initializers, which may take gigabytes.
    graph = model.graph
    state = {*running_statistics(graph), *carried(graph)}
    unnamed, noted = made_up(graph), kinds(graph)
    found = [
        value
        for name, value in graph.initializers.items()
        if name not in state and _looks_trainable(value, name in unnamed, noted.get(name))
    ]
    stored = [value for value in found if not is_lifted_constant(value)]
    if stored:
        stored = [v for v in found if not is_lifted_constant(v) or _is_of_a_layer(v)]
    names = [str(value.name) for value in stored or found]
    open_ = [name for name in names if name not in noted]
    buffers, doubtful = by_looks(graph, open_, unnamed)
    if len(buffers) == len(names):
        buffers = {}  # a model has parameters
    return [name for name in names if name not in buffers], buffers, doubtful


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What becomes of the initializers of a model."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]  # those that become inputs all the same
    alike: tuple[str, ...]  # what may be trained, whether a gradient reaches it or not
    remarks: tuple[str, ...]  # what was decided without being asked for


def choose(
    model: ir.Model,
    spec: BuildSpec,
    wanted: Sequence[str],
    read: Sequence[str],
    own: Collection[str] = (),
) -> Chosen:
    """Choose what trains; ``wanted`` are patterns, ``own`` the initializers of an adapter."""
    names, buffers, doubtful = sort_out(model)
    alike, freeze, remarks = tuple(names), spec.freeze, list[str]()
    if spec.like is not None:
        if spec.train:
            raise OdtpackError(
                "option-not-used",
                "--train and --like both say what trains",
                hint="leave one of them out; --freeze may stand beside --like",
            )
        said = said_by(model, Path(spec.like), alike, own)
        alike, remarks = said.parameters, [*said.remarks]
        if not wanted:
            freeze = (*freeze, *map(glob.escape, said.frozen))
    trained, frozen = resolve(model, wanted, freeze, read, alike)
    if spec.like is None and not wanted:
        if buffers:
            shown = some([f"{name} ({why})" for name, why in buffers.items()])
            remarks.append(
                f"not trained, as buffers look: {shown}; if one trains, say so with --like "
                "names.txt, which odtpack.names(module, 'names.txt') writes"
            )
        doubts = {name: why for name, why in doubtful.items() if name in trained}
        if doubts:
            shown = some([f"{name} ({why})" for name, why in doubts.items()])
            option = " ".join(f"--freeze {name!r}" for name in [*doubts][:4])
            remarks.append(f"trained, and may be buffers: {shown}; if so, {option}")
    made = folded(model.graph)
    changed = [
        f"{name} ({', '.join(made[name].by)} of {', '.join(made[name].parameters)})"
        for name in trained
        if name in made and made[name].by and made[name].parameters
    ]
    if changed:
        remarks.append(
            "trained as the exporter computed them, and not the parameters themselves: "
            f"{some(changed)}; torch.onnx.export(..., optimize=False) keeps those"
        )
    remarks += _folding(model.graph, trained, alike, made, [] if wanted else changed)
    return Chosen(trained, frozen, alike, tuple(remarks))


# Operators that an exporter gives weights in another order, and nothing else.
_REORDERED = ("GRU", "LSTM", "MatMul", "PRelu", "RNN")


def _folding(
    graph: ir.Graph,
    trained: Sequence[str],
    alike: Sequence[str],
    made: Mapping[str, Folded],
    said: Sequence[str],
) -> Iterator[str]:
    """Say which parameters are lost, or are several, as an exporter computed with them."""
    newer = "torch.onnx.export(..., optimize=False)"
    older = "torch.onnx.export(..., do_constant_folding=False)"
    known = {name.partition(" ")[0] for name in said}
    computed = [n for n in trained if n.startswith(COMPUTED) and _may_be_computed(graph, n)]
    if computed:
        yield (
            f"trained as the exporter computed them, perhaps from parameters: {some(computed)}; "
            f"{older} keeps those"
        )
    scaled = [
        f"{name} of {some(made[name].parameters)}"
        for name in trained
        if name in made and name not in known and made[name].parameters and is_generated(name)
        and not _is_column(graph.initializers[name])
        and any(fixed_role(*use) is None for use in graph.initializers[name].uses())
    ]  # fmt: skip
    if scaled:
        yield (
            f"trained as the exporter computed them, perhaps scaled: {some(scaled)}; "
            f"{newer} keeps those"
        )
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for name in trained:
        for parameter in made[name].parameters if name in made else (name,):
            parts[parameter].append(name)
    for parameter, names in parts.items():
        if len(names) > 1:
            yield (
                f"{some(names)} are computed from {parameter}, and train apart; "
                f"{newer} keeps {parameter}"
            )
    for name, value in graph.initializers.items():
        sources = made[name].parameters if name in made else ()
        if name in alike or not (sources or name.startswith(COMPUTED)) or not _is_mask(value):
            continue
        yield (
            f"{name} holds infinities beside other numbers, and is not trained"
            f"{f', though it is computed from {some(sources)}' if sources else ''}; "
            f"{newer if sources else older} keeps what it was computed from"
        )


def _may_be_computed(graph: ir.Graph, name: str) -> bool:
    """Whether an initializer of the older exporter may be more than a weight in another order."""
    value = graph.initializers[name]
    for node, _ in value.uses():
        if node.op_type in _REORDERED or (_is_column(value) and node.op_type in ("Add", "Mul")):
            continue
        # It folds a batch normalization into both the weight and the bias.
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if node.op_type.startswith("Conv") and bias and str(bias.name).startswith(COMPUTED):
            continue
        return True
    return False


def _is_column(value: ir.Value) -> bool:
    """Whether a tensor is a vector of channels, as a normalization reads it: [C, 1, 1]."""
    dims = () if value.shape is None else value.shape.numpy()
    return len(dims) > 1 and dims[-1] == 1 and sum(size > 1 for size in dims) <= 1


def _is_mask(value: ir.Value) -> bool:
    """Whether a tensor of floats has infinities beside several other numbers."""
    if value.dtype not in TRAINABLE_TYPES or value.const_value is None:
        return False
    array = value.const_value.numpy()
    finite = array[np.abs(array) < _HUGE]
    return finite.size < array.size and finite.size > 0 and bool((finite != finite[0]).any())


def _looks_trainable(value: ir.Value, unnamed: bool, kind: str | None = None) -> bool:
    # kind: What the exporter noted it as.
    if value.dtype not in TRAINABLE_TYPES or value.shape is None:
        return False
    if kind not in (None, "PARAMETER"):
        return False
    if value.shape.rank() == 0 and kind is None and not _is_named_scalar(value):
        return False
    if is_setting(value) or _is_used_as(value, _SETTINGS):
        return False
    if value.const_value is None:
        return False
    array = value.const_value.numpy()
    if array.size == 0:
        return False
    # Finite, and not a mask's value; NaN is both the largest and the smallest.
    plain = (float(part.max()) < _HUGE and float(part.min()) > -_HUGE for part in _parts(array))
    if not all(plain) and not _is_table(value, array):
        return False
    if kind == "PARAMETER":
        return True
    lifted = is_lifted_constant(value)
    one = not lifted and array.size == 1 and _is_no_setting(float(array.item()))
    if str(value.name).startswith(COMPUTED) and (array.size > 1 or one):
        return True  # from a parameter
    if not lifted and not unnamed:
        return True
    fill = all((part == array.flat[0]).all() for part in _parts(array))  # or a factor
    if lifted:
        return not fill or _is_used_as(value, _LAYERS)
    counted = all((part == part.round()).all() for part in _parts(array))  # positions, one-hot
    return not (fill or counted) or _is_used_as(value, {"PRelu": (1,)})


def _is_used_as(value: ir.Value, places: Mapping[str, Sequence[int]]) -> bool:
    """Whether every use is at one of the given inputs of an operator."""
    uses = value.uses()
    return bool(uses) and all(use.idx in places.get(use.node.op_type, ()) for use in uses)


def _is_table(value: ir.Value, array: np.ndarray) -> bool:
    """Whether whole rows shut out, as of an embedding, and not single elements, as of a mask."""
    if array.ndim < 2 or not _is_used_as(value, {"Gather": (0,)}) or np.isnan(array).any():
        return False
    out = np.abs(array.reshape(len(array), -1)) >= _HUGE
    return bool((out.all(axis=1) | ~out.any(axis=1)).all()) and not out.all()


def _is_named_scalar(value: ir.Value) -> bool:
    """Whether a scalar is a parameter of a module, as ``logit_scale`` is in CLIP."""
    name = str(value.name)
    if is_lifted_constant(value) or value.const_value is None or not _PATH.fullmatch(name):
        return False
    if name.rpartition(".")[2].lower().startswith(("const", "eps")):
        return False
    if not _is_no_setting(float(value.const_value.numpy())):
        return False
    uses = value.uses()
    return all(use.node.op_type not in _ARITHMETIC_SETTINGS or use.idx == 0 for use in uses)


def _is_no_setting(number: float) -> bool:
    """Whether a number neither guards a pole nor is a whole factor."""
    return not (0 < abs(number) <= _GUARD or (number > 1 and number.is_integer()))


def _is_of_a_layer(value: ir.Value) -> bool:
    """Whether a constant is the matrix or the bias of a layer that has both: no window has."""
    for node, index in value.uses():
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            pair = list(node.inputs[1:])
        else:
            other = node.inputs[1 - index] if len(node.inputs) == 2 else None
            product = node if node.op_type == "MatMul" else producer(other, "MatMul")
            uses = [] if product is None else list(product.outputs[0].uses())
            if product is None or len(uses) != 1 or uses[0].node.op_type != "Add":
                return False
            pair = [product.inputs[1], uses[0].node.inputs[1 - uses[0].idx]]
        ranks = [
            v.shape.rank() for v in pair if v is not None and v.shape and is_lifted_constant(v)
        ]
        if len(ranks) != 2 or ranks[0] < 2 or ranks[1] != 1:
            return False
    return bool(value.uses())


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array piece by piece, as flat views."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


_FREEZE = "--freeze"


def resolve(
    model: ir.Model,
    train: Sequence[str],
    freeze: Sequence[str],
    read: Sequence[str] = (),
    alike: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Turn patterns into the names to train and the names to freeze."""
    # Without `train` everything is trained that is not frozen, without `freeze` everything is
    # frozen that is not trained. With both, what neither matches stays a constant inside the
    # models.
    alike = look_alikes(model) if alike is None else alike
    names = reached(model, alike, read)
    _check_reached(model, alike, names, train)
    trained = _matched(model, alike, names, train, "--train")
    frozen = _matched(model, alike, names, freeze, _FREEZE)
    both = [name for name in trained if name in frozen]
    if both:
        raise OdtpackError(
            "trained-and-frozen",
            f"{both[0]!r} matches --train {trained[both[0]]!r} and --freeze {frozen[both[0]]!r}",
        )
    if not train:
        trained = {name: "*" for name in names if name not in frozen}
    elif not freeze:
        frozen = {name: "*" for name in names if name not in trained}
    order = [*model.graph.initializers]
    return tuple(n for n in order if n in trained), tuple(n for n in order if n in frozen)


def unreached(model: ir.Model, alike: Sequence[str], read: Sequence[str]) -> list[str]:
    """Those of some initializers that no gradient reaches."""
    names = set(reached(model, alike, read))
    return [name for name in alike if name not in names]


def constants_like_weights(model: ir.Model, alike: Sequence[str]) -> list[str]:
    """Constant nodes at the place of a weight, where initializers are the weights."""
    places = {"MatMul": (0, 1), **_LAYERS}
    found = [
        value
        for value in model.graph.initializers.values()
        if is_lifted_constant(value)
        and value.shape is not None
        and value.shape.rank() > 1
        and _is_used_as(value, places)
        and _looks_trainable(value, unnamed=False)
    ]
    return [str(value.name) for value in found if value.name not in alike]


def _check_reached(
    model: ir.Model, alike: Sequence[str], names: Sequence[str], train: Sequence[str]
) -> None:
    """Nothing that is asked to train may stand still in silence."""
    known, original = set(names), module_names(model.graph)
    still = [name for name in alike if name not in known]
    found = {p: hits for p in train if (hits := matching(p, still, original))}
    if found:
        asked = "; ".join(
            f"--train {pattern!r} asks to train {', '.join(map(repr, hits))}"
            for pattern, hits in found.items()
        )
        raise OdtpackError(
            "not-reached", f"{asked}, but the loss does not depend on it: it would never change"
        )


def nothing_to_train(graph: ir.Graph, *, left: bool = False) -> OdtpackError:
    """The error for a model without a parameter that a gradient reaches."""
    # left: Whether some are left out, as they are frozen.
    integers = any(
        node.op_type == "DequantizeLinear"
        and (codes := node.inputs[0]) is not None
        and codes.const_value is not None
        and len(codes.const_value.shape) > 1
        for node in graph
    )
    if integers and not left:
        return OdtpackError(
            "nothing-to-train",
            "the weights are stored as integers, which have no gradient",
            hint="train an adapter (--adapter lora), or quantize the model with float weights and "
            "fake quantization (AddQDQPairToWeight)",
        )
    if not left:
        what = "the model has no parameter that a gradient reaches"
        return OdtpackError("nothing-to-train", what, hint="odtpack inspect MODEL.onnx shows why")
    return OdtpackError(
        "nothing-to-train",
        "no parameter is left to train",
        hint="odtpack inspect MODEL.onnx lists the parameters",
    )


def _matched(
    model: ir.Model,
    alike: Sequence[str],
    names: Sequence[str],
    patterns: Sequence[str],
    option: str,
) -> dict[str, str]:
    """Names that match, each with its first pattern."""
    found: dict[str, str] = {}
    original = module_names(model.graph)
    for pattern in patterns:
        hits = matching(pattern, names, original)
        if not hits and pattern in model.graph.initializers:
            hits = [pattern]
        if not hits and option == _FREEZE and matching(pattern, alike, original):
            continue  # no gradient reaches them: they stay as they are anyway
        if not hits and not names:
            raise nothing_to_train(model.graph)
        if not hits:
            shown = [original.get(name, name) for name in names]
            listed = f"its parameters are {', '.join(map(repr, shown[:4]))}"
            raise UnknownNameError(
                "unknown-parameter",
                f"{option} {pattern!r} matches no parameter of the model",
                hint=near_names(
                    pattern,
                    shown,
                    f"{listed}{', ...' if names[4:] else ''}; odtpack inspect MODEL.onnx lists "
                    "them all",
                    cutoff=0.75,
                ),
            )
        for name in hits:
            found.setdefault(name, pattern)
    return found


SMALLEST = 1024
"""Elements from which on a weight is stored in fewer bytes."""

_LEAST_PER_SCALE = 8  # elements that share a scale: fewer would not pay for it

# Inputs that are weights: every output sums over many of their elements, or is one of them.
_WEIGHTS = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "GRU": (1, 2),
    "Gather": (0,),
    "Gemm": (0, 1),
    "LSTM": (1, 2),
    "MatMul": (0, 1),
    "RNN": (1, 2),
}
_VIEWS = ("Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as the checkpoint holds it."""

    values: ir.TensorProtocol  # FLOAT16 or INT8, of the weight's shape
    # FLOAT, of the weight's rank, one element for each channel and axes of length one besides; the
    # weight is values * scale. None for FLOAT16.
    scale: ir.TensorProtocol | None = None


def is_weight(value: ir.Value) -> bool:
    """Whether an initializer is a large float32 weight and nothing else."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or value.shape.rank() < 2:
        return False
    size = value.const_value.size if value.const_value is not None else 0
    return size >= SMALLEST and bool(value.uses()) and _only_weighs(value)


def _only_weighs(value: ir.Value) -> bool:
    if value.is_graph_output():
        return False
    for node, index in value.uses():
        if node.domain:
            return False
        if node.op_type in _VIEWS and index == 0:
            if not all(_only_weighs(output) for output in node.outputs):
                return False
        elif index not in _WEIGHTS.get(node.op_type, ()):
            return False
    return True


def store(name: str, tensor: ir.TensorProtocol, storage: Storage) -> Stored | None:
    """Convert a weight, rounding to nearest, ties to even."""
    array = tensor.numpy()
    if storage == "float16":
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.array_equal(np.isfinite(half), np.isfinite(array)):
            largest = float(np.abs(array[np.isfinite(array)]).max())
            raise OdtpackError(
                "value-out-of-range",
                f"frozen parameter {name!r} holds {largest:g}, and float16 ends at 65504",
                hint="store it as int8 (--frozen-dtype int8), or leave --frozen-dtype out",
            )
        return Stored(ir.tensor(half, name=name))
    if not np.isfinite(array).all():
        raise OdtpackError(
            "value-out-of-range",
            f"frozen parameter {name!r} holds infinity or NaN, which int8 cannot store",
            hint="leave --frozen-dtype out",
        )
    axes = [i for i, n in enumerate(array.shape) if n * _LEAST_PER_SCALE <= array.size]
    if not axes:
        return None
    others = (tuple(i for i in range(array.ndim) if i != axis) for axis in axes)
    values, scale = min(
        (to_int8(array, each) for each in others),
        key=lambda q: float(np.sum(np.square(q[0] * q[1] - array), dtype=np.float64)),
    )
    return Stored(ir.tensor(values, name=name), ir.tensor(scale))


SCALE_SUFFIX = ".int8_scale"
"""Ends the name of the scale of a parameter that is stored as int8."""

Role = Literal["trainable", "frozen", "state"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An initializer of the forward model that became an input."""

    name: str  # as in the forward model
    role: Role  # what training does with it
    tensor: ir.TensorProtocol  # its value, in the model's own type
    # type of the input: the model's own, for a trainable parameter the master type, for a frozen
    # weight that of its storage
    dtype: ir.DataType
    # frozen weights in another storage: the value as the checkpoint holds it
    stored: ir.TensorProtocol | None = None
    scale: str | None = None  # name of the parameter that multiplies `stored`
    module: str | None = None  # its name in the exported module, where the exporter made up `name`

    def value(self) -> np.ndarray:
        """The value as the checkpoint holds it."""
        tensor = self.tensor if self.stored is None else self.stored
        return np.asarray(tensor.numpy(), self.dtype.numpy(), order="C")


def choose_parameters(
    graph: ir.Graph, train: Sequence[str], freeze: Sequence[str]
) -> tuple[Parameter, ...]:
    """Return the initializers that become inputs, with their roles, in initializer order."""
    state = {*running_statistics(graph), *carried(graph)}
    for name in sorted(state - set(graph.initializers)):
        raise OdtpackError(
            "statistic-not-stored",
            f"{name!r}, a running statistic of a batch normalization in training mode, is not an "
            "initializer: its updates cannot be stored",
        )
    unknown = [repr(name) for name in (*train, *freeze) if name not in graph.initializers]
    if unknown:
        raise UnknownNameError(
            "unknown-parameter", f"the model has no initializer {', '.join(unknown)}"
        )
    trained, frozen = set(train), set(freeze)
    wanted = trained | frozen | state
    both = sorted(trained & frozen)
    if both:
        raise OdtpackError("trained-and-frozen", f"{both[0]!r} is both trained and frozen")
    _check_trainable(graph, train, state)
    parameters = []
    modules = module_names(graph)
    types = (graph.initializers[name].dtype for name in train)
    master = master_type({dtype for dtype in types if dtype is not None})
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or name not in wanted:
            continue
        role: Role = "trainable" if name in trained else "state" if name in state else "frozen"
        dtype = master if role == "trainable" else tensor.dtype
        parameters.append(Parameter(name, role, tensor, dtype, module=modules.get(name)))
    return tuple(parameters)


def master_type(dtypes: Collection[ir.DataType]) -> ir.DataType:
    """The type in which parameters of some types are trained."""
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT


def _check_trainable(graph: ir.Graph, names: Sequence[str], state: Collection[str]) -> None:
    followed = [name for name in names if name in state]
    if followed:
        raise OdtpackError(
            "statistic-trained",
            "running statistics and carried states have no gradient and cannot be trained: "
            f"{', '.join(map(repr, followed))}",
            hint="leave them out of the parameters to train",
        )
    types = {name: graph.initializers[name].dtype for name in names}
    others = {n: "?" if t is None else t.name for n, t in types.items() if t not in TRAINABLE_TYPES}
    if others:
        allowed = ", ".join(dtype.name for dtype in TRAINABLE_TYPES)
        raise OdtpackError(
            "dtype-not-trainable",
            f"{', '.join(f'{name!r} is of type {kind}' for name, kind in others.items())}; "
            f"parameters to train must be of one of the types {allowed}",
            hint=f"freeze it ({' '.join(f'--freeze {name!r}' for name in others)})",
        )


def check_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Check that gradients are wanted of existing float32 inputs only."""
    inputs = {value.name: value for value in graph.inputs}
    for name in names:
        if name not in inputs:
            raise UnknownNameError(
                "unknown-parameter", f"the model has no initializer or input {name!r}"
            )
        if inputs[name].dtype != ir.DataType.FLOAT:
            raise OdtpackError(
                "dtype-not-trainable",
                f"the gradient of input {name!r} is asked for; only FLOAT inputs have one",
                hint=f"do not ask for the gradient of {name!r}",
            )


def store_frozen(
    graph: ir.Graph, parameters: Sequence[Parameter], wanted: Storage, base: str | None = None
) -> tuple[Parameter, ...]:
    """Store large frozen weights in fewer bytes; a scale follows the weight it belongs to."""
    # base: How matrices are stored inside the models already, if they are.
    found: list[Parameter] = []
    for parameter in parameters:
        stored = None
        if parameter.role == "frozen" and is_weight(graph.initializers[parameter.name]):
            stored = store(parameter.name, parameter.tensor, wanted)
        if stored is None:
            found.append(parameter)
            continue
        scale = None if stored.scale is None else f"{parameter.name}{SCALE_SUFFIX}"
        found.append(
            dataclasses.replace(
                parameter, dtype=stored.values.dtype, stored=stored.values, scale=scale
            )
        )
        if scale is not None and stored.scale is not None:
            found.append(Parameter(scale, "frozen", stored.scale, stored.scale.dtype))
    if all(parameter.stored is None for parameter in found):
        raise OdtpackError(
            "storage-not-used",
            f"the model has no frozen weight to store as {wanted}"
            + (f": --base {base} stores them already" if base else ""),
            hint="leave --frozen-dtype out"
            if base
            else f"freeze some of its float32 weights with {SMALLEST} elements or more "
            "(--freeze GLOB), or leave --frozen-dtype out",
        )
    return tuple(found)


def lift_parameters(graph: ir.Graph, parameters: Sequence[Parameter]) -> None:
    """Make initializers inputs, so that no constant folding can swallow them."""
    inputs: dict[str, ir.Value] = {}
    for parameter in parameters:
        value = graph.initializers.pop(parameter.name, None) or ir.val(parameter.name)
        value.const_value = None
        value.shape = ir.Shape(parameter.tensor.shape.numpy())
        value.type = ir.TensorType(parameter.dtype)
        graph.inputs.append(value)
        inputs[parameter.name] = value
    nodes: list[ir.Node] = []
    for parameter in parameters:
        if parameter.dtype == parameter.tensor.dtype:
            continue
        value = inputs[parameter.name]
        to = {"to": int(parameter.tensor.dtype)}
        if parameter.scale is None:
            made = [_own(parameter, OWN_TYPE_SUFFIX, "Cast", [value], to)]
        else:
            plain = _own(parameter, UNSCALED_SUFFIX, "Cast", [value], to)
            operands = [plain.outputs[0], inputs[parameter.scale]]
            made = [plain, _own(parameter, OWN_TYPE_SUFFIX, "Mul", operands, {})]
        value.replace_all_uses_with(made[-1].outputs[0], replace_graph_outputs=True)
        made[0].replace_input_with(0, value)
        nodes += made
    if nodes and len(graph):
        graph.insert_before(graph[0], nodes)


def _own(
    parameter: Parameter,
    suffix: str,
    op_type: str,
    inputs: Sequence[ir.Value],
    attributes: Mapping[str, int],
) -> ir.Node:
    """A node whose output has the shape of a parameter, in the model's own type."""
    name = f"{parameter.name}{suffix}"
    node = ir.node(op_type, inputs, attributes, name=name)
    output = node.outputs[0]
    output.name, output.shape = name, ir.Shape(parameter.tensor.shape.numpy())
    output.type = ir.TensorType(parameter.tensor.dtype)
    return node


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
