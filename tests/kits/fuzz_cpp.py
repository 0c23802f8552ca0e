"""Feed the C++ kit's readers with inputs that libFuzzer makes, under AddressSanitizer and UBSan.

    python -m tests.kits.fuzz_cpp --minutes 5 --keep   # make fuzz-kit

It goes on from the kept inputs, of Python's readers too; ``--keep`` adds those that reach new code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from odtpack.build import build_package
from tests import zoo
from tests.kits import cpp_kit

CORPUS = Path(__file__).parent / "cpp" / "corpus"
OF_PYTHON = Path(__file__).parents[1] / "fuzz" / "corpus"
READERS = ("checkpoint", "manifest", "schedule", "template")
FINDINGS = Path("build") / "fuzz" / "cpp"
_LONGEST = 20_000
_SCHEDULES = (
    b'{"kind": "linear", "initial_lr": 0.1, "warmup_steps": 5, "total_steps": 50}',
    b'{"kind": "cosine", "initial_lr": 0.1, "total_steps": 50, "floor": 0.5}',
    b'{"kind": "multistep", "initial_lr": 1e-3, "milestones": [3, 30], "gamma": 0.5}',
    b'{"kind": "step", "initial_lr": 1, "period": 7}',
)


def prepare(folder: Path) -> Path:
    """Make a package in the folder and, in others, sound inputs for each reader."""
    package = folder / "package"
    build_package(zoo.mlp((4, 3, 2)), package, loss="cross_entropy", self_check=False)
    for reader, inputs in {
        "checkpoint": [(package / "checkpoint").read_bytes()],
        "manifest": [(package / "manifest.json").read_bytes()],
        "schedule": _SCHEDULES,
        "template": [(package / "inference_template.onnx").read_bytes()],
    }.items():
        (folder / reader).mkdir()
        for index, data in enumerate(inputs):
            (folder / reader / str(index)).write_bytes(data)
    return package


def kept(reader: str) -> list[Path]:
    """The folders of kept inputs of a reader that there are."""
    return [path for path in (CORPUS / reader, OF_PYTHON / reader) if path.is_dir()]


def settings(reader: str, package: Path) -> dict[str, str]:
    """The environment that tells the program which reader to call."""
    return {"ODTPACK_FUZZ": reader, "ODTPACK_FUZZ_FOLDER": str(package)}


def fuzz(reader: str, folder: Path, package: Path, seconds: float, *, keep: bool) -> list[str]:
    """Run libFuzzer on one reader; return what it found."""
    program = cpp_kit.built("fuzz", "libfuzzer")
    findings, made = FINDINGS / reader, folder / f"{reader}-made"
    findings.mkdir(parents=True, exist_ok=True)
    made.mkdir()
    options = [f"-artifact_prefix={findings}/", f"-max_len={_LONGEST}", "-timeout=10",
               "-rss_limit_mb=2048", "-print_final_stats=1"]  # fmt: skip

    environment = {**os.environ, **cpp_kit.SANITIZERS, **settings(reader, package)}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), *options, *map(str, words)],
            env=environment, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip

    done = run(f"-max_total_time={max(int(seconds), 1)}", made, folder / reader, *kept(reader))
    figures = dict.fromkeys(("number_of_executed_units", "peak_rss_mb"), "?") | {
        key: line.split()[-1]
        for line in done.stderr.splitlines()
        for key in ("number_of_executed_units", "peak_rss_mb")
        if key in line
    }
    inputs, memory = figures.values()
    print(f"{reader:12}{inputs:>10} inputs  {memory:>5} MB  exit {done.returncode}", flush=True)
    if keep:
        smallest = folder / f"{reader}-smallest"
        smallest.mkdir()
        run("-merge=1", smallest, folder / reader, *kept(reader), made)
        sound = {path.read_bytes() for path in (folder / reader).iterdir()}
        python = {path.name for path in (OF_PYTHON / reader).glob("*")}
        shutil.rmtree(CORPUS / reader, ignore_errors=True)
        (CORPUS / reader).mkdir(parents=True)
        for path in smallest.iterdir():
            data = path.read_bytes()
            if data not in sound and path.name[:16] not in python:
                (CORPUS / reader / path.name[:16]).write_bytes(data)
    return [f"{reader}: {done.stderr[-3000:]}"] if done.returncode else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="over all readers")
    parser.add_argument("--reader", action="append", choices=READERS)
    parser.add_argument("--keep", action="store_true", help="add what is new to the corpus")
    arguments = parser.parse_args()
    if reason := cpp_kit.without_libfuzzer():
        parser.error(reason)
    found = []
    readers = arguments.reader or READERS
    with tempfile.TemporaryDirectory(prefix="odtpack-fuzz-") as scratch:
        package = prepare(Path(scratch))
        for reader in readers:
            seconds = arguments.minutes * 60 / len(readers)
            found += fuzz(reader, Path(scratch), package, seconds, keep=arguments.keep)
    print(f"{len(found)} defects; inputs are in {FINDINGS}" if found else "no defects")
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
