"""Every phase of the plan against a process in which it really happens."""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack_runtime import CheckpointState
from odtpack_simulator.device.app import memory_fit, with_margin
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.kernel_memory import workspaces
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import child_environment
from odtpack_simulator.memory.runtime_graph import load_runtime_graph
from odtpack_simulator.memory.session_memory import session_bytes
from odtpack_simulator.replay.replay import run_training_child
from tests.programs import ran
from tests.simulator.graphs import weighted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")

REPLAYED = {
    "loading": ("loading the training model", "loading the evaluation model",
                "placing the parameters"),
    "evaluation": ("evaluation",),
    "step": ("first step", "training step", "optimizer step"),
    "saving": ("saving",),
}  # fmt: skip

RESUME = """
from odtpack_runtime import CheckpointState, Module, Optimizer
training, evaluation, optimizer, checkpoint = sys.argv[1:]
meter = MemoryMeter()
state = CheckpointState.load_checkpoint(checkpoint)
module = Module(training, state, evaluation, session_options=memory_options(1))
kept = Optimizer(optimizer, module)
print(meter.mark())
"""

HEAP = """
import numpy as np
ones = np.ones((1024, 1024), np.float32)
if sys.argv[2] == "Expand":
    result = np.ones((1024, 1024, 2), np.float32)
    feeds = {"x": ones[..., None], "i": np.array(result.shape)}
elif sys.argv[2] == "Dropout":
    result = np.ones((4096, 2048), np.float32)
    feeds = {"x": result.copy(), "i": np.array(0.5, np.float32), "u": np.array(True)}
else:
    result, feeds = ones.copy(), {"x": ones, "i": np.zeros((1024, 1024), np.int64), "u": ones}
session = onnxruntime.InferenceSession(sys.argv[1], memory_options(1))
binding = session.io_binding()
for name, array in feeds.items():
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
binding.bind_output("y", "cpu", 0, np.float32, result.shape, result.ctypes.data)
session.run_with_iobinding(binding)
meter = MemoryMeter()
session.run_with_iobinding(binding)
print(meter.mark())
"""


OPENED = """
onnxruntime.InferenceSession(sys.argv[1], memory_options(1))
meter = MemoryMeter()
session = onnxruntime.InferenceSession(sys.argv[2], memory_options(1))
print(meter.mark())
"""

HEAD = """
import sys
import onnxruntime
from odtpack_simulator.memory.process_memory import MemoryMeter, memory_options
"""


def measured(code: str, *arguments: str | Path) -> int:
    """What code prints last in a process whose memory is what is alive in it."""
    environment = {**os.environ, **child_environment()}
    done = ran(sys.executable, "-c", HEAD + code, *arguments, env=environment)
    return int(done.stdout.splitlines()[-1])


def test_a_session_of_many_small_constants(tmp_path):
    """Each takes a hundred times its elements."""
    for count in (1, 1000):
        values = {f"c{i}": np.full(4, i, np.float32) for i in range(count)}
        names = ", ".join(["x", *values])
        text = f"g (float[n] x) => (float[m] y) {{ y = Concat <axis = 0> ({names}) }}"
        onnx.save(weighted(text, values), tmp_path / f"{count}.onnx")
    many = tmp_path / "1000.onnx"
    taken = measured(OPENED, tmp_path / "1.onnx", many)
    planned = session_bytes(many, load_runtime_graph(many, {"x": (4,)}))
    assert planned == pytest.approx(taken, rel=0.4)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_loop_inside_of_a_loop(threads, case, tmp_path):
    """What turns return lies between what they work in: the process takes up to 9 % more."""
    this = case("turns")
    size = len(this.inputs) // 5
    shapes = this.shapes_of(size)
    plan = plan_memory(this.package, shapes, threads=threads)
    result = run_training_child(this.job(tmp_path, threads=threads, batch_size=size))
    assert plan.peak.nbytes == pytest.approx(result.peak_bytes, rel=0.12)


@pytest.mark.parametrize("name", ["mlp", "cnn", "recurrent", "tables"])
@pytest.mark.parametrize("threads", [1, 2])
def test_phases_of_a_replay(name, threads, case, tmp_path):
    this = case(name)
    size = len(this.inputs) // 5  # the held-out samples are one full batch
    job = this.job(tmp_path, threads=threads, batch_size=size)
    shapes = this.shapes_of(size)
    plan = plan_memory(this.package, shapes, threads=threads)
    planned = {phase.name: phase.nbytes for phase in plan.phases}
    result = run_training_child(job)
    assert plan.peak.nbytes == pytest.approx(result.peak_bytes, rel=0.08)
    for phase in ("evaluation", "step", "saving"):
        most = max(planned[own] for own in REPLAYED[phase])
        assert most == pytest.approx(result.phase_peaks[phase], rel=0.12), phase
    # Sessions grow a little in their first runs; the plan counts nodes at what they take then.
    most = max(planned[own] for own in REPLAYED["loading"])
    assert most == pytest.approx(result.phase_peaks["loading"], rel=0.25)


@pytest.mark.parametrize("size", [49, 33, 17])
def test_batches_of_both_processes(size, case, tmp_path):
    """Passes of 49 samples, in batches of which the last may be smaller.

    The second process does not evaluate first. Free chunks lie elsewhere: it takes up to a tenth
    more, or less.
    """
    this = case("volumes")
    held = len(this.inputs) // 5
    shapes = this.shapes_of(size)
    plan = plan_memory(this.package, shapes, evaluated=held, samples=[len(this.inputs) - held])
    kept = str(tmp_path / "kept")
    job = this.job(tmp_path, batch_size=size, epochs=4, keep_checkpoint=kept, save_every=1)
    whole = run_training_child(dataclasses.replace(job, keep_checkpoint=None))
    run_training_child(dataclasses.replace(job, max_steps=1))
    resumed = run_training_child(dataclasses.replace(job, resume=True))
    need = max(whole.peak_bytes or 0, resumed.peak_bytes or 0)
    assert plan.peak.nbytes == pytest.approx(need, rel=0.03)


def test_an_evaluation_of_fewer_samples_than_a_batch(case, tmp_path):
    """12 of 61 samples are held out; a batch has the other 49."""
    this = case("volumes")
    held = len(this.inputs) // 5
    size = len(this.inputs) - held
    shapes = this.shapes_of(size)
    few, most, none = (plan_memory(this.package, shapes, evaluated=n) for n in (held, None, 0))
    once = plan_memory(this.package, shapes, evaluated=held, steps=1)
    need = run_training_child(this.job(tmp_path, batch_size=size)).peak_bytes
    assert need < once.peak.nbytes < 0.95 * few.peak.nbytes < 0.95 * most.peak.nbytes
    first, whole = (
        next(phase.nbytes for phase in plan.phases if phase.name == "first evaluation")
        for plan in (few, most)
    )
    assert first < 0.5 * whole
    assert [peak.phase for peak in none.phase_peaks() if peak.phase == "evaluation"] == []
    assert plan_memory(this.package, shapes, evaluated=2 * size) == most


def test_margin_covers_what_the_plan_misses(case, tmp_path):
    """A limit at the measured need with half the margin on top is not said to be enough."""
    this = case("mlp")
    need = run_training_child(this.job(tmp_path)).peak_bytes
    peak = plan_memory(this.package, this.shapes).peak.nbytes
    assert memory_fit(peak, (peak + with_margin(peak)) // 2) == "close"
    assert memory_fit(peak, int(0.95 * need)) != "fits"
    assert memory_fit(peak, int(1.15 * need)) == "fits"


def test_resuming(case, tmp_path):
    """A second process reads parameters and moments, and moves both into flat buffers."""
    this = case("mlp")
    assert run_training_child(this.job(tmp_path)).outcome == "completed"
    assert CheckpointState.load_checkpoint(tmp_path / "checkpoint").optimizer.step > 0
    package = this.package
    models = package.training_model, package.eval_model, package.optimizer_model
    peak = measured(RESUME, *models, tmp_path / "checkpoint")
    planned = {phase.name: phase.nbytes for phase in plan_memory(package, this.shapes).phases}
    assert planned["resuming"] == pytest.approx(peak, rel=0.12)
    # The moments are what it takes beyond a start from the package's own checkpoint.
    assert peak > 1.3 * planned["loading the evaluation model"]


def test_a_kit_loads_the_step_model_before_gradients_are_asked_for(case):
    """In C++ (tests/kits/test_arena.py measures it), and not in Python."""
    package, shapes = case("mlp").package, case("mlp").shapes
    uses = [session_use(package.manifest, "cpp", loop) for loop in ("step", "train")]
    assert [(use.step_model, use.switches) for use in uses] == [(True, False), (False, True)]
    assert not session_use(package.manifest, "python", "train").switches
    stepping, switching, plain = (
        {each.name: each.nbytes for each in plan_memory(package, shapes, use).phases}
        for use in (*uses, uses[1]._replace(switches=False))
    )
    assert switching["resuming"] == stepping["resuming"] > plain["resuming"]
    assert switching["training step"] == plain["training step"]


KERNELS = {
    "ScatterElements": (
        [((1024, 1024), 4), ((1024, 1024), 8), ((1024, 1024), 4)],
        "(float[1024, 1024] x, int64[1024, 1024] i, float[1024, 1024] u) => (float[1024, 1024] y) "
        '{ y = ScatterElements <reduction = "add"> (x, i, u) }',
    ),
    "Expand": (
        [((1024, 1024, 1), 4), ((3,), 8)],
        "(float[1024, 1024, 1] x, int64[3] i) => (float[1024, 1024, 2] y) { y = Expand (x, i) }",
    ),
    "Dropout": (
        [((4096, 2048), 4), ((), 4), ((), 1)],
        "(float[4096, 2048] x, float i, bool u) => (float[4096, 2048] y) { y = Dropout (x, i, u) }",
    ),
}


@pytest.mark.parametrize("op_type", KERNELS)
def test_memory_that_a_kernel_allocates_itself(op_type, tmp_path):
    """Not in the arena, so no profile tells: what the process takes does."""
    inputs, text = KERNELS[op_type]
    (planned,) = workspaces(op_type, {}, inputs, [((1024, 1024, 2), 4)], 1)
    assert planned == 8 * 2**20
    onnx.save(weighted(f'<ir_version: 8, opset_import: ["": 18]> g {text}'), tmp_path / "m.onnx")
    assert measured(HEAP, tmp_path / "m.onnx", op_type) == pytest.approx(planned, rel=0.05)


# What is measured is the training's memory, whatever the process did before it.


def test_bytecode_that_nobody_stored(case, tmp_path, monkeypatch):
    """Compiling every module of the process frees megabytes that the training must not hide in."""
    this = case("cnn")
    plan = plan_memory(this.package, this.shapes)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    compiled = run_training_child(this.job(tmp_path)).peak_bytes
    assert not (tmp_path / "bytecode").exists()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    run_training_child(this.job(tmp_path))
    stored = run_training_child(this.job(tmp_path)).peak_bytes
    assert any((tmp_path / "bytecode").rglob("*.pyc"))
    assert compiled == pytest.approx(stored, abs=400_000)
    assert plan.peak.nbytes == pytest.approx(stored, rel=0.1)
    assert plan.peak.nbytes == pytest.approx(compiled, rel=0.1)


MAPPED = """
import re
from pathlib import Path
MemoryMeter().close()
text = Path("/proc/self/smaps").read_text()
head = r"r-xp [^\\n]*onnxruntime_pybind11_state[^\\n]*\\n"
parts = re.findall(head + r"Size: +(\\d+) kB.*?\\nRss: +(\\d+)", text, re.S)
assert parts
print(sum(int(size) - int(resident) for size, resident in parts))
"""


def test_no_page_of_a_library_comes_later():
    """It would be subtracted from the highest moment before it."""
    assert measured(MAPPED) == 0
