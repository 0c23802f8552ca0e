"""Prompt tuning: learned vectors before the first token of every sequence (Lester et al., 2021).

The vectors [tokens, width] take the place of embeddings: the model sees so many tokens more, and
what it gives for them is cut off again, so that inputs and outputs keep their sizes. As in PEFT
they count as tokens at the first positions, which the attention mask does not hide, and are drawn
from a normal distribution.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from odtpack.adapters.low_rank import Table, find_tables, take_place
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import dims_of
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops
from odtpack.spec import AdapterSpec

NAME = "prompt_embeddings"
"""Name of the parameter, which is PEFT's."""

_MASK, _POSITIONS, _TYPES = "attention_mask", "position_ids", "token_type_ids"


@dataclasses.dataclass(frozen=True)
class Embedding:
    """The embedding of a model's tokens."""

    table: Table
    ids: ir.Value  # the model's input [batch, tokens] that is looked up
    rows: ir.Value  # what is found, [batch, tokens, width]
    length: str  # name of the number of tokens


def find_embedding(graph: ir.Graph) -> Embedding:
    """The embedding of the tokens of a language model."""
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
    return Embedding(table, ids, rows, length)


def insert_prompt(model: ir.Model, spec: AdapterSpec) -> tuple[str, str]:
    """Put learned vectors before the tokens of a model."""
    # model: The model, changed in place. spec: How many they are, and their seed.
    # Returns names of the parameter and of the embedding.
    graph = model.graph
    embedding = find_embedding(graph)
    count, length = spec.tokens, embedding.length
    along = [v for v in graph.inputs if length in (dims_of(v) or ()) or v.name == _MASK]
    results = [v for v in graph.outputs if _is_along(v, length)]
    vectors = np.random.default_rng(spec.seed).standard_normal((count, embedding.table.width))
    dtype = embedding.rows.dtype or ir.DataType.FLOAT
    if NAME in graph.initializers:
        raise OdtpackError("adapter-name-taken", f"the model already has a value {NAME!r}")
    prompt = ir.val(NAME, const_value=ir.tensor(vectors.astype(dtype.numpy()), name=NAME))
    graph.register_initializer(prompt)
    op = Ops(graph, "prompt/")
    first = next(iter(graph))
    for value in along:
        readers = [*value.uses()]
        with op.before(first):
            longer = _lengthened(op, value, embedding, count)
        for reader, index in readers:
            reader.replace_input_with(index, longer)
    node = embedding.rows.producer()
    assert node is not None  # noqa: S101 - a look-up
    readers = [*embedding.rows.uses()]
    with op.after(node):
        batch = op.slice(op.shape_of(embedding.ids), [0], [0], [1])
        shape = op.join([batch, op.ints(count, embedding.table.width)], 0)
        tokens = op.slice(embedding.rows, [1], [count], [np.iinfo(np.int64).max])
        together = op.join([op.Expand(prompt, shape), tokens], 1)
    take_place(embedding.rows, together, readers)
    for value in results:
        maker = value.producer()
        if maker is None:
            raise _no_tokens(f"its output {value.name!r} is an input")
        readers = [*value.uses()]
        with op.after(maker):
            cut = op.slice(value, [1], [count], [np.iinfo(np.int64).max])
        take_place(value, cut, [])
    # The shapes of what nodes compute are left to inference: sequences are longer now.
    outputs = {value: value.shape for value in graph.outputs}
    for value in (value for node in graph for value in node.outputs):
        value.shape = outputs.get(value)
    infer_shapes(model)
    return NAME, embedding.table.name


def _is_along(value: ir.Value, length: str) -> bool:
    """Whether an output has a number for each token, along its second axis."""
    dims = dims_of(value)
    if dims is None:
        raise _no_tokens(f"the shape of its output {value.name!r} is unknown")
    if len(dims) > 1 and dims[1] == length:
        return True
    return len(dims) > 2 and not isinstance(dims[1], int)


def _lengthened(op: Ops, value: ir.Value, embedding: Embedding, count: int) -> ir.Value:
    """An input with what stands for the learned vectors before it."""
    if len(dims_of(value) or ()) != 2:
        raise _no_tokens(
            f"its input {value.name!r} has an axis of tokens, and is not [batch, tokens]"
        )
    if value is embedding.ids or value.name == _TYPES:
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
        "no-tokens", f"the model takes no vectors before its tokens: {what}", hint=hint
    )
