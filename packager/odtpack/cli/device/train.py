"""``odtpack train``: train a package on this machine, as an app would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from odtpack.cli import _console
from odtpack.cli._options import Count, Json, PositiveCount

if TYPE_CHECKING:
    from odtpack.privacy import PrivateRecord
    from odtpack_runtime import Package
    from odtpack_runtime.training.loop import Evaluation

EPOCHS_PROPERTY = "odtpack.epochs"
"""Property of a checkpoint: passes over the data made so far."""


def train(
    package: Path,
    *,
    data: Path,
    epochs: PositiveCount = 5,
    batch_size: PositiveCount | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    recipe: Path | None = None,
    seed: Count = 0,
    holdout: float | None = None,
    evaluation: Path | None = None,
    resume: Path | None = None,
    delta: float | None = None,
    activations: Path | None = None,
    out: Path | None = None,
) -> Json:
    """Train a package on this machine and save a checkpoint.

    The checkpoint includes the optimizer's state, so that --resume continues exactly. It is
    written after every epoch: a stopped training keeps its finished epochs. The package is not
    changed. The previous save is kept as CK.previous; --resume CK uses it, with a warning, if
    CK is damaged.

    Parameters:
        lr X: Learning rate; the initial one if there is a schedule. [default: 0.001, or that of the
            package's schedule or of --resume]
        schedule KIND[:KEY=X,...]: Schedule of the learning rate, as for odtpack build, or none.
            [default: that of --resume, or the package's]
        recipe recipe.toml: Recipe whose [data] says how texts become samples. Default: recipe.toml,
            if the data are texts.
        resume CK: Checkpoint to resume. [default: the package's]
        delta X: Private training: delta of the printed epsilon. [default: a tenth of 1 / training
            samples]
        activations DIR: Folder for a temporary file that holds activations between segments,
            instead of memory.
        out CK: Trained checkpoint to write. [default: PKG.ckpt, beside the package]
        json: Print losses as JSON on stdout.

    Examples:
        odtpack train package --data digits.npz --epochs 5 --out trained.ckpt
        odtpack train package --data more.npz --resume trained.ckpt --out further.ckpt
        odtpack train package --data digits.npz --lr 0.003 --schedule cosine:warmup=20,floor=0.1
    """
    import numpy as np
    import onnxruntime

    from odtpack.cli import _fit
    from odtpack.cli._files import check_share, check_writable, find_recipe
    from odtpack.cli.data import as_samples
    from odtpack.privacy import PrivateRecord
    from odtpack_runtime import CheckpointState, OdtpackError, Optimizer, Package
    from odtpack_runtime.files.atomic import refuse_link
    from odtpack_runtime.package.self_check import cannot_teach
    from odtpack_simulator.replay.job import split, step_count

    opened = Package.open(package)
    opened.require_stock()
    _check_delta(opened, delta)
    if activations is not None and opened.manifest.segments is None:
        what = "--activations needs a package with segments"
        hint = "leave --activations out, or build the package with --segments"
        raise OdtpackError("segments-missing", what, where=str(opened.path), hint=hint)
    share = check_share(holdout, other=evaluation)
    target = out or opened.path.with_name(f"{opened.path.name}.ckpt")
    read = find_recipe(recipe, wanted=data.suffix == ".jsonl")
    check_writable(target, "--out", [data, evaluation, read.path if read else None], outside=opened)
    refuse_link(target)  # now, and not when it is trained
    size = _fit.choose_batch_size(opened, batch_size)
    whole = opened.manifest.fixed_batch is not None
    with as_samples(read, data, evaluation) as (given, others):
        arrays = opened.load_data(given)
        held_out = None if others is None else opened.load_data(others)
    parts = split(len(next(iter(arrays.values()))), share, seed)

    state = CheckpointState.load_checkpoint(resume or opened.checkpoint)
    if opened.manifest.privacy is None:  # nodes with a generator of their own begin with it
        onnxruntime.set_seed(seed)
    module = _fit.open_module(opened, state, activations)
    optimizer = Optimizer(opened.optimizer_model, module)
    made = dict(state.properties).get(EPOCHS_PROPERTY, 0)
    before_epochs = made if isinstance(made, int) and made >= 0 else 0
    record = PrivateRecord(optimizer, min(1.0, size / max(len(parts.train), 1)))
    steps = epochs * step_count(len(parts.train), size, module.accumulation_steps, whole=whole)
    scheduler = _fit.choose_scheduler(optimizer, opened.manifest, schedule, lr, steps)

    if held_out is None:
        tested, indices = arrays, parts.held_out if len(parts.held_out) else parts.train
    else:
        # In the file's order, as simulate does: where losses weigh samples, batches matter.
        tested, indices = held_out, np.arange(len(next(iter(held_out.values()))))
    on = "held-out" if held_out is not None or len(parts.held_out) else "training"
    # What fills no batch of a fixed size is not evaluated.
    tested_count = len(indices) - len(indices) % (size if whole else 1)
    of = "" if tested_count == len(indices) else f" of {len(indices)}"

    def evaluate() -> Evaluation:
        with _hinting_at(evaluation or data):
            return _fit.evaluate(opened, module, tested, indices, size)

    accumulated = f" x {module.accumulation_steps}" if module.accumulation_steps > 1 else ""
    rate = f"{optimizer.get_learning_rate():g}"
    if scheduler is not None:
        full = f"{scheduler.initial_lr:g}"
        begins = "" if rate == full else f", begins at {rate}"
        if schedule is not None and 0 < scheduler.schedule.warmup_steps <= optimizer.step_count:
            begins += f", its warm-up over after {optimizer.step_count:,} steps"
        rate = f"{full} ({scheduler.schedule.kind} schedule{begins})"
    _console.say(
        f"training on {len(parts.train)} samples, batches of {size}{accumulated}, learning rate "
        f"{rate}; evaluating on {tested_count}{of} {on} samples"
    )
    before = evaluate()
    count = min(size, len(indices))
    if before.loss is not None:
        batch = [array[indices[:count]] for array in tested.values()]
        problem = cannot_teach(module, batch, opened.manifest.inputs)
        if problem is not None:
            _console.say(f"warning: {problem}: nothing can be learned from it", style="yellow")
    _console.say(f"before       {_figures(before)}")
    history: list[_fit.Epoch] = []

    with _hinting_at(data), _console.Progress("training") as progress:
        for epoch in _fit.fit(
            module,
            optimizer,
            arrays,
            parts.train,
            batch_size=size,
            epochs=epochs,
            seed=seed,
            whole=whole,
            first_epoch=before_epochs,
            scheduler=scheduler,
            on_step=progress.update,
        ):
            history.append(epoch)
            # A training that is stopped keeps the epochs of which it said so.
            state.properties[EPOCHS_PROPERTY] = before_epochs + len(history)
            record.keep()
            CheckpointState.save_checkpoint(
                state, target, include_optimizer_state=True, keep_previous=True
            )
            progress.line(f"epoch {epoch.number:>4}   loss {epoch.loss:.4f}")
            if epoch.skipped:
                many = "1 batch" if epoch.skipped == 1 else f"{epoch.skipped:,} batches"
                progress.line(f"  {many} skipped; the last: {epoch.reason}")
    after = evaluate()
    _console.say(f"after        {_figures(after)}")
    private = optimizer.privacy is not None
    guarantee = _guarantee(record, delta or 0.1 / len(parts.train)) if private else None
    _console.wrote(target)
    content: dict[str, Any] = {
        "checkpoint": str(target),
        "train_samples": len(parts.train),
        "eval_samples": tested_count,
        "eval_on": on,
        "batch_size": size,
        "learning_rate": float(f"{optimizer.get_learning_rate():.7g}"),  # a float32
        "schedule": None if scheduler is None else scheduler.schedule.kind,
        "seed": seed,
        "steps": optimizer.step_count,
        **({} if guarantee is None else {"privacy": guarantee}),
        "epochs": [
            {"epoch": epoch.number, "loss": epoch.loss}
            | ({"skipped_batches": epoch.skipped} if epoch.skipped else {})
            for epoch in history
        ],
        "eval_loss_before": before.loss,
        "eval_loss_after": after.loss,
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
    }
    if after.tokens:
        content["perplexity_before"] = before.perplexity
        content["perplexity_after"] = after.perplexity
        content["eval_tokens"] = sum(after.tokens)
    if after.means:
        content |= {"means_before": before.means, "means_after": after.means}
    return content


@contextmanager
def _hinting_at(data: Path) -> Iterator[None]:
    """Let the hint of a run that failed be about the data, unless it lacked memory."""
    from odtpack_runtime import OdtpackError
    from odtpack_runtime.errors import out_of_memory

    try:
        yield
    except OdtpackError as error:
        if error.code == "run-failed" and not out_of_memory(error):
            error.hint = (
                f"look at the values and lengths of the inputs in {data}: indices must lie within "
                "the model's tables"
            )
        raise


def _check_delta(package: Package, delta: float | None) -> None:
    from odtpack.errors import OdtpackError
    from odtpack.privacy import check_delta

    if delta is not None and package.manifest.privacy is None:
        what = "--delta needs a package of private training"
        hint = "leave --delta out, or build the package with --privacy-clip"
        raise OdtpackError("option-not-used", what, where=str(package.path), hint=hint)
    if delta is not None:
        check_delta(delta)


def _guarantee(record: PrivateRecord, delta: float) -> Json:
    """What a private training promises, said and returned."""
    # The steps before `--resume` count as if they had been made on the same data.
    from odtpack.errors import OdtpackError
    from odtpack.privacy import epsilon_of

    found, made = None, record.steps()
    if made is None:
        _console.say(
            "privacy      epsilon unknown: how the checkpoint's earlier steps were made is not "
            "recorded",
            style="yellow",
        )
        return {"epsilon": None, "delta": delta, "sampling_rate": None}
    try:
        found = epsilon_of(made, delta)
    except OdtpackError as error:
        if error.code != "privacy-not-installed":
            raise
        _console.say(f"privacy      {error.what}: {error.hint}")
    else:
        parts = [f"{part.steps} steps with {part.sampling_rate:.3g} of the samples in each"
                 for part in made]  # fmt: skip
        _console.say(
            f"privacy      epsilon {found:.4g} at delta {delta:g} for each sample "
            f"({', '.join(parts)}); the losses above are not private"
        )
    finite = found is not None and math.isfinite(found)
    return {"epsilon": found if finite else None, "delta": delta,
            "sampling_rate": made[-1].sampling_rate}  # fmt: skip


def _figures(figures: Evaluation) -> str:
    from odtpack_simulator.values.units import format_percent

    if figures.loss is None:
        return "eval loss unknown: fewer samples than a batch"
    share = figures.accuracy
    accuracy = "" if share is None else f"   accuracy {format_percent(share)}"
    if figures.perplexity is not None:
        tokens = sum(figures.tokens)
        accuracy += f"   perplexity {figures.perplexity:.4g} of {tokens:,} tokens"
    further = "".join(f"   {name} {mean:.4f}" for name, mean in figures.means.items())
    return f"eval loss {figures.loss:.4f}{accuracy}{further}"


# ``odtpack privacy``: what private training promises.


def privacy(
    *,
    noise: Annotated[float, ("min", 0)],
    samples: PositiveCount,
    batch_size: PositiveCount = 32,
    epochs: PositiveCount = 5,
    delta: float | None = None,
) -> Json:
    """Print the epsilon of private training. Nothing is trained.

    It bounds what the trained parameters reveal of one sample. It holds if samples are drawn
    independently, as odtpack train does. Computed by Rényi differential privacy (dp-accounting).

    Parameters:
        noise S: Noise multiplier, as for --privacy-noise.
        samples: Samples to train on.
        batch_size B: Expected batch size.
        epochs E: Passes over the samples.
        delta X: Delta: allowed probability of failure. [default: a tenth of 1 / N]

    Examples:
        odtpack privacy --noise 1.1 --samples 60000 --batch-size 256 --epochs 15
    """
    from odtpack.privacy import epsilon

    rate = min(1.0, batch_size / samples)
    steps = epochs * math.ceil(samples / batch_size)
    chosen = 0.1 / samples if delta is None else delta
    found = epsilon(noise, rate, steps, chosen)
    _console.results()
    without = "" if math.isfinite(found) else ": without noise, nothing is private"
    _console.say(f"epsilon {found:.4g} at delta {chosen:g}, {steps} steps{without}")
    content = {"epsilon": found, "delta": chosen, "sampling_rate": rate, "steps": steps}
    return content
