"""RNN, GRU and LSTM written out in float64, sequence by sequence and step by step.

The ONNX specification's formulas, which neither PyTorch nor the ONNX reference covers whole.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils import rnn as packing

Tensors = Mapping[str, torch.Tensor]
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
INPUTS = ("x", "w", "r", "b", "lengths", "h0", "c0", "p")


class Function:
    """A gate's function, which notes how close its inputs come to where it has a kink."""

    def __init__(self, name: str, alphas: list[float], betas: list[float], clip: float | None):
        takes = {
            "affine": (0.0, 0.0), "leakyrelu": (0.01, None), "thresholdedrelu": (0.0, None),
            "scaledtanh": (0.0, 0.0), "hardsigmoid": (0.2, 0.5), "elu": (1.0, None),
        }.get(name.lower(), (None, None))  # fmt: skip
        alpha, beta = (
            default if default is None or not given else given.pop(0)
            for default, given in zip(takes, (alphas, betas), strict=True)
        )
        a, b = alpha or 0.0, beta or 0.0
        self.clip, self.gap = clip, float("inf")
        self.kinks: list[float] = [] if clip is None else [-clip, clip]
        if name.lower() in ("relu", "leakyrelu") or (name.lower() == "elu" and a != 1):
            self.kinks.append(0.0)
        if name.lower() == "thresholdedrelu":
            self.kinks.append(a)
        if name.lower() == "hardsigmoid" and a:
            self.kinks += [-b / a, (1 - b) / a]
        self.function: Callable[[torch.Tensor], torch.Tensor] = {
            "sigmoid": torch.sigmoid,
            "tanh": torch.tanh,
            "relu": torch.relu,
            "affine": lambda x: a * x + b,
            "leakyrelu": lambda x: torch.where(x >= 0, x, a * x),
            "thresholdedrelu": lambda x: torch.where(x > a, x, 0 * x),
            "scaledtanh": lambda x: a * torch.tanh(b * x),
            "hardsigmoid": lambda x: (a * x + b).clamp(0, 1),
            "elu": lambda x: torch.where(x >= 0, x, a * (torch.exp(x) - 1)),
            "softsign": lambda x: x / (1 + x.abs()),
            "softplus": lambda x: torch.log(1 + torch.exp(x)),
        }[name.lower()]

    def __call__(self, x: torch.Tensor, *, clip: bool = True) -> torch.Tensor:
        kinks = self.kinks if clip or self.clip is None else self.kinks[2:]
        for kink in kinks:
            self.gap = min(self.gap, float((x.detach() - kink).abs().min()))
        if clip and self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return self.function(x)


class Recurrent:
    """One node by its formulas, with the inputs of these names; ``used`` are indices of outputs.

    ``actual``, the first output of a kernel that rounds: values are its own, gradients exact.
    """

    def __init__(self, op, attrs, names, used, actual=None):
        self.op, self.attrs, self.names, self.used = op, attrs, names, used
        self.actual = actual
        self.gap = float("inf")

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(self.names, given, strict=True))
        direction = self.attrs.get("direction", "forward")
        y, *finals = zip(*self._directions(values, direction), strict=True)
        outputs = [torch.stack(y, 1), *(torch.stack(each) for each in finals)]
        return [outputs[index] for index in self.used]

    def _directions(self, values: Tensors, direction: str) -> Iterator[list[torch.Tensor]]:
        x, hidden = values["x"], values["r"].shape[2]
        steps, batch = x.shape[:2]
        count = values["w"].shape[0]
        functions = self._functions(count)
        lengths = values.get("lengths", torch.full((batch,), steps)).tolist()
        for d in range(count):
            own = {name: value[d] for name, value in values.items() if name not in ("x", "lengths")}
            rows, finals = [], []
            for b in range(batch):
                order = range(lengths[b])
                if d == 1 or direction == "reverse":
                    order = range(lengths[b] - 1, -1, -1)
                zero = torch.zeros(hidden, dtype=x.dtype)
                h = own["h0"][b] if "h0" in own else zero
                c = own["c0"][b] if "c0" in own else zero
                states = {}
                for t in order:
                    h, c = self._step(x[t, b], h, c, own, functions[d])
                    if self.actual is not None:
                        h = h + (self.actual[t, d, b] - h).detach()
                    states[t] = h
                rows.append(torch.stack([states.get(t, zero) for t in range(steps)]))
                finals.append((h, c) if lengths[b] else (zero, zero))
            yield [torch.stack(rows, 1), *(torch.stack(each) for each in zip(*finals, strict=True))]
            self.gap = min(self.gap, *(function.gap for function in functions[d]))

    def _functions(self, count: int) -> list[list[Function]]:
        size = len(DEFAULTS[self.op])
        names = self.attrs.get("activations", DEFAULTS[self.op] * count)
        alphas = list(self.attrs.get("activation_alpha", []))
        betas = list(self.attrs.get("activation_beta", []))
        clip = self.attrs.get("clip")
        if self.op == "RNN":  # its kernel takes parameters by direction
            zeros = [0.0] * count
            return [
                [Function(name, [a], [b], clip)]
                for name, a, b in zip(names, alphas or zeros, betas or zeros, strict=True)
            ]
        functions = [Function(name, alphas, betas, clip) for name in names]
        return [functions[at : at + size] for at in range(0, len(functions), size)]

    def _step(self, x, h, c, own, functions):
        gates = GATES[self.op]
        zero = torch.zeros(2 * gates * h.shape[0], dtype=x.dtype)
        wb, rb = own.get("b", zero).chunk(2)
        of_x = (own["w"] @ x + wb).chunk(gates)
        of_h = (own["r"] @ h + rb).chunk(gates)
        f, *others = functions
        if self.op == "RNN":
            return f(of_x[0] + of_h[0]), c
        if self.op == "GRU":
            z, r = f(of_x[0] + of_h[0]), f(of_x[1] + of_h[1])
            if self.attrs.get("linear_before_reset"):
                n = others[0](of_x[2] + r * of_h[2])
            else:
                rh, rbh = own["r"].chunk(3)[2], rb.chunk(3)[2]
                n = others[0](of_x[2] + rh @ (r * h) + rbh)
            return (1 - z) * n + z * h, c
        g, k = others
        pi, po, pf = own.get("p", torch.zeros(3 * h.shape[0], dtype=x.dtype)).chunk(3)
        i = f(of_x[0] + of_h[0] + pi * c)
        forget = 1 - i if self.attrs.get("input_forget") else f(of_x[2] + of_h[2] + pf * c)
        new = forget * c + i * g(of_x[3] + of_h[3])
        return f(of_x[1] + of_h[1] + po * new) * k(new, clip=False), new


# The same by PyTorch's modules.

_ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}  # where ONNX gates are in PyTorch


def module(op, names, used, *, nonlinearity=None):
    """One node as torch.nn.RNN, GRU or LSTM; forward or bidirectional."""

    def call(*given: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(names, given, strict=True))
        count, _, inputs = values["w"].shape
        hidden = values["r"].shape[2]
        options = {"nonlinearity": nonlinearity} if nonlinearity else {}
        network = getattr(torch.nn, op)(
            inputs, hidden, bidirectional=count == 2, bias="b" in values, **options
        ).double()
        weights = {}
        for d in range(count):
            suffix = "_l0_reverse" if d else "_l0"
            weights[f"weight_ih{suffix}"] = _to_pytorch(op, values["w"][d])
            weights[f"weight_hh{suffix}"] = _to_pytorch(op, values["r"][d])
            if "b" in values:
                wb, rb = values["b"][d].chunk(2)
                weights[f"bias_ih{suffix}"] = _to_pytorch(op, wb)
                weights[f"bias_hh{suffix}"] = _to_pytorch(op, rb)
        steps, batch = values["x"].shape[:2]
        zero = torch.zeros(count, batch, hidden, dtype=values["x"].dtype)
        state: Any = values.get("h0", zero)
        if op == "LSTM":
            state = (state, values.get("c0", zero))
        x: Any = values["x"]
        if "lengths" in values:
            lengths = values["lengths"].to(torch.int64)
            x = packing.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, last = torch.func.functional_call(network, weights, (x, state))
        if "lengths" in values:
            y, _ = packing.pad_packed_sequence(y, total_length=steps)
        y = y.reshape(steps, batch, count, hidden).transpose(1, 2)
        outputs = [y, *(last if op == "LSTM" else (last,))]
        return [outputs[index] for index in used]

    return call


def onnx_weights(network: torch.nn.RNNBase) -> list[torch.Tensor]:
    """W, R and B of a layer of PyTorch as an ONNX node has them."""
    slots = network.state_dict()
    suffixes = ["_l0", "_l0_reverse"][: 1 + network.bidirectional]

    op = network.mode.partition("_")[0]

    def stacked(*stems: str) -> torch.Tensor:
        rows = ([_to_onnx(op, slots[stem + suffix]) for stem in stems] for suffix in suffixes)
        return torch.stack([torch.cat(row) for row in rows])

    return [stacked("weight_ih"), stacked("weight_hh"), stacked("bias_ih", "bias_hh")]


def _to_onnx(op: str, value: torch.Tensor) -> torch.Tensor:
    parts = value.chunk(GATES[op])
    return torch.cat([parts[gate] for gate in _ORDER[op]])


def _to_pytorch(op: str, value: torch.Tensor) -> torch.Tensor:
    parts = value.chunk(GATES[op])
    return torch.cat([parts[_ORDER[op].index(gate)] for gate in range(GATES[op])])
