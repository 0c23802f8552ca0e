"""What cannot be built gets one clear error, exit code 2, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from odtpack_runtime.apart import worker
from tests.cli.conftest import Refused, Shared


class TestBuild:
    def command(self, shared: Shared, tmp_path: Path, *more: object) -> tuple[object, ...]:
        return "build", shared.model, "--out", tmp_path / "new", "--loss", "cross_entropy", *more

    @pytest.mark.parametrize(
        "content", [b"", b"not a model at all\n", b"\x89PNG\r\n\x1a\n" + bytes(64), b"\x08"]
    )
    def test_not_an_onnx_file(self, refused: Refused, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        arguments = "build", path, "--out", tmp_path / "new", "--loss", "mse"
        refused(arguments, "not-onnx", str(path), "help: pass the .onnx file")

    def test_damaged_name(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(shared.model.read_bytes().replace(b"relu1", b"rel\xff1"))
        arguments = "build", path, "--out", tmp_path / "new", "--loss", "mse"
        refused(arguments, "invalid-model", str(path), "rel\\xff1", "export or copy it again")

    def test_missing_file(self, refused: Refused, tmp_path: Path) -> None:
        arguments = "build", tmp_path / "no.onnx", "--out", tmp_path / "new", "--loss", "mse"
        refused(arguments, "model-not-found", "no.onnx")

    @pytest.mark.parametrize("option", ["--train", "--freeze"])
    def test_unknown_pattern(
        self, refused: Refused, shared: Shared, tmp_path: Path, option: str
    ) -> None:
        arguments = self.command(shared, tmp_path, option, "convolution1.*")
        words = f"{option} 'convolution1.*'", str(shared.model), "conv1.weight", "odtpack inspect"
        refused(arguments, "unknown-parameter", *words)

    def test_trained_and_frozen(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        arguments = self.command(shared, tmp_path, "--train", "fc.*", "--freeze", "*.bias")
        words = "'fc.bias'", "--train 'fc.*'", "--freeze '*.bias'", "narrow"
        refused(arguments, "trained-and-frozen", *words)

    def test_nothing_left_to_train(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        refused(self.command(shared, tmp_path, "--freeze", "*"), "nothing-to-train", "help:")

    def test_operator_without_gradient(self, refused: Refused, tmp_path: Path) -> None:
        refused(
            ("build", _model_with_wobble(tmp_path), "--out", tmp_path / "new", "--loss", "mse"),
            "no-gradient",
            "Wobble",
            "'the_wobble'",
            "acme",
            "help:",
        )

    def test_unknown_output(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        arguments = self.command(shared, tmp_path, "--output", "logits")
        refused(arguments, "unknown-value", "'logits'", "'output'")

    @pytest.mark.parametrize(
        ("loss", "option", "code", "word"),
        [
            ("mse", "delta=1", "unknown-loss-option", "reduction"),
            ("huber", "delta=0", "bad-loss-option", "above 0"),
            ("huber", "delta", "bad-loss-option", "key=value"),
            ("mse", "reduction=none", "loss-not-scalar", "'mean' or 'sum'"),
            ("none", "reduction=sum", "option-not-used", "'reduction'"),
        ],
    )
    def test_option_of_the_loss(
        self,
        refused: Refused,
        shared: Shared,
        tmp_path: Path,
        loss: str,
        option: str,
        code: str,
        word: str,
    ) -> None:
        arguments = "build", shared.model, "--out", tmp_path / "new", "--loss", loss
        refused((*arguments, "--loss-option", option), code, word, "help:")

    @pytest.mark.parametrize(
        ("optimizer", "option", "word"),
        [
            ("sgd", ("--beta1", "0.8"), "--beta1"),
            ("sgd", ("--epsilon", "0.1"), "--epsilon"),
            ("adamw", ("--momentum", "0.9"), "--momentum"),
            ("lion", ("--epsilon", "0.1"), "--epsilon"),
            ("adafactor", ("--beta2", "0.9"), "--beta2"),
            ("adam", ("--optimizer-option", "formula=pytorch"), "formula"),
        ],
    )
    def test_setting_of_another_optimizer(
        self,
        refused: Refused,
        shared: Shared,
        tmp_path: Path,
        optimizer: str,
        option: tuple[str, ...],
        word: str,
    ) -> None:
        more = "--optimizer", optimizer, *option
        refused(self.command(shared, tmp_path, *more), "option-not-used", word, optimizer)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("--beta1", "1"), ("--beta2", "-0.1"), ("--epsilon", "0"), ("--weight-decay", "nan")],
    )
    def test_setting_out_of_range(
        self, refused: Refused, shared: Shared, tmp_path: Path, option: str, value: str
    ) -> None:
        name = option.removeprefix("--").replace("-", "_")
        arguments = self.command(shared, tmp_path, option, value)
        refused(arguments, "bad-hyperparameter", name, "help:")

    @pytest.mark.parametrize(
        ("options", "code", "word"),
        [
            (("--optimizer-option", "formula"), "bad-option", "KEY=VALUE"),
            (("--optimizer-option", "formula=mine"), "bad-hyperparameter", "mine"),
            (("--optimizer-option", "bias_correction=2"), "bad-hyperparameter", "true or false"),
            (("--optimizer-option", "beta1=x"), "bad-hyperparameter", "a number"),
            (("--beta1", "0.8", "--optimizer-option", "beta1=0.7"), "bad-option", "second"),
            (
                ("--optimizer", "sgd", "--optimizer-option", "nesterov=true"),
                "bad-hyperparameter",
                "--momentum",
            ),
            (("--optimizer", "sgd", "--momentum", "1"), "bad-hyperparameter", "momentum"),
            (("--clip-norm", "0"), "bad-hyperparameter", "clip-norm"),
            (("--clip-value", "nan"), "bad-hyperparameter", "clip-value"),
            (("--clip-norm", "1", "--clip-value", "1"), "clipped-twice", "--clip-value"),
            (("--accumulate", "0"), "bad-accumulation", "--accumulate"),
            (("--group", "fc.*"), "bad-group", "GLOB:lr=X"),
            (("--group", "fc.*:rate=2"), "bad-group", "GLOB:lr=X"),
            (("--group", "fc.*:lr=1,lr=2"), "bad-group", "GLOB:lr=X"),
            (("--group", "fc.*:lr=-1"), "bad-group", "0 or more"),
            (("--group", "head.*:lr=2"), "unknown-parameter", "head.*"),
            (("--group", "*:lr=2", "--group", "fc.*:lr=3"), "unknown-parameter", "narrower"),
            (("--schedule", "sine"), "bad-schedule", "cosine"),
            (("--schedule", "cosine:warmup=a"), "bad-schedule", "warmup=a"),
            (("--schedule", "cosine:warmup=9,total=5"), "bad-schedule", "total_steps"),
            (("--schedule", "step:gamma=0.5"), "bad-schedule", "period"),
            (("--schedule", "multistep:milestones=5+3"), "bad-schedule", "rising"),
            (("--schedule", "constant:floor=1"), "bad-schedule", "floor"),
            (("--schedule", "constant:lr=-1"), "bad-schedule", "above 0"),
        ],
    )
    def test_updates_that_make_no_sense(
        self,
        refused: Refused,
        shared: Shared,
        tmp_path: Path,
        options: tuple[str, ...],
        code: str,
        word: str,
    ) -> None:
        refused(self.command(shared, tmp_path, *options), code, word)

    def test_folder_with_other_things(
        self, refused: Refused, shared: Shared, tmp_path: Path
    ) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        arguments = "build", shared.model, "--out", tmp_path, "--loss", "mse"
        refused(arguments, "folder-not-empty", str(tmp_path), "--out")

    def test_folder_that_is_a_file(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        (tmp_path / "new").write_text("")
        refused(self.command(shared, tmp_path), "package-not-written", "is a file")

    def test_folder_below_a_file(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        arguments = "build", shared.model, "--out", tmp_path / "file" / "new", "--loss", "mse"
        refused(arguments, "package-not-written", "file")

    def test_conversion_that_fails_leaves_nothing(
        self, refused: Refused, shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = worker.call

        def without_model(function: str, /, *args: Any, **kwargs: Any) -> Any:
            """Let ONNX Runtime convert something that is no model."""
            if function == "odtpack.ort.format:save_optimized":
                kwargs["model"] = str(shared.data)
            return call(function, *args, **kwargs)

        monkeypatch.setattr(worker, "call", without_model)
        arguments = self.command(shared, tmp_path, "--ort-format")
        refused(arguments, "ort-conversion-failed", "data.npz")


def _model_with_wobble(folder: Path) -> Path:
    nodes = [
        helper.make_node("MatMul", ["input", "w"], ["h"]),
        helper.make_node("Wobble", ["h"], ["output"], name="the_wobble", domain="acme"),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.eye(4, dtype=np.float32))
    graph = helper.make_graph(
        nodes,
        "wobbly",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]
    model = onnx.ModelProto(graph=graph, opset_import=opsets, ir_version=8)
    onnx.save(model, folder / "wobbly.onnx")
    return folder / "wobbly.onnx"
