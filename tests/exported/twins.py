"""Ten steps of PyTorch in float64, and which of its parameters an exported initializer is."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from odtpack.optimizers import AdamW
from tests.exported.subjects import TORCH_LOSSES

STEPS = 10
# Adam divides by the root of the second moment: with an epsilon of 1e-6 an element whose gradient
# is nothing but rounding (the bias of an attention's keys) would run at full speed anywhere.
EPSILON = 1e-3
ADAM_RATE = 0.01

View = Callable[[], np.ndarray]


@dataclasses.dataclass
class Run:
    """Loss of every step, every parameter after every step, and how near a kink it came."""

    losses: list[float]
    values: list[dict[str, np.ndarray]]
    margin: float


def make(subject, seed, *, fresh=False):
    """The module, its batch and the target.

    Unless it is fresh, no two parameters are equal, as after training: exporters store them as one.
    """
    torch.manual_seed(seed)
    module = subject.build()
    with torch.no_grad():
        for parameter in () if fresh else module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in () if fresh else module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.mul_(1 + 0.2 * torch.rand_like(buffer))
    data = subject.inputs()
    return module, data, subject.target(data) if subject.target else None


def folded(module: nn.Module) -> nn.Module:
    """A copy with every batch normalization folded into the convolution before it."""
    module = copy.deepcopy(module).eval()
    for parent in list(module.modules()):
        if isinstance(parent, nn.Sequential):
            for i, layer in enumerate(parent):
                if isinstance(layer, nn.BatchNorm2d):
                    parent[i - 1] = fuse_conv_bn_eval(parent[i - 1], layer)
                    parent[i] = nn.Identity()
    return module.requires_grad_()


def frozen_norms(module: nn.Module) -> nn.Module:
    """The module in training mode but for its batch normalizations."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return module


def train(module, data, target, subject, optimizer):
    """Train a module in place and in float64."""
    module.double()
    margin = KinkMargin(module)
    inputs = [t.double() if t.is_floating_point() else t for t in data.values()]
    if target is not None and target.is_floating_point():
        target = target.double()
    method = AdamW(epsilon=EPSILON)
    stepper: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=subject.rate)
    if optimizer == "adamw":
        betas = (method.beta1, method.beta2)
        stepper = torch.optim.AdamW(module.parameters(), ADAM_RATE, betas, weight_decay=0)
    run = Run([], [], math.inf)
    for step in range(1, STEPS + 1):
        # PyTorch adds epsilon to the root of the unbiased moment, we to that of the moment.
        for group in stepper.param_groups:
            group["eps"] = method.epsilon / math.sqrt(1 - method.beta2**step)
        stepper.zero_grad()
        output = module(*inputs)
        loss = output if subject.loss is None else TORCH_LOSSES[subject.loss](output, target)
        loss.backward()
        run.losses.append(loss.item())
        stepper.step()
        run.values.append({name: view().copy() for name, view in views(module).items()})
    run.margin = margin.value
    return run


def views(module: nn.Module) -> dict[str, View]:
    """What an exporter may store of a module: its tensors, and what it computes from them."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    found: dict[str, View] = {}
    for name, tensor in tensors.items():
        if name.endswith("num_batches_tracked"):
            continue
        found[name] = lambda tensor=tensor: tensor.detach().numpy()
        if tensor.dim() == 2:
            found[f"{name}.T"] = lambda tensor=tensor: tensor.detach().numpy().T
    for path, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            found |= {f"{path}.{name}": view for name, view in _recurrent(layer).items()}
    return found


# Gates as ONNX orders them, by their place in PyTorch's order.
_GATES = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


def _recurrent(layer: nn.RNNBase) -> dict[str, View]:
    """W, R and B of the ONNX operators GRU and LSTM, of a network of one layer."""

    def ordered(name: str) -> np.ndarray:
        parts = np.split(getattr(layer, name).detach().numpy(), len(_GATES[layer.mode]))
        return np.concatenate([parts[place] for place in _GATES[layer.mode]])

    ends = ["_l0", "_l0_reverse"] if layer.bidirectional else ["_l0"]
    return {
        "W": lambda: np.stack([ordered(f"weight_ih{end}") for end in ends]),
        "R": lambda: np.stack([ordered(f"weight_hh{end}") for end in ends]),
        "B": lambda: np.stack(
            [np.concatenate([ordered(f"bias_ih{end}"), ordered(f"bias_hh{end}")]) for end in ends]
        ),
    }


def pair(module: nn.Module, initial: Mapping[str, np.ndarray]) -> dict[str, str]:
    """View of the module that each exported initializer is: by name, else by its values."""
    known = {name: view() for name, view in views(module).items()}
    pairs = {}
    for name, array in initial.items():
        same = [
            other
            for other, value in known.items()
            # Rounding, where the exporter folded a normalization into a weight.
            if value.shape == array.shape and np.allclose(value, array, rtol=1e-5, atol=1e-6)
        ]
        assert same, f"{name} is none of the module's tensors"
        pairs[name] = name if name in same else same[0]
    return pairs


def parameters_of(module: nn.Module, pairs: Iterable[str]) -> set[str]:
    """Names of the parameters that views show, to be compared with those of the module."""
    names = set()
    for view in pairs:
        names.add(view.removesuffix(".T"))
        path, _, part = view.rpartition(".")
        if part in ("W", "R", "B"):
            names.discard(view)
            start = {"W": "weight_ih", "R": "weight_hh", "B": "bias"}[part]
            layer = module.get_submodule(path)
            names |= {f"{path}.{n}" for n, _ in layer.named_parameters() if n.startswith(start)}
    return names


_KINKS = {
    nn.ReLU: (0.0,), nn.LeakyReLU: (0.0,), nn.Hardswish: (-3.0, 3.0), nn.Hardsigmoid: (-3.0, 3.0),
}  # fmt: skip


class KinkMargin:
    """Least distance of what layers read from their kinks, over all calls: see training.settled."""

    def __init__(self, module: nn.Module) -> None:
        self.value = math.inf
        for layer in module.modules():
            if type(layer) in _KINKS:
                layer.register_forward_pre_hook(self._look)

    def _look(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for kink in _KINKS[type(layer)]:
            self.value = min(self.value, (inputs[0].detach() - kink).abs().min().item())
