"""Packages, data and fleets for tests of federations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from odtpack.build import build_package
from odtpack.optimizers import OPTIMIZERS
from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import FleetFile, make_fleet, parse_fleet
from odtpack_simulator.fleet.population import FleetData, split_data
from odtpack_simulator.fleet.result import FleetResult
from tests.model_text import parsed
from tests.zoo.cnn import cnn

NS = 10**9

IDEAL = """
seed = 3
[population]
clients = 6
[population.data]
samples = [20, 40]
dirichlet = 0.5
[training]
batch_size = 16
epochs = 2
learning_rate = 0.1
[federation]
clients = 6
minimum = 6
rounds = 3
"""


UNJUDGED = IDEAL + "[budgets]\nlearns = false\n"
"""The same for tests of something else: in three rounds so few clients learn next to nothing."""


def write_digits(
    folder: Path, *, optimizer: str = "sgd", width: tuple[int, int] = (4, 8), **options: Any
) -> Path:
    """The digits, ``digits.npz``, and a small package for them, ``package``."""
    from sklearn.datasets import load_digits  # takes a second: not while tests are collected

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    np.savez(folder / "digits.npz", input=images, labels=digits.target.astype(np.int64))
    onnx.save(cnn(size=8, width=width), folder / "model.onnx")
    build_package(
        folder / "model.onnx", folder / "package", loss="cross_entropy",
        optimizer=OPTIMIZERS[optimizer](), **options,
    )  # fmt: skip
    return folder


def write_normalized(folder: Path) -> Path:
    """The flat digits, ``digits.npz``, and ``package`` of a network with running statistics."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.data.astype(np.float32) / 16
    np.savez(folder / "digits.npz", input=images, labels=digits.target.astype(np.int64))
    ones, zeros = np.ones(64, np.float32), np.zeros(64, np.float32)
    values = {"norm_weight": ones, "norm_bias": zeros, "fc_bias": zeros[:10],
              "norm_running_mean": zeros, "norm_running_var": ones,
              "fc_weight": np.random.default_rng(1).standard_normal((64, 10)).astype("f4") / 8,
              }  # fmt: skip
    model = parsed("""(float[N, 64] input) => (float[N, 10] output) {
            x, mean, variance = BatchNormalization <training_mode = 1> (
                input, norm_weight, norm_bias, norm_running_mean, norm_running_var)
            output = Gemm (x, fc_weight, fc_bias)
        }
    """, **values)  # fmt: skip
    sgd = OPTIMIZERS["sgd"]()
    build_package(model, folder / "package", loss="cross_entropy", optimizer=sgd)
    return folder


def write_states(folder: Path) -> Path:
    """Random data, ``data.npz``, and ``package`` of a network with states of all three kinds."""
    random = np.random.default_rng(1)
    inputs = random.standard_normal((400, 12)).astype(np.float32)
    np.savez(folder / "data.npz", input=inputs, labels=inputs[:, :5].argmax(1))
    ones, zeros = np.ones(12, np.float32), np.zeros(12, np.float32)
    values = {"norm_weight": ones, "norm_bias": zeros, "running_mean": zeros, "running_var": ones,
              "fc_weight": random.standard_normal((12, 5)).astype("f4") / 4,
              "fc_bias": zeros[:5]}  # fmt: skip
    model = parsed("""
        stream (float[N, 12] input, float[1, 12] heard) => (float[N, 5] output, float[1, 12] new) {
            axes = Constant <value = int64[1] {0}> ()
            sum = ReduceSum (input, axes)
            share = Constant <value = float {0.01}> ()
            some = Mul (heard, share)
            new = Add (some, sum)
            x = Add (input, some)
            y, mean, variance = BatchNormalization <training_mode = 1> (
                x, norm_weight, norm_bias, running_mean, running_var)
            output = Gemm (y, fc_weight, fc_bias)
        }
    """, **values)  # fmt: skip
    build_package(
        model, folder / "package", loss="cross_entropy", optimizer=OPTIMIZERS["adamw"](),
        inputs={"heard": "carry:new"}, precision="mixed",
    )  # fmt: skip
    return folder


def on_digits(folder: Path, fleet: FleetFile, devices: Sequence[FleetDevice] = ()) -> Federation:
    return Federation(folder / "package", folder / "digits.npz", fleet, devices)


def played(folder: Path, fleet: FleetFile, devices: Sequence[FleetDevice] = ()) -> FleetResult:
    return on_digits(folder, fleet, devices).simulate()[0]


def command(folder: Path, verb: str, *more: object) -> list[str]:
    """``odtpack fleet run`` or ``fit`` on the digits, in this process."""
    given = ("--data", folder / "digits.npz", "--jobs", 1, *more)
    return ["fleet", verb, str(folder / "package"), *map(str, given)]


def ideal(*changes: tuple[str, object]) -> FleetFile:
    """:data:`IDEAL` with other words, each in all places."""
    text = IDEAL
    for old, new in changes:
        assert old in text
        text = text.replace(old, str(new))
    return parse_fleet(text.encode())


def assert_same_bits(arrays: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    assert arrays.keys() == other.keys()
    for name, array in arrays.items():
        assert array.tobytes() == other[name].tobytes(), name


def toy_data(samples: int = 50, classes: int = 4) -> FleetData:
    """Data of which only the labels matter."""
    labels = np.arange(samples, dtype=np.int64) % classes
    return split_data({"input": np.zeros((samples, 1), np.float32), "labels": labels}, 0)


def device(name: str = "acme/one", **changes: Any) -> FleetDevice:
    """A phone: a step takes 10 ms, a session 100 ms before it and 20 ms after it, at 2 W."""
    usual: dict[str, Any] = {
        "name": name, "title": name, "peak_bytes": 50_000_000, "limit_bytes": 100_000_000,
        "creation": NS // 20, "load": NS // 20, "first_step": NS // 50, "step": NS // 100,
        "save": NS // 50, "watts": 2.0,
    }  # fmt: skip
    return FleetDevice(**usual | changes)


def fleet_of(**tables: Any) -> FleetFile:
    """A fleet file by its tables; two models of device and ten clients a round by default."""
    content: dict[str, Any] = {
        "population": {
            "clients": 200,
            "device": [{"profile": "acme/one"}, {"profile": "acme/two"}],
            "data": {"samples": [10, 60]},
        },
        "federation": {"clients": 10, "rounds": 3},
        "training": {"batch_size": 8},
    }
    if "buffer" not in tables.get("federation", {}):
        content["federation"]["every"] = "1 h"
    for name, table in tables.items():
        if isinstance(table, dict):
            content[name] = content.get(name, {}) | table
        else:
            content[name] = table
    return make_fleet(content)
