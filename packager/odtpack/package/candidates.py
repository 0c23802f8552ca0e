"""Which initializers of a model are parameters, and which of them train."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import influences
from odtpack.errors import OdtpackError, UnknownNameError, near_names, quoted, some
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
    known_names,
    made_up,
    matching,
    module_names,
    unplaced,
)
from odtpack.names_file import Named, read_names
from odtpack.optimizers import Optimizer
from odtpack.package.buffers import by_looks
from odtpack.spec import BuildSpec

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


def _passed_over(graph: ir.Graph, alike: Collection[str]) -> list[str]:
    """Tensors of modules that are not parameters, judged by their looks alone."""
    known = {*alike, *made_up(graph), *running_statistics(graph), *carried(graph), *kinds(graph)}
    return [
        name
        for name, value in graph.initializers.items()
        if name not in known and value.dtype in TRAINABLE_TYPES and _PATH.fullmatch(name)
        and "." in name and not is_lifted_constant(value)
    ]  # fmt: skip


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
    constants = [value for value in graph.initializers.values() if is_lifted_constant(value)]
    buffers, doubtful = by_looks(graph, open_, unnamed, constants)
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
            what = "--train and --like both say what trains"
            hint = "leave one of them out; --freeze may stand beside --like"
            raise OdtpackError("option-not-used", what, hint=hint)
        said = said_by(model, Path(spec.like), alike, own, bool(spec.untie))
        alike, remarks = said.parameters, [*said.remarks]
        if not wanted:
            freeze = (*freeze, *map(glob.escape, said.frozen))
    trained, frozen = resolve(model, wanted, freeze, read, alike)
    patterns = (*spec.train, *spec.freeze, *(group[0] for group in spec.groups))
    lost = unplaced(model.graph) if patterns else {}
    if lost:
        known = known_names(model.graph)
        lost = {
            name: path
            for name, path in lost.items()
            if name in trained and not any(matching(p, [name], known) for p in patterns)
        }
    if lost:
        option = f"--freeze {quoted(f'{next(iter(lost.values()))}.*')}"
        remarks.append(
            f"no pattern matches {some([f'{name} of {path}' for name, path in lost.items()])}, and "
            f"the file does not say which module that is in: name it as the file does ({option})"
        )
    if spec.like is None and (copies := _equal_matrices(model.graph, trained)):
        remarks.append(
            f"equal, and train apart: {some(copies)}; if the module ties them, say so with --like "
            "names.txt, which odtpack.names(module, 'names.txt') writes"
        )
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
            option = " ".join(f"--freeze {quoted(name)}" for name in [*doubts][:4])
            remarks.append(f"trained, and may be buffers: {shown}; if so, {option}")
    left = _passed_over(model.graph, (*alike, *trained, *frozen)) if spec.train else []
    if left := [name for name in left if any(matching(p, [name], {}) for p in spec.train)]:
        shown = some([f"{name} ({buffers.get(name, 'a setting')})" for name in left])
        remarks.append(
            f"--train does not train what looks like a buffer: {shown}; to train one, give its "
            f"exact name, as in --train {quoted(left[0])}"
        )
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


def _equal_matrices(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """Pairs of equal matrices that the older exporter stored twice, not those of a stack."""
    seen: defaultdict[tuple[object, ...], list[ir.Value]] = defaultdict(list)
    for value in (graph.initializers[name] for name in names if name.startswith(COMPUTED)):
        array = np.zeros(0) if value.const_value is None else value.const_value.numpy()
        if array.ndim == 2 and np.ptp(array) > 0:
            seen[array.shape, array[0].tobytes()].append(value)
    pairs = [p for values in seen.values() for p in itertools.pairwise(values) if _equal(*p)]
    called = known_names(graph) if pairs else {}
    found = [[(called.get(str(v.name)) or [str(v.name)])[0] for v in pair] for pair in pairs]
    return [
        f"{one} and {other}"
        for one, other in found
        if re.sub(r"\d+", "", one) != re.sub(r"\d+", "", other)  # layers begin as copies of one
    ]


def _equal(one: ir.Value, other: ir.Value) -> bool:
    """Whether two initializers hold the same numbers."""
    if one.const_value is None or other.const_value is None:
        return False
    return np.array_equal(one.const_value.numpy(), other.const_value.numpy())


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
    names, known = reached(model, alike, read), known_names(model.graph)
    moving = {*names}
    still = [name for name in alike if name not in moving]
    # Nothing that is asked to train may stand still in silence.
    if found := {pattern: hits for pattern in train if (hits := matching(pattern, still, known))}:
        asked = "; ".join(
            f"--train {pattern!r} asks to train {', '.join(map(repr, hits))}"
            for pattern, hits in found.items()
        )
        what = f"{asked}, but the loss does not depend on it: it would never change"
        raise OdtpackError("not-reached", what)
    trained = _matched(model, still, names, train, "--train", known)
    frozen = _matched(model, still, names, freeze, "--freeze", known)
    both = [name for name in trained if name in frozen]
    if both:
        what = f"{both[0]!r} matches --train {trained[both[0]]!r} and --freeze {frozen[both[0]]!r}"
        raise OdtpackError("trained-and-frozen", what)
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


def nothing_to_train(graph: ir.Graph, *, left: bool = False) -> OdtpackError:
    """The error for a model without a parameter that a gradient reaches."""
    # left: Whether some are left out, as they are frozen.
    what = "the model has no parameter that a gradient reaches"
    hint = "odtpack inspect MODEL.onnx shows why"
    stored = (n.inputs[0] for n in graph if n.op_type == "DequantizeLinear" and n.inputs[0])
    if left:
        what = "no parameter is left to train"
        hint = "odtpack inspect MODEL.onnx lists the parameters"
    elif any(v.const_value is not None and len(v.const_value.shape) > 1 for v in stored):
        what = "the weights are stored as integers, which have no gradient"
        hint = "train an adapter (--adapter lora), or quantize the model with float weights and "
        hint += "fake quantization (AddQDQPairToWeight)"
    return OdtpackError("nothing-to-train", what, hint=hint)


def _matched(
    model: ir.Model,
    still: Sequence[str],
    names: Sequence[str],
    patterns: Sequence[str],
    option: str,
    known: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """Names that match, each with its first pattern; ``still`` are what no gradient reaches."""
    found: dict[str, str] = {}
    for pattern in patterns:
        hits = matching(pattern, names, known)
        if not hits and pattern in model.graph.initializers:
            hits = [pattern]
        if not hits and matching(pattern, still, known):
            continue  # they stay as they are anyway
        if not hits and not names:
            raise nothing_to_train(model.graph)
        if not hits:
            shown = [*dict.fromkeys(next(iter(known.get(n, ())), n) for n in names)]
            listed = f"its parameters are {', '.join(map(repr, shown[:4]))}"
            left = matching(pattern, _passed_over(model.graph, (*names, *still)), {})
            if left and option == "--freeze":
                continue  # they do not train anyway
            raise UnknownNameError(
                "unknown-parameter",
                f"{option} {pattern!r} matches no parameter of the model"
                + (f", only what looks like a buffer: {some(left)}" if left else ""),
                hint=f"name it exactly: {option} {quoted(left[0])}"
                if left
                else near_names(
                    pattern,
                    shown,
                    f"{listed}{', ...' if shown[4:] else ''}; odtpack inspect MODEL.onnx lists "
                    "them all",
                    cutoff=0.75,
                ),
            )
        for name in hits:
            found.setdefault(name, pattern)
    return found


def frozen_rows(
    model: ir.Model, spec: BuildSpec, trained: Sequence[str], optimizer: Optimizer
) -> dict[str, tuple[int, ...]]:
    """Which rows of which parameters stay as they are."""
    found: dict[str, tuple[int, ...]] = {}
    known = known_names(model.graph) if spec.freeze_rows else {}
    for text in spec.freeze_rows:
        pattern, _, number = text.rpartition("=")
        names = matching(pattern, trained, known)
        if pattern and not names:
            raise UnknownNameError(
                "unknown-parameter",
                f"--freeze-row {text!r} matches no parameter that trains",
                hint=near_names(pattern, trained, "odtpack inspect MODEL.onnx lists them"),
            )
        for name in names or [""]:
            tensor = model.graph.initializers[name].const_value if name else None
            rows = tensor.shape.numpy()[:1] if tensor is not None else ()
            decay = next((g[2] for g in spec.groups if matching(g[0], [name], known)), None)
            problem, hint = None, "write for example: --freeze-row embedding.weight=0"
            if tensor is None or not rows or not number.isdecimal():
                problem = f"--freeze-row {text!r} is not NAME=ROW"
            elif len(names) > 1 and not any(each in pattern for each in "*?["):
                problem = f"--freeze-row {text!r} names {some(names)}"
                hint = "name one as the file does, or all of them with a pattern"
            elif int(number) >= rows[0]:
                problem = f"--freeze-row {text!r}: {name!r} has {rows[0]} rows, 0 to {rows[0] - 1}"
            elif spec.privacy_clip is not None:
                problem = "the noise of private training changes every row"
                hint = "leave --freeze-row or --privacy-clip out"
            elif np.any(tensor.numpy()[int(number)]) and (
                optimizer.weight_decay if decay is None else decay
            ):
                problem = f"row {number} of {name!r} is not zero, and weight decay would change it"
                hint = f"put it into a group without decay: --group {quoted(f'{name}:decay=0')}"
            if problem is not None:
                raise OdtpackError("bad-row", problem, hint=hint)
            found[name] = (*found.get(name, ()), int(number))
    return found


def zero_rows(
    model: ir.Model, trained: Sequence[str], frozen: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """What to know of rows of embeddings: those that are exactly zero, and those of tied ones."""
    for name in trained:
        value = model.graph.initializers[name]
        tensor = value.const_value
        looked_up = {use.node.op_type == "Gather" and use.idx == 0 for use in value.uses()}
        if name in frozen and len(looked_up) == 2:
            yield (
                f"row {frozen[name][0]} of {name} stays as it is for all that read it. PyTorch's "
                "padding_idx stops only the gradient of the look-up: there the row of a tied "
                "embedding trains through the other layer"
            )
        if tensor is None or len(tensor.shape) != 2 or looked_up != {True}:
            continue
        array = tensor.numpy()
        rows = [int(row) for row in np.flatnonzero(array[:, 0] == 0) if not array[row].any()]
        rows = [row for row in rows if row not in frozen.get(name, ())]
        if rows and len(rows) < len(array):
            yield (
                f"row {rows[0]} of {name} is exactly zero, as padding_idx leaves it, and trains; "
                f"--freeze-row {quoted(f'{name}={rows[0]}')} keeps it"
            )


# What a list of names, as ``--like`` gives it, says of the initializers of a model.

_PARAMETRIZED: Final = re.compile(r"\.parametrizations\.|\bweight_(g|v|orig)$")


@dataclasses.dataclass(frozen=True)
class Said:
    """What a list of names says of the initializers of a model."""

    parameters: tuple[str, ...]  # those that are parameters of the module
    frozen: tuple[str, ...]  # those of them that do not train
    remarks: tuple[str, ...]  # what could not be matched


def said_by(
    model: ir.Model, path: Path, alike: Sequence[str], own: Collection[str], untied: bool
) -> Said:
    """Match a list of names with the initializers of a model, of which ``own`` are the build's."""
    # By the name, which an exporter may have changed, or by that of what it was computed from; then
    # by the shape, where one tensor of the list and one initializer are left that have it. Tied
    # ones become one again, unless some are to be untied.
    graph = model.graph
    listed = {each.name: each for each in read_names(path)}
    original, computed = module_names(graph), folded(graph)
    guesses = {name: guess for name, guess in known_names(graph).items() if name in alike}
    alone = Counter(guess for several in guesses.values() for guess in several)
    found: dict[str, Named] = {}
    matched, tied = set[str](), dict[str, str]()
    for name, value in [*graph.initializers.items()]:
        called = guesses.get(name, ())
        names = (name, original.get(name, name), *(each for each in called if alone[each] == 1))
        sources = computed[name].parameters if name in computed else ()
        itself = [listed[n] for n in names if n in listed and _fits(graph, name, listed[n])][:1]
        known = (
            [listed[source] for source in sources if source in listed]
            or _of_a_layer(called, listed.values())
            or itself
        )
        if known:
            found[name] = max(known, key=lambda source: source.trained)
            matched.update(source.tensor for source in known)
        first = tied.setdefault(itself[0].tensor, name) if known == itself != [] else name
        if first == name or untied or value.is_graph_output():
            continue
        if _equal(graph.initializers[first], value):
            value.replace_all_uses_with(graph.initializers[first])
            del graph.initializers[name]
    lacking = (e for e in listed.values() if e.parameter and e.tensor not in matched)
    rest = {each.tensor: each for each in lacking}.values()
    open_ = [name for name in alike if name not in found and name not in own]
    unnamed = made_up(graph).intersection(open_)
    for key in (_key, _bare_key):
        wanted = [(key(e.shape), e) for e in rest if e.tensor not in matched]
        left = {n: key(graph.initializers[n].shape.numpy()) for n in open_ if n not in found}  # type: ignore[union-attr] # alike have shapes
        counts, shapes = Counter(left.values()), Counter(shape for shape, _ in wanted)
        for shape, each in wanted:
            if _PARAMETRIZED.search(each.name):
                continue  # what is left was computed from it, and from others
            fitting = [name for name in unnamed if left.get(name) == shape]
            if shapes[shape] == counts[shape] == len(fitting) == 1:
                found[fitting[0]] = each
                matched.add(each.tensor)
    order = [name for name in graph.initializers if name in found or name in own]
    parameters = tuple(n for n in order if n in own or found[n].parameter)
    lost = [e.name for e in rest if e.trained and e.tensor not in matched]
    unknown = [name for name in open_ if name not in found]
    remarks = []
    if lost:
        remarks.append(
            f"{path.name} trains {some(lost)}, of which the model has no tensor: not trained"
        )
    if unknown:
        remarks.append(
            f"{some(unknown)}: not in {path.name} under a name or shape of its own, not trained; "
            "export with the module's names, or --train instead of --like"
        )
    held = (n for n in parameters if n not in own and not found[n].trained)
    return Said(parameters, tuple(held), tuple(remarks))


# What the older exporter packs of a recurrent module, by the inputs of the operator.
_PACKED = {"W": "weight_ih_", "R": "weight_hh_", "B": "bias_"}


def _of_a_layer(called: Sequence[str], listed: Collection[Named]) -> list[Named]:
    """The parameters of a recurrent module that a tensor holds; none if only some train."""
    for path, _, kind in (name.rpartition(".") for name in called):
        known = [e for e in listed if e.name.startswith(f"{path}.{_PACKED.get(kind, ' ')}")]
        if len({e.trained for e in known}) == 1:
            return known
    return []


def _fits(graph: ir.Graph, name: str, each: Named) -> bool:
    shape = graph.initializers[name].shape
    return shape is not None and _bare_key(shape.numpy()) == _bare_key(each.shape)


def _key(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a shape and of that of the transposed tensor."""
    return tuple(sorted(shape)) if len(shape) == 2 else tuple(shape)


def _bare_key(shape: Sequence[int]) -> tuple[int, ...]:
    """The same, whatever axes of length one stand between the others."""
    bare = tuple(size for size in shape if size != 1)
    return min(bare, bare[::-1])
