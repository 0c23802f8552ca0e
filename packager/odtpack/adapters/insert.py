"""Puts an adapter into a forward model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.adapters import low_rank
from odtpack.adapters.layers import find_layers, without_adapter
from odtpack.adapters.low_rank import Table, find_tables, take_place
from odtpack.adapters.modules import Module, by_layer, modules_of, together
from odtpack.errors import OdtpackError, UnknownNameError, some
from odtpack.graph.graphs import Ops, dims_of, maker, operand, redirect
from odtpack.graph.inference import infer_shapes
from odtpack.model.shared_tensors import weight_array
from odtpack.spec import AdapterSpec
from odtpack_runtime.package.adapter import PREFIX


@dataclasses.dataclass(frozen=True)
class Inserted:
    """A model with its adapter."""

    spec: AdapterSpec
    model: ir.Model
    parameters: tuple[str, ...]  # names of the initializers that are the adapter's
    layers: tuple[str, ...]  # names of the layers that it is on
    feedforward: tuple[str, ...]  # of those, the ones whose input is scaled


def insert_adapter(model: ir.Model, spec: AdapterSpec) -> Inserted:
    """Put an adapter beside layers of a model, which is changed in place."""
    # Its parameters become initializers, in the type of the layer's data, under the names that
    # they have in a file of PEFT: ``base_model.model.<layer>.lora_A.weight``. ``bitfit`` adds none:
    # the biases of the layers are its parameters. ``prompt`` adds one, before the tokens.
    if spec.kind == "prompt":
        name, embedding = insert_prompt(model, spec)
        return Inserted(spec, model, (name,), (embedding,), ())
    tables = low_rank.find_tables(model.graph) if spec.kind == "lora" else []
    layers, tables = _chosen(model.graph, spec, tables)
    names = (*(layer.name for layer in layers), *(table.name for table in tables))
    if spec.kind == "bitfit":
        uses = [use for layer in layers for share in layer.shares for use in share.layer.uses]
        biases = [use.bias for use in uses if use.bias is not None]
        if not biases:
            raise OdtpackError(
                "nothing-to-train",
                f"bitfit trains biases, and none of the {len(layers)} layers has one",
                hint="choose another adapter (--adapter lora)",
            )
        found = dict.fromkeys(str(bias.name) for bias in biases)
        return Inserted(spec, model, tuple(found), names, ())
    random = np.random.default_rng(spec.seed)
    op = Ops(model.graph, "adapter/")
    inserted = [(layer, _parameters(model.graph, layer, spec, random)) for layer in layers]
    parameters = [str(value.name) for _, given in inserted for value in given.values()]
    for own, pieces in by_layer(inserted):
        for use in own.uses:
            if spec.low_rank:
                with op.after(maker(use.result)):
                    low_rank.apply(op, own, use, together(op, own, pieces), spec)
            else:
                ((_, given),) = pieces
                low_rank.apply_ia3(op, own, use, given, spec)
    for table in tables:
        arrays = {
            low_rank.TABLE_A: np.zeros((spec.rank, table.rows)),
            low_rank.TABLE_B: random.standard_normal((table.width, spec.rank)),
        }
        dtype = table.uses[0][1].dtype or ir.DataType.FLOAT
        given = _register(model.graph, table.name, arrays, dtype)
        parameters += [str(value.name) for value in given.values()]
        low_rank.apply_to_table(op, table, given, spec)
    feedforward = tuple(layer.name for layer in layers if layer.matches(spec.feedforward))
    return Inserted(spec, infer_shapes(model, new_only=True), tuple(parameters), names, feedforward)


def _chosen(
    graph: ir.Graph, spec: AdapterSpec, tables: Sequence[low_rank.Table]
) -> tuple[list[Module], list[low_rank.Table]]:
    """The layers, and the tables of embeddings that a pattern names that matches no layer."""
    # A product with a table, which a language model ends in, is no layer beside the table: it has
    # the same name.
    sources = {id(table.source) for table in tables}
    found_layers = [layer for layer in find_layers(graph) if id(layer.source) not in sources]
    layers = modules_of(graph, found_layers, split=spec.kind == "lora")

    def unknown(patterns: Sequence[str], known: Sequence[Module | Table]) -> list[str]:
        return [p for p in patterns if not any(each.matches([p]) for each in known)]

    found = [table for table in tables if table.matches(unknown(spec.on, layers))]
    for flag, patterns in (("--on", spec.on), ("--feedforward", spec.feedforward)):
        for pattern in unknown(patterns, [*layers, *found]):
            if left := without_adapter(graph, [pattern]):
                raise UnknownNameError(
                    "unknown-layer",
                    f"{flag} {pattern!r} matches no layers but {some(left)}: no adapter goes on "
                    "recurrent layers, or on grouped or transposed convolutions",
                    hint="name other layers, or train these without an adapter: --train",
                )
            near = ", ".join(repr(layer.name) for layer in layers[:6])
            raise UnknownNameError(
                "unknown-layer",
                f"{flag} {pattern!r} matches no linear layer of the model, and no embedding "
                f"that {spec.kind} goes on",
                hint=f"its layers are {near}{', ...' if layers[6:] else ''}"
                if layers
                else "the model has none: MatMul, Gemm or Conv with a stored weight",
            )
    return [layer for layer in layers if not spec.on or layer.matches(spec.on)], found


def _parameters(
    graph: ir.Graph, layer: Module, spec: AdapterSpec, random: np.random.Generator
) -> dict[str, ir.Value]:
    """New initializers of a layer, by the end of their names."""
    first = layer.shares[0].layer.uses[0]
    if spec.low_rank:
        weight = None
        if spec.kind == "dora":
            weight = weight_array(first.weight)
            weight = weight if first.outputs_first else weight.T
        arrays = low_rank.parameters(layer.shape, spec, random, weight)
    else:
        feedforward = layer.matches(spec.feedforward)
        kernel = [1 for _ in layer.shape[2:]]
        size = layer.inputs if feedforward else layer.outputs
        shape = (1, size, *kernel) if kernel or feedforward else (size, 1)
        arrays = {low_rank.FACTORS: np.ones(shape)}
    return _register(graph, layer.name, arrays, first.data.dtype or ir.DataType.FLOAT)


def _register(
    graph: ir.Graph, layer: str, arrays: Mapping[str, np.ndarray], dtype: ir.DataType
) -> dict[str, ir.Value]:
    """Make initializers of first values, by the end of their names."""
    given = {}
    for end, array in arrays.items():
        name = f"{PREFIX}{layer}.{end}"
        if name in graph.initializers:
            raise OdtpackError(
                "adapter-name-taken",
                f"the model already has a value {name!r}, a name that the adapter needs",
            )
        given[end] = ir.val(name, const_value=ir.tensor(array.astype(dtype.numpy()), name=name))
        graph.register_initializer(given[end])
    return given


# Prompt tuning: learned vectors before the first token of every sequence (Lester et al., 2021).
#
# The vectors [tokens, width] take the place of embeddings: the model sees so many tokens more, and
# what it gives for them is cut off again, so that inputs and outputs keep their sizes. As in PEFT
# they count as tokens at the first positions, which the attention mask does not hide, and are drawn
# from a normal distribution.

NAME = "prompt_embeddings"  # name of the parameter, which is PEFT's
_MASK, _POSITIONS, _TYPES = "attention_mask", "position_ids", "token_type_ids"


def find_embedding(graph: ir.Graph) -> tuple[Table, ir.Value, ir.Value, str]:
    """The embedding of a language model's tokens, and the name of their number."""
    # Returns the table, the input [batch, tokens] that is looked up, what is found [batch, tokens,
    # width], and that name.
    found = [
        (table, ids, rows)
        for table in find_tables(graph)
        for ids, rows in table.uses
        if ids.is_graph_input()
        and len(dims_of(ids) or ()) == 2
        and ids.name not in (_POSITIONS, _TYPES)
    ]
    if len(found) != 1:
        raise _no_tokens(
            f"{len(found)} of its inputs are tokens [batch, tokens] of which an embedding looks up "
            "vectors, and must be one"
        )
    table, ids, rows = found[0]
    length = (dims_of(ids) or (None, None))[1]
    if not isinstance(length, str):
        raise _no_tokens(
            f"its input {ids.name!r} has the fixed or unnamed length {length}",
            "export it with a free, named number of tokens (dynamic_axes, dynamic_shapes)",
        )
    return table, ids, rows, length


def insert_prompt(model: ir.Model, spec: AdapterSpec) -> tuple[str, str]:
    """Put learned vectors before the tokens of a model."""
    # Returns names of the parameter and of the embedding.
    graph = model.graph
    (table, ids, rows, length), count = find_embedding(graph), spec.tokens
    along = [v for v in graph.inputs if length in (dims_of(v) or ()) or v.name == _MASK]
    results = [v for v in graph.outputs if _is_along(v, length)]
    vectors = np.random.default_rng(spec.seed).standard_normal((count, table.width))
    dtype = rows.dtype or ir.DataType.FLOAT
    if NAME in graph.initializers:
        raise OdtpackError("adapter-name-taken", f"the model already has a value {NAME!r}")
    prompt = ir.val(NAME, const_value=ir.tensor(vectors.astype(dtype.numpy()), name=NAME))
    graph.register_initializer(prompt)
    op = Ops(graph, "prompt/")
    first = next(iter(graph))
    for value in along:
        readers = [*value.uses()]
        with op.before(first):
            longer = _lengthened(op, value, ids, count)
        redirect(readers, longer)
    readers = [*rows.uses()]
    with op.after(maker(rows)):
        batch = op.slice(op.shape_of(ids), [0], [0], [1])
        shape = op.join([batch, op.ints(count, table.width)], 0)
        tokens = op.slice(rows, [1], [count], [np.iinfo(np.int64).max])
        together = op.join([op.Expand(prompt, shape), tokens], 1)
    take_place(rows, together, readers)
    for value in results:
        node = value.producer()
        if node is None:
            raise _no_tokens(f"its output {value.name!r} is an input")
        if (product := _product(value)) is not None:
            x = operand(product, 0)
            with op.before(product):  # it is not made where it is not read
                product.replace_input_with(0, op.slice(x, [1], [count], [np.iinfo(np.int64).max]))
            continue
        with op.after(node):
            cut = op.slice(value, [1], [count], [np.iinfo(np.int64).max])
        take_place(value, cut, [])
    # The shapes of what nodes compute are left to inference: sequences are longer now.
    outputs = {value: value.shape for value in graph.outputs}
    for value in (value for node in graph for value in node.outputs):
        value.shape = outputs.get(value)
    infer_shapes(model)
    return NAME, table.name


def _product(value: ir.Value, users: int = 0) -> ir.Node | None:
    """The product with a matrix that an output is, also behind an Identity, and nothing else."""
    node = value.producer()
    if node is None or len(value.uses()) > users:
        return None
    if node.op_type == "Identity":
        before = operand(node, 0)
        return None if before.is_graph_output() else _product(before, 1)
    is_product = node.op_type == "MatMul" and len(dims_of(operand(node, 1)) or ()) == 2
    return node if is_product else None


def _is_along(value: ir.Value, length: str) -> bool:
    """Whether an output has a number for each token, along its second axis."""
    dims = dims_of(value)
    if dims is None:
        raise _no_tokens(f"the shape of its output {value.name!r} is unknown")
    if len(dims) > 1 and dims[1] == length:
        return True
    return len(dims) > 2 and not isinstance(dims[1], int)


def _lengthened(op: Ops, value: ir.Value, ids: ir.Value, count: int) -> ir.Value:
    """An input with what stands for the learned vectors before it."""
    if len(dims_of(value) or ()) != 2:
        raise _no_tokens(
            f"its input {value.name!r} has an axis of tokens, and is not [batch, tokens]"
        )
    if value is ids or value.name == _TYPES:
        own: np.ndarray = np.zeros(count)  # of the first what is looked up is not read
    elif value.name == _MASK:
        own = np.ones(count)
    elif value.name == _POSITIONS:
        own = np.arange(count)
    else:
        raise _no_tokens(f"what its input {value.name!r} should be for the vectors is not known")
    numbers = op.constant(own.astype(op.type_of(value).numpy()))
    batch = op.slice(op.shape_of(value), [0], [0], [1])
    rows = op.Expand(numbers, op.join([batch, op.ints(count)], 0))
    return op.join([rows, op.Add(value, count) if value.name == _POSITIONS else value], 1)


def _no_tokens(what: str, hint: str | None = None) -> OdtpackError:
    return OdtpackError(
        "no-tokens", f"prompt vectors cannot be put before the tokens: {what}", hint=hint
    )
