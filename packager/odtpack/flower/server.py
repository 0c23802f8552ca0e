"""Helpers for a ServerApp: where it begins, whose answers count, how well it does."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from odtpack.errors import some
from odtpack.flower.client import PEAK, check_config
from odtpack.flower.records import as_typed, only_arrays, to_arrays, to_record, warn
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState, carry_over
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.local_training import Arrays, LocalTrainer, crossing
from odtpack_simulator.fleet.updates import (
    MOST_TIMES_MEDIAN,
    MOST_TIMES_MODEL,
    MOST_TIMES_WEIGHT,
    ROBUST,
    capped,
    refusals,
    weighted_mean,
)

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message, MetricRecord

S = TypeVar("S")
_MOST_SAMPLES: Final = 2**63  # Numbers of samples are below: they are computed with as floats

OnRefused = Callable[[int, int, str], None]
"""Called with the round, the node and the reason."""


def initial_arrays(
    package: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> ArrayRecord:
    """The parameters that a federation begins with.

    Args:
        package: Folder of the package.
        checkpoint: Checkpoint of it to begin from; by default the package's own.

    Raises:
        OdtpackError: The package or the checkpoint cannot be read, or do not fit each other.
    """
    opened = Package.open(package)
    state = CheckpointState.load_checkpoint(checkpoint or opened.checkpoint)
    return to_record({name: state.parameters[name].data for name in crossing(opened.manifest)})


def guarded(
    strategy: S,
    package: str | os.PathLike[str],
    *,
    most_times_median: float = MOST_TIMES_MEDIAN,
    most_times_model: float = MOST_TIMES_MODEL,
    most_times_weight: float = MOST_TIMES_WEIGHT,
    aggregate: str = "mean",
    on_refused: OnRefused | None = None,
) -> S:
    """Let a strategy aggregate only sound answers, in the order of the clients' numbers.

    Answers that hold NaN, arrays of other names, shapes or types, other metrics than most, an
    update of the weights or of a running statistic many times as long as the others', or no sound
    weight are left out and said so; the round continues with the rest.
    An answer that says that it is from many times as many samples as the others counts as
    ``most_times_weight`` medians. What a strategy is about to send is checked before it goes out.
    Flower gives answers in the order of their arrival, in which sums would differ from run to
    run.

    Args:
        strategy: Any strategy of Flower with ``configure_train`` and ``aggregate_train``; it is
            changed, and its class becomes one of its own: Flower's accounting of privacy takes
            only strategies that average as FedAvg does, so ``guarded`` goes around them.
        package: Folder of the package. Its running statistics become the mean of the answers also
            if the strategy has an optimizer of its own (FedAvgM, FedAdam, FedYogi, FedAdagrad),
            whose step can make a variance negative.
        most_times_median: See :func:`~odtpack_simulator.fleet.updates.refusals`.
        most_times_model: See there; it is for rounds in which fewer than three answers change
            something.
        most_times_weight: See :func:`~odtpack_simulator.fleet.updates.capped`.
        aggregate: ``"mean"`` leaves it to the strategy. ``"median"`` and ``"trimmed_mean"`` put
            that of each element in the place of every answer before the strategy averages them:
            answers then count equally, and fewer than half of them, or a fifth, cannot move the
            model far. One answer moves it further than a mean, for which Flower's differential
            privacy computes its noise.
        on_refused: Called for every answer that is left out; by default it is logged.

    Returns:
        The strategy.

    Raises:
        OdtpackError: ``bad-aggregate``: it is unknown, or the strategy adds the noise of a mean;
            the package is not one; in a round ``fleet-config``: the strategy's ``train_config`` has
            a key or a value that no client can train with.
    """
    target: Any = strategy
    _check_aggregate(aggregate, target)
    configure, average = target.configure_train, target.aggregate_train
    begun: dict[str, Array] = {}
    say = on_refused or _log
    weight = getattr(target, "weighted_by_key", "num-examples")
    crosses = crossing(Package.open(package).manifest)
    trainable = {name for name, trained in crosses.items() if trained}
    statistics = _stepped_statistics(target, [name for name in crosses if name not in trainable])

    def configure_train(
        server_round: int, arrays: ArrayRecord, *rest: Any, **named: Any
    ) -> Iterable[Message]:
        # In the types that the federation began with, in which clients answer.
        typed = as_typed(to_arrays(arrays), begun)
        begun.clear()
        begun.update(typed)
        messages: list[Message] = list(configure(server_round, arrays, *rest, **named))
        for message in messages[:1]:  # all are sent the same
            for config in message.content.config_records.values():
                check_config(config)
        return messages

    def aggregate_train(server_round: int, replies: Iterable[Message]) -> Any:
        failed = []
        answers: list[tuple[Message, dict[str, Array]]] = []
        for message in replies:
            if message.has_error():
                failed.append(message)
                continue
            try:
                answers.append((message, only_arrays(message.content)))
            except OdtpackError as error:
                say(server_round, message.metadata.src_node_id, error.what)
        answers.sort(key=lambda answer: _order(answer[0]))
        kept: list[tuple[Message, dict[str, Array]]] = []
        odd = _odd([message for message, _ in answers], weight)
        reasons = refusals(
            begun,
            [arrays for _, arrays in answers],
            most_times_median,
            trainable=trainable,
            most_times_model=most_times_model,
            known=odd,
        )
        for (message, arrays), reason in zip(answers, reasons, strict=True):
            if reason is not None:
                say(server_round, message.metadata.src_node_id, reason)
                continue
            ordered = {name: arrays[name] for name in begun}
            if list(arrays) != list(begun):  # some strategies go by place
                _replace(message, to_record(ordered))
            kept.append((message, ordered))
        _cap([message for message, _ in kept], weight, most_times_weight)
        _drop_unless_of_all([message for message, _ in kept], PEAK)
        if kept and aggregate in ROBUST:
            found = ROBUST[aggregate]([arrays for _, arrays in kept])
            kept = [(message, found) for message, _ in kept]
            whole = to_record(found)
            for message, _ in kept:
                _replace(message, whole)
        result = average(server_round, [*(message for message, _ in kept), *failed])
        if kept and statistics and result[0] is not None:
            result[0].update(to_record(_mean(kept, statistics, weight)))
        return result

    # Of the class, not only of the object: Flower's accounting looks there, and knows FedAvg's.
    kind = type(target)
    own = {"aggregate_train": lambda _self, number, replies: aggregate_train(number, replies)}
    target.__class__ = type(kind.__name__, (kind,), own)
    target.configure_train, target.aggregate_train = configure_train, aggregate_train
    _guard_evaluations(target, weight, say)
    return strategy


def _chain(strategy: Any) -> Iterator[Any]:
    """A strategy, and those that it is around."""
    while strategy is not None:
        yield strategy
        strategy = getattr(strategy, "strategy", None)  # as Flower's wrappers keep yours


def _check_aggregate(aggregate: str, strategy: Any) -> None:
    if aggregate == "mean":
        return
    if aggregate not in ROBUST:
        hint = f"take one of mean, {', '.join(ROBUST)}"
        raise OdtpackError("bad-aggregate", f"Unknown aggregate {aggregate!r:.40}.", hint=hint)
    for each in _chain(strategy):
        if getattr(each, "noise_multiplier", 0):
            raise OdtpackError(
                "bad-aggregate",
                f"{type(each).__name__} adds the noise that hides a client in a mean, and one "
                f"client moves the {aggregate} further.",
                hint='take aggregate="mean", or leave the differential privacy out',
            )


def _stepped_statistics(target: Any, statistics: list[str]) -> list[str]:
    """Which running statistics a strategy would step like weights."""
    around = []
    for each in _chain(target):
        if hasattr(each, "momentum_vector") or hasattr(each, "m_t"):
            break
        around.append(each)
    else:
        return []  # it has no moments
    noisy = next((other for other in around if hasattr(other, "noise_multiplier")), None)
    if statistics and noisy is not None:  # the mean of the answers would be without that noise
        warn("%s steps running statistics too, and %s adds noise to them: a variance can become "
             "negative", type(each).__name__, type(noisy).__name__)  # fmt: skip
        return []
    return statistics


def _replace(message: Message, arrays: ArrayRecord) -> None:
    """Put arrays in the place of those of an answer."""
    (name,) = message.content.array_records
    message.content[name] = arrays


def _guard_evaluations(target: Any, weight: str, say: OnRefused) -> None:
    """Leave answers to evaluations out that cannot be averaged with the others."""
    average = getattr(target, "aggregate_evaluate", None)
    if average is None:
        return

    def aggregate_evaluate(server_round: int, replies: Iterable[Message]) -> Any:
        answers = list(replies)
        failed = [message for message in answers if message.has_error()]
        sound = [message for message in answers if not message.has_error()]
        kept = []
        for message, reason in zip(sound, _odd(sound, weight), strict=True):
            if reason is None:
                kept.append(message)
            else:
                say(server_round, message.metadata.src_node_id, reason)
        return average(server_round, [*kept, *failed])

    target.aggregate_evaluate = aggregate_evaluate


def server_evaluation(
    package: str | os.PathLike[str], data: str | os.PathLike[str], *, batch_size: int = 256
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Evaluation on the server by the package's evaluation model, for ``evaluate_fn``.

    Args:
        package: Folder of the package.
        data: ``.npz`` file of samples to evaluate on.
        batch_size: Samples per batch.

    Raises:
        OdtpackError: The package or the data cannot be read, or do not fit each other.
    """
    from flwr.app import MetricRecord

    opened = Package.open(package)
    arrays = opened.load_data(data)
    everything = np.arange(len(next(iter(arrays.values()))))
    trainer = LocalTrainer(opened)

    def evaluate(_server_round: int, record: ArrayRecord) -> MetricRecord:
        found = trainer.evaluate(
            as_typed(to_arrays(record), trainer.sent), arrays, everything, batch_size
        )
        metrics = {"loss": found.loss}
        if found.accuracy is not None:
            metrics["accuracy"] = found.accuracy
        return MetricRecord(metrics)

    return evaluate


def save_checkpoint(
    package: str | os.PathLike[str], arrays: ArrayRecord, destination: str | os.PathLike[str]
) -> None:
    """Write a checkpoint of the package with the parameters that the federation came to.

    Raises:
        OdtpackError: The parameters are not those of the package, or the file cannot be written.
    """
    CheckpointState.save_checkpoint(_state(Package.open(package), arrays), destination)


def carry_to(
    package: str | os.PathLike[str],
    arrays: ArrayRecord,
    newer: str | os.PathLike[str],
    destination: str | os.PathLike[str],
) -> None:
    """Write a checkpoint of a newer package with what the federation of an older one learned.

    Raises:
        OdtpackError: As :func:`~odtpack_runtime.checkpoint.state.carry_over`.
    """
    opened = Package.open(package)
    fresh = CheckpointState.load_checkpoint(Package.open(newer).checkpoint)
    names = crossing(opened.manifest)
    state = carry_over(_state(opened, arrays), fresh, names, optimizer_state=False)
    CheckpointState.save_checkpoint(state, destination)


def _state(package: Package, arrays: ArrayRecord) -> CheckpointState:
    found = to_arrays(arrays)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    names = crossing(package.manifest)
    odd = names.keys() ^ found.keys()
    if odd:
        what = f"The parameters do not fit the package: '{min(odd)[:100]}' differs."
        raise OdtpackError("fleet-arrays", what)
    for name in names:
        parameter = state.parameters[name]
        parameter.data = as_typed({name: found[name]}, {name: parameter.data})[name]
    return state


def _odd(messages: list[Message], weight: str) -> list[str | None]:
    """Why each of some answers cannot be averaged with the others, its arrays aside."""
    usual = Counter(map(_names, messages)).most_common(1)
    return [
        _bad_weight(message, weight)
        or _not_finite(message)
        or (
            None
            if _names(message) == usual[0][0]
            else "its records or metrics are not those of most answers"
        )
        for message in messages
    ]


def _names(message: Message) -> object:
    """Names of its records and metrics: Flower ends where they are not the same in all answers."""
    metrics = {
        (name, key, len(value) if isinstance(value, list) else None)
        for name, record in message.content.metric_records.items()
        for key, value in record.items()
        if key != PEAK
    }
    return tuple(message.content.array_records), frozenset(metrics)


def _drop_unless_of_all(messages: list[Message], key: str) -> None:
    """Take a metric away that not every answer has, as not every system tells it."""
    records = [next(iter(message.content.metric_records.values())) for message in messages]
    if not all(isinstance(record.get(key), float) for record in records):
        for record in records:
            record.pop(key, None)


def _bad_weight(message: Message, key: str) -> str | None:
    """Why an answer cannot be weighted; None if it can."""
    found = [record.get(key) for record in message.content.metric_records.values()]
    good = len(found) == 1 and isinstance(found[0], int | float)
    if good and 0 < found[0] < _MOST_SAMPLES:
        return None
    return f"it gives no number above nothing as {key}"


def _not_finite(message: Message) -> str | None:
    """Which metric of an answer spoils what is computed with it, such as its loss."""
    for record in message.content.metric_records.values():
        for key, value in record.items():
            if not np.isfinite(value).all():
                return f"its {key[:100]} is not finite"
    return None


def _mean(answers: list[tuple[Message, Arrays]], names: Sequence[str], key: str) -> Arrays:
    weights: list[Any] = [next(iter(m.content.metric_records.values()))[key] for m, _ in answers]
    return weighted_mean([{name: arrays[name] for name in names} for _, arrays in answers], weights)


def _cap(messages: list[Message], key: str, most_times_median: float) -> None:
    """Let no answer count for more than a multiple of the others' median."""
    records = [next(iter(message.content.metric_records.values())) for message in messages]
    weights: list[Any] = [record[key] for record in records]
    for record, old, new in zip(records, weights, capped(weights, most_times_median), strict=True):
        if new < old:
            record[key] = type(old)(new)


def _order(message: Message) -> tuple[int, int]:
    number = message.content.config_records.get("client", {}).get("number")
    return number if isinstance(number, int) else 0, message.metadata.src_node_id


def _log(server_round: int, node: int, reason: str) -> None:
    warn("round %s: the answer of node %s is refused: %s", server_round, node, reason)


# A round of checkpoints: what devices send that do not run Flower, from a kit of any language.


def fedavg(
    package: str | os.PathLike[str],
    answers: Sequence[tuple[str | os.PathLike[str], float]],
    destination: str | os.PathLike[str],
    *,
    begun: str | os.PathLike[str] | None = None,
    most_times_median: float = MOST_TIMES_MEDIAN,
) -> list[str | None]:
    """Average the checkpoints of a round by their numbers of samples (McMahan et al. 2017).

    The sum runs in the order of the answers: give them in one that does not depend on their
    arrival, and a round is bit-identical each time. Answers that cannot be read, do not fit the
    package or would spoil the model are left out, as :func:`guarded` does on Flower.

    Args:
        package: Folder of the package that all of them trained.
        answers: The checkpoint of each client, and how many samples it trained on.
        destination: Checkpoint to write: the package's own, with the mean of the parameters.
        begun: Checkpoint that the round began with; by default the package's own.
        most_times_median: See :func:`~odtpack_simulator.fleet.updates.refusals`.

    Returns:
        For each answer why it was left out; None if it counts.

    Raises:
        OdtpackError: The package or ``begun`` cannot be read; ``fleet-arrays``: no answer counts;
            or the file cannot be written.
    """
    opened = Package.open(package)
    names = crossing(opened.manifest)

    own = dict(CheckpointState.load_checkpoint(opened.checkpoint).parameters)
    frozen = {item.name for item in opened.manifest.parameters if item.role == "frozen"}

    def read(path: str | os.PathLike[str]) -> Arrays:
        found = dict(CheckpointState.load_checkpoint(path).parameters)
        other = found.keys() ^ own.keys() or {
            name for name in frozen if not np.array_equal(found[name].data, own[name].data)
        }
        if other:
            what = f"It belongs to another package: {some(sorted(other), 3)} differ."
            raise OdtpackError("fleet-arrays", what, where=str(path))
        return {name: p.data for name, p in found.items() if name in names}

    reference = read(begun or opened.checkpoint)
    reasons: dict[int, str] = {}
    found: dict[int, Arrays] = {}
    for index, (path, examples) in enumerate(answers):
        count: Any = examples  # from a table, or a message of a device
        is_number = isinstance(count, Real)
        if is_number and abs(count) >= _MOST_SAMPLES:
            reasons[index] = "its number of samples is beyond 2^63"
            continue
        if not is_number or not count > 0:
            reasons[index] = f"its number of samples is {examples!r:.60}"
            continue
        try:
            found[index] = read(path)
        except OdtpackError as error:
            reasons[index] = error.what
    trainable = {name for name, trained in names.items() if trained}
    unsound = refusals(reference, list(found.values()), most_times_median, trainable=trainable)
    reasons |= {
        index: reason for index, reason in zip(found, unsound, strict=True) if reason is not None
    }
    kept = [index for index in found if index not in reasons]
    if not kept:
        first = next(iter(reasons.values()), "there is none")
        raise OdtpackError("fleet-arrays", f"No answer can be averaged: {first}"[:500])
    mean = weighted_mean(
        [found[index] for index in kept], capped([answers[index][1] for index in kept])
    )
    state = CheckpointState.load_checkpoint(opened.checkpoint)
    for name in names:
        state.parameters[name].data = mean[name]
    CheckpointState.save_checkpoint(state, destination)
    return [reasons.get(index) for index in range(len(answers))]
