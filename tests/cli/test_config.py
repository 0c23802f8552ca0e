"""``odtpack config`` and ``odtpack ort``, and ORT format in ``build`` and ``export``."""

import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack.ort.operator_config import read_config
from odtpack_runtime.package.package import Package
from tests.cli.conftest import Shared, assert_refused, tree
from tests.simulator.graphs import weighted


@pytest.fixture
def package(shared: Shared, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared.package, tmp_path / "p"))


class TestOrt:
    def test_writes_every_variant(self, run, package):
        platforms = "--platform", "arm", "--platform", "amd64"
        command = "ort", package, "--style", "both", *platforms, "--inference", "--json"
        files = run(*command, code=0).json()["files"]
        assert {f["path"] for f in files if f["of"] == "eval_model"} == {
            *("eval_model.arm.ort", "eval_model.arm.with_runtime_opt.ort"),
            *("eval_model.amd64.ort", "eval_model.amd64.with_runtime_opt.ort"),
            "eval_model.required_operators.config",
        }
        opened = Package.open(package)
        files = {file.path for file in opened.manifest.files.all()}
        assert set(tree(package)) == files | {"manifest.json"}
        assert opened.ort_model("inference_model", "fixed", "amd64").is_file()

    def test_inference_options_without_inference(self, run, package):
        outcome = run("ort", package, "--outputs", "output")
        assert_refused(outcome, "option-not-used", "--inference")

    def test_an_output_that_does_not_exist(self, run, package):
        before = tree(package)
        outcome = run("ort", package, "--inference", "--outputs", "nothing")
        assert_refused(outcome, "unknown-output", "nothing")
        assert tree(package) == before


class TestBuildAndExport:
    def test_build(self, run, shared, tmp_path):
        options = "--ort-format", "--ort-style", "runtime", "--ort-platform", "arm"
        run(*shared.build(tmp_path / "p", *options), code=0)
        path = Package.open(tmp_path / "p").ort_model("training_model", "runtime", "arm")
        assert path.name == "training_model.with_runtime_opt.ort"

    @pytest.mark.parametrize("option", [("--ort-style", "fixed"), ("--ort-platform", "arm")])
    def test_options_without_ort_format(self, run, shared, tmp_path, option):
        export = "export", shared.package, "--out", tmp_path / "m.onnx"
        for command in (shared.build(tmp_path / "p"), export):
            assert_refused(run(*command, *option), "option-not-used", "--ort-format")
        assert not list(tmp_path.iterdir())

    def test_export(self, run, shared, tmp_path):
        export = "export", shared.package, "--out", tmp_path / "m.onnx", "--ort-format"
        outcome = run(*export, "--ort-style", "both", "--json", code=0)
        names = ("m.ort", "m.with_runtime_opt.ort")
        assert outcome.json()["ort"] == [str(tmp_path / name) for name in names]
        x = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
        results = [
            onnxruntime.InferenceSession(str(tmp_path / name)).run(None, {"input": x})[0]
            for name in ("m.onnx", *names)
        ]
        for result in results[1:]:
            np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-6)


class TestConfig:
    def test_what_is_written_passes(self, run, package, tmp_path):
        assert run("ort", package).code == 0
        out = tmp_path / "c.config"
        config = "config", package, "--mode", "both", "--json"
        outcome = run(*config, "--types", "--out", out, code=0)
        names = {str(each) for each in read_config(out).operators}
        assert set(outcome.json()["operators"]) == names
        assert 0 < outcome.json()["kernels"]["kept"] < outcome.json()["kernels"]["of"]
        outcome = run(*config, "--check", out, code=0)
        content = outcome.json()
        assert content["passed"] is True
        assert [each["model"] for each in content["runs"]] == [
            *("training_model", "eval_model", "optimizer_model", "inference_model")
        ]
        assert "training_model.ort: " in outcome.err

    def test_a_difference_ends_with_code_1(self, run, package, tmp_path):
        out = tmp_path / "c.config"
        assert run("config", package, "--out", out, "--platform", "arm").code == 0
        out.write_text(out.read_text().replace("Flatten,", "") + "ai.onnx;13;Erf\n")
        check = "config", package, "--check", out, "--platform", "arm"
        assert "missing  ai.onnx;13;Flatten" in run(*check, code=1).out
        outcome = run(*check, "--json", code=1)
        assert outcome.json()["missing"] == ["ai.onnx;13;Flatten"]
        assert outcome.json()["unused"] == ["ai.onnx;13;Erf"]
        assert "missing  ai.onnx;13;Flatten" in outcome.err
        assert "unused  ai.onnx;13;Erf" in outcome.err

    def test_the_union_of_two(self, run, shared, package, tmp_path):
        options = "--optimizer", "sgd", "--ort-format"
        run(*shared.build(tmp_path / "sgd", *options, loss="mse"), code=0)
        assert run("ort", package).code == 0
        out = tmp_path / "c.config"
        assert run("config", package, tmp_path / "sgd", "--out", out).code == 0
        single = []
        for name in ("p", "sgd"):
            assert run("config", tmp_path / name, "--out", tmp_path / "one").code == 0
            single.append(read_config(tmp_path / "one").operators)
        assert single[0] != single[1]
        assert read_config(out).operators == single[0] | single[1]
        assert run("config", package, tmp_path / "sgd", "--check", out).code == 0

    def test_a_cast_of_bool_need_not_be_listed(self, run, tmp_path):
        """Every build's Cast takes bool, so a file without it is enough; other types are not."""
        text = """forward (float[N, 4] x) => (float[N, 4] y) {
          there = Cast<to = 9>(x) mask = Cast<to = 1>(there) y = Mul(mask, w)
        }"""
        onnx.save(weighted(text, {"w": np.ones(4, np.float32)}), tmp_path / "m.onnx")
        build = "build", tmp_path / "m.onnx", "--out", tmp_path / "p", "--loss", "mse"
        assert run(*build, "--ort-format").code == 0
        out = tmp_path / "c"
        assert run("config", tmp_path / "p", "--types", "--out", out).code == 0
        text = out.read_text()
        assert '"bool", ' in text
        out.write_text(text.replace('"bool", ', ""))
        run("config", tmp_path / "p", "--check", out, code=0)
        assert '"int64_t"]}, "outputs"' in text
        out.write_text(text.replace(', "int64_t"]}, "outputs"', ']}, "outputs"'))
        assert run("config", tmp_path / "p", "--check", out).code == 1

    def test_kernel_counts_follow_types(self, run, package, tmp_path):
        counts = []
        for limit in ((), ("--globally-allowed-types",), ("--types",)):
            outcome = run("config", package, "--out", tmp_path / "c", "--json", *limit)
            counts.append(outcome.json()["kernels"]["kept"])
            operators = len(outcome.json()["operators"])
        everything, of_all, of_each = counts
        assert operators <= of_each < of_all < everything

    def test_options_that_exclude_each_other(self, run, package, tmp_path):
        out, inside = tmp_path / "c", package / "eval_model.onnx"
        for options, code in (
            ((), "out-or-check"), (("--out", out, "--check", out), "out-or-check"),
            (("--out", out, "--types", "--globally-allowed-types"), "types-twice"),
            (("--check", out, "--types"), "option-not-used"),
            (("--out", out, "--data", out), "option-not-used"),
            (("--check", out), "config-not-found"), (("--out", inside), "cannot-write"),
        ):  # fmt: skip
            said = (str(out),) if code == "config-not-found" else ()
            assert_refused(run("config", package, *options), code, *said)

    def test_ort_format_that_is_not_there(self, run, package, tmp_path):
        outcome = run("config", package, "--format", "ort", "--out", tmp_path / "c")
        assert_refused(outcome, "no-ort-model", "training_model", "odtpack ort")
        assert run("ort", package, "--platform", "arm").code == 0
        outcome = run("config", package, "--platform", "amd64", "--out", tmp_path / "c")
        assert_refused(outcome, "no-ort-model", "for amd64")

    def test_data_that_do_not_fit(self, run, package, tmp_path):
        assert run("config", package, "--out", tmp_path / "c").code == 0
        np.savez(tmp_path / "d.npz", allow_pickle=False, other=np.ones(3))
        outcome = run("config", package, "--check", tmp_path / "c", "--data", tmp_path / "d.npz")
        assert_refused(outcome, "data-missing")


class TestModelsAreLoadedApart:
    """A model may compute for ever: the command's own process loads none."""

    @pytest.fixture
    def nothing_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = AssertionError("a model is loaded in the process of the command")
        monkeypatch.setattr(onnxruntime, "InferenceSession", mock.Mock(side_effect=wrong))

    @pytest.mark.usefixtures("nothing_here")
    @pytest.mark.parametrize(
        "options", [("e.onnx",), ("e.ort",), ("e.onnx", "--ort-format"),
                    ("e.onnx", "--outputs", "pool1/MaxPool")],
    )  # fmt: skip
    def test_export(self, options, run, package, tmp_path):
        name, *more = options
        run("export", package, "--out", tmp_path / name, *more, code=0)
        assert (tmp_path / name).stat().st_size > 100

    @pytest.mark.usefixtures("nothing_here")
    def test_check(self, run, package, tmp_path):
        assert run("config", package, "--out", tmp_path / "c.config").code == 0
        run("config", package, "--check", tmp_path / "c.config", code=0)

    def test_one_that_stands_still_ends(self, run, package, tmp_path, monkeypatch):
        from odtpack_runtime.apart import worker

        monkeypatch.setattr(worker.Limits, "of", lambda _: worker.Limits(seconds=1e-9))
        assert_refused(run("export", package, "--out", tmp_path / "e.ort"), "models-stall")
        assert not (tmp_path / "e.ort").exists()
