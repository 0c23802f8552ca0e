"""Interrupt a training on purpose, again and again, and see whether it ends with the same bits.

The training runs in a process of its own, which is really killed (SIGKILL), between two steps
or in the middle of a save, while the temporary file holds a part of the checkpoint. A new
process goes on from the last whole one. On a low-memory warning the process lives, saves,
gives its memory back and starts anew. At the end every parameter, running statistic and moment
is compared, bit by bit, with those of an uninterrupted training.
"""

import dataclasses
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import onnx

from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks import read_model
from odtpack_simulator.replay.job import Job, Message, check_whole, load_position, run_digest
from odtpack_simulator.replay.paired_loss import first_difference
from odtpack_simulator.replay.replay import OnMessage, run_child, run_training_child
from odtpack_simulator.result import Interruption, InterruptionInfo
from odtpack_simulator.values.units import format_bytes

Kind = Literal["step", "save", "memory warning"]

MAX_INTERRUPTIONS = 10_000
_KINDS: tuple[Kind, ...] = ("step", "save", "memory warning")  # in the order in which they happen
_SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has one way to end a process


@dataclass(frozen=True, slots=True)
class Planned:
    """An interruption to come."""

    at: Kind  # What happens
    step: int  # After how many optimizer steps
    # For `save`, how much of the tensors' bytes is written by then, from 0 to 1.
    share: float | None = None


@dataclass(slots=True)
class _Log:
    # Those after which the training has begun again.
    interruptions: list[Interruption] = field(default_factory=list)
    # Kind and step of the one after which it has not yet.
    interrupted: tuple[Kind, int] | None = None
    saves: int = 0  # Number of whole saves
    # Bytes in the temporary file at each kill in a save.
    torn: list[int] = field(default_factory=list)
    # Bytes of memory before and after each low-memory warning.
    freed: list[tuple[int, int]] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Enter what a child reports."""
        match message["event"]:
            case "saved":
                self.saves += 1
            case "freed":
                self.interrupted = ("memory warning", message["step"])
                if message["before_bytes"] is not None:
                    self.freed.append((message["before_bytes"], message["after_bytes"]))
            case "begun" if self.interrupted is not None:
                (at, step), again = self.interrupted, message["step"]
                self.interruptions.append(
                    Interruption(
                        at=at, step=step, resumed_from_step=again, repeated_steps=step - again
                    )
                )
                self.interrupted = None


def plan_interruptions(steps: int, save_every: int, count: int, seed: int) -> list[Planned]:
    """Choose interruptions, in the order in which they will happen."""
    # Each kind comes equally often, as far as the training has a place for it, at steps drawn from
    # the seed.
    # `save_every`: Optimizer steps between two saves; the last step saves as well.
    random = np.random.default_rng([seed, 0x1A7E])
    saves = [*range(save_every, steps, save_every), steps]
    plan = []
    for index in range(count):
        kind = _KINDS[index % len(_KINDS)]
        if kind == "save":
            plan.append(Planned(kind, int(random.choice(saves)), float(random.random())))
        elif kind == "step" or steps == 1:  # no warning matters after the last step
            plan.append(Planned("step", int(random.integers(1, steps + 1))))
        else:
            plan.append(Planned(kind, int(random.integers(1, steps))))
    return sorted(plan, key=lambda each: (each.step, _KINDS.index(each.at), each.share or 0.0))


def interrupt(
    job: Job,  # What to train, without a memory limit. `keep_checkpoint` is only read
    *,
    seed: int,
    count: int,
    save_every: int,
    on_message: OnMessage | None = None,
) -> InterruptionInfo:
    """Train with interruptions and compare the end with that of an undisturbed training."""
    # The undisturbed one is the checkpoint that the same job left at its `keep_checkpoint`; where
    # there is none, it is trained here.
    # `on_message`: Called with every message of the children; steps come again after a kill.
    for what, value, least, most in (
        ("number of interruptions", count, 0, MAX_INTERRUPTIONS),
        ("number of steps between two saves", save_every, 1, 2**31 - 1),
        ("seed", seed, 0, 2**31 - 1),
    ):
        check_whole("bad-interruptions", what, value, least, most)
    with tempfile.TemporaryDirectory(prefix="odtpack-interrupt-", dir=job.folder) as folder:
        free = dataclasses.replace(job, task="train", evaluate=False, limit_bytes=None)
        undisturbed = _undisturbed(free, Path(folder) / "undisturbed")
        disturbed = dataclasses.replace(
            free, folder=folder, keep_checkpoint=None, save_every=save_every, resume=True
        )
        log = _Log()
        pending = list(plan_interruptions(job.steps, save_every, count, seed))
        while True:
            kills = (i for i, each in enumerate(pending) if each.at != "memory warning")
            until = next(kills, len(pending))
            warnings = [each.step for each in pending[:until]]
            kill = pending[until] if until < len(pending) else None
            _run(disturbed, warnings, kill, log, on_message)
            del pending[: until + 1]
            if kill is None:
                break
        ends = [read_checkpoint(undisturbed), read_checkpoint(disturbed.saved_checkpoint)]
        odd = first_difference(*ends)
    own = unrepeatable_operators(job.training_model) if odd is not None else None
    return InterruptionInfo(
        interruptions=log.interruptions,
        save_every=save_every,
        saves=log.saves,
        equal=None if own is not None else odd is None,
        detail=_detail(odd, own, log),
    )


def _undisturbed(job: Job, folder: Path) -> Path:
    """The checkpoint at the end of the uninterrupted training."""
    kept = job.saved_checkpoint
    if job.keep_checkpoint is not None and kept.is_file():
        position = load_position(CheckpointState.load_checkpoint(kept), job, run_digest(job))
        if position.step != job.steps:
            raise OdtpackError(
                "bad-position",
                f"The checkpoint stands at step {position.step}, and the training ends at "
                f"{job.steps}.",
                where=str(kept),
            )
        return kept
    folder.mkdir()
    alone = dataclasses.replace(job, folder=str(folder), keep_checkpoint=None)
    result = run_training_child(alone)
    if result.outcome != "completed":
        raise _failed(f"the undisturbed training was not completed: {result.detail}")
    return alone.saved_checkpoint


def _run(
    job: Job,
    warnings: Sequence[int],
    kill: Planned | None,
    log: _Log,
    on_message: OnMessage | None,
) -> None:
    """Run one process, to the place where it is to be killed or to the end."""
    job = dataclasses.replace(
        job,
        memory_warnings=list(warnings),
        pause_at=kill.step if kill else None,
        pause_in_save=kill.share if kill else None,
    )
    reached = "paused" if kill else "trained"
    seen: dict[str, Message] = {}
    with closing(run_child(job)) as messages:
        for message in messages:
            seen[message["event"]] = message
            log.take(message)
            if message["event"] == "paused" and kill is not None:
                pid = seen["started"]["pid"]
                if kill.at == "save":  # its temporary file is there, and under way
                    target = job.saved_checkpoint
                    files = list(target.parent.glob(f".{target.name}.{pid}-*.tmp"))
                    if not files:
                        raise _failed(
                            "the process stopped in a save, and no part of it is on the disk"
                        )
                    log.torn.append(files[0].stat().st_size)
                log.interrupted = (kill.at, message["step"])
                os.kill(pid, _SIGKILL)
            if on_message is not None:
                on_message(message)
    code = seen["exit"]["code"]
    if reached not in seen or (code == 0) == (kill is not None):
        reason = seen.get("out-of-memory", {}).get("message") or seen["exit"]["stderr"]
        raise _failed(f"a training process ended with exit code {code}: {reason}")


def _detail(odd: str | None, own: str | None, log: _Log) -> str:
    """What there is to say, for people."""
    said = []
    if own is not None:
        said.append(
            f"{own} draws random numbers from a generator that starts anew with every session: "
            "after an interruption the training draws others"
        )
    if odd is not None:
        said.append(f"the first difference is in {odd}")
    if log.torn:
        least, most = format_bytes(min(log.torn)), format_bytes(max(log.torn))
        sizes = least if least == most else f"{least} to {most}"
        said.append(f"saves were killed with {sizes} of the checkpoint written")
    if log.freed:
        before, after = max(log.freed)
        said.append(
            f"on a low-memory warning the training's memory went from {format_bytes(before)} "
            f"to {format_bytes(after)}"
        )
        kept = sum(after >= before for before, after in log.freed)
        if kept:
            said.append(f"on {kept} of {len(log.freed)} warnings it did not go down")
    return "; ".join(said)


def _failed(problem: str) -> OdtpackError:
    return OdtpackError("interruption-failed", f"The interruption did not go as planned: {problem}")


# Which nodes of a model draw random numbers that no seed from outside repeats.

OWN_GENERATOR: Final = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"),
        *("RandomUniform", "RandomUniformLike"),
    }
)
"""Operators whose kernel in ONNX Runtime keeps a generator of its own, seeded when it loads."""


def unrepeatable_operators(model: str | os.PathLike[str]) -> str | None:
    """Name a node that draws from a generator inside the session, None if there is none."""
    # Dropout without the attribute `seed` is none: it draws from the process's generator, which
    # `onnxruntime.set_seed` sets before every batch.
    proto = read_model(Path(model))
    for node in _walk([proto.graph.node, *(function.node for function in proto.functions)]):
        if node.op_type in OWN_GENERATOR:
            return f"{node.op_type} '{node.name}'"
        if node.op_type == "Dropout" and any(a.name == "seed" for a in node.attribute):
            return f"Dropout '{node.name}' with the attribute seed"
    return None


def _walk(bodies: Iterable[Iterable[onnx.NodeProto]]) -> Iterator[onnx.NodeProto]:
    for body in bodies:
        for node in body:
            yield node
            for attribute in node.attribute:
                yield from _walk(graph.node for graph in (attribute.g, *attribute.graphs))
