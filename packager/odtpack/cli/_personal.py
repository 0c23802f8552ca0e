"""What reports and packages would carry of the samples or of the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odtpack_simulator.fleet.result import FleetResult
    from odtpack_simulator.result.result import SimulationResult

_OWN = "odtpack."


def of_simulation(result: SimulationResult) -> Iterator[str]:
    """Yield a sentence for each figure of a result that is of one sample."""
    data = result.data
    if data.batch_size == 1:
        yield (
            "Batches are of one sample: the losses in the result are those of single samples. "
            "Keep it as you keep the data, or simulate larger batches."
        )
    if data.held_out_samples == 1:
        yield "One sample is held out: the evaluation in the result is of that sample alone."


def of_fleet(result: FleetResult) -> Iterator[str]:
    """Yield a sentence for each figure of a result that is of one client."""
    clients = result.fairness.clients if result.fairness is not None else 0
    if 0 < clients < 20:
        yield (
            f"The accuracy of the worst tenth of {clients} clients is that of one. Keep the result "
            "as you keep the clients' data, or simulate more of them."
        )


def of_properties(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on the properties that an app attached to a checkpoint."""
    own = sorted(name for name in names if not name.startswith(_OWN))
    if own:
        shown = ", ".join(f"'{name[:40]}'" for name in own[:5])
        more = f" and {len(own) - 5} more" if len(own) > 5 else ""
        yield (
            f"The package carries what the app attached to the checkpoint: {shown}{more}. Who gets "
            "the package reads it; train it from a checkpoint without them if they are a user's."
        )
