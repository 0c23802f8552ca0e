"""Published trainings on phones: what lies between two batch sizes, and which intervals hold."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.published.__main__ import count
from benchmarks.published.engine import CALIBRATION, FOLDER, counted, fitted, published
from benchmarks.published.networks import NETWORKS
from scripts.published_phones import line


def times() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in published():
        found.setdefault(row.network, {})[row.batch] = row.step_ms
    return found


def test_every_row_is_of_a_network_that_is_built_and_simulated() -> None:
    rows = published()
    simulated = json.loads((FOLDER / "simulated.json").read_text())
    assert len(rows) == 25
    assert {row.network for row in rows} == set(NETWORKS) == set(counted())
    for row in rows:
        assert str(row.batch) in simulated[row.network]["step_ms"]


def test_held_out_networks_are_inside_of_a_narrow_interval() -> None:
    """MobileNet and SqueezeNet took no part in the fit, which changing their rows shows."""
    engine, held = fitted(), [row for row in published() if row.held_out]
    assert {row.network for row in held} == {"Mobilenet", "Squeezenet"}
    inside = 0
    for row in held:
        low, _, high = engine.step_ms(row.network, row.batch)
        assert high / low <= 5
        inside += low <= row.step_ms <= high
    assert inside >= 0.8 * len(held)
    assert fitted(CALIBRATION).factors == engine.factors
    assert fitted(("Lenet", "GoogLenet")).factors != engine.factors


def test_bracketing_beats_drawing_on_from_small_batches() -> None:
    """Within 10 % of what was published, of all rows that are not an end of the line."""
    bracketed, drawn_on = [], []
    for of in times().values():
        ends = {size: of[size] for size in (1, 16)}
        small = {size: of[size] for size in (1, 2)}
        bracketed += [line(ends, size) / of[size] - 1 for size in (2, 4, 8)]
        drawn_on += [line(small, size) / of[size] - 1 for size in (4, 8, 16)]
    good, poor = (sum(abs(e) <= 0.1 for e in errors) for errors in (bracketed, drawn_on))
    assert good >= 12
    assert good > poor + 3
    assert max(map(abs, bracketed)) < 0.2


@pytest.mark.parametrize(
    ("name", "parameters", "products"),
    [
        # By hand from the sources' layers: weights and biases; multiply-adds of one sample.
        ("Lenet", 520 + 25_050 + 320_400 + 4_010, 288_000 + 1_600_000 + 320_000 + 4_000),
        ("Alexnet", 30_006_666, 989_113_472),
        ("Mobilenet", 3_504_872 + 1281, None),  # torchvision's, and a class more
    ],
)
def test_networks_are_those_of_the_sources(
    name: str, parameters: int, products: int | None
) -> None:
    found = count(name)
    assert found.parameters == 4 * parameters
    assert products is None or found.flops == 2 * products
    assert dataclasses.asdict(found) == dataclasses.asdict(counted()[name])
