"""RNN, GRU and LSTM: directions, optional inputs and outputs, lengths, functions, clip.

"nn" cases are compared with PyTorch's modules and with differences of the ONNX reference; the
others with ``recurrent_oracle``: the reference ignores lengths, functions, clip and input_forget.
"""

import itertools
from typing import Any

import numpy as np
import torch

from tests.autodiff.oracle import Array, Case, normal
from tests.autodiff.recurrent_oracle import GATES, INPUTS, Recurrent, module

T, B, I, H = 4, 3, 2, 3  # noqa: E741 - steps, batch, inputs, hidden units
OUTPUTS = {"RNN": 2, "GRU": 2, "LSTM": 3}
EVERY = (12, 14, 22, 24)
GAP = 1e-3  # of the inputs of a gate to a kink


def arrays(op, names, *, two=False, seed=0, scale=1.0, steps=T, lengths=(3, 4, 1)):
    """Inputs of a node: x, w and r, and those in ``names`` (of b, lengths, h0, c0, p)."""
    d, g = 1 + two, GATES[op]
    shapes = {
        "x": (steps, B, I), "w": (d, g * H, I), "r": (d, g * H, H), "b": (d, 2 * g * H),
        "h0": (d, B, H), "c0": (d, B, H), "p": (d, 3 * H),
    }  # fmt: skip
    wanted = ["x", "w", "r", *names.split()]
    result: dict[str, Array | None] = {
        name: normal(*shape, seed=seed + 10 * at, scale=scale if name != "r" else 0.6)
        for at, (name, shape) in enumerate(shapes.items())
        if name in wanted
    }
    if "lengths" in wanted:
        result["lengths"] = np.array(lengths, np.int32)
    last = max(INPUTS.index(name) for name in result)
    return {name: result.get(name) for name in INPUTS[: last + 1]}


def recurrent(op: str, names: str = "", opset: int = 17, **options: Any) -> Case:
    """A case with the first seed for which no gate comes near a kink."""
    fields = {
        key: options.pop(key) for key in ("used", "absent", "symbols", "wrt") if key in options
    }
    nn, label = options.pop("nn", False), options.pop("label", "")
    sizes = {key: options.pop(key) for key in ("scale", "steps", "lengths") if key in options}
    two = options.get("direction") == "bidirectional"
    absent = fields.get("absent", ())
    used = fields.setdefault("used", [i for i in range(OUTPUTS[op]) if i not in absent])
    for seed in range(100):
        inputs = arrays(op, names, two=two, seed=100 * seed, **sizes)
        present = {name: array for name, array in inputs.items() if array is not None}
        function: Any = Recurrent(op, options, list(present), used)
        if not {"clip", "activations"} & set(options):
            break  # without either, no gate has a kink
        with torch.no_grad():
            function(*(torch.tensor(array, dtype=torch.float64 if array.dtype == np.float32
                                    else torch.int32) for array in present.values()))  # fmt: skip
        if function.gap > GAP:
            break
    else:
        raise AssertionError(f"every seed comes near a kink: {op} {options}")
    if nn:
        relu = options.get("activations", ["Tanh"])[0] == "Relu"
        nonlinearity = ("relu" if relu else "tanh") if op == "RNN" else None
        function = module(op, list(present), used, nonlinearity=nonlinearity)
    plain = nn and "lengths" not in present and "activations" not in options
    outputs = max(set(range(OUTPUTS[op])) - set(absent)) + 1
    return Case(
        op, inputs, function, opset, {"hidden_size": H, **options}, outputs=outputs,
        differences="onnx" if plain and not absent else "torch",
        label="-".join(filter(None, [
            "nn" if nn else "", options.get("direction", ""), names.replace(" ", "-"), label,
        ])), **fields,
    )  # fmt: skip


DIRECTIONS = ("forward", "reverse", "bidirectional")
OPTIONAL = {"RNN": "b lengths h0", "GRU": "b lengths h0", "LSTM": "b lengths h0 c0 p"}
OPERATORS = tuple(GATES)
SYMBOLS = {
    "steps": {"x": {0: "steps"}},
    "batch": {"x": {1: "batch"}, "lengths": {0: "batch"}, "h0": {1: "batch"}, "c0": {1: "batch"}},
}
SYMBOLS["both"] = {**SYMBOLS["batch"], "x": {0: "steps", 1: "batch"}}


def subsets(names: str) -> list[str]:
    """Every choice of the names."""
    words = names.split()
    return [
        " ".join(chosen)
        for count in range(len(words) + 1)
        for chosen in itertools.combinations(words, count)
    ]


def output_choices(op: str) -> list[dict[str, Any]]:
    """Which outputs a node has, and which of them the loss depends on."""
    states = itertools.product(("absent", "unused", "used"), repeat=OUTPUTS[op])
    return [
        {
            "absent": [i for i, state in enumerate(choice) if state == "absent"],
            "used": [i for i, state in enumerate(choice) if state == "used"],
            "label": "-".join(choice),
        }
        for choice in states
        if "used" in choice
    ]


CURVES: list[tuple[str, float | None, float | None]] = [
    ("Affine", 0.7, 0.1), ("Relu", None, None), ("LeakyRelu", 0.2, None),
    ("ThresholdedRelu", 0.3, None), ("Tanh", None, None), ("ScaledTanh", 1.2, 0.6),
    ("Sigmoid", None, None), ("HardSigmoid", 0.3, 0.4), ("Elu", 0.8, None),
    ("Softsign", None, None), ("Softplus", None, None),
]  # fmt: skip


def parameters(*curves: tuple[str, float | None, float | None]) -> dict[str, Any]:
    """Attributes of these functions, parameters for those that take one."""
    lists = {
        "activations": [name for name, _, _ in curves],
        "activation_alpha": [alpha for _, alpha, _ in curves if alpha is not None],
        "activation_beta": [beta for _, _, beta in curves if beta is not None],
    }
    return {key: given for key, given in lists.items() if given}


def with_function(op: str, at: int) -> list[Case]:
    """A case for each function in one place, for RNN also by direction."""
    result = []
    for curve in CURVES:
        name, alpha, beta = curve
        if op == "RNN":
            attrs = {"activations": [name]}
            attrs |= {"activation_alpha": [alpha]} if alpha is not None else {}
            attrs |= {"activation_beta": [beta]} if beta is not None else {}
        else:
            own = [("Sigmoid", None, None), ("Tanh", None, None), ("Tanh", None, None)]
            own = own[: OUTPUTS[op] if op == "LSTM" else 2]
            own[at] = curve
            attrs = parameters(*own)
        result.append(recurrent(op, "b", label=f"{name}-{at}", scale=0.5, **attrs))
    return result


CASES: list[Case] = [
    # Every choice of optional inputs, in both directions at once; the least and the most in one
    *(
        recurrent(op, names, direction=direction, **attrs)
        for op, attrs in (
            *((op, {}) for op in OPERATORS),
            ("GRU", {"linear_before_reset": 1, "label": "linear"}),
        )
        for direction in DIRECTIONS
        for names in (subsets(OPTIONAL[op]) if direction == "bidirectional"
                      else ("", OPTIONAL[op]))
    ),
    # PyTorch's modules: what exporters write
    *(
        recurrent(op, f"b {names}".strip(), opset, nn=True, direction=direction,
                  **({"linear_before_reset": 1} if op == "GRU" else {}))
        for op in OPERATORS
        for direction in ("forward", "bidirectional")
        for names in ("", "h0 c0" if op == "LSTM" else "h0", "lengths")
        for opset in EVERY
    ),
    recurrent("RNN", "b h0", nn=True, activations=["Relu"], label="relu"),
    # Outputs
    *(recurrent(op, "b", **choice) for op in OPERATORS for choice in output_choices(op)),
    *(
        recurrent(op, f"b lengths h0 {'c0' if op == 'LSTM' else ''}".strip(),
                  direction="bidirectional", **choice)
        for op in OPERATORS
        for choice in output_choices(op)
    ),
    # Sizes that are known only when the model runs
    *(
        recurrent(op, names, opset, direction=direction, symbols=symbols, label=label)
        for op in OPERATORS
        for direction in DIRECTIONS
        for names, opset in (("b", 12), (OPTIONAL[op], 17))
        for label, symbols in SYMBOLS.items()
    ),
    *(recurrent(op, names, steps=1, direction=direction, lengths=(1, 1, 1), label="one-step")
      for op in OPERATORS for direction in DIRECTIONS for names in ("b", OPTIONAL[op])),
    # A sequence without any step; RNN's kernel reads outside of its output for one
    *(
        recurrent(op, OPTIONAL[op], direction=direction, lengths=lengths, label=f"empty{at}")
        for op in ("GRU", "LSTM")
        for direction in DIRECTIONS
        for at, lengths in enumerate([(0, 4, 2), (2, 0, 1)])
    ),
    # Some inputs only
    *(
        recurrent(op, OPTIONAL[op], wrt=[name], label=f"only-{name}")
        for op in OPERATORS
        for name in ("x", "w", "r", *OPTIONAL[op].split())
        if name != "lengths"
    ),
    # Functions of the gates, in each place
    *with_function("RNN", 0),
    *with_function("GRU", 0),
    *with_function("GRU", 1),
    *with_function("LSTM", 0),
    *with_function("LSTM", 1),
    *with_function("LSTM", 2),
    *(
        recurrent(op, "b", label="spelling",
                  activations=["sigmoid", "TANH", "softSign"][: 2 if op == "GRU" else 3])
        for op in ("GRU", "LSTM")
    ),
    recurrent("RNN", "b", direction="bidirectional", activations=["LeakyRelu", "Affine"],
              activation_alpha=[0.3, 0.6], activation_beta=[0.2, 0.2], label="by-direction"),
    recurrent("RNN", "b", direction="bidirectional", activations=["Tanh", "LeakyRelu"],
              activation_alpha=[0.3, 0.3], label="second-direction"),
    recurrent("GRU", "b", direction="bidirectional", label="by-direction",
              **parameters(CURVES[7], CURVES[0], CURVES[2], CURVES[5])),
    recurrent("LSTM", "b", direction="bidirectional", label="by-direction",
              **parameters(*CURVES[4:7], *CURVES[5:8])),
    *(
        recurrent(op, "b", label=f"default-{name}", scale=0.5,
                  activations=[name, "Tanh", "Tanh"][:count])
        for op, count in (("GRU", 2), ("LSTM", 3))
        for name in ("HardSigmoid", "LeakyRelu", "Elu", "ThresholdedRelu", "Affine")
    ),
    # Clip and coupled gates
    *(
        recurrent(op, names, clip=clip, direction=direction, label=f"clip{clip}")
        for op in OPERATORS
        for direction in ("forward", "bidirectional")
        for names in ("", "b", OPTIONAL[op])
        for clip in (0.4, 1.5)
    ),
    recurrent("GRU", "b h0", clip=0.4, linear_before_reset=1, label="linear-clip"),
    recurrent("RNN", "b", clip=0.4, activations=["Softplus"], label="softplus-clip"),
    *(
        recurrent("LSTM", names, input_forget=1, direction=direction, label="coupled")
        for direction in DIRECTIONS
        for names in ("b", "p", "b h0 c0", "b lengths h0 c0 p")
    ),
    recurrent("LSTM", "b p", input_forget=1, clip=0.7, label="coupled-clip"),
    # Saturated
    *(
        recurrent(op, OPTIONAL[op], scale=60.0, direction="bidirectional", label="saturated")
        for op in OPERATORS
    ),
    recurrent("GRU", "b h0", scale=60.0, linear_before_reset=1, label="linear-saturated"),
]  # fmt: skip
