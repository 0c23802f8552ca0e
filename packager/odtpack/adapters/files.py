"""An adapter in the files of PEFT and of ONNX Runtime."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.checker

from odtpack.choices import AdapterKind
from odtpack.errors import OdtpackError
from odtpack_runtime import CheckpointState
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.files.folder_update import check_finished
from odtpack_runtime.package.manifest import AdapterInfo, Manifest
from odtpack_runtime.package.package import Package

# PEFT's files of an adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""Begins the names of the parameters of an adapter."""

_TABLE = ".base_layer.weight"
_MAX_CONFIG_BYTES: Final = 2**20
_LARGEST_ALPHA: Final = 1e30
_TYPES: Final = {"lora": "LORA", "dora": "LORA", "ia3": "IA3", "prompt": "PROMPT_TUNING"}

# Settings that change what the tensors mean, with the value that they have without them.
_PLAIN: Final[dict[str, Any]] = {
    "alora_invocation_tokens": None, "bias": "none", "layer_replication": None,
    "lora_bias": False, "megatron_config": None, "rank_pattern": {}, "alpha_pattern": {},
    "target_parameters": None, "trainable_token_indices": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "kasa_config": None, "monteclora_config": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An adapter as PEFT's files hold it."""

    kind: AdapterKind  # ``lora``, ``dora``, ``ia3`` or ``prompt``
    tensors: Mapping[str, np.ndarray]  # values by name, in float32
    rank: int = 0  # ``lora``, ``dora``: rows of A
    scaling: float = 1.0  # ``lora``, ``dora``: how often B A counts
    # Names or ends of names of the layers; a text is a regular expression.
    layers: tuple[str, ...] | str = ()
    # ``ia3``: the same for the layers whose input is scaled.
    feedforward: tuple[str, ...] | str = ()
    saved: tuple[str, ...] = ()  # modules that were trained as a whole


def write_peft(folder: Path, adapter: PeftAdapter, dropout: float = 0.0) -> tuple[Path, Path]:
    """Write the files of an adapter; each is whole or not there."""
    # folder: Where they go; it is made if needed. dropout: ``lora``: the dropout of its training.
    # Returns paths of the tensors and of the configuration.
    import safetensors.numpy

    if adapter.kind not in _TYPES:
        raise OdtpackError(
            "peft-without-kind",
            f"PEFT has no file for {adapter.kind}, which trains parameters that the model has",
        )
    content: dict[str, Any] = {
        "peft_type": _TYPES[adapter.kind],
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "target_modules": list(adapter.layers),
        "modules_to_save": list(adapter.saved) or None,
        "fan_in_fan_out": False,
    }
    if adapter.kind == "prompt":
        (vectors,) = adapter.tensors.values()
        content = {
            "peft_type": _TYPES["prompt"],
            "base_model_name_or_path": None,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "num_virtual_tokens": len(vectors),
            "token_dim": vectors.shape[1],
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",
        }
    elif adapter.kind == "ia3":
        content |= {"feedforward_modules": list(adapter.feedforward), "init_ia3_weights": True}
    else:
        content |= {
            "r": adapter.rank,
            "lora_alpha": adapter.scaling * adapter.rank,
            "lora_dropout": dropout,
            "use_dora": adapter.kind == "dora",
            "use_rslora": False,
            "bias": "none",
            "init_lora_weights": True,
        }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(value) for name, value in adapter.tensors.items()}
    paths = folder / TENSORS, folder / CONFIG
    with atomic_write(paths[0]) as stream:
        stream.write(safetensors.numpy.save(tensors, {"format": "pt"}))
    with atomic_write(paths[1]) as stream:
        stream.write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
    return paths


def read_peft(folder: Path) -> PeftAdapter:
    """Read the files of an adapter."""
    import safetensors
    import safetensors.numpy

    check_finished(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise OdtpackError("peft-not-found", f"{folder} has no {name}", where=str(folder))
    config = _config(folder / CONFIG)
    try:
        found = safetensors.numpy.load_file(folder / TENSORS)
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise OdtpackError(
            "peft-invalid", f"{TENSORS} cannot be read: {error}", where=str(folder / TENSORS)
        ) from error
    # Beside an embedding's adapter PEFT saves its table.
    kept = {name: found[name] for name in sorted(found) if not name.endswith(_TABLE)}
    tensors = {name: value.astype(np.float32) for name, value in kept.items()}
    where = str(folder / CONFIG)
    kind = config.get("peft_type")
    saved = _names(config.get("modules_to_save"))
    layers, feedforward = (
        value if isinstance(value, str) else _names(value)
        for value in map(config.get, ("target_modules", "feedforward_modules"))
    )
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise OdtpackError(
                "peft-unsupported", f"the adapter has {key} = {config[key]!r:.80}", where=where
            )
    if kind == "IA3":
        return PeftAdapter("ia3", tensors, 0, 1.0, layers, feedforward, saved)
    if kind == "PROMPT_TUNING":
        return PeftAdapter("prompt", tensors)
    if kind != "LORA":
        raise OdtpackError(
            "peft-unsupported", f"the adapter is of PEFT's type {kind!r:.40}", where=where
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        type(rank) is not int
        or not 1 <= rank < 2**31
        or isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not -_LARGEST_ALPHA <= alpha <= _LARGEST_ALPHA  # nor NaN
    ):
        made = f"r = {rank!r:.40} and lora_alpha = {alpha!r:.40}"
        raise OdtpackError("peft-invalid", f"{made} make no adapter", where=where)
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    dora: AdapterKind = "dora" if config.get("use_dora") else "lora"
    return PeftAdapter(dora, tensors, rank, scaling, layers, feedforward, saved)


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise OdtpackError("peft-invalid", f"it is not JSON: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise OdtpackError("peft-invalid", "it is not a JSON object", where=str(path))
    return content


# ONNX Runtime's own adapters: a base model with inputs for them, and ``.onnx_adapter`` files.
#
# An app loads the base once, and names an adapter for each run: ``RunOptions.add_active_adapter``
# (``OrtRunOptions`` in other languages). The inputs have the values of an adapter that changes
# nothing where none is named.


def write_onnx_adapter(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as ``.onnx_adapter``, by the names of the base's inputs."""
    import onnxruntime

    if not hasattr(onnxruntime, "AdapterFormat"):
        raise OdtpackError(
            "onnxruntime-too-old",
            f"ONNX Runtime {onnxruntime.__version__} writes no adapters; 1.20 does",
            hint="pip install --upgrade onnxruntime",
        )
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(
        {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in tensors.items()
        }
    )
    # It writes by path: what is half written never has the name.
    with tempfile.TemporaryDirectory(prefix=".odtpack-", dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        adapter.export_adapter(str(made))
        with atomic_write(path) as stream:
            stream.write(made.read_bytes())


def with_adapter_inputs(model: Path, defaults: Mapping[str, np.ndarray]) -> None:
    """Let initializers of a model be inputs that may be left out."""
    # model: An ONNX file, which is replaced. defaults: Their values where a run names no adapter.
    proto = onnx.load(model)
    for tensor in proto.graph.initializer:
        if tensor.name not in defaults:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        array = np.asarray(defaults[tensor.name], dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        proto.graph.input.append(value)
    if proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise OdtpackError("model-too-large", "the base model would exceed 2 GB", where=str(model))
    with atomic_write(model) as stream:
        stream.write(proto.SerializeToString(deterministic=True))


# Carries an adapter out of a package's checkpoint into PEFT's files, and back.


def adapter_of(package: Package) -> AdapterInfo:
    """What a package says of its adapter."""
    info = package.manifest.adapter
    if info is None:
        raise OdtpackError(
            "no-adapter", "the package was built without an adapter", where=str(package.path)
        )
    return info


def to_peft(package: Package, state: CheckpointState) -> PeftAdapter:
    """The adapter of a checkpoint, as PEFT has it."""
    # Parameters that are trained besides become modules that PEFT saves as a whole.
    # package: The package that was built with it.
    info = adapter_of(package)
    arrays = state.arrays(trainable=True)
    tensors = {name: arrays[name] for name in info.parameters}
    saved = []
    for name, original in _besides(package.manifest, info).items():
        module, dot, _ = name.rpartition(".")
        if original or not dot:
            raise OdtpackError(
                "peft-without-name",
                f"{original or name!r} is trained besides the adapter, and has no name that a "
                "PyTorch module would have",
                where=str(package.path),
            )
        tensors[f"{PREFIX}{name}"] = arrays[name]
        saved.append(module)
    rank = info.rank or 0
    scaling = (info.alpha or 0.0) / rank if rank else 1.0
    copies = {name: np.array(value) for name, value in tensors.items()}
    return PeftAdapter(
        info.kind, copies, rank, scaling, info.layers, info.feedforward, tuple(dict.fromkeys(saved))
    )


def from_peft(package: Package, adapter: PeftAdapter, where: Path) -> CheckpointState:
    """The package's checkpoint with an adapter of PEFT in it."""
    # package: Built with an adapter of the same kind, rank, factor and layers.
    info = adapter_of(package)
    for what, option, theirs, ours in (
        ("kind", "--adapter", adapter.kind, info.kind),
        ("rank", "--rank", adapter.rank or None, info.rank),
    ):
        if theirs != ours:
            raise _mismatch(
                f"the adapter's {what} is {theirs}, the package's {ours}",
                f"build the package with {option} {theirs}",
                where,
            )
    own = (info.alpha or 0.0) / info.rank if info.rank else 1.0
    if not math.isclose(own, adapter.scaling, rel_tol=1e-6):
        raise _mismatch(
            f"the adapter counts {adapter.scaling:g} times, the package's {own:g} times",
            f"build the package with --alpha {adapter.scaling * adapter.rank:g}",
            where,
        )
    state = CheckpointState.load_checkpoint(package.checkpoint)
    arrays = state.arrays(trainable=True)
    names = {name: name for name in info.parameters}
    names |= {f"{PREFIX}{name}": name for name in _besides(package.manifest, info)}
    values = dict(adapter.tensors)
    missing, unknown = [n for n in names if n not in values], [n for n in values if n not in names]
    if missing or unknown:
        what = (
            f"the adapter has no {missing[0]!r}, which the package trains"
            if missing
            else f"the adapter has {unknown[0]!r}, which the package does not train"
        )
        raise _mismatch(what, "build the package with --on for the same layers", where)
    for name, own_name in names.items():
        value, place = values[name], arrays[own_name]
        if value.shape != place.shape:
            raise _mismatch(
                f"{name!r} is {list(value.shape)} in the adapter and {list(place.shape)} in the "
                "package",
                "build the package from the model that the adapter was trained on",
                where,
            )
        np.copyto(place, value, casting="same_kind")
    return state


def _besides(manifest: Manifest, info: AdapterInfo) -> dict[str, str]:
    """Names of what is trained besides the adapter, each with its made-up one or nothing."""
    own = set(info.parameters)
    return {
        (item.module or item.name): item.name if item.module else ""
        for item in manifest.parameters
        if item.role == "trainable" and item.name not in own
    }


def _mismatch(what: str, hint: str, where: Path) -> OdtpackError:
    return OdtpackError("adapter-mismatch", what, where=str(where), hint=hint)
