"""The nodes of a network in one graph, be it one model or several."""

from __future__ import annotations

import onnx

from odtpack_runtime.package.package import Package
from odtpack_runtime.session.segments import segment_name


def whole_graph(package: Package) -> onnx.GraphProto:
    """Return the graph of the training model, behind the nodes of the segments before it.

    It is there to be walked through. Without segments it is the training model's; with them it
    has no gradients but those of the last, and neither inputs nor constants.
    """
    last = onnx.load(str(package.training_model), load_external_data=False).graph
    info = package.manifest.segments
    if info is None:
        return last
    whole = onnx.GraphProto()
    for number, segment in enumerate(info.segments):
        path = package.path / segment.forward
        graph = onnx.load(str(path), load_external_data=False).graph
        ends = {value.name for value in (*graph.input, *graph.output)}
        for node in graph.node:
            copy = whole.node.add()
            copy.CopyFrom(node)
            for names in (copy.input, copy.output):
                names[:] = [
                    segment_name(segment.names, name)
                    if name in ends or not name
                    else f"{number}/{name}"
                    for name in names
                ]
    whole.node.extend(last.node)
    return whole
