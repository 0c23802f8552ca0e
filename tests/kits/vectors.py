"""Write the conformance suite of the training kits: ``python -m tests.kits.vectors --out DIR``.

Every case is a folder with packages, checkpoints, raw tensors and a ``case.json`` that says what
must come out; docs/formats/kits.md describes it.
"""

import argparse
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime import CheckpointState, LRScheduler, Module, Optimizer, default_session_options
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import write_inference_model
from odtpack_runtime.training.loop import evaluate, loss_of
from odtpack_runtime.training.schedules import make_schedule
from odtpack_simulator.replay.paired_loss import accuracy_inputs
from tests.kept_processes import kept
from tests.kits.cases import CASES, NOT_FINITE, Batch, Case
from tests.kits.errors import write_errors
from tests.packaging_tools import built_package

FORMAT = 1
THREADS = 1
"""With one thread the order of all sums is fixed, and equal means equal to the bit."""


@dataclass
class Folder:
    """A case while it is written."""

    path: Path
    content: dict[str, Any]
    data: bytearray = field(default_factory=bytearray)

    def tensor(self, name: str, array: Array) -> dict[str, Any]:
        """Append a tensor to the raw data; return how ``case.json`` refers to it."""
        entry = {
            "name": name, "dtype": array.dtype.name, "shape": list(array.shape), "file": "data.bin",
            "offset": len(self.data),
        }  # fmt: skip
        self.data += np.ascontiguousarray(array).tobytes()
        return entry

    def tensors(self, names: Sequence[str], arrays: Sequence[Array]) -> list[dict[str, Any]]:
        """Append several."""
        return [self.tensor(*pair) for pair in zip(names, arrays, strict=True)]

    def close(self) -> dict[str, Any]:
        """Write what was gathered; return the entry of the index."""
        (self.path / "data.bin").write_bytes(self.data)
        text = json.dumps({"name": self.path.name, **self.content}, indent=1, ensure_ascii=False)
        (self.path / "case.json").write_text(text + "\n", encoding="utf-8")
        return {"name": self.path.name, "kind": self.content["kind"]}


def save(state: CheckpointState, path: Path, **options: bool) -> None:
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True, **options)


class Run:
    """A package in training, as the case tells it."""

    def __init__(self, case: Case, package: Package, checkpoint: Path | None = None) -> None:
        self.case, self.package = case, package
        self.whole = package.step_model is not None
        paths = {key: package.path / name for key, name in case.through.items()}
        training = paths.get("training_model", package.training_model)
        self.state = CheckpointState.load_checkpoint(checkpoint or package.checkpoint)
        options = default_session_options(training, threads=THREADS)
        self.module = Module(
            training, self.state, paths.get("eval_model", package.eval_model),
            session_options=options, step_model_uri=package.step_model,
        )  # fmt: skip
        model = paths.get("optimizer_model", package.optimizer_model)
        self.optimizer = Optimizer(model, self.module)
        self.scheduler = None
        if case.learning_rate is not None:
            self.optimizer.set_learning_rate(case.learning_rate)
        if case.schedule is not None:
            kind, settings, rate = case.schedule
            self.scheduler = LRScheduler(self.optimizer, make_schedule(kind, settings), rate)

    def step(self, folder: Folder, batch: Batch, *, update: bool) -> dict[str, Any]:
        """Make a step; return what ``case.json`` says of it."""
        rate, made = self.optimizer.get_learning_rate(), self.optimizer.step_count
        skipped = self.module.skipped_steps
        results = (self.optimizer.step_on if self.whole else self.module)(*batch)
        outputs = results[1:] if isinstance(results, tuple) else ()
        names = self.module.output_names()[1:]
        entry = {
            "inputs": folder.tensors(self.module.input_names(), batch), "loss": loss_of(results),
            "outputs": folder.tensors(names, outputs), "update": update, "reset": update,
        }  # fmt: skip
        if self.module.skipped_steps > skipped:
            entry |= {"loss": None, "outputs": [], "not_finite": self.module.last_not_finite.code}
        if update:
            entry["rate"] = rate
            if not self.whole:
                self.optimizer.step()
            if self.scheduler is not None and self.optimizer.step_count > made:
                self.scheduler.step()
            self.module.lazy_reset_grad()
        return entry

    def finish(self, folder: Folder, batch: Batch) -> dict[str, Any]:
        """Evaluate, save and export."""
        results = self.module.eval()(*batch)
        scores, labels = accuracy_inputs(self.package.manifest)
        found = evaluate(
            self.module, [batch], scores=scores, labels=labels,
            ignored_label=self.package.manifest.ignored_label,
        )  # fmt: skip
        for name, value in self.case.properties.items():
            self.state.properties[name] = value
        save(self.state, folder.path / "after.ckpt")
        inputs = folder.tensors(self.module.input_names(), batch)
        return {
            "evaluation": {"inputs": inputs, "loss": loss_of(results), "accuracy": found.accuracy},
            "properties": dict(self.case.properties), "after": "after.ckpt",
            "export": self._export(folder, batch),
        }  # fmt: skip

    def _export(self, folder: Folder, batch: Batch) -> dict[str, Any] | None:
        info = self.package.manifest.inference
        if info is None:
            return None
        values = {**self.state.arrays(trainable=True), **self.state.arrays(trainable=False)}
        path = folder.path / "export.onnx"
        write_inference_model(self.package, values, path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        fed = dict(zip(self.module.input_names(), batch, strict=True))
        fed = {name: fed[name] for name in info.inputs}
        outputs = session.run(list(info.outputs), fed)
        return {
            "file": path.name,
            "inputs": folder.tensors(list(fed), list(fed.values())),
            "outputs": folder.tensors(info.outputs, outputs),
        }


def build(case: Case, folder: Path) -> Package:
    """Build the package of a case."""
    return built_package(case.model(), folder, **case.build)


def _once(case: Case, folder: Path, suite: Path | None) -> Package:
    """The package of a case: that of another suite, unless it depends on ONNX Runtime's version."""
    if suite is None or "ort_format" in case.build:
        return build(case, folder)
    return Package.open(shutil.copytree(suite / folder.parent.name / folder.name, folder))


def write_train(name, case, out, packages=None):
    """Write a run, and the same run cut in two."""
    folder = open_folder(out, name)
    run = Run(case, _once(case, folder.path / "package", packages))
    batches = list(_batches(case, case.steps + 1))
    folder.content = _head("not_finite" if case.spoilt else "train", case, "package/checkpoint")
    steps = []
    for index, batch in enumerate(batches[:-1], 1):
        if index in case.spoilt:
            batch[0].flat[0] = np.nan
        steps.append(run.step(folder, batch, update=index % case.update_every == 0))
    if case.spoilt:
        folder.content["skipped_steps"] = run.module.skipped_steps
    folder.content |= {"steps": steps, **run.finish(folder, batches[-1])}
    yield folder.close()


def write_resume(name, case, out, packages=None):
    """Write a run that begins with a checkpoint in the middle of another."""
    folder = open_folder(out, f"resume_{name}")
    package = _once(case, folder.path / "package", packages)
    first, batches = Run(case, package), list(_batches(case, case.steps + 1))
    for batch in batches[:3]:
        first.step(Folder(folder.path, {}), batch, update=True)
    start = folder.path / "before.ckpt"
    save(first.state, start)
    resumed = dataclasses.replace(case, learning_rate=None, schedule=None)
    run = Run(resumed, package, start)
    run.scheduler = LRScheduler.restore(run.optimizer)
    folder.content = _head("resume", resumed, start.name)
    steps = [run.step(folder, batch, update=True) for batch in batches[3:-1]]
    folder.content |= {"steps": steps, **run.finish(folder, batches[-1])}
    yield folder.close()


def write_nominal(out: Path) -> Iterator[dict[str, Any]]:
    """Write a run whose parameters come as one vector, and that vector."""
    case = dataclasses.replace(CASES["cnn"], properties={}, steps=2)
    case = dataclasses.replace(case, build={**case.build, "nominal": True})
    folder = open_folder(out, "nominal")
    package = build(case, folder.path / "package")
    values = Run(case, package).module.get_contiguous_parameters(trainable_only=False).numpy()
    run = Run(case, package, package.nominal_checkpoint)
    run.module.copy_buffer_to_parameters(values, trainable_only=False)
    batches = list(_batches(case, 3))
    head = _head("nominal", case, f"package/{package.nominal_checkpoint.name}")
    folder.content = head | {"values": folder.tensor("values", values)}
    steps = [run.step(folder, batch, update=True) for batch in batches[:2]]
    folder.content |= {"steps": steps, **run.finish(folder, batches[-1])}
    yield folder.close()
    folder = open_folder(out, "buffer")
    shutil.copytree(package.path, folder.path / "package")
    folder.content = {"kind": "buffer", "package": "package", "checkpoint": "package/checkpoint"}
    folder.content["values"] = folder.tensor("values", values)
    yield folder.close()


def write_self_checks(out: Path) -> Iterator[dict[str, Any]]:
    """Write packages whose self-check passes, and some where it cannot."""
    for name in ("cnn", "mobilenet_batch_norm", "transformer", "recommender", "float16_model",
                 "step_adamw"):  # fmt: skip
        folder = open_folder(out, f"self_check_{name}")
        build(CASES[name], folder.path / "package")
        folder.content = {"kind": "self_check", "package": "package", "code": None}
        yield folder.close()
    folder = open_folder(out, "self_check_failed")
    package = build(CASES["sgd"], folder.path / "package")
    info = package.manifest.self_check
    losses = (*info.losses[:3], info.losses[3] + 1.0, info.losses[4])
    check = dataclasses.replace(info, losses=losses)
    wrong = dataclasses.replace(package.manifest, self_check=check)
    (package.path / "manifest.json").write_text(wrong.to_json())
    folder.content = {"kind": "self_check", "package": "package", "code": "self-check-failed"}
    yield folder.close()
    folder = open_folder(out, "self_check_missing")
    case = CASES["sgd"]
    without = dataclasses.replace(case, build={**case.build, "self_check": False})
    build(without, folder.path / "package")
    folder.content = {"kind": "self_check", "package": "package", "code": "no-self-check"}
    yield folder.close()


def write_recoveries(out: Path) -> Iterator[dict[str, Any]]:
    """Write damaged checkpoints, each with the save before it."""
    case = CASES["adam"]
    saves = out / ".saves"
    run = Run(case, build(case, saves / "package"))
    for index, batch in enumerate(_batches(case, 5), 1):
        run.step(Folder(saves, {}), batch, update=True)
        if index in (3, 5):
            save(run.state, saves / "trained", keep_previous=True)
    good = (saves / "trained").read_bytes()
    middle = len(good) // 2
    changed = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    damaged = {"changed": changed, "cut": good[:middle], "missing": None}
    for name, data in damaged.items():
        folder = open_folder(out, f"recover_{name}")
        folder.content = {
            "kind": "recover", "checkpoint": "trained", "previous": "trained.previous", "step": 3,
            "lost": 2 if name == "changed" else None,
        }  # fmt: skip
        if data is not None:
            (folder.path / "trained").write_bytes(data)
        shutil.copyfile(saves / "trained.previous", folder.path / "trained.previous")
        yield folder.close()
    shutil.rmtree(saves)


def open_folder(out: Path, name: str) -> Folder:
    """Make the folder of a case."""
    path = out / name
    path.mkdir(parents=True)
    return Folder(path, {})


def write_suite(out, names=None, packages=None):
    """Write the runs of these names, or all and everything else, in place of what is there.

    ``packages`` is a suite whose packages are trained, where they would be the same.
    """
    stage = out.with_name(f".{out.name}.new")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    entries: list[Mapping[str, Any]] = []
    for name in names if names is not None else CASES:
        entries += write_train(name, CASES[name], stage, packages)
    if names is None:
        for name in ("adam", "groups", "adafactor", "schedule_cosine", "step_groups"):
            entries += write_resume(name, CASES[name], stage, packages)
        for name, case in NOT_FINITE.items():
            entries += write_train(name, case, stage, packages)
        entries += write_nominal(stage)
        entries += write_self_checks(stage)
        entries += write_recoveries(stage)
        entries += write_errors(stage)
    index = {
        "format": FORMAT, "onnxruntime": onnxruntime.__version__, "threads": THREADS,
        "cases": entries,
    }  # fmt: skip
    (stage / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    if out.exists():
        shutil.rmtree(out)
    stage.rename(out)


def _head(kind: str, case: Case, checkpoint: str) -> dict[str, Any]:
    schedule = None
    if case.schedule is not None:
        name, settings, rate = case.schedule
        schedule = {"kind": name, "settings": dict(settings), "initial_lr": rate}
    return {
        "kind": kind, "package": "package",
        "models": {key: f"package/{name}" for key, name in case.through.items()},
        "checkpoint": checkpoint, "step_model": case.build.get("step_model") == "always",
        "exact": True, "tolerance": case.tolerance, "learning_rate": case.learning_rate,
        "schedule": schedule,
    }  # fmt: skip


def _batches(case: Case, count: int) -> Iterator[Batch]:
    random = np.random.default_rng(0)
    for index in range(count):
        yield case.data(random, case.samples[index % len(case.samples)])


def main() -> None:
    """Write the suite where the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.kits.vectors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, help="a suite whose packages are trained")
    arguments = parser.parse_args()
    with kept():
        write_suite(arguments.out, packages=arguments.packages)


if __name__ == "__main__":
    main()
