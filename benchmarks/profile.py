"""Where the time of a training step goes, ours beside ONNX Runtime training 1.19.2.

    python -m benchmarks.profile vit
    python -m benchmarks.profile cnn --optimizer sgd --by shape --rows 30
    python -m benchmarks.profile transformer --by layer

A node takes the lowest time of all steps, plus a microsecond or two that profiling adds. ``--by
layer`` is for ours alone: a node belongs to the layer whose parameter it reads or whose gradient it
makes, any other to that of its first input. An If counts as what its branch holds.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import apart, worker
from benchmarks.workloads import OPTIMIZERS, WORKLOADS
from odtpack.passes.gradient_buffers import BUFFER_SUFFIX, OUTPUT_SUFFIX
from scripts.harness import head, options, row, scratch
from tests import packaging_tools
from tests.peer import client

Event = dict[str, Any]
Key = Callable[[str, Event], str]


def main() -> None:
    given = options(__doc__, "workload", workload=(*WORKLOADS,), optimizer=("adamw", *OPTIMIZERS),
                    by=("operator", "shape", "layer"), rows=24, steps=12)  # fmt: skip
    workload = WORKLOADS[given.workload]
    counts = {"steps": given.steps, "warm_up": 3}
    with scratch() as folder:
        model, data = workload.write(folder)
        proto, optimizer = onnx.load(model), packaging_tools.OPTIMIZERS[given.optimizer]
        ours: list[list[Event]] = apart.call(
            worker.profile, folder=packaging_tools.generate(proto, folder / "ours", optimizer),
            inputs=data, optimized=folder / "optimized.onnx", **counts,
        )  # fmt: skip
        layers = layers_of(onnx.load(folder / "optimized.onnx")) if given.by == "layer" else {}
        theirs: list[list[Event]] = []
        if given.by != "layer" and client.peer_available() is None:
            client.generate(
                model=model, folder=folder / "peer", optimizer=given.optimizer,
                frozen=packaging_tools.statistic_names(proto),
            )  # fmt: skip
            (profiles := folder / "profiles").mkdir()
            client.bench(folder=folder / "peer", inputs=data, profile=profiles, **counts)
            theirs = [each for path in sorted(profiles.iterdir()) for each in read_profiles(path)]
    keys: dict[str, Key] = {
        "operator": lambda _, event: str(event["args"]["op_name"]),
        "shape": lambda _, event: f"{event['args']['op_name']} {shapes(event['args'])}",
        "layer": lambda name, _: layers.get(name, "(optimizer and others)"),
    }
    print(f"{workload.title}: milliseconds in kernels of a step, one thread\n")
    show([total(side, keys[given.by]) for side in (ours, theirs)], given.rows)


def read_profiles(path: Path) -> Iterable[list[Event]]:
    """Sessions that begin within a second write one after the other into one file."""
    text, decoder, at = path.read_text().lstrip(), json.JSONDecoder(), 0
    while at < len(text):
        try:
            events, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:  # one wrote over the other
            print(f"profile: a part of {path.name} cannot be read", file=sys.stderr)
            return
        yield events
        at = end + len(text[end:]) - len(text[end:].lstrip())


def shapes(arguments: dict[str, Any]) -> str:
    """Shapes of a node's inputs and outputs."""
    sides = (
        " ".join(
            "x".join(map(str, next(iter(entry.values())))) for entry in arguments.get(side, ())
        )
        for side in ("input_type_shape", "output_type_shape")
    )
    return " -> ".join(sides)


def layers_of(model: onnx.ModelProto) -> dict[str, str]:
    """The layer of every node of an optimized training model."""
    buffers = [i.name for i in model.graph.input if i.name.endswith(BUFFER_SUFFIX)]
    trained = {name.removesuffix(BUFFER_SUFFIX) for name in buffers}
    layer_of_value: dict[str, str] = {name: name.rpartition(".")[0] or name for name in trained}
    found: dict[str, str] = {}
    for node in model.graph.node:
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        read = [*node.input, *(i for body in bodies for inner in body.node for i in inner.input)]
        made = [o.removesuffix(OUTPUT_SUFFIX) for o in node.output if o.endswith(OUTPUT_SUFFIX)]
        direct = next((layer_of_value[n] for n in (*made, *read) if n in trained), None)
        layer = direct or next((layer_of_value[n] for n in read if n in layer_of_value), "(inputs)")
        for name in node.output:
            layer_of_value.setdefault(name, layer)
        for inner in (node, *(n for body in bodies for n in body.node)):
            found[inner.name] = layer
    return found


def total(profiles: list[list[Event]], key: Key) -> dict[str, np.ndarray]:
    """Microseconds and nodes in a step of several models by key."""
    found: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2, int))
    for events in profiles:
        runs: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "Node" and name.endswith("_kernel_time"):
                name = name.removesuffix("_kernel_time")
                if event["args"]["op_name"] != "If":
                    runs[name, key(name, event), shapes(event["args"])].append(event["dur"])
        steps = min(map(len, runs.values()), default=1)
        for (_, label, _), durations in runs.items():
            in_a_step = max(1, round(len(durations) / steps))
            found[label] += (min(durations) * in_a_step, in_a_step)
    return found


def show(sides: list[dict[str, np.ndarray]], rows: int) -> None:
    """Milliseconds of a step, the largest first."""
    print(head("", "ours ms:", "nodes:", "reference ms:", "nodes:"))
    labels = sorted({*sides[0], *sides[1]}, key=lambda x: -max(each[x][0] for each in sides))
    whole = [sum(each.values(), np.zeros(2, int)) for each in sides]
    for label in (*labels[:rows], "all"):
        pairs = whole if label == "all" else [each[label] for each in sides]
        cells = ((f"{us / 1e3:.3f}", nodes) if nodes else ("", "") for us, nodes in pairs)
        print(row(label, *(cell for pair in cells for cell in pair)))


if __name__ == "__main__":
    main()
