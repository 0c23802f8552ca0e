"""What computing again saves, and what it costs: activations and time of training models.

    python -m benchmarks.memory_budget [NAME ...] [--rounds 5] [--sparse]

Four training models of each workload run in turns, one thread; docs/memory.md says what is shown.
With ``--sparse`` biases and the last blocks of MobileNetV2 are trained, nothing is run, and what
order alone saves is shown.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from benchmarks.workloads import WORKLOADS, Workload
from odtpack import losses
from odtpack.model.loading import load_model
from odtpack.package.task import Graphs, Task
from odtpack.package.training import build_graphs
from odtpack.spec import MemorySpec
from scripts.harness import head, in_turns, options, row
from tests.packaging_tools import batch, trainable_names

_ANY_TIME = 2.0
_SECONDS = 1.0


def build(
    model: onnx.ModelProto, memory: MemorySpec | None, train: Sequence[str] | None = None
) -> Graphs:
    """Graphs of a model some of whose parameters are trained, or all."""
    names, loss = tuple(train or trainable_names(model)), losses.make_loss("cross_entropy")
    return build_graphs(Task(load_model(model), names, (), loss, memory=memory))


def runner(graphs: Graphs, model: onnx.ModelProto, samples: int) -> Callable[[], float]:
    """What runs a training model for a second; returns the processor's seconds of a run."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.enable_mem_pattern = False
    content = ir.to_proto(graphs.training).SerializeToString()
    session = onnxruntime.InferenceSession(content, settings)
    data, labels = batch(model, samples)
    known = {p.name: p.value() for p in graphs.parameters}
    known |= {"lazy_reset_grad": np.ones(1, np.bool_), "labels": labels}  # gradients are replaced
    feeds = {}
    for node in session.get_inputs():
        is_buffer = node.name.endswith(".accumulation.buffer")
        feeds[node.name] = (
            np.zeros(node.shape, np.float32) if is_buffer else known.get(node.name, data)
        )

    def seconds() -> float:
        end, runs, start = time.perf_counter() + _SECONDS, 0, time.process_time()
        while not runs or time.perf_counter() < end:
            session.run(None, feeds)
            runs += 1
        return (time.process_time() - start) / runs

    return seconds


def measure(workload: Workload, rounds: int) -> list[str]:
    """The cells of a workload's line."""
    model = workload.build()
    plain = build(model, None)
    usual = build(model, MemorySpec(batch=workload.batch))
    if usual.memory is None:  # too small to be looked at without a limit
        usual = build(model, MemorySpec(batch=workload.batch, limit=0, slowdown=0.0))
    kept = usual.memory.before
    held = (MemorySpec(batch=workload.batch, limit=int(kept / part), slowdown=_ANY_TIME)
            for part in (2, 4))  # fmt: skip
    built = [usual, *(build(model, memory) for memory in held)]
    ways = {i: runner(each, model, workload.batch) for i, each in enumerate((plain, *built))}
    times = in_turns(rounds, ways)
    cells = [f"{kept / 1e6:.1f}"]
    for index, graphs in enumerate(built, 1):
        ratio = statistics.median(np.divide(times[index], times[0]))
        after = kept if graphs.memory is None else graphs.memory.after
        cells.append(f"{after / 1e6:.1f} ({ratio:.2f})")
    return cells


def _sparse(model: onnx.ModelProto) -> list[str]:
    """All biases, and the weights of the last four blocks and of the classifier."""
    names = trainable_names(model)
    blocks = {name: int(name.split(".")[1]) for name in names if name.startswith("features.")}
    first = max(blocks.values()) - 3
    return [n for n in names if n.endswith("bias") or blocks.get(n, first) >= first]


def order_alone(workload: Workload) -> list[str]:
    """The cells of a sparse update's line."""
    model = workload.build()
    train = _sparse(model)
    ordered, usual = (
        build(model, dataclasses.replace(memory, batch=workload.batch, worth=-1.0), train).memory
        for memory in (MemorySpec(limit=0, slowdown=0.0), MemorySpec())
    )
    found = [ordered.before, ordered.after, usual.after]
    return [f"{nbytes / 1e6:.1f} ({ordered.before / nbytes:.2f})" for nbytes in found]


def main() -> None:
    given = options(__doc__, "names", names=[*WORKLOADS], rounds=5, sparse=False)
    names = [name for name in given.names if not given.sparse or "mobilenet" in name]
    if given.sparse:
        print(head("network, sparse update", "as differentiated:", "order alone:", "default:"))
    else:
        print(head("network", "all kept:", "default:", "limit of a half:", "limit of a quarter:"))
    for workload in map(WORKLOADS.__getitem__, names):
        found = order_alone(workload) if given.sparse else measure(workload, given.rounds)
        print(row(workload.title, *found), flush=True)


if __name__ == "__main__":
    main()
