"""What only the C# kit has: its guide, signatures, what is disposed of, places in ONNX Runtime."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from odtpack.adapters import AdapterSpec
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests import zoo
from tests.kits import cpp_kit, csharp_kit
from tests.kits.cases import Case
from tests.kits.cpp_stress import TRIED, calls, program_of, write_job
from tests.kits.csharp_kit import run
from tests.kits.harness import ARM64_CASES, filled, needs, write_assets
from tests.packages.samples import build
from tests.packaging_tools import built_package
from tests.programs import ran

GUIDE = csharp_kit.PROGRAM / "guide"
pytestmark = needs(csharp_kit.unavailable())


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CNN's."""
    folder = tmp_path_factory.mktemp("packages") / "package"
    return build(folder, zoo.cnn(size=8, width=(4, 8), classes=3))


@pytest.mark.skipif(
    not (csharp_kit.ARM64 / ".ready").is_file(), reason="Mono for ARM64 is not set up"
)
def test_the_conformance_suite_passes_on_arm64(suite):
    words = csharp_kit.arm64_command("conformance", suite, "--tolerance", *ARM64_CASES)
    done = ran(*words, code=None)
    passed = sorted(f"passed {case}" for case in ARM64_CASES)
    assert sorted(done.stdout.splitlines()) == passed, done.stderr[-4000:]


def test_the_guide_trains_with_the_nuget_package(package, tmp_path):
    """What the guide shows, as it stands there."""
    text = (csharp_kit.ROOT / "docs" / "guides" / "csharp.md").read_text()
    program, *fragments = re.findall(r"^```csharp\n(.*?)^```$", text, re.M | re.S)
    (tmp_path / "Program.cs").write_text(program)
    assert program.count("\n") <= 30
    use, generate, sign, update = fragments
    pieces = filled(GUIDE / "Pieces.cs", use=use, generate=generate, sign=sign, update=update)
    (tmp_path / "Guide.cs").write_text(pieces)
    app = csharp_kit.compiled(tmp_path / "app.exe", f"-r:{csharp_kit.library()}",
                              tmp_path / "Program.cs", tmp_path / "Guide.cs")  # fmt: skip
    write_assets(tmp_path, package)
    for _ in range(2):  # the second time there is nothing left to do
        subprocess.run(csharp_kit.command(app), cwd=tmp_path, check=True)
        assert read_checkpoint(tmp_path / "trained.ckpt").optimizer.step == 100
    onnxruntime.InferenceSession(tmp_path / "personal.onnx")
    (tmp_path / "trained.ckpt").unlink()  # the save before is there, of 80 steps
    assert ran(*csharp_kit.command(app), cwd=tmp_path).stdout.count("\n") == 20
    assert read_checkpoint(tmp_path / "trained.ckpt").optimizer.step == 100
    with (tmp_path / "assets" / "images.bin").open("r+b") as images:
        images.write(np.float32(np.nan).tobytes())
    for saved in tmp_path.glob("trained.ckpt*"):
        saved.unlink()
    ran(*csharp_kit.command(app), cwd=tmp_path)  # every tenth batch is skipped
    assert read_checkpoint(tmp_path / "trained.ckpt").optimizer.step == 90


def test_the_nuspec_is_as_its_schema_says(tmp_path):
    program = csharp_kit.compiled(tmp_path / "validate.exe", "-r:System.Xml.dll",
                                  GUIDE / "Validate.cs")  # fmt: skip

    def is_valid(text: str) -> bool:
        (tmp_path / "nuspec").write_text(text)
        words = ["mono", program, csharp_kit.KIT / "nuspec.xsd", tmp_path / "nuspec"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    installed = csharp_kit.installed()
    nuspec = (installed / "Odtpack.nuspec").read_text()
    assert is_valid(nuspec)
    assert not is_valid(nuspec.replace("authors", "author"))
    assert not is_valid(nuspec.replace("<version>", "<version>v"))
    types = (installed / "[Content_Types].xml").read_text()
    for path in installed.rglob("*.*"):
        assert path.suffix[1:] in types
    with (csharp_kit.KIT / "Odtpack.csproj").open() as project:
        assert re.search(r"<version>(.*)</version>", nuspec)[1] in project.read()  # type: ignore[index]


def test_functions_are_where_the_header_has_them(tmp_path):
    """The kit finds the functions of OrtApi by number."""
    source = (csharp_kit.SOURCES / "OnnxRuntime.cs").read_text()
    own = {"RunSession": "Run", "errorMessage": "GetErrorMessage",
           "releaseStatus": "ReleaseStatus", "releaseEnv": "ReleaseEnv",
           "ReleaseInfo": "ReleaseTensorTypeAndShapeInfo",
           "ReleaseOptions": "ReleaseSessionOptions", "Env": "CreateEnv",
           "Cpu": "CreateCpuMemoryInfo",
           "Allocator": "GetAllocatorWithDefaultOptions"}  # fmt: skip
    found = re.findall(r"(\w+) = Function<\w+>\(api, (\d+)\)", source)
    found += [(name, at) for at, name in re.findall(r"\(api, (\d+)\)\(.*out (\w+)\)\);", source)]
    places = {own.get(name, name): at for name, at in found}
    assert sorted(re.findall(r"\(api, (\d+)\)", source)) == sorted(places.values())
    checks = "".join(
        f'_Static_assert(offsetof(OrtApi, {name}) == {at} * sizeof(void*), "{name}");\n'
        for name, at in places.items()
    )
    source = f"#include <stddef.h>\n#include <onnxruntime_c_api.h>\n{checks}"
    (tmp_path / "places.c").write_text(source)
    ran("gcc", "-fsyntax-only", "-I", cpp_kit.DEPENDENCIES / "include", tmp_path / "places.c")


def test_the_library_links_no_onnx_runtime():
    done = ran("nm", "-D", csharp_kit.core())
    assert not re.findall(r"^ +U .*(?:Ort|onnx).*$", done.stdout, re.M)
    shown = re.findall(r"T (\w+)", done.stdout)
    declared = re.findall(r"odtpack_\w+(?=\()", (csharp_kit.SOURCES / "Native.cs").read_text())
    assert set(declared) <= set(shown)
    assert all(name.startswith("odtpack_") for name in shown)


@pytest.mark.parametrize("name", ["adam", "step_adamw"])
def test_nothing_is_freed_under_a_call(name, tmp_path):
    calls(program_of(csharp_kit), "dispose", write_job(TRIED[f"close {name}"][1], tmp_path), 20)


def test_what_is_disposed_of_is_freed(tmp_path):
    case = Case(lambda: zoo.mlp((400, 800, 3)), lambda random, size: [
        random.random((size, 400), np.float32), random.integers(0, 3, size)])  # fmt: skip
    calls(program_of(csharp_kit), "leaks", write_job(case, tmp_path), 20)


def test_an_app_checks_a_signature_itself(package, tmp_path):
    copy = shutil.copytree(package, tmp_path / "package")
    assert "code: not-signed" in run("signature", copy, "right").stderr
    (copy / "manifest.sig").write_bytes(bytes(64))
    assert run("signature", copy, "right").returncode == 0
    assert "code: signature-wrong" in run("signature", copy, "wrong").stderr
    assert "InvalidOperationException: no key" in run("signature", copy, "throws").stderr


def test_an_adapter_is_taken_over_by_its_names(tmp_path):
    adapter = AdapterSpec("lora", ("fc1*",), (), 2, 4.0)
    package = built_package(zoo.mlp((8, 6, 3)), tmp_path / "package", adapter=adapter)
    trained = read_checkpoint(package.path / "checkpoint")
    trained.trainable = {name: array + 1 for name, array in trained.trainable.items()}
    write_checkpoint(tmp_path / "trained", trained)
    done = run("adapter", package.path, tmp_path / "trained", tmp_path / "saved")
    assert sorted(done.stdout.split("\n")) == sorted(package.manifest.adapter.parameters)
    for name, array in read_checkpoint(tmp_path / "saved").trainable.items():
        np.testing.assert_array_equal(array, trained.trainable[name])
