"""The models of a network in segments: their sessions, and what inputs and outputs are called."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.files.records import InvalidRecordError
from odtpack_runtime.package.manifest_device import SegmentInfo, SegmentsInfo
from odtpack_runtime.session.graph_signature import (
    BUFFER_SUFFIX,
    COTANGENT_SUFFIX,
    GRADIENT_SUFFIX,
    RESET_NAME,
    TensorSpec,
)
from odtpack_runtime.session.mapped_weights import MappedWeights, segments_invalid
from odtpack_runtime.session.options import manifest_beside
from odtpack_runtime.session.session import open_session


class Segments:
    """The sessions of a package's segments, and what their inputs and outputs are called.

    Args:
        training: The training model, which ends the network; its manifest lies beside it.
        info: What that says of segments.
        options: Options of the sessions.
        evaluation: The evaluation model, if there is one.
        inputs: Names of the user inputs in order.

    Attributes:
        kept: Memory of values between segments, which training and evaluation share.

    Raises:
        OdtpackError: A model is missing or does not load; ``segments-invalid``.
    """

    def __init__(
        self,
        training: Path,
        info: SegmentsInfo,
        options: onnxruntime.SessionOptions,
        evaluation: Path | None,
        inputs: Sequence[str],
    ) -> None:
        self.where = str(training)
        folder = training.parent
        self.weights = MappedWeights(
            None if info.weights is None else folder / info.weights, info.tensors
        )
        names = [name for name in info.files() if name != info.weights]
        prefix = options.profile_file_prefix

        def opened(model: Path) -> onnxruntime.InferenceSession:
            if options.enable_profiling:  # sessions of one second would share a file
                options.profile_file_prefix = f"{prefix}.{model.stem}"
            return open_session(model, options)

        sessions = {name: opened(folder / name) for name in names}
        self.training = opened(training)
        self.evaluation = None if evaluation is None else opened(evaluation)
        options.profile_file_prefix = prefix
        self.forward = [Part(sessions[each.forward], each) for each in info.segments]
        last = SegmentInfo(forward=training.name)
        self.last = Part(self.training, last)
        self.last_evaluated = None if self.evaluation is None else Part(self.evaluation, last)
        self.backward = [
            None if each.backward is None else Part(sessions[each.backward], each)
            for each in info.segments
        ]
        self.inputs = tuple(inputs)
        self.kept: dict[str, Array] = {}
        self._check()

    def _check(self) -> None:
        """Check that every segment reads what there is, and weights as they are stored."""
        made: set[str] = set(self.inputs)
        for forward, backward in zip(self.forward, self.backward, strict=True):
            for part in (forward, *(() if backward is None else (backward,))):
                for name, node in part.inputs.items():
                    if name in self.weights:
                        self._check_weight(name, node)
                    elif name in made and name.endswith(COTANGENT_SUFFIX):
                        raise segments_invalid(f"'{name}' is a name of a gradient", self.where)
            for name in forward.outputs:
                if name in made or name in self.weights:
                    raise segments_invalid(f"'{name}' is made twice", self.where)
                made.add(name)
        for part in (self.last, self.last_evaluated):
            for name, node in () if part is None else part.inputs.items():
                if name in self.weights:
                    self._check_weight(name, node)

    def check_inputs(self, found: Iterable[Sequence[TensorSpec]]) -> None:
        """Check that what no segment makes, no parameter is and no weight, a caller feeds.

        Raises:
            OdtpackError: ``segments-invalid``.
        """
        for spec in (spec for specs in found for spec in specs):
            if spec.name not in self.inputs:
                raise segments_invalid(f"nothing gives '{spec.name}' to a segment", self.where)

    def _check_weight(self, name: str, node: Any) -> None:
        info = self.weights[name]
        kind = TensorSpec.of_node(node, self.where).dtype.name
        if kind != info.dtype or tuple(node.shape) != info.shape:
            raise segments_invalid(
                f"a model takes '{name}' as {node.type}{node.shape}, and the file holds "
                f"{info.dtype}{list(info.shape)}",
                self.where,
            )

    def nodes(self, *, training: bool) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs of the whole, as of one model that would be all of them.

        Returns:
            The user inputs, the parameters, and for training their buffers; the outputs of the
            last segment, and for training all gradients.
        """
        ends = self.last if training else self.last_evaluated
        assert ends is not None  # noqa: S101 - asked for only where there is one
        parts = [*self.forward, *(b for b in self.backward if b is not None and training), ends]
        given = {name for part in self.forward for name in part.outputs}
        found = {name: node for part in parts for name, node in part.inputs.items()}
        user = [found[name] for name in self.inputs if name in found]
        own = [
            node
            for name, node in found.items()
            if not (name in given or name in self.weights or name in self.inputs)
            and not name.endswith(COTANGENT_SUFFIX)
        ]
        own.sort(key=lambda node: node.name.endswith((BUFFER_SUFFIX, RESET_NAME)))
        outputs = [node for name, node in ends.outputs.items() if not _is_gradient(name)]
        if training:
            outputs += [
                node
                for part in parts
                for name, node in part.outputs.items()
                if name.endswith(GRADIENT_SUFFIX)
            ]
        return [*user, *own], outputs


class Part:
    """A session as one segment sees it, with the names that inputs and outputs have there."""

    def __init__(self, session: onnxruntime.InferenceSession, info: SegmentInfo) -> None:
        self.session = session
        self._names = info.names
        self.inputs = {
            self.name(n.name): _renamed(n, self.name(n.name)) for n in session.get_inputs()
        }
        self.outputs = {
            self.name(n.name): _renamed(n, self.name(n.name)) for n in session.get_outputs()
        }

    def name(self, own: str) -> str:
        """What a name of the model's is called here."""
        return segment_name(self._names, own)


def segment_name(names: Mapping[str, str], own: str) -> str:
    """Return what a segment calls an input or output of its model.

    Args:
        names: What is called differently, see :class:`SegmentInfo`.
        own: The name in the model; what belongs to a name (its gradient) goes with it.
    """
    for suffix in (COTANGENT_SUFFIX, BUFFER_SUFFIX, GRADIENT_SUFFIX):
        if own.endswith(suffix):
            stem = own.removesuffix(suffix)
            return names.get(stem, stem) + suffix
    return names.get(own, own)


def _renamed(node: Any, name: str) -> Any:
    return SimpleNamespace(name=name, own=node.name, type=node.type, shape=node.shape)


def _is_gradient(name: str) -> bool:
    return name.endswith((GRADIENT_SUFFIX, COTANGENT_SUFFIX))


def segments_beside(model: str | os.PathLike[str]) -> tuple[SegmentsInfo, tuple[str, ...]] | None:
    """Return what the manifest beside a training model says of segments, and its user inputs.

    Raises:
        OdtpackError: ``segments-invalid`` if that cannot be read.
    """
    content = manifest_beside(Path(model))
    if content is None or content.get("segments") is None:
        return None
    try:
        info = SegmentsInfo.read(content["segments"], ("segments",))
        inputs = tuple(str(each["name"]) for each in content["inputs"])
    except (InvalidRecordError, LookupError, TypeError) as error:
        raise segments_invalid(str(error), str(model)) from error
    return info, inputs
