"""What clients do in a round: train the package on their own data, here or in other processes.

One trainer serves any number of clients, one after the other: they share its sessions. What a
client computes is a function of the parameters it is sent, its samples, the settings, the round
and its number, whichever client trained before it; but outside of simulations, private batches and
noise come from the system.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import evaluate, train_step
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_runtime.training.private import poisson_batches, secure_normal, secure_uniform
from odtpack_simulator.replay.executor import Executor, RayExecutor, relocate
from odtpack_simulator.replay.job import Indices, in_batches, seed_dropout, step_count
from odtpack_simulator.replay.paired_loss import accuracy_inputs
from odtpack_simulator.replay.replay import write_data

Arrays = dict[str, Array]  # Parameters by name

_ORDER, _DROPOUT, _NOISE = 2, 4, 5
"""Which streams of random numbers of a seed give the order of samples, what Dropout draws, and, in
simulations alone, the noise of private gradients."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How every client trains."""

    batch_size: int  # Samples per batch
    epochs: int  # Passes over the client's samples
    learning_rate: float  # Of every step
    seed: int = 0  # Seed of the order of the samples, and of Dropout
    # Weight of FedProx's term, half the squared distance from the parameters that the round began
    # with; 0 for none.
    proximal: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """A client's answer."""

    arrays: Arrays  # The parameters after its training, copies
    examples: int  # Samples that it trained on, the weight of its answer
    steps: int  # Optimizer steps
    loss: float  # Mean of the batches' losses that are finite
    seconds: float  # Time of the training on this machine


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """How well a model does on samples."""

    loss: float  # Mean loss per sample; NaN without a batch
    # Per class, samples whose class the highest score names; empty without classes.
    right: tuple[int, ...] = ()
    total: tuple[int, ...] = ()  # Samples per class
    losses: tuple[float, ...] = ()  # Of each batch
    sizes: tuple[int, ...] = ()  # Samples of each

    def figures(self) -> dict[str, Any]:
        """What the record of a round says of it."""
        return {"loss": self.loss, "accuracy": self.accuracy, "evaluated": bool(self.sizes)}

    def by_class(self) -> dict[str, Any]:
        """The counts as the state of a federation holds them."""
        return {"class_right": list(self.right), "class_total": list(self.total)}

    @property
    def accuracy(self) -> float | None:
        """Share of the labels that the highest score names; None where there are none."""
        return sum(self.right) / sum(self.total) if sum(self.total) else None


def crossing(manifest: Manifest) -> dict[str, bool]:
    """Which parameters cross between server and clients, and whether each is trained."""
    # They are the trainable ones (adapters where only these are trained) and running statistics,
    # which training updates without a gradient. What frozen parameters hold is the same everywhere.
    # A carried state, which an exported model has as an input, is what a client's own samples left
    # behind, and a loss scale is that of its own steps: each client begins with the package's.
    own = {*LOSS_SCALE_NAMES, *(() if manifest.inference is None else manifest.inference.inputs)}
    return {
        info.name: info.role == "trainable"
        for info in manifest.parameters
        if info.role == "trainable" or (info.role == "state" and info.name not in own)
    }


class LocalTrainer:
    """Trains a package for clients, and evaluates it for the server."""

    # `sent`: The parameters that cross between server and clients, live, by name.

    def __init__(self, package: Package) -> None:
        package.require_one_model("A client of a fleet")
        manifest = package.manifest
        state = CheckpointState.load_checkpoint(package.checkpoint)
        # One thread makes the same bits on every machine's load.
        options = default_session_options(package.training_model, 1)
        self.module = Module(
            package.training_model, state, package.eval_model, session_options=options
        )
        self.optimizer = Optimizer(package.optimizer_model, self.module)
        self.private = self.optimizer.privacy is not None
        self.class_count = manifest.class_count
        self._names = self.module.input_names()
        self._scores, self._labels = accuracy_inputs(manifest)
        self._ignored = manifest.ignored_label
        self.fixed_batch = manifest.fixed_batch
        names = crossing(manifest)
        self.sent = {name: state.parameters[name].data for name in names}
        self.trainable = {name for name, trained in names.items() if trained}
        # The states that do not cross, live, and what each client begins with.
        self._own = {
            info.name: (data := state.parameters[info.name].data, data.copy())
            for info in manifest.parameters
            if info.role == "state" and info.name not in names
        }
        self._proximal = [(name, state.parameters[name]) for name in sorted(self.trainable)]

    def initial(self) -> Arrays:
        """Copies of the parameters that cross between server and clients, by name."""
        return {name: array.copy() for name, array in self.sent.items()}

    def set_parameters(self, arrays: Mapping[str, Array]) -> None:
        """Set the parameters that cross, and the other states to those of the package."""
        problem = mismatch(self.sent, arrays)
        if problem is not None:
            raise OdtpackError("fleet-arrays", f"The parameters do not fit the package: {problem}.")
        for name, array in self.sent.items():
            np.copyto(array, arrays[name])
        for array, begun in self._own.values():
            np.copyto(array, begun)

    def steps(self, samples: int, settings: LocalSettings) -> int:
        """Optimizer steps that a client with so many samples makes in a round."""
        size, whole = self.fixed_batch or settings.batch_size, self.fixed_batch is not None
        accumulated = self.module.accumulation_steps
        return settings.epochs * step_count(samples, size, accumulated, whole=whole)

    def train(
        self,
        arrays: Mapping[str, Array],
        data: Mapping[str, Array],
        indices: Indices,
        settings: LocalSettings,
        *,
        round_number: int,
        client: int,
        optimizer_state: Mapping[str, Array] | None = None,
        simulated: bool = False,
    ) -> LocalUpdate:
        """Train for one client."""
        # `optimizer_state`: What optimizer_state gave after the client's last round; by default the
        # optimizer starts afresh.
        # `simulated`: Private batches and noise are drawn from the seed and can be repeated. Who
        # knows the seed can subtract that noise, so a device draws them from the system.
        start = time.perf_counter()
        self.set_parameters(arrays)
        self._reset_optimizer(settings.learning_rate, optimizer_state)
        self.module.train()
        self.module.lazy_reset_grad()
        random = np.random.default_rng([settings.seed, _ORDER, round_number, client])
        size, whole = self.fixed_batch or settings.batch_size, self.fixed_batch is not None
        expected = min(size, len(indices))  # of a private batch, as for `odtpack train`
        pull = functools.partial(self._pull, arrays, settings.proximal)
        losses: list[float] = []
        steps = 0
        for _ in range(settings.epochs):
            if self.private and expected:
                uniform = random.random if simulated else secure_uniform
                count = math.ceil(len(indices) / size)
                batches = poisson_batches(indices, expected / len(indices), count, uniform)
            else:
                batches = in_batches(random.permutation(indices), size, whole=whole)
            while of_step := list(itertools.islice(batches, self.module.accumulation_steps)):
                place = settings.seed, _DROPOUT, round_number, client, steps
                seed_dropout(*place, private=self.private and not simulated)
                fed = ([data[name][batch] for name in self._names] for batch in of_step)
                noise = np.random.default_rng([settings.seed, _NOISE, round_number, client, steps])
                train_step(
                    self.module,
                    self.optimizer,
                    fed,
                    on_loss=losses.append,
                    before_update=pull,
                    noise=noise.standard_normal if simulated else secure_normal,
                    expected=expected,
                )
                steps += 1
        losses = [loss for loss in losses if math.isfinite(loss)]
        loss = sum(losses) / len(losses) if losses else math.nan
        seconds = time.perf_counter() - start
        return LocalUpdate(self.initial(), len(indices), steps, loss, seconds)

    def optimizer_state(self) -> Arrays:
        """Copies of the step count, the moments and the loss scale, by name."""
        state = self.module.state.optimizer
        if state is None:
            raise AssertionError("an optimizer gives its state")
        moments = {
            f"{name}.{index}": moment.copy()
            for name, own in state.moments.items()
            for index, moment in enumerate(own)
        }
        scale = {n: array.copy() for n, (array, _) in self._own.items() if n in LOSS_SCALE_NAMES}
        return {"step": np.array(state.step, np.int64), **moments, **scale}

    def evaluate(
        self,
        arrays: Mapping[str, Array],
        data: Mapping[str, Array],
        indices: Indices,
        batch_size: int,
    ) -> ModelEvaluation:
        """Evaluate parameters with the package's evaluation model."""
        self.set_parameters(arrays)
        classes = 0 if self._scores is None else self.class_count or 0
        right, total = np.zeros(classes, np.int64), np.zeros(classes, np.int64)

        def count(named: Array, counted: Array) -> None:
            np.add(right, np.bincount(named, minlength=classes), out=right)
            np.add(total, np.bincount(counted, minlength=classes), out=total)

        size, whole = self.fixed_batch or batch_size, self.fixed_batch is not None
        batches = in_batches(indices, size, whole=whole)
        found = evaluate(
            self.module,
            ([data[name][batch] for name in self._names] for batch in batches),
            scores=self._scores,
            labels=self._labels,
            ignored_label=self._ignored,
            on_labels=count,
        )
        self.module.train()
        loss = math.nan if found.loss is None else found.loss
        counts = tuple(right.tolist()), tuple(total.tolist())
        return ModelEvaluation(loss, *counts, found.losses, found.sizes)

    def _pull(self, origin: Mapping[str, Array], weight: float) -> None:
        """FedProx: add the gradient of ``weight / 2 * |w - origin|²``."""
        if not weight:
            return
        for name, parameter in self._proximal:
            gradient = parameter.grad
            if gradient is not None:
                gradient += weight * (parameter.data - origin[name])

    def _reset_optimizer(self, rate: float, saved: Mapping[str, Array] | None) -> None:
        """Start afresh, or go on from a saved state."""
        state = self.module.state.optimizer
        if state is None:
            raise AssertionError("an optimizer gives its state")
        if saved is not None:
            problem = mismatch(self.optimizer_state(), saved)
            if problem is not None:
                raise OdtpackError(
                    "fleet-arrays", f"The optimizer's state does not fit the package: {problem}."
                )
        state.step = 0 if saved is None else int(saved["step"])
        for name, own in state.moments.items():
            for index, moment in enumerate(own):
                moment[...] = 0 if saved is None else saved[f"{name}.{index}"]
        if saved is not None:
            for name in self._own.keys() & {*LOSS_SCALE_NAMES}:
                np.copyto(self._own[name][0], saved[name])
        self.optimizer.set_learning_rate(rate)


def mismatch(wanted: Mapping[str, Array], found: Mapping[str, Array]) -> str | None:
    """Say in which way arrays are not of the names, shapes and types that they should be."""
    for name in sorted(wanted.keys() ^ found.keys()):
        where = "missing" if name in wanted else "not one of the package"
        return f"'{name[:100]}' is {where}"
    for name, array in wanted.items():
        other = found[name]
        if (array.shape, array.dtype) != (other.shape, other.dtype):
            return (
                f"'{name}' is {other.dtype}{list(other.shape)[:8]} and should be "
                f"{array.dtype}{list(array.shape)}"
            )
    return None


_PIECES = 4  # Pieces of work per process and round: few, since each carries the parameters

OnClient = Callable[[int, int], None]
"""Called with the number of clients trained and of all in the round."""


@dataclass(frozen=True)
class Group:
    """Clients that train from the same parameters."""

    arrays: Arrays  # What the server sends
    round_number: int  # Number of the round in which it does
    clients: Sequence[tuple[int, Indices]]  # Number and samples of each


class ClientPool:
    """Trains clients; use it in a ``with`` statement."""

    # `executor`: Where they train; of one process at a time this one, with `trainer`.

    def __init__(
        self,
        trainer: LocalTrainer,
        package: Package,
        data: Mapping[str, Array],
        settings: LocalSettings,
        executor: Executor,
    ) -> None:
        self._trainer, self._package, self._data = trainer, package, data
        self._settings, self._executor = settings, executor
        self._sent: _Sent | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self._executor.jobs == 1 and not isinstance(self._executor, RayExecutor):
            return self
        with ExitStack() as opened:
            folder = Path(opened.enter_context(scratch_folder("fleet")))
            files, path = write_data(self._data, folder), self._package.path
            opened.enter_context(self._executor)
            shipments = self._executor.share([path, folder])
            self._sent = _Sent(uuid.uuid4().hex, str(path), files, shipments)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def train(
        self, groups: Sequence[Group], on_client: OnClient | None = None
    ) -> list[LocalUpdate]:
        """Train clients; their answers in the same order."""
        report = on_client or (lambda done, of: None)
        updates: list[LocalUpdate] = []
        count = sum(len(group.clients) for group in groups)
        if self._sent is None:
            for group in groups:
                for update in _updates(self._trainer, self._data, self._settings, group):
                    updates.append(update)
                    report(len(updates), count)
            return updates
        size = max(1, -(-count // (self._executor.jobs * _PIECES)))
        work = [
            (replace(group, clients=group.clients[at : at + size]), self._settings, self._sent)
            for group in groups
            for at in range(0, len(group.clients), size)
        ]
        for found in self._executor.in_order(_train, work):
            updates += found
            report(len(updates), count)
        return updates


@dataclass(frozen=True)
class _Sent:
    """What workers train: where it is here, and what it arrives in elsewhere."""

    key: str  # A worker opens it once for each key
    package: str  # Folder of the package
    files: Mapping[str, str]  # The data by name of input
    shipments: list[Any]  # References of Ray to both; none where workers see the files


_here: dict[str, Any] = {}  # The trainer and the data of a worker, and their key


def _train(piece: Group, settings: LocalSettings, sent: _Sent) -> list[LocalUpdate]:
    if _here.get("key") != sent.key:
        with scratch_folder("ray") as folder:
            package, files = sent.package, dict(sent.files)
            if sent.shipments:
                import ray

                arrived = [ray.get(each) for each in sent.shipments]
                moved = {each.origin: each.unpack(Path(folder)) for each in arrived}
                package, files = relocate((package, files), moved)
            data = {
                name: np.load(path, mmap_mode=None if sent.shipments else "r", allow_pickle=False)
                for name, path in files.items()
            }
            _here.update(key=sent.key, trainer=LocalTrainer(Package.open(package)), data=data)
    return list(_updates(_here["trainer"], _here["data"], settings, piece))


def _updates(
    trainer: LocalTrainer, data: Mapping[str, Array], settings: LocalSettings, group: Group
) -> Iterator[LocalUpdate]:
    for number, indices in group.clients:
        yield trainer.train(
            group.arrays,
            data,
            indices,
            settings,
            round_number=group.round_number,
            client=number,
            simulated=True,
        )
