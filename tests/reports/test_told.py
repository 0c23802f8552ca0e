"""What a reader must be able to see in a report, whatever its format."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack.fit.outcome import FitResult
from odtpack.fit.page import render_fit
from odtpack_simulator.figures.compare import compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.figures.metric import Topic
from odtpack_simulator.figures.simulated import ALWAYS, METRICS
from odtpack_simulator.reports import render_report, report_format, report_formats
from odtpack_simulator.reports.comparison import render_comparison
from odtpack_simulator.reports.html_report import render_html
from odtpack_simulator.reports.markdown_report import render_markdown
from odtpack_simulator.reports.simulation import TOPICS, cells, key_figures
from odtpack_simulator.reports.simulation_page import parts_of_step
from odtpack_simulator.result.result import Origin, SimulationResult, TimelinePoint, find_origin
from odtpack_simulator.simulation import simulate
from odtpack_simulator.values.figure import Check
from odtpack_simulator.values.units import format_interval
from tests.reports.test_html_report import Page
from tests.simulator.factory import make_result

NAMES = ["samsung/galaxy-a12", "apple/iphone-16-pro", "raspberrypi/zero-2-w"]


def test_the_package_is_named_and_not_where_it_lies() -> None:
    result = make_result(NAMES)
    package = result.package.model_copy(update={"path": "/home/ada/secret/digits-cnn/"})
    origin = Origin(commit="0123456789abcdef", date="2026-11-22T08:30+00:00")
    result = judge(result.model_copy(update={"package": package, "origin": origin}))
    for text in (Page(render_html(result).decode()).text, render_markdown(result).decode()):
        assert "digits-cnn" in text
        assert "secret" not in text
        assert "commit 0123456789ab, 2026-11-22 08" in text.replace("\N{ZERO WIDTH SPACE}", "")
    windows = package.model_copy(update={"path": "C:\\build\\digits"})
    assert windows.name == "digits"


def test_the_commit_is_that_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GITHUB_SHA", "CI_COMMIT_SHA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert find_origin(tmp_path) == Origin(commit=None, date="1970-01-01T00:00+00:00")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert find_origin(tmp_path).commit == head.stdout.strip()
    monkeypatch.setenv("GITHUB_SHA", "ab" * 20)
    assert find_origin(tmp_path).commit == "ab" * 20


def test_the_figures_on_top_are_those_of_the_worst_device() -> None:
    result = make_result(NAMES)
    figures = {name: (figure, remark) for name, figure, remark in key_figures(result)}
    limits = {d.memory.limit_bytes: d for d in result.devices if d.memory.limit_bytes}
    least = limits[min(limits)]
    share, remark = figures["Peak memory, worst device"]
    assert float(share.rstrip(" %")) == pytest.approx(
        100 * result.memory.predicted.peak_bytes / min(limits), abs=0.05
    )
    assert least.title in remark
    timed = [d for d in result.devices if d.latency.step_ms]
    slowest = max(timed, key=lambda d: d.latency.step_ms.typical if d.latency.step_ms else 0)
    assert slowest.title in figures["Step, slowest device"][1]
    assert "this machine" in figures["Step, slowest device"][1]
    assert figures["Accuracy"][0] == "9.4 → 96.6 %"


def test_accuracy_is_a_percentage_everywhere() -> None:
    budgets = parse_budgets(b"[budgets]\naccuracy_floor = 0.99\n")
    result = judge(make_result(NAMES), budgets)
    for text in (Page(render_html(result).decode()).text, render_markdown(result).decode()):
        assert "96.6 %" in text
        assert "99 %" in text
        assert not re.search(r"0\.9659|0\.966\b|0\.99\b", text)


def test_the_interval_stands_beside_each_step() -> None:
    result = judge(make_result(NAMES))
    rendered = Page(render_html(result).decode()).text
    for device in result.devices:
        step = device.latency.step_ms
        if step is not None:
            assert format_interval(step, "ms") in rendered


def test_a_step_is_marked_where_its_parts_begin() -> None:
    def timeline(parts: str) -> list[TimelinePoint]:
        names = {"f": "forward", "b": "backward", "u": "update"}
        return [
            TimelinePoint.model_validate(
                {"index": i, "node": "n", "op_type": "Add", "live_bytes": 1, "part": names[part]}
            )
            for i, part in enumerate(parts)
        ]

    assert parts_of_step(timeline("fffbbbuu")) == [("forward", 0), ("backward", 3), ("update", 6)]
    # A node of the gradient that reads nothing may come first, and the loss itself last.
    assert parts_of_step(timeline("bffffbbbbfuu"))[1:] == [("backward", 5), ("update", 10)]
    assert parts_of_step(timeline("ff")) == [("forward", 0)]
    page = render_html(judge(make_result(NAMES))).decode()
    assert ">backward</text>" in page
    assert "backward from node 62" in page


def test_nodes_and_tensors_are_called_by_the_module_and_not_by_the_exporter(
    tmp_path: Path,
) -> None:
    """The older exporter of PyTorch transposes weights, and calls them by a number."""
    random = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(random.normal(size=(8, 8)).astype(np.float32), name)
        for name in ("onnx::MatMul_836", "onnx::MatMul_837")
    ]
    names = ["x", "/encoder/query/MatMul_output_0", "y"]
    nodes = [
        onnx.helper.make_node("MatMul", [a, weight.name], [b], name=f"/encoder/{layer}/MatMul")
        for a, weight, b, layer in zip(names, weights, names[1:], ("query", "key"), strict=False)
    ]
    shape = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 8])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 8])
    graph = onnx.helper.make_graph(nodes, "g", [shape], [output], weights)
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.ModelProto(
        ir_version=8, opset_import=[opset], graph=graph, producer_name="pytorch"
    )
    build_package(model, tmp_path / "package", loss="cross_entropy")
    data = {"x": random.normal(size=(40, 8)).astype(np.float32), "labels": np.arange(40) % 8}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **data)
    result = simulate(
        tmp_path / "package", tmp_path / "data.npz", [], batch_size=8, epochs=1, seed=0
    )
    shown = [point.node for point in result.memory.timeline]
    shown += [tensor.name for tensor in result.memory.tensors_at_peak]
    assert not [name for name in shown if "onnx::" in name]
    assert "encoder.query/MatMul" in shown
    assert "encoder.query.weight" in shown
    assert "gradient of encoder.key.weight" in shown


def test_a_comparison_is_drawn() -> None:
    base = make_result(NAMES)
    head = make_result(NAMES, scale=1.5)
    html = render_comparison(compare(base, head)).decode()
    page = Page(html)
    assert "Peak memory" in page.text
    assert "worse" in page.text
    bars = [a for tag, a in page.tags if tag == "rect" and a.get("class") == "bar over"]
    assert len(bars) >= len(NAMES)
    same = Page(render_comparison(compare(base, base)).decode())
    assert "No figure changed." in same.text


def test_a_search_is_drawn(tmp_path: Path) -> None:
    def solution(number: int, metric: float, peak: int) -> dict[str, object]:
        choice = {
            "batch_size": 32, "micro_batch": 8, "frozen": "nothing", "freeze": [],
            "trained_parameters": 9, "optimizer": "sgd", "learning_rate": 0.1,
            "frozen_dtype": "float32",
        }  # fmt: skip
        return {
            "number": number, "choice": choice, "metric": metric, "loss": 1.0,
            "peak_bytes": peak, "time_s": None, "energy_j": None, "package_bytes": 9,
            "predicted_peak_bytes": peak, "devices": [], "failed": [], "recipe": "model = 1",
        }  # fmt: skip

    result = FitResult.model_validate(
        {
            "tool_version": "0", "model": "<m>.onnx", "devices": ["a/b"], "epochs": 1, "seed": 0,
            "samples": 10, "held_out_samples": 2, "space": [], "candidates": 3, "looked_at": 3,
            "trained": 3, "not_judged": [], "left": [],
            "objectives": [{"name": "accuracy", "better": "larger", "tolerance": 0.0}],
            "pareto": [solution(7, 0.9, 10**6)], "beaten": [solution(8, 0.8, 2 * 10**6)],
            "over_budget": [],
        }
    )  # fmt: skip
    page = Page(render_fit(result).decode())
    (chart,) = [d["aria-label"] for d in page.drawings if "against" in d.get("aria-label", "")]
    assert chart == "Accuracy, % against peak memory, MB; 7: 90 at 1; 8: 80 at 2"
    assert "90.0 %" in page.text
    assert "<m>.onnx" in page.text
    assert "1 recipe keeps every budget on 1 device" in page.text


# Every metric that is judged is shown: none fails in silence.

CHECKS = {**ALWAYS, **METRICS}


def failing(metric: str, scope: str) -> SimulationResult:
    """A result in which the check of one metric fails, and there is no other."""
    check = Check(
        metric=metric, limit=1.0, actual=2.0, unit="1", level="error", status="fail",
        message="2 is over 1",
    )  # fmt: skip
    result = make_result(["google/pixel-8a"])
    if scope == "package":
        return result.model_copy(update={"checks": [check], "verdict": "fail"})
    device = result.devices[0].model_copy(update={"checks": [check], "verdict": "fail"})
    return result.model_copy(update={"devices": [device], "verdict": "fail"})


def scopes(metric: str) -> tuple[str, ...]:
    return (METRICS[metric].scope,) if metric in METRICS else ("package", "device")


@pytest.mark.parametrize(
    ("metric", "scope"), [(metric, scope) for metric in CHECKS for scope in scopes(metric)]
)
def test_a_failure_is_shown_in_every_format(metric: str, scope: str) -> None:
    result, title = failing(metric, scope), CHECKS[metric].title
    for name in report_formats():
        shown = render_report(result, name).decode()
        shown = unquote(shown) if name == "github" else shown  # workflow commands escape commas
        assert (metric if report_format(name).suffix == "json" else title) in shown, name
        assert "2 is over 1" in shown, name


@pytest.mark.parametrize("metric", CHECKS)
def test_it_is_shown_under_its_topic_and_no_other(metric: str) -> None:
    result, topic = failing(metric, "device"), CHECKS[metric].topic
    found = dict(zip(TOPICS, cells(result, result.devices[0]), strict=True))
    failed = [name for name, cell in found.items() if cell.state == "fail"]
    assert failed == ([topic] if topic in TOPICS else [])


def test_there_is_no_topic_without_a_metric_and_none_unknown() -> None:
    assert {check.topic for check in CHECKS.values()} == set(get_args(Topic))
    assert set(get_args(Topic)) - set(TOPICS) == {"Package", "Interruptions"}
    for topic in TOPICS:
        assert any(kind.headline for kind in CHECKS.values() if kind.topic == topic), topic
