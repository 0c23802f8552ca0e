"""Figures of simulated candidates, what they are compared by, and what is nearest to a limit."""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase

import onnx
import onnx_ir as ir
import pytest

from odtpack.fit.finalists import costs, objectives, reasons, solution
from odtpack.fit.outcome import FitResult, Solution, ranked
from odtpack.fit.space import MOST_FREEZES, Candidate, Freeze, freezes, layers
from odtpack.model.loading import load_model
from odtpack.package.candidates import candidates, resolve
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result import DeviceCampaign, NotJudged, SimulationResult
from odtpack_simulator.values.units import Interval
from tests import zoo
from tests.fit.made import made_fit
from tests.simulator.factory import make_result
from tests.simulator.graphs import weighted

NAMES = ["google/pixel-8a", "raspberrypi/pi-5"]
CANDIDATE = Candidate(7, 32, 8, Freeze("nothing", (), ("w",), 10, False), "sgd", (), 0.1, None)


def made(budgets: str = "", *, times: tuple[float, ...] = (3.0, 5.0)) -> SimulationResult:
    result = make_result(NAMES)
    devices = []
    for device, time in zip(result.devices, times, strict=True):
        campaign = DeviceCampaign(
            active_s=Interval(low=time / 2, typical=time, high=2 * time),
            not_judged=[NotJudged(figure="energy_j", reason="no power")],
        )
        devices.append(device.model_copy(update={"campaign": campaign}))
    return judge(result.model_copy(update={"devices": devices}), parse_budgets(budgets.encode()))


def point(number: int, metric: float, peak: int, time: float | None) -> Solution:
    changes = {"number": number, "metric": metric, "peak_bytes": peak, "time_s": time}
    return solution(CANDIDATE, made()).model_copy(update=changes)


def test_the_worst_device_counts():
    found = solution(CANDIDATE, made())
    assert (found.number, found.choice.micro_batch, found.choice.frozen_dtype) == (7, 8, "float32")
    assert found.time_s == 5.0
    assert found.energy_j is None
    assert found.peak_bytes == max(device.peak_bytes for device in found.devices)
    assert found.miss is None
    unknown = [f"{device.title}: no power" for device in made().devices]
    assert reasons([made()]) == [NotJudged(figure="energy_j", reason=each) for each in unknown]


@pytest.mark.parametrize(("budgets", "share"), [
    ('[budgets]\npeak_memory = "90 MB"\n', lambda s: s.peak_bytes / 90e6 - 1),
    ("[budgets]\naccuracy_floor = 1\n", lambda s: 1 - s.metric),
    ('[budgets]\npeak_memory = "90 MB"\naccuracy_floor = 1\n',
     lambda s: max(s.peak_bytes / 90e6 - 1, 1 - s.metric)),
    ('[budgets]\npeak_memory = { limit = "90 MB", level = "warn" }\n', lambda s: None),
])  # fmt: skip
def test_what_is_missed_and_by_how_much(budgets, share):
    found = solution(CANDIDATE, made(budgets))
    assert callable(share)
    expected = share(found)
    assert found.miss == (None if expected is None else pytest.approx(expected))
    assert any(check.status == "fail" for d in found.devices for check in d.failed) or found.failed


def test_objectives_are_what_is_known():
    first = solution(CANDIDATE, made())
    wanted, unknown = objectives([first], reasons([made()]))
    assert [(o.name, o.better) for o in wanted] == [
        ("accuracy", "larger"), ("peak_bytes", "smaller"), ("time_s", "smaller"),
    ]  # fmt: skip
    assert {each.figure for each in unknown} == {"energy_j"}
    wanted, unknown = objectives([first.model_copy(update={"metric": None, "time_s": None})], [])
    assert [o.name for o in wanted] == ["loss", "peak_bytes"]
    assert [each.figure for each in unknown] == ["time_s", "energy_j"]


def test_noise_beats_nobody():
    """Half a percent of time is none; a metric that is lower is. The unknown is worst."""
    found = [
        point(1, 0.9, 1000, 10.00), point(2, 0.8, 1000, 9.99), point(3, 0.8, 500, 10.0),
        point(4, 0.9, 1000, None),
    ]  # fmt: skip
    wanted, _ = objectives(found, [])
    best, rest = ranked(found, [costs(each, wanted) for each in found])
    assert [each.number for each in best] == [1, 3]
    assert [(each.number, each.beaten_by) for each in rest] == [(4, [1]), (2, [1, 3])]
    assert costs(found[0], wanted)[0] == -0.9
    assert all(each.beaten_by == [] for each in best)


def test_the_result_is_read_back():
    found = solution(CANDIDATE, made())
    result = made_fit(over_budget=[found])
    assert FitResult.model_validate_json(result.to_json()) == result
    assert not result.found
    assert result.nearest == found


# Layers, and patterns that freeze exactly them.

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": zoo.mlp,
    "cnn": zoo.cnn,
    "mobilenet": lambda: zoo.mobilenet_v2(size=32, width_mult=0.35, batch_norm="train"),
    "transformer": lambda: zoo.transformer_encoder(layers=2, d=32, ff=64, T=8, vocab=50),
}


def loaded(text: str, *weights: str, shape: tuple[int, ...] = (4, 4)) -> ir.Model:
    return load_model(weighted(text, dict.fromkeys(weights, shape)))


def test_layers_of_a_convolutional_network():
    model = load_model(zoo.cnn(size=8, width=(4, 8)))
    names = [(f"{name}.weight", f"{name}.bias") for name in ("conv1", "conv2", "fc")]
    assert layers(model, candidates(model)) == names


def test_branches_are_one_layer_and_vectors_belong_to_the_layer_before():
    """A skip connection, a scale of the input, a weight transposed, and a shared one."""
    text = """branches (float[batch, 8] x) => (float[batch, 8] y) {
        scaled = Mul (x, s0)
        turned = Transpose (w1)
        a = MatMul (scaled, turned)
        b = MatMul (scaled, w2)
        c = MatMul (b, w3)
        c1 = Add (c, b3)
        joined = Add (a, c1)
        d = MatMul (joined, w4)
        y = MatMul (d, w3)
    }"""
    names = ("s0", "w1", "w2", "w3", "b3", "w4")
    shapes = {name: (8, 8) if name.startswith("w") else (8,) for name in names}
    model = load_model(weighted(text, shapes))
    assert layers(model, candidates(model)) == [("s0", "w1", "w2"), ("w3", "b3"), ("w4",)]


def test_layers_inside_a_loop_are_found():
    text = """looped (float[batch, 4] x) => (float[batch, 4] y) {
        a = MatMul (x, w1)
        n = Constant <value_int = 2> ()
        yes = Constant <value = bool {1}> ()
        b = Loop (n, yes, a) <body = inner (int64 i, bool go, float[b, 4] state)
            => (bool on, float[b, 4] next) {
                on = Identity (go)
                next = MatMul (state, w2)
            }>
        y = MatMul (b, w3)
    }"""
    model = loaded(text, "w1", "w2", "w3")
    assert layers(model, ["w1", "w2", "w3"]) == [("w1",), ("w2",), ("w3",)]


@pytest.mark.parametrize("name", MODELS)
def test_every_choice_freezes_what_it_says(name):
    """Patterns, resolved as a build does, freeze the first layers and train the rest."""
    proto = MODELS[name]()
    model = load_model(proto)
    trained, frozen = resolve(model, (), ())
    found = layers(model, trained)
    assert sorted(n for layer in found for n in layer) == sorted(trained)
    choices = freezes(model, trained, frozen)
    assert 2 <= len(choices) <= MOST_FREEZES
    assert (choices[0].title, choices[0].patterns) == ("nothing", ())
    assert choices[-1].title == "all but the head"
    counts = []
    for choice in choices:
        again = load_model(proto, named=choice.patterns)
        left, fixed = resolve(again, (), choice.patterns)
        depth = next(d for d in range(len(found)) if sum(map(len, found[:d])) == len(fixed))
        assert set(fixed) == {n for layer in found[:depth] for n in layer}
        assert set(left) == {n for layer in found[depth:] for n in layer}
        elements = sum(math.prod(again.graph.initializers[n].shape.numpy()) for n in left)
        assert choice.trained == elements
        counts.append(elements)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


def test_modules_are_named_as_a_whole():
    model = load_model(zoo.cnn(size=8, width=(4, 8)))
    trained, _ = resolve(model, (), ())
    patterns = [(), ("conv1.*",), ("conv1.*", "conv2.*")]
    assert [choice.patterns for choice in freezes(model, trained, ())] == patterns


def test_parameters_without_a_module_and_with_a_name_of_wildcards():
    """Patterns are escaped, and a tensor that stands for two parameters keeps standing so."""
    text = """flat (float[batch, 4] x) => (float[batch, 4] y) {
        a = MatMul (x, w1) b = Relu (a) y = MatMul (b, w2)
    }"""
    model = loaded(text, "w1", "w2")
    model.graph.initializers["w1"].name = "w[1]*"
    model.graph.initializers["w2"].name = "w[1]x"
    (_, choice) = freezes(model, ["w[1]*", "w[1]x"], ())
    assert [fnmatchcase("w[1]*", p) for p in choice.patterns] == [True]
    assert [fnmatchcase("w[1]x", p) for p in choice.patterns] == [False]


def test_one_layer_leaves_nothing_to_freeze():
    model = loaded("one (float[batch, 4] x) => (float[batch, 4] y) { y = MatMul (x, w) }", "w")
    assert [choice.patterns for choice in freezes(model, ["w"], ())] == [()]
