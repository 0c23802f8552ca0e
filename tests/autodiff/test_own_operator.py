"""A rule that a user registers for an operator that odtpack does not differentiate."""

import re
import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.autodiff import REGISTRY, Context, non_differentiable, vjp
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from tests.packaging_tools import open_training

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-operators.md"
DOMAIN = "com.microsoft"


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a test registers are gone when it ends."""
    monkeypatch.setattr(REGISTRY, "_rules", {key: [*v] for key, v in REGISTRY._rules.items()})


def guide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    """Run the guide's program in a folder, where it leaves a package, and return its model."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (folder / "program.py").write_text(program)
    monkeypatch.chdir(folder)
    model: onnx.ModelProto = runpy.run_path(str(folder / "program.py"))["model"]
    return model


def test_the_gradient_is_that_of_finite_differences(tmp_path, monkeypatch):
    guide(tmp_path, monkeypatch)
    state, module, _ = open_training(tmp_path / "whitened")
    random = np.random.default_rng(0)
    x, target = (random.standard_normal((5, 2), dtype=np.float32) for _ in range(2))
    module(x, target)
    gradient = state.parameters["weight"].grad
    weight = state.parameters["weight"].data.astype(np.float64)
    step = 1e-6
    for place in np.ndindex(2, 2):
        change = np.zeros((2, 2))
        change[place] = step
        ends = [
            np.mean((x @ np.linalg.inv(weight + sign * change) - target) ** 2) for sign in (1, -1)
        ]
        np.testing.assert_allclose(gradient[place], (ends[0] - ends[1]) / (2 * step), rtol=1e-4)


def test_without_a_rule_the_build_names_the_operator(tmp_path, monkeypatch):
    model = guide(tmp_path, monkeypatch)
    del REGISTRY._rules[DOMAIN, "Inverse"]
    with pytest.raises(OdtpackError, match="Inverse") as caught:
        build_package(model, tmp_path / "refused", loss="mse")
    assert DOMAIN in str(caught.value)


def test_an_operator_without_gradient_stops_it(tmp_path, monkeypatch):
    model = guide(tmp_path, monkeypatch)
    del REGISTRY._rules[DOMAIN, "Inverse"]
    non_differentiable("Inverse", domain=DOMAIN)
    with pytest.raises(OdtpackError, match="no parameter"):
        build_package(model, tmp_path / "refused", loss="mse")


def test_a_second_rule_for_the_same_version_is_refused():
    def rule(ctx: Context) -> None:
        raise AssertionError

    vjp("Own", domain="com.example", since=2)(rule)  # type: ignore[arg-type]
    vjp("Own", domain="com.example", since=3)(rule)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"two rules for com\.example::Own since 2"):
        vjp("Own", domain="com.example", since=2)(rule)  # type: ignore[arg-type]
    assert REGISTRY.lookup("com.example", "Own", 5).since == 3
    assert REGISTRY.lookup("com.example", "Own", 1) is None
