"""CONTRIBUTING followed literally: seven additions, each one file and one test case.

A loss, an optimizer, a gradient, a pass, a metric, a report and a device go into a copy of the
project. There each does what it should, and the tests that go through all losses, optimizers,
rules, metrics, formats and devices pass as before.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from tests.model_text import parsed
from tests.programs import ran
from tests.sweep import EVERY

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.sweep
PARTS = ("packager", "runtime", "tests", "device_profiles", "docs", "scripts", "benchmarks",
         "examples", "pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md", "README.md", "LICENSE",
         "Makefile")  # fmt: skip
LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "target", "dist", ".build")


def example(heading: str) -> str:
    """The first Python block under a heading of CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^### {heading}\n.*?^```python\n(.*?)^```$", text, re.M | re.S)
    assert found is not None, heading
    return found[1]


OPTIMIZER = '''"""The sign of the gradient."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from odtpack.optimizers.common.base import Optimizer, StateVector, Values, keep_factor
from odtpack.option import option

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Ops


@dataclasses.dataclass(frozen=True)
class SoftSign(Optimizer):
    """p <- p - lr (g / (|g| + sharpness) + weight_decay p)."""

    kind: ClassVar[str] = "soft_sign"
    summary: ClassVar[str] = "The sign of the gradient, soft near 0."
    source: ClassVar[str] = "Bernstein et al. (2018)"
    keeps: ClassVar[str] = "nothing"
    learning_rates: ClassVar[tuple[float, ...]] = (0.001, 0.003, 0.0003)
    sharpness: float = option(1e-3, "Gradients that are half a step.", above=0)

    @property
    def state(self) -> tuple[StateVector, ...]:
        """Nothing."""
        return ()

    def write(self, op: Ops, values: Values, weight_decay: ir.Value | float) -> dict[str, ir.Value]:
        """Write one step; see :meth:`Optimizer.write`."""
        params, rate, gradients = values["params"], values["learning_rate"], values["gradients"]
        direction = op.Div(gradients, op.Add(op.Abs(gradients), self.sharpness))
        keep = keep_factor(op, rate, weight_decay)
        if keep is not None:
            params = op.Mul(params, keep)
        return {"params": op.Sub(params, op.Mul(direction, rate))}
'''
OPTIMIZER_CASE = """

@formula("soft_sign", 0.002, plain={}, decay={"sharpness": 0.1, "weight_decay": 0.3})
def soft_sign(o: optimizers.Optimizer) -> Formula:
    def step(p: Array, g: Array, kept: dict[str, Array], lr: float, t: int, decay: float) -> Array:
        return p - lr * (g / (np.abs(g) + o.sharpness) + decay * p)

    return step
"""
LOSS_CASE = """

for how in ("mean", "sum"):
    CASES[f"log_cosh-{how}"] = Case(
        "log_cosh", {"scale": 2.0, "reduction": how}, (normal(6, 5),), (normal(6, 5, seed=4) * 2,),
        lambda y, t, how=how: getattr(4 * torch.log(torch.cosh((y - t) / 2)), how)(),
    )
"""
GRADIENT = """

@vjp("Shrink")
def shrink(ctx: Context) -> Cotangents:
    op = ctx.op
    kept = op.Greater(op.Abs(ctx.x()), ctx.float("lambd", 0.5))
    return op.Mul(ctx.dy(), op.cast(kept, ctx.dtype(ctx.x())))
"""
GRADIENT_CASE = """

CASES += [
    case
    for edge in (0.5, 0.25)
    for case in cases(
        "Shrink", {"x": spread(3, 4, avoid=[-edge, edge])},
        lambda x, edge=edge: torch.where(x.abs() > edge, x - 0.2 * x.sign(), 0.0), (12, 18),
        bias=0.2, lambd=edge, label=f"{edge}",
    )
]
"""
NEGATION_CASE = '''"""Two negations are none."""

from odtpack.passes.double_negation import cancel
from tests.passes.tools import op_types, parse


def test_two_negations_are_none() -> None:
    model = parse("g (float[N] x) => (float[N] y) { a = Neg(x) b = Neg(a) y = Abs(b) }")
    assert cancel(model.graph)
    assert op_types(model.graph) == ["Neg", "Abs"]
    assert model.graph[-1].inputs[0] is model.graph.inputs[0]  # the first Neg is unused
    assert not cancel(model.graph)
'''
REPORT = '''"""A report of one line."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.figures.simulated import CHECKS
from odtpack_simulator.reports import report_of
from odtpack_simulator.reports.report import AnyResult, ReportFormat


def render_line(result: AnyResult) -> bytes:
    """The verdict and every check, as text."""
    suites = report_of(result).suites
    checks = [(suite.title, check) for suite in suites for check in suite.checks]
    found = [f"{of}: {CHECKS[check.metric].title}: {check.message}" for of, check in checks]
    return " | ".join([result.verdict, *found]).encode()


FORMAT: Final = ReportFormat(
    render=render_line,
    suffix="txt",
    audience="a line of a log",
    written_as="the verdict and every check",
)
'''
METRIC = """    Metric(
        key="trainable_parameters", title="Trainable parameters", unit="1", scope="package",
        topic="Package", noun=" parameters", words="the package trains {}",
        meaning="Number of the parameters that are trained.", example="1000000",
        read=lambda subject: Figure(value=subject.result.package.trainable_parameters),
        advise=lambda subject, _: "freeze layers", suggested=False,
    ),
"""
METRIC_CASE = """    ("trainable_parameters", "7", 7.0, "absolute"),
"""


def add(path: Path, text: str, before: str | None = None) -> None:
    """Append to a file, or put something before what is there."""
    content = path.read_text()
    if before is not None:
        assert content.count(before) == 1, before
        content = content.replace(before, text + before)
    path.write_text(content if before is not None else content + text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the additions, and its pages written anew."""
    copy = tmp_path_factory.mktemp("additions") / "project"
    copy.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / part, copy / part)
    packager, simulator = copy / "packager" / "odtpack", copy / "runtime" / "odtpack_simulator"
    (packager / "losses" / "log_cosh.py").write_text(example("A loss"))
    add(copy / "tests/losses/cases.py", LOSS_CASE)
    (packager / "optimizers" / "soft_sign.py").write_text(OPTIMIZER)
    add(copy / "tests/training/formulas.py", OPTIMIZER_CASE)
    add(packager / "autodiff/rules/elementwise.py", GRADIENT)
    add(copy / "tests/autodiff/cases/elementwise.py", GRADIENT_CASE)
    (packager / "passes" / "double_negation.py").write_text(example("A pass"))
    (line,) = re.findall(r"^    (apply\(model, .*double_negation.*)$", contributing(), re.M)
    pipeline = packager / "passes" / "pipeline.py"
    add(pipeline, f"    {line}\n", "    # Rewrites of the forward graph that make its gradient")
    add(pipeline, "from odtpack.passes import double_negation\n", "\nALL = ")
    (copy / "tests/passes/test_double_negation.py").write_text(NEGATION_CASE)
    add(simulator / "figures/simulated.py", METRIC, '    Metric(\n        key="adapter_size"')
    add(copy / "tests/simulator/figures/test_budgets.py", METRIC_CASE, '    ("adapter_size", ')
    (simulator / "reports/line_report.py").write_text(REPORT)
    device = (copy / "device_profiles/google/pixel-8a.toml").read_text()
    device = device.replace("google/pixel-8a", "google/pixel-8b").replace("Pixel 8a", "Pixel 8b")
    (copy / "device_profiles/google/pixel-8b.toml").write_text(device)
    run(copy, "-m", "scripts.generate_docs")
    return copy


def contributing() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text()


def run(copy: Path, *words: str) -> str:
    """Run Python in the copy, to a good end."""
    paths = os.pathsep.join(map(str, (copy / "packager", copy / "runtime")))
    done = ran(
        sys.executable, *words, cwd=copy, env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    )
    return done.stdout


def passed(copy: Path, *words: str) -> int:
    """Run tests of the copy; return how many passed."""
    out = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words)
    found = re.search(r"(\d+) passed", out)
    return int(found[1]) if found else out.count(".")


CASES: Mapping[str, tuple[str, ...]] = {
    "loss": ("tests/losses/test_against_pytorch.py", "-k", "log_cosh"),
    "optimizer": ("tests/training/test_optimizers.py", "-k", "soft_sign"),
    "gradient": ("tests/autodiff/test_rules.py", "-k", "Shrink"),
    "pass": ("tests/passes/test_double_negation.py",),
    "metric": ("tests/simulator/figures/test_budgets.py", "-k", "trainable_parameters"),
    "report": ("tests/reports/test_reports.py",),
    "device": ("tests/simulator/device/test_profile.py", "-k", "8b"),
}


@pytest.mark.parametrize("addition", CASES)
def test_its_case_passes(addition, copy):
    assert passed(copy, "-o", "addopts=--import-mode=importlib", *CASES[addition]) > 0


def test_the_command_line_has_them(copy):
    w = np.float32([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.6], [0.7, -0.8]])
    nodes = "a = Neg(x) b = Neg(a) h = Shrink<lambd = 0.1>(b) y = MatMul(h, w)"
    model = parsed(f"(float[N, 4] x) => (float[N, 2] y) {{ {nodes} }}", 18, w=w)
    onnx.save(model, copy / "model.onnx")
    run(copy, "-m", "odtpack", "build", "model.onnx", "--out", "package", "--loss", "log_cosh",
        "--optimizer", "soft_sign", "--optimizer-option", "sharpness=0.01")  # fmt: skip
    manifest = json.loads((copy / "package/manifest.json").read_text())
    assert (manifest["loss"], manifest["optimizer"]["kind"]) == ("log_cosh", "soft_sign")
    training = onnx.load(copy / "package/training_model.onnx")
    assert "Neg" not in {node.op_type for node in training.graph.node}
    x = np.random.default_rng(0).standard_normal((64, 4), dtype=np.float32)
    np.savez(copy / "data.npz", x=x, target=x[:, :2])
    (copy / "budgets.toml").write_text("[budgets]\ntrainable_parameters = 7\n")
    ran(
        sys.executable, "-m", "odtpack", "simulate", "package", "--data", "data.npz", "--device",
        "pixel-8b", "--budget", "budgets.toml", "--report", "line:line.txt",
        "--epochs", "1", "--interruptions", "0", code=1, cwd=copy,
        env={**os.environ, "PYTHONPATH": f"{copy}/packager{os.pathsep}{copy}/runtime"},
    )  # fmt: skip
    assert "Trainable parameters: " in (copy / "line.txt").read_text()


GO_THROUGH_ALL = (
    "autodiff/test_own_operator.py", "cli/test_app.py", "cli/test_bad_input.py",
    "cli/test_commands.py", "cli/test_devices.py", "cli/test_output.py", "fit/test_candidates.py",
    "losses/test_recipes.py", "ort_training/test_target.py", "passes", "recipe/test_schema.py",
    "reports", "simulator/device", "simulator/figures", "test_build_spec.py", "test_docs.py",
)  # fmt: skip
SAMPLE = ("losses/test_recipes.py", "passes", "recipe/test_schema.py", "simulator/figures",
          "test_build_spec.py")  # fmt: skip
HAVE_CASES = ("autodiff/test_expand.py", "autodiff/test_rules.py",
              "losses/test_against_pytorch.py", "training/test_optimizers.py")  # fmt: skip


def test_no_other_test_fails(copy):
    """Of the tests that go through all that there is, those that make test runs."""
    files = [f"tests/{name}" for name in (GO_THROUGH_ALL if EVERY == 1 else SAMPLE)]
    passed(copy, "-m", "not sweep and not kits", *files)
    passed(
        copy,
        "-k",
        "every_loss or every_rule or every_attribute or every_optimizer or no_two or no_rule "
        "or without_rule or Shrink",
        *(f"tests/{name}" for name in HAVE_CASES),
    )
