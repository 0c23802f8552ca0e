"""What the builder notes in a training model for the runtime: its ``odtpack.`` metadata."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

import onnxruntime

from odtpack_runtime.errors import OdtpackError


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Notes of a training model.

    Attributes:
        class_count: Number of classes that labels may name; None if the model leaves it open.
        ignored_label: Label of samples that do not count; None if there is none.
        accumulation_steps: Batches whose gradients make one optimizer step.
        parameter_order: Trainable parameters in the order that the model asks for in memory;
            none if it asks for no order.
    """

    class_count: int | None
    ignored_label: int | None
    accumulation_steps: int
    parameter_order: tuple[str, ...]

    @classmethod
    def read(
        cls, session: onnxruntime.InferenceSession, trainable: Collection[str], where: str
    ) -> ModelMetadata:
        """Read and check the notes.

        Args:
            session: The training model.
            trainable: Names of its trainable parameters.
            where: Its path, for messages.

        Raises:
            OdtpackError: ``bad-metadata``.
        """
        metadata = session.get_modelmeta().custom_metadata_map
        class_count, ignored_label, steps = (
            _whole_number(metadata, key, where)
            for key in ("odtpack.class_count", "odtpack.ignore_index", "odtpack.accumulation_steps")
        )
        if steps is not None and steps < 1:
            raise OdtpackError(
                "bad-metadata",
                f"The model's metadata say odtpack.accumulation_steps = {steps}.",
                where=where,
            )
        return cls(
            class_count,
            ignored_label,
            1 if steps is None else steps,
            _memory_order(metadata, trainable, where),
        )


def _whole_number(metadata: dict[str, str], key: str, where: str) -> int | None:
    """Return an integer from a model's metadata, None if it is absent."""
    text = metadata.get(key)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise OdtpackError(
            "bad-metadata",
            f"The model's metadata say {key} = {text!r}, which is not a number.",
            where=where,
        ) from None


def _memory_order(
    metadata: dict[str, str], trainable: Collection[str], where: str
) -> tuple[str, ...]:
    """Return the order of the trainable parameters in memory, if the model asks for one."""
    text = metadata.get("odtpack.parameter_order")
    if text is None:
        return ()
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or sorted(names) != sorted(trainable)
    ):
        raise OdtpackError(
            "bad-metadata",
            "The model's metadata odtpack.parameter_order do not list its trainable parameters.",
            where=where,
        )
    return tuple(names)
