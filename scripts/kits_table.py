"""The generated page on training kits: where they ran, how fast, and what they add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = {
    "mlp": "MLP 784-256-10, batch 32",
    "cnn": "CNN of two convolutions on 28 × 28, batch 32",
    "transformer": "transformer encoder, batch 4",
}

_PAGE = """# Training kits

[Kotlin and Java](guides/kotlin.md), [Swift](guides/swift.md), [C++](guides/cpp.md),
[C#](guides/csharp.md), [JavaScript](guides/javascript.md): libraries over the official ONNX Runtime
of their ecosystem. [Training kits](formats/kits.md) says what each of them does.

## Where they ran

Generated on {date} ({machine}) from what `make kits` and
`python -m benchmarks.kits --rounds {rounds} --record` found. The tests train the packages of one
conformance suite, kill programs in the middle of saves and open hundreds of damaged files. A test
passes if losses and checkpoints are bit-identical to Python on x86-64, and losses are within the
suite's tolerances (2e-6 for most networks) in WebAssembly and on ARM64. With WebGPU, training must
be correct or refused with the reason.

{ran}

## Time and size

Milliseconds of processor time of a step, the optimizer included, one thread, beside those of
Python with the same version of ONNX Runtime; medians of rounds in turns, here {rounds}. Added bytes
are the kit without ONNX Runtime: a stripped program that trains for C++ and Swift, the assembly and
the stripped native library for C#, the jars of the kit and of flatbuffers for Kotlin, all modules
of both compressed for JavaScript. Lines of code are the kit's own, without empty ones, comments and
what is generated; 900 was the aim. Swift's and C#'s are layers over the C++ kit and its C
interface, which is counted with none of them (about 680 lines).

{times}

{networks}

{installed}

What Node.js takes more is its binding's: up to 1.30, the newest release, it returns a copy of
each output, 3.3 MB in a step of the MLP. An optimizer's run over the MLP takes 0.64 ms, 0.47 ms
with one output instead of three, and 0.37 ms in Python. Outputs that ONNX Runtime allocates and
that are fed back into the next step are copied as well (0.66 ms), and so are parts (0.74 ms in
four runs). In the source after 1.30 the binding hands outputs over without a copy. On the JVM the
first steps take longer, until they are compiled: the first half is not counted. The jar's ONNX
Runtime is no slower than the wheel's: a C++ program takes 0.94 (mlp) and 0.97 (cnn) of Python's
time with it, 0.89 and 0.99 with the wheel's. Of the samples of 3,000 steps of the CNN, the first
ones included, 91 % lie in ONNX Runtime and libc, 3 % in Java's compilers, 2 % in compiled Java
and 1 % in the Java machine.
"""


def kits_page() -> str:
    """Return the page as Markdown, of docs/kits.json."""
    content = json.loads((ROOT / "docs" / "kits.json").read_text())
    platforms: dict[str, dict[str, Any]] = content["platforms"]
    ran = ["| platform | tests passed | left out |", "|---|---|---|"]
    for name, each in platforms.items():
        tests = each["tests"]
        left = f"{tests['skipped']}: {each['reason']}" if tests.get("skipped") else "none"
        passed = tests.get("passed", 0)
        failed = f", {tests['failed']} failed" if tests.get("failed") else ""
        ran.append(f"| {name} | {passed}{failed} | {left} |")
    heads = [f"{network}: kit, Python, ratio" for network in NETWORKS]
    times = [
        f"| platform | ONNX Runtime | {' | '.join(heads)} | added bytes | lines of code |",
        "|---|---|" + "---|" * (len(heads) + 2),
    ]
    for name, each in platforms.items():
        if "steps" not in each:
            continue
        cells = [_step(each["steps"].get(network)) for network in NETWORKS]
        times.append(
            f"| {name} | {each['onnxruntime']} | {' | '.join(cells)} | {each['bytes']:,} "
            f"| {each['lines']:,} |"
        )
    return _PAGE.format(
        date=content["date"],
        machine=content["machine"],
        rounds=content["rounds"],
        ran="\n".join(ran),
        times="\n".join(times),
        networks="\n".join(f"- {key}: {title}" for key, title in NETWORKS.items()),
        installed=_installed(content),
    )


def _installed(content: dict[str, Any]) -> str:
    """The ratios to the Python of the project where a kit has another ONNX Runtime."""
    found = []
    for name, each in content["platforms"].items():
        ratios = {key: step.get("installed_ratio") for key, step in each.get("steps", {}).items()}
        if any(ratios.values()):
            listed = ", ".join(f"{ratio:.2f} ({key})" for key, ratio in ratios.items() if ratio)
            found.append(f"{name} {listed}")
    return f"Beside Python with ONNX Runtime {content['installed']}: {'; '.join(found)}."


def _step(step: dict[str, float] | None) -> str:
    if step is None:
        return "not measured"
    return f"{step['ms']:.2f} ms, {step['python_ms']:.2f} ms, **{step['ratio']:.2f}**"
