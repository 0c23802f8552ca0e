"""Step times of the training kits beside Python's, and what each adds to an app.

    python -m benchmarks.kits [--rounds 3] [--kit NAME ...] [--record]

docs/kits.md says how. Writes ``build/kits/record.json``, with what the tests said of each platform
(``make kits``), and with ``--record`` docs/kits.json, of which that page is made. Kits that are not
asked for keep what is there. With ``--rounds 0`` only sizes are taken.
"""

import dataclasses
import datetime
import gzip
import json
import operator
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks import gpu
from odtpack.build import build_package
from odtpack_runtime import Package
from scripts.harness import ROOT, in_turns, options, scratch
from tests import zoo
from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit, web
from tests.kits.ran import PLATFORMS, RAN, Ran

NETWORKS: dict[str, tuple[Any, int, int]] = {
    "mlp": (lambda: zoo.mlp((784, 256, 10)), 32, 3000),
    "cnn": (lambda: zoo.cnn(size=28, width=(16, 32), classes=10), 32, 1000),
    "transformer": (zoo.transformer_encoder, 4, 30),
}
"""Model, samples in a batch, steps; the first half of them warms up. A Java machine compiles for
two seconds and more: in a shorter run that is measured, and not the step."""
Task = dict[str, Any]


def _installed(task: Task) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kits.python_training", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout))


def _from_the_first(task: Task) -> dict[str, Any]:
    """As the programs in C++, Swift and C#, which say what all steps took, the first ones too."""
    found = _installed(task)
    return {**found, "times": [statistics.fmean(found["times"])]}


def _native(kit: Any) -> Callable[[Task], dict[str, Any]]:
    """How a program in C++, Swift or C# trains: it says what all steps took together."""

    def train(task: Task) -> dict[str, Any]:
        batch = {"inputs": [{"name": name, **each} for name, each in task["data"].items()]}
        job = {"package": "package", "steps": [batch], "evaluation": batch, "threads": 1,
               "count": task["steps"]}  # fmt: skip
        found = kit.measure(job, Path(task["package"]).parent)
        return {"times": [found["processor_seconds"] / task["steps"] * 1e3]}

    return train


def _kotlin(task: Task) -> dict[str, Any]:
    # Compiled as far as it goes: the tests' option spares short programs that.
    found = kotlin_kit.run("train", json.dumps(task), options=("-XX:+UseSerialGC",))
    return dict(json.loads(found))


def _lines(pattern: str) -> int:
    """Lines of a kit's own code: neither empty, nor comments, nor generated."""
    text = "".join(re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
                   for path in (ROOT / "runtime").glob(pattern))  # fmt: skip
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and not line.startswith("//") for line in lines)


def _stripped(program: Path) -> int:
    stripped = ROOT / "build" / "kits" / "stripped"
    subprocess.run(["strip", "-o", stripped, program], check=True)
    return stripped.stat().st_size


def _size_of_kotlin() -> int:
    target = kotlin_kit.KIT / "target"
    jars = [*target.glob("odtpack-*.jar"), *target.glob("lib/flatbuffers-*.jar")]
    return sum(path.stat().st_size for path in jars)


def _size_of_js() -> int:
    """All modules, those for Node and for browsers, compressed each by itself."""
    folders = (web.FOLDERS["odtpack"], web.FOLDERS["flatbuffers"])
    modules = (path for folder in folders for path in sorted(folder.glob("*.js")))
    return sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in modules)


@dataclasses.dataclass(frozen=True)
class Kit:
    """A kit that runs natively: why it cannot, how it trains, and Python's way with its library."""

    unavailable: Callable[[], str | None]
    train: Callable[[Task], dict[str, Any]]
    size: Callable[[], int]
    sources: str  # pattern below runtime/
    python: Callable[[Task], dict[str, Any]] = _from_the_first
    version: Callable[[], str] = lambda: onnxruntime.__version__


KITS = {
    "C++ on x86-64": Kit(
        cpp_kit.unavailable, _native(cpp_kit), lambda: _stripped(cpp_kit.built("former")),
        "cpp/include/odtpack/*.hpp",
    ),
    "Node.js": Kit(
        javascript.unavailable, lambda task: javascript.train(task, "node"), _size_of_js,
        "js/src/*.ts", lambda task: javascript.train(task, "python"), javascript.runtime_version,
    ),
    "Kotlin and Java on the JVM": Kit(
        kotlin_kit.unavailable, _kotlin, _size_of_kotlin,
        "kotlin/src/main/kotlin/org/odtpack/*.kt",
        lambda task: kotlin_kit.train(task, "python"), kotlin_kit.runtime_version,
    ),
    "Swift on Linux": Kit(
        swift_kit.unavailable, _native(swift_kit), lambda: _stripped(swift_kit.built()),
        "swift/Sources/Odtpack/*.swift",
    ),
    "C# under Mono": Kit(
        csharp_kit.unavailable, _native(csharp_kit),
        lambda: _stripped(csharp_kit.core()) + csharp_kit.assembly().stat().st_size,
        "csharp/src/*.cs",
    ),
}  # fmt: skip


def measured(rounds: int, kits: Sequence[str]) -> dict[str, Any]:
    """Step times and bytes by platform, of those kits that are set up."""
    found: dict[str, Any] = {}
    for title in kits:
        kit, steps = KITS[title], {}
        if (reason := kit.unavailable()) is not None:
            print(f"{title}: not measured, {reason}", flush=True)
            continue
        for name in NETWORKS if rounds else ():
            steps[name] = each = _compared(kit, name, rounds)
            print(f"{title}, {name}: {each['ms']:.3f} ms, Python's {each['python_ms']:.3f} ms, "
                  f"ratio {each['ratio']:.3f}", flush=True)  # fmt: skip
        found[title] = {"onnxruntime": kit.version(), "bytes": kit.size(), "steps": steps,
                        "lines": _lines(kit.sources)}  # fmt: skip
    return found


def _compared(kit: Kit, network: str, rounds: int) -> dict[str, float]:
    """Milliseconds of a step, medians of rounds in turns, and the median of the ratios."""
    model, samples, steps = NETWORKS[network]
    with scratch() as folder:
        build_package(model(), folder / "package", loss="cross_entropy")
        package = Package.open(folder / "package")
        names = (each.name for each in package.manifest.inputs)
        batch = dict(zip(names, gpu.batch_of(package, samples, other=0), strict=True))
        data = javascript.save_batch(folder, **batch)
        task = {"package": str(package.path), "data": data, "steps": steps, "step_model": True}
        ways = {"python": kit.python, "own": kit.train}
        if kit.version() != onnxruntime.__version__:
            ways["installed"] = _installed
        answers = in_turns(rounds, {way: partial(train, task) for way, train in ways.items()})
    if {each["onnxruntime"] for each in answers["python"]} != {kit.version()}:
        raise RuntimeError(f"Python has ONNX Runtime {answers['python'][0]['onnxruntime']}")
    times = {way: [*map(_warm, found)] for way, found in answers.items()}
    found = {
        "ms": round(statistics.median(times["own"]), 4),
        "python_ms": round(statistics.median(times["python"]), 4),
    }
    for way, name in (("python", "ratio"), ("installed", "installed_ratio")):
        if way in times:
            ratios = map(operator.truediv, times["own"], times[way])
            found[name] = round(statistics.median(ratios), 3)
    return found


def _warm(answer: dict[str, Any]) -> float:
    """The mean of the steps of a training that are warm."""
    times = answer["times"]
    return statistics.fmean(times[len(times) // 2 :])


def main() -> None:
    given = options(__doc__, rounds=3, kit=list(KITS), record=False)
    ran, times = Ran.read(RAN), measured(given.rounds, given.kit)
    docs = ROOT / "docs" / "kits.json"
    kept = json.loads(docs.read_text())["platforms"] if given.kit != list(KITS) else {}
    platforms = {
        name: kept[name]
        if name in kept and name not in given.kit
        else {"tests": ran.counts(name), "reason": ran.reasons(name), **times.get(name, {})}
        for name in PLATFORMS
    }
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "installed": onnxruntime.__version__, "rounds": given.rounds, "platforms": platforms,
    }  # fmt: skip
    for path in [RAN.with_name("record.json"), docs][: 1 + given.record]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
