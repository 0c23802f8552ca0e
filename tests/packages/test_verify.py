"""``odtpack verify`` and ``odtpack sign``."""

import builtins
import dataclasses
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from odtpack.build import build_package
from odtpack.update.release import new_key, sign_package
from odtpack_runtime import CheckpointState, OdtpackError
from odtpack_runtime.apart import worker
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from tests import zoo
from tests.failing import failing
from tests.model_text import parsed
from tests.packages.mutations import changed_model, edit, rehash
from tests.programs import ran
from tests.refused import refused


@pytest.fixture
def package(built: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(built, tmp_path / "package"))


def refusal(package: Path, **options: Any) -> OdtpackError:
    with pytest.raises(OdtpackError) as caught:
        verify_package(package, **options)
    return caught.value


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": lambda: zoo.mlp((6, 4, 3)),
    "cnn": lambda: zoo.cnn(size=8, width=(4, 8), classes=3),
    "transformer": lambda: zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32, opset=17),
    "open planes": lambda: parsed(
        "(float[N, 1, H, W] x) => (float[N, 2] y)"
        " { c = Conv (x, w) p = GlobalAveragePool (c) y = Flatten (p) }",
        w=np.resize(np.float32([0.1, 0.2, 0.3]), (2, 1, 5, 5)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_was_built_verifies(tmp_path, name):
    build_package(MODELS[name](), tmp_path / "p", loss="cross_entropy")
    found = verify_package(tmp_path / "p")
    assert found.signature == "none"
    assert found.files == 5
    assert found.size_bytes == sum(file.stat().st_size for file in (tmp_path / "p").iterdir())
    assert found.steps.training_loss is not None
    assert found.steps.evaluation_loss is not None
    assert found.steps.shapes["labels"][0] == 2
    if name == "open planes":  # a plane of 2 by 2 has no room for the window
        assert found.steps.shapes["x"] == [2, 1, 8, 8]


def test_the_steps_change_no_file(built):
    before = {path.name: path.read_bytes() for path in built.iterdir()}
    assert verify_package(built) == verify_package(built / "manifest.json")
    assert {path.name: path.read_bytes() for path in built.iterdir()} == before


@pytest.mark.parametrize(("change", "says"), [
    (lambda c: c["inputs"][0].update(dtype="float64"), "inputs"),
    (lambda c: c["inputs"][0].update(shape=["batch", 7]), "inputs"),
    (lambda c: c["inputs"][1].update(class_count=4), "class_count"),
    (lambda c: c["outputs"][0].update(name="cost"), "outputs"),
    (lambda c: c["opsets"].update({"": 18}), "opsets"),
    (lambda c: c.update(ir_version=7), "IR version"),
    (lambda c: c.update(loss="mse"), "odtpack.loss"),
    (lambda c: c.update(accumulation_steps=3), "odtpack.accumulation_steps"),
    (lambda c: c["optimizer"].update(kind="adam"), "odtpack.optimizer"),
    (lambda c: c["parameters"].reverse(), "parameters"),
    (lambda c: c["parameters"][0].update(role="frozen"), "gradient buffers"),
    (lambda c: c["operators"]["eval_model"]["ai.onnx"].update(Gemm=11), "operators"),
    (lambda c: c["operators"]["optimizer_model"]["ai.onnx"].pop("Sqrt"), "operators"),
    (lambda c: c["operators"]["training_model"].update(x={"Y": 1}), "operators"),
])  # fmt: skip
def test_a_manifest_that_says_otherwise(package, change, says):
    edit(package, change)
    with refused("manifest-contradicts", says):
        verify_package(package)


def test_a_checkpoint_of_another_package(package, tmp_path):
    build_package(zoo.mlp((6, 5, 3)), tmp_path / "other", loss="cross_entropy", nominal=True)
    for name, says in (("checkpoint", "trainable"), ("nominal_checkpoint", "with values")):
        good = (package / name).read_bytes()
        (package / name).write_bytes((tmp_path / "other" / "checkpoint").read_bytes())
        rehash(package, name)
        with refused("manifest-contradicts", says):
            verify_package(package)
        (package / name).write_bytes(good)
        rehash(package, name)
    verify_package(package)


def test_a_model_that_reads_another_file(package):
    with changed_model(package) as model:
        tensor = model.graph.initializer.add(name="secret", data_type=1, dims=[4])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../../etc/passwd")
    with refused("model-external-data", "secret"):
        verify_package(package)


def test_a_model_that_does_not_load(package):
    """ONNX Runtime's own refusal: a name is given twice."""
    with changed_model(package) as model:
        model.graph.node[-1].output[0] = model.graph.node[0].output[0]
    assert refusal(package).code == "model-not-loadable"


def test_a_crash_is_an_error(built, monkeypatch):
    start = subprocess.Popen

    def crash(command: list[str], **options: Any) -> Any:
        program = f"import os; os.kill(os.getpid(), {signal.SIGSEGV.value})"
        return start([command[0], "-c", program], **options)

    monkeypatch.setattr(worker.subprocess, "Popen", crash)
    with refused("models-crash", "-11"):
        verify_package(built)


def test_a_model_that_does_not_end(built, monkeypatch):
    limits = worker.Limits(seconds=0.01)
    monkeypatch.setattr(worker.Limits, "of", classmethod(lambda cls, files: limits))
    assert refusal(built).code == "models-stall"


class TestSignature:
    def test_a_signed_package(self, signed, key):
        public = key.with_suffix(".pub")
        assert verify_package(signed).signature == "unchecked"
        assert verify_package(signed, require_signature=True).signature == "unchecked"
        assert verify_package(signed, public_key=public).signature == "valid"
        assert Package.open(signed).path == signed.resolve()

    def test_a_signature_that_nothing_checks(self, signed, key, run):
        words = "verify", signed, "--require-signature"
        assert "warning: the signature was not checked" in run(*words, code=0).err
        checked = run(*words, "--public-key", key.with_suffix(".pub"), code=0)
        assert "warning" not in checked.err

    def test_openssl_agrees(self, signed, key):
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("needs openssl")
        command = [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", key.with_suffix(".pub")]
        command += ["-rawin", "-in", signed / "manifest.json", "-sigfile", signed / "manifest.sig"]
        done = ran(*command, code=None)
        assert "Verified Successfully" in done.stdout, done.stderr

    def test_the_private_key_is_private(self, key):
        assert key.stat().st_mode & 0o777 == 0o600

    def test_an_unsigned_package(self, built, key):
        assert refusal(built, public_key=key.with_suffix(".pub")).code == "not-signed"
        assert refusal(built, require_signature=True).code == "not-signed"

    def test_another_key(self, signed, tmp_path):
        public = new_key(tmp_path / "other.pem")
        assert refusal(signed, public_key=public).code == "signature-wrong"

    @pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 64, b"x" * 65])
    def test_what_is_no_signature(self, package, key, content):
        (package / "manifest.sig").write_bytes(content)
        assert refusal(package, public_key=key.with_suffix(".pub")).code == "signature-wrong"

    def test_a_signature_behind_a_link(self, signed, package, key):
        (package / "manifest.sig").symlink_to(signed / "manifest.sig")
        assert refusal(package, public_key=key.with_suffix(".pub")).code == "signature-wrong"

    def test_a_new_build_is_not_signed(self, signed, tmp_path):
        folder = Path(shutil.copytree(signed, tmp_path / "package"))
        build_package(zoo.mlp((6, 4, 3)), folder, loss="mse")
        assert sorted(path.name for path in folder.iterdir()) == [
            "checkpoint", "eval_model.onnx", "inference_template.onnx", "manifest.json",
            "optimizer_model.onnx", "training_model.onnx",
        ]  # fmt: skip

    def test_damage_is_not_signed(self, package, key):
        (package / "checkpoint").write_bytes(b"x")
        with refused("package-changed"):
            sign_package(package, key)
        assert not (package / "manifest.sig").exists()

    @pytest.mark.parametrize("content", [None, b"", b"not a key", b"x" * 2**17])
    def test_what_is_no_key(self, signed, tmp_path, content, run):
        path = tmp_path / "key"
        if content is not None:
            path.write_bytes(content)
        before = (signed / "manifest.sig").read_bytes()
        for command in (["verify", signed, "--public-key", path], ["sign", signed, "--key", path]):
            assert "error[internal]" not in run(*command, code=2).err
        assert (signed / "manifest.sig").read_bytes() == before

    def test_keys_of_another_kind(self, signed, key, tmp_path):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        other = ec.generate_private_key(ec.SECP256R1())
        kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        secret = other.private_bytes(*kinds, serialization.NoEncryption())
        (tmp_path / "ec.pem").write_bytes(secret)
        with pytest.raises(OdtpackError, match="another algorithm"):
            sign_package(signed, tmp_path / "ec.pem")
        assert refusal(signed, public_key=key).code == "bad-key"  # the private one

    def test_no_key_is_overwritten(self, key):
        before = key.read_bytes()
        with refused("key-exists"):
            new_key(key)
        assert key.read_bytes() == before

    def test_without_the_library(self, signed, key, monkeypatch, run):
        call, error = builtins.__import__, ImportError("no library")
        missing = failing(call, error, lambda name, *_: name.startswith("cryptography"))
        monkeypatch.setattr(builtins, "__import__", missing)
        for command in (
            ["verify", signed, "--public-key", key.with_suffix(".pub")],
            ["sign", signed, "--key", key],
            ["sign", "--new-key", key.with_name("new.pem")],
        ):
            assert "pip install cryptography" in run(*command, code=2).err


def test_the_commands(package, tmp_path, run):
    key = tmp_path / "key.pem"
    run("sign", package, "--new-key", key, code=0)
    verified = run("verify", package, "--public-key", key.with_suffix(".pub"), code=0)
    assert "signature   valid" in verified.out
    found = run("verify", package, "--json", code=0).json()
    assert found == dataclasses.asdict(verify_package(package))
    for wrong in ((), (package,), ("--key", key)):
        assert "help: odtpack sign" in run("sign", *wrong, code=2).err


def test_a_listed_file_that_is_none(package):
    (package / "checkpoint").rename(package.parent / "elsewhere")
    (package / "checkpoint").symlink_to("../elsewhere")
    assert "'checkpoint', which is a link" in refusal(package).what
    (package / "checkpoint").unlink()
    os.mkfifo(package / "checkpoint")
    assert "'checkpoint', which is no ordinary file" in refusal(package).what


def test_training_progress_beside_a_package(package):
    """A checkpoint that somebody saved into the package makes it another one."""
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    state.parameters["fc1.bias"].data = np.ones(4, np.float32)
    CheckpointState.save_checkpoint(state, package / "trained.ckpt")
    assert Package.open(package).checkpoint.name == "checkpoint"
    assert refusal(package).code == "package-unlisted"
