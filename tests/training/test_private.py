"""Private steps against PyTorch's gradients of single samples, and what they promise."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from odtpack.build import build_package
from odtpack.optimizers import SGD, AdamW
from odtpack.privacy import epsilon
from odtpack_runtime import CheckpointState, Optimizer, Package
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.training.loop import train_step
from odtpack_runtime.training.private import (
    poisson_batches,
    private_gradient,
    secure_normal,
    secure_uniform,
)
from odtpack_simulator.fleet.local_training import LocalSettings, LocalTrainer
from tests import zoo
from tests.cli.conftest import assert_refused
from tests.packages.mutations import edit
from tests.packaging_tools import built_training, open_module, open_training
from tests.refused import refused

SIZES = (6, 5, 3)
RATE = 0.5


def package(folder: Path, clip: float = 0.2, noise: float = 0.0, **more: Any) -> Path:
    path = folder / "package"
    options = {"optimizer": SGD(), "privacy_clip": clip, "privacy_noise": noise} | more
    build_package(zoo.mlp(SIZES), path, loss="cross_entropy", **options)
    return path


def batch(count: int = 7) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    scale = np.geomspace(0.01, 30, count)[:, None]  # some gradients above the norm, some below
    data = (random.standard_normal((count, SIZES[0])) * scale).astype(np.float32)
    return [data, random.integers(0, SIZES[-1], count)]


def values(state: CheckpointState) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in state.parameters}


def assert_values(state: CheckpointState, wanted: dict[str, np.ndarray]) -> None:
    for name, value in values(state).items():
        np.testing.assert_array_equal(value, wanted[name])


def by_hand(start: dict[str, np.ndarray], samples: list[np.ndarray], clip: float) -> Any:
    """The mean of clipped gradients of single samples, by PyTorch; and their norms."""
    weights = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ weights["fc1.weight"].T + weights["fc1.bias"])
        scores = hidden @ weights["fc2.weight"].T + weights["fc2.bias"]
        return torch.nn.functional.cross_entropy(scores[None], y[None])

    x, y = torch.tensor(samples[0], dtype=torch.float64), torch.tensor(samples[1])
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.sqrt(sum(g.reshape(len(x), -1).square().sum(1) for g in each.values()))
    factor = torch.clamp(clip / norms, max=1.0)
    return {
        name: torch.einsum("n,n...->...", factor, g).numpy() / len(x) for name, g in each.items()
    }, norms.numpy()


def test_a_step_without_noise_is_pytorch_s(tmp_path):
    state, module, optimizer = open_training(package(tmp_path, clip=1.5))
    optimizer.set_learning_rate(RATE)
    for _ in range(3):
        before = values(state)
        wanted, norms = by_hand(before, batch(), 1.5)
        assert norms.min() < 1.5 < norms.max()
        train_step(module, optimizer, [batch()])
        for name, value in values(state).items():
            np.testing.assert_allclose(value, before[name] - RATE * wanted[name], atol=2e-6)
    assert optimizer.step_count == 3


def test_one_sample_changes_a_step_by_no_more_than_the_norm(tmp_path):
    _, module, optimizer = open_training(package(tmp_path, clip=0.1))
    samples = batch()
    found = []
    for count in (7, 6):
        private_gradient(module, [a[:count] for a in samples], optimizer.privacy, 7)  # type: ignore[arg-type]
        found.append(module.flat.gradients.view(np.float32).copy())
    assert 0.09 < 7 * np.linalg.norm(found[0] - found[1]) < 0.1 + 1e-6


def test_a_sample_that_is_not_finite_counts_for_nothing(tmp_path):
    _, module, optimizer = open_training(package(tmp_path))
    samples = batch()
    assert optimizer.privacy is not None
    private_gradient(module, [a[1:] for a in samples], optimizer.privacy, 7)
    without = module.flat.gradients.copy()
    samples[0][0] = np.nan
    private_gradient(module, samples, optimizer.privacy, 7)
    np.testing.assert_array_equal(module.flat.gradients, without)


def test_noise_has_the_deviation_that_it_should(tmp_path):
    options = {"loss": "cross_entropy", "privacy_clip": 0.5, "privacy_noise": 3.0}
    _, module, optimizer = built_training(zoo.mlp((50, 400, 3)), tmp_path / "package", **options)
    assert optimizer.privacy is not None
    samples = [np.empty((0, 50), np.float32), np.empty(0, np.int64)]
    assert private_gradient(module, samples, optimizer.privacy, 10) == []
    slots = module.flat.trainable.slots
    drawn = np.concatenate([module.state.parameters[s.name].grad.ravel() for s in slots])  # type: ignore[union-attr]
    assert drawn.std() == pytest.approx(0.5 * 3.0 / 10, rel=5 / np.sqrt(2 * drawn.size))
    assert abs(drawn.mean()) < 5 * 0.15 / np.sqrt(drawn.size)
    gaps = module.flat.gradients.view(np.float32).size - drawn.size
    assert np.count_nonzero(module.flat.gradients.view(np.float32) == 0) >= gaps


def test_secure_numbers_are_normal():
    from scipy import stats

    drawn = secure_normal(40_001)
    assert drawn.shape == (40_001,)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert stats.kstest(np.abs(drawn[::2]) * np.abs(drawn[1::2][0]), "norm").pvalue < 1e-6
    halves = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 : -1]
    assert abs(np.corrcoef(*halves)[0, 1]) < 0.05
    assert not np.array_equal(secure_normal(5), secure_normal(5))


def test_secure_numbers_are_even():
    from scipy import stats

    drawn = secure_uniform(40_001)
    assert (drawn.shape, drawn.min() >= 0, drawn.max() < 1) == ((40_001,), True, True)
    assert stats.kstest(drawn, "uniform").pvalue > 1e-6
    assert not np.array_equal(secure_uniform(5), secure_uniform(5))


def test_samples_are_drawn_independently():
    batches = list(poisson_batches(np.arange(1000) + 5, 0.02, 2000))
    sizes = np.array([len(each) for each in batches])
    assert sizes.mean() == pytest.approx(20, rel=0.03)
    assert sizes.var() == pytest.approx(1000 * 0.02 * 0.98, rel=0.2)
    counts = np.bincount(np.concatenate(batches), minlength=1005)
    assert counts[:5].sum() == 0
    assert counts[5:].var() == pytest.approx(2000 * 0.02 * 0.98, rel=0.2)


def test_noise_is_another_in_each_run_unless_it_is_seeded(tmp_path):
    path = package(tmp_path, noise=1.0)
    ends = []
    for seed in (None, None, 4, 4):
        state, module, optimizer = open_training(path)
        normal = secure_normal if seed is None else np.random.default_rng(seed).standard_normal
        train_step(module, optimizer, [batch()], noise=normal)
        ends.append(b"".join(value.tobytes() for value in values(state).values()))
    assert len(set(ends)) == 3
    assert ends[2] == ends[3]


def test_a_step_with_gradients_that_are_not_private_is_refused(tmp_path):
    path = package(tmp_path)
    manifest = Package.open(path).manifest
    assert manifest.privacy is not None
    assert "private" in str(manifest.self_check.reason)
    state, module, optimizer = open_training(path)
    before = values(state)
    module(*batch())
    with refused("private-training"):
        optimizer.step()
    assert_values(state, before)
    with refused("private-batch"):
        train_step(module, optimizer, [[batch()[0], batch()[1][:3]]])


@pytest.mark.parametrize(("model", "options", "words"), [
    ("mlp", {"privacy_clip": 0.0, "privacy_noise": 1.0}, "above 0"),
    ("mlp", {"privacy_clip": 1.0, "privacy_noise": float("nan")}, "0 or more"),
    ("mlp", {"clip_norm": 1.0, "privacy_clip": 1.0, "privacy_noise": 1.0}, "not a second time"),
    ("mlp", {"accumulation_steps": 2}, "sample by sample"),
    ("batch norm", {}, "statistic of whole batches"),
    ("mlp", {"runtime": "ort-training"}, "stock ONNX Runtime"),
    ("fixed", {}, "single samples"),
])  # fmt: skip
def test_what_cannot_be_private_is_an_error(model, options, words, tmp_path):
    norm = model == "batch norm"
    made = zoo.mobilenet_v2(batch_norm="train", stages=1) if norm else zoo.mlp(SIZES)
    if model == "fixed":
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    chosen = {"privacy_clip": 1.0, "privacy_noise": 1.0} | options
    with refused("private-training", words):
        build_package(made, tmp_path / "package", loss="cross_entropy", **chosen)
    assert not (tmp_path / "package").exists()


def test_verify_sees_whether_manifest_and_model_agree(tmp_path):
    path = package(tmp_path, noise=1.0)
    verify_package(path)
    edit(path, lambda content: content.update(privacy=None))
    with refused("manifest-contradicts", "privacy"):
        verify_package(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"clip_norm": 0, "noise_multiplier": 1}',
                                  '{"clip_norm": 1, "noise_multiplier": -1}',
                                  '{"clip_norm": [1], "noise_multiplier": 1}'])  # fmt: skip
def test_bad_metadata_is_an_error(text, tmp_path):
    path = package(tmp_path)
    model = onnx.load(path / "optimizer_model.onnx")
    for entry in model.metadata_props:
        if entry.key == "odtpack.privacy":
            entry.value = text
    onnx.save(model, tmp_path / "optimizer.onnx")
    with refused("bad-metadata"):
        Optimizer(tmp_path / "optimizer.onnx", open_module(path))
    data = edit(path, lambda content: content["privacy"].update(clip_norm=-1.0), sealed=False)
    with refused("manifest-invalid"):
        Manifest.from_json(data, "manifest.json")


def test_adamw_steps_along_the_private_gradient(tmp_path):
    """The optimizer sees nothing else: the same as a plain package that is given it."""
    state, module, optimizer = open_training(package(tmp_path, optimizer=AdamW()))
    train_step(module, optimizer, [batch()])
    trained = built_training(zoo.mlp(SIZES), tmp_path / "plain", optimizer=AdamW())
    other, plain, plain_optimizer = trained
    wanted, _ = by_hand(values(other), batch(), 0.2)
    plain(*batch())
    for name, gradient in wanted.items():
        other.parameters[name].grad[...] = gradient  # type: ignore[index]
    plain_optimizer.step()
    for name, value in values(other).items():
        np.testing.assert_allclose(value, values(state)[name], atol=2e-4)


class Client:
    """A client with some samples, and its answers to messages of a server."""

    def __init__(self, path: Path, data: dict[str, np.ndarray] | int) -> None:
        self.trainer = LocalTrainer(Package.open(path))
        self.start = self.trainer.initial()
        if isinstance(data, int):
            data = dict(zip(("input", "labels"), batch(data), strict=True))
        self.data, self.indices = data, np.arange(len(data["labels"]))

    def train(self, *settings: float, number: int = 1, simulated: bool = False, **more: int) -> Any:
        return self.trainer.train(
            self.start, self.data, self.indices, LocalSettings(*settings, **more),
            round_number=number, client=2, simulated=simulated,
        )  # fmt: skip


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_clients_draw_what_only_a_simulation_can_repeat(noise, tmp_path):
    """Batches and noise: who knows all that a server knows cannot take them out of an answer."""
    client = Client(package(tmp_path, noise=noise), 12)

    def answer(seed: int, *, simulated: bool) -> bytes:
        update = client.train(4, 2, 0.1, seed=seed, simulated=simulated)
        assert update.steps == 6
        return b"".join(array.tobytes() for array in update.arrays.values())

    assert answer(1, simulated=True) == answer(1, simulated=True) != answer(2, simulated=True)
    assert len({answer(1, simulated=False) for _ in range(3)}) == 3


@pytest.mark.parametrize("simulated", [False, True])
def test_clients_draw_each_sample_for_each_batch_on_its_own(simulated, tmp_path):
    """Of two batches with half of the samples each, a quarter of the samples is in neither one."""
    count, rounds = 40, 60
    options = {"loss": "cross_entropy", "optimizer": SGD(), "privacy_clip": 1.0}
    build_package(zoo.mlp((count, 3)), tmp_path / "package", privacy_noise=0.0, **options)
    # Sample i alone moves column i of the weights.
    data = {"input": np.eye(count, dtype=np.float32), "labels": np.arange(count) % 3}
    client = Client(tmp_path / "package", data)
    unmoved = []
    for number in range(rounds):
        found = client.train(count // 2, 1, 0.1, number=number, simulated=simulated).arrays
        same = found["fc1.weight"] == client.start["fc1.weight"]
        unmoved.append(int(same.all(axis=0).sum()))
    assert np.mean(unmoved) == pytest.approx(count / 4, abs=5 * np.sqrt(count * 3 / 16 / rounds))
    assert np.var(unmoved) == pytest.approx(count * 3 / 16, rel=0.9)


def test_a_private_client_without_a_drawn_sample_sends_noise(tmp_path):
    client = Client(package(tmp_path, clip=0.5, noise=3.0), 2)
    updates = [client.train(1, 1, 1.0) for _ in range(200)]
    none = [update for update in updates if not np.isfinite(update.loss)]
    assert len(none) == pytest.approx(200 / 16, abs=17)  # neither of two, and that twice
    moves = np.concatenate(
        [(e.arrays[name] - array).ravel() for e in none for name, array in client.start.items()]
    )
    assert moves.std() == pytest.approx(np.sqrt(2) * 1.5, rel=0.3)


def test_a_private_client_does_not_draw_dropout_from_the_seed_of_the_server(tmp_path, monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(onnxruntime, "set_seed", seeds.append)
    client = Client(package(tmp_path, clip=0.5, noise=3.0), 2)
    for simulated in (False, False, True, True):
        client.train(1, 1, 1.0, simulated=simulated)
    assert len(seeds) == 8  # two batches each
    assert seeds[:2] != seeds[2:4]
    assert seeds[4:6] == seeds[6:]


@pytest.mark.parametrize(
    ("samples", "size", "noise", "epochs", "delta", "published"),
    [(60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595), (100_000, 100, 1.0, 30, 1e-7, 1.4154988495)],
)
def test_epsilon_is_what_tensorflow_privacy_publishes(
    samples, size, noise, epochs, delta, published
):
    """Cases of its compute_dp_sgd_privacy_test.py."""
    pytest.importorskip("dp_accounting")
    found = epsilon(noise, size / samples, epochs * samples // size, delta)
    assert found == pytest.approx(published, rel=1e-6)


def test_an_extreme_epsilon_is_said_without_warnings(run):
    pytest.importorskip("dp_accounting")
    outcome = run("privacy", "--noise", "0", "--samples", "1000", code=0)
    assert "nothing is private" in outcome.out
    outcome = run("privacy", "--noise", "1e9", "--samples", "1000", code=0)
    assert outcome.out.startswith("epsilon 0 at delta 0.0001")
    assert outcome.err == ""


def test_epsilon_at_its_limits():
    pytest.importorskip("dp_accounting")
    assert epsilon(0.0, 0.1, 5, 1e-5) == np.inf
    assert epsilon(1.0, 0.1, 0, 1e-5) == 0
    for numbers in ((-1, 0.1, 5, 1e-5), (1, 0, 5, 1e-5), (1, 2, 5, 1e-5), (1, 0.1, 5, 1.0)):
        with refused("bad-argument"):
            epsilon(*numbers)


def test_command_line(tmp_path, run):
    onnx.save(zoo.mlp(SIZES), tmp_path / "model.onnx")
    random = np.random.default_rng(2)
    labels = random.integers(0, 3, 300)
    data = random.standard_normal((300, 6)).astype(np.float32) + 2 * np.eye(3, 6)[labels]
    np.savez(tmp_path / "data.npz", input=data.astype(np.float32), labels=labels)
    path = tmp_path / "package"
    asked = ("--loss", "cross_entropy", "--privacy-clip", "1", "--privacy-noise", "0.8")
    run("build", tmp_path / "model.onnx", "--out", path, *asked, code=0)
    assert "clipped to 1, noise of 0.8 times that" in run("inspect", path).out
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'model = "model.onnx"\n[loss]\nkind = "cross_entropy"\n'
        "[privacy]\nclip_norm = 1.0\nnoise_multiplier = 0.8\n"
    )
    same = tmp_path / "same"
    run("build", "--recipe", recipe, "--out", same, code=0)
    assert Package.open(path).manifest.recipe_digest == Package.open(same).manifest.recipe_digest
    train = "train", path, "--data", tmp_path / "data.npz"
    result = run(*train, "--lr", "0.02", "--epochs", "4", "--json", code=0).json()
    assert result["eval_loss_after"] < result["eval_loss_before"]
    assert result["privacy"]["sampling_rate"] == pytest.approx(32 / 240)
    assert_refused(run("simulate", *train[1:], "--device", "pi-5"), "private-training")
    for noise in ("0.8", "1", "0"):
        alone = *asked[:2], "--privacy-noise", noise
        outcome = run("build", tmp_path / "model.onnx", "--out", tmp_path / "x", *alone)
        assert_refused(outcome, "option-not-used")
    recipe.write_text(recipe.read_text().replace("clip_norm = 1.0\n", "").replace("0.8", "1.0"))
    assert_refused(run("build", "--recipe", recipe, "--out", tmp_path / "x"), "option-not-used")
    run("build", tmp_path / "model.onnx", "--out", tmp_path / "x", *asked[:4], code=0)
    assert "noise of 1 times that" in run("inspect", tmp_path / "x").out
    dp_accounting = pytest.importorskip("dp_accounting")
    spent = epsilon(0.8, 32 / 240, result["steps"], 0.1 / 240)
    assert result["privacy"]["epsilon"] == pytest.approx(spent)
    resume = (*train, "--resume", f"{path}.ckpt", "--json")
    further = "--out", tmp_path / "further.ckpt"
    for size, kinds in ((240, [(240, 2)]), (32, [(240, 2), (32, 16)])):
        found = run(*resume, *further, "--batch-size", size, "--epochs", "2", code=0).json()
        accountant = dp_accounting.rdp.RdpAccountant()
        gaussian = dp_accounting.GaussianDpEvent(0.8)
        for each, steps in ((32, result["steps"]), *kinds):
            event = dp_accounting.PoissonSampledDpEvent(each / 240, gaussian)
            accountant.compose(event, steps)
        wanted = accountant.get_epsilon(0.1 / 240)
        assert found["privacy"]["epsilon"] == pytest.approx(wanted, rel=1e-12)
        resume = (*resume[:5], further[1], "--json")
    for record in (None, "[[0.8, 0.1, 1]]", "[[0.8, 2, 50]]", "[[]]", "{"):
        state = CheckpointState.load_checkpoint(f"{path}.ckpt")
        if record is None:
            del state.properties["odtpack.private_steps"]
        else:
            state.properties["odtpack.private_steps"] = record
        CheckpointState.save_checkpoint(state, tmp_path / "unknown.ckpt", True)
        unknown = (*resume[:5], tmp_path / "unknown.ckpt", *further, "--json")
        outcome = run(*unknown, "--epochs", "1", code=0)
        assert outcome.json()["privacy"]["epsilon"] is None
        assert "epsilon unknown" in outcome.err
    outcome = run("privacy", "--noise", "1.3", "--samples", "60000", "--batch-size", "150",
                  "--epochs", "15", "--delta", "1e-5")  # fmt: skip
    assert (outcome.code, outcome.out) == (0, "epsilon 0.7242 at delta 1e-05, 6000 steps\n")


def test_a_batch_larger_than_the_data_is_all_of_them(tmp_path, run):
    """Without noise its steps are those of a batch as large as the data."""
    path = package(tmp_path)
    data, labels = batch(40)
    np.savez(tmp_path / "data.npz", input=data, labels=labels)
    losses = [
        run("train", path, "--data", tmp_path / "data.npz", "--holdout", "0", "--batch-size", size,
            "--lr", "0.5", "--out", tmp_path / "it.ckpt", "--json").json()["eval_loss_after"]
        for size in (40, 400)
    ]  # fmt: skip
    assert losses[0] == losses[1]


def test_delta_is_checked_before_any_step(tmp_path, run):
    path = package(tmp_path)
    command = "train", path, "--data", tmp_path / "none.npz", "--out", tmp_path / "it.ckpt"
    outcome = run(*command, "--delta", "2")
    assert_refused(outcome, "bad-argument")
    assert "help: it is the probability that the guarantee fails" in outcome.err
    build_package(zoo.mlp(SIZES), tmp_path / "plain", loss="cross_entropy")
    outcome = run("train", tmp_path / "plain", *command[2:], "--delta", "0.1")
    assert_refused(outcome, "option-not-used")


def test_a_second_batch_is_refused_and_no_step_is_made(tmp_path):
    state, module, optimizer = open_training(package(tmp_path))
    before = values(state)
    with refused("private-batch"):
        train_step(module, optimizer, [batch(), batch()])
    assert optimizer.step_count == 0
    assert_values(state, before)
