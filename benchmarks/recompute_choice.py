"""How good the choice of what is computed again is, and how long it takes to choose.

``python -m benchmarks.recompute_choice [NAME ...] [--nodes 10000]`` takes the steps of the
workloads and of stacks of blocks as they come to a mobile network (:func:`layered_step`), with
limits of a half, 0.3 and a quarter of the activations, and prints for each the number of
decisions, the time that the greedy search's choice and the solver's take more, in parts of a
step's time as estimated, what no choice takes less than, and the processor time of both. Then it
makes a step of ``--nodes`` nodes, and prints how long the greedy search takes for it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection
from unittest import mock

from benchmarks.memory_budget import build
from benchmarks.workloads import WORKLOADS
from odtpack.memory import compile as memory_compile
from odtpack.memory import exact
from odtpack.memory.buffers import Buffers
from odtpack.memory.recompute import choose
from odtpack.memory.spec import MemorySpec
from odtpack.memory.timeline import Step
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value

_SHARES = (0.5, 0.3, 0.25)
_STACKS = (29, 36)
"""Blocks of the stacks: of about 350 and 430 decisions."""

NODES_OF_A_BLOCK = 37


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.outputs: list[str] = []

    def input(self, name: str, *shape: int) -> str:
        self.values[name] = Value(name, 4, (name, *shape[1:]), shape)
        return name

    def __call__(self, op_type: str, *inputs: str, shape: tuple[int, ...]) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(Node(name, op_type, "", inputs, (name,), {}))
        return self.input(name, *shape)

    def output(self, left: str, right: str, *shape: int) -> None:
        """A gradient of a parameter."""
        self.outputs.append(self("MatMul", left, right, shape=shape))


def layered_step(blocks: int, width: int = 192, tokens: int = 64) -> Step:
    """A step of blocks with a residual, which become narrower and then wider again.

    Each has a normalization, three projections, an attention and a product with a GELU between;
    12 nodes forward and 27 back.
    """
    write = _Writer()
    value = write.input("x", tokens, width)
    tape: list[Callable[[str], str]] = []
    for block in range(blocks):
        wide = width * (4 - block % 3)
        value = _block(write, tape, value, block, (tokens, width), (tokens, wide))
    loss = write("ReduceMean", value, shape=(1,))
    gradient = write("Sub", value, value, shape=(tokens, width))
    for back in reversed(tape):
        gradient = back(gradient)
    graph = RuntimeGraph(
        ("x",), (loss, gradient, *write.outputs), tuple(write.nodes), write.values, {}
    )
    return Step(graph)


def _block(
    write: _Writer,
    tape: list[Callable[[str], str]],
    x: str,
    block: int,
    narrow: tuple[int, int],
    wide: tuple[int, int],
) -> str:
    weight = write.input(f"w{block}", *narrow[1:], *narrow[1:])
    up = write.input(f"up{block}", narrow[1], wide[1])
    down = write.input(f"down{block}", wide[1], narrow[1])
    square = (narrow[0], narrow[0])
    h = write("LayerNormalization", x, shape=narrow)
    q, k, v = (write("MatMul", h, weight, shape=narrow) for _ in range(3))
    kt = write("Transpose", k, shape=narrow[::-1])
    p = write("Softmax", write("MatMul", q, kt, shape=square), shape=square)
    c = write("MatMul", p, v, shape=narrow)
    y = write("Add", x, write("MatMul", c, weight, shape=narrow), shape=narrow)
    n = write("LayerNormalization", y, shape=narrow)
    u = write("MatMul", n, up, shape=wide)
    g = write("Gelu", u, shape=wide)
    out = write("Add", y, write("MatMul", g, down, shape=narrow), shape=narrow)

    def back(dy: str) -> str:
        write.output(g, dy, wide[1], narrow[1])
        dg = write("MatMul", dy, down, shape=wide)
        du = write("Mul", dg, write("Erf", u, shape=wide), shape=wide)
        write.output(n, du, narrow[1], wide[1])
        dn = write("Mul", write("MatMul", du, up, shape=narrow), y, shape=narrow)
        dy = write("Add", dy, dn, shape=narrow)
        write.output(c, dy, narrow[1], narrow[1])
        dc = write("MatMul", dy, weight, shape=narrow)
        dv = write("MatMul", p, dc, shape=narrow)
        dp = write("Mul", p, write("MatMul", dc, v, shape=square), shape=square)
        dq, dk = (write("MatMul", dp, each, shape=narrow) for each in (k, q))
        for each in (dq, dk, dv):
            write.output(h, each, narrow[1], narrow[1])
        dh = write("Sum", dq, dk, dv, shape=narrow)
        return write("Add", dy, write("Mul", dh, x, shape=narrow), shape=narrow)

    tape.append(back)
    return out


def workload_step(name: str) -> tuple[Step, Collection[str]]:
    """The step of a workload that a build chooses for, and what of it has a name in the model."""
    workload = WORKLOADS[name]
    with mock.patch.object(memory_compile, "choose", wraps=choose) as seen:
        build(workload.build(), MemorySpec(batch=workload.batch, limit=0, slowdown=0.0))
    return seen.call_args.args[0], seen.call_args.kwargs["nameable"]


def compare(title: str, step: Step, names: Collection[str]) -> None:
    """Print a line for each limit."""
    decisions = sum(buffer.is_open for buffer in Buffers(step, names).all)
    peak, total = step.timeline().peak, sum(step.seconds)
    for share in _SHARES:
        limit, start = int(share * peak), time.process_time()
        greedy = choose(step, limit=limit, seconds=math.inf, nameable=names)
        middle = time.process_time()
        best = exact.improve(step, greedy, limit, names)
        end = time.process_time()
        found = f"{greedy.seconds / total:.2%}" if greedy.peak <= limit else "not reached"
        cells = [title, decisions, share, found, f"{middle - start:.1f}"]
        if best is None or best.least is None:
            cells += ["none found", "", f"{end - middle:.1f}"]
        else:
            cells += [f"{best.seconds / total:.2%}", f"{best.least / total:.2%}"]
            cells += [f"{end - middle:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--nodes", type=int, default=10_000)
    options = parser.parse_args()
    print("| step | decisions | limit | greedy | s | solver | no choice below | s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.names or ("transformer", "vit", "mobilenet-bn"):
        compare(WORKLOADS[name].title, *workload_step(name))
    for blocks in _STACKS if not options.names else ():
        step = layered_step(blocks)
        compare(f"{blocks} blocks", step, step.graph.values.keys())
    step = layered_step(options.nodes // NODES_OF_A_BLOCK)
    for share in _SHARES:
        limit, start = int(share * step.timeline().peak), time.process_time()
        choice = choose(step, limit=limit, seconds=math.inf, nameable=step.graph.values.keys())
        taken = time.process_time() - start
        print(
            f"greedy search, {len(step.graph.nodes)} nodes, limit {share}: {taken:.1f} s, "
            f"{len(choice.again)} values, {choice.peak / limit:.2f} of the limit", flush=True
        )  # fmt: skip


if __name__ == "__main__":
    main()
