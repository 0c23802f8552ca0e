"""The Kotlin kit on the JVM against Python on the version of ONNX Runtime that Maven has."""

import base64
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.session.native import VARIABLE
from tests import native_library
from tests.hostile.checkpoints import many_tensors
from tests.kits import harness, kotlin_kit
from tests.kits.harness import needs
from tests.kits.kotlin_kit import KIT, ROOT, SOURCES, finish, run, save_batch, train
from tests.kits.test_kernels import CASES as KERNELS
from tests.packaging_tools import batch as packaged_batch
from tests.programs import ran

pytestmark = needs(kotlin_kit.unavailable())
packages, batch = harness.packages, harness.batch
suite = harness.suite_on(kotlin_kit)


def test_the_conformance_suite_passes_to_the_bit(suite):
    """Vectors of the same version of ONNX Runtime, run on the published jar."""
    harness.passes(suite, ran(*kotlin_kit.command("conformance", suite)))


@pytest.mark.parametrize("kind", ["of the reference", "with digests", "with moments"])
def test_many_empty_tensors_take_memory_in_proportion_to_the_file(kind, tmp_path):
    """Ten times the file and 64 MiB, as the threat model promises for readers."""
    path, count = tmp_path / "ck", 300_000
    nothing = np.zeros(0, np.float32)
    if kind == "of the reference":
        path.write_bytes(many_tensors(count))
    elif kind == "with digests":
        write_checkpoint(path, CheckpointData({f"p{i}": nothing for i in range(count)}, {}))
    else:
        moments = {f"p{i}": [nothing] * 2 for i in range(count // 3)}
        arrays = dict.fromkeys(moments, nothing)
        write_checkpoint(
            path, CheckpointData(arrays, {}, optimizer=OptimizerState(1, 0.5, moments))
        )
    most = (10 * path.stat().st_size + (64 << 20)) >> 10
    found = run("load", path, options=(*kotlin_kit.OPTIONS, f"-Xmx{most}k"))
    assert found.splitlines()[0] == ("unchecked" if kind == "of the reference" else "checked")


@pytest.mark.parametrize("name", ["transformer", "product"])
def test_native_kernels_are_those_of_python(name, tmp_path, monkeypatch):
    library = native_library.library()
    factory, options, same = KERNELS[name]
    model, package = factory(), tmp_path / "package"
    manifest = build_package(model, package, loss="cross_entropy", native=True, **options)
    names = [each.name for each in manifest.inputs]
    data = save_batch(tmp_path, **dict(zip(names, packaged_batch(model, 8), strict=True)))
    task = {"package": package, "data": data, "steps": 6, "rate": 0.003, "step_model": True}
    plain = train(task, "kotlin")["losses"]
    found = train({**task, "kernels": library}, "kotlin")["losses"]
    monkeypatch.setenv(VARIABLE, str(library))
    assert found == train(task, "python")["losses"]
    assert (found != plain) or same is None
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    monkeypatch.setenv(VARIABLE, "0")
    assert train({**task, "kernels": library}, "kotlin")["losses"] == plain
    with pytest.raises(AssertionError, match="The library cannot be loaded"):
        train({**task, "kernels": tmp_path / "missing.so"}, "kotlin")


def test_a_package_needs_none_of_the_kernels(packages, batch):
    task = {"package": packages["adamw"], "data": batch, "steps": 3, "rate": 0.003}
    with_library = train({**task, "kernels": native_library.library()}, "kotlin")
    assert with_library["losses"] == train(task, "kotlin")["losses"]


def test_memory_does_not_grow_over_10_000_steps(packages, batch):
    task = {"package": packages["adamw"], "data": batch, "steps": 10_000}
    resident = train(task, "kotlin")["resident"]
    # The second half against its start; the first warms up caches and the compiler.
    assert len(resident) == 10
    assert min(resident[7:]) - resident[4] < 2e6, resident


def java(sources: list[Path], target: Path, name: str, *arguments: object) -> str:
    """Compile a Java program against the kit and run it."""
    path = kotlin_kit.class_path()
    finish(["javac", "-Xlint:-options", "-d", str(target), "-cp", path, *map(str, sources)])
    words = ["java", *kotlin_kit.OPTIONS, "-cp", kotlin_kit.class_path(target), name]
    return finish([*words, *map(str, arguments)])


def test_code_for_the_former_java_api_runs(packages, batch, tmp_path):
    package = packages["adamw"]
    image = next(iter(batch.values()))
    files = [image["file"], batch["labels"]["file"]]
    output = java([SOURCES / "Former.java"], tmp_path, "Former", package, tmp_path, *files)
    losses = [float(line) for line in output.split()]
    task = {"package": package, "data": batch, "steps": 5, "save": tmp_path / "python.ckpt"}
    assert losses == train(task, "python")["losses"]
    harness.carried_over(package, tmp_path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's program and the Android sample, compiled against Android's API."""
    folder = tmp_path_factory.mktemp("compiled")
    text = (ROOT / "docs" / "guides" / "kotlin.md").read_text()
    ((name, program),) = re.findall(r"`(main\.kt)`:\n\n```kotlin\n(.*?)```", text, re.S)
    (folder / name).write_text(program)
    sample = sorted((ROOT / "examples" / "android").rglob("*.kt"))
    assert len(sample) >= 2
    kotlin_kit.compile_kotlin(folder / "out", [folder / name, *sample], kotlin_kit.ANDROID)
    return folder / "out"


def test_the_kit_compiles_against_android(tmp_path):
    """Android's API first, then ONNX Runtime's classes: those of onnxruntime-android where the
    repository has it, otherwise those of the JVM's jar, which are made of the same sources."""
    archive = kotlin_kit.BUILD / "android" / "classes.jar"
    library = KIT / "target" / "lib"
    (published,) = library.glob("onnxruntime-*.jar")
    others = [*library.glob("flatbuffers-*.jar"), *library.glob("kotlin-stdlib-*.jar")]
    path = [kotlin_kit.ANDROID, archive if archive.is_file() else published, *others]
    finish([str(SOURCES / "kotlinc.sh"), "-Werror", "-Xjdk-release=8", "-d", str(tmp_path), "-cp",
            ":".join(map(str, path)), str(KIT / "src" / "main" / "kotlin")])  # fmt: skip
    assert (tmp_path / "org" / "odtpack" / "OrtTrainingSession.class").is_file()


def test_the_android_sample_compiles_against_android(compiled):
    names = {path.name for path in compiled.rglob("*.class")}
    assert {"TrainingJob.class", "SampleApplication.class"} <= names
    manifest = (ROOT / "examples" / "android" / "AndroidManifest.xml").read_text()
    for name in re.findall(r'android:name="\.(\w+)"', manifest):
        assert f"{name}.class" in names


def test_the_guide_compiles_and_trains(packages, compiled, tmp_path):
    """What the guide shows, as it stands there, twice: the second time it goes on."""
    harness.write_assets(tmp_path, packages["adamw"])
    words = ["java", *kotlin_kit.OPTIONS, "-cp", kotlin_kit.class_path(compiled), "MainKt"]
    for steps in (60, 100):
        finish(words, cwd=tmp_path)
        assert read_checkpoint(tmp_path / "trained.ckpt").properties["app.step"] == steps
    images = np.fromfile(tmp_path / "assets" / "images.bin", np.float32).reshape(320, 1, 8, 8)[:4]
    import onnxruntime

    personal = onnxruntime.InferenceSession(tmp_path / "personal.onnx")
    (output,) = personal.run(None, {personal.get_inputs()[0].name: images})
    assert output.shape == (4, 3)


SNIPPETS = {
    "assets.open(": "fun Context.loop(batches: Batches)",
    "TrainingActivity": "fun inTheApp()",
    "withContext(": "suspend fun stop(session: OrtTrainingSession, batches: Batches)",
    "generator.generate(": "fun generate(env: OrtEnvironment, session: OrtTrainingSession, "
    "pack: TrainingPackage, batches: Batches)",
    "odtpack.packed_weights": "fun keep(env: OrtEnvironment, pack: TrainingPackage, folder: File)",
    "newer.path(": "fun goOn(env: OrtEnvironment, newer: TrainingPackage)",
    '"package-2"': "fun update(publicKey: ByteArray)",
}
"""The other pieces of the guides, by what is in them, and functions whose bodies they are."""
IMPORTS = """
import ai.onnxruntime.OnnxTensorLike
import android.app.Activity
import android.content.ComponentCallbacks2
import android.content.Context
import android.util.Log
import java.io.File
import java.util.concurrent.Executors
import ai.onnxruntime.OrtEnvironment
import kotlinx.coroutines.*
import org.odtpack.*

typealias Batches = Iterator<Map<String, OnnxTensorLike>>
"""


def test_the_pieces_of_the_guides_compile(tmp_path):
    program = IMPORTS
    left = dict(SNIPPETS)
    for guide in sorted((ROOT / "docs" / "guides").glob("*.md")):
        for piece in re.findall(r"```kotlin\n(.*?)```", guide.read_text(), re.S):
            if piece.startswith(("import ", "repositories {", "android {")):
                continue  # a program, and Gradle
            (key,) = [each for each in left if each in piece]
            program += f"\n{left.pop(key)} {{\n{piece}}}\n"
    assert not left
    (tmp_path / "pieces.kt").write_text(program)
    (coroutines,) = (kotlin_kit.BUILD / "tools").glob("kotlinx-coroutines-core-jvm-*.jar")
    kotlin_kit.compile_kotlin(
        tmp_path / "out", [tmp_path / "pieces.kt"], coroutines, kotlin_kit.ANDROID
    )
    assert (tmp_path / "out" / "PiecesKt.class").is_file()


def test_a_signature_is_checked(packages, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    package = tmp_path / "package"
    shutil.copytree(packages["sgd"], package)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    wrong = other.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    keys = [base64.b64encode(each).decode() for each in (pem, raw, wrong, b"no key" * 8)]
    assert run("signature", package, *keys).split() == ["not-signed"] * 4
    (package / "manifest.sig").write_bytes(key.sign((package / "manifest.json").read_bytes()))
    expected = ["accepted", "accepted", "signature-wrong", "signature-wrong"]
    assert run("signature", package, *keys).split() == expected


LATER = {"OrtTrainingSession", "OrtTrainingSession$Companion", "OrtCheckpointState",
         "OrtCheckpointState$Companion", "FilesKt"}  # fmt: skip


def test_the_kit_needs_only_what_android_24_has():
    """Classes of Java 8, where those of java.nio.file are absent from Android before 26."""
    lines = finish(["jdeps", "-v", "--multi-release", "base", "-cp", kotlin_kit.class_path(),
                    str(kotlin_kit.CLASSES)]).splitlines()  # fmt: skip
    used = {tuple(match.groups()) for line in lines
            if (match := re.match(r"\s+org\.odtpack\.(\S+)\s+-> (\S+)", line))}  # fmt: skip
    assert len(used) > 100
    # What a lambda is made of, java.lang.invoke, the app's build replaces.
    packages = {"java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.nio",
                "java.nio.channels", "java.nio.charset", "java.nio.file", "java.security",
                "java.security.spec", "java.text", "java.util", "java.util.concurrent",
                "java.util.concurrent.locks", "java.util.function", "java.math",
                "java.nio.file.attribute"}  # fmt: skip
    for name, target in used:
        package = target.rpartition(".")[0]
        if target.startswith("java"):
            assert package in packages, target
        if package.startswith("java.nio.file"):
            assert name in LATER, name
        assert not target.startswith(("javax.", "sun.", "jdk.")), target
    # Of the functions in files those that every save runs must not name what is absent.
    code = finish(["javap", "-p", "-c", "-cp", str(kotlin_kit.CLASSES), "org.odtpack.FilesKt"])
    body = "".join(re.findall(r" writeAtomically(?:\$lambda\S*)?\(.*?\n\n", code, re.S))
    assert "takeMode" in body
    assert "java/nio/file" not in body
