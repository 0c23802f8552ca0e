"""The documentation tells the truth: its commands run, its links lead somewhere."""

import ast
import contextlib
import functools
import importlib.util
import os
import re
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from odtpack.cli.device import demo
from odtpack.losses import LOSSES
from odtpack_runtime.errors import OdtpackError, error_codes
from scripts.docs_site import generated
from scripts.generate_docs import PAGES
from tests import zoo
from tests.adapters import llama
from tests.adapters.written.models import HERE
from tests.command import Run
from tests.peer import client
from tests.programs import ran

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PYTHON = GUIDES.pop([page.stem for page in GUIDES].index("python"))
GUIDES = [*GUIDES, ROOT / "docs" / "minimal-build.md"]
GUIDES += [ROOT / "docs" / "losses.md", ROOT / "docs" / "onnxblock.md"]
GUIDES += [ROOT / "docs" / "reports.md", ROOT / "docs" / "simulation.md"]
KITS = {"cpp", "csharp", "javascript", "kotlin", "swift"}  # tests/kits run their code
KITS.add("text")  # tests/tokenizers
GUIDES = [page for page in GUIDES if page.stem not in KITS]
GUIDES.remove(ROOT / "docs" / "guides" / "sentence-encoder.md")  # tests/test_sentence_intents.py
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
MARKDOWN += sorted((ROOT / "docs").rglob("*.md"))
BUSY = "run it again when the machine has"
PAUSE_SECONDS = 10
BUDGETS = '[budgets]\npeak_memory = "200 MB"\npackage_size = "1 MB"\n'


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [body for name, body in fenced if name == language]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What ``odtpack demo`` leaves, in small."""
    onnx.save(zoo.cnn(size=8, width=(8, 16)), tmp_path / "factory.onnx")
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 1100)
    images = random.random((1100, 1, 8, 8), np.float32) + labels[:, None, None, None] / 10
    np.savez(tmp_path / "digits.npz", input=images.astype(np.float32), labels=labels)
    (tmp_path / "budgets.toml").write_text(BUDGETS)
    return tmp_path


def prepare_encoder(folder: Path) -> None:
    """A pretrained encoder without a head, in small."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        encoder (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask)
            => (float[batch, tokens, 4] hidden) <float[3, 4] embedding =
            {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}>
        { hidden = Gather(embedding, input_ids) }""")
    onnx.save(model, folder / "encoder.onnx")


def execute(command: list[str], folder: Path, tries: int = 5) -> None:
    environment = os.environ | {"COLUMNS": "100", "PYTHONWARNINGS": "default"}
    done = ran(*command, code=None, cwd=folder, env=environment)
    if tries > 1 and done.returncode == 2 and BUSY in done.stderr:
        time.sleep(PAUSE_SECONDS)  # as it says: other tests kept this machine busy
        execute(command, folder, tries - 1)
        return
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"


def odtpack(run: Run, command: str, folder: Path, tries: int = 5) -> None:
    """The same with a command of the command line, in this process: its start takes a second."""
    with contextlib.chdir(folder):
        done = run(*shlex.split(command))
    if tries > 1 and done.code == 2 and BUSY in " ".join(done.err.split()):
        time.sleep(PAUSE_SECONDS)
        odtpack(run, command, folder, tries - 1)
        return
    assert done.code == 0, f"odtpack {command}\n{done.out}\n{done.err}"


def prepare_artifacts(folder: Path) -> None:
    """What an app that used onnxruntime-training has: its artifacts, and a device's checkpoint."""
    reason = client.peer_available()
    if reason is not None:
        pytest.skip(reason)
    client.run_jobs([
        {"command": "generate", "model": folder / "factory.onnx", "folder": folder / "artifacts"},
        {"command": "train", "folder": folder / "artifacts", "inputs": folder / "digits.npz",
         "steps": 2, "batch": 32, "learning_rate": 0.001, "save": folder / "device.ckpt",
         "optimizer_state": True, "properties": {"device": "phone"}},
    ])  # fmt: skip


# The longest: a search, simulations, many builds. tests/cli has a test of every command.
LONG = {"ci", "federated", "language-models", "ml-engineer", "updates", "minimal-build"}
MARKS = {"from-onnxruntime-training": pytest.mark.peer} | dict.fromkeys(LONG, pytest.mark.sweep)


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(page, id=page.stem, marks=[MARKS[page.stem]] if page.stem in MARKS else [])
        for page in GUIDES
    ],
)
def test_the_commands_of_a_guide_run_in_order(guide, folder, run):
    if guide.stem in ("app-developer", "simulation"):
        build = "build factory.onnx --out package --loss cross_entropy --optimizer adamw"
        odtpack(run, build, folder)
    if guide.stem == "from-onnxruntime-training":
        prepare_artifacts(folder)
    if guide.stem == "federated":
        (folder / "fleet.toml").write_text(blocks(guide, "toml")[0])
    if guide.stem == "ml-engineer":
        prepare_encoder(folder)
    if guide.stem == "language-models":
        llama.exported(llama.llama(), folder / "model.onnx")
        ids, labels = llama.batch()
        np.savez(folder / "tokens.npz", input_ids=ids, labels=labels)
        shutil.copytree(HERE / "genai-qwen2-int4", folder / "genai")
    if guide.stem == "what-the-graph-loses":
        (folder / "module.py").write_text(blocks(guide, "python")[0])
        execute([sys.executable, "-W", "ignore", "module.py"], folder)
        with contextlib.chdir(folder):
            compare = "compare-gradients model.onnx --loss cross_entropy --torch module.py:build"
            shown = run(*compare.split()).out
        assert shown.split() == blocks(guide, "text")[0].split()
    commands = [
        line
        for block in blocks(guide, "")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("odtpack ")
    ]
    for command in commands:
        if "results/*" in command:  # a shell lists the results that were kept
            (folder / "results").mkdir(exist_ok=True)
            shutil.copy(folder / "report.json", folder / "results" / "first.json")
        odtpack(run, command.removeprefix("odtpack ").replace("results/*", "results/first"), folder)
    programs = [p for p in blocks(guide, "python") if "torch.onnx.export" not in p]
    elsewhere = ("odtpack.flower", "onnxruntime_genai")  # make federated, make exporters
    programs = [p for p in programs if not any(each in p for each in elsewhere)]
    for program in programs:
        of_reference = "from onnxruntime.training" in program
        reference = [str(client.ENVIRONMENT / "bin" / "python"), "-E", "-W", "ignore"]
        execute([*(reference if of_reference else [sys.executable]), "-c", program], folder)
    assert commands or programs


def test_the_python_guide_prints_what_it_shows(tmp_path):
    """Its blocks are one program, and what stands under each is what that prints."""
    shutil.copy(demo.MODEL, tmp_path / "factory.onnx")  # the demo trains it before
    demo.write_data(demo.read_digits(), tmp_path / "digits.npz")
    text = PYTHON.read_text()
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, re.M | re.S)
    assert len(pairs) == len(blocks(PYTHON, "python")) == len(blocks(PYTHON, "text"))
    (tmp_path / "guide.py").write_text("\n".join(program for program, _ in pairs))
    done = ran(sys.executable, "guide.py", cwd=tmp_path)
    assert done.stdout == "".join(output for _, output in pairs)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)  # code has no links
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_decisions_name_files_that_exist():
    for page in sorted((ROOT / "docs" / "adr").glob("*.md")):
        for name in re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|h|cpp|md))`", page.read_text()):
            found = [ROOT / name, ROOT / "packager" / name, ROOT / "packager" / "odtpack" / name]
            assert any(each.exists() for each in found), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_pages_are_fresh(page):
    assert page.read_text() == PAGES[page](), "run: python -m scripts.generate_docs"
    # A line that begins with a mark is HTML to Markdown, and its text would be shown as it stands.
    assert not re.search(r"^<!-- .*-->.", page.read_text(), re.M)


def test_readme_shows_the_commands_that_the_makefile_has():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_readme_options_exist(run):
    """Every option that the README names is one of that command."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    for command, rest in re.findall(r"^odtpack ((?:fleet )?\w+)(.*)$", text, re.M):
        help_text = run(*command.split(), "--help", code=0).out
        for option in re.findall(r"(?<!\S)--[\w-]+", rest):
            assert option in help_text, f"odtpack {command} {option}"


def test_every_loss_and_option_is_described():
    text = (ROOT / "docs" / "losses.md").read_text()
    rows = {row[0]: row[-1] for row in re.findall(r"^\| `(\w+)` \|(.*) \|(.*)\|$", text, re.M)}
    for name, loss in LOSSES.items():
        listed = {"reduction", *re.findall(r"`(\w+)`", rows[name])}
        assert listed == set(loss.option_names()), name


# The examples run, and do what they say.

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_federated_average_learns(tmp_path):
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "federated_average.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(tmp_path) < 1.0  # ln 8 = 2.08 before


# Every error has a code of the table, and every code of the table is raised.

ERRORS = {"OdtpackError", "UnknownNameError", "UnknownKeyError", "WrongTypeError", "unreadable"}
TABLE = "runtime/odtpack_runtime/error_codes.toml"
READ = ("missing", "unreadable", "too-large")
KINDS = ("budgets", "fleet", "measurements", "names", "profile", "recipe", "result", "trace")
# Raised with a code that is computed, by file.
COMPUTED = {
    "packager/odtpack/option.py": {
        *("bad-accumulation", "bad-adapter", "bad-batch-size", "bad-hyperparameter"),
        *("bad-memory-budget", "bad-version", "private-training"),
    },
    "packager/odtpack/artifacts.py": {
        *("bad-loss", "bad-optimizer", "bad-requires-grad", "bad-frozen-params"),
        *("bad-loss-input-names", "bad-additional-output-names"),
    },
    "packager/odtpack/fit/search_context.py": {
        *("bad-epochs", "bad-trials", "bad-finalists", "bad-threads")
    },
    "packager/odtpack/text.py": {"template-invalid", "tokenizer-invalid"},
    "runtime/odtpack_runtime/checkpoint/flatbuffer.py": {"checkpoint-corrupt"},
    "runtime/odtpack_simulator/values/part.py": {
        *("recipe-invalid", "budgets-invalid", "fleet-invalid")
    },
    "runtime/odtpack_runtime/package/adapter.py": {"adapter-corrupt", "peft-invalid"},
    "runtime/odtpack_runtime/errors.py": set(),  # the callers of unreadable() say which
    "runtime/odtpack_runtime/training/parameter_vector.py": {
        "loss-not-finite",
        "gradient-not-finite",
    },
    "runtime/odtpack_simulator/replay/job.py": {
        *("bad-batch-size", "bad-epochs", "bad-seed", "bad-pieces")
    },
    "runtime/odtpack_simulator/values/text.py": {
        *(f"{what}-{how}" for what in KINDS for how in READ),
        *(f"{what}-malformed" for what in ("budgets", "fleet", "profile", "recipe")),
    },
}
# Pass on the error of another process.
PASSED_ON = {
    "runtime/odtpack_runtime/apart/worker.py", "runtime/odtpack_simulator/replay/executor.py",
    "runtime/odtpack_simulator/replay/replay.py", "packager/odtpack/cli/_app.py",
    "packager/odtpack/cli/device/devices.py",
}  # fmt: skip


def raised() -> Iterator[tuple[str, int, str | None]]:
    """File, line and code of every place that makes an error; None for a computed code."""
    for path in [*ROOT.glob("packager/**/*.py"), *ROOT.glob("runtime/**/*.py")]:
        where, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        if not any(name in text for name in (*ERRORS, "_console")):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute):
                if node.func.attr != "error" or ast.unparse(node.func) != "_console.error":
                    continue
            elif not isinstance(node.func, ast.Name) or node.func.id not in ERRORS:
                continue
            codes = [*literals(node.args[0])] if node.args else [None]
            yield from ((where, node.lineno, code) for code in codes)


def literals(node: ast.expr) -> Iterator[str | None]:
    if isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    else:
        given = node.value if isinstance(node, ast.Constant) else None
        yield given if isinstance(given, str) else None


def test_every_code_is_in_the_table_and_is_raised():
    places = [*raised()]
    found = {code for _, _, code in places if code is not None}
    assert len(found) > 200
    assert {where for where, _, code in places if code is None} == set(COMPUTED) | PASSED_ON
    found |= set().union(*COMPUTED.values())
    assert found | kit_codes() == set(error_codes())


KIT_SOURCES = ("cpp/include/**/*.hpp", "cpp/src/*.cpp", "js/src/*.ts", "kotlin/src/main/**/*.kt",
               "swift/Sources/**/*.swift", "csharp/src/*.cs")  # fmt: skip
RAISED = (r"""\b(?:fail|refuse|Error|Odtpack(?:Error|Exception)|odtpack_error|attempt\([\w.]+,)"""
          r"""\s*[({]?\s*["']([a-z0-9-]+)["']""")  # fmt: skip


def kit_codes() -> set[str]:
    """Codes that the kits raise: first arguments of an error, and codes of the table elsewhere."""
    paths = [path for kind in KIT_SOURCES for path in (ROOT / "runtime").glob(kind)]
    text = "\n".join(path.read_text("utf-8") for path in paths)
    quoted = {each for each in re.findall(r"""["']([a-z0-9-]+)["']""", text) if "-" in each}
    return set(re.findall(RAISED, text)) | (quoted & set(error_codes()))


def test_the_table_says_which_codes_the_kits_raise():
    found = kit_codes()
    assert len(found) > 80
    assert found == {code for code, entry in error_codes().items() if entry.kits}


def test_entries_are_sentences_in_order():
    codes = error_codes()
    assert [*codes] == sorted(codes)
    for code, entry in codes.items():
        assert code == code.lower().replace("_", "-").replace(" ", "-")
        assert entry.means.endswith("."), code
        assert entry.hint is None or not entry.hint.removesuffix("...").endswith("."), code


def test_an_error_takes_the_hint_of_its_code():
    assert OdtpackError("onnx-missing", "onnx is not there").hint == "pip install onnx"
    assert OdtpackError("onnx-missing", "not there", hint="ask").hint == "ask"


def test_a_printed_error_says_how_to_read_more(run):
    said = run("build", "absent.onnx", "--loss", "mse", "--out", "package", code=2).err
    last = said.splitlines()[-1]
    assert last == "  see: odtpack explain model-not-found"
    explained = run(*last.removeprefix("  see: odtpack ").split(), code=0)
    assert "There is no model at the path." in explained.out


@functools.cache
def table() -> dict[str, Any]:
    return tomllib.loads((ROOT / TABLE).read_text("utf-8"))


@pytest.mark.parametrize("code", error_codes())
def test_every_code_has_a_page_and_an_explanation(code, run):
    """Both hold every field of the table."""
    entry = table()[code]
    fields = [entry["means"], entry.get("hint") or entry["fix"]]
    fields += [entry[key] for key in ("cause", "example") if key in entry]
    printed = run("explain", code, code=0).out
    page = generated()[f"errors/{code}.md"]
    assert f"[`{code}`](errors/{code}.md)" in generated()["errors.md"]
    for text in fields:
        for line in text.splitlines():
            assert line in printed
            assert line[1:] in page  # a sentence begins with a capital there
    assert ("kits" in printed) == entry.get("kits", False) or "kit" in entry["means"]
    given = run("explain", code, "--json", code=0).json()
    assert {key: given[key] for key in entry} == entry
    assert given["code"] == code


def test_an_unknown_code_names_the_nearest(run):
    assert "did you mean data-shape" in run("explain", "data-shapes", code=2).err
    found = run("explain", "error[data-shape]:", "--json", code=0).json()
    assert found["code"] == "data-shape"


def test_without_a_code_all_are_listed(run):
    codes = run("explain", "--json", code=0).json()["codes"]
    assert [entry["code"] for entry in codes] == [*error_codes()]
