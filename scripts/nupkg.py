"""Write the NuGet package of the C# kit: ``python -m scripts.nupkg OUT``.

The assembly is what Mono's mcs compiled against the API of .NET Framework 4.7.2, and is labelled
so. Native libraries lie by runtime identifier: linux-x64 is what is built here. ONNX Runtime is
the app's: the package depends on nothing.
"""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Final

from scripts.harness import ROOT, scratch
from tests.kits import csharp_kit

FRAMEWORK: Final = "net472"
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the same sources give the same archive
_NUSPEC: Final = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://schemas.microsoft.com/packaging/2013/05/nuspec.xsd">
  <metadata>
    <id>Odtpack</id>
    <version>{version}</version>
    <authors>odtpack</authors>
    <license type="expression">{license}</license>
    <requireLicenseAcceptance>false</requireLicenseAcceptance>
    <description>{description}</description>
    <dependencies>
      <group targetFramework="{framework}" />
    </dependencies>
  </metadata>
</package>
"""
_TYPES: Final = """<?xml version="1.0" encoding="utf-8"?>
<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
  <Default Extension="rels"
    ContentType="application/vnd.openxmlformats-package.relationships+xml" />
  <Default Extension="nuspec" ContentType="application/octet" />
  <Default Extension="dll" ContentType="application/octet" />
  <Default Extension="xml" ContentType="application/octet" />
  <Default Extension="so" ContentType="application/octet" />
  <Override PartName="/LICENSE" ContentType="application/octet" />
</Types>
"""
_RELATIONS: Final = """<?xml version="1.0" encoding="utf-8"?>
<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">
  <Relationship Id="R0" Type="http://schemas.microsoft.com/packaging/2010/07/manifest" \
Target="/Odtpack.nuspec" />
</Relationships>
"""


def write_nupkg(out: Path) -> Path:
    """Write the package into a folder; return its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    nuspec = _NUSPEC.format(
        version=project["version"], license=project["license"], framework=FRAMEWORK,
        description="Train packages of odtpack in an app, on a stock ONNX Runtime.",
    )  # fmt: skip
    assembly = csharp_kit.assembly()
    with scratch() as folder:
        native = folder / "libodtpack.so"
        subprocess.run(["strip", "-o", native, csharp_kit.core()], check=True)
        files = {
            "[Content_Types].xml": _TYPES.encode(),
            "_rels/.rels": _RELATIONS.encode(),
            "Odtpack.nuspec": nuspec.encode(),
            "LICENSE": (ROOT / "LICENSE").read_bytes(),
            f"lib/{FRAMEWORK}/Odtpack.dll": assembly.read_bytes(),
            f"lib/{FRAMEWORK}/Odtpack.xml": assembly.with_suffix(".xml").read_bytes(),
            "runtimes/linux-x64/native/libodtpack.so": native.read_bytes(),
        }
    path = out / f"Odtpack.{project['version']}.nupkg"
    out.mkdir(parents=True, exist_ok=True)
    write_zip(path, files)
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    """Write an archive that is the same for the same files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    print(write_nupkg(Path(sys.argv[1])))
