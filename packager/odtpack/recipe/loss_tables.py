"""``[loss]`` of a recipe: each loss and its options.

The keys are the fields of the losses, with the same defaults; a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from odtpack.recipe.ranges import Count, NotNegative, Positive, Share, Switch, Table, Whole
from odtpack.recipe.variants import by_kind
from odtpack_simulator.values.schema_errors import TAG_PREFIX

_Weights = Annotated[tuple[NotNegative, ...], Field(min_length=1)]


class _Loss(Table):
    inputs: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Values that the loss reads, in its order; further ones take the place of its targets.
    Without it, the first outputs."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the terms become one number."""


class NoneTable(Table):
    """The first output is the loss."""

    kind: Literal["none"]


class NLLTable(_Loss):
    """Negative log-likelihood of labels, from log-probabilities."""

    kind: Literal["nll"]
    weight: _Weights | None = None
    """A number for each class."""
    ignore_index: Whole | None = None
    """Label of samples that do not count."""


class CrossEntropyTable(_Loss):
    """Cross-entropy of labels, from logits."""

    kind: Literal["cross_entropy"]
    weight: _Weights | None = None
    """A number for each class."""
    ignore_index: Whole | None = None
    """Label of samples that do not count."""
    label_smoothing: Share = 0.0
    """How much of a label is spread over all classes."""


class MeanSquaredErrorTable(_Loss):
    """Mean squared error."""

    kind: Literal["mse"]


class MeanAbsoluteErrorTable(_Loss):
    """Mean absolute error."""

    kind: Literal["l1"]


class HuberTable(_Loss):
    """Squares up to a difference, and a straight line beyond."""

    kind: Literal["huber"]
    delta: Positive = 1.0
    """The difference."""


class SmoothL1Table(_Loss):
    """Huber's loss divided by the difference."""

    kind: Literal["smooth_l1"]
    beta: Positive = 1.0
    """The difference."""


class BinaryCrossEntropyTable(_Loss):
    """Cross-entropy of yes or no, from logits."""

    kind: Literal["bce_with_logits"]
    weight: _Weights | NotNegative | None = None
    """Factor of the terms."""
    pos_weight: _Weights | NotNegative | None = None
    """Factor of the terms of a yes."""


class KLDivergenceTable(_Loss):
    """Divergence from a teacher."""

    kind: Literal["kl_div"]
    temperature: Positive = 1.0
    """Divides the logits."""
    teacher: Literal["logits", "probabilities"] = "logits"
    """What the target holds."""


class DistillationTable(_Loss):
    """Divergence from a teacher, and cross-entropy of labels."""

    kind: Literal["distillation"]
    alpha: Share = 0.5
    """How much the teacher counts."""
    temperature: Positive = 2.0
    """Divides the logits."""
    teacher: Literal["logits", "probabilities"] = "logits"
    """What the target holds."""
    ignore_index: Whole | None = None
    """Label of samples that do not count."""


class TripletMarginTable(_Loss):
    """An anchor is to be nearer to the positive than to the negative."""

    kind: Literal["triplet_margin"]
    margin: Positive = 1.0
    """By how much."""
    p: Literal[1, 2] = 2
    """Norm of the distance."""
    swap: Switch = False
    """Whether the distance of positive and negative counts where it is less."""


class ContrastiveTable(_Loss):
    """Pairs are to be near each other, or apart."""

    kind: Literal["contrastive"]
    margin: Positive = 1.0
    """How far apart."""


class InfoNCETable(_Loss):
    """Each query is to find its key among those of the batch."""

    kind: Literal["info_nce"]
    temperature: Positive = 0.07
    """Divides the products."""
    normalize: Switch = True
    """Whether embeddings are brought to length 1."""
    symmetric: Switch = False
    """Whether keys are to find their queries, too."""


class CTCTable(_Loss):
    """Connectionist temporal classification."""

    kind: Literal["ctc"]
    blank: Count = 0
    """Class that stands for no label."""
    layout: Literal["TNC", "NTC"] = "TNC"
    """Axes of the prediction."""


LossTable = Annotated[
    Annotated[NoneTable, Tag(f"{TAG_PREFIX}none")]
    | Annotated[CrossEntropyTable, Tag(f"{TAG_PREFIX}cross_entropy")]
    | Annotated[MeanSquaredErrorTable, Tag(f"{TAG_PREFIX}mse")]
    | Annotated[BinaryCrossEntropyTable, Tag(f"{TAG_PREFIX}bce_with_logits")]
    | Annotated[MeanAbsoluteErrorTable, Tag(f"{TAG_PREFIX}l1")]
    | Annotated[HuberTable, Tag(f"{TAG_PREFIX}huber")]
    | Annotated[SmoothL1Table, Tag(f"{TAG_PREFIX}smooth_l1")]
    | Annotated[NLLTable, Tag(f"{TAG_PREFIX}nll")]
    | Annotated[KLDivergenceTable, Tag(f"{TAG_PREFIX}kl_div")]
    | Annotated[DistillationTable, Tag(f"{TAG_PREFIX}distillation")]
    | Annotated[TripletMarginTable, Tag(f"{TAG_PREFIX}triplet_margin")]
    | Annotated[ContrastiveTable, Tag(f"{TAG_PREFIX}contrastive")]
    | Annotated[InfoNCETable, Tag(f"{TAG_PREFIX}info_nce")]
    | Annotated[CTCTable, Tag(f"{TAG_PREFIX}ctc")],
    Discriminator(by_kind),
]
