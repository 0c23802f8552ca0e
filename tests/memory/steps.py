"""Training steps made up for the tests and benchmarks of what is computed again."""

from __future__ import annotations

import random

from odtpack.memory.timeline import Step
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}

    def node(self, op_type: str, inputs: list[str], name: str, size: int) -> str:
        """A node with one output of a size of its own name: buffers are not shared."""
        self.nodes.append(Node(name, op_type, "", tuple(inputs), (name,), {}))
        self.values[name] = Value(name, 4, (f"size of {name}",), (size,))
        return name


def random_step(seed: int, layers: int) -> Step:
    """A chain with some operators that read further back, and its backward pass.

    Each node of the backward pass reads the one before and one or two values of the forward pass.
    """
    rng = random.Random(seed)
    write = _Writer()
    write.values["x"] = Value("x", 4, ("size of x",), (4096,))
    forward = ["x"]
    for layer in range(layers):
        read = [forward[-1]]
        if layer > 1 and rng.random() < 0.4:
            read.append(rng.choice(forward[1:-1]))
        op_type = rng.choice(["Exp", "MatMul", "Sin", "Relu" if len(read) == 1 else "Mul"])
        size = 1024 * rng.choice([2, 4, 8, 16, 32])
        forward.append(write.node(op_type, read, f"f{layer}", size))
    loss = write.node("ReduceMean", [forward[-1]], "loss", 1)
    gradient = write.node("Neg", [forward[-1]], "g", 1024)
    for layer in reversed(range(layers)):
        read = [gradient, forward[layer]]
        if rng.random() < 0.5:
            read.append(forward[layer + 1])
        gradient = write.node("Mul", read, f"g{layer}", 1024 * rng.choice([2, 4, 8]))
    graph = RuntimeGraph(("x",), (loss, gradient), tuple(write.nodes), write.values, {})
    return Step(graph)
