"""What the guides show of the C++ and Swift kits besides their programs compiles as it stands."""

import re

import pytest

from tests.kits import cpp_kit, swift_kit
from tests.kits.harness import filled
from tests.programs import ran

pytestmark = pytest.mark.kits
GUIDES = cpp_kit.ROOT / "docs" / "guides"


def fragments(guide: str, language: str) -> list[str]:
    """Blocks of a guide that are not files."""
    text = (GUIDES / guide).read_text()
    blocks = re.findall(r"^([^\n]*)\n\n```(\w+)\n(.*?)^```$", text, re.M | re.S)
    return [code for before, name, code in blocks if name == language and before[:1] != "`"]


def test_each_guide_begins_with_the_training_loop():
    for name in ("cpp", "csharp", "java", "javascript", "kotlin", "swift"):
        block = re.search(r"^```\w+\n(.*?)^```$", (GUIDES / f"{name}.md").read_text(), re.M | re.S)
        assert re.search("trainBatch", block[1], re.I), name
        assert block[1].count("\n") <= 30, name


@pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable()))
def test_what_the_guides_show_in_cpp_compiles(tmp_path):
    loop, generate, signature, newer, former = fragments("cpp.md", "cpp")
    (update,) = fragments("updates.md", "cpp")
    (minimal,) = fragments("../minimal-build.md", "cpp")
    source = tmp_path / "guides.cpp"
    pieces = {"loop": loop, "generate": generate, "newer": newer, "signature": signature,
              "update": update, "minimal": minimal, "former": former}  # fmt: skip
    source.write_text(filled(cpp_kit.PROGRAMS / "guide" / "pieces.cpp", **pieces))
    ran("g++", "-std=c++17", "-fsyntax-only", "-Wall", "-I", cpp_kit.KIT / "include",
        "-isystem", cpp_kit.DEPENDENCIES / "include", source)  # fmt: skip


@pytest.mark.skipif(swift_kit.unavailable() is not None, reason=str(swift_kit.unavailable()))
def test_what_the_guides_show_in_swift_compiles(tmp_path):
    loop, generate, newer = fragments("swift.md", "swift")
    (app,) = fragments("in-the-app.md", "swift")
    (update,) = fragments("updates.md", "swift")
    source = tmp_path / "guides.swift"
    pieces = {"loop": loop, "generate": generate, "app": app, "newer": newer, "update": update}
    source.write_text(filled(swift_kit.PROGRAM / "guide" / "pieces.swift", **pieces))
    kit = sorted((swift_kit.KIT / "Sources" / "Odtpack").glob("*.swift"))
    swift_kit.in_toolchain("swiftc", "-typecheck", *swift_kit.IMPORTS, *kit, source)
