"""The library of native kernels, built once, and models of its kernels.

With ``ODTPACK_KERNELS_APART=address,undefined``, ``thread`` or ``aarch64`` in the environment,
tests of single kernels run them in a program of their own (``runtime/native_case``): built with
these sanitizers, or for ARM64 and emulated. ``make native-check`` does all three.
"""

import atexit
import functools
import math
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx.helper
import onnxruntime
import pytest

from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.files.atomic import locked
from odtpack_runtime.package.native import check_functions, program_of
from odtpack_runtime.session.native import DOMAIN, ENTRY
from odtpack_runtime.session.options import default_session_options
from tests.packaging_tools import losses_of_steps
from tests.refused import refused

ROOT = Path(__file__).parents[1]
INCLUDE = ROOT / "build/cpp-deps/include"
OPSET = 17
APART: Final = os.environ.get("ODTPACK_KERNELS_APART", "")


def _need_tools() -> None:
    """Skip the test where kernels cannot be built."""
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]}")
    if not (INCLUDE / "onnxruntime_c_api.h").is_file():
        pytest.skip("scripts/setup_cpp.sh sets up ONNX Runtime's header")


@functools.cache
def library() -> Path:
    """The library; the test is skipped where it cannot be built."""
    _need_tools()
    lock = ROOT / "build/native.lock"
    lock.touch()
    with locked(lock):  # other test processes build it too
        command = ["make", "--silent", "native"]
        made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next((ROOT / made.stdout.decode().strip()).glob("*odtpack-kernels.*"))


def options(*, native: bool) -> onnxruntime.SessionOptions:
    """Session options, with the library or without."""
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = 2
    chosen.log_severity_level = 4
    if native:
        chosen.register_custom_ops_library(str(library()))
    return chosen


def session(model: onnx.ModelProto, *, native: bool) -> Any:
    """A session with the library or without."""
    if native and APART:
        return Apart(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), options(native=native))


def runs_or_says(model: onnx.ModelProto, feeds: Any, words: tuple[str, ...]) -> None:
    """Check that a model runs with the library, or that the error has one of the words."""
    said = words[0]
    try:
        session(model, native=True).run(None, feeds)
    except Exception as error:
        said = str(error)
    assert any(word in said for word in words)


def refuses_bodies(model: onnx.ModelProto, *, unless: bool) -> None:
    """Check that a model whose functions have other bodies than their kernels is refused."""
    if unless:
        check_functions(model, "here")
        return
    with refused("package-limits", "no body, or a body that"):
        check_functions(model, "here")


def train(
    package: Path, batch: Sequence[np.ndarray], prefix: Path, *, native: bool, steps: int = 3
) -> tuple[list[float], list[np.ndarray]]:
    """Losses of steps on a batch, and parameters; the profile has this prefix."""
    options = default_session_options(package / "training_model.onnx", 1)
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    if not native:
        options.add_session_config_entry(ENTRY, "0")
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    module = Module(package / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(package / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.05)
    losses = losses_of_steps(module, optimizer, [batch] * steps)
    return losses, [np.array(value.data) for _, value in state.parameters]


def trains_alike(
    package: Path, batch: Sequence[np.ndarray], folder: Path, *, losses: float, rtol: float,
    atol: float,
) -> None:  # fmt: skip
    """Check that kernels are taken; losses and parameters are those of the bodies."""
    found = []
    for native in (True, False):
        found.append(train(package, batch, folder / f"{native}-", native=native))
        profile = "".join(path.read_text() for path in folder.glob(f"{native}-*"))
        assert ('"op_name" : "Kernel0"' in profile) is native
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=losses)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


@functools.cache
def program_apart(build: str) -> list[str]:
    """The command that runs a kernel apart; built once for each process of tests."""
    _need_tools()
    emulator, flags = shutil.which("qemu-aarch64-static"), f"-fsanitize={build}"
    options = [f"-DCMAKE_CXX_FLAGS={flags} -fno-sanitize-recover=all -g -O1"]
    if build == "aarch64":
        if emulator is None or shutil.which("aarch64-linux-gnu-g++") is None:
            pytest.skip("there is no compiler or no emulator for ARM64")
        options = [
            "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
            "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", "-DCMAKE_EXE_LINKER_FLAGS=-static",
        ]  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="odtpack-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = ROOT / "tests/runtime/native_case"
    prepare = ["cmake", "-S", source, "-B", folder, f"-DONNXRUNTIME_INCLUDE_DIR={INCLUDE}"]
    subprocess.run([*prepare, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    if build == "thread":
        begun = subprocess.run([folder / "native_case"], capture_output=True, check=False)
        if b"unexpected memory mapping" in begun.stderr:
            pytest.skip("ThreadSanitizer cannot run with this kernel's layout of addresses")
    return [*([str(emulator)] if build == "aarch64" else []), str(folder / "native_case")]


class Apart:
    """What a session of one native node computes, in a program of its own."""

    def __init__(self, model: onnx.ModelProto) -> None:
        *fresh, self._call = model.graph.node
        self._fresh = {each.output[0]: each.input[0] for each in fresh}
        assert all(each.op_type == "Abs" for each in fresh)
        self._found = {each.name: each for each in self._call.attribute}

    def run(self, _: None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Compute all outputs; what the kernel refuses is an error."""
        inputs = [
            np.abs(feeds[self._fresh[name]]) if name in self._fresh else feeds[name]
            for name in self._call.input
        ]

        def listed(numbers: Iterable[int]) -> bytes:
            whole = [*numbers]
            return struct.pack(f"<{len(whole) + 1}q", len(whole), *whole)

        case = [listed(self._found["program"].ints), struct.pack("<q", len(inputs))]
        for each in inputs:
            kind = {np.dtype(np.uint8): 1, np.dtype(np.int8): 2}.get(each.dtype, 0)
            case += [struct.pack("<q", kind), listed(each.shape)]
            case.append(np.ascontiguousarray(each, None if kind else "<f4").tobytes())
        case.append(struct.pack("<2q", len(self._call.output), bool(self._fresh)))
        ran = subprocess.run(
            [*program_apart(APART), self._found["kernel"].s.decode()],
            input=b"".join(case), capture_output=True, check=False,
        )  # fmt: skip
        if ran.returncode == 3:
            raise ValueError(ran.stderr.decode())
        assert ran.returncode == 0, ran.stderr.decode()
        results, rest = [], ran.stdout
        for _ in self._call.output:
            (rank,) = struct.unpack_from("<q", rest)
            dims = struct.unpack_from(f"<{rank}q", rest, 8)
            at, size = 8 + 8 * rank, math.prod(dims)
            results.append(np.frombuffer(rest, "<f4", size, at).reshape(dims))
            rest = rest[at + 4 * size :]
        assert not rest
        return results


def kernel_model(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, tuple[int, ...]], outputs: list[str], *,
    kernel: str = "elementwise", program: list[int] | None = None,
    of_bytes: Sequence[np.dtype] = (),
) -> onnx.ModelProto:  # fmt: skip
    """A model of one native node, whose body is ``nodes``; the program is theirs if not given.

    Its first inputs are of the types of ``of_bytes``, the others float32.
    """
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    code = program_of(nodes, list(inputs), outputs) if program is None else program
    kinds = {np.dtype(np.uint8): "Codes0", np.dtype(np.int8): "SignedCodes0"}
    name = kinds.get(of_bytes[0], "Kernel0") if of_bytes else "Kernel0"
    function = onnx.helper.make_function(
        DOMAIN, name, list(inputs), outputs, nodes, opsets[:1], ["kernel", "program"]
    )
    call = onnx.helper.make_node(name, list(inputs), outputs, domain=DOMAIN, kernel=kernel)
    call.attribute.append(
        onnx.helper.make_attribute("program", code, attr_type=onnx.AttributeProto.INTS)
    )
    number, value = onnx.TensorProto.FLOAT, onnx.helper.make_tensor_value_info
    types = [onnx.helper.np_dtype_to_tensor_dtype(each) for each in of_bytes]
    types += [number] * (len(inputs) - len(types))
    read = [value(*each) for each in zip(inputs, types, inputs.values(), strict=True)]
    written = [value(name, number, None) for name in outputs]
    graph = onnx.helper.make_graph([call], "native", read, written)
    return onnx.ModelProto(ir_version=8, graph=graph, functions=[function], opset_import=opsets)


def of_program(
    kernel: str, program: list[int], feeds: Mapping[str, np.ndarray],
    body: tuple[str, str] = ("Identity", "i0"), of_bytes: Sequence[np.dtype] = (),
) -> onnx.ModelProto:  # fmt: skip
    """A model of one native node whose body, an operator and its input, is not looked at."""
    node = onnx.helper.make_node(body[0], [body[1]], ["o"])
    shapes = {name: each.shape for name, each in feeds.items()}
    return kernel_model([node], shapes, ["o"], kernel=kernel, program=program, of_bytes=of_bytes)


UNIT = 2.0**-24


def spoil(random: np.random.Generator, array: np.ndarray, share: float) -> None:
    """Put infinities, NaN and numbers around 0 into a share of an array."""
    places = random.random(array.shape) < share
    array[places] = random.choice([np.inf, -np.inf, np.nan, 1e-42, 0], places.sum())


def assert_rounded(found: np.ndarray, wanted: np.ndarray, total: np.ndarray, terms: int) -> None:
    """A sum of so many terms, of this total without signs, is as right as float32 can be."""
    assert found.shape == wanted.shape
    with np.errstate(invalid="ignore"):
        near = np.abs(found - wanted) <= (terms + 1) * UNIT * total + 1e-37
    assert (near | (found == wanted) | (np.isnan(found) & np.isnan(wanted))).all()


def unaligned(array: np.ndarray) -> np.ndarray:
    """The same numbers, one element beyond where numpy puts them."""
    memory = np.empty(array.size + 1, array.dtype)[1:].reshape(array.shape)
    memory[...] = array
    return memory


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays are the same to the bit; one NaN is as good as another."""
    both = np.isnan(left) & np.isnan(right)
    return left.shape == right.shape and bool(
        (both | (left.view(np.uint32) == right.view(np.uint32))).all()
    )
