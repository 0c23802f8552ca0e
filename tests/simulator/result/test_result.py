import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator import result as result_module
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.fleet.result import load_fleet_result
from odtpack_simulator.result import (
    DeviceLatency,
    MemoryBreakdown,
    PredictedMemory,
    SimulationResult,
    TrainingInfo,
    load_result,
)
from odtpack_simulator.values.units import Interval
from tests.refused import refused
from tests.simulator.factory import make_result


def test_round_trip(tmp_path):
    result = judge(make_result())
    path = tmp_path / "result.json"
    path.write_text(result.to_json(), "utf-8")
    loaded = load_result(path)
    assert loaded == result
    assert loaded.to_json() == result.to_json()
    content = json.loads(result.to_json())
    assert content["schema_version"] == 4
    assert list(content)[:3] == ["schema_version", "tool_version", "package"]


@given(st.lists(st.floats() | st.none(), max_size=20))
def test_losses_that_are_not_finite_become_null(losses):
    ends = {"eval_loss_before": math.inf, "eval_loss_after": math.nan}
    training = TrainingInfo(losses=losses, learning_rate=0.1, **ends)
    assert training.losses == [v if v is not None and math.isfinite(v) else None for v in losses]
    assert training.eval_loss_before is None
    assert training.eval_loss_after is None
    assert training.diverged == (None in training.losses)
    json.loads(training.model_dump_json())


def test_numpy_scalars_are_accepted_as_losses():
    losses = [np.float64(1.5), float(np.float32(0.5)), np.float64("nan")]
    ends = {"eval_loss_before": None, "eval_loss_after": None}
    training = TrainingInfo(losses=losses, learning_rate=0.1, **ends)
    assert training.losses == [1.5, 0.5, None]


def test_breakdown_must_sum_to_the_peak():
    parts = MemoryBreakdown(
        parameters=1, gradients=2, optimizer_state=3, inputs=4, activations=5, session=6
    )
    assert PredictedMemory(peak_bytes=21, breakdown=parts).peak_bytes == parts.total
    with pytest.raises(ValidationError, match="sums to 21"):
        PredictedMemory(peak_bytes=20, breakdown=parts)


def test_latency_needs_a_figure_or_a_reason():
    with pytest.raises(ValidationError, match="the reason"):
        DeviceLatency(step_ms=None, basis="none")
    with pytest.raises(ValidationError, match="needs first_step_ms"):
        DeviceLatency(step_ms=Interval.of(1, 2, 3), basis="none")


TWICE = [
    device.model_dump(mode="json")
    for name in ("google/pixel-8a", "raspberrypi/pi-5", "google/pixel-8a")
    for device in make_result([name]).devices
]


def mutated(**changes: object) -> str:
    content = json.loads(make_result(["google/pixel-8a"]).to_json())
    for key, value in changes.items():
        node = content
        *path, last = key.split("__")
        for part in path:
            node = node[int(part) if part.isdigit() else part]
        node[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(("text", "message"), [
    (mutated(extra=1), "extra: unknown key"),
    (mutated(host__cores=0), "host.cores"),
    (mutated(latency_host__steps_ms=[math.nan]), r"latency_host.steps_ms\[0\]"),
    (mutated(latency_host__steps_ms=[-1.0]), r"latency_host.steps_ms\[0\]"),
    (mutated(package__manifest_sha256="x"), "package.manifest_sha256"),
    (mutated(devices__0__verdict="fine"), r"devices\[0\].verdict"),
    (mutated(devices__0__os="palm"), r"devices\[0\].os"),
    (mutated(devices=TWICE), "devices: names 'google/pixel-8a' twice, as number 1 and 3"),
    (mutated(memory__predicted__peak_bytes=1), "memory.predicted"),
    (mutated(memory__measured_peak_bytes=2**70), "memory.measured_peak_bytes"),
    ("{", "is not JSON: EOF"),
    ("[" * 100_000, "is not JSON: recursion"),
    ('{"rounds": []}', "this is a result of odtpack fleet run"),
    ("null", "must be a table"),
    (make_result(["google/pixel-8a"]).to_json().replace('  "schema_version": 4,', ""),
     "schema_version: is missing"),
    ("", "is not JSON: EOF"),
])  # fmt: skip
def test_hostile_result_files(tmp_path, text, message):
    path = tmp_path / "result.json"
    path.write_text(text, "utf-8")
    with refused("result-invalid", message, where=path) as caught:
        load_result(path)
    assert "\n" not in caught.value.what


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_result_may_be_written_by_powershell(tmp_path, encoding):
    result = make_result(["google/pixel-8a"])
    (tmp_path / "result.json").write_text(result.to_json(), encoding)
    assert load_result(tmp_path / "result.json") == result


@pytest.mark.parametrize("values", [{"schema_version": 3}, {"schema_version": 5, "extra": 1}])
def test_results_of_other_versions(tmp_path, values):
    path = tmp_path / "result.json"
    path.write_text(mutated(**values), "utf-8")
    with refused("result-version", r"schema_version: [35] .*reads version 4", where=path):
        load_result(path)


@pytest.mark.parametrize("text", ['{"schema_version": 2}', mutated(schema_version="x")])
def test_what_is_not_a_result_has_no_version(tmp_path, text):
    path = tmp_path / "fit.json"
    path.write_text(text, "utf-8")
    with refused("result-invalid", where=path):
        load_result(path)


@pytest.mark.parametrize("key", ["data.sha256", "training.learning_rate", "memory.sharing"])
def test_a_result_that_is_not_whole_is_to_be_made_again(tmp_path, key):
    content = json.loads(make_result(["google/pixel-8a"]).to_json())
    part, _, name = key.partition(".")
    del content[part][name]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content), "utf-8")
    with refused(
        "result-invalid", f"wrong at {key}: is missing", hint="run odtpack simulate again"
    ):
        load_result(path)


def test_a_result_of_the_other_kind(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(make_result().to_json(), "utf-8")
    with refused("result-invalid", "this is a result of odtpack simulate") as caught:
        load_fleet_result(path)
    assert caught.value.hint == "use odtpack judge, compare or history"


def test_absent_and_oversized_files(tmp_path, monkeypatch):
    with pytest.raises(OdtpackError, match="does not exist"):
        load_result(tmp_path / "result.json")
    path = tmp_path / "result.json"
    path.write_text(make_result(["google/pixel-8a"]).to_json(), "utf-8")
    assert isinstance(load_result(path), SimulationResult)
    monkeypatch.setattr(result_module, "MAX_RESULT_BYTES", 1000)
    with pytest.raises(OdtpackError, match="larger than 1000 bytes"):
        load_result(path)
