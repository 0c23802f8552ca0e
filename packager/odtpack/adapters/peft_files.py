"""PEFT's files of an adapter: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from odtpack.choices import AdapterKind
from odtpack.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.files.folder_update import check_finished

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
    """An adapter as PEFT's files hold it.

    Attributes:
        kind: ``lora``, ``dora``, ``ia3`` or ``prompt``.
        tensors: Values by name, in float32.
        rank: ``lora``, ``dora``: rows of A.
        scaling: ``lora``, ``dora``: how often B A counts.
        layers: Names or ends of names of the layers; a text is a regular expression.
        feedforward: ``ia3``: the same for the layers whose input is scaled.
        saved: Modules that were trained as a whole.
    """

    kind: AdapterKind
    tensors: Mapping[str, np.ndarray]
    rank: int = 0
    scaling: float = 1.0
    layers: tuple[str, ...] | str = ()
    feedforward: tuple[str, ...] | str = ()
    saved: tuple[str, ...] = ()


def write_peft(folder: Path, adapter: PeftAdapter, dropout: float = 0.0) -> tuple[Path, Path]:
    """Write the files of an adapter; each is whole or not there.

    Args:
        folder: Where they go; it is made if needed.
        adapter: The adapter.
        dropout: ``lora``: the dropout of its training.

    Returns:
        Paths of the tensors and of the configuration.

    Raises:
        OdtpackError: PEFT has no adapter of this kind (``peft-without-kind``), or a file cannot
            be written.
    """
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
    """Read the files of an adapter.

    Raises:
        OdtpackError: One is missing (``peft-not-found``) or not what it should be
            (``peft-invalid``), the last write was interrupted (``update-unfinished``), or the
            adapter is of a kind or has a setting that odtpack does not know
            (``peft-unsupported``).
    """
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
