"""``odtpack privacy``: what private training promises."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import typer


def privacy(
    noise: Annotated[
        float, typer.Option(min=0, metavar="S", help="Noise multiplier, as of --privacy-noise.")
    ],
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Samples to train on.")],
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="B", help="Samples that are expected in a batch.")
    ] = 32,
    epochs: Annotated[int, typer.Option(min=1, metavar="E", help="Passes over the samples.")] = 5,
    delta: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Probability of failure to allow.  [default: a tenth of 1 / N]"
        ),
    ] = None,
) -> None:
    """Print the epsilon of a private training, without training.

    The promise is to each sample: from the trained parameters one can hardly say whether it was
    trained on. It holds for samples that are drawn independently, as odtpack train does, by
    Rényi differential privacy (dp-accounting).
    """
    from odtpack.privacy import epsilon

    rate = min(1.0, batch_size / samples)
    steps = epochs * math.ceil(samples / batch_size)
    chosen = 0.1 / samples if delta is None else delta
    found = epsilon(noise, rate, steps, chosen)
    sys.stdout.write(f"epsilon {found:.4g} at delta {chosen:g}, {steps} steps\n")
