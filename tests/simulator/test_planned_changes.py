"""What advice proposes is planned: held against packages that are really built so."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.artifacts import OptimType
from odtpack.build import build_package
from odtpack.optimizers.sgd import SGD
from odtpack_runtime.package.package import Package
from odtpack_simulator.figures import advice
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.memory.arena import SessionUse, sharing_of
from odtpack_simulator.memory.execution_order import trained_layers
from odtpack_simulator.memory.memory_plan import plan_changes, plan_memory
from odtpack_simulator.result import PlannedChange, SimulationResult
from odtpack_simulator.simulation import judge_again, simulate
from odtpack_simulator.values.figure import Check
from tests import zoo
from tests.packaging_tools import generate, trainable_names
from tests.simulator.changed import changed
from tests.simulator.graphs import weighted
from tests.simulator.judged import check
from tests.simulator.packages import Case, Cases, make_case
from tests.simulator.profiles import make_profile
from tests.sweep import split

ROWS, WIDTH = 70_000, 16


def recommender() -> onnx.ModelProto:
    """A large table that is looked up, and two small layers."""
    text = """recommender (int64[batch, 4] input) => (float[batch, 10] output) {
        rows = Gather (items, input)
        mean = ReduceMean <axes = [1], keepdims = 0> (rows)
        hidden = Gemm (mean, w1, b1)
        active = Relu (hidden)
        output = Gemm (active, w2, b2)
    }"""
    shapes = {"items": (ROWS, WIDTH), "w1": (WIDTH, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)}
    return weighted(text, shapes, 1 / 3)


def planned(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    return plan_memory(Package.open(folder), shapes).peak.nbytes


def changes_of(package: Package, shapes: dict[str, tuple[int, ...]]) -> list[PlannedChange]:
    use = SessionUse(sharing_of(package.manifest.session), step_model=False)
    return plan_changes(package, shapes, use)


def the(changes: list[PlannedChange], **wanted: object) -> PlannedChange:
    """The change that is this and nothing else."""
    settings = {"micro_batch": None, "freeze": None, "stateless_optimizer": False, **wanted}
    (found,) = [c for c in changes if c.model_dump(exclude={"peak_bytes"}) == settings]
    return found


@pytest.fixture(scope="module")
def transformer(case: Cases) -> Case:
    return case("transformer")


def test_sgd_is_planned_as_a_package_that_is_built_with_it(transformer, tmp_path):
    changes = changes_of(transformer.package, transformer.shapes)
    generate(zoo.transformer_encoder(), tmp_path, OptimType.SGD, additional_output_names=["output"])
    built = planned(tmp_path, transformer.shapes)
    assert the(changes, stateless_optimizer=True).peak_bytes == pytest.approx(built, rel=0.01)
    assert built < 0.7 * planned(transformer.folder / "package", transformer.shapes)


@pytest.mark.parametrize("count", split([9, 26], lambda count: count == 26))
def test_frozen_layers_are_planned_as_a_package_that_is_built_so(transformer, tmp_path, count):
    package = transformer.package
    layers = trained_layers(onnx.load(package.training_model).graph, package.manifest)
    assert layers[0][0].name == "token_embedding.weight"
    assert {p.name for p in layers[-1]} == {"classifier.weight", "classifier.bias"}
    changes = changes_of(package, transformer.shapes)
    start = f"the first {count} of 27 trained layers"
    (change,) = (c for c in changes if (c.freeze or "").startswith(start)
                 and not c.stateless_optimizer)  # fmt: skip
    frozen = {p.name for layer in layers[:count] for p in layer}
    model = zoo.transformer_encoder()
    generate(
        model, tmp_path, OptimType.AdamW, additional_output_names=["output"],
        requires_grad=[name for name in trainable_names(model) if name not in frozen],
        frozen_params=sorted(frozen),
    )  # fmt: skip
    assert change.peak_bytes == pytest.approx(planned(tmp_path, transformer.shapes), rel=0.03)


def test_a_weight_that_is_multiplied_by_itself_again_and_again(mlp):
    """It is carried once through every node, not twice as often as through the one before."""
    manifest = mlp.package.manifest
    weight = next(p for p in manifest.parameters if len(p.shape) == 2)
    names = [weight.name, *(f"v{depth}" for depth in range(60))]
    nodes = [
        onnx.helper.make_node("Mul", [before, before], [after])
        for before, after in itertools.pairwise(names)
    ]
    nodes.append(onnx.helper.make_node("MatMul", [manifest.inputs[0].name, names[-1]], ["y"]))
    assert trained_layers(onnx.helper.make_graph(nodes, "g", [], []), manifest)[0][0] == weight


def test_micro_batches_are_planned_with_their_accumulation(tmp_path):
    case = make_case("cnn", tmp_path)
    onnx.save(zoo.cnn(), tmp_path / "cnn.onnx")
    build_package(
        tmp_path / "cnn.onnx", tmp_path / "accumulating", loss="cross_entropy", optimizer=SGD(),
        outputs=("output",), accumulation_steps=4,
    )  # fmt: skip
    shapes = {name: (2, *shape[1:]) for name, shape in case.shapes.items()}
    change = the(changes_of(case.package, case.shapes), micro_batch=2)
    assert change.peak_bytes == planned(tmp_path / "accumulating", shapes)


def simulated(folder: Path, limit: int, samples: int) -> SimulationResult:
    package = folder / "package"
    random = np.random.default_rng(0)
    inputs, labels = random.integers(0, ROWS, (samples, 4)), random.integers(0, 10, samples)
    np.savez(folder / "data.npz", input=inputs, labels=labels)
    profile = make_profile("phone", limit)
    return judge(simulate(package, folder / "data.npz", [profile], batch_size=32, epochs=1, seed=0))


def memory_check(result: SimulationResult, metric: str = "memory_limit") -> Check:
    found = check(result, metric)
    assert found.status == "fail"
    assert found.advice
    return found


def test_a_recommender_is_advised_to_freeze_its_table(tmp_path, monkeypatch):
    """And what the advice says it needs, it needs: trained so for real, it fits."""
    monkeypatch.chdir(tmp_path / "..")
    generate(recommender(), tmp_path / "package", OptimType.AdamW)
    text = memory_check(simulated(tmp_path, 14_000_000, 200)).advice or ""
    assert text.startswith("freezing the first trained layer ('items') needs about ")
    assert "which is enough" in text
    assert "smaller" not in text
    (tmp_path / "frozen").mkdir()
    generate(
        recommender(), tmp_path / "frozen" / "package", OptimType.AdamW,
        requires_grad=["w1", "b1", "w2", "b2"], frozen_params=["items"],
    )  # fmt: skip
    fits = simulated(tmp_path / "frozen", 14_000_000, 200)
    assert fits.devices[0].memory.outcome == "fits"
    assert fits.memory.changes is None  # nothing failed, nothing was planned
    tight = parse_budgets(b'[budgets]\npeak_memory = "3 MB"')
    again = judge_again(fits, lambda result: judge(result, tight))
    advised = memory_check(again, "peak_memory").advice or ""
    assert "even training in micro-batches of 1" in advised
    moved = changed(fits, package={"path": "gone"})
    lost = judge_again(moved, lambda result: judge(result, tight))
    assert "where the package is" in (memory_check(lost, "peak_memory").advice or "")


def test_what_is_frozen_already_is_not_proposed(tmp_path):
    generate(
        recommender(), tmp_path / "package", OptimType.AdamW,
        requires_grad=["w2", "b2"], frozen_params=["items", "w1", "b1"],
    )  # fmt: skip
    result = simulated(tmp_path, 3_000_000, 200)
    assert result.package.trained_layers == 1
    assert result.memory.changes
    assert not any(change.freeze for change in result.memory.changes)
    text = memory_check(result).advice or ""
    assert "freez" not in text
    assert text.startswith("the model has to be smaller: even training in micro-batches of 1 ")
    assert "freeze" not in advice.for_step_latency(result, 0.001, None)


def test_a_budget_for_the_peak_is_planned_for_too(tmp_path):
    generate(recommender(), tmp_path / "package", OptimType.AdamW)
    np.savez(tmp_path / "data.npz", input=np.zeros((64, 4), np.int64), labels=np.zeros(64, int))
    budgets = parse_budgets(b'[budgets]\npeak_memory = "12 MB"')
    arguments = {"batch_size": 32, "epochs": 1, "seed": 0}
    profiles = [make_profile("phone", 10**9)]
    result = simulate(
        tmp_path / "package", tmp_path / "data.npz", profiles, **arguments,
        judge=lambda measured: judge(measured, budgets),
    )  # fmt: skip
    assert "which is enough" in (memory_check(judge(result, budgets), "peak_memory").advice or "")
