"""RNN, GRU and LSTM: their activation functions, cells, and the loop over steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context, Cotangents, vjp
from odtpack.graph.graphs import Ops, dims_of

# Activation functions inside recurrent operators, with their slopes.
#
# Names, default parameters and the order in which parameters are taken from the attributes
# are those of ONNX Runtime's CPU kernels, since they compute the forward pass. Where they
# differ from the specification (``ThresholdedRelu`` and ``Affine`` without parameters), a
# gradient by the specification would be that of another function.

_TAKES_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_TAKES_BETA = {"affine", "scaledtanh", "hardsigmoid"}
_DEFAULT_ALPHA = {"leakyrelu": 0.01, "hardsigmoid": 0.2, "elu": 1.0}
_DEFAULT_BETA = {"hardsigmoid": 0.5}
_NAMES = (
    "Affine", "Relu", "LeakyRelu", "ThresholdedRelu", "Tanh", "ScaledTanh", "Sigmoid",
    "HardSigmoid", "Elu", "Softsign", "Softplus",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GateFunction:
    """y = f(a), where a is clipped first."""

    name: str  # name in lower case
    alpha: float = 0.0  # first parameter
    beta: float = 0.0  # second parameter
    clip: float | None = None  # bound on the absolute value of a; None without one

    def value(self, op: Ops, a: ir.Value) -> ir.Value:
        """The function of ``a``, which is clipped first."""
        return _FUNCTIONS[self.name][0](op, self._clipped(op, a), self)

    def slope(self, op: Ops, a: ir.Value | None, y: ir.Value) -> ir.Value:
        """The derivative at ``a``, where y = f(a); zero where ``a`` is clipped."""
        # a: Input of the function; may be None if :attr:`slope_needs_input` is False.
        if a is None:
            return _FUNCTIONS[self.name][1](op, y, y, self)
        slope = _FUNCTIONS[self.name][1](op, self._clipped(op, a), y, self)
        if self.clip is None:
            return slope
        return op.Mul(slope, op.heaviside(op.Sub(self.clip, op.Abs(a))))

    @property
    def slope_needs_input(self) -> bool:
        """Whether the slope cannot be computed from the output."""
        known = self.name in ("tanh", "sigmoid", "relu", "hardsigmoid")
        return not known or self.clip is not None

    def _clipped(self, op: Ops, a: ir.Value) -> ir.Value:
        return a if self.clip is None else op.Clip(a, -self.clip, self.clip)


_Value = Callable[[Ops, ir.Value, GateFunction], ir.Value]
_Slope = Callable[[Ops, ir.Value, ir.Value, GateFunction], ir.Value]


def _square(op: Ops, value: ir.Value) -> ir.Value:
    return op.Mul(value, value)


# f(a), and its slope from a and y = f(a).
_FUNCTIONS: dict[str, tuple[_Value, _Slope]] = {
    "sigmoid": (lambda op, a, f: op.Sigmoid(a), lambda op, a, y, f: op.Mul(y, op.Sub(1, y))),
    "tanh": (lambda op, a, f: op.Tanh(a), lambda op, a, y, f: op.Sub(1, _square(op, y))),
    "relu": (lambda op, a, f: op.Relu(a), lambda op, a, y, f: op.heaviside(y)),
    "affine": (
        lambda op, a, f: op.Add(op.Mul(a, f.alpha), f.beta),
        lambda op, a, y, f: op.Expand(
            op.constant(np.array([f.alpha], op.type_of(a).numpy())), op.Shape(y)
        ),
    ),
    "leakyrelu": (
        lambda op, a, f: op.LeakyRelu(a, alpha=f.alpha),
        lambda op, a, y, f: op.Add(op.Mul(op.heaviside(a), 1 - f.alpha), f.alpha),
    ),
    "thresholdedrelu": (
        lambda op, a, f: op.ThresholdedRelu(a, alpha=f.alpha),
        lambda op, a, y, f: op.heaviside(op.Sub(a, f.alpha)),
    ),
    "scaledtanh": (
        lambda op, a, f: op.Mul(op.Tanh(op.Mul(a, f.beta)), f.alpha),
        lambda op, a, y, f: op.Mul(
            op.Sub(1, _square(op, op.Tanh(op.Mul(a, f.beta)))), f.alpha * f.beta
        ),
    ),
    "hardsigmoid": (
        lambda op, a, f: op.HardSigmoid(a, alpha=f.alpha, beta=f.beta),
        lambda op, a, y, f: op.Mul(op.heaviside(op.Mul(y, op.Sub(1, y))), f.alpha),
    ),
    "elu": (
        lambda op, a, f: op.Elu(a, alpha=f.alpha),
        lambda op, a, y, f: op.Where(op.Greater(a, 0), 1, op.Add(y, f.alpha)),
    ),
    "softsign": (
        lambda op, a, f: op.Softsign(a),
        lambda op, a, y, f: op.Reciprocal(_square(op, op.Add(op.Abs(a), 1))),
    ),
    "softplus": (lambda op, a, f: op.Softplus(a), lambda op, a, y, f: op.Sigmoid(a)),
}


def gate_functions(ctx: Context, defaults: Sequence[str]) -> list[tuple[GateFunction, ...]]:
    """Functions of an LSTM or GRU node, a tuple for each direction."""
    # Parameters go to those functions that take one, in their order.
    # defaults: Names of the functions of one direction, where the node names none.
    count = len(defaults) * directions(ctx)
    names = ctx.strings("activations") or tuple(defaults) * directions(ctx)
    if len(names) != count:
        raise ctx.unsupported(f"it names {len(names)} activations, and not {count}")
    alphas, betas = (list(ctx.floats(f"activation_{name}")) for name in ("alpha", "beta"))
    clip = ctx.float("clip", 0.0) or None
    functions = []
    for given in names:
        name = given.lower()
        if name not in _FUNCTIONS:
            raise _unknown(ctx, given)
        alpha, beta = _DEFAULT_ALPHA.get(name, 0.0), _DEFAULT_BETA.get(name, 0.0)
        if name in _TAKES_ALPHA and alphas:
            alpha = alphas.pop(0)
        if name in _TAKES_BETA and betas:
            beta = betas.pop(0)
        functions.append(GateFunction(name, alpha, beta, clip))
    size = len(defaults)
    return [tuple(functions[at : at + size]) for at in range(0, count, size)]


def rnn_functions(ctx: Context) -> list[tuple[GateFunction, ...]]:
    """The function of each direction of an RNN node."""
    # The kernel knows the names in one spelling only. Older ones take parameters by direction and
    # zero for one that is missing, newer ones as for LSTM: a node on which they disagree has no
    # gradient.
    count = directions(ctx)
    names = ctx.strings("activations", ("Tanh", "Tanh"))
    if len(names) == 2 and count == 1:
        names = names[:1]
    if len(names) != count:
        raise ctx.unsupported(f"it names {len(names)} activations, and not {count}")
    for name in names:
        if name not in _NAMES:
            raise _unknown(ctx, name)
    lowered = [name.lower() for name in names]
    alphas = _by_direction(ctx, "activation_alpha", [name in _TAKES_ALPHA for name in lowered])
    betas = _by_direction(ctx, "activation_beta", [name in _TAKES_BETA for name in lowered])
    clip = ctx.float("clip", -1.0)
    return [
        (GateFunction(name, alpha, beta, clip if clip >= 0 else None),)
        for name, alpha, beta in zip(lowered, alphas, betas, strict=True)
    ]


def _by_direction(ctx: Context, attribute: str, takes: Sequence[bool]) -> list[float]:
    given = ctx.floats(attribute)
    order = iter(given)
    in_order = [next(order, None) if taken else None for taken in takes]
    by_direction = [given[d] if taken and d < len(given) else None for d, taken in enumerate(takes)]
    missing = any(taken and value is None for taken, value in zip(takes, by_direction, strict=True))
    if missing or in_order != by_direction or 0 < len(given) < len(takes):
        raise ctx.unsupported(
            f"versions of ONNX Runtime differ in how they read its attribute {attribute}: "
            f"give it {len(takes)} elements, the same ones if only the second direction "
            "needs one"
        )
    return [value or 0.0 for value in by_direction]


def directions(ctx: Context) -> int:
    """Number of directions of a recurrent node."""
    return 2 if ctx.string("direction", "forward") == "bidirectional" else 1


def _unknown(ctx: Context, name: str) -> Exception:
    return ctx.unsupported(
        f"ONNX Runtime knows no activation {name!r} in it; it knows {', '.join(_NAMES)}"
    )


# The cells: what an RNN, a GRU and an LSTM do in one step, differentiated.
#
# Symbols: a is the input of a gate's activation function, a prime its slope there, ``before``
# and ``after`` say on which side of a step a state is, and k_.. are factors that do not depend
# on the cotangents, and are computed for all steps before the loop.

Functions = tuple[GateFunction, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """Cotangents that the loop over the steps of one direction has found."""

    inputs: ir.Value  # of X W^T + Wb, for all gates [T B, G H]
    # Of H R^T + Rb, gates and the states H that they were computed from [T B, H]: one pair for each
    # block of rows of R.
    states: Sequence[tuple[ir.Value, ir.Value]]
    initial_h: ir.Value  # of the initial hidden state [B, H]
    initial_c: ir.Value | None = None  # of the initial cell state [B, H]
    peepholes: ir.Value | None = None  # of P [3 H]


class Gates:
    """Weights of one direction cut by gate, for the inputs of single gates."""

    def __init__(self, direction: Direction) -> None:
        self.op, self._direction = direction.op, direction
        layer = direction.layer
        sizes = [layer.hidden] * layer.gates

        def cut(value: ir.Value) -> Sequence[ir.Value]:
            return self.op.split(value, 0, sizes) if layer.gates > 1 else [value]

        self.w, self.r = cut(direction.w), cut(direction.r)
        biases = direction.biases or ()
        self.biases = [cut(bias) for bias in biases] or [(), ()]
        self.sums = cut(self.op.Add(*biases)) if biases else ()

    def input(self, gate: int, states: ir.Value | None = None) -> ir.Value:
        """a = x W^T + h R^T + Wb + Rb of a gate [T B, H]; h is the state before a step."""
        linear = self.product(self._direction.x, self.w, self.sums, gate)
        states = self._direction.h if states is None else states
        return self.op.Gemm(states, self.r[gate], linear, transB=1)

    def product(
        self, rows: ir.Value, weights: Sequence[ir.Value], biases: Sequence[ir.Value], gate: int
    ) -> ir.Value:
        """x W^T + Wb, or h R^T + Rb, of a gate."""
        return self.op.Gemm(rows, weights[gate], *biases[gate : gate + 1], transB=1)


def rnn_cell(direction: Direction, functions: Functions) -> Found:
    """h = f(a)."""
    op, layer, r, (f,) = direction.op, direction.layer, direction.r, functions
    a = Gates(direction).input(0) if f.slope_needs_input else None
    slopes = layer.by_step(f.slope(op, a, direction.y), layer.hidden)

    def body(op: Ops, dh: ir.Value, slope: ir.Value) -> Step:
        da = op.Mul(dh, slope)
        return [op.MatMul(da, r)], [da]

    initial_h, stacked = direction.backward([direction.final(1)], [slopes], body)
    da = op.reshape(stacked, -1, layer.hidden)
    return Found(da, [(da, direction.h)], initial_h)


def gru_cell(direction: Direction, functions: Functions) -> Found:
    """h = (1 - z) n + z before, where n = g(x Wh^T + (r before) Rh^T + b) and z, r = f(a)."""
    # ONNX names n "h". k_z = (before - n) z', k_n = (1 - z) n', k_r = before r'.
    op, layer, before, (f, g) = direction.op, direction.layer, direction.h, functions
    hidden, gates = layer.hidden, Gates(direction)
    (z, dz), (r, dr) = (value_and_slope(op, f, gates.input(gate)) for gate in (0, 1))
    reset = op.Mul(r, before)
    n, dn = value_and_slope(op, g, gates.input(2, reset))
    factors = [op.Mul(op.Sub(before, n), dz), op.Mul(op.Sub(1, z), dn), op.Mul(before, dr)]
    zr_weights = op.slice(direction.r, [0], [0], [2 * hidden])

    def body(op: Ops, dh: ir.Value, *factors: ir.Value) -> Step:
        k_z, k_n, k_r, z, r = factors
        n_gate = op.Mul(dh, k_n)
        dreset = op.MatMul(n_gate, gates.r[2])
        zr_gates = op.Concat(op.Mul(dh, k_z), op.Mul(dreset, k_r), axis=1)
        straight = op.Add(op.Mul(dh, z), op.Mul(dreset, r))
        return [op.Add(op.MatMul(zr_gates, zr_weights), straight)], [zr_gates, n_gate]

    sequences = [layer.by_step(each, hidden) for each in (*factors, z, r)]
    initial_h, *stacked = direction.backward([direction.final(1)], sequences, body)
    zr_gates, n_gate = op.reshape(stacked[0], -1, 2 * hidden), op.reshape(stacked[1], -1, hidden)
    inputs = op.Concat(zr_gates, n_gate, axis=1)
    return Found(inputs, [(zr_gates, before), (n_gate, reset)], initial_h)


def gru_linear_first(direction: Direction, functions: Functions) -> Found:
    """The same with n = g(x Wh^T + Wbh + r q), q = before Rh^T + Rbh."""
    # k_z = (before - n) z', k_n = (1 - z) n', k_r = k_n q r', and k_q = k_n r for q.
    op, layer, before, (f, g) = direction.op, direction.layer, direction.h, functions
    hidden, gates, weights = layer.hidden, Gates(direction), direction.r
    (z, dz), (r, dr) = (value_and_slope(op, f, gates.input(gate)) for gate in (0, 1))
    q = gates.product(before, gates.r, gates.biases[1], 2)
    of_x = gates.product(direction.x, gates.w, gates.biases[0], 2)
    n, dn = value_and_slope(op, g, op.Add(of_x, op.Mul(r, q)))
    k_n = op.Mul(op.Sub(1, z), dn)
    factors = [op.Mul(op.Sub(before, n), dz), k_n, op.Mul(k_n, op.Mul(q, dr)), op.Mul(k_n, r)]

    def body(op: Ops, dh: ir.Value, *factors: ir.Value) -> Step:
        k_z, k_n, k_r, k_q, z = factors
        z_gate, r_gate = op.Mul(dh, k_z), op.Mul(dh, k_r)
        of_inputs = op.Concat(z_gate, r_gate, op.Mul(dh, k_n), axis=1)
        of_states = op.Concat(z_gate, r_gate, op.Mul(dh, k_q), axis=1)
        return [op.Add(op.MatMul(of_states, weights), op.Mul(dh, z))], [of_inputs, of_states]

    sequences = [layer.by_step(each, hidden) for each in (*factors, z)]
    initial_h, *stacked = direction.backward([direction.final(1)], sequences, body)
    of_inputs, of_states = (op.reshape(each, -1, 3 * hidden) for each in stacked)
    return Found(of_inputs, [(of_states, before)], initial_h)


def value_and_slope(op: Ops, f: GateFunction, a: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Output of a gate's function, and its derivative there."""
    y = f.value(op, a)
    return y, f.slope(op, a, y)


_I, _O, _FORGET, _G = range(4)  # order of the gates


# In an LSTM c = forget before + i g and h = o k(c), where the gates i, o and forget may look at the
# cell through peepholes: at the state before the step, and o at that after it.


def lstm_cell(direction: Direction, functions: Functions) -> Found:
    """Cotangents of one direction of an LSTM."""
    # With dh for the hidden state after a step, the cotangent of the cell is
    # dc = (that from the next step) + dh k_c, k_c = o k'(c) + k_o Po, and the gates have
    # dh k_o, k_o = k(c) o'; dc k_i, k_i = g i'; dc k_f, k_f = before forget'; and dc k_g,
    # k_g = i g'. The step before receives dc k_b, k_b = forget + k_i Pi + k_f Pf.
    op, layer, weights, (f, _, k) = direction.op, direction.layer, direction.r, functions
    hidden, gates, see = layer.hidden, Gates(direction), _peepholes(direction)
    before, after, forget, k_i, k_f, k_g = _cell(direction, gates, functions, see)
    o, do = value_and_slope(op, f, see(op, _O, gates.input(_O), after))
    shown, dshown = value_and_slope(op, dataclasses.replace(k, clip=None), after)
    k_o = op.Mul(shown, do)
    k_c = see(op, _O, op.Mul(o, dshown), k_o)
    k_b = see(op, _FORGET, see(op, _I, forget, k_i), k_f)

    def body(op: Ops, dh: ir.Value, dc: ir.Value, *factors: ir.Value) -> Step:
        k_o, k_c, k_i, k_f, k_g, k_b = factors
        dc = op.Add(dc, op.Mul(dh, k_c))
        pairs = ((dc, k_i), (dh, k_o), (dc, k_f), (dc, k_g))
        da = op.Concat(*(op.Mul(*pair) for pair in pairs), axis=1)
        return [op.MatMul(da, weights), op.Mul(dc, k_b)], [da]

    sequences = [layer.by_step(each, hidden) for each in (k_o, k_c, k_i, k_f, k_g, k_b)]
    finals = [direction.final(1), direction.final(2)]
    initial_h, initial_c, stacked = direction.backward(finals, sequences, body)
    da = op.reshape(stacked, -1, 4 * hidden)
    dp = None
    if layer.ctx.needs(7):
        parts = op.split(da, 1, [hidden] * 4)
        seen = {_I: before, _O: after, _FORGET: before}
        sums = [op.reduce_sum(op.Mul(parts[g], c), [0], keepdims=False) for g, c in seen.items()]
        dp = op.Concat(*sums, axis=0)
    return Found(da, [(da, direction.h)], initial_h, initial_c, dp)


_See = Callable[[Ops, int, ir.Value, ir.Value], ir.Value]


def _peepholes(direction: Direction) -> _See:
    """What adds P cell to a gate's a: weights [H] by which i, o and forget see the cell, if any."""
    given = direction.layer.ctx.maybe_x(7)
    if given is None:
        return lambda op, gate, a, cell: a
    p = direction.op.split(direction.part(given), 0, [direction.layer.hidden] * 3)
    return lambda op, gate, a, cell: op.Add(a, op.Mul(cell, p[gate]))


def _cell(
    direction: Direction, gates: Gates, functions: Functions, see: _See
) -> tuple[ir.Value, ...]:
    """Run the cell states through all steps, as no output of the node holds them."""
    # Returns them before and after each step, forget, k_i, k_f and k_g, all rows [T B, H].
    # Without peepholes the gates do not depend on the states, and are computed before the loop.
    # With input_forget the forget gate is 1 - i.
    op, layer, (f, g, _) = direction.op, direction.layer, functions
    coupled = bool(layer.ctx.int("input_forget", 0))
    blind = [gates.input(gate) for gate in ((_I,) if coupled else (_I, _FORGET))]
    block, dblock = value_and_slope(op, g, gates.input(_G))

    def gates_at(
        op: Ops, cell: ir.Value, blind: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        a = [see(op, gate, each, cell) for gate, each in zip((_I, _FORGET), blind, strict=False)]
        i = f.value(op, a[0])
        return a, i, op.Sub(1, i) if coupled else f.value(op, a[1])

    def watching(op: Ops, cell: ir.Value, block: ir.Value, *blind: ir.Value) -> Step:
        _, i, forget = gates_at(op, cell, blind)
        new = op.Add(op.Mul(cell, forget), op.Mul(i, block))
        return [new], [new]

    def plain(op: Ops, cell: ir.Value, forget: ir.Value, written: ir.Value) -> Step:
        new = op.Add(op.Mul(cell, forget), written)
        return [new], [new]

    def run(body: Body, *rows: ir.Value) -> ir.Value:
        sequences = [layer.by_step(each, layer.hidden) for each in rows]
        return direction.scan([start], sequences, body, falling=direction.latest_first)[1]

    start = direction.initial(6)
    if layer.ctx.maybe_x(7) is not None:
        stacked = run(watching, block, *blind)
        before = direction.before(stacked, 6)
        a, i, forget = gates_at(op, before, blind)
    else:
        a, i, forget = gates_at(op, start, blind)  # which look at no state
        stacked = run(plain, forget, op.Mul(i, block))
        before = direction.before(stacked, 6)
    after = op.reshape(stacked, -1, layer.hidden)
    k_i = op.Mul(op.Sub(block, before) if coupled else block, f.slope(op, a[0], i))
    if coupled:
        k_f = op.zeros(op.Shape(i), layer.dtype)
    else:
        k_f = op.Mul(before, f.slope(op, a[1], forget))
    return before, after, forget, k_i, k_f, op.Mul(i, dblock)


# What RNN, LSTM and GRU have in common: one direction of a node, and a loop over its steps.
#
# Shapes: T steps, B sequences, I inputs, H hidden units, G gates. The state before and after
# each step is known from the output Y, so that everything but the recursion of the
# cotangents is computed for all steps at once, in rows [T B, ...]; only the recursion runs
# in a Scan.

Step = tuple[Sequence[ir.Value], Sequence[ir.Value]]
Body = Callable[..., Step]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Where a batch has sequences shorter than T."""

    valid: ir.Value  # BOOL [T, B, 1], false past the end of a sequence
    followed: ir.Value  # BOOL [T, B, 1], whether the next step is valid too
    any: ir.Value  # BOOL [B, 1], false for a sequence without any step, whose states are zero


class Layer:
    """A recurrent node: its sizes, and how its values are cut into directions."""

    # gates: G.

    def __init__(self, ctx: Context, gates: int) -> None:
        self.ctx, self.op, self.gates = ctx, ctx.op, gates
        self.dtype = ctx.dtype(ctx.x())
        if self.dtype != ir.DataType.FLOAT:
            raise ctx.unsupported(
                f"its type is {self.dtype.name}, and ONNX Runtime's CPU kernel runs FLOAT only"
            )
        if ctx.int("layout", 0):
            raise ctx.unsupported(
                "ONNX Runtime's CPU kernel refuses layout 1, batches before steps; "
                "export it with layout 0 (in PyTorch batch_first=False, or a Transpose)"
            )
        self.hidden, self.inputs = ctx.size(ctx.x(2), 2), ctx.size(ctx.x(1), 2)
        self.directions = directions(ctx)
        self.steps, self.batch = ctx.dims(ctx.x())[:2]
        self.states = ctx.extra_output(0, self.dtype)  # Y [T, D, B, H]
        self.lengths = self._lengths()
        self.x = self.op.reshape(ctx.x(), -1, self.inputs)  # [T B, I]
        self._parts: dict[tuple[ir.Value, int], list[ir.Value]] = {}

    def part(self, value: ir.Value, axis: int, direction: int) -> ir.Value:
        """What one direction has of a value, without the axis of directions."""
        if (value, axis) not in self._parts:
            sizes = [1] * self.directions
            whole = self.op.split(value, axis, sizes) if self.directions > 1 else (value,)
            self._parts[value, axis] = [self.op.squeeze(each, axis) for each in whole]
        return self._parts[value, axis][direction]

    def join(self, values: Sequence[ir.Value]) -> ir.Value:
        """Put what the directions have side by side along a new axis 0."""
        return self.op.join([self.op.unsqueeze(value, 0) for value in values], 0)

    def by_step(self, rows: ir.Value, width: int) -> ir.Value:
        """View [T B, width] as [T, B, width]."""
        if isinstance(self.steps, int):
            result = self.op.reshape(rows, self.steps, -1, width)
        elif isinstance(self.batch, int):
            result = self.op.reshape(rows, -1, self.batch, width)
        else:
            steps = self.op.slice(self.op.Shape(self.ctx.x()), [0], [0], [1])
            shape = self.op.Concat(steps, self.op.ints(-1, width), axis=0)
            result = self.op.Reshape(rows, shape)
        result.shape = ir.Shape([self.steps, self.batch, width])
        return result

    @functools.cached_property
    def zero_state(self) -> ir.Value:
        """Zeros [B, H]."""
        if isinstance(self.batch, int):
            return self.op.zeros(self.op.ints(self.batch, self.hidden), self.dtype)
        batch = self.op.slice(self.op.Shape(self.ctx.x()), [0], [1], [2])
        shape = self.op.Concat(batch, self.op.ints(self.hidden), axis=0)
        return self.op.zeros(shape, self.dtype)

    def _lengths(self) -> Lengths | None:
        lengths, op = self.ctx.maybe_x(4), self.op
        if lengths is None:
            return None
        if isinstance(self.steps, int):
            steps = op.constant(np.arange(self.steps, dtype=np.int32))
        else:
            count = op.slice(op.Shape(self.ctx.x()), [0], [0], [1])
            first = op.constant(np.array(0, np.int32))
            last = op.squeeze(op.cast(count, ir.DataType.INT32), 0)
            steps = op.Range(first, last, op.constant(np.array(1, np.int32)))
        column, steps = op.reshape(lengths, -1, 1), op.reshape(steps, -1, 1, 1)
        valid, followed = op.Less(steps, column), op.Less(op.Add(steps, 1), column)
        for mask in (valid, followed):
            mask.shape = ir.Shape([self.steps, self.batch, 1])
        return Lengths(valid, followed, op.Greater(column, 0))


class Direction:
    """One direction of a node."""

    # w: Input weights [G H, I]. r: Recurrent weights [G H, H].

    def __init__(self, layer: Layer, index: int) -> None:
        self.layer, self.op, self.index = layer, layer.op, index
        # Whether the forward pass runs from the last step to the first.
        reverse = layer.ctx.string("direction", "forward") == "reverse"
        self.latest_first = index == 1 or reverse
        self.x = layer.x  # inputs of each step [T B, I]
        self.w, self.r = self.part(layer.ctx.x(1)), self.part(layer.ctx.x(2))
        self.biases = None  # biases of both [G H], or None
        if (both := layer.ctx.maybe_x(3)) is not None:
            size = layer.gates * layer.hidden
            self.biases = self.op.split(self.part(both), 0, [size, size])
        states = layer.by_step(self.part(layer.states, 1), layer.hidden)
        self.y = self.op.reshape(states, -1, layer.hidden)  # hidden state after each step [T B, H]
        self.h = self.before(states, 5)  # hidden state before each step [T B, H]

    def before(self, after: ir.Value, number: int) -> ir.Value:
        """State before each step [T B, H]."""
        # after: State after each step [T, B, H], zero past the end of a sequence. number: Input of
        # the node that holds the initial state.
        op, layer = self.op, self.layer
        given = layer.ctx.maybe_x(number)
        initial = self.initial(number)
        first = op.unsqueeze(initial, 0)
        if not self.latest_first:
            joined = op.Concat(first, op.slice(after, [0], [0], [-1]), axis=0)
        else:
            joined = op.Concat(op.slice(after, [0], [1], [2**31 - 1]), first, axis=0)
            if given is not None and layer.lengths is not None:
                # The pass starts at the end of each sequence.
                joined = op.Where(layer.lengths.followed, joined, initial)
        return op.reshape(joined, -1, layer.hidden)

    def initial(self, number: int) -> ir.Value:
        """An initial state [B, H] of the node, zero if it has none."""
        given = self.layer.ctx.maybe_x(number)
        return self.layer.zero_state if given is None else self.part(given)

    def final(self, number: int) -> ir.Value:
        """Cotangent of a final state [B, H]: of Y_h, or of Y_c."""
        given, lengths = self.layer.ctx.maybe_dy(number), self.layer.lengths
        if given is None:
            return self.layer.zero_state
        part = self.part(given)
        return part if lengths is None else self.op.Where(lengths.any, part, 0)

    def backward(
        self, states: Sequence[ir.Value], sequences: Sequence[ir.Value], body: Body
    ) -> list[ir.Value]:
        """Write a loop against the order of the forward pass."""
        # The first state is the cotangent of the hidden state: what Y's cotangent has at a step is
        # added before the body sees it. All else is as in :meth:`scan`.
        given, layer = self.layer.ctx.maybe_dy(0), self.layer
        if given is None:
            return self.scan(states, sequences, body, falling=not self.latest_first)
        dy = self.part(given, 1)
        dy.shape = ir.Shape([layer.steps, layer.batch, layer.hidden])

        def add(op: Ops, dh: ir.Value, *rest: ir.Value) -> Step:
            *others, dy = rest
            return body(op, op.Add(dh, dy), *others)

        return self.scan(states, [*sequences, dy], add, falling=not self.latest_first)

    def scan(
        self,
        states: Sequence[ir.Value],
        sequences: Sequence[ir.Value],
        body: Body,
        *,
        falling: bool,
    ) -> list[ir.Value]:
        """Write a loop over the steps, from the last one if ``falling``."""
        # states are carried from step to step, [B, H] each; sequences are read, [T, B, width] each.
        # The body receives a writer, a state for each of ``states`` and a slice for each of
        # ``sequences``, and returns the new states and the values to stack. Past the end of a
        # sequence its states stay, and what is stacked is zero. Returns the last states, then the
        # stacked values [T, B, width].
        op, layer = self.op, self.layer
        if layer.lengths is not None:
            sequences = [*sequences, layer.lengths.valid]
        inputs = [_inner(op, state, (layer.batch, layer.hidden)) for state in states]
        inputs += [_inner(op, each, (dims_of(each) or ())[1:]) for each in sequences]
        graph = ir.Graph(inputs, [], nodes=[], name=op.fresh_name("steps"))
        inner = op.inside(graph)
        if layer.lengths is None:
            new, stacked = body(inner, *inputs)
            # A graph must not have one value as two outputs.
            stacked = [inner.Identity(each) if each in new else each for each in stacked]
        else:
            *inputs, valid = inputs
            new, stacked = body(inner, *inputs)
            stacked = [inner.Where(valid, each, 0) for each in stacked]
            old = inputs[: len(states)]
            new = [inner.Where(valid, *pair) for pair in zip(new, old, strict=True)]
        graph.outputs.extend([*new, *stacked])
        results = op.emit(
            "Scan",
            [*states, *sequences],
            outputs=len(new) + len(stacked),
            body=graph,
            num_scan_inputs=len(sequences),
            scan_input_directions=[int(falling)] * len(sequences),
            scan_output_directions=[int(falling)] * len(stacked),
        )
        return list(results)

    def part(self, value: ir.Value, axis: int = 0) -> ir.Value:
        """What this direction has of a value, without the axis of directions."""
        return self.layer.part(value, axis, self.index)


def _inner(op: Ops, like: ir.Value, dims: Sequence[int | str | None]) -> ir.Value:
    return ir.val(op.fresh_name("step"), like.dtype, list(dims))


# RNN, LSTM and GRU.
#
# The forward node stays as it is, with its fused kernel. The rules compute the gates of all
# steps again, from the states in Y, as matrix products over all steps; carry the cotangents
# from step to step in a Scan whose body is one matrix product (two where a GRU resets before
# it) and a few elementwise operators; and end with one product over all steps for each
# gradient.


@vjp("RNN", since=7)
def rnn(ctx: Context) -> Cotangents:
    return _recurrent(ctx, 1, rnn_functions(ctx), rnn_cell)


@vjp("GRU", since=7)
def gru(ctx: Context) -> Cotangents:
    cell = gru_linear_first if ctx.int("linear_before_reset", 0) else gru_cell
    return _recurrent(ctx, 3, gate_functions(ctx, ("sigmoid", "tanh")), cell)


@vjp("LSTM", since=7)
def lstm(ctx: Context) -> Cotangents:
    return _recurrent(ctx, 4, gate_functions(ctx, ("sigmoid", "tanh", "tanh")), lstm_cell)


def _recurrent(
    ctx: Context,
    gates: int,
    functions: Sequence[Functions],
    cell: Callable[[Direction, Functions], Found],
) -> Cotangents:
    """Cotangents of X, W, R, B, sequence_lens, initial_h, initial_c and P."""
    op, layer = ctx.op, Layer(ctx, gates)
    parts = [Direction(layer, index) for index in range(layer.directions)]
    found = [cell(part, own) for part, own in zip(parts, functions, strict=True)]
    result: list[ir.Value | None] = [None] * 8
    if ctx.needs(0):
        rows = op.MatMul(found[0].inputs, parts[0].w)
        for part, each in zip(parts[1:], found[1:], strict=True):
            rows = op.Gemm(each.inputs, part.w, rows)
        result[0] = layer.by_step(rows, layer.inputs)
    if ctx.needs(1):
        result[1] = layer.join([op.Gemm(each.inputs, layer.x, transA=1) for each in found])
    if ctx.needs(2):
        result[2] = layer.join(
            [op.join([op.Gemm(*pair, transA=1) for pair in each.states], 0) for each in found]
        )
    if ctx.needs(3):
        result[3] = layer.join([_biases(op, each) for each in found])
    if ctx.needs(5):
        result[5] = layer.join([each.initial_h for each in found])
    if ctx.needs(6):
        result[6] = layer.join([each.initial_c for each in found if each.initial_c])
    if ctx.needs(7):
        result[7] = layer.join([each.peepholes for each in found if each.peepholes])
    return result


def _biases(op: Ops, found: Found) -> ir.Value:
    of_inputs = op.reduce_sum(found.inputs, [0], keepdims=False)
    (gates, _), *more = found.states
    # Where R is applied in blocks, to different states, both biases are added at one place.
    same = bool(more) or gates is found.inputs
    of_states = of_inputs if same else op.reduce_sum(gates, [0], keepdims=False)
    return op.Concat(of_inputs, of_states, axis=0)
