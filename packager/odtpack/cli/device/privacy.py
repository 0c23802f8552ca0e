"""``odtpack privacy``: what private training promises."""

from __future__ import annotations

import math
from typing import Annotated

from odtpack.cli import _console
from odtpack.cli._options import AS_JSON, option


def privacy(
    noise: Annotated[float, option("Noise multiplier, as for --privacy-noise.", "S", min=0)],
    samples: Annotated[int, option("Samples to train on.", "N", min=1)],
    batch_size: Annotated[int, option("Expected batch size.", "B", min=1)] = 32,
    epochs: Annotated[int, option("Passes over the samples.", "E", min=1)] = 5,
    delta: Annotated[
        float | None,
        option("Delta: allowed probability of failure.  [default: a tenth of 1 / N]", "X"),
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Print the epsilon of private training, without training.

    It bounds what the trained parameters reveal of one sample. It holds if samples are drawn
    independently, as odtpack train does. Computed by Rényi differential privacy (dp-accounting).
    """
    from odtpack.privacy import epsilon

    rate = min(1.0, batch_size / samples)
    steps = epochs * math.ceil(samples / batch_size)
    chosen = 0.1 / samples if delta is None else delta
    found = epsilon(noise, rate, steps, chosen)
    _console.results(as_json=as_json)
    _console.say(f"epsilon {found:.4g} at delta {chosen:g}, {steps} steps")
    content = {"epsilon": found, "delta": chosen, "sampling_rate": rate, "steps": steps}
    _console.json_result(as_json, content)
