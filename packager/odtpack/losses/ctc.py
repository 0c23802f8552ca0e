"""Connectionist temporal classification: label sequences whose places are not known."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from odtpack.losses.common.base import (
    Dims,
    Loss,
    Ops,
    Target,
    Value,
    dims,
    facts_of_labels,
    like,
    reduce,
    require_rank,
    shape_text,
    shaped,
    whole_numbers,
)
from odtpack.option import option

Body: TypeAlias = "Callable[[Ops, Value, Value, Value, Value], tuple[Value, Value]]"

_LOG_ZERO = -1e30  # of what cannot happen; finite, so that differences of such are not NaN
_IMPOSSIBLE = -1e29  # below the least probability of float32

Layout = Literal["TNC", "NTC"]
_SAMPLES = re.compile(r"batch|^(bs|samples?)$", re.IGNORECASE)
_TIME = re.compile(r"time|frame|step|seq|len|^t$", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class CTC(Loss):
    """-log of the probability of all ways in which the labels can be read from the prediction.

    The prediction holds logits or log-probabilities [T, N, C] (or [N, T, C]). Labels [N, S]
    are padded with anything after ``target_lengths`` [N]; only the first ``input_lengths``
    [N] of the T steps count. Labels that do not fit into their steps have loss and gradient
    0, as with PyTorch's ``zero_infinity``. The mean is over loss / target length.

    Sums over alignments go forward and backward once each, in the log domain; the gradient
    is -P(alignment passes step t at place s), and is not taken through the recursions.
    Source: Graves et al. (2006).
    """

    name = "ctc"
    summary = "Connectionist temporal classification."
    formula = "-log P(all alignments that read as the labels)"
    prediction = "logits or log-probabilities [T, N, C]"
    classifies = False
    target = "`labels` [N, S], `input_lengths` [N], `target_lengths` [N]"
    blank: int = option(0, "Class that stands for no label.", whole=True, least=0)
    layout: Layout | None = option(
        None, "Axes of the prediction: samples, time and classes. Without it NTC where the first "
        "is called `batch` or the like, or begins an input that the prediction is computed from "
        "and is not called `time` or the like; TNC elsewhere.",
    )  # fmt: skip

    def _layout(self, prediction: Value) -> Layout:
        if self.layout is not None:
            return self.layout
        from odtpack.graph.graphs import ancestors, reads

        first = str(dims(prediction)[0])
        if _SAMPLES.search(first):
            return "NTC"
        read = {v for node in ancestors([prediction]) for v in reads(node)} | {prediction}
        begins = any(v.is_graph_input() and v.shape and str(v.shape[0]) == first for v in read)
        named = not first.isdecimal() and not _TIME.search(first)
        return "NTC" if begins and named else "TNC"

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """Labels [N, S], and the lengths [N] of inputs and targets."""
        layout = self.layout or "TNC"
        require_rank(self.name, predictions[0], f"[{', '.join(layout)}]", 3, 3)
        shape = dims(predictions[0])
        batch, classes = shape[self._layout(predictions[0]).index("N")], shape[2]
        if isinstance(classes, int) and self.blank >= classes:
            raise self._bad("blank", f"below {classes}, the number of classes")
        return (
            whole_numbers("labels", "labels", (batch, "label_count")),
            whole_numbers("input_lengths", "target", (batch,)),
            whole_numbers("target_lengths", "target", (batch,)),
        )

    def assumption(self, predictions: Sequence[Value]) -> str | None:
        """Which axis is time: with the axes confused, a loss of real data may be exactly 0."""
        if self.layout == "NTC" or len(dims(predictions[0])) != 3:
            return None
        shape = shape_text(dims(predictions[0]))
        found = self._layout(predictions[0])
        read, other, first = (
            ("[time, samples, classes]", "NTC", "samples")
            if found == "TNC"
            else ("[samples, time, classes]", "TNC", "time steps")
        )
        return (
            f"{self.name} reads {predictions[0].name!r} {shape} as {read}; "
            f"if {first} come first, use --loss-option layout={other}"
        )

    def label_facts(self, predictions: Sequence[Value]) -> dict[str, int]:
        """Number of classes, where it is known."""
        return facts_of_labels(predictions[0], 2, None)

    def terms(self, op: Ops, *values: Value) -> Value:
        prediction, labels, input_lengths, target_lengths = values
        labels, input_lengths, target_lengths = (
            op.cast(value, op.INT64) for value in (labels, input_lengths, target_lengths)
        )
        if self._layout(prediction) == "NTC":
            shape = dims(prediction)
            moved = op.transpose(prediction, 1, 0, 2)
            prediction = shaped(moved, (shape[1], shape[0], shape[2]))
        steps, batch, _ = dims(prediction)
        table = (steps, batch, "label_places")
        log_p = like(op.LogSoftmax(prediction, axis=2), prediction)
        places = self._places(op, labels)
        seen = self._emissions(op, log_p, places, table)
        from odtpack.autodiff.stop_gradient import stop

        held = stop(op, seen)
        given = op.cast(held, op.FLOAT)
        # Which steps count: BOOL [T, N, 1].
        step = op.unsqueeze(op.places(prediction, 0), 1)
        active = op.unsqueeze(op.Less(step, op.unsqueeze(input_lengths, 0)), 2)
        # Where an alignment may end: at the last label or the blank after it, [N, 2 S + 1].
        place = op.unsqueeze(op.places(places, 1), 0)
        end = op.unsqueeze(op.Mul(target_lengths, 2), 1)
        ends = _log(op, op.Or(op.Equal(place, end), op.Equal(place, op.Sub(end, 1))))
        # Which places may be reached past a blank: labels unlike the one before, [N, 2 S + 1].
        before = op.Pad(places, op.ints(0, 2, 0, -2), op.constant(np.array(self.blank, np.int64)))
        other = op.And(op.Not(op.Equal(places, self.blank)), op.Not(op.Equal(places, before)))
        jump = _log(op, other)
        first = op.Equal(op.unsqueeze(op.places(ends, 1), 0), 0)  # before the first step
        starts = op.Expand(_log(op, first), op.Shape(ends))
        alpha = _scan(op, _forward, starts, given, active, jump, reverse=False)
        beta = _scan(op, _backward, ends, given, active, jump, reverse=True)
        last = op.Add(op.squeeze(op.slice(alpha, [0], [-1], [2**62]), 0), ends)
        top = op.reduce_max(last, [1])
        log_z = op.Add(top, op.Log(op.reduce_sum(op.Exp(op.Sub(last, top)), [1])))
        possible = op.Greater(log_z, _IMPOSSIBLE)
        through = op.Exp(op.Sub(op.Add(alpha, beta), op.unsqueeze(log_z, 0)))
        counted = op.Where(op.And(active, op.unsqueeze(possible, 0)), through, 0)
        share = shaped(op.cast(counted, op.type_of(log_p)), table)
        # Its value is 0; its gradient is the share of every place.
        rise = shaped(op.Sub(seen, held), table)
        slope = op.reduce_sum(shaped(op.Mul(share, rise), table), [0, 2], keepdims=False)
        cost = op.squeeze(op.Where(possible, op.Neg(log_z), 0), 1)
        return shaped(op.Sub(op.cast(cost, op.type_of(share)), slope), (batch,))

    def reduced(self, op: Ops, *values: Value) -> Value:
        """Write the terms and their reduction; the mean is over loss / target length."""
        terms = self.terms(op, *values)
        if self.reduction == "mean":
            lengths = op.cast(values[3], op.type_of(terms))
            terms = shaped(op.Div(terms, op.Max(lengths, 1)), dims(terms))
        return reduce(op, terms, self.reduction)

    def _places(self, op: Ops, labels: Value) -> Value:
        """Labels with blanks between and around: [N, 2 S + 1]."""
        blanks = op.Add(op.Mul(labels, 0), self.blank)
        pairs = op.Concat(op.unsqueeze(blanks, 2), op.unsqueeze(labels, 2), axis=2)
        flat = op.Reshape(pairs, op.ints(0, -1))
        end = op.constant(np.array(self.blank, np.int64))
        return op.Pad(flat, op.ints(0, 0, 0, 1), end)

    @staticmethod
    def _emissions(op: Ops, log_p: Value, places: Value, shape: Dims) -> Value:
        """Log-probability of every place at every step: [T, N, 2 S + 1]."""
        if op.opset < 16:  # whose scatters do not add: the gradient of a gather needs one
            classes = op.slice(op.Shape(log_p), [0], [2], [3])
            values = op.constant(np.array([0, 1], op.type_of(log_p).numpy()))
            chosen = op.OneHot(places, classes, values, axis=1)
            chosen.type = log_p.type
            chosen = shaped(chosen, (shape[1], dims(log_p)[2], shape[2]))
            by_sample = shaped(op.transpose(log_p, 1, 0, 2), (shape[1], shape[0], dims(log_p)[2]))
            seen = shaped(op.MatMul(by_sample, chosen), (shape[1], shape[0], shape[2]))
            return shaped(op.transpose(seen, 1, 0, 2), shape)
        count = op.slice(op.Shape(log_p), [0], [0], [1])
        wanted = op.Concat(count, op.Shape(places), axis=0)
        index = op.Expand(op.unsqueeze(places, 0), wanted)
        return shaped(op.GatherElements(log_p, index, axis=2), shape)


def _log(op: Ops, condition: Value) -> Value:
    """0 where a condition holds, else the logarithm of 0, FLOAT."""
    return op.Where(condition, op.constant(np.float32(0)), op.constant(np.float32(_LOG_ZERO)))


def _forward(op: Ops, alpha: Value, seen: Value, active: Value, jump: Value) -> tuple[Value, Value]:
    """alpha'(s) = (alpha(s) + alpha(s - 1) + alpha(s - 2) if a jump may lead to s) p(s)."""
    new = op.Add(_three(op, alpha, _shift(op, alpha, 1), op.Add(_shift(op, alpha, 2), jump)), seen)
    new = op.Where(active, new, alpha)
    return new, op.Identity(new)


def _backward(op: Ops, beta: Value, seen: Value, active: Value, jump: Value) -> tuple[Value, Value]:
    """beta'(s) = q(s) + q(s + 1) + q(s + 2) if a jump may lead there, q = p beta."""
    ahead = op.Add(beta, seen)
    new = _three(op, ahead, _shift(op, ahead, -1), _shift(op, op.Add(ahead, jump), -2))
    return op.Where(active, new, beta), op.Identity(beta)


def _shift(op: Ops, value: Value, by: int) -> Value:
    """Move [N, L] along its last axis; what comes in cannot happen."""
    never = op.constant(np.asarray(_LOG_ZERO, np.float32))
    return op.Pad(value, op.ints(0, by, 0, -by), never)


def _three(op: Ops, a: Value, b: Value, c: Value) -> Value:
    """log(exp a + exp b + exp c)."""
    top = op.Max(a, b, c)
    parts = [op.Exp(op.Sub(value, top)) for value in (a, b, c)]
    return op.Add(top, op.Log(op.Add(op.Add(parts[0], parts[1]), parts[2])))


def _scan(
    op: Ops, body: Body, start: Value, seen: Value, active: Value, jump: Value, *, reverse: bool
) -> Value:
    """Run a recursion over the steps; return its second result at every step, [T, N, L]."""
    import onnx_ir as ir

    from odtpack.graph.graphs import Ops

    stem = op.fresh_name("recursion")
    state = ir.val(f"{stem}/state", dtype=ir.DataType.FLOAT)
    table = ir.val(f"{stem}/jump", dtype=ir.DataType.FLOAT)
    now = ir.val(f"{stem}/seen", dtype=ir.DataType.FLOAT)
    counts = ir.val(f"{stem}/active", dtype=ir.DataType.BOOL)
    graph = ir.Graph(
        [state, table, now, counts], [], nodes=[], opset_imports={"": op.opset}, name=stem
    )
    inner = Ops(graph, f"{stem}/")
    new, out = body(inner, state, now, counts, table)
    graph.outputs.extend([new, inner.Identity(table), out])
    _, _, results = op.emit(
        "Scan",
        [start, jump, seen, active],
        outputs=3,
        body=graph,
        num_scan_inputs=2,
        scan_input_directions=[int(reverse)] * 2,
        scan_output_directions=[int(reverse)],
    )
    return results
