"""What the diff says of trained checkpoints is what happens to them.

Every case trains with the old package, saves with the optimizer's state, and goes on with the
new one in each of the ways that there are: opening the checkpoint as it is, and carrying its
parameters over, with and without the optimizer's state.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.adapters import AdapterSpec
from odtpack.optimizers import SGD, Adafactor, Adam, AdamW, Lion
from odtpack.update.diff import Level, Verdict, diff_packages
from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.checkpoint.state import SCHEDULE_PROPERTY, carry_over
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.model_text import retyped
from tests.packages.samples import renamed, small_model, with_values
from tests.packaging_tools import built_package
from tests.refused import refused

_HEAD = ["fc.*"]


def mobilenet(batch_norm: Any) -> onnx.ModelProto:
    return zoo.mobilenet_v2(32, classes=3, width_mult=0.1, batch_norm=batch_norm, stages=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """Two packages: models and options of the build; and what is to be said of them."""

    level: Level
    as_is: bool
    old: dict[str, Any] = dataclasses.field(default_factory=dict)
    new: dict[str, Any] = dataclasses.field(default_factory=dict)
    old_model: onnx.ModelProto = dataclasses.field(default_factory=small_model)
    new_model: onnx.ModelProto = dataclasses.field(default_factory=small_model)
    moments_fit: bool = False
    """Moments of another optimizer that fit, and that mean something else."""


CASES = {
    "same": Case("compatible", True),
    "initial values": Case("compatible", True, new_model=with_values(small_model())),
    "hyperparameters": Case("compatible", True, new={"optimizer": AdamW(beta1=0.7)}),
    "further output": Case("compatible", True, new={"outputs": ["output"]}),
    "another loss": Case("compatible", True, new={"loss": "mse"}),
    "opset": Case("compatible", True, new_model=small_model(opset=20)),
    "frozen values": Case("compatible", True, {"train": _HEAD}, {"train": _HEAD},
                          new_model=with_values(small_model(), "conv1.weight")),
    "no longer mixed": Case("compatible", False, {"precision": "mixed"}),
    "trains less": Case("compatible", False, {}, {"train": _HEAD}),
    "frozen part is another": Case("compatible", False, {"train": _HEAD}, {"train": _HEAD},
                                   new_model=renamed(small_model(), "conv1.bias", "conv1.shift")),
    "sgd": Case("compatible", True, {"optimizer": SGD()}, {"optimizer": SGD()}),
    "sgd trains more": Case("compatible", False, {"optimizer": SGD(), "train": _HEAD},
                            {"optimizer": SGD()}),
    "adafactor": Case("compatible", True, {"optimizer": Adafactor()}, {"optimizer": Adafactor()}),
    "statistics": Case("compatible", True, old_model=mobilenet("train"),
                       new_model=with_values(mobilenet("train"), "features.0.0.weight")),
    "trains more": Case("parameters only", False, {"train": _HEAD}, {}),
    "new layer": Case("parameters only", False, {"train": ["conv*"]}, {"train": ["conv*", "fc*"]},
                      new_model=small_model(hidden=4)),
    "adamw to sgd": Case("parameters only", True, {}, {"optimizer": SGD()}),
    "sgd to adamw": Case("parameters only", True, {"optimizer": SGD()}, {}),
    "momentum": Case("parameters only", True, {"optimizer": SGD()},
                     {"optimizer": SGD(momentum=0.9)}),
    "adamw to lion": Case("parameters only", True, {}, {"optimizer": Lion()}),
    "adamw to adafactor": Case("parameters only", True, {}, {"optimizer": Adafactor()}),
    "adamw to adam": Case("parameters only", True, {}, {"optimizer": Adam()}, moments_fit=True),
    "more classes": Case("incompatible", False, new_model=small_model(classes=5)),
    "wider": Case("incompatible", False, new_model=small_model(width=(4, 9))),
    "another name": Case("incompatible", False,
                         new_model=renamed(small_model(), "fc.weight", "head.weight")),
    "float64": Case("incompatible", False, new_model=retyped(small_model(), np.float64)),
    "without a layer": Case("incompatible", False, old_model=small_model(hidden=4)),
    "statistics become constants": Case("incompatible", False, old_model=mobilenet("train"),
                                        new_model=mobilenet("eval")),
}  # fmt: skip


def open_with(package: Package, state: CheckpointState) -> tuple[Module, Optimizer]:
    module = Module(package.training_model, state, package.eval_model)
    return module, Optimizer(package.optimizer_model, module)


def train(package: Package, state: CheckpointState, steps: int = 3) -> Optimizer:
    """Train on seeded data; check that it does something."""
    module, optimizer = open_with(package, state)
    optimizer.set_learning_rate(0.01)
    random = np.random.default_rng(4)
    before = {name: array.copy() for name, array in state.arrays(trainable=True).items()}
    for _ in range(steps):
        feeds = []
        for spec in package.manifest.input_specs():
            shape = [6 if isinstance(dim, str | None) else dim for dim in spec.shape]
            data: np.ndarray = random.standard_normal(shape)
            labels = random.integers(0, 3, shape) if spec.dtype == np.int64 else None
            feeds.append(data.astype(spec.dtype) if labels is None else labels)
        result = module(*feeds)
        assert np.isfinite(result[0] if isinstance(result, tuple) else result)
        optimizer.step()
        module.lazy_reset_grad()
    after = state.arrays(trainable=True)
    assert any((after[name] != before[name]).any() for name in after)
    return optimizer


@dataclasses.dataclass(frozen=True)
class Trained:
    """Two packages and a checkpoint of the old one, which no test changes."""

    old: Package
    new: Package
    checkpoint: Path
    verdict: Verdict

    def state(self) -> CheckpointState:
        return CheckpointState.load_checkpoint(self.checkpoint)

    def fresh(self) -> CheckpointState:
        return CheckpointState.load_checkpoint(self.new.checkpoint)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    case: Case = CASES[request.param]
    old = built_package(case.old_model, folder / "old", **case.old)
    new = built_package(case.new_model, folder / "new", **case.new)
    state = CheckpointState.load_checkpoint(old.checkpoint)
    train(old, state)
    state.properties["epoch"] = 7
    CheckpointState.save_checkpoint(state, folder / "t.ckpt", include_optimizer_state=True)
    verdict = diff_packages(folder / "old", folder / "new").verdict
    assert (verdict.level, verdict.opens_as_is) == (case.level, case.as_is)
    return Trained(old, new, folder / "t.ckpt", verdict)


def cases(*levels: Level) -> Any:
    names = [name for name, case in CASES.items() if case.level in levels]
    return pytest.mark.parametrize("trained", names, indirect=True)


def without_optimizer(state: CheckpointState) -> CheckpointState:
    state.optimizer = None
    return state


@cases("compatible", "parameters only", "incompatible")
def test_whether_the_checkpoint_opens_as_it_is(trained):
    if trained.verdict.opens_as_is:
        train(trained.new, without_optimizer(trained.state()))
    else:
        with refused("model-mismatch"):
            open_with(trained.new, without_optimizer(trained.state()))


@cases("compatible")
def test_compatible_goes_on_with_moments(trained):
    """Step count, learning rate and moments are those of the checkpoint, to the bit."""
    states = [carry_over(trained.state(), trained.fresh(), trained.verdict.carry_over)]
    if trained.verdict.opens_as_is:
        states.append(trained.state())
    for state in states:
        _, optimizer = open_with(trained.new, state)
        saved = trained.state()
        assert saved.optimizer is not None
        assert optimizer.step_count == 3
        assert optimizer.get_learning_rate() == np.float32(0.01)
        assert state.properties["epoch"] == 7
        for name, moments in state.optimizer.moments.items():
            for moment, kept in zip(moments, saved.optimizer.moments[name], strict=True):
                np.testing.assert_array_equal(moment, kept)
        for name in trained.verdict.carry_over:
            np.testing.assert_array_equal(state.parameters[name].data, saved.parameters[name].data)
    train(trained.new, carry_over(trained.state(), trained.fresh(), trained.verdict.carry_over))


@cases("parameters only")
def test_parameters_go_on_and_moments_do_not(trained, request):
    assert trained.verdict.reset_reasons
    case = CASES[request.node.callspec.params["trained"]]
    names = trained.verdict.carry_over
    if case.moments_fit:
        with refused("optimizer-mismatch"):
            open_with(trained.new, trained.state())
        assert "from adamw to adam" in trained.verdict.reset_reasons[0]
    else:
        with pytest.raises(OdtpackError) as caught:
            open_with(trained.new, carry_over(trained.state(), trained.fresh(), names))
        assert caught.value.code in ("optimizer-mismatch", "carry-over-optimizer")
    state = carry_over(trained.state(), trained.fresh(), names, optimizer_state=False)
    for wanted, own in ((trained.state(), names), (trained.fresh(), trained.verdict.starts_fresh)):
        for name in own:
            np.testing.assert_array_equal(state.parameters[name].data, wanted.parameters[name].data)
    assert train(trained.new, state).step_count == 3


@cases("incompatible")
def test_incompatible_parameters_have_no_place(trained):
    """Each one that is named cannot be carried over; all others can."""
    assert trained.verdict.problems
    for problem in trained.verdict.problems:
        with refused("carry-over-parameter"):
            carry_over(trained.state(), trained.fresh(), [problem.parameter])
    names = trained.verdict.carry_over
    train(trained.new, carry_over(trained.state(), trained.fresh(), names, optimizer_state=False))


@pytest.mark.parametrize("trained", ["same"], indirect=True)
def test_going_on_with_an_equal_package_is_as_if_nothing_had_happened(trained):
    first, second = trained.state(), carry_over(trained.state(), trained.fresh())
    train(trained.old, first)
    train(trained.new, second)
    for name, array in first.arrays(trainable=True).items():
        np.testing.assert_array_equal(array, second.parameters[name].data)


@pytest.mark.parametrize("trained", ["same"], indirect=True)
def test_what_stays_behind_has_no_moments_and_no_schedule(trained):
    """Moments belong to values, and a schedule to the optimizer's state."""
    old = trained.state()
    old.properties[SCHEDULE_PROPERTY] = '{"initial_lr": 0.1, "kind": "constant"}'
    name, *others = old.arrays(trainable=True)
    assert others
    state = carry_over(old, trained.fresh(), [name])
    assert old.optimizer is not None
    assert state.optimizer is not None
    for each, moments in old.optimizer.moments.items():
        for before, after in zip(moments, state.optimizer.moments[each], strict=True):
            assert before.any()
            np.testing.assert_array_equal(after, before if each == name else 0 * before)
    assert SCHEDULE_PROPERTY in state.properties
    parameters_only = carry_over(old, trained.fresh(), optimizer_state=False)
    assert SCHEDULE_PROPERTY not in parameters_only.properties


@pytest.mark.parametrize("trained", ["frozen values"], indirect=True)
def test_new_frozen_values_come_with_the_new_checkpoint_only(trained):
    assert trained.verdict.new_frozen_values == ("conv1.weight",)
    assert trained.verdict.notes
    new = trained.fresh().parameters["conv1.weight"].data
    state = carry_over(trained.state(), trained.fresh(), trained.verdict.carry_over)
    np.testing.assert_array_equal(state.parameters["conv1.weight"].data, new)
    assert (trained.state().parameters["conv1.weight"].data != new).any()


@pytest.mark.parametrize("trained", ["statistics"], indirect=True)
def test_running_statistics_go_over(trained):
    statistics = [p.name for p in trained.old.manifest.parameters if p.role == "state"]
    assert statistics
    assert set(statistics) <= set(trained.verdict.carry_over)


@pytest.mark.parametrize("trained", ["statistics"], indirect=True)
def test_nothing_is_carried_onto_a_state_that_a_session_trains(trained):
    _, optimizer = open_with(trained.new, state := trained.fresh())
    before = {name: array.copy() for name, array in state.arrays(trainable=True).items()}
    with refused("busy", "before a Module is made of it"):
        carry_over(trained.state(), state)
    for name, array in state.arrays(trainable=True).items():
        np.testing.assert_array_equal(array, before[name])
    optimizer.step()  # the session goes on
    with refused("carry-over-parameter", "no parameter 'zz'"):
        carry_over(trained.state(), trained.fresh(), ["zz"])


@pytest.mark.parametrize("trained", ["more classes"], indirect=True)
def test_a_refused_carry_over_changes_nothing(trained):
    state = trained.fresh()
    with pytest.raises(OdtpackError, match=r"fc\.") as caught:
        carry_over(trained.state(), state)
    assert caught.value.hint is not None
    assert state.optimizer is None
    assert "epoch" not in state.properties
    for name, parameter in trained.fresh().parameters:
        np.testing.assert_array_equal(parameter.data, state.parameters[name].data)
    names = {problem.parameter: problem.why for problem in trained.verdict.problems}
    assert names.keys() == {"fc.weight", "fc.bias"}
    assert "[3]" in names["fc.bias"]
    assert "[5]" in names["fc.bias"]


def test_an_adapter_that_counts_otherwise_has_no_place(tmp_path):
    """The same numbers with eight times the alpha are another model."""
    packages = []
    for alpha in (4.0, 32.0):
        spec = AdapterSpec("lora", ("fc*",), (), 2, alpha)
        packages.append(built_package(zoo.mlp((6, 5, 3)), tmp_path / str(alpha), adapter=spec))
    found = diff_packages(*(package.path for package in packages)).verdict
    assert found.level == "incompatible"
    assert {problem.why for problem in found.problems} == {
        "the adapter's alpha changes from 4.0 to 32.0"
    }
    same = diff_packages(packages[0].path, packages[0].path).verdict
    assert (same.level, same.notes) == ("compatible", ())


def test_new_values_of_matrices_inside_the_models_are_noted(tmp_path):
    model = zoo.mlp((64, 32, 3))
    options = {"adapter": AdapterSpec("lora", ("fc1",), (), 2, 4.0), "base": "int8"}
    paths = [
        built_package(each, tmp_path / str(number), **options).path
        for number, each in enumerate((model, with_values(model, "fc1.weight"), model))
    ]
    notes = diff_packages(*paths[:2]).verdict.notes
    assert any("frozen tensors inside the models have new values" in note for note in notes)
    assert diff_packages(paths[0], paths[2]).verdict.notes == ()
