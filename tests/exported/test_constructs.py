"""Single things that people write in PyTorch: what both exporters make of them has a gradient.

Each is put behind a linear layer, whose gradient is held to PyTorch's in float64.
"""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odtpack.build import build_package
from odtpack.cli._twin import Twin, compared
from odtpack_runtime import Module
from odtpack_runtime.package.package import Package
from tests.exported.export import export
from tests.packaging_tools import built_training
from tests.sweep import split_rows

Construct = Callable[[Tensor], Tensor]
PADDED = (torch.arange(6) < 4).float()[:, None]
PLACES = (torch.arange(6) % 3)[None, :, None]

# On [N, 6, 4], N at run time.
CONSTRUCTS: dict[str, Construct] = {
    "stack": lambda x: torch.stack([x, 2 * x], dim=1).sum(1),
    "split and cat": lambda x: torch.cat([part * k for k, part in enumerate(x.split(2, 1))], 1),
    "chunk": lambda x: x.chunk(2, dim=1)[1] * x.chunk(2, dim=1)[0],
    "flip": lambda x: x.flip(1) * x,
    "roll": lambda x: x.roll(2, dims=1) * x,
    "repeat": lambda x: x.repeat(1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "expand": lambda x: x.mean(0, keepdim=True).expand(x.shape[0], -1, -1) * x,
    "strided slice": lambda x: x[:, 1::2, :-1],
    "masked fill": lambda x: x.masked_fill(torch.arange(4) > 2, float("-inf")).softmax(-1),
    "where": lambda x: torch.where(x > 0.1, x * x, -x),
    "clamp": lambda x: x.clamp(-0.5, 0.5) * x,
    "cumsum": lambda x: x.cumsum(1),
    "einsum": lambda x: torch.einsum("nij,nkj->nik", x, x),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "outer product by broadcast": lambda x: x[:, :, None, :] * x[:, None, :, :],
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine similarity": lambda x: F.cosine_similarity(x[:, :3], x[:, 3:], dim=-1),
    "norm": lambda x: x.norm(dim=-1),
    "var": lambda x: x.var(dim=-1),
    "std": lambda x: x.std(dim=1, unbiased=False),
    "scatter amax": lambda x: x.scatter_reduce(1, PLACES.expand(x.shape[0], -1, 4), x, "amax"),
    "scatter sum": lambda x: x.scatter_reduce(1, PLACES.expand(x.shape[0], -1, 4), x, "sum").var(1),
    "std of zeros": lambda x: (x * PADDED).std(-1),
    "norm of zeros": lambda x: (x * PADDED).norm(p=3, dim=-1),
    "norm of a half of zeros": lambda x: (x * PADDED).norm(p=0.5, dim=-1),
    "cosine similarity of zeros": lambda x: F.cosine_similarity(x * PADDED, x[:, :1], dim=-1),
    "pairwise distance of zeros": lambda x: F.pairwise_distance(x * PADDED, (x * PADDED)[:, :1]),
    "distances to itself": lambda x: torch.cdist(x, x),
    "logsumexp": lambda x: x.logsumexp(dim=-1),
    "log sigmoid": lambda x: F.logsigmoid(200 * x),
    "log softmax": lambda x: F.log_softmax(x, dim=1),
    "max over an axis": lambda x: x.max(dim=1).values,
    "amin": lambda x: x.amin(dim=(1, 2)),
    "layer norm without scale": lambda x: F.layer_norm(x, (6, 4)),
    "rms norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "group norm": lambda x: F.group_norm(x, 3),
    "instance norm": F.instance_norm,
    "glu": lambda x: F.glu(x, dim=1),
    "mish": F.mish,
    "selu": F.selu,
    "hard tanh": lambda x: F.hardtanh(x, -0.7, 0.7),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "dropout that is off": lambda x: F.dropout(x, 0.5, training=False) * x,
    "pixel shuffle": lambda x: F.pixel_shuffle(x[:, :4, None, :], 2),
    "pad": lambda x: F.pad(x, (1, 2), value=0.5),
    "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "average pool": lambda x: F.avg_pool1d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x, 2),
    "max pool": lambda x: F.max_pool1d(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bicubic": lambda x: F.interpolate(x[:, None], scale_factor=2, mode="bicubic"),
    "interpolate to a size": lambda x: F.interpolate(x[:, None], size=(9, 7), mode="bilinear"),
    "bicubic to a size": lambda x: F.interpolate(x[:, None], size=(4, 9), mode="bicubic"),
    "nearest to a size": lambda x: F.interpolate(x, size=9),
    "list of indices": lambda x: x[:, [0, 2, 2]] * 2,
    "two lists of indices": lambda x: x[:, [0, 2, 2], [1, 3, 3]],
    "padding of a dilated kernel": lambda x: F.conv2d(
        x[:, None], torch.arange(6).view(1, 1, 2, 3).to(x), padding="same", dilation=(3, 2)
    ),
    "unfold": lambda x: x.unfold(1, 3, 1).sum(-1),
    "positions": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "rotary": lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1) * torch.cos(x),
    "view to heads": lambda x: x.view(x.size(0), 3, -1).transpose(1, 2).reshape(x.size(0), -1),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 2, 4, dtype=torch.int64) + 3),
    "one hot": lambda x: F.one_hot(torch.arange(6) % 3, 3).to(x.dtype).T @ x,
    "attention": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0],
    "half and back": lambda x: (x * 2).double().float() * x,
}


def agree(net: Callable[..., Tensor], module: Module, x: Tensor, target: Tensor) -> None:
    """On the loss; afterwards both have its gradients."""
    loss = F.mse_loss(net(x), target)
    loss.backward()
    assert float(module(x.numpy(), target.numpy())) == pytest.approx(loss.item(), rel=1e-5)


class Net(nn.Module):
    def __init__(self, construct: Construct, flat: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.construct, self.flat = construct, flat

    def forward(self, x: Tensor) -> Tensor:
        y = self.construct(self.layer(x))
        return y.reshape(y.shape[0], -1) if self.flat else y


# Exported as operators that the others have, too.
ALIKE = {
    *("chunk", "bmm", "outer product by broadcast", "std", "instance norm", "hard tanh", "glu"),
    *("dropout that is off", "adaptive pool", "nearest", "normalize", "strided slice", "flip"),
    *("view to heads", "half and back", "repeat"),
}

# The newer exporter takes its time, and writes most of them as the older one does.
WRITTEN_OTHERWISE = {
    *("attention", "bicubic to a size", "interpolate to a size", "list of indices", "masked fill"),
    *("norm of a half of zeros", "norm of zeros", "one hot", "positions", "roll", "std of zeros"),
    *("two lists of indices", "unfold", "where"),
}


@pytest.mark.parametrize(
    ("name", "exporter"),
    split_rows(
        [(name, "torchscript") for name in CONSTRUCTS]
        + [(name, "dynamo") for name in CONSTRUCTS if name in WRITTEN_OTHERWISE],
        lambda name, _: name not in ALIKE,
    ),
)
def test_gradient(name, exporter, tmp_path):
    torch.manual_seed(4)
    net, x = Net(CONSTRUCTS[name]).eval(), torch.randn(3, 6, 4)
    model = export(net, {"x": x}, tmp_path / "model.onnx", exporter, dynamic={"x": {0: "batch"}})
    state, module, _ = built_training(model, tmp_path / "package", loss="mse")
    predicted = net.double()(x.double())
    target = torch.linspace(-1, 1, predicted.numel()).reshape(predicted.shape).float()
    loss = F.mse_loss(predicted, target.double())
    loss.backward()
    assert float(module(x.numpy(), target.numpy())) == pytest.approx(loss.item(), rel=1e-5)
    weight, bias = (parameter.grad.numpy() for parameter in net.parameters())
    expected = {"layer.weight": weight, "layer.bias": bias}
    grads = {name: parameter.grad for name, parameter in state.parameters}
    assert len(grads) == 2
    for found, grad in grads.items():
        # Where the name is another, the exporter folded the transpose.
        wanted = expected.get(found, weight.T)
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-6, err_msg=found)


class Extremes(nn.Module):
    """The first of equal elements has the whole gradient, but that of amax is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 2.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        low = y.min(1, keepdim=True).values
        return torch.cat([y.max(-1).values, y.amax(-1) ** 2, low.flatten(1) ** 3], 1)


def test_equal_elements(tmp_path):
    net = Extremes()
    x = torch.tensor([[[1.0, 1, 0], [2, 0, 2]], [[3, 3, 3], [1, 2, 2]], [[-1, 0, 1], [-1, 0, 1]]])
    model = export(net, {"x": x}, tmp_path / "model.onnx", "dynamo", dynamic={"x": {0: "batch"}})
    state, module, _ = built_training(model, tmp_path / "package", loss="mse", train=["scale"])
    agree(net, module, x, torch.zeros(3, 7))
    ((_, scale),) = state.parameters
    np.testing.assert_allclose(scale.grad, net.scale.grad.numpy(), rtol=1e-5)


class Recurrent(nn.Module):
    """A loop over times, as it is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hidden, self.outer = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros([x.shape[0], 6])
        for t in range(x.shape[1]):
            h = torch.tanh(self.inner(x[:, t]) + self.hidden(h))
        return self.outer(h)


class Unbound(Recurrent):
    """The same over the parts of a list."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros([x.shape[0], 6])
        for part in x.unbind(1):
            h = torch.tanh(self.inner(part) + self.hidden(h))
        return self.outer(h)


@pytest.mark.parametrize("module", [Recurrent, Unbound])
@pytest.mark.parametrize("axes", [{0: "batch"}, {0: "batch", 1: "time"}])
def test_a_scripted_loop(module, axes, tmp_path):
    """The exporter gives the batch of the output another name, and uses it in the body."""
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(module())
    feeds = {"x": torch.randn(4, 5, 3)}
    model = export(net, feeds, tmp_path / "model.onnx", "torchscript", dynamic={"x": axes})
    state, training, _ = built_training(model, tmp_path / "package", loss="mse")
    agree(net, training, torch.randn(7, 8 if 1 in axes else 5, 3), torch.ones(7, 2))
    expected = {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}
    for name, parameter in state.parameters:
        # Of the names that the exporter makes up each is of a transposed weight.
        wanted = [expected[name]] if name in expected else [g.T for g in expected.values()]
        assert any(
            g.shape == parameter.grad.shape and np.allclose(parameter.grad, g, rtol=1e-4, atol=1e-6)
            for g in wanted
        )


def test_a_square_weight_may_be_stored_transposed(tmp_path):
    """Its shape does not show it: ``compare-gradients`` goes by the values."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    x, target = torch.randn(3, 6, 4), torch.zeros(3, 6, 4)
    model = export(net, {"x": x}, tmp_path / "model.onnx", "torchscript")
    build_package(model, tmp_path / "package", loss="mse")
    loss = F.mse_loss(net(x), target)
    loss.backward()
    batch = {"x": x.numpy(), "target": target.numpy()}
    twin = Twin(dict(net.named_parameters()), {}, loss.item(), batch, {}, ())
    package = Package.open(tmp_path / "package")
    assert sorted(compared(package, twin)["equal"]) == ["0.bias", "0.weight"]
    grad = net[0].weight.grad
    assert grad is not None
    grad.copy_(grad.T.clone())
    (wrong,) = compared(package, twin)["different"]
    assert wrong["name"] == "0.weight"
    assert "differ already" not in wrong["why"]


# Sizes that PyTorch's older exporter gives names of its own, one name for two of them in "reflect".
SIZES: dict[str, tuple[Construct, tuple[int, int]]] = {
    "heads": (lambda x: x.view(x.shape[0], -1, 2, 2).transpose(1, 2).flatten(2), (2, 12)),
    "flat": (lambda x: x.view(x.shape[0], x.shape[1], 2, 2).flatten(2), (6, 4)),
    "reflect": (lambda x: F.hardswish(F.pad(x, (1, 1), mode="reflect")), (6, 6)),
    "unfold": (lambda x: F.unfold(x[:, :, None], (1, 3), padding=(0, 1))[:, :5], (5, 4)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1)[..., :3], (12, 3)),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_target_has_the_sizes_of_the_prediction(name, tmp_path):
    """Those that follow from the model; a budget of memory is planned with them."""

    net, x = Net(SIZES[name][0], flat=False).eval(), {"x": torch.randn(3, 6, 4)}
    model = export(net, x, tmp_path / "model.onnx", "torchscript", dynamic={"x": {0: "batch"}})
    manifest = build_package(model, tmp_path / "package", loss="mse", memory_budget="60 MB")
    assert manifest.inputs[-1].shape == ("batch", *SIZES[name][1])
