"""What exporters do to the names and values of parameters, and how to undo it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import numpy as np
import onnx.defs
import onnx_ir as ir

# Which parameter of the module a node reads, by what an exporter noted.
#
# Exporters store equal tensors once, so that the name of an initializer does not say which
# parameters it stands for. torch.export lists the parameters of the module in the metadata of
# the graph, each tied one once, and beside each node the call that it was exported from, with
# the parameters that the call takes. Where that is missing, the module around the node and the
# place among its inputs tell, see :func:`odtpack.model.exporters.origin`.

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_TENSOR = re.compile(r"^(\w+): (PARAMETER|BUFFER) target='([^']+)'", re.MULTILINE)
_CALL = "pkg.torch.onnx.fx_node"
_ARGUMENT = re.compile(r"%(\w+)")


def _listed(graph: ir.Graph) -> list[tuple[str, str, str]]:
    """Argument, kind and name of each parameter and buffer that the exporter lists."""
    return _TENSOR.findall(graph.metadata_props.get(_SIGNATURE, ""))


class ExportedParameters:
    """What the exporter of a graph noted of the module's parameters."""

    def __init__(self, graph: ir.Graph) -> None:
        listed = _listed(graph)
        self._targets = {argument: name for argument, _, name in listed}
        self._kinds = {name: kind for _, kind, name in listed}
        self._owners = {name.rpartition(".")[0] for name in self._kinds}
        self._made_up = made_up(graph)
        self._folded = folded(graph)

    def kind(self, name: str) -> str | None:
        """What the exporter listed a name as: PARAMETER or BUFFER."""
        return self._kinds.get(name)

    def read(self, node: ir.Node, index: int) -> str | None:
        """The parameter that a node reads at a place among its inputs; None if unknown."""
        # The same for two places only if they read one parameter of the module.
        value = node.inputs[index]
        if value is None:
            return None
        if node.op_type == "Tile" and index == 0:  # a copy for each sample
            labels = {self.read(*use) for use in node.outputs[0].uses()}
            return labels.pop() if len(labels) == 1 else None
        # An Identity or a Transpose may hand on what an exporter made up.
        made_up = value.name in self._made_up or is_generated(str(value.name))
        computed = self._folded.get(str(value.name))
        if computed is not None and not computed.parameters:
            return None
        if made_up and fixed_role(node, index) is None:
            # A factor, or another constant of the exporter, where it noted no parameter.
            return None if computed is None else self._called(node, index, made_up)
        called = self._called(node, index, made_up)
        if called is not None:
            return called
        if made_up and (owner := beside(node)) is not None:
            return owner
        label = origin(node, index)
        if label is None or (self._kinds and label.rpartition(".")[0] not in self._owners):
            return None  # another name of a module that is listed once
        return label

    def _called(self, node: ir.Node, index: int, made_up: bool) -> str | None:
        """Which of the parameters of the call that a node was exported from."""
        taken = self._taken(node)
        kind = role(node, index)
        if made_up or len(taken) > 1:
            owners = {name.rpartition(".")[0] for name in taken}
            if node.op_type in RECURRENT and len(owners) == 1:
                return f"{owners.pop()}.{kind}"  # computed from several parameters of it
            taken = {each for each in taken if kind is not None and each.endswith(kind)}
        return taken.pop() if len(taken) == 1 else None

    def bias(self, node: ir.Node) -> str | None:
        """The one bias that the call takes that a node was exported from."""
        taken = [name for name in self._taken(node) if name.endswith("bias")]
        return taken[0] if len(taken) == 1 else None

    def _taken(self, node: ir.Node) -> set[str]:
        """Parameters that the call takes that a node was exported from."""
        call = node.metadata_props.get(_CALL, "").partition("](")[2]
        return {self._targets[a] for a in _ARGUMENT.findall(call) if a in self._targets}


# What PyTorch's exporters do to the names of parameters, and how to find them again.
#
# A linear layer on a sequence is exported as MatMul with the transposed weight, a recurrent
# layer with its gates in another order, a normalization inside the convolution before it:
# the exporters compute these tensors and name them ``onnx::MatMul_324`` or ``val_14``. The
# names that they had in the module follow from what is around them.

# Names of what they compute from parameters and constants while they export.
# The end of a name is that of its codes.
_GENERATED = re.compile(r"(val|tmp)(_\d+)*|onnx::\w+_\d+((_DQ)?_Q\d+(G\d+)?|_quantized)?")

COMPUTED = "onnx::"  # starts the names of what the older exporter computes

# How torch.export notes what an initializer was in the module: PARAMETER, BUFFER, ...
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"

_NUMBERED = re.compile(r"_\d+$")

SCOPES = "pkg.torch.onnx.name_scopes"  # how torch.export notes the modules around a node
_AFFINE = {1: "weight", 2: "bias"}
_ROLES = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _AFFINE),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "LayerNormalization"), _AFFINE),
    "BatchNormalization": {**_AFFINE, 3: "running_mean", 4: "running_var"},
    "DequantizeLinear": {0: "weight"},
    "Gemm": {0: "weight", **_AFFINE},
    "MatMul": {0: "weight", 1: "weight"},
    "MatMulInteger": {1: "weight"},
    "MatMulNBits": {1: "weight"},
    "PRelu": {1: "weight"},
}
RECURRENT = ("GRU", "LSTM", "RNN")

# Parts of a layer that is written in several nodes.
_LOOSE = {"Mul": "weight", "Add": "bias"}


def is_generated(name: str) -> bool:
    """Whether a name is one that exporters give to what they compute."""
    return _GENERATED.fullmatch(name) is not None


def made_up(graph: ir.Graph) -> set[str]:
    """Names of initializers that an exporter made up, so that they say nothing of the module."""
    # torch.export notes which initializers are parameters. What it has no note of was computed from
    # them, and is named after the operation (``permute_1``, ``slice_1``, ``zeros_like``), where it
    # did not keep the name of a parameter, which has a dot.
    noted = any(KIND in value.metadata_props for value in graph.initializers.values())
    return {
        name
        for name, value in graph.initializers.items()
        if is_generated(name) or (noted and KIND not in value.metadata_props and "." not in name)
    }


# How the exporter's optimizer notes the names from which it computed an initializer.
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_QUOTED = re.compile("'([^']*)'")  # texts of a list, as Python writes it

# Operations, as torch.export names their results, that leave the elements as they are, but for
# their order and a part of them; zeros tell a recurrent layer its batch.
_LAYOUTS = {
    "_unsafe_view", "alias", "cat", "chunk", "clone", "contiguous", "flatten", "getitem", "numpy_t",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "zeros",
}  # fmt: skip
_STOPPED = re.compile(r"detach|\w+_like")  # no gradient passes these


@dataclasses.dataclass(frozen=True)
class Folded:
    """What an initializer was before the exporter computed it."""

    parameters: tuple[str, ...]  # of the module, from which it follows; none for a constant
    by: tuple[str, ...]  # the operations that change more than the layout


def folded(graph: ir.Graph) -> dict[str, Folded]:
    """Initializers that the exporter computed, as far as it noted from what."""
    listed = {name: kind for _, kind, name in _listed(graph)}
    found = {}
    for name, value in graph.initializers.items():
        note = value.metadata_props.get(_FOLDED)
        sources = [] if note is None else _QUOTED.findall(note)
        made = [each for each in sources if each not in listed]
        if note is None or not listed or any("." in each for each in made):
            continue  # a name with a dot that is not listed may be that of a parameter
        stems = {_NUMBERED.sub("", each) for each in (*made, name) if not is_generated(each)}
        by = tuple(sorted(stems - _LAYOUTS))
        stopped = by and all(map(_STOPPED.fullmatch, by))
        parameters = [s for s in sources if listed.get(s) == "PARAMETER" and not stopped]
        found[name] = Folded(tuple(parameters), by)
    return found


def note_folded(value: ir.Value, parameter: str) -> None:
    """Note that an initializer was computed from one parameter, where another was noted."""
    if _FOLDED in value.metadata_props:
        value.metadata_props[_FOLDED] = str([parameter])


def kinds(graph: ir.Graph) -> dict[str, str]:
    """What initializers were in the module, PARAMETER or another, as far as that is noted."""
    noted = {n: v.metadata_props.get(KIND, "") for n, v in graph.initializers.items()}
    computed = {n: "PARAMETER" if f.parameters else "CONSTANT" for n, f in folded(graph).items()}
    return computed | {name: kind for name, kind in noted.items() if kind}


def module_names(graph: ir.Graph) -> dict[str, str]:
    """Names in the module, such as ``blocks.0.qkv.weight``, by those that an exporter made up."""
    # A name that would mean two initializers means none.
    found: dict[str, str] = {}
    for name in sorted(made_up(graph)):
        uses = graph.initializers[name].uses()
        guesses = {g for node, index in uses if (g := beside(node) or _within(node, index))}
        if len(guesses) == 1:
            found[name] = guesses.pop()
    for name, computed in folded(graph).items():
        if not computed.parameters:
            found.pop(name, None)
        elif len(computed.parameters) == 1 and not computed.by:
            found.setdefault(name, computed.parameters[0])
    if graph.metadata_props.get(ARCHITECTURE) in _DENSE:  # as transformers' module calls them
        own = {name: _OUTPUT.sub(r"\1.self_attn.dense.", name) for name in graph.initializers}
        found |= {name: new for name, new in own.items() if new != name}
    counts = Counter([*found.values(), *graph.initializers])
    return {name: guess for name, guess in found.items() if counts[guess] == 1}


ARCHITECTURE = "odtpack.architecture"
"""Metadata of a graph: what a file beside the model says that it is (below)."""

HEADS = "odtpack.heads"  # the same: how many heads it has, of queries and of keys
_DENSE = {"phi"}  # Architectures whose attention ends in a layer "dense"
_OUTPUT = re.compile(r"^(model\.layers\.\d+)\.attn\.o_proj\.")


def known_names(graph: ir.Graph) -> dict[str, tuple[str, ...]]:
    """What patterns may call initializers that an exporter named: the module's names, or alike."""
    # Several may be called alike, as the weights of stacked recurrent layers, ``encoder.rnn.W``.
    modules, computed, moved = module_names(graph), folded(graph), _moved(graph)
    found: dict[str, tuple[str, ...]] = {name: (module,) for name, module in modules.items()}
    for name in sorted(made_up(graph)):
        sources = computed[name].parameters if name in computed else ()
        # What is made of several is called by none of them: a pattern would take the others, too.
        sources = sources if len(sources) == 1 else ()
        uses = graph.initializers[name].uses()
        kinds = [role(*use) for use in uses]
        near = [] if sources else [_spread(_around(uses), moved)]
        places = {f"{path}.{each}" for path in near if path for each in (*kinds[:1], name) if each}
        places -= {*graph.initializers}
        found[name] = (*dict.fromkeys((*found.get(name, ()), *sources, *sorted(places))),)
    return found


def matching(pattern: str, names: Iterable[str], known: Mapping[str, Sequence[str]]) -> list[str]:
    """The names that a pattern matches, as they are or by :func:`known_names`."""
    return [n for n in names if any(fnmatchcase(s, pattern) for s in (n, *known.get(n, ())))]


def origin(node: ir.Node, index: int) -> str | None:
    """Which tensor of which module a node reads; one name for all calls of a module."""
    # The older exporter numbers what would have the same name, be it another call of the same
    # module or another module, so that its numbers are left out.
    kind, path = role(node, index), _path(node)
    return f"{path}.{kind}" if path and kind else None


def place(node: ir.Node) -> str | None:
    """Which node of which module a node is; one name for all calls of a module."""
    path = _path(node)
    return f"{path}/{(node.name or '').rpartition('/')[2]}" if path else None


def module_of(node: ir.Node) -> str | None:
    """The path of the module that a node was exported from; None if that is not known."""
    known = SCOPES in node.metadata_props or (node.name or "").startswith("/")
    return _path(node) if known else None


def homes(value: ir.Value) -> dict[str, list[tuple[ir.Node, int]]]:
    """The modules that a tied matrix is the weight of, and where each reads it.

    There are none if no embedding and product of two modules share the matrix.
    """
    found: dict[str, list[tuple[ir.Node, int]]] = {}
    kinds = set()
    for use in value.uses():
        for node, index in _readers(use.node, use.idx):
            if (node.op_type, index) in (("Gather", 0), ("Gemm", 1), ("MatMul", 1)):
                path = _join(_scopes(node))
                path = path if f"{path}.weight" == value.name else _path(node)
                found.setdefault(path, []).append((use.node, use.idx))
                kinds.add(node.op_type == "Gather")
    names = [*value.graph.initializers] if value.graph is not None and len(found) > 1 else []
    for path in [path for path in found if path]:
        own = (value.name, f"{path}.weight", f"{path}.bias")
        if any(name.startswith(f"{path}.") and name not in own for name in names):
            found.setdefault("", []).extend(found.pop(path))  # it reads the weight of another
    return found if len(kinds) == 2 and len(found) > 1 else {}


def _readers(node: ir.Node, index: int) -> Iterator[tuple[ir.Node, int]]:
    """What reads a matrix that a node may transpose, cast or dequantize."""
    if index or node.op_type not in ("Cast", "DequantizeLinear", "Identity", "Transpose"):
        yield node, index
        return
    for use in node.outputs[0].uses():
        yield from _readers(use.node, use.idx)


def _path(node: ir.Node) -> str:
    scopes = _scopes(node)
    if SCOPES not in node.metadata_props:
        scopes = [_NUMBERED.sub("", scope) for scope in scopes]
    return _join(scopes)


_Path = tuple[str, ...]


def _around(uses: Collection[tuple[ir.Node, int]]) -> _Path:
    """The innermost module around all places that read a value, name by name from the root."""
    paths = {_join(_scopes(node)) for node, _ in uses}
    paths = paths if len(paths) == 1 else {_path(node) for node, _ in uses}
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return tuple(names[0] for names in itertools.takewhile(lambda n: len({*n}) == 1, levels))


def _moved(graph: ir.Graph) -> dict[_Path, _Path]:
    """The modules whose names nodes have in part, as of a container that is not called itself."""
    # encoder = nn.ModuleDict(...): /e/Gemm reads encoder.e.weight.
    found: dict[_Path, _Path] = {}
    for name, value in graph.initializers.items():
        owner = name.split(".")[:-1]
        for node, _ in value.uses() if owner else ():
            path, ends = tuple(_join(_scopes(node)).split(".")), [len(owner) + 1]
            for scope in reversed(path):
                before = range(ends[-1] - 1, 0, -1)
                ends.append(next((end for end in before if owner[end - 1] == scope), 0))
            if ends[-1]:
                pairs = zip(range(len(path), 0, -1), ends[1:], strict=True)
                found |= {path[:n]: tuple(owner[:end]) for n, end in pairs if path[:n] not in found}
    return found


def _spread(path: _Path, moved: Mapping[_Path, _Path]) -> str:
    """A path with the names of the containers that it lacks, as far as others show them."""
    known = next((n for n in range(len(path), 0, -1) if path[:n] in moved), 0)
    return ".".join((*moved.get(path[:known], ()), *path[known:]))


def unplaced(graph: ir.Graph) -> dict[str, str]:
    """Initializers of which no name says whose they are, and what is known of the path."""
    moved, computed = _moved(graph), folded(graph)
    if all(path == own for path, own in moved.items()):
        return {}
    near = {name: _around(graph.initializers[name].uses()) for name in sorted(made_up(graph))}
    return {
        name: ".".join(path)
        for name, path in near.items()
        if any(path) and path[:1] not in moved and name not in computed
    }


def beside(node: ir.Node) -> str | None:
    """``layer.weight`` where ``layer.bias`` is added to the product."""
    ways = {"DequantizeLinear": ["MatMul"], "MatMulInteger": ["Cast", "Mul"]}
    if node.op_type not in ("MatMul", "MatMulNBits", *ways):
        return None
    for following in ways.get(node.op_type, ()):
        readers = [*node.outputs[0].consumers()]
        if len(readers) != 1 or readers[0].op_type != following:
            return None
        (node,) = readers
    # Where data are rounded, the rounded product and its twin have one result.
    readers = [each for each in node.outputs[0].consumers() if each.op_type == "StraightThrough"]
    node = readers[0] if readers else node
    for add in node.outputs[0].consumers():
        for other in add.inputs if add.op_type == "Add" else ():
            name = "" if other is None or not other.is_initializer() else other.name or ""
            if name.endswith("bias"):
                return name.removesuffix("bias") + "weight"
    return None


def _within(node: ir.Node, index: int) -> str | None:
    """The module that a node was exported from, and which of its tensors this is."""
    kind = fixed_role(node, index)
    path = _join(_scopes(node)) if kind else ""
    return f"{path}.{kind}" if path else None


def role(node: ir.Node, index: int) -> str | None:
    """What a tensor is to its module, by the operator and the place among its inputs."""
    return fixed_role(node, index) or _LOOSE.get(node.op_type)


def fixed_role(node: ir.Node, index: int) -> str | None:
    """The same, where the operator alone decides."""
    if node.op_type in RECURRENT:
        return onnx.defs.get_schema(node.op_type).inputs[index].name
    return _ROLES.get(node.op_type, {}).get(index)


def _scopes(node: ir.Node) -> list[str]:
    """Modules around a node, from the outside in, each named from the root or its parent."""
    noted = node.metadata_props.get(SCOPES)
    if noted is None:
        name = node.name or ""
        return name.split("/")[1:-1] if name.startswith("/") else []
    scopes: list[str] = _QUOTED.findall(noted)
    return scopes[-2:-1]  # the last is the operator, the one before it has the whole path


def _join(scopes: list[str]) -> str:
    """A child of a container has the container's name in its own: blocks, blocks.0."""
    inner = [*scopes[1:], ""]
    return ".".join(
        scope
        for scope, below in zip(scopes, inner, strict=False)
        if scope and not below.startswith(f"{scope}.")
    )


# Puts back the biases that PyTorch's exporter left out because they were zero.
#
# Of a fresh model it drops the bias of a product or a convolution whose values are all zero,
# as those of an attention's output projection are. The module trains it all the same. The call
# that torch.export noted beside the node still has it:
#
#     y = Gemm(x, weight)   ->   y = Gemm(x, weight, out_proj.bias)

_BIAS = 2
_OPERATORS = ("Conv", "ConvTranspose", "Gemm")


def restore(graph: ir.Graph) -> None:
    """Give nodes the biases that their calls had."""
    # graph: Forward graph; changed in place. New initializers have the module's names.
    parameters = ExportedParameters(graph)
    for node in graph:
        if node.op_type not in _OPERATORS or any(node.inputs[_BIAS:]):
            continue
        name, size = parameters.bias(node), _channels(node)
        weight = node.inputs[1]
        if name is None or size is None or weight is None or weight.dtype is None:
            continue
        if name not in graph.initializers:
            tensor = ir.tensor(np.zeros(size, weight.dtype.numpy()), name=name)
            value = ir.val(name, dtype=weight.dtype, shape=[size], const_value=tensor)
            value.metadata_props[KIND] = "PARAMETER"
            graph.register_initializer(value)
        node.resize_inputs(_BIAS + 1)
        node.replace_input_with(_BIAS, graph.initializers[name])


def _channels(node: ir.Node) -> int | None:
    """Number of outputs of a layer, by its weight."""
    weight = node.inputs[1]
    tensor = None if weight is None else weight.const_value
    if tensor is None:
        return None
    shape = tensor.shape.numpy()
    if node.op_type == "Gemm":
        return shape[0] if node.attributes.get_int("transB", 0) else shape[1]
    if node.op_type == "ConvTranspose":
        return shape[1] * node.attributes.get_int("group", 1)
    return shape[0]


# How the layers of a decoder are called in transformers, where onnxruntime-genai calls them else.
#
# The builder gives the layers of every architecture Llama's names, joins the queries, keys and
# values of any, and parts what some modules join. What the model is says a file beside it.

_LARGEST: Final = 1 << 20  # bytes of a file that are read
_JOINED: Final = {"phi3", "phi3v", "phi3_v", "phi4mm"}
_JOINT = re.compile(r"(model\.layers\.\d+\.self_attn\.)qkv_proj")
_PARTS = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkv]|mlp\.(gate|up))_proj")


def noted_architecture(path: Path) -> dict[str, str]:
    """Metadata of the graph in a file: what another file beside it says that it is."""
    for name, part in (("genai_config.json", "type"), ("config.json", "model_type")):
        try:
            with (path.parent / name).open("rb") as stream:
                content = json.loads(stream.read(_LARGEST))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and part == "type":
            content = content.get("model")
        if not isinstance(content, dict) or not isinstance(kind := content.get(part), str):
            continue
        inner = content.get("decoder", content)
        sizes = inner if isinstance(inner, dict) else {}
        heads = sizes.get("num_attention_heads")
        found = (heads, sizes.get("num_key_value_heads", heads))
        known = all(type(count) is int and 0 < count < 1 << 16 for count in found)
        return {ARCHITECTURE: kind} | ({HEADS: f"{found[0]} {found[1]}"} if known else {})
    return {}


def joined(graph: ir.Graph, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Layers of transformers' module that are several in the file, and those, in order."""
    known = set(names)
    if graph.metadata_props.get(ARCHITECTURE) not in _JOINED:
        return {}
    found = {}
    for name in sorted(known):
        for first, all_of in (("q", ("q", "k", "v")), ("gate", ("gate", "up"))):
            stem = name.removesuffix(f".{first}_proj")
            parts = tuple(f"{stem}.{each}_proj" for each in all_of)
            if _PARTS.fullmatch(name) and name == parts[0] and known.issuperset(parts):
                found[f"{stem}.{'_'.join(all_of) if first == 'gate' else 'qkv'}_proj"] = parts
    return found


def parted(graph: ir.Graph, name: str, rows: int) -> dict[str, tuple[int, int]]:
    """Layers of the module that are one in the file, and which of its rows, from and to."""
    kind, match = graph.metadata_props.get(ARCHITECTURE), _JOINT.fullmatch(name)
    if kind is None or kind in _JOINED or match is None or HEADS not in graph.metadata_props:
        return {}
    heads, keys = map(int, graph.metadata_props[HEADS].split())
    size, rest = divmod(rows, heads + 2 * keys)
    if rest or not size:
        return {}
    ends = [0, heads * size, (heads + keys) * size, rows]
    return {f"{match[1]}{n}_proj": (ends[i], ends[i + 1]) for i, n in enumerate("qkv")}


def absent(graph: ir.Graph, layers: Iterable[str]) -> tuple[str, ...]:
    """Those of some layers that transformers' module does not have, as far as that is known."""
    kind = graph.metadata_props.get(ARCHITECTURE)
    if kind is None:
        return ()
    pattern = _PARTS if kind in _JOINED else _JOINT
    return tuple(name for name in layers if pattern.fullmatch(name))
