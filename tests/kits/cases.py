"""What the conformance suite trains: a network, how its package is built, and a run."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from odtpack.choices import OrtFormat
from odtpack.optimizers import SGD, Adafactor, Adam, AdamW, GroupRule, Lion
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.training.schedules import ScheduleSpec
from tests.kits import models
from tests.model_text import retyped

Batch = list[Array]


def _images(random: np.random.Generator, samples: int) -> Batch:
    labels = random.integers(0, 10, samples)
    images = random.random((samples, 1, 8, 8)) * 0.5
    images[np.arange(samples), 0, labels % 8, labels // 2] += 1.5
    return [images.astype(np.float32), labels]


def _vectors(random: np.random.Generator, samples: int) -> Batch:
    labels = random.integers(0, 4, samples)
    vectors = random.standard_normal((samples, 16)) + np.eye(16)[labels * 3] * 2
    return [vectors.astype(np.float32), labels]


def _pictures(random: np.random.Generator, samples: int) -> Batch:
    pictures = random.standard_normal((samples, 3, 32, 32)).astype(np.float32)
    return [pictures, random.integers(0, 4, samples)]


def _words(random: np.random.Generator, samples: int) -> Batch:
    words = random.integers(0, 50, (samples, 12))
    return [words, words[:, 0] % 4]


def _letters(random: np.random.Generator, samples: int) -> Batch:
    letters = random.integers(0, 20, (samples, 7))
    return [letters, letters[:, -1] % 5]


def _ratings(random: np.random.Generator, samples: int) -> Batch:
    user, item = random.integers(0, 30, samples), random.integers(0, 40, samples)
    return [user, item, ((user + item) % 2).astype(np.float32)[:, None]]


def _pixels(random: np.random.Generator, samples: int) -> Batch:
    pixels = random.standard_normal((samples, 3, 4, 4)).astype(np.float32)
    return [pixels, random.integers(0, 4, (samples, 4, 4))]


def _sentences(random: np.random.Generator, samples: int) -> Batch:
    words = random.integers(0, 5, (samples, 5))
    return [words, words]


def _roots(random: np.random.Generator, samples: int) -> Batch:
    nan = np.nan  # no label names it: the loss is finite
    rows = np.array([[-0.0, 0, -0.0], [0, nan, 2], [nan, 1, nan], [1, 2, 2]], np.float32)
    return [rows, np.array([0, 2, 1, 1])]


def _as(dtype: type[np.generic]) -> Callable[[np.random.Generator, int], Batch]:
    def make(random: np.random.Generator, samples: int) -> Batch:
        vectors, labels = _vectors(random, samples)
        return [vectors.astype(dtype), labels]

    return make


def _ignored(random: np.random.Generator, samples: int) -> Batch:
    vectors, labels = _vectors(random, samples)
    labels[::3] = -100
    return [vectors, labels]


@dataclass(frozen=True)
class Case:
    """A run of a package."""

    model: Callable[[], onnx.ModelProto]
    data: Callable[[np.random.Generator, int], Batch]
    build: Mapping[str, Any] = field(default_factory=dict)  # options of build_package
    learning_rate: float | None = 0.01  # None leaves the default
    schedule: tuple[str, Mapping[str, Any], float] | None = None  # kind, settings, initial rate
    steps: int = 6
    update_every: int = 1  # steps after which the optimizer makes one
    samples: tuple[int, ...] = (8,)  # of the batch of each step, in turn
    properties: Mapping[str, int | float | str] = field(default_factory=dict)
    through: Mapping[str, str] = field(default_factory=dict)  # files in the place of the package's
    spoilt: tuple[int, ...] = ()  # numbers of the steps, from 1, whose batch holds a NaN
    tolerance: float = 2e-6  # part of a loss that other platforms may differ by


def _mlp(optimizer: Any = None, update: Any = None, **run: Any) -> Case:
    build: dict[str, Any] = {"outputs": ["output"]}
    if optimizer is not None:
        build["optimizer"] = optimizer
    build |= {**(update or {}), **run.pop("build", {})}
    return Case(models.mlp, _vectors, build, **run)


def _step(case: Case) -> Case:
    return dataclasses.replace(case, build={**case.build, "step_model": "always"})


def _frozen(storage: str) -> Case:
    build = {"train": ["fc.*"], "frozen_storage": storage, "outputs": ["output"]}
    return Case(models.cnn, _images, build, 0.003)


_GROUPS = (GroupRule("*bias", 2.0, 0.0), GroupRule("fc2.*", 0.1))
_ORT = ("training_model", "eval_model", "optimizer_model")

CASES: dict[str, Case] = {
    "cnn": Case(models.cnn, _images, {"outputs": ["output"]}, 0.003, samples=(8, 8, 5),
                properties={"epoch": 3, "best": 0.5, "note": "grün"}),
    "mobilenet_batch_norm": Case(models.mobilenet, _pictures, {"optimizer": SGD()}, 0.001,
                                 steps=3, tolerance=0.1),
    "transformer": Case(models.transformer, _words, {}, 0.003, tolerance=1e-5),
    "recommender": Case(models.recommender, _ratings, {"loss": "bce_with_logits"}),
    "gru": Case(models.gru, _letters),
    "sgd": _mlp(SGD(), learning_rate=0.1),
    "sgd_momentum": _mlp(SGD(momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adam": _mlp(Adam(weight_decay=0.01)),
    "adamw_pytorch": _mlp(AdamW(formula="pytorch", epsilon=1e-8, weight_decay=0.1)),
    "adafactor": Case(models.cnn, _images, {"optimizer": Adafactor(weight_decay=0.01)}),
    "lion": _mlp(Lion(), learning_rate=0.001),
    "default_learning_rate": _mlp(learning_rate=None, steps=2),
    "groups": _mlp(AdamW(weight_decay=0.1), {"groups": _GROUPS}),
    "clip_norm": _mlp(update={"clip_norm": 0.1}),
    "clip_norm_groups": _mlp(SGD(weight_decay=0.1), {"clip_norm": 0.5, "groups": _GROUPS}),
    "clip_value": _mlp(update={"clip_value": 0.01}),
    "schedule_linear": _mlp(schedule=("linear", {"warmup_steps": 2, "total_steps": 6}, 0.01)),
    "schedule_cosine": _mlp(
        update={"schedule": ScheduleSpec("cosine", {"floor": 0.1}, 0.02)},
        schedule=("cosine", {"warmup_steps": 1, "total_steps": 5, "floor": 0.1}, 0.02),
    ),
    "schedule_step": _mlp(schedule=("step", {"period": 2, "gamma": 0.5}, 0.01)),
    "schedule_multistep": _mlp(
        schedule=("multistep", {"milestones": (2, 4), "gamma": 0.1}, 0.01)
    ),
    "schedule_constant": _mlp(schedule=("constant", {"warmup_steps": 3}, 0.01)),
    "accumulation": _mlp(update_every=3, build={"accumulation_steps": 3}),
    "ignored_labels": Case(models.mlp, _ignored,
                           {"loss_options": {"ignore_index": -100}, "outputs": ["output"]}),
    "frozen_float16": _frozen("float16"),
    "frozen_int8": _frozen("int8"),
    "float16_model": Case(lambda: retyped(models.mlp(), np.float16), _as(np.float16),
                          tolerance=2e-3),
    "float64_model": Case(lambda: retyped(models.mlp(), np.float64), _as(np.float64)),
    "ort_format": Case(models.cnn, _images, {"ort_format": OrtFormat(), "outputs": ["output"]},
                       0.003, through={key: f"{key}.ort" for key in _ORT}),
    "step_adamw": _step(Case(models.wide, _vectors, {"outputs": ["output"]}, 0.001,
                             samples=(8, 8, 5))),
    "step_sgd": _step(_mlp(SGD(), learning_rate=0.1)),
    "step_sgd_momentum": _step(Case(models.cnn, _images, {"optimizer": SGD(momentum=0.9)})),
    "step_lion": _step(_mlp(Lion(), learning_rate=0.001)),
    "step_groups": _step(_mlp(AdamW(weight_decay=0.1), {"groups": _GROUPS})),
    "step_batch_norm": _step(Case(models.mobilenet, _pictures, {"optimizer": SGD()}, 0.001,
                                  steps=3, tolerance=0.1)),
    "step_frozen_int8": _step(_frozen("int8")),
    "native_adamw": _step(_mlp(build={"native": True})),
    "native_sgd": _step(_mlp(SGD(), learning_rate=0.1, build={"native": True})),
    # Scores that are equal, classes in the middle, as many words as positions, and NaN.
    "accuracy_ties": Case(models.undecided, _as(np.float16), steps=0),
    "accuracy_pixels": Case(models.segmented, _pixels, {"loss_inputs": ("output", "marks")}),
    "accuracy_words": Case(models.speaker, _sentences,
                           {"loss": "next_token", "outputs": ["output"]}),
    "accuracy_nan": Case(models.scores, _roots, {"loss": "nll"}, steps=0),
    "step_schedule": _step(_mlp(schedule=("cosine", {"warmup_steps": 1, "total_steps": 5}, 0.02))),
}  # fmt: skip
"""Every run of the suite by its name."""

NOT_FINITE: dict[str, Case] = {
    "nan_batch": dataclasses.replace(CASES["schedule_linear"], spoilt=(2, 5)),
    "nan_accumulation": _mlp(update_every=4, build={"accumulation_steps": 4}, steps=12,
                             spoilt=(2, 5, 6, 7, 8)),
    "nan_batch_norm": dataclasses.replace(CASES["mobilenet_batch_norm"], spoilt=(2,)),
    "nan_step_model": dataclasses.replace(CASES["step_schedule"], spoilt=(1, 4)),
    "nan_step_batch_norm": dataclasses.replace(CASES["step_batch_norm"], spoilt=(2,)),
}  # fmt: skip
"""Runs with batches that change nothing, by name."""
