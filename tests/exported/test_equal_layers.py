"""Layers that were equal when they were exported train apart; what is tied stays tied.

Both exporters store equal tensors once. Held to PyTorch's own losses in float64.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.cli import main
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_model
from odtpack.optimizers import SGD
from odtpack.package.candidates import candidates
from tests.exported.export import Exporter, export
from tests.model_text import parsed
from tests.packaging_tools import open_training
from tests.torch_twins import losses_of

EXPORTERS: tuple[Exporter, Exporter] = ("torchscript", "dynamo")
RATE = 0.1


class Encoder(nn.Module):
    """nn.TransformerEncoder copies the layer that it is given."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def _layer(size: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.LayerNorm(size))


def _twice(size: int = 8) -> nn.Module:
    layer = _layer(size)
    return Stack(layer, layer)


def _copied(size: int = 8) -> nn.Module:
    layer = _layer(size)
    return Stack(layer, copy.deepcopy(layer))


def _tied() -> nn.Module:
    """Two layers whose products are one parameter, and their biases are not."""
    first = nn.Linear(8, 8)
    second = copy.deepcopy(first)
    second.weight = first.weight
    return Stack(first, second)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder, "copied": _copied,
    "copied, of more than 1,024 elements": lambda: _copied(48), "one layer twice": _twice,
    "one layer twice, of more than 1,024 elements": lambda: _twice(48),
    "embedding and head": TiedLanguageModel,
}  # fmt: skip


def _inputs(module: nn.Module) -> Tensor:
    torch.manual_seed(3)
    if isinstance(module, TiedLanguageModel):
        return torch.randint(11, (3, 5))
    return torch.randn(3, 5, next(p.shape[-1] for p in module.parameters() if p.dim() == 2))


def _make(name: str, exporter: Exporter, folder: Path) -> tuple[nn.Module, Tensor, Path]:
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    x = _inputs(module)
    return module, x, export(module, {"x": x}, folder / "model.onnx", exporter)


def _losses(module: nn.Module, x: Tensor, target: Tensor, steps: int) -> list[float]:
    """What PyTorch's own training gives, in float64."""
    module = copy.deepcopy(module).double()
    stepper = torch.optim.SGD(module.parameters(), lr=RATE)
    x = x.double() if x.is_floating_point() else x
    return losses_of(stepper, lambda: F.mse_loss(module(x), target.double()), steps)


def _assert_follows(module: nn.Module, x: Tensor, package: Path) -> None:
    target = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(5))
    state, trainer, optimizer = open_training(package)
    elements = sum(parameter.data.size for _, parameter in state.parameters)
    assert elements == sum(parameter.numel() for parameter in module.parameters())
    optimizer.set_learning_rate(RATE)
    expected = _losses(module, x, target, 6)
    for loss in expected:
        assert float(trainer(x.numpy(), target.numpy())) == pytest.approx(loss, rel=1e-5)
        optimizer.step()
        trainer.lazy_reset_grad()
    assert expected[-1] < 0.99 * expected[0]


@pytest.mark.parametrize(
    ("name", "exporter"),
    # Of each module one exporter; the two take turns.
    [
        pytest.param(name, exporter, marks=[] if turn == number % 2 else [pytest.mark.sweep])
        for number, name in enumerate(MODULES)
        for turn, exporter in enumerate(EXPORTERS)
    ],
)
def test_trains_as_in_pytorch(name, exporter, tmp_path):
    module, x, model = _make(name, exporter, tmp_path)
    build_package(model, tmp_path / "package", loss="mse", optimizer=SGD())
    _assert_follows(module, x, tmp_path / "package")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_names_of_the_file_mean_every_copy(exporter, tmp_path):
    """Whoever lists the initializers of the file gets all parameters that they stand for."""
    module, x, model = _make("encoder", exporter, tmp_path)
    loaded = load_model(model)
    stored = {tensor.name for tensor in onnx.load(model).graph.initializer}
    names = [name for name in candidates(loaded) if name in stored]
    if exporter == "dynamo":  # which leaves biases of zeros out of the file
        names += [name for name in candidates(loaded) if name.endswith("out_proj.bias")]
    generate_artifacts(
        model, requires_grad=names, loss=LossType.MSELoss, optimizer=OptimType.SGD,
        artifact_directory=tmp_path / "package",
    )  # fmt: skip
    _assert_follows(module, x, tmp_path / "package")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_products_of_two_layers_stay_tied(exporter, tmp_path):
    torch.manual_seed(0)
    module = _tied().eval()
    x = torch.randn(5, 8)
    model = export(module, {"x": x}, tmp_path / "model.onnx", exporter)
    build_package(model, tmp_path / "package", loss="mse", optimizer=SGD())
    _assert_follows(module, x, tmp_path / "package")


SHARED = """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 1}>
{ [one] h = MatMul(x, w) t = Tanh(h) [two] y = MatMul(t, w) }"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared.onnx"
    onnx.save(parsed(SHARED), path)
    return path


def test_build_says_what_nothing_tells_apart(shared, tmp_path):
    said: list[str] = []
    build_package(shared, tmp_path / "package", loss="mse", remark=said.append)
    assert said == [
        "w is read in 2 places (one, two) and trains as one tensor; --untie 'w' gives each "
        "place its own"
    ]


def test_one_module_reads_a_parameter_in_parts(tmp_path, capsys):
    """As those of a GRU without constant folding: its gates are slices of one weight."""
    model = parsed(SHARED.replace("[one]", '["/g/M"]').replace("[two]", '["/g/N"]'))
    said: list[str] = []
    build_package(model, tmp_path / "package", loss="mse", remark=said.append)
    assert said == []
    onnx.save(model, tmp_path / "parts.onnx")
    assert main(["inspect", str(tmp_path / "parts.onnx")]) == 0
    assert "\n  one parameter of the module each: w\n" in capsys.readouterr().out


def test_untie(shared, tmp_path):
    torch.manual_seed(1)
    module = Stack(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    weight = onnx.numpy_helper.to_array(onnx.load(shared).graph.initializer[0])
    for layer in (module.layers[0], module.layers[2]):
        layer.weight = nn.Parameter(torch.tensor(weight.T.copy()))
    assert main(["build", str(shared), "--loss", "mse", "--optimizer", "sgd", "--untie", "w",
                 "--out", str(tmp_path / "package")]) == 0  # fmt: skip
    _assert_follows(module, torch.randn(3, 2), tmp_path / "package")


def test_untie_in_a_recipe(shared, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{shared.name}"\n[loss]\nkind = "mse"\n[parameters]\nuntie = ["w"]\n'
    )
    package = tmp_path / "package"
    assert main(["build", "--recipe", str(recipe), "--out", str(package)]) == 0
    manifest = json.loads((package / "manifest.json").read_text())
    assert [parameter["name"] for parameter in manifest["parameters"]] == ["w", "w_2"]


def test_untie_what_is_read_once(shared, tmp_path):
    with pytest.raises(OdtpackError, match="matches no tensor that several places") as caught:
        build_package(shared, tmp_path / "package", loss="mse", untie=["h"])
    assert "'w'" in str(caught.value.hint)


def test_inspect_lists_shared_tensors(shared, run):
    content = run("inspect", shared, "--json", code=0).json()
    assert content["shared"] == [{"name": "w", "places": ["one", "two"], "one_parameter": False}]


def test_a_folded_copy_of_an_equal_layer_is_not_tied(tmp_path):
    """One layer is read as it is, its copy transposed by the exporter."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = copy.deepcopy(self.first)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)).flatten(0, 1))

    for exporter in EXPORTERS:
        torch.manual_seed(0)
        module, x = Flattened().eval(), torch.randn(3, 5, 8)
        model = export(module, {"x": x}, tmp_path / f"{exporter}.onnx", exporter)
        build_package(model, tmp_path / exporter, loss="mse", optimizer=SGD())
        _assert_follows(module, x, tmp_path / exporter)
        assert np.array_equal(*[p.detach().numpy() for p in module.parameters()][::2])
