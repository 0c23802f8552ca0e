"""The examples for builds of apps: the commands that they run are run, as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.cli.conftest import arrays, tree
from tests.programs import ran

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "app-builds"
ACTION = (EXAMPLES / "github-action" / "action.yml").read_text()
WORKFLOW = (EXAMPLES / "github-action" / "workflow.yml").read_text()
GRADLE = (EXAMPLES / "gradle" / "odtpack.gradle.kts").read_text()
PHASE = EXAMPLES / "xcode" / "build-phase.sh"
FASTFILE = (EXAMPLES / "fastlane" / "Fastfile").read_text()
NEEDED = {"manifest.json", "checkpoint", "training_model.onnx", "eval_model.onnx",
          "optimizer_model.onnx", "inference_template.onnx"}  # fmt: skip


@pytest.fixture
def project(folder: Path) -> Path:
    """An app's project with a recipe, and ``odtpack`` in its folder ``bin``."""
    (folder / "training").mkdir()
    for name in ("factory.onnx", "recipe.toml"):
        (folder / name).rename(folder / "training" / name)
    (folder / "bin").mkdir()
    command = folder / "bin" / "odtpack"
    program = f'PYTHONPATH="{ROOT}:$PYTHONPATH" exec "{sys.executable}" -m tests.calibrated "$@"'
    command.write_text(f"#!/bin/sh\n{program}\n")
    command.chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


def shell(
    project: Path, command: list[str], code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = f"{project / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": "100", **variables}
    return ran(*command, code=code, cwd=project, env=env)


def steps(text: str) -> list[dict[str, Any]]:
    """Steps of an action, or of a workflow's first job."""
    found = yaml.safe_load(text)
    own = found["runs"] if "runs" in found else next(iter(found["jobs"].values()))
    return [{"env": {}, "with": {}, **step} for step in own["steps"]]


@pytest.mark.parametrize("text", [ACTION, WORKFLOW], ids=["action", "workflow"])
class TestYaml:
    def test_is_laid_out_as_yaml(self, text):
        assert "\t" not in text
        assert text.count("${{") == text.count("}}")
        for line in text.splitlines():
            assert (len(line) - len(line.lstrip(" "))) % 2 == 0, line
            assert line == line.rstrip()

    def test_scripts_are_whole_and_take_values_from_the_environment_only(self, text):
        scripts = [step for step in steps(text) if "run" in step]
        assert scripts
        for step in scripts:
            script = str(step["run"])
            assert step["shell"] == "bash"
            assert "${{" not in script  # a value with a quote in it would be run as a command
            ran("bash", "-n", input=script)
            for name in re.findall(r"\$\{?([A-Z_]+)", script):
                assert name in step["env"] or name == "GITHUB_OUTPUT", name


def test_action_declares_what_it_uses():
    inputs = re.search(r"^inputs:\n(.*?)^outputs:\n(.*?)^runs:", ACTION, re.M | re.S)
    declared = set(re.findall(r"^  ([a-z-]+):", inputs[1], re.M))
    assert set(re.findall(r"inputs\.([a-z-]+)", ACTION)) == declared
    outputs = set(re.findall(r"^  ([a-z-]+):", inputs[2], re.M))
    assert outputs == {"cache-key", "built", "package"}
    used = next(step for step in steps(WORKFLOW) if "github-action@" in str(step.get("uses")))
    assert set(used["with"]) <= declared
    assert set(re.findall(r"steps\.package\.outputs\.([a-z-]+)", WORKFLOW)) <= outputs


def test_a_package_from_the_cache_is_judged_and_its_report_is_kept(project):
    """Budgets are not part of the package's key: judging must not hang on a new package."""
    found = steps(WORKFLOW)
    judging = next(step for step in found if "odtpack simulate" in str(step.get("run")))
    assert "if" not in judging
    assert "--recipe training/recipe.toml" in str(judging["run"])
    restored, kept, comment, baseline, saved = (
        next(step for step in found if part in str(step.get("uses") or step.get("run")))
        for part in ("cache/restore@", "upload-artifact@", "sticky-", "cp odtpack", "cache/save@")
    )
    order = [restored, judging, kept, comment, baseline, saved]
    assert [found.index(step) for step in order] == sorted(found.index(step) for step in order)
    assert str(kept["if"]).startswith("always()")
    assert str(comment["if"]).startswith("always()")
    assert [step["with"]["path"] for step in (restored, saved)] == ["odtpack-baseline"] * 2

    train(project, "1 GB")
    script = ["bash", "-e", "-c", str(judging["run"])]
    shell(project, script, PACKAGE="package")
    reports = {path.name for path in (project / "odtpack-report").iterdir()}
    assert reports == {"report.html", "report.json", "comment.md"}
    shell(project, ["bash", "-c", str(baseline["run"])])
    recipe = project / "training" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("1 GB", "1 MB"))
    second = shell(project, script, 1, PACKAGE="package")
    assert "::error file=training/recipe.toml,line=" in second.stdout


def train(project: Path, peak: str) -> None:
    """A package, data, and a recipe that names a device and a budget."""
    recipe = project / "training" / "recipe.toml"
    shell(project, ["odtpack", "build", "--recipe", str(recipe), "--out", "package"])
    limits = f'\n[target]\ndevices = ["pixel-8a"]\n[budgets]\npeak_memory = "{peak}"\n'
    recipe.write_text(recipe.read_text() + limits)
    np.savez(project / "training" / "sample.npz", **arrays())


def test_action_builds_then_takes_it_from_the_cache(project, tmp_path):
    values = {
        "inputs.recipe": "training/recipe.toml", "inputs.package": "build/odtpack/package",
        "inputs.android": "app/src/main/assets/odtpack", "inputs.ios": "",
    }  # fmt: skip

    def once() -> dict[str, str]:
        output = project / "github-output"
        output.unlink(missing_ok=True)
        for step in steps(ACTION):
            if "run" not in step or "-m pip" in str(step["run"]):
                continue
            variables = {
                name: values[re.fullmatch(r"\$\{\{ (.*) \}\}", value)[1]]
                for name, value in step["env"].items()
            }
            variables["GITHUB_OUTPUT"] = str(output)
            shell(project, ["bash", "-e", "-c", str(step["run"])], **variables)
        return dict(line.split("=", 1) for line in output.read_text().splitlines())

    first = once()
    assert first["built"] == "true"
    assert len(first["cache-key"]) == 64
    assert set(tree(project / "app" / "src" / "main" / "assets" / "odtpack")) == NEEDED
    # What the cache keeps, on another machine: the same bytes with other times.
    cached = [step["with"] for step in steps(ACTION) if "actions/cache" in str(step.get("uses"))]
    paths = cached[0]["path"].replace("${{ inputs.package }}", values["inputs.package"]).split()
    assert [Path(path).name for path in paths] == ["package", "package.stamp.json"]
    shutil.copytree(project / paths[0], tmp_path / "kept", copy_function=shutil.copyfile)
    shutil.rmtree(project / paths[0])
    shutil.copytree(tmp_path / "kept", project / paths[0], copy_function=shutil.copyfile)
    assert once() == {**first, "built": "false"}


def test_gradle_runs_these_commands(project):
    paths = {
        "odtpack": "odtpack",
        "recipe.asFile.path": "training/recipe.toml",
        "built.get().asFile.path": "app/build/odtpack/package",
        "assets.get().asFile.path": "app/build/odtpack/assets/odtpack",
    }
    commands = re.findall(r"^    commandLine\((.*?),?\s*\)\n", GRADLE, re.S | re.M)
    assert len(commands) == 2
    for _ in range(2):
        for command in commands:
            parts = [part.strip() for part in re.split(r",\s*", command.strip())]
            words = [part.strip('"') if part.startswith('"') else paths[part] for part in parts]
            done = shell(project, words)
    assert "unchanged" in done.stderr
    assert set(tree(project / paths["assets.get().asFile.path"])) == NEEDED
    assert shell(project, ["odtpack", "--version"]).stdout.startswith("odtpack ")
    assert re.findall(r"outputs\.dir\((\w+)\)", GRADLE) == ["built", "assets"]
    assert GRADLE.count("{") == GRADLE.count("}")
    assert GRADLE.count("(") == GRADLE.count(")")


def test_gradle_and_guide_name_what_must_not_be_compressed():
    from odtpack.update.release import NO_COMPRESS

    ends = ", ".join(f'"{end}"' for end in NO_COMPRESS)
    guide = ROOT / "docs" / "guides" / "app-builds.md"
    for text in (GRADLE, guide.read_text()):
        assert f"noCompress += listOf({ends})" in text


class TestXcode:
    def variables(self, project: Path) -> dict[str, str]:
        return {
            "SRCROOT": str(project),
            "DERIVED_FILE_DIR": str(project / "Derived Data" / "DerivedSources"),
            "TARGET_BUILD_DIR": str(project / "Build"),
            "UNLOCALIZED_RESOURCES_FOLDER_PATH": "My App.app",
            "ODTPACK_RECIPE": str(project / "training" / "recipe.toml"),
        }

    def test_script_is_valid_shell(self):
        for name in ("bash", "sh"):
            assert subprocess.run([name, "-n", PHASE], check=False).returncode == 0

    def test_fills_the_bundle(self, project):
        variables = self.variables(project)
        (project / "Build" / "My App.app").mkdir(parents=True)
        shell(project, ["sh", str(PHASE)], **variables)
        assert set(tree(project / "Build" / "My App.app" / "odtpack")) == NEEDED
        assert shell(project, ["sh", str(PHASE)], **variables).stderr.count("unchanged") == 2

    def test_fails_where_odtpack_is_missing_or_the_recipe_is_wrong(self, project):
        variables = {**self.variables(project), "ODTPACK_COMMAND": "no-such-odtpack"}
        done = shell(project, ["sh", str(PHASE)], 1, **variables)
        assert done.stderr.startswith("error: no-such-odtpack is not installed")
        recipe = project / "training" / "recipe.toml"
        recipe.write_text(recipe.read_text() + "colour = 1\n")
        done = shell(project, ["sh", str(PHASE)], 2, **self.variables(project))
        assert "loss.colour" in done.stderr
        assert not (project / "Build").exists()


@pytest.mark.parametrize("platform", ["android", "ios"])
def test_fastlane_runs_these_commands(project, platform):
    lane = re.search(rf"platform :{platform} do(.*?)^end", FASTFILE, re.M | re.S)
    call = re.search(r'build_training_package\(recipe, "(--\w+)", "([^"]+)"\)', lane[1])
    package = re.search(r'package = "([^"]+)"', FASTFILE)
    commands = re.findall(r"sh\((.*)\)", FASTFILE)
    assert len(commands) == 2
    for command in commands:
        words: list[str] = []
        for part in command.split(", "):
            names = {"recipe": ["training/recipe.toml"], "package": [package[1]],
                     "*destination": [call[1], call[2]]}  # fmt: skip
            words += [part.strip('"')] if part.startswith('"') else names[part]
        shell(project, words)
    assert set(tree(project / call[2])) == NEEDED
    words = [re.sub(r'"[^"]*"|#.*', "", line) for line in FASTFILE.splitlines()]
    opened = sum(bool(re.search(r"\bdo\b|^\s*def\b", line)) for line in words)
    assert opened == sum(line.strip() == "end" for line in words)
