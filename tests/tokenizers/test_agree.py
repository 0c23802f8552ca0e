"""The code of docs/guides/text.md gives the tokens and labels of Python, in every language.

Each program is the guide's code and a loop over rows: a text, or messages as role and content.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from odtpack.spec import TextSpec
from odtpack.text import prepare
from tests.kits import csharp_kit, javascript, kotlin_kit, swift_kit
from tests.programs import ran
from tests.test_docs import ROOT, blocks
from tests.text_tools import saved, texts, tokenizer

pytestmark = pytest.mark.tokenizers
GUIDE = ROOT / "docs" / "guides" / "text.md"
BUILD = ROOT / "build" / "tokenizers"
NATIVE = BUILD / "native" / "target" / "release"
LENGTH, COUNT = 200, 1000
ROWS, MESSAGES, FIELDS = "\x1d", "\x1e", "\x1f"

PYTHON = """
import pathlib, sys

_, path, length, rows = sys.argv
tokenizer = Tokenizer.from_file(path)
for row in pathlib.Path(rows).read_bytes().decode().split("\\x1d"):
    if "\\x1f" in row:
        messages = [dict(zip(("role", "content"), m.split("\\x1f"))) for m in row.split("\\x1e")]
        found = sample(tokenizer, messages, int(length))
    else:
        found = [tokenizer.encode(row).ids]
    for numbers in found:
        print(*numbers)
"""

JS = """
import { readFileSync } from "node:fs";
const [path, length, rows] = process.argv.slice(2);
const tokenizer = new Tokenizer(JSON.parse(readFileSync(path, "utf8")), {});
const lines = [];
for (const row of readFileSync(rows, "utf8").split("\\x1d")) {
  if (row.includes("\\x1f")) {
    const messages = row.split("\\x1e").map((each) => {
      const [role, content] = each.split("\\x1f");
      return { role, content };
    });
    const found = sample(tokenizer, messages, Number(length));
    lines.push(found.ids, found.labels);
    class Tensor { constructor(kind, data, shape) { Object.assign(this, { kind, data, shape }); } }
    const { data, shape } = tensor(Tensor, found.labels);
    if (String([...data]) !== String(found.labels) || shape[1] !== data.length) throw new Error();
  } else lines.push(tokenizer.encode(row).ids);
}
console.log(lines.map((each) => each.join(" ")).join("\\n"));
"""

KOTLIN = """
fun main(args: Array<String>) {
    val tokenizer = open(args[0])
    for (row in java.io.File(args[2]).readText().split('\\u001d')) {
        if ('\\u001f' in row) {
            val messages = row.split('\\u001e').map {
                Message(it.substringBefore('\\u001f'), it.substringAfter('\\u001f'))
            }
            val (ids, labels) = sample(tokenizer, messages, args[1].toInt())
            println(ids.joinToString(" "))
            println(labels.joinToString(" "))
        } else println(tokenizer.encode(row, true, false).ids.joinToString(" "))
    }
}
"""

CPP = """
#include <cstdio>
#include <fstream>
#include <iterator>

std::vector<std::string> Split(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (char c : text) {
    if (c == at) parts.emplace_back();
    else parts.back().push_back(c);
  }
  return parts;
}
void Print(const Ids& ids) {
  for (auto id : ids) std::printf("%lld ", static_cast<long long>(id));
  std::printf("\\n");
}
int main(int, char** given) {
  Tokenizer* tokenizer = tokenizer_open(given[1]);
  std::ifstream stream(given[3], std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(stream), {}};
  for (const auto& row : Split(all, '\\x1d')) {
    if (row.find('\\x1f') == row.npos) {
      Print(Encode(tokenizer, row, true));
      continue;
    }
    std::vector<Message> messages;
    for (const auto& each : Split(row, '\\x1e')) {
      auto parts = Split(each, '\\x1f');
      messages.push_back({parts[0], parts[1]});
    }
    auto found = Sample(tokenizer, messages, std::stol(given[2]));
    Print(found.first);
    Print(found.second);
  }
  if (tokenizer_open("none.json")) return 1;
  tokenizer_close(tokenizer);
}
"""

CSHARP = """
public static class Program
{
    public static void Main(string[] args)
    {
        using (var tokens = new Tokens(args[0]))
        foreach (var row in System.IO.File.ReadAllText(args[2]).Split('\\x1d'))
        {
            if (row.IndexOf('\\x1f') < 0)
            {
                Console.WriteLine(string.Join(" ", tokens.Encode(row, true)));
                continue;
            }
            var messages = row.Split('\\x1e').Select(each => each.Split('\\x1f'))
                .Select(p => new Message { Role = p[0], Content = p[1] }).ToList();
            var found = tokens.Sample(messages, int.Parse(args[1]));
            Console.WriteLine(string.Join(" ", found.Item1));
            Console.WriteLine(string.Join(" ", found.Item2));
        }
    }
}
"""

SWIFT = """
import Foundation

let given = CommandLine.arguments
let tokenizer = tokenizer_open(given[1])!
let all = String(decoding: FileManager.default.contents(atPath: given[3])!, as: UTF8.self)
func split(_ text: String, _ at: Unicode.Scalar) -> [String] {
  let parts = text.unicodeScalars.split(separator: at, omittingEmptySubsequences: false)
  return parts.map { String(String.UnicodeScalarView($0)) }
}
for row in split(all, "\\u{1d}") {
  if !row.unicodeScalars.contains("\\u{1f}") {
    print(encode(tokenizer, row, special: true).map(String.init).joined(separator: " "))
    continue
  }
  let messages = split(row, "\\u{1e}").map { each in
    let parts = split(each, "\\u{1f}")
    return Message(role: parts[0], content: parts[1])
  }
  let found = sample(tokenizer, messages, length: Int(given[2])!)
  print(found.ids.map(String.init).joined(separator: " "))
  print(found.labels.map(String.init).joined(separator: " "))
}
"""


def code(language: str, more: str) -> str:
    (found,) = (each for each in blocks(GUIDE, language) if "assistant" in each)
    return found + more


def built(name: str, source: str, make: Callable[[Path, Path], None]) -> Path:
    """What is compiled of a source as it is now, in a folder of its own."""
    folder = BUILD / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if not (folder / ".ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        suffix = {"kotlin": "kt", "csharp": "cs"}.get(name, name)
        (folder / f"main.{suffix}").write_text(source)
        make(folder, folder / f"main.{suffix}")
        (folder / ".ready").touch()
    return folder


def needs(found: Path, *reasons: str | None) -> None:
    """Skip where something is missing."""
    missing = next(filter(None, reasons), None if found.exists() else f"{found} is missing")
    if missing:
        pytest.skip(f"{missing} (run: make tokenizers)")


def python() -> list[str]:
    folder = built("py", code("python", PYTHON).replace('\ntokenizer = Tokenizer.from_file("token'
                   'izer.json")\n', "\n"), lambda *_: None)  # fmt: skip
    return [sys.executable, str(folder / "main.py")]


def js() -> list[str]:
    needs(BUILD / "js" / ".ready", None if javascript.NODE else "there is no Node.js")
    (BUILD / "js" / "main.mjs").write_text(code("js", JS))
    return [str(javascript.NODE), str(BUILD / "js" / "main.mjs")]


def kotlin() -> list[str]:
    needs(BUILD / "jvm" / ".ready", kotlin_kit.unavailable())
    libraries = f"{BUILD / 'jvm'}/*:{kotlin_kit.BUILD / 'tools'}/kotlin-stdlib-2.1.21.jar"
    folder = built(
        "kotlin", code("kotlin", KOTLIN),
        lambda folder, source: ran(
            kotlin_kit.SOURCES / "kotlinc.sh", "-d", folder, "-cp", libraries, source
        ),
    )  # fmt: skip
    # The library is unpacked from the jar, and nothing is fetched.
    home = ("env", f"DJL_CACHE_DIR={BUILD / 'djl'}", "DJL_OFFLINE=true")
    return [*home, "java", "-cp", f"{folder}:{libraries}", "MainKt"]


def header(folder: Path) -> None:
    (text,) = re.findall(r"`tokenizer\.h`:\n\n```c\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (folder / "tokenizer.h").write_text(text)


def cpp() -> list[str]:
    needs(NATIVE / "libtokenizer.so")

    def make(folder: Path, source: Path) -> None:
        header(folder)
        ran("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", source, "-o",
             folder / "main", f"-L{NATIVE}", "-ltokenizer", f"-Wl,-rpath,{NATIVE}")  # fmt: skip

    return [str(built("cpp", code("cpp", CPP), make) / "main")]


def csharp() -> list[str]:
    mono = None if shutil.which("mcs") and shutil.which("mono") else "Mono is not installed"
    needs(NATIVE / "libtokenizer.so", mono)
    folder = built(
        "csharp", code("csharp", CSHARP),
        lambda folder, source: ran(
            "mcs", *csharp_kit.WARNINGS, "-r:System.Core.dll", f"-out:{folder / 'main.exe'}", source
        ),
    )  # fmt: skip
    return ["env", f"LD_LIBRARY_PATH={NATIVE}", "mono", str(folder / "main.exe")]


def swift() -> list[str]:
    needs(NATIVE / "libtokenizer.so", swift_kit.unavailable())

    def make(folder: Path, source: Path) -> None:
        header(folder)
        swift_kit.in_toolchain(
            "swiftc", "-O", "-import-objc-header", folder / "tokenizer.h", source,
            "-L", NATIVE, "-ltokenizer", "-o", folder / "main",
        )  # fmt: skip

    folder = built("swift", code("swift", SWIFT), make)
    loader, option, path, program = swift_kit.command(folder / "main")
    return [loader, option, f"{path}:{NATIVE}", program]


LANGUAGES = {f.__name__: f for f in (python, js, kotlin, cpp, csharp, swift)}


@functools.cache
def wanted(kind: str, folder: Path) -> tuple[Path, Path, list[list[int]]]:
    """A tokenizer, rows, and the numbers of each line that is printed of them."""
    ours = tokenizer(kind)
    file = saved(ours, folder / kind)
    some, found = texts(COUNT, seed=6), texts(5 * COUNT, seed=7)
    roles = ("system", *2 * ("user", "assistant"))
    chats = [list(zip(roles, found[i : i + 5], strict=True)) for i in range(0, len(found), 5)]
    rows = [MESSAGES.join(FIELDS.join(each) for each in chat) for chat in chats]
    (folder / kind / "rows").write_bytes(ROWS.join(some + rows).encode())
    lines = [ours.encode(text).ids for text in some]
    messages = [[{"role": r, "content": t} for r, t in chat] for chat in chats]
    path = folder / kind / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": each}) for each in messages))
    out = folder / kind / "data.npz"
    told = prepare(path, out, TextSpec(str(file), LENGTH, "chatml"))
    assert told.samples == COUNT
    assert 50 < told.shortened < COUNT
    with np.load(out) as data:
        for ids, labels, mask in zip(
            data["input_ids"], data["labels"], data["attention_mask"], strict=True
        ):
            lines += [ids[: mask.sum()].tolist(), labels[: mask.sum()].tolist()]
    return file, folder / kind / "rows", lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_tokens_and_labels_are_those_of_python(language, kind, folder):
    program = LANGUAGES[language]()
    file, rows, expected = wanted(kind, folder)
    command = [*program, str(file), str(LENGTH), str(rows)]
    done = ran(*command, timeout=600, env={**os.environ})
    found = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    assert len(found) == len(expected) == 3 * COUNT
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert not different, f"{len(different)} of {len(expected)} lines, first {different[0]}"
