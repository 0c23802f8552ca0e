"""The kits for C++ and Swift open the arena that a manifest describes."""

import shutil
from pathlib import Path

import pytest

from odtpack.build import build_package
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.native import VARIABLE
from odtpack_simulator.device.kits import Loop
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import child_environment
from tests import native_library, zoo
from tests.kits import cpp_kit
from tests.kits.harness import Task, refusal
from tests.packages.mutations import edit
from tests.packaging_tools import batch

pytestmark = pytest.mark.kits
SIZES = ("initial_chunk_size_bytes", "max_dead_bytes_per_chunk")


@pytest.fixture(scope="module")
def mobile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of MobileNetV2 for small images."""
    folder = tmp_path_factory.mktemp("mobile") / "package"
    build_package(zoo.mobilenet_v2(size=64, width_mult=0.5), folder, loss="cross_entropy")
    return folder


@pytest.fixture
def package(mobile: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(mobile, tmp_path / "package"))


def with_sizes(package: Path, *sizes: int | None) -> None:
    """Change the settings of the arena in a manifest; None takes one out."""
    given = {key: size for key, size in zip(SIZES, sizes, strict=True) if size is not None}

    def change(content: Task) -> None:
        kept = {key: each for key, each in content["session"].items() if key not in SIZES}
        content["session"] = kept | given

    edit(package, change, sealed=False)


def need_and_plan(kit, package, data, folder, loop="step"):
    """What the life of an app takes, and the plan for it."""
    job = {
        "package": package, "steps": [cpp_kit.save_batch(folder, data)], "count": 4,
        "threads": 1, "learning_rate": 1e-3, "evaluation": True, "evaluate_first": True,
        "resume": 2, "save": "saved", "plain": loop == "train",
    }  # fmt: skip
    needs = []
    for _ in range(5):  # a thread looks each 200 us; waiting for a processor, it misses a peak
        found = kit.measure(job, folder)
        peaks = [phase["peak_anonymous_bytes"] for phase in found["phases"].values()]
        needs.append(max(peaks) - found["before_anonymous_bytes"])
    opened = Package.open(package)
    use = session_use(opened.manifest, "cpp", loop)
    assert found["kernels"] is use.native
    shapes = {name: array.shape for name, array in data.items()}
    planned = plan_memory(opened, shapes, use).peak.nbytes
    return max(needs), planned


@pytest.mark.parametrize(
    "network",
    [zoo.mlp, lambda: zoo.mobilenet_v2(size=64, width_mult=0.5)],
    ids=["mlp", "mobilenet"],
)
def test_native_kernels_need_what_is_planned(network, kit, tmp_path, monkeypatch):
    for variable, value in child_environment().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(VARIABLE, str(native_library.library()))  # for the plan
    model = network()
    build_package(model, tmp_path / "package", loss="cross_entropy", native=True)
    data = dict(zip(("input", "labels"), batch(model, 16), strict=True))
    loops: tuple[Loop, ...] = ("step", "train")
    for loop in loops if kit is cpp_kit else loops[:1]:  # Swift's program has one loop
        need, planned = need_and_plan(kit, tmp_path / "package", data, tmp_path, loop)
        assert planned == pytest.approx(need, rel=0.06)


@pytest.mark.parametrize("sizes", ["fitted", (2**21, 2**12), (2**29, None)])
def test_an_app_needs_what_is_planned_for_it(sizes, kit, package, tmp_path, monkeypatch):
    """What an app needs changes with the settings as the plan does, which is near it.

    Of 2^29 bytes the arena writes an index of 16 MiB, which no other setting has it do.
    """
    for variable, value in child_environment().items():  # what is freed goes back, as on phones
        monkeypatch.setenv(variable, value)
    inputs, labels = batch(zoo.mobilenet_v2(size=64, width_mult=0.5), 8)
    data = {"input": inputs, "labels": labels}

    def above_the_plan() -> int:
        need, planned = need_and_plan(kit, package, data, tmp_path)
        assert planned == pytest.approx(need, rel=0.06)
        return need - planned

    if sizes != "fitted":
        with_sizes(package, *sizes)
    above = above_the_plan()
    with_sizes(package, 2**24, None)  # one region, whatever becomes of results
    assert above == pytest.approx(above_the_plan(), abs=2**20)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("size", [255, -2, 2**30 + 1, 2**40, 0.5, "large"])
def test_other_sizes_are_refused(key, size, kit, package, tmp_path):
    with_sizes(package, *(size if each == key else None for each in SIZES))
    assert "manifest" in refusal(kit.run, {"package": package, "steps": []}, tmp_path)
