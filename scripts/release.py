"""Build every artifact of a release into dist/ (make release).

    python -m scripts.release [--out dist]

    python/   wheels and source distributions of odtpack and odtpack-runtime, and the wheel of
              odtpack-native, the kernels, for this platform
    npm/      the tarball of the JavaScript kit
    maven/    a repository with the Kotlin kit: odtpack (jar) and odtpack-android (AAR)
    cmake/    the C++ kit, as cmake --install writes it
    nuget/    the C# kit with its library for linux-x64
    SHA256SUMS, sbom.cdx.json: digests, and the dependencies that each artifact declares (CycloneDX)

make kits must have built the kits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from scripts.nupkg import write_nupkg, write_zip

ROOT: Final = Path(__file__).resolve().parents[1]
KOTLIN: Final = ROOT / "runtime/kotlin"
JS: Final = ROOT / "runtime/js"
MIN_SDK: Final = 24


def version() -> str:
    """The version, which every artifact has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def environment() -> dict[str, str]:
    """The environment with the Node.js of scripts/setup_kits_js.sh, and tools of this Python."""
    folders = (ROOT / "build/node/bin", Path(sys.executable).parent, os.environ["PATH"])
    return {**os.environ, "PATH": os.pathsep.join(map(str, folders))}


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def python(out: Path) -> None:
    for source in (ROOT / "runtime", ROOT):
        _run(sys.executable, "-m", "build", "--outdir", out, source)
    native(out)


def native(out: Path) -> None:
    """The wheel of native kernels, with the tag of the oldest Linux that it runs on."""
    header = f"-Ccmake.define.ONNXRUNTIME_INCLUDE_DIR={ROOT / 'build/cpp-deps/include'}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["build", "--wheel", "--outdir", folder, header, ROOT / "runtime/native"]
        _run(sys.executable, "-m", *command)
        (wheel,) = Path(folder).glob("*.whl")
        if sys.platform == "linux":
            _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel)
        else:
            shutil.copy(wheel, out)


def npm(out: Path) -> None:
    out.mkdir(parents=True)
    _run("npm", "pack", "--silent", "--pack-destination", out, cwd=JS)


def maven(out: Path) -> None:
    """The jar with its sources, and the AAR, in the layout of a Maven repository."""
    jar = KOTLIN / f"target/odtpack-{version()}.jar"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = folder / "sources.jar"
        main = KOTLIN / "src/main"
        paths = {path: path.relative_to(main) for path in sorted(main.rglob("*.*"))}
        write_zip(sources, {"/".join(own.parts[1:]): p.read_bytes() for p, own in paths.items()})
        _run(
            "mvn", "-q", "-B", "org.jetbrains.dokka:dokka-maven-plugin:2.0.0:javadocJar", cwd=KOTLIN
        )
        _deploy(out, jar, KOTLIN / "pom.xml", sources)
        aar, pom = folder / "odtpack-android.aar", folder / "pom.xml"
        _write_aar(aar, jar)
        text = (KOTLIN / "pom.xml").read_text()
        text = text.replace(">odtpack</artifactId>", ">odtpack-android</artifactId>", 1)
        text = text.replace(
            "</version>\n  <name>", "</version>\n  <packaging>aar</packaging>\n  <name>", 1
        )
        text = text.replace("<artifactId>onnxruntime</artifactId>",
                            "<artifactId>onnxruntime-android</artifactId>")  # fmt: skip
        pom.write_text(text)
        _deploy(out, aar, pom, sources)


def _deploy(out: Path, file: Path, pom: Path, sources: Path) -> None:
    goal = "org.apache.maven.plugins:maven-deploy-plugin:3.1.2:deploy-file"
    javadoc = KOTLIN / f"target/odtpack-{version()}-javadoc.jar"
    values = {"url": out.as_uri(), "repositoryId": "release", "file": file, "pomFile": pom,
              "sources": sources, "javadoc": javadoc}  # fmt: skip
    _run("mvn", "-q", "-B", goal, *(f"-D{key}={value}" for key, value in values.items()))


def _write_aar(aar: Path, jar: Path) -> None:
    """Write the Android library; its layout is that of the Android Gradle plug-in."""
    manifest = (
        '<manifest xmlns:android="http://schemas.android.com/apk/res/android"\n'
        '    package="org.odtpack">\n'
        f'  <uses-sdk android:minSdkVersion="{MIN_SDK}" />\n'
        "</manifest>\n"
    )
    files = {
        "AndroidManifest.xml": manifest.encode(),
        "classes.jar": jar.read_bytes(),
        "R.txt": b"",
        "proguard.txt": (KOTLIN / "consumer-rules.pro").read_bytes(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    write_zip(aar, files)


def cmake(out: Path) -> None:
    """The headers and their CMake package, in one archive."""
    out.mkdir(parents=True)
    name = f"odtpack-cpp-{version()}"
    needed = ("ONNXRUNTIME_LIBRARY", "ONNXRUNTIME_INCLUDE_DIR", "FLATBUFFERS_INCLUDE_DIR")
    options = ["-DODTPACK_BUILD_APP=OFF", *(f"-D{each}=/of-the-app" for each in needed)]
    with tempfile.TemporaryDirectory() as folder:
        build, stage = Path(folder, "build"), Path(folder, name)
        _run("cmake", "-S", ROOT / "runtime/cpp", "-B", build, *options)
        _run("cmake", "--install", build, "--prefix", stage)
        shutil.copy(ROOT / "LICENSE", stage)
        with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(stage, name)


def nuget(out: Path) -> None:
    write_nupkg(out)


def dependencies() -> dict[str, list[str]]:
    """What each artifact declares to need at run time, as package URLs."""
    found: dict[str, list[str]] = {}
    for folder in (ROOT, ROOT / "runtime", ROOT / "runtime/native"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        names = [re.split(r"[<>=]", each)[0] for each in project.get("dependencies", ())]
        found[f"pkg:pypi/{project['name']}@{version()}"] = [f"pkg:pypi/{each}" for each in names]
    package = json.loads((JS / "package.json").read_text())
    needed = [f"pkg:npm/{each}" for each in package["dependencies"]]
    found[f"pkg:npm/{package['name']}@{version()}"] = needed
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    pom = ElementTree.parse(KOTLIN / "pom.xml").getroot()  # noqa: S314 - our own file
    needed = [
        f"pkg:maven/{each.findtext('m:groupId', namespaces=space)}/"
        f"{each.findtext('m:artifactId', namespaces=space)}"
        for each in pom.findall("m:dependencies/m:dependency", space)
    ]
    found[f"pkg:maven/org.odtpack/odtpack@{version()}"] = needed
    found[f"pkg:nuget/Odtpack@{version()}"] = ["pkg:generic/onnxruntime"]
    found[f"pkg:generic/odtpack-cpp@{version()}"] = [
        "pkg:generic/onnxruntime",
        "pkg:generic/flatbuffers",
    ]
    return found


def bill_of_materials() -> dict[str, Any]:
    """A bill of materials in CycloneDX 1.5."""
    needed = dependencies()
    every = sorted({*needed, *(each for values in needed.values() for each in values)})

    def component(url: str) -> dict[str, str]:
        name, _, at = url.rpartition("/")[2].partition("@")
        part = {"type": "library", "bom-ref": url, "name": name, "purl": url}
        return {**part, "version": at} if at else part

    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "components": [component(url) for url in every],
        "dependencies": [{"ref": ref, "dependsOn": values} for ref, values in needed.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Build every artifact of a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for build in (python, npm, maven, cmake, nuget):
        print(f"{build.__name__} …", file=sys.stderr, flush=True)
        build(out / build.__name__)
    (out / "sbom.cdx.json").write_text(json.dumps(bill_of_materials(), indent=2) + "\n")
    files = sorted(path for path in out.rglob("*") if path.is_file())
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out)}\n"
        for path in files
    ]
    (out / "SHA256SUMS").write_text("".join(sums))
    print(f"{len(files)} files in {out}")


if __name__ == "__main__":
    main()
