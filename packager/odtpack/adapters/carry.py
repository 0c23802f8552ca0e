"""Carries an adapter out of a package's checkpoint into PEFT's files, and back."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from odtpack.adapters.peft_files import PREFIX, PeftAdapter
from odtpack.errors import OdtpackError
from odtpack_runtime import CheckpointState
from odtpack_runtime.package.manifest import AdapterInfo, Manifest
from odtpack_runtime.package.package import Package


def adapter_of(package: Package) -> AdapterInfo:
    """What a package says of its adapter.

    Raises:
        OdtpackError: It has none (``no-adapter``).
    """
    info = package.manifest.adapter
    if info is None:
        raise OdtpackError(
            "no-adapter", "the package was built without an adapter", where=str(package.path)
        )
    return info


def to_peft(package: Package, state: CheckpointState) -> PeftAdapter:
    """The adapter of a checkpoint, as PEFT has it.

    Parameters that are trained besides become modules that PEFT saves as a whole.

    Args:
        package: The package that was built with it.
        state: One of its checkpoints.

    Raises:
        OdtpackError: There is no adapter, or a parameter that is trained besides has a name that
            its exporter made up (``peft-without-name``).
    """
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
    """The package's checkpoint with an adapter of PEFT in it.

    Args:
        package: Built with an adapter of the same kind, rank, factor and layers.
        adapter: The adapter.
        where: Its folder, for messages.

    Raises:
        OdtpackError: ``adapter-mismatch``: they are not alike.
    """
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
