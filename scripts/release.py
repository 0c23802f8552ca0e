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

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from scripts.harness import ROOT, options, scratch
from scripts.nupkg import write_nupkg, write_zip

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
    with scratch() as folder:
        command = ["build", "--wheel", "--outdir", folder, header, ROOT / "runtime/native"]
        _run(sys.executable, "-m", *command)
        (wheel,) = folder.glob("*.whl")
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
    with scratch() as folder:
        names = ("sources.jar", "odtpack-android.aar", "pom.xml")
        sources, aar, pom = (folder / each for each in names)
        main = KOTLIN / "src/main"
        paths = {path: path.relative_to(main) for path in sorted(main.rglob("*.*"))}
        write_zip(sources, {"/".join(own.parts[1:]): p.read_bytes() for p, own in paths.items()})
        javadoc = jar.with_stem(f"{jar.stem}-javadoc")
        javadoc.unlink(missing_ok=True)  # Dokka writes none where it finds nothing to document
        _maven("org.jetbrains.dokka:dokka-maven-plugin:2.0.0:javadocJar")
        _deploy(out, jar, KOTLIN / "pom.xml", sources, javadoc)
        _write_aar(aar, jar)
        text = (KOTLIN / "pom.xml").read_text()
        for old, new in (
            (">odtpack</artifactId>", ">odtpack-android</artifactId>"),
            ("</version>\n  <name>", "</version>\n  <packaging>aar</packaging>\n  <name>"),
            (">onnxruntime</artifactId>", ">onnxruntime-android</artifactId>"),
        ):
            text = text.replace(old, new, 1)
        pom.write_text(text)
        _deploy(out, aar, pom, sources, javadoc)


def _maven(goal: str, **values: object) -> None:
    settings = (f"-D{key}={value}" for key, value in values.items())
    _run("mvn", "-q", "-B", goal, *settings, cwd=KOTLIN)


def _deploy(out: Path, file: Path, pom: Path, sources: Path, javadoc: Path) -> None:
    _maven(
        "org.apache.maven.plugins:maven-deploy-plugin:3.1.2:deploy-file", url=out.as_uri(),
        repositoryId="release", file=file, pomFile=pom, sources=sources, javadoc=javadoc,
    )  # fmt: skip


def _write_aar(aar: Path, jar: Path) -> None:
    """Write the Android library; its layout is that of the Android Gradle plug-in."""
    manifest = (
        '<manifest xmlns:android="http://schemas.android.com/apk/res/android"\n'
        f'    package="org.odtpack">\n  <uses-sdk android:minSdkVersion="{MIN_SDK}" />\n'
        "</manifest>\n"
    )
    files = {
        "AndroidManifest.xml": manifest.encode(), "classes.jar": jar.read_bytes(), "R.txt": b"",
        "proguard.txt": (KOTLIN / "consumer-rules.pro").read_bytes(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
    }  # fmt: skip
    write_zip(aar, files)


def cmake(out: Path) -> None:
    """The headers and their CMake package, in one archive."""
    out.mkdir(parents=True)
    name = f"odtpack-cpp-{version()}"
    needed = ("ONNXRUNTIME_LIBRARY", "ONNXRUNTIME_INCLUDE_DIR", "FLATBUFFERS_INCLUDE_DIR")
    options = ["-DODTPACK_BUILD_APP=OFF", *(f"-D{each}=/of-the-app" for each in needed)]
    with scratch() as folder:
        build, stage = folder / "build", folder / name
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
        found[f"pypi/{project['name']}"] = [f"pypi/{each}" for each in names]
    package = json.loads((JS / "package.json").read_text())
    found[f"npm/{package['name']}"] = [f"npm/{each}" for each in package["dependencies"]]
    pom = ElementTree.parse(KOTLIN / "pom.xml").getroot()  # noqa: S314 - our own file
    space = "{http://maven.apache.org/POM/4.0.0}"
    found["maven/org.odtpack/odtpack"] = [
        f"maven/{each.findtext(f'{space}groupId')}/{each.findtext(f'{space}artifactId')}"
        for each in pom.findall(f"{space}dependencies/{space}dependency")
    ]
    found["nuget/Odtpack"] = ["generic/onnxruntime"]
    found["generic/odtpack-cpp"] = ["generic/onnxruntime", "generic/flatbuffers"]
    return {
        f"pkg:{name}@{version()}": [f"pkg:{each}" for each in needed]
        for name, needed in found.items()
    }


def bill_of_materials() -> dict[str, Any]:
    """A bill of materials in CycloneDX 1.5."""
    needed = dependencies()

    def component(url: str) -> dict[str, str]:
        name, _, at = url.rpartition("/")[2].partition("@")
        part = {"type": "library", "bom-ref": url, "name": name, "purl": url}
        return {**part, "version": at} if at else part

    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "components": [component(url) for url in sorted({*needed, *chain(*needed.values())})],
        "dependencies": [{"ref": ref, "dependsOn": values} for ref, values in needed.items()],
    }  # fmt: skip


def main() -> None:
    out = options(__doc__, out=ROOT / "dist").out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for build in (python, npm, maven, cmake, nuget):
        print(f"{build.__name__} …", file=sys.stderr, flush=True)
        build(out / build.__name__)
    (out / "sbom.cdx.json").write_text(json.dumps(bill_of_materials(), indent=2) + "\n")
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    sums = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(out)}\n" for p in paths)
    (out / "SHA256SUMS").write_text("".join(sums))
    print(f"{len(paths)} files in {out}")


if __name__ == "__main__":
    main()
