"""The adapter of a package: written to and read from the files of ONNX Runtime and of PEFT.

ONNX Runtime's ``.onnx_adapter`` holds the parameters, which a base model takes as inputs. PEFT's
are a folder with ``adapter_model.safetensors`` and ``adapter_config.json``. The parameters of an
adapter have PEFT's names in the package, so that nothing is renamed on the way.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import flatbuffers
import numpy as np

from odtpack_runtime.checkpoint.flatbuffer import Source
from odtpack_runtime.checkpoint.format import DTYPE_CODES, DTYPES, MAX_RANK
from odtpack_runtime.checkpoint.parameters import nominal_error
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.files.atomic import atomic_write, open_regular, refuse_link, write_whole
from odtpack_runtime.files.folder_update import check_finished, update_folder
from odtpack_runtime.package.manifest import AdapterInfo, Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import PeftInfo

Tensors = Mapping[str, np.ndarray[Any, Any]]

SUFFIX: Final = ".onnx_adapter"
CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""Begins the names of the parameters of an adapter."""


def save_adapter(
    package: Package, state: CheckpointState, destination: str | os.PathLike[str]
) -> None:
    """Write the adapter of a state.

    Args:
        package: The package that the state belongs to, of one model or of segments.
        state: Its parameters, in float32.
        destination: A name that ends in ``.onnx_adapter`` for a file of ONNX Runtime's
            (``OrtLoraAdapter``), or a folder for PEFT's two files; made if needed. An adapter
            that is there is replaced, no other file, nor what PEFT wrote itself.

    Raises:
        OdtpackError: ``no-adapter``; ``peft-without-kind`` or ``peft-without-name`` if PEFT has
            no place for what is trained; ``nominal-state``; or ``file-not-written``, also where
            another file would be lost, or the package would get a file that it does not list.
    """
    path = Path(destination)
    with suppress(ValueError):  # no file has such a name: the write says so
        if package.path in (path.resolve(), *path.resolve().parents):
            raise OdtpackError(
                "file-not-written",
                f"{str(path)!r} lies in the package: odtpack verify refuses a further file in it",
            )
    with state.lock:
        if state.is_nominal:
            raise nominal_error("there are no values to save")
        if path.suffix == SUFFIX:
            tensors = trained_of(package, state)
            check_onnx_adapter(path)
            write_onnx_adapter(path, tensors)
            return
        adapter = to_peft(package, state)
    try:
        with update_folder(path, last=CONFIG) as stage:
            check_peft(path)
            write_peft(stage, adapter)
    except OdtpackError as error:
        if error.code == "package-not-written":  # this folder is not a package
            raise OdtpackError("file-not-written", error.what) from error
        raise


def load_adapter(package: Package, state: CheckpointState, source: str | os.PathLike[str]) -> None:
    """Set the trained parameters of a state to those of an adapter; all of them or none.

    Args:
        package: The package that the state belongs to.
        state: Its parameters, which may be in use by a Module. The optimizer's state stays.
        source: A file of :func:`save_adapter`, or a folder of it or of PEFT.

    Raises:
        OdtpackError: A file cannot be read (``adapter-not-found``, ``adapter-corrupt``,
            ``peft-not-found``, ``peft-invalid``, ``peft-unsupported``), or does not fit
            (``adapter-mismatch``).
    """
    values = read_adapter(package, Path(source))
    with state.lock:
        for name, array in trained_of(package, state).items():
            np.copyto(array, values[name], casting="same_kind")


# What a save may replace. A file of ONNX Runtime's form says what it is, and not who wrote it.
# PEFT's own configurations have more settings than those that odtpack writes.


def check_onnx_adapter(path: Path) -> None:
    """Refuse to replace what is not an adapter of ONNX Runtime's."""
    start = b""
    with suppress(OSError), open_regular(path) as stream:
        start = stream.read(8)
    check_replaced(path.parent, path.name, ours=start[4:] == _IDENTIFIER)


def check_peft(folder: Path) -> None:
    """Refuse to replace files of PEFT's names with another configuration than odtpack writes."""
    one = {"": np.zeros((1, 1))}
    own = {key for kind in _TYPES for key in json.loads(peft_config(PeftAdapter(kind, one)))}
    ours = False
    with suppress(OdtpackError):
        ours = {"peft_type"} <= _config(folder / CONFIG).keys() <= own
    check_replaced(folder, CONFIG, TENSORS, ours=ours)


def check_replaced(folder: Path, *names: str, ours: bool) -> None:
    """Refuse to replace files that are not odtpack's, and links."""
    for name in names:
        refuse_link(folder / name)
    found = [name for name in names if (folder / name).is_file()]
    if found and not ours:
        raise OdtpackError(
            "file-not-written",
            f"{', '.join(found)} in {str(folder)!r} would be replaced, and what is there is not as "
            "this version of odtpack writes it",
            hint="move the files, or choose another name or a new folder",
        )


def read_adapter(package: Package, where: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The values of what a package trains, by the parameters' names, from a file or a folder."""
    adapter_of(package)
    shapes = {p.name: p.shape for p in package.manifest.parameters if p.role == "trainable"}
    if where.suffix == SUFFIX:
        tensors: Tensors = read_onnx_adapter(where)
        names = {name: name for name in shapes}
    else:
        tensors, names = _peft_tensors(package, where)
    missing = [name for name in names if name not in tensors]
    unknown = [name for name in tensors if name not in names]
    if missing or unknown:
        what = (
            f"the adapter has no {missing[0]!r}, which the package trains"
            if missing
            else f"the adapter has {unknown[0]!r:.200}, which the package does not train"
        )
        raise _mismatch(what, "build the package with --on for the same layers", where)
    for name, own in names.items():
        if tensors[name].shape != shapes[own]:
            raise _mismatch(
                f"{name!r} is {list(tensors[name].shape)} in the adapter and "
                f"{list(shapes[own])} in the package",
                "build the package from the model that the adapter was trained on",
                where,
            )
    return {own: tensors[name] for name, own in names.items()}


def _mismatch(what: str, hint: str, where: Path) -> OdtpackError:
    return OdtpackError("adapter-mismatch", what, where=str(where), hint=hint)


# ONNX Runtime's format: a flatbuffer with the identifier TORT, as onnxruntime/lora writes it.
#
#     table Parameter { name: string; dims: [int64]; data_type: int32; raw_data: [uint8]; }
#     table Adapter { format_version: int32; adapter_version: int32; model_version: int32;
#                     parameters: [Parameter]; }

_IDENTIFIER = b"TORT"
_FORMAT_VERSION = 1


def write_onnx_adapter(path: Path, tensors: Tensors) -> None:
    """Write tensors by the names of a base model's inputs."""
    size = sum(array.nbytes for array in tensors.values())
    builder = flatbuffers.Builder(size + 256 * len(tensors) + 64)
    tables = []
    for name, array in sorted(tensors.items()):
        builder.StartVector(1, array.nbytes, 8)
        builder.head -= array.nbytes
        builder.Bytes[builder.head : builder.head + array.nbytes] = array.tobytes()
        data = builder.EndVector()
        builder.StartVector(8, array.ndim, 8)
        for axis in reversed(array.shape):
            builder.PrependInt64(axis)
        dims, text = builder.EndVector(), builder.CreateString(name)
        builder.StartObject(4)
        builder.PrependUOffsetTRelativeSlot(0, text, 0)
        builder.PrependUOffsetTRelativeSlot(1, dims, 0)
        builder.PrependInt32Slot(2, DTYPE_CODES[array.dtype], 0)
        builder.PrependUOffsetTRelativeSlot(3, data, 0)
        tables.append(builder.EndObject())
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    parameters = builder.EndVector()
    builder.StartObject(4)
    for slot in range(3):
        builder.PrependInt32Slot(slot, _FORMAT_VERSION, 0)
    builder.PrependUOffsetTRelativeSlot(3, parameters, 0)
    builder.Finish(builder.EndObject(), file_identifier=_IDENTIFIER)
    write_whole(path, builder.Output())


def read_onnx_adapter(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the tensors of a file of ONNX Runtime's, by name."""
    try:
        with open_regular(path) as stream:
            source = Source(stream, "adapter", str(path))
            root = source.root(_IDENTIFIER)
            if root.integer(0, "i") != _FORMAT_VERSION:
                source.fail(f"its format is {root.integer(0, 'i')}, and 1 is known")
            tensors: dict[str, np.ndarray[Any, Any]] = {}
            left = source.size
            for table in root.tables(3):
                name, shape = table.string(0), table.integers(1, MAX_RANK)
                dtype, data = DTYPES.get(table.integer(2, "i")), table.vector(3, 1)
                if dtype is None or data is None or min(shape, default=0) < 0 or name in tensors:
                    source.fail(f"its parameter {name!r:.80} is not a tensor of numbers")
                left -= data.length
                if math.prod(shape) * dtype.itemsize != data.length or left < 0:
                    source.fail(f"its parameter {name!r:.80} has {data.length} bytes")
                content = source.read(data.position, data.length)
                tensors[name] = np.frombuffer(content, dtype).reshape(shape)
    except OSError as error:
        raise unreadable("adapter-not-found", path, error) from error
    _check_finite(tensors, "adapter-corrupt", path)
    return tensors


def _check_finite(tensors: Tensors, code: str, path: Path) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            what = f"{name!r:.200} holds NaN or infinity, or what is infinite in float32"
            hint = "use an adapter from before its training diverged"
            raise OdtpackError(code, what, where=str(path), hint=hint)


# safetensors: the length of a header in 8 bytes, a header in JSON, and the elements.

_SAFE: Final = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER: Final = 2**26


def _write_safetensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    names = {np.dtype(dtype): name for name, dtype in _SAFE.items()}
    for name, array in sorted(tensors.items()):
        offsets = [end, end := end + array.nbytes]
        shape = list(array.shape)
        header[name] = {"dtype": names[array.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, array in sorted(tensors.items()):
            stream.write(array.tobytes())


def _read_safetensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors, in float32; a ValueError says what is wrong, others mean a bad header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= min(len(data) - 8, _MAX_HEADER):
        raise ValueError(f"its first 8 bytes give its header {size} bytes, of {len(data)} in all")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _SAFE:
            raise ValueError(f"its tensor {name!r:.80} is of {entry['dtype']!r:.40}, not of floats")
        dtype, shape = np.dtype(_SAFE[entry["dtype"]]), entry["shape"]
        start, stop = entry["data_offsets"]
        whole = all(type(axis) is int and axis >= 0 for axis in shape) and len(shape) <= MAX_RANK
        if not whole or start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its tensor {name!r:.80} is not where it should be")
        found = np.frombuffer(data, dtype, math.prod(shape), 8 + size + start).reshape(shape)
        if entry["dtype"] == "BF16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            tensors[name] = found.astype(np.float32)
        end = stop
    if 8 + size + end != len(data):
        raise ValueError("it is longer or shorter than its tensors")
    return tensors


# PEFT's files.

_TABLE = ".base_layer.weight"
_FACTOR = re.compile(r".*\.lora_(?:embedding_)?([AB])(?:\.weight)?", re.DOTALL)
_MAX_CONFIG_BYTES: Final = 2**20
_LARGEST_ALPHA: Final = 1e30
_TYPES: Final[dict[Kind, str]] = {
    "lora": "LORA", "dora": "LORA", "ia3": "IA3", "prompt": "PROMPT_TUNING",
}  # fmt: skip
Kind = Literal["lora", "dora", "ia3", "bitfit", "prompt"]

# Settings that change what the tensors mean, with the value that they have without them.
_PLAIN: Final[dict[str, Any]] = {
    "alora_invocation_tokens": None, "bias": "none", "layer_replication": None,
    "lora_bias": False, "megatron_config": None, "rank_pattern": {}, "alpha_pattern": {},
    "target_parameters": None, "trainable_token_indices": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "kasa_config": None, "monteclora_config": None,
}  # fmt: skip
# ``init_lora_weights`` that leave the base as it is; pissa, olora, corda, loftq, lora_ga do not.
_STARTS: Final = ("gaussian", "orthogonal", "eva")


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An adapter as PEFT's files hold it."""

    kind: Kind  # ``lora``, ``dora``, ``ia3`` or ``prompt``
    tensors: Tensors  # values by name, in float32
    rank: int = 0  # ``lora``, ``dora``: rows of A
    scaling: float = 1.0  # ``lora``, ``dora``: how often B A counts
    # Names or ends of names of the layers; a text is a regular expression. Empty where the
    # configuration leaves some of them out.
    layers: tuple[str, ...] | str = ()
    # ``ia3``: the same for the layers whose input is scaled.
    feedforward: tuple[str, ...] | str = ()
    saved: tuple[str, ...] = ()  # modules that were trained as a whole


def write_peft(folder: Path, adapter: PeftAdapter) -> tuple[Path, Path]:
    """Write tensors and configuration of an adapter, each whole or not; return their paths."""
    config = peft_config(adapter)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / TENSORS, folder / CONFIG
    _write_safetensors(paths[0], adapter.tensors)
    write_whole(paths[1], config.encode())
    return paths


def peft_config(adapter: PeftAdapter) -> str:
    """The text of the configuration; of the tensors only a prompt's shape counts."""
    if adapter.kind not in _TYPES:
        what = f"PEFT has no file for {adapter.kind}, which trains parameters that the model has"
        raise OdtpackError("peft-without-kind", what)
    content: dict[str, Any] = {
        "peft_type": _TYPES[adapter.kind],
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
    }
    if adapter.kind == "prompt":
        if adapter.saved:
            raise OdtpackError(
                "peft-without-kind",
                f"PEFT has no file for prompt vectors and {adapter.saved[0]!r} trained as a whole",
            )
        (vectors,) = adapter.tensors.values()
        content |= {
            "task_type": "CAUSAL_LM",
            "num_virtual_tokens": len(vectors),
            "token_dim": vectors.shape[1],
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",
        }
    else:
        content |= {
            "target_modules": list(adapter.layers),
            "modules_to_save": list(adapter.saved) or None,
            "fan_in_fan_out": False,
        }
    if adapter.kind == "ia3":
        content |= {"feedforward_modules": list(adapter.feedforward), "init_ia3_weights": True}
    elif adapter.kind != "prompt":
        content |= {
            "r": adapter.rank,
            "lora_alpha": adapter.scaling * adapter.rank,
            "lora_dropout": 0.0,
            "use_dora": adapter.kind == "dora",
            "use_rslora": False,
            "bias": "none",
            "init_lora_weights": True,
        }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_peft(folder: Path) -> PeftAdapter:
    """Read the files of an adapter."""
    check_finished(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise OdtpackError("peft-not-found", f"{folder} has no {name}", where=str(folder))
    config, tensors = _config(folder / CONFIG), _tensors(folder / TENSORS)
    where = str(folder / CONFIG)
    kind = config.get("peft_type")
    saved = _names(config.get("modules_to_save"))
    layers, feedforward = (
        value if isinstance(value, str) else _names(value)
        for value in map(config.get, ("target_modules", "feedforward_modules"))
    )
    if config.get("exclude_modules") or config.get("layers_to_transform") is not None:
        layers = ()

    def refuse(what: str, code: str = "peft-unsupported", hint: str | None = None) -> NoReturn:
        raise OdtpackError(code, what, where=where, hint=hint)

    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            refuse(f"the adapter has {key} = {config[key]!r:.80}")
    if kind == "IA3":
        return PeftAdapter("ia3", tensors, 0, 1.0, layers, feedforward, saved)
    if kind == "PROMPT_TUNING":
        return PeftAdapter("prompt", tensors)
    if kind != "LORA":
        refuse(f"the adapter is of PEFT's type {kind!r:.40}")
    start = config.get("init_lora_weights")
    if start is not None and not isinstance(start, bool) and start not in _STARTS:
        refuse(
            f"the adapter has init_lora_weights = {start!r:.80}, which may change the base too",
            hint="train it with init_lora_weights=True, or convert it to that: "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        type(rank) is not int
        or not 1 <= rank < 2**31
        or isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not -_LARGEST_ALPHA <= alpha <= _LARGEST_ALPHA  # nor NaN
    ):
        refuse(
            f"r must be a whole number above 0 and lora_alpha a number, not {rank!r:.40} and "
            f"{alpha!r:.40}",
            "peft-invalid",
        )
    for key in ("use_rslora", "use_dora"):
        if not isinstance(config.get(key), bool | None):
            refuse(f"{key} must be true or false, not {config[key]!r:.40}", "peft-invalid")
    _check_rank(tensors, rank, folder)
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    dora: Kind = "dora" if config.get("use_dora") else "lora"
    return PeftAdapter(dora, tensors, rank, scaling, layers, feedforward, saved)


def _check_rank(tensors: Tensors, rank: int, folder: Path) -> None:
    for name, array in tensors.items():
        factor = _FACTOR.fullmatch(name)
        axis = "AB".index(factor[1]) if factor else 0
        if factor and array.shape[axis : axis + 1] != (rank,):
            raise _mismatch(
                f"r is {rank} in {CONFIG}, and {name!r:.200} is {list(array.shape)}",
                "save the adapter again: model.save_pretrained(folder)",
                folder,
            )


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        found = _read_safetensors(path)
    except (
        OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError
    ) as error:  # fmt: skip
        told = isinstance(error, OSError) or type(error) is ValueError
        what = f"{error!s:.200}" if told else "its header does not describe tensors"
        raise OdtpackError(
            "peft-invalid", f"{TENSORS} cannot be read: {what}", where=str(path)
        ) from error
    # Beside an embedding's adapter PEFT saves its table.
    tensors = {name: found[name] for name in sorted(found) if not name.endswith(_TABLE)}
    _check_finite(tensors, "peft-invalid", path)
    return tensors


def _config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as stream:
            content = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise OdtpackError("peft-invalid", f"it is not JSON: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise OdtpackError("peft-invalid", "it is not a JSON object", where=str(path))
    return content


def adapter_of(package: Package) -> AdapterInfo:
    """What a package says of its adapter."""
    info = package.manifest.adapter
    if info is None:
        what = "the package was built without an adapter"
        raise OdtpackError("no-adapter", what, where=str(package.path))
    return info


def trained_of(package: Package, state: CheckpointState) -> dict[str, np.ndarray[Any, Any]]:
    """The live arrays of what a package trains with an adapter, of a state that is its own."""
    adapter_of(package)
    arrays = state.arrays(trainable=True)
    own = {name: (str(array.dtype), tuple(array.shape)) for name, array in arrays.items()}
    specs = [item for item in package.manifest.parameters if item.role == "trainable"]
    wanted = {item.name: (item.dtype, tuple(item.shape)) for item in specs}
    for name in sorted({*own, *wanted}):
        if own.get(name) != wanted.get(name):
            here, there = (
                f"{found[0]}{list(found[1])}" if found else "not trained"
                for found in (own.get(name), wanted.get(name))
            )
            what = f"{name!r} is {here} in the state, and {there} in the package"
            hint = "use a checkpoint that was trained with this package"
            raise OdtpackError("adapter-mismatch", what, where=str(package.path), hint=hint)
    return arrays


def to_peft(package: Package, state: CheckpointState) -> PeftAdapter:
    """The adapter of a checkpoint, as PEFT has it."""
    # Parameters that are trained besides become modules that PEFT saves as a whole.
    # package: The package that was built with it.
    values = trained_of(package, state)
    return _as_peft(package.manifest, {name: np.array(value) for name, value in values.items()})


def peft_info(manifest: Manifest) -> PeftInfo | None:
    """What a manifest says of PEFT's files; None if PEFT has no place for what is trained."""
    if manifest.adapter and (manifest.adapter.transposed or manifest.adapter.tied):
        return None  # kits write each parameter as it is, and once
    shapes = {item.name: item.shape for item in manifest.parameters if item.role == "trainable"}
    nothing = np.zeros((), np.float32)
    try:
        empty = {name: np.broadcast_to(nothing, shape) for name, shape in shapes.items()}
        adapter = _as_peft(manifest, empty)
        names = {name: peft for peft, name in _peft_names(manifest).items() if peft != name}
        return PeftInfo(config=peft_config(adapter), names=names)
    except OdtpackError:
        return None


def _as_peft(manifest: Manifest, values: Tensors) -> PeftAdapter:
    info = manifest.adapter
    assert info is not None  # noqa: S101 - the callers looked
    names, saved = _peft_names(manifest), dict[str, None]()
    for peft, name in names.items():
        if name not in info.parameters:
            saved[peft.removeprefix(PREFIX).rpartition(".")[0]] = None
    rank = info.rank or 0
    scaling = (info.alpha or 0.0) / rank if rank else 1.0
    turned = info.transposed
    tensors = {p: values[n].T if n in turned else values[n] for p, n in names.items()}
    return PeftAdapter(
        info.kind, tensors, rank, scaling, info.layers, info.feedforward, tuple(saved)
    )


def _peft_tensors(package: Package, folder: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a PEFT adapter that fits a package, and its names of the package's."""
    info, adapter = adapter_of(package), read_peft(folder)
    for what, option, theirs, ours in (
        ("kind", "--adapter", adapter.kind, info.kind),
        ("rank", "--rank", adapter.rank or None, info.rank),
    ):
        if theirs != ours:
            raise _mismatch(
                f"the adapter's {what} is {theirs}, the package's {ours}",
                f"build the package with {option} {theirs}",
                folder,
            )
    own = (info.alpha or 0.0) / info.rank if info.rank else 1.0
    if not math.isclose(own, adapter.scaling, rel_tol=1e-6):
        raise _mismatch(
            f"the product of the adapter's matrices is multiplied by {adapter.scaling:g}, that of "
            f"the package's by {own:g}",
            f"build the package with --alpha {adapter.scaling * adapter.rank:g}",
            folder,
        )
    names = _peft_names(package.manifest)
    _check_tied(info, adapter.tensors, folder)
    turned = {peft for peft, name in names.items() if name in info.transposed}
    return {n: v.T if n in turned else v for n, v in adapter.tensors.items()}, names


def _peft_names(manifest: Manifest) -> dict[str, str]:
    """The trained parameters, by PEFT's names, of which a tied one has several."""
    info = manifest.adapter
    found: dict[str, str] = {}
    for item in manifest.parameters:
        if item.role != "trainable":
            continue
        if info is None or item.name in info.parameters:
            found[item.name] = item.name
            continue
        own = item.name if item.name not in info.transposed else item.module or ""
        for name in info.tied.get(item.name, (own,)):
            if "." not in name or (name == item.name and item.module is not None):
                raise OdtpackError(
                    "peft-without-name",
                    f"{item.name!r} is trained beside the adapter, and it is not known which "
                    "parameter of the PyTorch module it is",
                )
            found[f"{PREFIX}{name}"] = item.name
    return found


def _check_tied(info: AdapterInfo, tensors: Tensors, where: Path) -> None:
    """Refuse two values of what is one parameter of the package."""
    for names in info.tied.values():
        keys = [f"{PREFIX}{name}" for name in names]
        given = [tensors[key] for key in keys if key in tensors]
        if given and not (
            len(given) == len(keys) and all(np.array_equal(given[0], g) for g in given)
        ):
            raise _mismatch(
                f"{' and '.join(map(repr, names))} are one parameter of the package, and are not "
                "equal in the adapter",
                "train them tied (ensure_weight_tying=True), or build the package with --untie",
                where,
            )
