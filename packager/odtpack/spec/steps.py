"""How it is trained: what the loss reads, the optimizer and all that a step does."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from odtpack.spec.option import Group, given, read_groups, read_options, read_schedule
from odtpack.spec.trained import TrainedSpec

if TYPE_CHECKING:
    from odtpack_runtime.training.schedules import ScheduleSpec


@dataclasses.dataclass(frozen=True)
class StepsSpec(TrainedSpec):
    """What is trained, and how."""

    loss_inputs: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "loss.inputs",
            "--loss-input",
            "Value that the loss reads: predictions, then values in the place of its target "
            "inputs; may be repeated. Default: the first outputs.",
            metavar="NAME",
        ),
    )
    outputs: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "outputs",
            "--output",
            "Further value that the models return; may be repeated.",
            "Further values that the training and evaluation models return.",
            metavar="NAME",
        ),
    )
    prediction: bool = dataclasses.field(
        default=True,
        metadata=given(
            "prediction",
            "--no-prediction",
            "Let the evaluation model return the loss only, and not the prediction that it "
            "compares with labels: no accuracy then.",
            "Whether the evaluation model returns what the loss compares with labels: for "
            "accuracy.",
        ),
    )
    optimizer_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata=given("optimizer", read=read_options)
    )
    """Settings of the optimizer that are not the defaults."""
    clip_norm: float | None = dataclasses.field(
        default=None,
        metadata=given(
            "clip.norm",
            "--clip-norm",
            "Clip gradients by the norm of all of them together.",
            metavar="X",
        ),
    )
    clip_value: float | None = dataclasses.field(
        default=None,
        metadata=given(
            "clip.value", "--clip-value", "Clip each element of the gradients.", metavar="X"
        ),
    )
    privacy_clip: float | None = dataclasses.field(
        default=None,
        metadata=given(
            "privacy.clip_norm",
            "--privacy-clip",
            "Train privately (DP-SGD): clip the gradient of each sample to this norm, and add "
            "noise.",
            "Norm that the gradient of each sample is clipped to.",
            metavar="C",
        ),
    )
    privacy_noise: float = dataclasses.field(
        default=1.0,
        metadata=given(
            "privacy.noise_multiplier",
            "--privacy-noise",
            "Standard deviation of that noise, times C; odtpack privacy says what it promises.  "
            "[default: 1]",
            "Standard deviation of the noise as a multiple of `clip_norm`.",
            metavar="S",
        ),
    )
    groups: tuple[Group, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "groups",
            "--group",
            "Parameters with a learning rate times X, or a weight decay of X; may be repeated, the "
            "first pattern that matches counts.",
            metavar="GLOB:lr=X,decay=X",
            read=read_groups,
        ),
    )
    decay_vectors: bool = dataclasses.field(
        default=True,
        metadata=given(
            "optimizer.decay_vectors",
            "--no-vector-decay",
            "No weight decay for biases, scales of normalizations and other vectors.",
        ),
    )
    accumulation_steps: int = dataclasses.field(
        default=1,
        metadata=given(
            "batch.accumulation_steps",
            "--accumulate",
            "Batches whose gradients make one optimizer step.  [default: 1]",
            metavar="K",
        ),
    )
    schedule: "ScheduleSpec | None" = dataclasses.field(
        default=None,
        metadata=given(
            "schedule",
            "--schedule",
            "Schedule of the learning rate that training uses: constant, linear, cosine, step or "
            "multistep, as in cosine:warmup=100,total=1000,floor=0.1,lr=0.003. Without total it "
            "runs over the whole training.",
            metavar="KIND[:KEY=X,...]",
            read=read_schedule,
        ),
    )
