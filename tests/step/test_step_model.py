"""Steps of the step model: those of the other two models, in place, in whatever order."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from odtpack import losses
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.optimizers import SGD, Adafactor, Adam, AdamW, GroupRule, Lion
from odtpack.optimizers import Optimizer as Formula
from odtpack.package.task import Graphs, Task, resolve_update
from odtpack.package.training import build_graphs
from odtpack.spec import MemorySpec
from odtpack.step import chunks
from odtpack.step import model as step_models
from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.package.checks import graphs_of
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import check_models
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import train_step
from odtpack_simulator import latency, simulation
from odtpack_simulator.latency import HostTiming
from odtpack_simulator.memory.runtime_graph import load_runtime_graph
from odtpack_simulator.replay.job import Job
from tests import zoo
from tests.model_text import LEVELS, run, run_in_place, session
from tests.packaging_tools import batch, open_training, statistic_names
from tests.refused import refused
from tests.simulator.profiles import make_profile
from tests.torch_twins import twin
from tests.training.tables import tables

STEPS = 10
UPDATE = ".update.out"
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": lambda: zoo.mlp((40, 30, 10)),
    "cnn": lambda: zoo.cnn(size=14, width=(8, 12), hidden=32),
    "mobilenet-fold": lambda: zoo.mobilenet_v2(32, width_mult=0.2, stages=3),
    "mobilenet-train": lambda: zoo.mobilenet_v2(32, width_mult=0.2, batch_norm="train", stages=3),
    "transformer": lambda: zoo.transformer_encoder(vocab=50, d=32, layers=2, T=16, ff=64, opset=17),
    "tables": tables,  # one of them is a factor of a product, too
}


@pytest.fixture(params=["small", "usual"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates in parts and of single parameters in small models, too; and as they would be."""
    if request.param == "small":
        monkeypatch.setattr(step_models, "OWN", 64)
        monkeypatch.setattr(chunks, "LARGE", 256)
        monkeypatch.setattr(chunks, "PART", 128)
        monkeypatch.setattr(chunks, "LEAST_PART", 1)


def package_of(model, folder, formula, update=None):
    onnx.save(model, folder / "model.onnx")
    build_package(
        folder / "model.onnx", folder / "package", loss="cross_entropy", optimizer=formula,
        **(update or {}), step_model="always", freeze=statistic_names(model), self_check=False,
    )  # fmt: skip
    return Package.open(folder / "package")


def opened(package: Package, *, whole: bool = True, **options: Any) -> Any:
    """Checkpoint state, module and optimizer, which steps with the step model or the others."""
    step = package.step_model if whole else None
    return open_training(package.path, step_model_uri=step, **options)


def train(package, feeds, rate, *, steps=STEPS, whole):
    options = default_session_options(package.training_model, 1)
    state, module, optimizer = opened(package, whole=whole, session_options=options)
    optimizer.set_learning_rate(rate)
    found = [train_step(module, optimizer, [feeds]) for _ in range(steps)]
    values = {name: parameter.data.copy() for name, parameter in state.parameters}
    for name, moments in state.optimizer.moments.items():
        values |= {f"{name}.{index}": moment.copy() for index, moment in enumerate(moments)}
    return found, values


class InMemory:
    """A step model on memory of this object; new values over the old ones, or beside them."""

    def __init__(self, package, feeds, level, pattern, aliased):
        model = onnx.load(package.step_model)
        self.session = session(model, level, enable_mem_pattern=pattern)
        state = CheckpointState.load_checkpoint(package.checkpoint)
        known = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
        user = [node.name for node in self.session.get_inputs()][: len(feeds)]
        known |= dict(zip(user, feeds, strict=True))
        known["update.step"] = np.zeros(1, np.int64)
        self.memory: dict[str, np.ndarray] = {}
        for node in self.session.get_inputs():
            array = known.get(node.name)
            if array is None:
                fill = 1e-3 if node.name == "update.learning_rate" else 0
                array = np.full(node.shape, fill, np.float32)
            self.memory[node.name] = np.array(array)
        self.loss = np.zeros((), np.float32)
        self.outputs = {self.session.get_outputs()[0].name: self.loss}
        self.beside: dict[str, np.ndarray] = {}
        for node in self.session.get_outputs():
            name = node.name.removesuffix(UPDATE)
            if name != node.name:
                memory = self.memory[name].reshape(node.shape)
                if not aliased:
                    memory = self.beside[name] = np.empty_like(memory)
                self.outputs[node.name] = memory

    def step(self) -> float:
        self.memory["update.step"] += 1
        run_in_place(self.session, self.memory, self.outputs)
        for name, array in self.beside.items():
            np.copyto(self.memory[name], array.reshape(self.memory[name].shape))
        return float(self.loss)


ADAMW, LION = AdamW(weight_decay=0.01), Lion(beta1=0.5, beta2=0.6, weight_decay=0.01)


@pytest.mark.parametrize(
    ("name", "formula"), [*((name, ADAMW) for name in MODELS), ("mlp", LION), ("cnn", LION)]
)
@pytest.mark.usefixtures("sizes")
def test_in_place_as_beside_on_every_level(name, formula, tmp_path):
    """ONNX Runtime checks no alias: each graph that it makes is held to the last bit."""
    model = MODELS[name]()
    package = package_of(model, tmp_path, formula)
    feeds = [*batch(model, 4)] if name != "tables" else _tokens()
    for level, pattern in (*((each, False) for each in LEVELS), ("all", True)):
        runs = [InMemory(package, feeds, level, pattern, aliased) for aliased in (True, False)]
        for _ in range(3):
            one, other = (each.step() for each in runs)
            assert one == other
            for each in runs:  # so that gradients turn against Lion's moment
                each.memory["labels"][:] = each.memory["labels"][::-1].copy()
        for key, array in runs[0].memory.items():
            np.testing.assert_array_equal(array, runs[1].memory[key], err_msg=key)


def _tokens() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 40, (4, 6)), random.integers(0, 10, 4)]


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("mobilenet")])
@pytest.mark.usefixtures("sizes")
def test_what_reads_a_parameter_runs_before_its_update(name, level, tmp_path):
    """In the graph as ONNX Runtime executes it, views of the parameter included."""
    package = package_of(MODELS[name](), tmp_path, SGD(momentum=0.9))
    shapes = {"input": (4, *package.manifest.inputs[0].shape[1:]), "labels": (4,)}
    assert package.step_model is not None
    graph = load_runtime_graph(package.step_model, shapes, level=level)  # type: ignore[arg-type]
    owner = {name: name for name in graph.inputs}
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for value in (*node.inputs, *node.implicit):
            read[owner.get(value, value)] = place
        if node.op_type in ("Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten"):
            owner[node.outputs[0]] = owner.get(node.inputs[0], node.inputs[0])
        for value in node.outputs:
            if value.endswith(UPDATE):
                written[value.removesuffix(UPDATE)] = place
    assert len(written) > 5
    for value, place in written.items():
        assert read[value] <= place, value


def test_an_update_runs_before_the_gradients_of_layers_below_it(monkeypatch, tmp_path):
    """Else each gradient, and what it is computed from, would be kept to the end of the step."""
    monkeypatch.setattr(step_models, "OWN", 512)
    layers = 4
    model = zoo.transformer_encoder(vocab=50, d=32, layers=layers, T=16, ff=64, opset=17)
    package = package_of(model, tmp_path, AdamW())
    assert package.step_model is not None
    shapes = {"input": (4, 16), "labels": (4,)}
    nodes = load_runtime_graph(package.step_model, shapes, level="extended").nodes
    order = [name for node in nodes for name in node.outputs if "update." in name]
    for layer in range(layers):
        names = [f"layers.{layer}.linear{i}.weight{UPDATE}" for i in (1, 2)]
        smaller = sum(name.startswith("update.order.") for name in order[: order.index(names[0])])
        total = sum(name.startswith("update.order.") for name in order)
        assert smaller <= total * (layers - layer) / layers
        assert order.index(names[1]) < order.index(names[0])


FORMULAS: dict[str, tuple[Formula, dict[str, Any]]] = {
    "adamw": (AdamW(weight_decay=0.01), {}),
    "adamw-pytorch": (AdamW(weight_decay=0.1, formula="pytorch"), {"clip_value": 0.01}),
    "adam": (Adam(weight_decay=0.01), {}),
    "sgd": (SGD(), {}),
    "sgd-nesterov": (SGD(momentum=0.9, nesterov=True, weight_decay=0.01), {}),
    "lion": (Lion(weight_decay=0.01), {}),
    "groups": (AdamW(weight_decay=0.1), {
        "groups": (GroupRule("*norm*", 0.3, 0.0), GroupRule("layers.0.*", 0.7)),
        "decay_vectors": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.usefixtures("sizes")
def test_ten_steps_as_with_two_models(formula, tmp_path):
    model = MODELS["mlp" if formula == "lion" else "transformer"]()
    package = package_of(model, tmp_path, *FORMULAS[formula])
    # Lion takes the sign of each change: once rounding has decided one, runs part. Of the
    # gradient of a bias of keys it always does.
    steps = 3 if formula == "lion" else STEPS
    check_models(package)
    feeds = [*batch(model, 4)]
    losses, values = train(package, feeds, 1e-3, steps=steps, whole=False)
    same, others = train(package, feeds, 1e-3, steps=steps, whole=True)
    assert losses == pytest.approx(same, rel=1e-6)
    for name, value in values.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mobilenet-train"])
@pytest.mark.usefixtures("sizes")
def test_networks_as_with_two_models(name, tmp_path):
    model = MODELS[name]()
    package = package_of(model, tmp_path, SGD(momentum=0.5))
    feeds = [*batch(model, 4)] if name != "tables" else _tokens()
    rate = 1e-3 if name.startswith("mobilenet") else 0.05
    losses, values = train(package, feeds, rate, whole=False)
    same, others = train(package, feeds, rate, whole=True)
    assert losses == pytest.approx(same, rel=1e-5)
    for key, value in values.items():
        limit = 1e-5 * max(1e-3, float(np.abs(value).max()))
        np.testing.assert_allclose(others[key], value, rtol=0, atol=limit, err_msg=key)


def test_statistics_of_batches_are_updated(tmp_path):
    """One step: later ones of batch normalization in training mode amplify rounding."""
    model = MODELS["mobilenet-train"]()
    package = package_of(model, tmp_path, SGD())
    feeds = [*batch(model, 8)]
    (loss,), values = train(package, feeds, 0.01, steps=1, whole=False)
    (same,), others = train(package, feeds, 0.01, steps=1, whole=True)
    assert loss == pytest.approx(same, rel=1e-6)
    for name, value in values.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_as_pytorch(tmp_path):
    model = zoo.mlp((300, 900, 10))  # the first matrix is updated in parts
    formula = AdamW(weight_decay=0.1, epsilon=1e-8, formula="pytorch")
    package = package_of(model, tmp_path, formula)
    data, labels = batch(model, 16)
    found, _ = train(package, [data, labels], 1e-3, whole=True)
    module = twin(model).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)
    for loss in found:
        optimizer.zero_grad()
        wanted = torch.nn.functional.cross_entropy(
            module(torch.from_numpy(data).double()), torch.from_numpy(labels)
        )
        wanted.backward()
        optimizer.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-4)


def test_a_gradient_smaller_than_its_factors_exists_whole(tmp_path):
    """Of the batch that memory is made small for: large factors would wait for the update."""
    model, found = zoo.mlp((300, 900, 10)), {}
    for size in (2, 4096):
        (folder := tmp_path / str(size)).mkdir()
        update = {"memory_budget": "1 GB", "memory_batch": size}
        package = package_of(model, folder, ADAMW, update)
        _, *inner = graphs_of(onnx.load(package.step_model))
        updates = [kinds for _, nodes in inner if "Sqrt" in (kinds := {n.op_type for n in nodes})]
        # A part of the update computes its columns of the gradient.
        assert ["Gather" in kinds for kinds in updates] == [size == 2]
        found[size] = train(package, [*batch(model, 4)], 1e-3, whole=True)
    assert found[2][0] == found[4096][0]
    for name, value in found[2][1].items():
        np.testing.assert_array_equal(found[4096][1][name], value)


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_with_a_memory_budget(share, monkeypatch):
    """What is computed again reads parameters late; still every step is the same."""
    monkeypatch.setattr(step_models, "OWN", 64)
    model = zoo.transformer_encoder(d=64, layers=2, ff=256, opset=14)
    names = tuple(tensor.name for tensor in model.graph.initializer)
    task = Task(load_model(model), names, (), losses.make_loss("cross_entropy"), optimizer=SGD())
    limit = MemorySpec(limit=int(share * build_graphs(task).memory.before), slowdown=1.0)
    graphs = build_graphs(dataclasses.replace(task, memory=limit))
    assert graphs.memory.decisions
    step = resolve_update(graphs).step_model(graphs)
    assert step is not None  # every alias was proven on the way
    values = run(step, _feeds(step, graphs, model))
    plain = build_graphs(dataclasses.replace(task, memory=None)).training
    feeds = _feeds(plain, graphs, model)
    gradients = run(plain, feeds)
    for name in names:
        moved = values[f"{name}{UPDATE}"].reshape(feeds[name].shape)
        expected = feeds[name] - np.float32(0.1) * gradients[f"{name}_grad.accumulation.out"]
        np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def _feeds(step: ir.Model, graphs: Graphs, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    data, labels = batch(model, 4)
    known = {p.name: p.value() for p in graphs.parameters}
    known |= {
        "input": data, "labels": labels, "lazy_reset_grad": np.ones(1, np.bool_),
        "update.learning_rate": np.full(1, 0.1, np.float32), "update.step": np.ones(1, np.int64),
    }  # fmt: skip
    zeros = {
        str(value.name): np.zeros(value.shape.numpy(), np.float32)
        for value in step.graph.inputs if value.name not in known
    }  # fmt: skip
    return zeros | {str(v.name): known[str(v.name)] for v in step.graph.inputs if v.name in known}


@pytest.mark.parametrize(
    ("formula", "update", "steps"),
    [(AdamW(), {"clip_norm": 1.0}, 1), (Adafactor(), {}, 1), (AdamW(), {}, 2)],
)
def test_no_step_model_where_all_gradients_are_needed(formula, update, steps, tmp_path):
    onnx.save(MODELS["mlp"](), tmp_path / "model.onnx")
    manifest = build_package(
        tmp_path / "model.onnx", tmp_path / "package", loss="cross_entropy", optimizer=formula,
        **update, accumulation_steps=steps, step_model="always",
    )  # fmt: skip
    assert manifest.files.step_model is None


def test_by_itself_where_gradients_take_a_megabyte(tmp_path):
    for name, model, wanted in (
        ("small", zoo.mlp((40, 30, 10)), False),
        ("large", zoo.mlp((784, 400, 10)), True),
    ):
        onnx.save(model, tmp_path / f"{name}.onnx")
        manifest = build_package(
            tmp_path / f"{name}.onnx", tmp_path / name, loss="cross_entropy", self_check=False
        )
        assert (manifest.files.step_model is not None) == wanted
    assert build_package(
        tmp_path / "large.onnx", tmp_path / "never", loss="cross_entropy", step_model="never"
    ).files.step_model is None  # fmt: skip


BUILD = """
import sys
from odtpack.build import build_package
build_package(*sys.argv[1:], loss="cross_entropy", step_model="always", self_check=False)
"""


def test_same_recipe_same_bytes(tmp_path):
    """Built once more in another process, which hashes otherwise."""
    here = package_of(MODELS["transformer"](), tmp_path, AdamW()).step_model
    arguments = [sys.executable, "-c", BUILD, tmp_path / "model.onnx", tmp_path / "there"]
    subprocess.run(arguments, check=True, env=os.environ | {"PYTHONHASHSEED": "2"})
    there = Package.open(tmp_path / "there").step_model
    assert here.read_bytes() == there.read_bytes()


def test_the_training_model_is_loaded_on_demand(tmp_path):
    model = MODELS["mlp"]()
    package = package_of(model, tmp_path, AdamW())
    feeds = [*batch(model, 4)]
    state, module, optimizer = opened(package)
    assert module.input_names() == ["input", "labels"]
    assert module.output_names() == ["loss"]
    moved = package.training_model.rename(tmp_path / "elsewhere.onnx")
    first = float(optimizer.step_on(*feeds))
    assert optimizer.step_count == 1
    assert float(module.eval()(*feeds)[0]) < first  # beside the prediction
    module.train()
    with pytest.raises(OdtpackError, match="There is no model"):
        module(*feeds)
    moved.rename(package.training_model)
    before = state.parameters["fc1.weight"].data.copy()
    module(*feeds)
    assert module.accumulated_batches == 1
    np.testing.assert_array_equal(state.parameters["fc1.weight"].data, before)
    optimizer.step()
    assert optimizer.step_count == 2
    assert np.abs(state.parameters["fc1.weight"].data - before).max() > 0


def test_a_training_goes_on_from_the_other_way(tmp_path):
    """Checkpoints are alike: two steps, saved, and three more by the other models."""
    model = MODELS["mlp"]()
    package = package_of(model, tmp_path, AdamW(weight_decay=0.01))
    feeds = [*batch(model, 4)]
    _, wanted = train(package, feeds, 1e-3, steps=5, whole=False)
    checkpoint = package.checkpoint
    for whole, steps in ((True, 2), (False, 3)):
        state, module, optimizer = opened(package, whole=whole, checkpoint=checkpoint)
        optimizer.set_learning_rate(1e-3)
        for _ in range(steps):
            train_step(module, optimizer, [feeds])
        checkpoint = tmp_path / f"after-{steps}"
        CheckpointState.save_checkpoint(state, checkpoint, include_optimizer_state=True)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(parameter.data, wanted[name], rtol=1e-5, atol=1e-7)


def test_gradients_are_kept_where_something_asks_for_them(tmp_path):
    model = MODELS["mlp"]()
    _, module, optimizer = opened(package_of(model, tmp_path, SGD()))
    feeds = [*batch(model, 4)]
    seen: list[float] = []
    train_step(
        module, optimizer, [feeds],
        before_update=lambda: seen.append(float(np.abs(module.flat.gradients.view("f4")).max())),
    )  # fmt: skip
    assert seen[0] > 0
    module.flat.gradients[:] = 0
    train_step(module, optimizer, [feeds])
    assert not module.flat.gradients.any()
    train_step(module, optimizer, iter([feeds, feeds]))
    assert module.flat.gradients.any()


def test_bad_input_changes_nothing(tmp_path):
    model = MODELS["mlp"]()
    state, _, optimizer = opened(package_of(model, tmp_path, SGD()))
    before = {name: p.data.copy() for name, p in state.parameters}
    data, labels = batch(model, 4)
    with refused("label-out-of-range"):
        optimizer.step_on(data, labels + 10)
    assert optimizer.step_count == 0
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name])


def test_a_step_model_of_another_package_is_refused(tmp_path):
    folders = {name: tmp_path / name for name in ("one", "other", "third")}
    for folder in folders.values():
        folder.mkdir()
    package = package_of(MODELS["mlp"](), folders["one"], SGD())
    other = package_of(zoo.mlp((40, 20, 10)), folders["other"], SGD())
    third = package_of(MODELS["mlp"](), folders["third"], AdamW())
    state = CheckpointState.load_checkpoint(package.checkpoint)
    for wrong in (other.step_model, package.training_model, package.eval_model):
        with refused("model-mismatch"):
            Module(package.training_model, state, step_model_uri=wrong)
    module = Module(package.training_model, state, step_model_uri=third.step_model)
    with refused("model-mismatch"):
        Optimizer(package.optimizer_model, module)


# Steps are timed with the models that a kit makes them with.

SIZES = (300, 900, 3)  # a matrix of more than 2^18 elements


def test_each_device_has_the_times_of_its_kit(tmp_path, monkeypatch):
    build_package(zoo.mlp(SIZES), tmp_path / "package", loss="cross_entropy")
    random = np.random.default_rng(0)
    samples = random.standard_normal((24, SIZES[0])).astype(np.float32)
    np.savez(tmp_path / "data.npz", input=samples, labels=random.integers(0, SIZES[-1], 24))
    timed: list[tuple[Job, HostTiming]] = []
    measure = latency.measure_host

    def measured(job: Job, **options: Any) -> HostTiming:
        timed.append((job, measure(job, **options)))
        return timed[-1][1]

    monkeypatch.setattr(latency, "measure_host", measured)
    board = make_profile("board", 10**9)  # Linux, where the kit is Python's
    page = make_profile("page", 10**9).model_copy(update={"os": "web"})  # JavaScript's has two
    result = simulation.simulate(
        tmp_path / "package", tmp_path / "data.npz", [board, page],
        batch_size=8, epochs=1, learning_rate=0.01, seed=0,
    )  # fmt: skip
    models = {Path(job.step_model).name if job.step_model else None for job, _ in timed}
    assert models == {"step_model.onnx", None}
    for job, host in timed:
        # A step model splits what it has updated together.
        operators = {cost.op_type for cost in host.host_latency().by_operator}
        assert ("Split" in operators) == (job.step_model is not None)
        assert sum(cost.total_ms for cost in host.host_latency().by_operator) > 0
    times = [device.latency.step_ms for device in result.devices]
    if None in times:
        assert "busy" in str([device.latency.not_judged for device in result.devices])
    else:
        assert times[0] != times[1]
