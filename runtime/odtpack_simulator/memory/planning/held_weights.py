"""Frozen weights of segments that a kit holds in memory, as it cannot map their file."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from odtpack_runtime.package.package import Package
from odtpack_runtime.session.segments import segment_name
from odtpack_simulator.device.kits import MAPPING_KITS, Kit


def held_weights(package: Package, kit: Kit, *, fetched: bool) -> int:
    """Bytes of frozen weights that a training holds in memory.

    Args:
        package: The package; of one with one training model its constants are in the sessions.
        kit: What the app trains with. JavaScript's reads the weights of a segment when it runs,
            into memory for the segment with the most.
        fetched: Whether all of them lie in memory as well, as in a page.

    Returns:
        0 where they are mapped from their file.
    """
    info = package.manifest.segments
    if info is None or kit in MAPPING_KITS:
        return 0
    sizes = {each.name: each.nbytes for each in info.tensors}
    inputs: dict[str, list[str]] = {}

    def read_by(model: str, names: Mapping[str, str]) -> int:
        if model not in inputs:
            graph = onnx.load(str(package.path / model), load_external_data=False).graph
            inputs[model] = [value.name for value in graph.input]
        return sum(sizes.get(segment_name(names, own), 0) for own in inputs[model])

    runs = [(each.forward, each.names) for each in info.segments]
    runs += [(each.backward, each.names) for each in info.segments if each.backward is not None]
    runs += [(model.name, {}) for model in (package.training_model, package.eval_model)]
    most = max(read_by(model, names) for model, names in runs)
    return most + (sum(sizes.values()) if fetched else 0)
