"""The ClientApp: trains a package with the training runtime, and answers in Flower's messages."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from odtpack.flower.records import REFUSED, as_typed, only_arrays, to_arrays, to_record, warn
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.local_training import LocalSettings, LocalTrainer
from odtpack_simulator.replay.job import Indices

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

PEAK: Final = "peak-mb"
"""A metric that not every system tells."""

OPTIMIZER_STATE: Final = "odtpack.optimizer"
"""Record of the context in which a client keeps its optimizer's state from round to round."""

SETTINGS: Final = (
    ("batch-size", "batch_size", 1),
    ("local-epochs", "epochs", 1),
    ("lr", "learning_rate", 0),
    ("seed", "seed", 0),
    ("proximal-mu", "proximal", 0),
)
"""Keys of a server's configuration, the settings that they are, and the least values."""

OF_THE_CLIENT: Final = ("batch-size", "local-epochs")
"""Keys that a private client does not take from the server: epsilon depends on them."""

ABOUT_THE_MESSAGE: Final = ("fleet-config", "private-training")
"""Codes of the errors that a private client explains: they are about what the server asked for."""

FROM_FLOWER: Final = ("server-round", "clipping_norm")
"""Keys that Flower's own strategies add."""

Data = Mapping[str, Array] | tuple[Mapping[str, Array], Indices]
"""A client's arrays by name of input; or arrays that clients share, and which samples it has."""


def client_app(
    package: str | os.PathLike[str],
    data: Callable[[Context], Data],
    *,
    batch_size: int = 32,
    epochs: int = 1,
    learning_rate: float = 0.01,
    seed: int = 0,
    keep_optimizer_state: bool = False,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """A ClientApp that trains a package.

    The settings below are defaults: the strategy's ``train_config`` may hold ``batch-size``,
    ``local-epochs``, ``lr``, ``seed`` and ``proximal-mu`` (as :class:`FedProx` does), and goes
    before them; another key is an error. An answer holds the parameters by name, ``num-examples``,
    ``loss`` (``train_loss`` is the same), ``seconds``, ``bytes`` and, where the system says it,
    ``peak-mb`` of the process. A client that cannot
    take part answers with an error of code 100 and a reason.

    If the package is private (DP-SGD), batches are drawn independently, and they and the noise come
    from the system's secure generator, which no ``seed`` reaches. The client then refuses
    ``batch-size`` and ``local-epochs``, on which epsilon depends, and messages to evaluate, and its
    answer has no loss, because a loss has no noise. What an error says of its data stays in the
    client's log.

    Args:
        package: Folder of the package.
        data: Gives a client's data, as :func:`load_dataset
            <odtpack_runtime.training.loop.load_dataset>` loads and checks them. Called in every
            round.
        batch_size: Samples per batch.
        epochs: Passes over the client's samples in a round.
        learning_rate: Of every step.
        seed: Seed of the order of samples, which depends on round and client as well.
        keep_optimizer_state: Keep step count and moments, in mixed precision the loss scale too, in
            the client's context, and go on from them in its next round; by default every round
            starts afresh.
        mods: Flower's mods, such as ``fixedclipping_mod`` or ``LocalDpMod``, around training and
            evaluation.

    Raises:
        OdtpackError: Flower is not installed, or the package is not one.
    """
    try:
        from flwr.clientapp import ClientApp
    except ImportError as error:
        raise OdtpackError("flower-missing", "Flower is not installed.") from error
    opened = Package.open(package)
    path, private = str(opened.path), opened.manifest.privacy is not None
    defaults = LocalSettings(batch_size, epochs, learning_rate, seed)
    app = ClientApp(mods=list(mods))

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _train(message, context), private=private)

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _evaluate(message, context), private=private)

    def _train(message: Message, context: Context) -> Any:
        from flwr.app import ConfigRecord, MetricRecord, RecordDict

        trainer, (arrays, indices) = _trainer(path), _samples(data(context))
        config = _config(message)
        settings = _settings(defaults, config)
        if trainer.private:
            _check_private(config)
        if not trainer.steps(len(indices), settings):
            what = f"{len(indices)} samples are less than one batch."
            raise OdtpackError("too-few-samples", what)
        kept = context.state.array_records.get(OPTIMIZER_STATE) if keep_optimizer_state else None
        update = trainer.train(
            as_typed(only_arrays(message.content), trainer.sent),
            arrays,
            indices,
            settings,
            round_number=int(config.get("server-round", 0)),
            client=client_number(context),
            optimizer_state=None if kept is None else to_arrays(kept),
        )
        # Of a private client neither the loss nor whether there is one may go out.
        if not trainer.private and not math.isfinite(update.loss):
            raise OdtpackError("diverged", "No batch of this client has a finite loss.")
        if keep_optimizer_state:
            context.state[OPTIMIZER_STATE] = to_record(trainer.optimizer_state())
        metrics: dict[str, int | float] = {
            "num-examples": update.examples,
            "seconds": update.seconds,
            "bytes": sum(array.nbytes for array in update.arrays.values()),
        }
        if not trainer.private:
            metrics["loss"] = update.loss
            metrics["train_loss"] = update.loss  # as Flower's QFedAvg calls it
        peak = _peak_megabytes()
        if peak is not None:
            metrics[PEAK] = peak
        return RecordDict(
            {
                "arrays": to_record(update.arrays),
                "metrics": MetricRecord(metrics),
                "client": ConfigRecord({"number": client_number(context)}),
            }
        )

    def _evaluate(message: Message, context: Context) -> Any:
        from flwr.app import MetricRecord, RecordDict

        trainer = _trainer(path)
        if trainer.private:
            what = "Figures of an evaluation have no noise, and the package is private."
            raise OdtpackError("private-training", what)
        arrays, indices = _samples(data(context))
        settings = _settings(defaults, _config(message))
        given = as_typed(only_arrays(message.content), trainer.sent)
        found = trainer.evaluate(given, arrays, indices, settings.batch_size)
        metrics = {"num-examples": len(indices), "loss": found.loss}
        if found.accuracy is not None:
            metrics["accuracy"] = found.accuracy
        return RecordDict({"metrics": MetricRecord(metrics)})

    return app


def client_number(context: Context) -> int:
    """Number of a client: its partition in a simulation, else its node."""
    return int(context.node_config.get("partition-id", context.node_id))


def fleet_data(
    fleet: str | os.PathLike[str], package: str | os.PathLike[str], data: str | os.PathLike[str]
) -> Callable[[Context], Data]:
    """The data of the clients of a fleet file, for a ClientApp in Flower's simulation.

    Client number N has the samples that it has in ``odtpack fleet run`` with the same files.

    Args:
        fleet: The fleet file.
        package: Folder of the package.
        data: The ``.npz`` file that the clients' samples are drawn from.
    """
    files = str(fleet), str(package), str(data)

    def draw(context: Context) -> Data:
        population, arrays = _population(*files)
        return arrays, population.client(client_number(context)).samples()

    return draw


@functools.cache
def _population(fleet: str, package: str, data: str) -> tuple[Any, Mapping[str, Array]]:
    from odtpack_simulator.fleet.fleet_file import read_fleet
    from odtpack_simulator.fleet.population import Population, load_fleet_data

    settings = read_fleet(fleet)
    loaded = load_fleet_data(Package.open(package), data, settings.seed)
    return Population(settings, loaded), loaded.arrays


@functools.cache
def _trainer(path: str) -> LocalTrainer:
    """One per process: clients that it plays one after the other share the sessions."""
    return LocalTrainer(Package.open(path))


def _samples(data: Data) -> tuple[Mapping[str, Array], Indices]:
    if isinstance(data, tuple):
        return data
    return data, np.arange(len(next(iter(data.values()))))


def _config(message: Message) -> Mapping[str, Any]:
    records = list(message.content.config_records.values())
    return records[0] if records else {}


def _settings(defaults: LocalSettings, config: Mapping[str, Any]) -> LocalSettings:
    """What the server asks for, checked: it comes from outside."""
    values: dict[str, Any] = {}
    known = [*(key for key, _, _ in SETTINGS), *FROM_FLOWER]
    for key in config.keys() - {*known}:
        what = f"The server's configuration has an unknown key {key!r:.60}."
        hint = f"it may have {', '.join(known[: len(SETTINGS)])}"
        raise OdtpackError("fleet-config", what, hint=hint)
    for key, name, least in SETTINGS:
        default = getattr(defaults, name)
        value = config.get(key, default)
        good = isinstance(value, float | int) and not isinstance(value, bool)
        if not good or not least <= value < 2**31 or (isinstance(default, int) and value % 1):
            what = f"The server's configuration has {key} = {value!r:.60}."
            raise OdtpackError("fleet-config", what)
        values[name] = type(default)(value)
    return LocalSettings(**values)


def _check_private(config: Mapping[str, Any]) -> None:
    for key in OF_THE_CLIENT:
        if key in config:
            raise OdtpackError(
                "fleet-config",
                f"The server's configuration has {key}, and the package is private: its client "
                "alone sets what epsilon depends on.",
            )


def check_config(config: Mapping[str, Any]) -> None:
    """Check what a server is about to send, as every client would."""
    _settings(LocalSettings(1, 1, 0.01), config)


def _answer(message: Message, work: Callable[[], Any], *, private: bool) -> Message:
    """The answer, or an error that says why there is none."""
    from flwr.app import Error, Message

    try:
        return Message(work(), reply_to=message)
    except OdtpackError as error:
        reason = _reason(error, private=private)
    except Exception as error:
        if not private:
            raise
        # Flower would send its text.
        warn("this client fails: %r", error)
        reason = "the client failed: its log says why"
    return Message(Error(code=REFUSED, reason=reason), reply_to=message)


def _reason(error: OdtpackError, *, private: bool) -> str:
    """What the server is told; a private client's data, such as a bad value, may be in the rest."""
    whole = f"{error.code}: {error.what}"
    if not private or error.code in ABOUT_THE_MESSAGE:
        return whole
    warn("this client answers with an error: %s", whole)
    return error.code


def _peak_megabytes() -> float | None:
    """Most memory that the process has held so far."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
