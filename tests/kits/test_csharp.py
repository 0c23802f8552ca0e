"""What only the C# kit has: its guide, signatures, what is disposed of, places in ONNX Runtime."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import pytest

from tests import zoo
from tests.kits import cpp_kit, csharp_kit
from tests.kits.cpp_stress import TRIED, calls, program_of, write_job
from tests.kits.csharp_kit import run
from tests.kits.measured import check_measurements
from tests.packages.samples import build

pytestmark = [
    pytest.mark.kits,
    pytest.mark.skipif(csharp_kit.unavailable() is not None, reason=str(csharp_kit.unavailable())),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CNN's."""
    folder = tmp_path_factory.mktemp("packages") / "package"
    return build(folder, zoo.cnn(size=8, width=(4, 8), classes=3))


def test_functions_are_where_the_header_has_them(tmp_path: Path) -> None:
    """The kit finds the functions of OrtApi by number."""
    source = (csharp_kit.SOURCES / "OnnxRuntime.cs").read_text()
    names = dict(re.findall(r"(\w+) = Function<\w+>\(api, (\d+)\)", source))
    names |= {name: at for name, at in re.findall(r"Function<(Create\w+)>\(api, (\d+)\)", source)
              if name in ("CreateEnv",)}  # fmt: skip
    own = {"RunSession": "Run", "errorMessage": "GetErrorMessage", "releaseStatus": "ReleaseStatus",
           "ReleaseInfo": "ReleaseTensorTypeAndShapeInfo",
           "ReleaseOptions": "ReleaseSessionOptions"}  # fmt: skip
    places = {own.get(name, name): at for name, at in names.items()}
    places |= {"CreateCpuMemoryInfo": "69", "GetAllocatorWithDefaultOptions": "78"}
    assert sorted(re.findall(r"\(api, (\d+)\)", source)) == sorted(places.values())
    checks = "".join(
        f'_Static_assert(offsetof(OrtApi, {name}) == {at} * sizeof(void*), "{name}");\n'
        for name, at in places.items()
    )
    (tmp_path / "places.c").write_text(
        f"#include <stddef.h>\n#include <onnxruntime_c_api.h>\n{checks}"
    )
    subprocess.run(
        ["gcc", "-fsyntax-only", "-I", cpp_kit.DEPENDENCIES / "include", tmp_path / "places.c"],
        check=True,
    )


def test_the_library_links_no_onnx_runtime() -> None:
    done = subprocess.run(
        ["nm", "-D", csharp_kit.core()], capture_output=True, text=True, check=True
    )
    assert not re.findall(r"^ +U .*(?:Ort|onnx).*$", done.stdout, re.M)
    shown = re.findall(r"T (\w+)", done.stdout)
    declared = re.findall(r"odtpack_\w+(?=\()", (csharp_kit.SOURCES / "Native.cs").read_text())
    assert set(declared) <= set(shown)
    assert all(name.startswith("odtpack_") for name in shown)


@pytest.mark.parametrize("name", ["adam", "step_adamw"])
def test_nothing_is_freed_under_a_call(name: str, tmp_path: Path) -> None:
    calls(program_of(csharp_kit), "dispose", write_job(TRIED[f"close {name}"][1], tmp_path), 20)


def test_an_app_checks_a_signature_itself(package: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(package, tmp_path / "package")
    assert "code: not-signed" in run("signature", copy, "right").stderr
    (copy / "manifest.sig").write_bytes(bytes(64))
    assert run("signature", copy, "right").returncode == 0
    assert "code: signature-wrong" in run("signature", copy, "wrong").stderr
    assert "InvalidOperationException: no key" in run("signature", copy, "throws").stderr


def test_the_benchmark_writes_every_measurement(tmp_path: Path) -> None:
    done = run("benchmark", tmp_path, 1, 5 * 10**8)
    assert done.returncode == 0, done.stderr
    check_measurements(done.stdout, "csharp", onnxruntime.__version__)
    assert not list(tmp_path.iterdir())
