"""``odtpack import``: a package from artifacts of onnxruntime-training.

The forward model is taken out of the artifacts (:mod:`.forward`), differentiated again, and
given the names that it had: inputs, outputs and parameters are what they were.
"""

from __future__ import annotations

import os
from pathlib import Path

from odtpack.errors import OdtpackError
from odtpack.gc_pause import paused_collector
from odtpack.model.loading import load_source
from odtpack.optimizers import Clip, Optimizer
from odtpack.ort_training.artifacts import Artifacts, open_artifacts
from odtpack.ort_training.forward import forward_model
from odtpack.ort_training.loss import take_loss
from odtpack.ort_training.optimizer import carried_state, read_optimizer
from odtpack.package.optimizer_update import resolve_update
from odtpack.package.task import Graphs, Task
from odtpack.package.training import build_graphs
from odtpack.package.write import Made, check_folder, write_package
from odtpack.spec import BuildSpec
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.package.manifest import Manifest


@paused_collector()
def import_artifacts(
    artifacts: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
) -> Manifest:
    """Turn artifacts of onnxruntime-training 1.19 into a package that goes on training.

    Parameters, optimizer state (moments, step, learning rate) and properties come from the
    checkpoint. Batch normalization and Dropout train as they did there.

    Args:
        artifacts: Folder that ``generate_artifacts`` wrote.
        folder: Where the package goes: a folder that does not exist, is empty, or holds a
            package, whose files are replaced. Its files have no prefix.
        checkpoint: Checkpoint in the place of the folder's, for example one that a device
            saved.
        prefix: Start of the artifacts' file names; found out if there is one.

    Returns:
        The manifest as written.

    Raises:
        OdtpackError: The folder does not hold artifacts of one model, the checkpoint is not
            one of this model, or an operator has no gradient. Nothing has been written then.
    """
    destination = check_folder(folder)
    source = Path(artifacts)
    try:
        opened = open_artifacts(
            source, prefix=prefix, checkpoint=None if checkpoint is None else Path(checkpoint)
        )
        optimizer, clip = read_optimizer(opened.optimizer)
        state = carried_state(opened.checkpoint, optimizer, str(opened.checkpoint_path))
        graphs = _differentiate(opened, optimizer, clip)
        resolved = resolve_update(graphs.task, graphs)
    except OdtpackError as error:
        error.where = error.where or str(source)
        raise
    assert resolved is not None  # noqa: S101 - there is an optimizer
    carried = CheckpointData({}, {}, optimizer=state, properties=opened.checkpoint.properties)
    made = Made(resolved, resolved.model(graphs), carried=carried)
    manifest = write_package(graphs, made, destination)
    assert manifest is not None  # noqa: S101 - there is none only without an optimizer
    return manifest


def _differentiate(artifacts: Artifacts, optimizer: Optimizer, clip: Clip) -> Graphs:
    model = load_source(forward_model(artifacts), artifacts.parameters, as_stored=True)
    graph = model.graph
    name = graph.outputs[0].name or ""
    additional = tuple(value.name or "" for value in graph.outputs[1:])
    found = take_loss(graph)
    read = () if found is None else (found.prediction.name or "", found.target.name or "")
    spec = BuildSpec(
        loss_inputs=read,
        outputs=additional,
        prediction=False,
        clip_norm=clip.norm,
        nominal=artifacts.nominal,
    )
    task = Task(
        model,
        tuple(artifacts.checkpoint.trainable),
        tuple(artifacts.checkpoint.frozen),
        None if found is None else found.loss,
        spec,
        optimizer,
    )
    graphs = build_graphs(task)
    for each in (graphs.training, graphs.evaluation):
        each.graph.outputs[0].name = name  # its nodes may be new
    return graphs
