"""What PyTorch keeps outside of the graph: each with the option that brings it back.

The oracle is PyTorch in float64: the loss after eight steps is its loss.
"""

import copy
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import odtpack
from odtpack import onnxblock
from odtpack.artifacts import generate_artifacts
from odtpack.build import build_package
from odtpack.cli._fit import open_module
from odtpack.errors import OdtpackError
from odtpack.fit.finalists import Surroundings, recipe_text
from odtpack.names_file import read_names
from odtpack.onnxblock import blocks
from odtpack.recipe import read_recipe
from odtpack.recipe.key import cache_key
from odtpack.spec import BuildSpec
from odtpack_runtime import CheckpointState, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.training import loop
from tests.exported.export import Exporter, export
from tests.onnxblock.nets import Train, run
from tests.packaging_tools import open_training
from tests.refused import refused
from tests.sweep import split_rows
from tests.torch_twins import losses_of

STEPS = 8
Feeds = Mapping[str, Tensor]


def follow(folder: Path, feeds: Feeds, rate: float = 0.5) -> list[float]:
    """Losses of eight steps of a package on one batch, and that of what came of them."""
    package = Package.open(folder)
    module = open_module(package, CheckpointState.load_checkpoint(package.checkpoint))
    optimizer = Optimizer(package.optimizer_model, module)
    optimizer.set_learning_rate(rate)
    fed = [feeds[name].numpy() for name in module.input_names()]
    losses: list[float] = []
    for _ in range(STEPS + 1):
        loop.train_step(module, optimizer, [fed], on_loss=losses.append, expected=len(fed[0]))
    return losses


def assert_follows(package, module, feeds, rate=0.5, rel=1e-5):
    """The losses of a package are those of its module, which computes its own loss."""
    theirs = pytorch(module, lambda twin: twin(*wide(feeds)), rate)
    assert follow(package, feeds, rate) == pytest.approx(theirs, rel=rel)


def pytorch(module, loss, rate=0.5, make=torch.optim.SGD):
    """The same in PyTorch."""
    module = copy.deepcopy(module).double()
    optimizer = make((p for p in module.parameters() if p.requires_grad), lr=rate)
    return losses_of(optimizer, lambda: loss(module), STEPS + 1)


def wide(feeds: Feeds) -> list[Tensor]:
    """The inputs in float64."""
    return [each.double() if each.is_floating_point() else each for each in feeds.values()]


class SimSiam(nn.Module):
    """Two views of a sample; the gradient passes one branch of each pair."""

    feeds = ("left", "right")

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.predictor = nn.Linear(8, 8)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.encoder(left), self.encoder(right)
        p, q = self.predictor(a), self.predictor(b)
        alike = F.cosine_similarity(p, b.detach()) + F.cosine_similarity(q, a.detach())
        return -alike.mean() / 2


class Rounded(nn.Module):
    """Rounding whose gradient is that of no rounding."""

    feeds = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = y + (torch.round(y * 4) / 4 - y).detach()
        return self.outer(y).square().mean()


class Teacher(nn.Module):
    """Two equal branches, of which one is stopped: exporters write one for both."""

    feeds = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        taught, teacher = torch.tanh(self.layer(x)), torch.tanh(self.layer(x))
        return (self.head(taught) - teacher.detach()).square().mean()


def with_both_branches(path: Path) -> None:
    """Write the teacher's branch, too, as an exporter does that merges nothing."""
    model = onnx.load(path)
    nodes = list(model.graph.node)
    for place, node in enumerate(nodes[:2]):  # Gemm, Tanh
        again = onnx.NodeProto()
        again.CopyFrom(node)
        again.name, again.output[0] = f"{node.name}_1", f"teacher_{place}"
        again.input[0] = "teacher_0" if place else node.input[0]
        model.graph.node.insert(2 + place, again)
    next(node for node in nodes if node.op_type == "Sub").input[1] = "teacher_1"
    onnx.save(model, path)


ENCODED = "/encoder/encoder.1"
STOPS: dict[str, tuple[type[nn.Module], Exporter, list[str]]] = {
    "siamese": (SimSiam, "torchscript",
                [f"{ENCODED}/Relu_output_0@/Mul_*", f"{ENCODED}_1/Relu_output_0@/Mul_*"]),
    "siamese-dynamo": (
        SimSiam, "dynamo",
        ["relu@linalg_vector_norm_3", "relu@div_2", "relu_1@linalg_vector_norm_1", "relu_1@div"]),
    "straight-through": (Rounded, "torchscript", ["/Sub_output_0"]),
    "equal-branches": (Teacher, "torchscript", ["teacher_1"]),
    "merged-branches": (Teacher, "dynamo", ["tanh@sub*"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_stop_gradient(name, tmp_path):
    make, exporter, stops = STOPS[name]
    torch.manual_seed(0)
    module = make().eval()
    feeds = {key: torch.randn(16, 6) for key in make.feeds}  # type: ignore[attr-defined]
    model = export(module, feeds, tmp_path / "model.onnx", exporter)
    if name == "equal-branches":
        with_both_branches(model)
    theirs = pytorch(module, lambda twin: twin(*wide(feeds)))
    built: dict[str, Any] = {"optimizer": "sgd"}
    for step_model in ("never", "always"):
        package = tmp_path / step_model
        build_package(model, package, stop_gradient=stops, step_model=step_model, **built)
        assert follow(package, feeds) == pytest.approx(theirs, rel=1e-5)
        assert b"stop/" not in (package / "eval_model.onnx").read_bytes()  # values keep names
    build_package(model, tmp_path / "erased", **built)
    erased = follow(tmp_path / "erased", feeds)
    assert erased[0] == pytest.approx(theirs[0], rel=1e-5)
    assert abs(erased[-1] - theirs[-1]) > 1e-3 * abs(theirs[-1])


class Bounded(nn.Module):
    """Parameters at the bounds of what they are clamped to."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together
        self.low, self.high = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.both = nn.Parameter(torch.tensor([0.0, 0.2, 0.3, 0.6, 0.9, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.low.clamp(min=0) + self.high.clamp(max=1)
        both = self.both.clamp(0, 1) if self.together else self.both.clamp(min=0).clamp(max=1)
        return (scaled * both - 2 * x.abs() - 2).square().mean()


class Rooted(nn.Module):
    """Roots of what is zero in places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.sqrt(torch.relu(y)).mean() + ((y - 1).clamp(min=0) ** 0.5).square().mean()


class Normed(nn.Module):
    """Batch normalization, with running statistics or without."""

    def __init__(self, tracked: bool) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(6, track_running_stats=tracked)

    def forward(self, x: Tensor) -> Tensor:
        return (self.out(torch.tanh(self.norm(self.layer(x)))) - 1).square().mean()


STEPS_OF: dict[str, tuple[Callable[[], nn.Module], Exporter, dict[str, Any]]] = {
    "clamp": (lambda: Bounded(False), "torchscript", {}),
    "clamp, noted": (lambda: Bounded(True), "dynamo", {"optimize": False}),
    "roots": (Rooted, "torchscript", {}),
    "no statistics": (lambda: Normed(False).eval(), "torchscript", {"opset": 17}),
    "no statistics in training mode": (lambda: Normed(False), "torchscript", {"opset": 17}),
    "training mode of opset 9": (lambda: Normed(True), "torchscript", {"opset": 9}),
    "training mode of opset 11": (lambda: Normed(True), "torchscript", {"opset": 11}),
}


@pytest.mark.parametrize("name", STEPS_OF)
def test_steps_are_those_of_pytorch(name, tmp_path):
    make, exporter, options = STEPS_OF[name]
    torch.manual_seed(0)
    module, feeds = make(), {"x": torch.randn(16, 6)}
    twin = copy.deepcopy(module)
    model = export(module, feeds, tmp_path / "model.onnx", exporter, **options)
    build_package(model, tmp_path / "package", optimizer="sgd")
    assert_follows(tmp_path / "package", twin, feeds, 0.05)


class Folding(nn.Module):
    """Parameters with which the exporters compute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.p = kind, nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 6)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 6, 1))
        self.register_buffer("mask", torch.triu(torch.ones(6, 6), 1).bool())

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :, None] * x[:, None]
        if self.kind == "mask":
            y = (y + self.p.masked_fill(self.mask, -torch.inf)).softmax(-1)
        elif self.kind == "norm":
            y = self.conv(y)
        elif self.kind == "slice":
            y = y @ self.p * self.p[:1]
        elif self.kind == "scale":
            y = torch.baddbmm(self.p[None].expand(16, 6, 6) * 1, y, y, beta=0.5)
        return self.head(y).square().mean()


OLDER, NEWER = "do_constant_folding=False", "optimize=False"
FOLDED: list[tuple[str, Exporter, str, str]] = [
    ("mask", "torchscript", r"onnx::Add_\d+ holds infinities", OLDER),
    ("mask", "dynamo", "masked_fill holds infinities .* computed from p", NEWER),
    ("norm", "torchscript", r"perhaps from parameters: onnx::Conv_\d+", OLDER),
    ("norm", "dynamo", "conv.parametrizations.weight.original0", NEWER),
    ("slice", "torchscript", r"perhaps from parameters: onnx::Mul_\d+", OLDER),
    ("slice", "dynamo", "p, slice_1 are computed from p, and train apart", NEWER),
    ("scale", "dynamo", "of p", NEWER),
    ("plain", "torchscript", "", ""),
    ("plain", "dynamo", "", ""),
]


@pytest.mark.parametrize(("kind", "exporter", "said", "option"), FOLDED)
def test_what_the_exporter_computed_is_said(kind, exporter, said, option, tmp_path):
    torch.manual_seed(0)
    module, feeds = Folding(kind).eval(), {"x": torch.randn(16, 6)}
    opset = 17 if exporter == "torchscript" else None
    model = export(module, feeds, tmp_path / "model.onnx", exporter, opset=opset)
    notes: list[str] = []
    build_package(model, tmp_path / "package", remark=notes.append)
    found = [note for note in notes if "torch.onnx.export" in note]
    assert len(found) == bool(said), notes
    if said:
        assert re.search(said, found[0])
        assert option in found[0]
    # With the option everything trains as in PyTorch.
    options = {option.partition("=")[0]: False} if said else {}
    export(module, feeds, model, exporter, opset=opset, **options)
    build_package(model, tmp_path / "package", optimizer="sgd")
    assert_follows(tmp_path / "package", module, feeds, 0.01, 1e-4)


def test_names_do_not_match_what_was_computed_from_several(tmp_path):
    module, feeds = Folding("norm").eval(), {"x": torch.randn(16, 6)}
    model = export(module, feeds, tmp_path / "model.onnx", "torchscript", opset=17)
    like, notes = listed(module, "names", tmp_path), list[str]()
    manifest = build_package(model, tmp_path / "package", **like, remark=notes.append)
    assert not [p for p in manifest.parameters if p.role == "trainable" and "Conv" in p.name]
    assert "conv.parametrizations.weight.original1" in " ".join(notes)


@pytest.mark.parametrize(
    "options", [{"mode": "sum"}, {"mode": "mean"}, {"mode": "max"}, {"padding_idx": 2}], ids=str
)
def test_a_bag_of_embeddings_of_the_newer_exporter_trains(options, tmp_path):
    """It is a loop that appends a row to a list in each turn."""
    module = nn.EmbeddingBag(12, 4, **options)
    feeds = {"x": torch.randint(0, 12, (6, 3))}
    model = export(module, feeds, tmp_path / "model.onnx", "dynamo")
    build_package(model, tmp_path / "package", loss="mse", optimizer="sgd")
    y = module(feeds["x"])
    ((y - 1) ** 2).mean().backward()
    state, training, _ = open_training(tmp_path / "package")
    training(feeds["x"].numpy(), np.ones(y.shape, np.float32))
    assert_equal({"weight": state.parameters["weight"].grad}, module, {"weight"})


def half(name: str) -> str:
    """The mean square, of which the gradient passes one factor."""
    factor = blocks.StopGradient()(name)
    return blocks.ReduceMean(keepdims=False)(blocks.Mul()(name, factor))


def gradients(model: onnx.ModelProto, module: nn.Module, feeds: Feeds) -> dict[str, Any]:
    """What a training model accumulates in one run, by parameter."""
    tensors, taken = {**module.state_dict(), **feeds}, {each.name for each in model.graph.input}
    found = run(model, {name: tensors[name].numpy() for name in taken & tensors.keys()})
    out = "_grad.accumulation.out"
    return {name.removesuffix(out): found[name] for name in found if name.endswith(out)}


def assert_equal(ours: Mapping[str, Any], module: nn.Module, names: set[str]) -> None:
    assert set(ours) == names
    theirs = dict(module.named_parameters())
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name].grad, rtol=1e-4, atol=1e-6)


def test_stop_gradient_of_an_adapter_artifacts_and_blocks(tmp_path):
    torch.manual_seed(0)
    module, feeds = Teacher().eval(), {"x": torch.randn(16, 6)}
    model = export(module, feeds, tmp_path / "model.onnx", "torchscript")
    stops = ["/Tanh_output_0@/Sub_output_0"]
    adapter: Any = {"adapter": "bitfit", "adapter_on": ("layer",)}
    build_package(model, tmp_path / "bias", stop_gradient=stops, **adapter)
    names = {name for name, _ in module.named_parameters()}
    folder = tmp_path / "artifacts"
    generate_artifacts(model, [*names], artifact_directory=folder, stop_gradient=stops)
    module(*feeds.values()).backward()
    for package, trained in ((tmp_path / "bias", {"layer.bias"}), (folder, names)):
        ours = gradients(onnx.load(package / "training_model.onnx"), module, feeds)
        assert_equal(ours, module, trained)
    plain = nn.Linear(6, 3)
    export(plain, feeds, model, "torchscript")
    block = Train(half)
    block.requires_grad("weight")
    with onnxblock.base(onnx.load(model)):
        block("output")
    y = plain(feeds["x"])
    (y * y.detach()).mean().backward()
    assert_equal(gradients(block.to_model_proto()[0], plain, feeds), plain, {"weight"})


@pytest.mark.parametrize(
    ("given", "hint"),
    [("/Tanh_outputs_0", "did you mean /Tanh_output_0"), ("head.weight", "--freeze 'head.weight'"),
     ("/Tanh_output_0@/Tanh_output_0", "did you mean")],
)  # fmt: skip
def test_unknown_values_are_named(given, hint, tmp_path):
    model = export(Teacher(), {"x": torch.randn(2, 6)}, tmp_path / "model.onnx", "torchscript")
    with refused("unknown-value", "--stop-gradient names", hint=hint):
        build_package(model, tmp_path / "package", stop_gradient=[given])


class Tagger(nn.Module):
    """Tensors that do not train, of each kind."""

    feeds = ("x", "y")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.25]))
        angles = torch.arange(10)[:, None] / 10 ** (torch.arange(4) / 4)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.register_buffer("temperature", torch.tensor([1.0, 0.5, 2.0]))
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.tensor([0.1, -0.3, 0.7]), requires_grad=False)
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.5, 2.5, 5.25]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner((x - self.mean) / self.std) + self.positions)
        logits = self.outer(hidden) / self.temperature + self.shift
        return self.loss(logits, y)


def tagger(folder: Path, exporter: Exporter) -> tuple[nn.Module, Feeds, Path]:
    torch.manual_seed(0)
    module = Tagger().eval()
    feeds = {"x": torch.rand(4, 10, 3), "y": (torch.rand(4, 10, 3) > 0.5).float()}
    return module, feeds, export(module, feeds, folder / "model.onnx", exporter)


def trained_in(folder: Path) -> set[str]:
    roles = Package.open(folder).manifest.parameters
    return {each.module or each.name for each in roles if each.role == "trainable"}


@pytest.mark.parametrize(
    ("exporter", "way"),
    split_rows(
        itertools.product(["torchscript", "dynamo"], ["looks", "names", "safetensors"]),
        lambda exporter, way: exporter == "torchscript" or way == "looks",
    ),
)
def test_buffers_do_not_train(exporter, way, tmp_path):
    module, feeds, model = tagger(tmp_path, exporter)
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    told: dict[str, Any] = {"freeze": ["shift"]}
    if way == "looks" and exporter == "torchscript":
        told = {"freeze": ["shift", "temperature"]}  # which look like any parameter
    elif way == "names":
        told = listed(module, way, tmp_path)
    elif way == "safetensors":
        told = {"like": str(tmp_path / "weights.safetensors")}
        tensors = {name: each.detach() for name, each in module.named_parameters()}
        safetensors.torch.save_file({name: tensors[name] for name in trained}, told["like"])
    notes, package = list[str](), tmp_path / "package"
    build_package(model, package, remark=notes.append, optimizer="sgd", **told)
    assert trained_in(package) == trained
    assert_follows(package, module, feeds)
    if way == "looks" and exporter == "torchscript":
        (note,) = (note for note in notes if "buffers" in note)
        looks = ("mean (it scales or shifts an input)", "positions (a sinusoid)")
        assert all(look in note for look in (*looks, "loss.pos_weight (a weight of a loss)"))
        assert "--like" in note
    else:  # what the exporter noted needs no note, but for what it computed
        assert not [note for note in notes if "buffers" in note and "look: sub_1 (" not in note]


class Fresh(nn.Module):
    """Parameters that the newer exporter lays out anew, and constants that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group, self.slopes = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.PReLU(4)
        self.second = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.register_buffer("bands", torch.rand(5, 4))
        self.start = nn.Linear(5, 5)
        nn.init.eye_(self.start.weight)
        self.down = nn.Parameter(torch.randn(2, 5) / 3)
        self.up = nn.Parameter(torch.zeros(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.slopes(self.group(self.first(x))))
        y = torch.tanh(self.instance(y).flatten(2).transpose(1, 2) @ self.bands.T)
        at = torch.arange(16, dtype=x.dtype) / 7
        y = torch.exp(-(at[:, None] - at).abs()) @ y
        return (self.start(y) + y @ self.down.T @ self.up.T + self.down.detach()[0]).square().mean()


class Gated(nn.Module):
    """Parameters that both exporters lay out anew, two of them of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slope = nn.Conv2d(3, 4, 1), nn.PReLU()
        self.scale = nn.Parameter(torch.full((4,), 1e-2))
        self.gate = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y + self.scale.view(1, -1, 1, 1) * self.slope(y) + self.gate.view(1, 1, 1, 1) * y * y
        return y.square().mean()


def listed(module: nn.Module, way: str, folder: Path) -> dict[str, Any]:
    """The option with the module's names, unless the look of its tensors must do."""
    odtpack.names(module, folder / "names.txt")
    return {} if way == "looks" else {"like": str(folder / "names.txt")}


@pytest.mark.parametrize("way", ["looks", "names"])
@pytest.mark.parametrize(
    ("kind", "exporter"), [(Fresh, "dynamo"), (Gated, "dynamo"), (Gated, "torchscript")]
)
def test_folded_parameters_train(kind, exporter, way, tmp_path):
    torch.manual_seed(0)
    module, feeds = kind().eval(), {"x": torch.randn(4, 3, 4, 4)}
    model = export(module, feeds, tmp_path / "model.onnx", exporter, dynamic={"x": {0: "batch"}})
    told, notes, package = listed(module, way, tmp_path), list[str](), tmp_path / "package"
    build_package(model, package, remark=notes.append, optimizer="sgd", **told)
    assert not notes
    trained = trained_in(package)
    if exporter == "dynamo":
        assert trained == {name for name, _ in module.named_parameters()}
    assert len(trained) == len([*module.parameters()])
    assert_follows(package, module, feeds, 0.01, 1e-4)


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale.exp() * self.layer(x)).square().mean()


@pytest.mark.parametrize("way", ["looks", "names"])
def test_what_the_exporter_changed_is_named(way, tmp_path):
    module, feeds = Warm().eval(), {"x": torch.randn(3, 4)}
    model = export(module, feeds, tmp_path / "model.onnx", "dynamo")
    told, notes = listed(module, way, tmp_path), list[str]()
    build_package(model, tmp_path / "package", remark=notes.append, **told)
    assert trained_in(tmp_path / "package") == {"layer.weight", "layer.bias", "exp"}
    (note,) = notes
    assert "exp (exp of scale)" in note
    assert "optimize=False" in note
    whole = export(module, feeds, tmp_path / "whole.onnx", "dynamo", optimize=False)
    build_package(whole, tmp_path / "whole", remark=notes.append, **told)
    assert trained_in(tmp_path / "whole") == {"layer.weight", "layer.bias", "scale"}
    assert len(notes) == 1


class Packed(nn.Module):
    """What the older exporter packs or unsqueezes, of equal shapes, and a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)
        self.rnn = nn.GRU(4, 3, num_layers=2, bidirectional=True)
        self.down, self.up = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.up.weight = self.down.weight
        for each in self.parameters():
            nn.init.normal_(each, std=0.5)  # the older exporter stores equal tensors once

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        y, _ = self.rnn(y.permute(2, 0, 1))
        return self.up(torch.tanh(self.down(y))).square().mean()


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_names_of_packed_and_of_tied_tensors(exporter, tmp_path):
    torch.manual_seed(0)
    module, feeds = Packed().eval(), {"x": torch.randn(3, 4, 5)}
    model = export(module, feeds, tmp_path / "model.onnx", exporter)
    for norm in (module.first, module.second):
        norm.requires_grad_(norm is module.first)
    told, notes, package = listed(module, "names", tmp_path), list[str](), tmp_path / "package"
    assert "\nup.weight [6,6] parameter true of down.weight\n" in Path(told["like"]).read_text()
    build_package(model, package, remark=notes.append, optimizer="sgd")
    apart = "equal, and train apart: down.weight and up.weight; if"
    assert any(apart in note for note in notes) == (exporter == "torchscript")
    notes.clear()
    build_package(model, package, remark=notes.append, optimizer="sgd", **told)
    assert not [note for note in notes if "not trained" in note or "apart" in note]
    state, trainer, _ = open_training(package)
    module(**feeds).backward()
    assert float(trainer(feeds["x"].numpy())) == pytest.approx(module(**feeds).item(), rel=1e-5)
    grads = [parameter.grad for _, parameter in state.parameters if parameter.requires_grad]
    theirs = [each.grad for each in module.parameters() if each.requires_grad]
    total = sum(float((np.float64(grad) ** 2).sum()) for grad in grads)
    assert total == pytest.approx(sum(float((grad**2).sum()) for grad in theirs), rel=1e-4)


def test_renamed_tensors_are_matched_by_shape_or_named(tmp_path):
    module, _, model = tagger(tmp_path, "torchscript")
    proto = onnx.load(model)
    for node in proto.graph.node:
        node.input[:] = ["onnx::Add_8" if each == "outer.bias" else each for each in node.input]
        node.name = ""  # which tells the module
    next(t for t in proto.graph.initializer if t.name == "outer.bias").name = "onnx::Add_8"
    names, notes = tmp_path / "names.txt", list[str]()
    text = odtpack.names(module, names)
    assert names.read_text() == text
    assert "\nouter.weight [3,8] parameter true\nouter.bias [3] parameter true\n" in text
    assert "\nshift [3] parameter false\n" in text
    assert "\nloss.pos_weight [3] buffer false\n" in text
    names.write_text(text.replace("outer.bias [3]", "outer.bias [4]") + "lost [7] parameter true\n")
    build_package(proto, tmp_path / "package", remark=notes.append, like=str(names))
    (outer,) = trained_in(tmp_path / "package") - {"inner.weight", "inner.bias"}
    assert outer == "outer.weight"  # by the names of the values around it
    assert any("trains outer.bias, lost, of which" in note for note in notes)
    assert any(note.startswith("onnx::Add_8: not in names.txt") for note in notes)


@pytest.mark.parametrize(("file", "content", "code", "hint"), [
    ("weights.pt", b"PK\3\4", "names-malformed", "odtpack.names(module, 'names.txt')"),
    ("names.txt", b"a [3] parameter\n", "names-malformed", "odtpack.names"),
    ("names.txt", b"a [%s] parameter true\n" % (b"9" * 5000), "names-malformed", "odtpack.names"),
    ("names.txt", None, "names-missing", None),
    ("w.safetensors", b"\xff" * 16, "names-unreadable", None),
])  # fmt: skip
def test_what_is_no_list(file, content, code, hint, tmp_path):
    if content is not None:
        (tmp_path / file).write_bytes(content)
    _, _, model = tagger(tmp_path, "torchscript")
    with refused(code, hint=hint):
        build_package(model, tmp_path / "package", like=str(tmp_path / file))


def test_a_list_in_a_recipe(tmp_path):
    """By its place beside the recipe; its content counts, not its path alone."""
    module, _, _ = tagger(tmp_path, "torchscript")
    text = odtpack.names(module, tmp_path / "names.txt")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "model = 'model.onnx'\nloss.kind = 'none'\nstop_gradient = ['/Tanh_output_0']\n"
        "[parameters]\nlike = 'names.txt'\n"
    )
    spec = BuildSpec.of(read_recipe(recipe))
    before = cache_key(spec)
    (tmp_path / "names.txt").write_text(
        text.replace("bias [3] parameter true", "bias [3] buffer true")
    )
    assert cache_key(spec) != before
    (tmp_path / "fitted").mkdir()
    again = tmp_path / "fitted" / "recipe.toml"
    again.write_text(recipe_text(spec, 4, Surroundings(again.parent, "package")))
    read = BuildSpec.of(read_recipe(again))
    assert Path(str(read.like)).resolve() == tmp_path / "names.txt"
    assert read.stop_gradient == ("/Tanh_output_0",)


def test_an_adapter_beside_a_list(tmp_path):
    """What requires a gradient is frozen, and buffers stay in the models."""
    module, _, model = tagger(tmp_path, "torchscript")
    like = listed(module, "names", tmp_path)
    manifest = build_package(
        model, tmp_path / "package", **like, adapter="lora", adapter_on=("inner",)
    )
    roles = {p.module or p.name: p.role for p in manifest.parameters}
    lora = {name for name in roles if "lora" in name}
    assert {name for name, role in roles.items() if role == "trainable"} == lora
    assert len(lora) == 2
    assert len(set(roles) - lora) == len([*module.parameters()])


def test_a_state_dict_is_no_list(tmp_path):
    safetensors.torch.save_file(nn.BatchNorm1d(3).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(OdtpackError, match="' is a buffer"):
        read_names(tmp_path / "w.safetensors")


class Words(nn.Module):
    """The mean of words, among which padding counts as zero."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, width, padding_idx=0)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(dim=1)).exp().mean()


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-3}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("width", [4, 256])  # 256: its update is a node of its own
@pytest.mark.parametrize("step_model", ["never", "always"])
def test_padding_rows(kind, width, step_model, tmp_path):
    torch.manual_seed(0)
    module = Words(width)
    feeds = {"tokens": torch.randint(1, 300, (4, 6))}
    feeds["tokens"][:, 3:] = 0
    model = export(module, feeds, tmp_path / "model.onnx", "torchscript")
    make, settings = OPTIMIZERS[kind]
    ours = {"epsilon" if key == "eps" else key: value for key, value in settings.items()}
    built: Any = {
        "optimizer": kind, "step_model": step_model,
        "optimizer_options": ours | ({"formula": "pytorch"} if kind == "adamw" else {}),
    }  # fmt: skip
    notes: list[str] = []
    rows = ["embedding.weight=0"]
    build_package(model, tmp_path / "meant", freeze_rows=rows, remark=notes.append, **built)
    assert not [note for note in notes if "row" in note]
    build_package(model, tmp_path / "erased", remark=notes.append, **built)
    assert any("--freeze-row 'embedding.weight=0'" in note for note in notes)
    rate = 0.5 if kind == "sgd" else 0.01
    theirs = pytorch(
        module, lambda twin: twin(feeds["tokens"]), rate, lambda p, lr: make(p, lr, **settings)
    )
    meant, erased = (follow(tmp_path / each, feeds, rate) for each in ("meant", "erased"))
    assert meant == pytest.approx(theirs, rel=1e-5)
    assert abs(erased[-1] - theirs[-1]) > 1e-3 * abs(theirs[-1])


@pytest.mark.parametrize(("rows", "options", "code", "problem"), [
    (["embedding.weight"], {}, "bad-row", "is not NAME=ROW"),
    (["embedding.weight=300"], {}, "bad-row", "has 300 rows, 0 to 299"),
    (["embeding.weight=0"], {}, "unknown-parameter", "matches no parameter"),
    (["head.bias=1"], {"optimizer_options": {"weight_decay": 0.1}}, "bad-row", "decay would"),
    (["embedding.weight=0"], {"privacy_clip": 1.0}, "bad-row", "noise"),
])  # fmt: skip
def test_rows_that_cannot_stay(rows, options, code, problem, tmp_path):
    feeds = {"tokens": torch.randint(1, 300, (4, 6))}
    model = export(Words(), feeds, tmp_path / "model.onnx", "torchscript")
    with refused(code, problem):
        build_package(model, tmp_path / "package", freeze_rows=rows, **options)
