"""Memory and time of training decoders of published shapes, segment by segment, in int4.

    python -m benchmarks.language_model              the shape of Qwen2.5-0.5B, at four lengths
    python -m benchmarks.language_model --shape Qwen2.5-1.5B --tokens 256
    python -m benchmarks.language_model --tokens 256 --steps 10 --timeline build/memory.svg
    python -m benchmarks.language_model --kit cpp [--native]    as that kit trains it

Each figure comes from a process of its own, and is all that it has, Python included. What they are,
and which options record them, says docs/decoders.md. ``--rounds`` takes steps and forward passes in
turns. ``--held`` trains in a control group, too, which takes Linux and root. ``--native`` takes in
Python the kernels of ODTPACK_NATIVE or of the wheel, ``--keep-products N`` keeps products in N
segments. ``--generate`` and ``--record`` are for the C++ kit; with the first, times are not kept.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import apart
from benchmarks.apart import Memory
from benchmarks.decoder.model import DECODERS, GenaiWriter, write_model
from odtpack_simulator.measure.host import processor_name
from scripts.harness import ROOT, head, keep, options, row, scratch

FOLDER = ROOT / "build" / "decoder"
RECORD = ROOT / "benchmarks" / "decoder" / "record.json"
SHOWN = ("anonymous", "resident", "held", "generation", "from a file", "packing", "in place")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA, WORDS = 8, 16.0, 1024
SPARE = 32  # MB that a control group has beside a step's anonymous memory
PROMPT, FOLLOWING = 32, 2  # tokens
_STYLE = """
svg { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1c2430; background: #fff; }
.title { font-size: 17px; font-weight: 600; } .tick, .name { fill: #5b6675; font-size: 13px; }
.grid { stroke: #e4e8ee; } .baseline { stroke: #97a1af; }
.area { fill: #dbe7fb; } .series { fill: none; stroke: #2f6fdf; stroke-width: 2; }
.resident { fill: none; stroke: #8a94a3; stroke-width: 1.5; }
.limit { stroke: #1c2430; stroke-width: 1.5; stroke-dasharray: 4 4; }
"""


def main() -> None:
    given = options(
        __doc__, shape=("Qwen2.5-0.5B", *DECODERS), tokens=[128, 256, 512, 1024], steps=3, rounds=1,
        threads=os.cpu_count(), held=False, kit=("python", "cpp", "swift"), generate=False,
        native=False, keep_products=0, record=False, timeline=Path,
    )  # fmt: skip
    if given.timeline and (given.kit != "python" or len(given.tokens) != 1):
        sys.exit("--timeline shows one length, which Python trains: give one with --tokens")
    if given.kit != "cpp" and (given.generate or given.record):
        sys.exit("--generate and --record are for the C++ kit")
    write_model(DECODERS[given.shape], FOLDER / given.shape, writer=GenaiWriter)
    if not (_package(given) / "manifest.json").exists():
        built = _apart("build", given)
        print(
            f"{given.shape}: built in {built['seconds']:.0f} s, anonymous "
            f"{built['anonymous']:.0f} MB, resident {built['resident']:.0f} MB", flush=True,
        )  # fmt: skip
    key = "core_seconds" if given.threads == 1 else "seconds"
    train = _apart if given.kit == "python" else _in_kit
    print(head("tokens", *SHOWN, "step", "forward pass", "ratio"))
    for tokens in given.tokens:
        steps, forwards, rates = [], [], []
        for _ in range(given.rounds):
            steps.append(train("step", given, tokens))
            forwards += [] if given.generate else [_apart("forward", given, tokens)]
            rates += [] if given.generate else [_apart("speed", given)["gflops"]]
        step = steps[0]
        figures = {key: step[key] for key in SHOWN if key in step}
        if given.held:
            with _group(step["anonymous"] + SPARE) as group:
                figures["held"] = train("step", given, tokens, group)["resident"]
        shown = [f"{figures[key]:.0f} MB" if key in figures else "" for key in SHOWN]
        taken = [statistics.median(e[key] for e in each) if each else None
                 for each in (steps, forwards)]  # fmt: skip
        if given.record:
            way, place = _way(given), (given.shape, str(tokens))
            kept = {way: figures["anonymous"]} if way != "plain" else figures
            keep(RECORD, {name: round(megabytes) for name, megabytes in kept.items()}, *place)
            if forwards:
                times = {"step": round(taken[0], 2), "forward": round(taken[1], 2)}
                times["gflops"] = round(max(rates))
                keep(RECORD, {processor(): times}, *place, "times", way)
        times = [f"{each:.2f} s" if each else "" for each in taken]
        times.append(f"{taken[0] / taken[1]:.2f}" if taken[0] and taken[1] else "")
        print(row(tokens, *shown, *times), flush=True)
        if given.timeline:
            _draw(given, tokens, step)


def published() -> list[dict[str, Any]]:
    """Peaks that others published for one of the shapes, each with its device and source."""
    return json.loads(RECORD.with_name("published.json").read_text())


def _draw(given: argparse.Namespace, tokens: int, step: dict[str, Any]) -> None:
    """Draw memory that stays, all that is resident, and a line for what each other system has."""
    from markupsafe import Markup

    from odtpack_simulator.reports import svg  # what it imports would count as the step's memory

    others = [
        (f"{each['system']} {each['mb']:,.0f} MB", each["mb"])
        for each in published()
        if (each["shape"], each["tokens"]) == (given.shape, tokens)
    ]
    seconds, anonymous, resident = zip(*step["samples"], strict=True)
    end, highest = seconds[-1] or 1.0, max(*resident, *(mb for _, mb in others))
    axis = svg.linear_axis(1.08 * highest)
    beside, paths = [*others], []
    for name, values in (("anonymous", anonymous), ("resident", resident)):
        beside.append((name, statistics.median(values)))
        pairs = zip(seconds, values, strict=True)
        paths.append([(at / end, axis.position(mb)) for at, mb in pairs])
    layers = [
        svg.horizontal_grid(axis, lambda tick: f"{tick:g}"),
        svg.x_ticks(svg.linear_axis(end), lambda tick: f"{tick:g}", most=end),
        svg.stretched(
            svg.path(paths[0], "area", closed=True), svg.path(paths[0], "series"),
            svg.path(paths[1], "resident"),
        ),
        *(svg.horizontal(axis.position(mb), "limit") for _, mb in others),
        *(
            svg.words(name, "100%", svg.percent(1 - axis.position(mb)), "name", "start", dx=8,
                      dy="0.32em")
            for name, mb in beside
        ),
    ]  # fmt: skip
    heading = (
        f"{len(step['losses']) - 1} steps of the {given.shape} decoder, {tokens} tokens: at most "
        f"{max(anonymous):.0f} MB of anonymous memory"
    )
    style = svg.element("style", Markup(_STYLE))  # noqa: S704 - our own
    drawing = svg.element(
        "svg", style, svg.element("title", heading),
        svg.element("text", heading, x=64, y=26, class_="title"),
        svg.element("text", "MB, the whole process, over seconds", x=64, y=48, class_="name"),
        svg.element("svg", *layers, x=64, y=64, width=686, height=300, overflow="visible"),
        xmlns="http://www.w3.org/2000/svg", view_box="0 0 900 420", width=900, height=420,
        role="img",
    )  # fmt: skip
    given.timeline.parent.mkdir(parents=True, exist_ok=True)
    given.timeline.write_text(drawing, "utf-8")
    losses = ", ".join(f"{loss:.3f}" for loss in step["losses"][1:])
    print(f"losses {losses}; memory in {given.timeline}")


def _apart(
    task: str, given: argparse.Namespace, tokens: int = 0, group: Path | None = None
) -> dict[str, Any]:
    """Do a task in a process of its own, and in a control group if one is given."""
    settings = {**vars(given), "tokens": tokens}
    return apart.call(watched, how={"preexec_fn": _joining(group)}, task=task, given=settings)


def watched(*, task: str, given: dict[str, Any]) -> dict[str, Any]:
    """What a task finds, and the memory of this process meanwhile."""
    with Memory() as memory:
        found = TASKS[task](argparse.Namespace(**given))
    return {**found, **memory.peaks(), "samples": memory.samples}


def _joining(group: Path | None) -> Callable[[], object]:
    """What a new process does to be in a control group."""
    return lambda: group and (group / "cgroup.procs").write_text(str(os.getpid()))


def _in_kit(
    task: str, given: argparse.Namespace, tokens: int, group: Path | None = None
) -> dict[str, Any]:
    """Train with a kit's program."""
    from tests.kits import cpp_kit, swift_kit

    kit: Any = {"cpp": cpp_kit, "swift": swift_kit}[given.kit]
    ids = _tokens(argparse.Namespace(shape=given.shape, tokens=tokens))
    with scratch() as folder:
        steps = []
        for name, part in (("short", ids[:, :8]), ("whole", ids)):
            (folder / name).mkdir()
            steps.append(cpp_kit.save_batch(folder / name, {"input_ids": part, "labels": part}))
        content = {
            "package": _package(given).absolute(), "threads": given.threads,
            "steps": [steps[0], *[steps[1]] * given.steps],
        }  # fmt: skip
        if given.generate and group is None:
            prompt = ids[0, :PROMPT].tolist()
            content["generate"] = {"adapter": "mine.onnx_adapter", "prompt": prompt,
                                   "max_tokens": FOLLOWING}  # fmt: skip
        job, join = folder / "job.json", _joining(group)
        job.write_text(json.dumps(content, default=str))
        child = subprocess.Popen(kit.measuring(job), stdout=subprocess.PIPE, preexec_fn=join)  # noqa: PLW1509
        with child, Memory(child.pid) as memory:
            found = json.loads(child.communicate()[0])
    clock, phases = found["step_seconds"], found["phases"]
    share = found["processor_seconds"] / sum(clock)  # what the first step takes is not known apart
    trained = phases["load"]["seconds"] + phases["train"]["seconds"]
    memory.samples = [each for each in memory.samples if each[0] < trained] or memory.samples
    figures = memory.peaks()
    if "generate" in phases:
        peaks = {key: each["peak_anonymous_bytes"] / 2**20 for key, each in phases.items()}
        last, figures["packing"] = peaks["save adapter"], peaks["pack"]
        figures["generation"] = max(peaks["generate"], last)
        figures["from a file"] = max(peaks["pack"], peaks["generate packed"], last)
        figures["in place"] = max(peaks["generate in place"], last)
    seconds = statistics.median(clock[1:])
    return {"seconds": seconds, "core_seconds": share * seconds, **figures}


@contextmanager
def _group(megabytes: float) -> Iterator[Path]:
    """A control group that holds its processes to so much memory."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")  # pages count for who read them first
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    place = Path("/sys/fs/cgroup" if second else "/sys/fs/cgroup/memory") / "odtpack-held"
    place.mkdir()
    try:
        limit = place / ("memory.max" if second else "memory.limit_in_bytes")
        limit.write_text(str(int(megabytes) * 2**20))
        yield place
    finally:
        place.rmdir()


def _way(given: argparse.Namespace) -> str:
    """What the record calls a package that is built like this."""
    kept = f", {given.keep_products} kept" if given.keep_products else ""
    return ("kernels" if given.native else "plain") + kept


def _package(given: argparse.Namespace) -> Path:
    return FOLDER / given.shape / f"package-{_way(given).replace(', ', '-')}"


def _build(given: argparse.Namespace) -> dict[str, Any]:
    from odtpack.adapters import AdapterSpec
    from odtpack.build import build_package

    shutil.rmtree(_package(given), ignore_errors=True)
    start = time.perf_counter()
    build_package(
        FOLDER / given.shape / "model.onnx", _package(given), loss="next_token", segments=True,
        loss_options={"words": WORDS}, native=given.native, keep_products=given.keep_products,
        adapter=AdapterSpec("lora", tuple(f"*.{name}" for name in LINEARS), (), RANK, ALPHA),
    )  # fmt: skip
    return {"seconds": time.perf_counter() - start}


def _step(given: argparse.Namespace) -> dict[str, Any]:
    from odtpack_runtime import CheckpointState, Module, Optimizer, default_session_options

    package, losses = _package(given), []
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    training = package / "training_model.onnx"
    options = default_session_options(training, given.threads)
    module = Module(training, state, session_options=options)
    optimizer = Optimizer(package / "optimizer_model.onnx", module)

    def step(ids: np.ndarray) -> None:
        losses.append(float(module(ids, ids)))
        optimizer.step()
        module.lazy_reset_grad()

    ids = _tokens(given)
    step(ids[:, :8])  # now there are moments
    return {**_timed(lambda: step(ids), given.steps), "losses": losses}


def _forward(given: argparse.Namespace) -> dict[str, Any]:
    """The same model in int4 as ONNX Runtime infers with it, by its default options."""
    session = _session(FOLDER / given.shape / "model.onnx", given.threads)
    ids, shape = _tokens(given), DECODERS[given.shape]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)} | {
        node.name: np.zeros((1, shape.shared, 0, shape.size), np.float32)
        for node in session.get_inputs()
        if node.name.startswith("past")
    }
    session.run(["logits"], feeds)
    return _timed(lambda: session.run(["logits"], feeds), given.steps)


def _session(model: Path | bytes, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def processor() -> str:
    """Its name, and the widest of the instruction sets that products use."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known = {"avx512_vnni": "AVX-512 with VNNI", "avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next((name for flag, name in known.items() if f" {flag} " in flags), "")
    return ", ".join(filter(None, [processor_name(), widest])) or "unknown"


def _timed(run: Callable[[], object], times: int) -> dict[str, Any]:
    """The median of a run's seconds, and of those of the processor's cores.

    With one thread these are nearly the same, and tell what the run takes beside other work.
    """
    seconds, spent = [], []
    for _ in range(times):
        start, before = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start)
        spent.append(time.process_time() - before)
    return {"seconds": statistics.median(seconds), "core_seconds": statistics.median(spent)}


def _tokens(given: argparse.Namespace) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(0, DECODERS[given.shape].words, (1, given.tokens))


def _speed(given: argparse.Namespace) -> dict[str, Any]:
    """What ONNX Runtime's products of float32 run at here, in GFLOP/s."""
    import onnx

    size = 1024
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{size}, {size}] a) => (float y) '
        "{ b = MatMul(a, a) y = ReduceMax<keepdims=0>(b) }"
    )
    session = _session(model.SerializeToString(), given.threads)
    feeds = {"a": np.ones((size, size), np.float32)}
    best = min(_timed(lambda: session.run(None, feeds), 1)["seconds"] for _ in range(10))
    return {"gflops": 2 * size**3 / best / 1e9}


TASKS = {"build": _build, "step": _step, "forward": _forward, "speed": _speed}

if __name__ == "__main__":
    main()
