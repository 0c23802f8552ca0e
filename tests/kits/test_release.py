"""Each artifact of a release is installed into an empty project, which trains with it."""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.session.native import VARIABLE
from scripts import release
from tests import zoo
from tests.kits import cpp_kit, javascript, kotlin_kit, web
from tests.kits.harness import needs, write_assets
from tests.kits.kotlin_kit import finish
from tests.once import made_once
from tests.packages.samples import build
from tests.packaging_tools import losses_of_steps, open_training
from tests.programs import ran
from tests.reports.browser import CHROMIUM, Browser

ROOT = cpp_kit.ROOT
GUIDES = ROOT / "docs" / "guides"
MISSING = cpp_kit.unavailable() or kotlin_kit.unavailable() or javascript.unavailable()
pytestmark = needs(MISSING)
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>app</groupId><artifactId>app</artifactId><version>1</version>
  <repositories><repository><id>release</id><url>{repository}</url></repository></repositories>
  <dependencies>{dependencies}</dependencies>
</project>
"""
DEPENDENCY = """
    <dependency>
      <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
    </dependency>"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What make release builds of Kotlin and C++."""

    def build_all(folder: Path) -> None:
        for make in (release.maven, release.cmake):
            make(folder / make.__name__)

    return made_once(tmp_path_factory, "release", build_all)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a package of a small CNN and 320 samples."""
    write_assets(tmp_path, build(tmp_path / "built", zoo.cnn(size=8, width=(4, 8), classes=3)))
    return tmp_path


def guide(name: str, file: str) -> str:
    """A file that a guide shows."""
    pattern = rf"^`{re.escape(file)}`:\n\n```\w+\n(.*?)^```"
    (found,) = re.findall(pattern, (GUIDES / name).read_text(), re.M | re.S)
    return str(found)


def steps_trained(folder: Path) -> int:
    return read_checkpoint(folder / "trained.ckpt").optimizer.step


def test_a_cmake_project(dist, project):
    (archive,) = (dist / "cmake").glob("*.tar.gz")
    shutil.unpack_archive(archive, project, filter="data")
    prefix = project / archive.name.removesuffix(".tar.gz")
    lists = guide("cpp.md", "CMakeLists.txt")
    lists = re.sub(r"add_subdirectory.*?installed: (.*)", r"\1", lists)
    assert "find_package(odtpack" in lists
    (project / "CMakeLists.txt").write_text(lists)
    (project / "main.cpp").write_text(guide("cpp.md", "main.cpp"))
    words = ["cmake", "-S", str(project), f"-DCMAKE_PREFIX_PATH={prefix}"]
    refused = ran(*words, "-B", project / "none", code=None)
    assert refused.returncode
    assert "ONNXRUNTIME_INCLUDE_DIR" in refused.stderr
    finish([*words, "-B", str(project / "out"), *cpp_kit.cmake_options("plain")])
    finish(["cmake", "--build", str(project / "out")])
    finish([str(project / "out" / "app")], cwd=project)
    assert steps_trained(project) == 100
    (project / "assets" / "images.bin").write_bytes(b"short")
    refused = ran(project / "out" / "app", cwd=project, code=None)
    assert refused.returncode == 2
    assert refused.stderr == "assets/images.bin is missing, or ends too early.\n"


def test_a_cmake_project_in_c(dist, project):
    """A C program links the library of an installed kit, which an app may do without."""
    (archive,) = (dist / "cmake").glob("*.tar.gz")
    shutil.unpack_archive(archive, project, filter="data")
    prefix = project / archive.name.removesuffix(".tar.gz")
    shutil.copytree(ROOT / "tests" / "kits" / "c", project, dirs_exist_ok=True)
    words = ["cmake", "-S", str(project), f"-DCMAKE_PREFIX_PATH={prefix}", "-DODTPACK_KERNELS=OFF"]
    assert "not built: ONNX Runtime was not found" in ran(*words, "-B", project / "none").stdout
    finish([*words, "-B", str(project / "out"), *cpp_kit.cmake_options("plain")])
    finish(["cmake", "--build", str(project / "out")])
    library = cpp_kit.DEPENDENCIES / "lib" / "libonnxruntime.so"
    files = [project / "assets" / f"{name}.bin" for name in ("images", "labels")]
    ran(project / "out" / "train", library, project / "assets" / "package", *files,
        project / "trained.ckpt")  # fmt: skip
    assert steps_trained(project) == 12


CONAN = ROOT / "build" / "conan" / "bin" / "conan"


@pytest.mark.skipif(not CONAN.is_file(), reason="Conan is not set up (run: make kits)")
def test_a_conan_project(project):
    """Conan builds the recipe without any registry, and the guide's program finds what it made."""
    settings = {"env": {**os.environ, "CONAN_HOME": str(project / "conan")}, "cwd": project}
    finish([str(CONAN), "profile", "detect"], **settings)
    finish([str(CONAN), "create", "--no-remote", str(ROOT / "runtime" / "cpp")], **settings)
    wanted = f"--requires=odtpack/{release.version()}"
    finish([str(CONAN), "install", "--no-remote", wanted, "-g", "CMakeToolchain"], **settings)
    lists = re.sub(r"add_subdirectory.*?installed: (.*)", r"\1", guide("cpp.md", "CMakeLists.txt"))
    (project / "CMakeLists.txt").write_text(lists)
    (project / "main.cpp").write_text(guide("cpp.md", "main.cpp"))
    toolchain = next(project.rglob("conan_toolchain.cmake"))
    finish(["cmake", "-S", str(project), "-B", str(project / "out"), "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", *cpp_kit.dependencies("plain")])  # fmt: skip
    finish(["cmake", "--build", str(project / "out")])
    finish([str(project / "out" / "app")], cwd=project)
    assert steps_trained(project) == 100


def npm_project(npm: Path, project: Path, *more: str) -> Path:
    """Copy what npm installed, and link what an app has besides it; return node_modules."""
    shutil.copytree(npm.parent, project, symlinks=True, dirs_exist_ok=True)
    for name in more:
        (project / "node_modules" / name).symlink_to(release.JS / "node_modules" / name)
    return project / "node_modules"


def test_an_npm_project(npm, project):
    installed = npm_project(npm, project, "onnxruntime-web", "typescript", "@types")
    assert {"LICENSE", "README.md", "package.json", "dist"} == {
        path.name for path in (installed / "odtpack").iterdir()
    }
    shutil.copy(javascript.SCRIPTS / "types.ts", project)
    options = ["--noEmit", "--strict", "--skipLibCheck", "false", "--module", "nodenext"]
    tsc = [str(installed / "typescript/bin/tsc"), *options, "--types", "node", "types.ts"]
    finish(tsc, cwd=project, env=release.environment())
    for name in ("package", "images.bin", "labels.bin"):
        (project / name).symlink_to(project / "assets" / name)
    (project / "train.mjs").write_text(guide("javascript.md", "train.mjs"))
    finish([str(javascript.NODE), "train.mjs"], cwd=project)
    assert steps_trained(project) == 60
    load = "import('odtpack/package.json', {with: {type: 'json'}})"
    code = f"{load}.then(found => console.log(found.default.version))"
    assert finish([str(javascript.NODE), "-e", code], cwd=project).strip() == release.version()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_an_npm_project_that_vite_bundles_for_chromium(npm, project):
    installed = npm_project(npm, project, "onnxruntime-web", "vite")
    (project / "assets").rename(project / "public")
    code = guide("javascript.md", "main.js").replace("'assets/", "'public/")
    after = (javascript.SCRIPTS / "after_the_guide.js").read_text()
    (project / "main.js").write_text(f"{code}\n{after}")
    (project / "index.html").write_text('<script type="module" src="main.js"></script>')
    vite = [str(installed / "vite/bin/vite.js"), "build", "--base", "./"]
    finish(vite, cwd=project, env=release.environment())
    (wasm,) = (project / "dist").rglob("*.wasm")  # the small build: without jsep, and once
    assert re.fullmatch(r"ort-wasm-simd-threaded-[\w-]+\.wasm", wasm.name)
    page = (project / "dist" / "index.html").read_text()
    served = {"assets": project / "dist" / "assets", "public": project / "dist"}
    with web.serve(served, page) as address, Browser(project / "profile", served=True) as browser:
        browser.open(address)
        web.wait(browser, "Boolean(window.result)")
        found = browser.evaluate("window.result")
    assert (found["steps"], found["dims"], found["scores"]) == (20, [32, 3], 96)
    assert (found["refused"], found["lost"]) == ("input-count", "bad-argument")
    assert found["skipped"] is None
    _, module, optimizer = open_training(project / "public" / "package")
    optimizer.set_learning_rate(0.01)
    images = np.fromfile(project / "public" / "images.bin", np.float32).reshape(320, 1, 8, 8)
    labels = np.fromfile(project / "public" / "labels.bin", np.int64)
    rows = [slice(step * 32 % 289, step * 32 % 289 + 32) for step in [*range(20), 0]]
    wanted = losses_of_steps(module, optimizer, [(images[each], labels[each]) for each in rows])
    np.testing.assert_allclose(found["losses"], wanted, rtol=2e-6)


def libraries(dist: Path, folder: Path, *wanted: str) -> list[Path]:
    """What Maven brings an empty project that depends on these, in a repository of the tests."""
    folder.mkdir()
    dependencies = "".join(DEPENDENCY.format(*each.split(":")) for each in wanted)
    pom = POM.format(repository=(dist / "maven").as_uri(), dependencies=dependencies)
    (folder / "pom.xml").write_text(pom)
    local = kotlin_kit.BUILD / "m2"
    shutil.rmtree(local / "org" / "odtpack", ignore_errors=True)  # a former release's
    goal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
    finish(["mvn", "-q", "-B", f"-Dmaven.repo.local={local}", goal, "-DoutputDirectory=lib"],
           cwd=folder)  # fmt: skip
    return sorted((folder / "lib").iterdir())


@pytest.fixture(scope="module")
def jars(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The kit and ONNX Runtime, with what they need."""
    runtime = f"com.microsoft.onnxruntime:onnxruntime:{kotlin_kit.runtime_version()}"
    folder = tmp_path_factory.mktemp("maven") / "app"
    found = libraries(dist, folder, f"org.odtpack:odtpack:{release.version()}", runtime)
    assert any(path.name.startswith("kotlin-stdlib-") for path in found)
    return found


def test_a_maven_project_in_java_and_kotlin(jars, project):
    path = os.pathsep.join(map(str, jars))
    (project / "Train.java").write_text(guide("java.md", "Train.java"))
    finish(["javac", "-Xlint:all", "-Werror", "-cp", path, "-d", "java", "Train.java"], cwd=project)
    for trained in (20, 40):  # the second time it goes on
        finish(["java", *kotlin_kit.OPTIONS, "-cp", f"java:{path}", "Train"], cwd=project)
        assert steps_trained(project) == trained
    (project / "trained.ckpt").unlink()
    (project / "main.kt").write_text(guide("kotlin.md", "main.kt"))
    compiler = [str(kotlin_kit.SOURCES / "kotlinc.sh"), "-Werror", "-d", "kotlin", "-cp", path]
    finish([*compiler, "main.kt"], cwd=project)
    finish(["java", *kotlin_kit.OPTIONS, "-cp", f"kotlin:{path}", "MainKt"], cwd=project)
    assert steps_trained(project) == 60


def test_the_android_library(dist, jars, project):
    """Its layout, and an app that ProGuard shrank with its rules."""
    folder = dist / "maven" / "org" / "odtpack" / "odtpack-android" / release.version()
    name = f"odtpack-android-{release.version()}"
    shutil.unpack_archive(folder / f"{name}.aar", project / "aar", "zip")
    assert {path.name for path in (project / "aar").iterdir()} == {
        "AndroidManifest.xml", "classes.jar", "R.txt", "proguard.txt", "LICENSE",
    }  # fmt: skip
    assert 'android:minSdkVersion="24"' in (project / "aar" / "AndroidManifest.xml").read_text()
    assert "<packaging>aar</packaging>" in (folder / f"{name}.pom").read_text()

    path = os.pathsep.join(map(str, jars))
    (project / "Train.java").write_text(guide("java.md", "Train.java"))
    finish(["javac", "-cp", path, "-d", "java", "Train.java"], cwd=project)
    shrinker = libraries(dist, project / "shrinker", "com.guardsquare:proguard-base:7.6.1")
    rules = [
        "-injars java", *(f"-injars {jar}(!META-INF/**)" for jar in jars),
        "-outjars small.jar",
        "-libraryjars <java.home>/jmods/java.base.jmod(!**.jar;!module-info.class)",
        "-keep class Train { public static void main(java.lang.String[]); }", "-dontwarn **",
        "-dontnote **", "-dontoptimize", f"-include {project / 'aar' / 'proguard.txt'}",
    ]  # fmt: skip
    (project / "app.pro").write_text("\n".join(rules))
    shrink = ["java", "-cp", os.pathsep.join(map(str, shrinker)), "proguard.ProGuard", "@app.pro"]
    finish(shrink, cwd=project)
    names = set(finish(["jar", "tf", "small.jar"], cwd=project).split())
    assert "org/odtpack/OrtTrainingSession.class" not in names  # renamed
    assert "ai/onnxruntime/OrtException.class" in names
    finish(["java", *kotlin_kit.OPTIONS, "-cp", "small.jar", "Train"], cwd=project)
    assert steps_trained(project) == 20


def test_the_bill_of_materials_and_the_pom(dist):
    bill: dict[str, Any] = release.bill_of_materials()
    refs = {each["bom-ref"] for each in bill["components"]}
    assert {
        each for row in bill["dependencies"] for each in [row["ref"], *row["dependsOn"]]
    } <= refs
    runtime = f"pkg:pypi/odtpack@{release.version()}"
    (needed,) = (row["dependsOn"] for row in bill["dependencies"] if row["ref"] == runtime)
    assert {"pkg:pypi/odtpack-runtime", "pkg:pypi/onnxruntime"} <= set(needed)
    declared = {
        "runtime/pyproject.toml": f'version = "{release.version()}"',
        "runtime/native/pyproject.toml": f'version = "{release.version()}"',
        "runtime/js/package.json": f'"version": "{release.version()}"',
        "runtime/kotlin/pom.xml": f"<version>{release.version()}</version>\n  <name>",
        "runtime/cpp/CMakeLists.txt": f"VERSION {release.version()} ",
        "CITATION.cff": f"version: {release.version()}",
        "runtime/cpp/conanfile.py": f'version = "{release.version()}"',
        "runtime/cpp/vcpkg/odtpack/vcpkg.json": f'"version": "{release.version()}"',
        "COdtpack.podspec": f"version = '{release.version()}'",
        "Odtpack.podspec": f"version = '{release.version()}'",
    }
    for file, text in declared.items():
        assert text in (ROOT / file).read_text(), file
    pom = next((dist / "maven").rglob("odtpack-0*.pom")).read_text()
    for part in (
        "<licenses>", "<developers>", "<scm>", "<url>", "kotlin-stdlib", "flatbuffers-java",
    ):  # fmt: skip
        assert part in pom
    for kind, suffix in (("sources", "kt"), ("javadoc", "html")):
        (jar,) = (dist / "maven").rglob(f"odtpack-0*-{kind}.jar")
        assert f"org/odtpack/OrtTrainingSession.{suffix}" in finish(["jar", "tf", str(jar)])
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.rglob("*.jar")}
    assert len(digests) == 3  # jar, sources and Javadoc; the AAR shares the last two


STEPS_OF_A_WHEEL = """
import json, sys
import numpy as np, onnxruntime
from odtpack_runtime import CheckpointState, Module, Optimizer, Package
from odtpack_runtime.session.native import native_library

package = Package.open(sys.argv[1])
options = onnxruntime.SessionOptions()
options.enable_profiling, options.profile_file_prefix = True, sys.argv[2]
state = CheckpointState.load_checkpoint(package.checkpoint)
module = Module(package.training_model, state, step_model_uri=package.step_model,
                session_options=options)
optimizer = Optimizer(package.optimizer_model, module)
data = np.random.default_rng(0).random((16, 6), np.float32), np.arange(16) % 3
print(json.dumps([str(native_library()), [float(optimizer.step_on(*data)) for _ in range(5)]]))
"""


def test_the_wheel_of_native_kernels(tmp_path):
    """Installed, it is used by itself; a package is simulated and trained with its kernels."""
    release.native(tmp_path)
    (wheel,) = tmp_path.glob("odtpack_native-*.whl")
    assert re.fullmatch(r"odtpack_native-.*-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name)
    site = tmp_path / "site"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    finish([sys.executable, "-m", *install, str(wheel)])
    folder = build(tmp_path / "package", zoo.mlp((6, 5, 3)), optimizer="adamw", native=True)
    random = np.random.default_rng(0)
    data = {"input": random.random((64, 6), np.float32), "labels": random.integers(0, 3, 64)}
    np.savez(tmp_path / "data.npz", **data)
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    simulate = ["-m", "odtpack", "simulate", str(folder), "--data", str(tmp_path / "data.npz"),
                "--device", "google/pixel-8a", "--kit", "cpp"]  # fmt: skip
    losses = []
    for more, taken in (({}, True), ({VARIABLE: "0"}, False)):
        env = {**clean, "PYTHONPATH": path, **more}
        given = [sys.executable, "-c", STEPS_OF_A_WHEEL, str(folder), str(tmp_path / f"{taken}-")]
        library, found = json.loads(finish(given, env=env))
        losses.append(found)
        assert (library == str(*site.rglob("*odtpack-kernels.so"))) is taken
        profile = "".join(each.read_text() for each in tmp_path.glob(f"{taken}-*.json"))
        assert ('"op_name" : "Kernel0"' in profile) is taken
        judged = ran(sys.executable, *simulate, code=None, env=env)
        assert judged.returncode == (0 if taken else 2), judged.stderr
        assert ("name a library that you built" in judged.stderr) is not taken
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
