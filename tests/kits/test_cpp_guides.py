"""What the guides show of the C++ and Swift kits besides their programs compiles as it stands."""

import re
from pathlib import Path

import pytest

from tests.kits import cpp_kit, swift_kit
from tests.programs import ran

pytestmark = pytest.mark.kits
GUIDES = cpp_kit.ROOT / "docs" / "guides"
# The declarations of <openssl/evp.h> that the guide uses.
OPENSSL = """
struct EVP_PKEY;
struct EVP_MD_CTX;
struct EVP_PKEY_CTX;
struct EVP_MD;
struct ENGINE;
extern "C" {
EVP_MD_CTX* EVP_MD_CTX_new();
void EVP_MD_CTX_free(EVP_MD_CTX*);
int EVP_DigestVerifyInit(EVP_MD_CTX*, EVP_PKEY_CTX**, const EVP_MD*, ENGINE*, EVP_PKEY*);
int EVP_DigestVerify(EVP_MD_CTX*, const unsigned char*, size_t, const unsigned char*, size_t);
}
EVP_PKEY* PublicKey();
"""
CPP = """#include <iostream>
#include <odtpack/odtpack.hpp>
{openssl}
{signature}
void Loop(const Ort::Env& env, const std::vector<std::vector<Ort::Value>>& batches) {{
{loop}}}
void Generate(const Ort::Env& env, const std::vector<std::vector<Ort::Value>>& batches) {{
{generate}}}
void CarryOver(const Ort::Env& env, const odtpack::Package& newer) {{
{newer}}}
void Update(const odtpack::Package::SignatureCheck& is_signed) {{
{update}}}
void InOrtFormat(const Ort::Env& env, const odtpack::Package& package,
                 const odtpack::CheckpointState& state) {{
{minimal}}}
{former}
void Formerly(const Ort::CheckpointState& state) {{
  Ort::CheckpointState::SaveCheckpoint(state, "trained.ckpt", true);
}}
"""
SWIFT = """import Foundation
func loop(_ files: URL, _ batches: [[ORTValue]]) throws {{
{loop}}}
func generate(_ env: ORTEnv, _ batches: [[ORTValue]]) async throws {{
{generate}}}
{app}
func carryOver(_ env: ORTEnv, _ newer: TrainingPackage) throws {{
{newer}}}
func update(_ publicKey: Data) throws {{
{update}}}
"""


def fragments(guide: str, language: str) -> list[str]:
    """Blocks of a guide that are not files."""
    text = (GUIDES / guide).read_text()
    blocks = re.findall(r"^([^\n]*)\n\n```(\w+)\n(.*?)^```$", text, re.M | re.S)
    return [code for before, name, code in blocks if name == language and before[:1] != "`"]


def test_each_guide_begins_with_the_training_loop() -> None:
    for name in ("cpp", "csharp", "java", "javascript", "kotlin", "swift"):
        block = re.search(r"^```\w+\n(.*?)^```$", (GUIDES / f"{name}.md").read_text(), re.M | re.S)
        assert re.search("trainBatch", block[1], re.I), name
        assert block[1].count("\n") <= 30, name


@pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable()))
def test_what_the_guides_show_in_cpp_compiles(tmp_path: Path) -> None:
    loop, generate, signature, newer, former = fragments("cpp.md", "cpp")
    (update,) = fragments("updates.md", "cpp")
    (minimal,) = fragments("../minimal-build.md", "cpp")
    source = tmp_path / "guides.cpp"
    source.write_text(CPP.format(openssl=OPENSSL, loop=loop, generate=generate, newer=newer,
                                 signature=signature, update=update, minimal=minimal,
                                 former=former))  # fmt: skip
    ran("g++", "-std=c++17", "-fsyntax-only", "-Wall", "-I", cpp_kit.KIT / "include",
        "-isystem", cpp_kit.DEPENDENCIES / "include", source)  # fmt: skip


@pytest.mark.skipif(swift_kit.unavailable() is not None, reason=str(swift_kit.unavailable()))
def test_what_the_guides_show_in_swift_compiles(tmp_path: Path) -> None:
    loop, generate, newer = fragments("swift.md", "swift")
    (app,) = fragments("in-the-app.md", "swift")
    (update,) = fragments("updates.md", "swift")
    source = tmp_path / "guides.swift"
    source.write_text(
        SWIFT.format(loop=loop, generate=generate, app=app, newer=newer, update=update)
    )
    kit = sorted((swift_kit.KIT / "Sources" / "Odtpack").glob("*.swift"))
    swift_kit.in_toolchain("swiftc", "-typecheck", *swift_kit.IMPORTS, *kit, source)
