"""``odtpack privacy``: what private training promises."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import typer


def privacy(
    noise: Annotated[
        float, typer.Option(min=0, metavar="S", help="Noise multiplier, as for --privacy-noise.")
    ],
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Samples to train on.")],
    batch_size: Annotated[int, typer.Option(min=1, metavar="B", help="Expected batch size.")] = 32,
    epochs: Annotated[int, typer.Option(min=1, metavar="E", help="Passes over the samples.")] = 5,
    delta: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Delta: allowed probability of failure.  [default: a tenth of 1 / N]"
        ),
    ] = None,
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
    sys.stdout.write(f"epsilon {found:.4g} at delta {chosen:g}, {steps} steps\n")
