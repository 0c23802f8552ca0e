"""Who signed a package, which release it is, and what it may ask for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from odtpack.build import build_package
from odtpack.cli import main
from odtpack.update.signing import new_key, sign_package
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from tests import zoo


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "package"
    build_package(zoo.mlp((6, 4, 3)), folder, loss="cross_entropy")
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("old", "new", "other"):
        new_key(folder / f"{name}.pem")
    return folder


@pytest.fixture
def package(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "package"))


def code_of(call: object, *args: object, **options: object) -> str:
    with pytest.raises(OdtpackError) as caught:
        call(*args, **options)  # type: ignore[operator]
    return caught.value.code


def test_the_signature_covers_every_file_and_every_key(package: Path, keys: Path) -> None:
    sign_package(package, keys / "old.pem")
    public = keys / "old.pub"
    for path in sorted(package.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        assert code_of(verify_package, package, public_key=public) in (
            "package-changed", "signature-wrong"
        ), path.name  # fmt: skip
        path.write_bytes(data)
    manifest = package / "manifest.json"
    text = manifest.read_text()
    content = json.loads(text)
    assert {"session", "self_check", "layout", "files", "operators"} <= content.keys()
    for key in content:
        manifest.write_text(json.dumps({name: content[name] for name in content if name != key}))
        assert code_of(verify_package, package, public_key=public) == "signature-wrong"
    manifest.write_text(text)
    found = verify_package(package, public_key=public)
    assert found.signature == "valid"
    assert found.signed_with == str(public)
    assert "self-check" in " ".join(found.checked)


def test_keys_are_rotated(package: Path, keys: Path) -> None:
    """An app that trusts both keys takes packages signed with either; with one, of that one."""
    both = [keys / "old.pub", keys / "new.pub"]
    for name in ("old", "new"):
        sign_package(package, keys / f"{name}.pem")
        assert verify_package(package, public_key=both).signed_with == str(keys / f"{name}.pub")
    assert code_of(verify_package, package, public_key=both[:1]) == "signature-wrong"
    sign_package(package, keys / "other.pem")
    assert code_of(verify_package, package, public_key=both) == "signature-wrong"


def test_releases_only_grow(package: Path, keys: Path) -> None:
    assert code_of(verify_package, package, minimum_release=0) == "package-downgrade"
    sign_package(package, keys / "old.pem", release=3)
    assert Package.open(package).manifest.release == 3
    found = verify_package(package, public_key=keys / "old.pub", minimum_release=3)
    assert found.release == 3
    assert code_of(verify_package, package, minimum_release=4) == "package-downgrade"
    assert code_of(sign_package, package, keys / "old.pem", release=2) == "package-downgrade"
    sign_package(package, keys / "new.pem")
    assert Package.open(package).manifest.release == 3


def test_limits_of_what_a_stranger_may_ask(package: Path) -> None:
    manifest = Package.open(package).manifest
    Limits().check(manifest, "here")
    layout = manifest.layout
    assert layout is not None
    parameters = sum(item.size_bytes or 0 for item in manifest.parameters)
    exact = Limits(
        disk_bytes=sum(file.size_bytes for file in manifest.files.all()),
        # Gradients and both moments, with the gaps of the layout.
        state_bytes=parameters + layout.elements * 4 * 3,
        tensors=len(manifest.parameters) + len(manifest.inputs) + len(manifest.all_outputs),
    )
    exact.check(manifest, "here")
    for name in ("disk_bytes", "state_bytes", "tensors"):
        less = dataclasses.replace(exact, **{name: getattr(exact, name) - 1})
        assert code_of(less.check, manifest, "here") == "package-limits"
    huge = dataclasses.replace(manifest.inputs[0], shape=(2**20, 2**10))
    hostile = dataclasses.replace(manifest, inputs=(huge, *manifest.inputs[1:]))
    assert code_of(Limits().check, hostile, "here") == "package-limits"
    operators = dataclasses.replace(
        manifest.operators, eval_model={**manifest.operators.eval_model, "evil": {"Shell": 1}}
    )
    hostile = dataclasses.replace(manifest, operators=operators)
    assert code_of(Limits().check, hostile, "here") == "package-limits"
    Limits(domains=("ai.onnx", "evil")).check(hostile, "here")


def test_verify_prints_what_it_checked(
    package: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sign", str(package), "--key", str(keys / "old.pem"), "--release", "7"]
    assert main(words) == 0
    words = ["verify", str(package), "--stranger", "--minimum-release", "7"]
    for name in ("new", "old"):
        words += ["--public-key", str(keys / f"{name}.pub")]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    for phrase in (
        "release 7", "signature, with old.pub", "the release, 7 or later", "operator domains",
        "SHA-256 of", "losses of the self-check",
    ):  # fmt: skip
        assert phrase in text
