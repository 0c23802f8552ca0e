"""What is trained: a model with its loss, which of its parameters, and an adapter."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odtpack.choices import AdapterKind
from odtpack.spec.option import Head, given, read_head, read_options


@dataclasses.dataclass(frozen=True)
class TrainedSpec:
    """What is trained, in plain values; the options' order is that of --help."""

    model: Path
    """Path of the forward model: of it, its content decides."""
    loss: str = dataclasses.field(metadata=given("loss.kind"))
    """Name of the loss; ``none`` if the first output is the loss."""
    head: Head | None = dataclasses.field(default=None, metadata=given("head", read=read_head))
    """The head that the model is given first."""
    loss_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata=given("loss", read=read_options)
    )
    """Its options that are not the defaults."""
    optimizer: str = dataclasses.field(default="adamw", metadata=given("optimizer.kind"))
    """Name of the optimizer."""
    train: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "parameters.train",
            "--train",
            "Parameters to train; may be repeated. Default: all that are not frozen.",
            "Patterns of the parameters to train.",
            metavar="GLOB",
        ),
    )
    freeze: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "parameters.freeze",
            "--freeze",
            "Parameters to freeze; may be repeated. Default: all that are not trained. With both, "
            "what neither matches stays a constant inside the models.",
            "Patterns of the parameters to freeze.",
            metavar="GLOB",
        ),
    )
    untie: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "parameters.untie",
            "--untie",
            "Tensors that several places of the model read, to give each place its own; may be "
            "repeated. odtpack inspect lists them.",
            "Patterns of tensors that several places read, to give each place its own.",
            metavar="GLOB",
        ),
    )
    adapter: AdapterKind | None = dataclasses.field(
        default=None,
        metadata=given(
            "adapter.kind",
            "--adapter",
            "Train a small adapter and freeze the model: low-rank matrices beside layers (lora), "
            "with magnitudes (dora), factors (ia3), the biases alone (bitfit), or vectors before "
            "the tokens (prompt).",
            "What the adapter is: low-rank matrices beside layers (`lora`), with magnitudes "
            "(`dora`), factors of layers (`ia3`), the biases that layers have (`bitfit`), or "
            "vectors before the tokens of every sequence (`prompt`).",
        ),
    )
    adapter_on: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "adapter.on",
            "--on",
            "Layers that the adapter goes on, by name without .weight; may be repeated.",
            "Patterns of the layers that it goes on, by their names without `.weight`. Without "
            "any, `bitfit` takes all. `prompt` goes on none.",
            metavar="GLOB",
        ),
    )
    adapter_feedforward: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "adapter.feedforward",
            "--feedforward",
            "ia3: of those layers, the ones whose input is scaled and not their output; may be "
            "repeated.",
            "`ia3`: patterns of those layers of which the input is scaled and not the output.",
            metavar="GLOB",
        ),
    )
    adapter_rank: int = dataclasses.field(
        default=8,
        metadata=given(
            "adapter.rank",
            "--rank",
            "lora, dora: rank of the matrices.  [default: 8]",
            "`lora`, `dora`: rank of the matrices.",
            metavar="R",
        ),
    )
    adapter_alpha: float = dataclasses.field(
        default=16.0,
        metadata=given(
            "adapter.alpha",
            "--alpha",
            "lora, dora: their product counts alpha / rank times.  [default: 16]",
            "`lora`, `dora`: their product counts `alpha / rank` times.",
            metavar="X",
        ),
    )
    adapter_dropout: float = dataclasses.field(
        default=0.0,
        metadata=given(
            "adapter.dropout",
            "--adapter-dropout",
            "lora: share of the layer's inputs that the matrices do not see in a training step.",
            "`lora`: share of the layer's inputs that the matrices do not see in a training step.",
            metavar="X",
        ),
    )
    adapter_seed: int = dataclasses.field(
        default=0,
        metadata=given(
            "adapter.seed",
            "--adapter-seed",
            "lora, dora: seed of the first matrix, the second begins as zero; prompt: of the "
            "vectors.",
            "`lora`, `dora`: seed of the first matrix, the second begins as zero; `prompt`: of the "
            "vectors.",
            metavar="S",
        ),
    )
    adapter_tokens: int = dataclasses.field(
        default=8,
        metadata=given(
            "adapter.tokens",
            "--prompt-tokens",
            "prompt: vectors before the tokens of every sequence.  [default: 8]",
            "`prompt`: vectors before the tokens of every sequence.",
            metavar="N",
        ),
    )
