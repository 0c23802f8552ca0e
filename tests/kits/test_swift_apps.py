"""What is written around the Swift kit: the guide's program, the iOS sample, the benchmark."""

import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from odtpack_runtime.checkpoint.format import read_checkpoint
from tests import zoo
from tests.kits import swift_kit
from tests.kits.harness import contents, needs, write_assets
from tests.kits.swift_kit import ROOT, command, in_toolchain, run
from tests.packages.samples import build
from tests.programs import ran

pytestmark = needs(swift_kit.unavailable())
SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CNN's."""
    folder = tmp_path_factory.mktemp("packages") / "package"
    return build(folder, zoo.cnn(size=8, width=(4, 8), classes=3))


def test_the_guide_builds_and_trains(package, tmp_path):
    """What the guide shows, with Swift's own package manager and a tag of this repository."""
    main = swift_kit.guide("Sources/App/main.swift")
    swift_kit.apps(tmp_path, {"app": {"main.swift": main}})
    write_assets(tmp_path, package, SHAPE)
    for _ in range(2):  # the second time it goes on from the end
        done = ran(*command(tmp_path / "app"), cwd=tmp_path)
        assert read_checkpoint(tmp_path / "trained.ckpt").optimizer.step == 100
    last = re.fullmatch(r"loss ([\d.]+), accuracy ([\d.]+)", done.stdout.splitlines()[-1])
    images = np.fromfile(tmp_path / "assets" / "images.bin", np.float32).reshape(320, *SHAPE)[:64]
    labels = np.fromfile(tmp_path / "assets" / "labels.bin", np.int64)[:64]
    personal = onnxruntime.InferenceSession(tmp_path / "personal.onnx")
    (scores,) = personal.run(["output"], {personal.get_inputs()[0].name: images})
    assert float(last[2]) == (np.argmax(scores, 1) == labels).mean()
    exponents = np.exp(scores.astype(np.float64))
    right = exponents[np.arange(64), labels] / exponents.sum(1)
    np.testing.assert_allclose(float(last[1]), -np.log(right).mean(), rtol=1e-5)
    with (tmp_path / "assets" / "images.bin").open("r+b") as file:
        file.write(np.float32(np.nan).tobytes())
    (tmp_path / "trained.ckpt").unlink()
    ran(*command(tmp_path / "app"), cwd=tmp_path)  # every tenth batch is skipped
    assert read_checkpoint(tmp_path / "trained.ckpt").optimizer.step == 90


def test_the_trainer_of_the_ios_sample_stops_and_goes_on(package, tmp_path):
    sample = ROOT / "examples" / "ios"
    in_toolchain("swiftc", "-parse", *sorted(sample.glob("*.swift")))  # the rest needs Apple's
    trainer = (sample / "Trainer.swift").read_text()
    main = (swift_kit.PROGRAM / "guide" / "train.swift").read_text()
    swift_kit.apps(tmp_path, {"train": {"Trainer.swift": trainer, "main.swift": main}})
    rng = np.random.default_rng(1)

    def run_trainer(files: Path, *arguments: object) -> str:
        return ran(*command(tmp_path / "train", package, files, *arguments)).stdout

    images = rng.standard_normal((160, *SHAPE), dtype=np.float32)
    labels = rng.integers(0, 3, 160)
    for name in ("once", "often"):
        (tmp_path / name).mkdir()
        images.tofile(tmp_path / name / "images.bin")
        labels.tofile(tmp_path / name / "labels.bin")
    assert run_trainer(tmp_path / "once", 10_000) == "true\n"
    assert run_trainer(tmp_path / "often", 71) == "false\n"
    assert run_trainer(tmp_path / "often", 330, "it is hot") == "false\n"
    optimizer = read_checkpoint(tmp_path / "often" / "trained.ckpt").optimizer
    assert optimizer.step == 70 + 330  # the step that followed the warning was made
    assert run_trainer(tmp_path / "often", 10_000) == "true\n"
    one, two = (tmp_path / name / "trained.ckpt" for name in ("once", "often"))
    assert contents(one) == contents(two)
    one, two = (tmp_path / name / "personal.onnx" for name in ("once", "often"))
    assert one.read_bytes() == two.read_bytes()
    images[0] = np.nan
    images.tofile(tmp_path / "once" / "images.bin")
    (tmp_path / "once" / "trained.ckpt").unlink()
    assert run_trainer(tmp_path / "once", 10_000) == "true\n"
    assert read_checkpoint(tmp_path / "once" / "trained.ckpt").optimizer.step == 1600


def test_a_signature_cannot_be_checked_without_cryptokit(package, tmp_path):
    copy = shutil.copytree(package, tmp_path / "package")
    assert "code: not-signed" in run("signature", copy).stderr
    (copy / "manifest.sig").write_bytes(bytes(64))
    assert "code: cryptography-missing" in run("signature", copy).stderr
