"""What a runtime must know beside the models: sessions, memory, export, a check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from odtpack_runtime.files.records import InvalidRecordError, Part, Path, Rule
from odtpack_runtime.package.manifest_base import FixedShape, Name, NonNegativeInt, PositiveInt

OptimizationLevel = Literal["disabled", "basic", "extended", "all"]


@dataclass(frozen=True, kw_only=True)
class SessionInfo(Part):
    """The options of ONNX Runtime for every session of a package.

    Attributes:
        optimization_level: How far ONNX Runtime rewrites the graphs when it loads them.
        memory_pattern: Whether it plans one block for the memory of a run.
        arena: Whether it keeps freed memory for the next allocation.
        shared_allocator: Whether all sessions take their memory from one allocator of the
            environment.
        prepacking: Whether constant weights are copied into a layout of their kernel's.
        threads: Threads within an operator; None for ONNX Runtime's choice.
        config: Entries of the session's configuration.
    """

    optimization_level: OptimizationLevel
    memory_pattern: bool = True
    arena: bool = True
    shared_allocator: bool = False
    prepacking: bool = True
    threads: PositiveInt | None = None
    config: dict[Name, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StateInfo(Part):
    """A vector that the optimizer keeps; ``axes`` (0 rows, 1 columns) of a matrix's only."""

    name: Name
    axes: Annotated[tuple[Literal[0, 1], ...], Rule(maxItems=2)] | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutInfo(Part):
    """The flat vectors, and how the optimizer model is run over them.

    Attributes:
        dtype: Element type of parameters, gradients and state.
        elements: Length of the vectors of parameters and gradients, with the gaps.
        run: In chunks of ``chunk_elements``, over the whole, or parameter by parameter.
        chunk_elements: Elements of a chunk.
        inputs: Inputs of the optimizer model.
        state: What the optimizer keeps, in the order of a checkpoint's ``momentum0``,
            ``momentum1`` and so on.
    """

    dtype: Literal["float32", "float64"]
    elements: NonNegativeInt
    run: Literal["chunks", "whole", "parameters"]
    chunk_elements: PositiveInt
    inputs: tuple[Name, ...]
    state: tuple[StateInfo, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InferenceInfo(Part):
    """Inputs and outputs of the inference template, and the parameters that it lacks."""

    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    parameters: tuple[Name, ...]


@dataclass(frozen=True, kw_only=True)
class SelfCheckInput(Part):
    """An input of the self-check; whole numbers in it are below ``bound``."""

    name: Name
    shape: FixedShape
    bound: PositiveInt | None = None


SELF_CHECK_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class SelfCheckInfo(Part):
    """Five training steps on a made-up batch, and what they gave when the package was built.

    Attributes:
        reason: Why there is no such check; everything else is then missing.
        inputs: The batch.
        learning_rate: Learning rate of the steps.
        losses: Loss of each step.
        evaluation_loss: Loss of the same batch afterwards, in evaluation mode.
        tolerances: How far each loss, and at last the evaluation loss, may be off.
    """

    reason: Name | None = None
    inputs: tuple[SelfCheckInput, ...] = ()
    learning_rate: float | None = None
    losses: tuple[float, ...] = ()
    evaluation_loss: float | None = None
    tolerances: tuple[float, ...] = ()

    def check(self, path: Path) -> None:
        """Check that it is complete, or says why there is none."""
        if self.reason is not None:
            good = self == SelfCheckInfo(reason=self.reason)
        else:
            good = (
                bool(self.inputs)
                and None not in (self.learning_rate, self.evaluation_loss)
                and (len(self.losses), len(self.tolerances))
                == (SELF_CHECK_STEPS, SELF_CHECK_STEPS + 1)
            )
        if not good:
            raise InvalidRecordError("it must hold a reason, or everything else", path)
