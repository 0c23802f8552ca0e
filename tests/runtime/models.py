"""Small training packages, and their formulas in numpy float64; nothing is the packager's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime

from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'

# loss = mean((input * scale) @ W + b - target)^2; `mean` follows the mean of the inputs.
REGRESSION_FORWARD = """
    scaled = Mul(input, scale) product = MatMul(scaled, W) prediction = Add(product, b)
    difference = Sub(prediction, target) square = Mul(difference, difference)
    loss = ReduceMean<keepdims = 0>(square)
"""

REGRESSION_TRAINING = f"""{HEADER}
training (float[batch, 3] input, float[batch, 2] target,
          float[3, 2] W, float[3] scale, float[2] b, float[3] mean,
          float[3, 2] W_grad_buffer, float[2] b_grad_buffer, bool[1] lazy_reset_grad)
      => (float loss, float[3, 2] W_grad_out, float[2] b_grad_out, float[3] mean_update_out)
   <float two = {{2.0}}, float keep = {{0.9}}, float take = {{0.1}}>
{{{REGRESSION_FORWARD}
    size = Size(difference) count = Cast<to = 1>(size) factor = Div(two, count)
    d_prediction = Mul(difference, factor) scaled_t = Transpose<perm = [1, 0]>(scaled)
    W_grad = MatMul(scaled_t, d_prediction) axes = Constant<value_ints = [0]>()
    b_grad = ReduceSum<keepdims = 0>(d_prediction, axes) W_sum = Add(W_grad_buffer, W_grad)
    W_grad_out = Where(lazy_reset_grad, W_grad, W_sum) b_sum = Add(b_grad_buffer, b_grad)
    b_grad_out = Where(lazy_reset_grad, b_grad, b_sum)
    batch_mean = ReduceMean<axes = [0], keepdims = 0>(input) old = Mul(mean, keep)
    new = Mul(batch_mean, take) mean_update_out = Add(old, new)
}}"""

REGRESSION_EVAL = f"""{HEADER}
evaluation (float[batch, 3] input, float[batch, 2] target,
            float[3, 2] W, float[3] scale, float[2] b)
        => (float loss, float[batch, 2] prediction)
{{{REGRESSION_FORWARD}}}"""

# loss = mean of -log softmax(input @ W)[label] over three classes.
CLASSIFIER_TRAINING = f"""{HEADER}
training (float[batch, 4] input, int64[batch] labels, float[4, 3] W,
          float[4, 3] W_grad_buffer, bool[1] lazy_reset_grad)
      => (float loss, float[batch, 3] probabilities, float[4, 3] W_grad_out)
   <int64 depth = {{3}}, float[2] values = {{0.0, 1.0}}>
{{
    logits = MatMul(input, W) probabilities = Softmax<axis = 1>(logits)
    hot = OneHot(labels, depth, values) log_p = LogSoftmax<axis = 1>(logits)
    picked = Mul(hot, log_p) axes = Constant<value_ints = [1]>()
    per_sample = ReduceSum<keepdims = 0>(picked, axes) negative = Neg(per_sample)
    loss = ReduceMean<keepdims = 0>(negative) count_int = Size(labels)
    count = Cast<to = 1>(count_int) error = Sub(probabilities, hot) d_logits = Div(error, count)
    input_t = Transpose<perm = [1, 0]>(input) W_grad = MatMul(input_t, d_logits)
    W_sum = Add(W_grad_buffer, W_grad) W_grad_out = Where(lazy_reset_grad, W_grad, W_sum)
}}"""

ADAMW = f"""{HEADER}
optimizer (float[1] learning_rate, int64[1] step, float[n] params, float[n] gradients,
           float[n] first_order_moments, float[n] second_order_moments)
       => (float[n] params_out, float[n] first_order_moments_out, float[n] second_order_moments_out)
   <float beta1 = {{0.9}}, float rest1 = {{0.1}}, float log1 = {{-0.10536051565782628}},
    float beta2 = {{0.999}}, float rest2 = {{0.001}}, float log2 = {{-0.0010005003335835344}},
    float one = {{1.0}}, float epsilon = {{0.000001}}, float decay = {{0.01}}>
{{
    m_old = Mul(first_order_moments, beta1) m_new = Mul(gradients, rest1)
    first_order_moments_out = Add(m_old, m_new) v_old = Mul(second_order_moments, beta2)
    g_square = Mul(gradients, gradients) v_new = Mul(g_square, rest2)
    second_order_moments_out = Add(v_old, v_new) t = Cast<to = 1>(step) t1 = Mul(t, log1)
    power1 = Exp(t1) bias1 = Sub(one, power1) t2 = Mul(t, log2) power2 = Exp(t2)
    bias2 = Sub(one, power2) root2 = Sqrt(bias2) scaled_rate = Mul(learning_rate, root2)
    rate = Div(scaled_rate, bias1) root = Sqrt(second_order_moments_out)
    denominator = Add(root, epsilon) direction = Div(first_order_moments_out, denominator)
    change = Mul(direction, rate) moved = Sub(params, change) shrink_by = Mul(learning_rate, decay)
    keep = Sub(one, shrink_by) params_out = Mul(moved, keep)
}}"""

SGD = f"""{HEADER}
optimizer (float[1] learning_rate, int64[1] step, float[n] params, float[n] gradients)
       => (float[n] params_out)
{{
    change = Mul(gradients, learning_rate) params_out = Sub(params, change)
}}"""


def parse(text: str, metadata: dict[str, str] | None = None) -> onnx.ModelProto:
    """A model from its text, where `_buffer` and `_out` stand for the contract's dotted names."""
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model)
    renamed = {}
    for value in (*model.graph.input, *model.graph.output):
        name = value.name.replace("_grad_buffer", "_grad.accumulation.buffer")
        name = name.replace("_grad_out", "_grad.accumulation.out")
        name = name.replace("_update_out", ".update.out")
        for vector in ("params", "first_order_moments", "second_order_moments"):
            if value.name == f"{vector}_out":
                name = f"{vector}.out"
        renamed[value.name] = value.name = name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for key, text_value in (metadata or {}).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, text_value
    return model


def write(folder: Path, name: str, text: str, metadata: dict[str, str] | None = None) -> Path:
    path = folder / name
    path.write_bytes(parse(text, metadata).SerializeToString())
    return path


@dataclass(frozen=True)
class Files:
    """The files of a package."""

    folder: Path
    training: Path
    evaluation: Path | None
    adamw: Path
    sgd: Path
    checkpoint: Path

    def state(self) -> CheckpointState:
        return CheckpointState.load_checkpoint(self.checkpoint)

    def alone(self) -> Module:
        """The training model, without the evaluation model."""
        return Module(self.training, self.state())

    def module(self, state: CheckpointState | None = None, **options: Any) -> Module:
        return Module(self.training, state or self.state(), self.evaluation, **options)

    def changed(self, old: str = "", new: str = "", **metadata: str) -> Path:
        """The training model of the regression with another text, or with odtpack's metadata."""
        found = {f"odtpack.{key}": value for key, value in metadata.items()}
        return write(self.folder, "changed.onnx", REGRESSION_TRAINING.replace(old, new), found)

    def optimizer(self, text: str = SGD, **metadata: Any) -> Path:
        """An optimizer model, with values of odtpack's metadata that are no text as JSON."""
        found = {
            f"odtpack.{key}": value if isinstance(value, str) else json.dumps(value)
            for key, value in metadata.items()
        }
        return write(self.folder, "optimizer.onnx", text, found)


def to_ort(model: Path, path: Path) -> Path:
    """Convert a model to ONNX Runtime's own format."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return path


def feeds(seed: int | np.random.Generator, rows: int = 4) -> list[np.ndarray]:
    """Input and target of the regression."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((rows, width)).astype(np.float32) for width in (3, 2)]


def regression(folder: Path) -> Files:
    """A linear model with two trainable parameters, a frozen one and a running mean."""
    rng = np.random.default_rng(7)
    data = CheckpointData(
        trainable={"W": rng.standard_normal((3, 2)).astype(np.float32),
                   "b": rng.standard_normal(2).astype(np.float32)},
        frozen={"scale": np.array([1, -2, 0.5], np.float32), "mean": np.zeros(3, np.float32)},
    )  # fmt: skip
    write_checkpoint(folder / "checkpoint", data)
    return Files(
        folder, write(folder, "training_model.onnx", REGRESSION_TRAINING, {"odtpack.format": "1"}),
        write(folder, "eval_model.onnx", REGRESSION_EVAL, {"odtpack.format": "1"}),
        write(folder, "optimizer_model.onnx", ADAMW, {"odtpack.optimizer": "adamw"}),
        write(folder, "sgd_model.onnx", SGD, {"odtpack.optimizer": "sgd"}), folder / "checkpoint",
    )  # fmt: skip


def classifier(folder: Path, metadata: dict[str, str] | None = None) -> Files:
    """A linear classifier of three classes that also returns the probabilities."""
    rng = np.random.default_rng(8)
    data = CheckpointData({"W": rng.standard_normal((4, 3)).astype(np.float32)}, {})
    write_checkpoint(folder / "checkpoint", data)
    metadata = {"odtpack.class_count": "3"} if metadata is None else metadata
    return Files(
        folder, write(folder, "training_model.onnx", CLASSIFIER_TRAINING, metadata), None,
        write(folder, "optimizer_model.onnx", ADAMW), write(folder, "sgd_model.onnx", SGD),
        folder / "checkpoint",
    )  # fmt: skip


@dataclass
class Regression:
    """The regression in float64: what every number of the runtime is compared with."""

    W: np.ndarray
    b: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, state: CheckpointState) -> Regression:
        return cls(
            *(state.parameters[name].data.astype(np.float64) for name in ("W", "b", "scale"))
        )

    def forward(self, x: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Loss, and its gradients by W and b."""
        scaled = x.astype(np.float64) * self.scale
        difference = scaled @ self.W + self.b - target
        d = 2 * difference / difference.size
        return float((difference**2).mean()), scaled.T @ d, d.sum(axis=0)


class AdamW:
    """AdamW in float64, as the contract states it, with the hyperparameters of the model above."""

    def __init__(self) -> None:
        self.t = 0
        self.m: list[np.ndarray] = []
        self.v: list[np.ndarray] = []

    def step(self, params: list[np.ndarray], grads: list[np.ndarray], rate: float) -> None:
        if not self.m:
            self.m = [np.zeros_like(p) for p in params]
            self.v = [np.zeros_like(p) for p in params]
        self.t += 1
        for p, g, m, v in zip(params, grads, self.m, self.v, strict=True):
            m[...] = 0.9 * m + 0.1 * g
            v[...] = 0.999 * v + 0.001 * g * g
            scale = rate * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
            p[...] = p - scale * m / (np.sqrt(v) + 1e-6)
            p[...] = p - rate * 0.01 * p
