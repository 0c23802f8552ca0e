"""One step in PyTorch by the user's own code, and how that of a package differs."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from odtpack.cli._fit import open_module
from odtpack.errors import OdtpackError, quoted
from odtpack_runtime import CheckpointState
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.loop import loss_of

_NEAR: Final = 1e-3  # of the norm: what float32 leaves of a gradient
_MODES: Final = ("Dropout", "BatchNorm", "InstanceNorm")


@dataclasses.dataclass(frozen=True)
class Twin:
    """A step in PyTorch."""

    parameters: Mapping[str, Any]
    buffers: Mapping[str, Any]
    loss: float
    batch: Mapping[str, Any]
    padding: Mapping[int, int]  # rows without a gradient of the look-up, by id of the tensor
    modes: tuple[str, ...]  # kinds of layers in training mode that compute otherwise there


def read_twin(text: str) -> Twin:
    """Run the user's function, and the backward pass of its loss."""
    name, _, function = text.rpartition(":")
    file = Path(name)
    if not file.is_file() or not function.isidentifier():
        what = f"--torch {text!r} is not a file of Python and a function in it"
        raise OdtpackError("bad-option", what, hint="write for example: --torch module.py:build")
    if importlib.util.find_spec("torch") is None:
        what = "gradients are compared with those of PyTorch, which is not installed"
        raise OdtpackError("torch-not-installed", what)
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None and found.loader is not None  # noqa: S101, PT018 - of a .py file
    source = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        found.loader.exec_module(source)
        module, loss, batch = getattr(source, function)()
        loss.backward()
        modes = {type(m).__name__ for m in module.modules() if m.training}
        return Twin(
            dict(module.named_parameters(remove_duplicate=False)),
            dict(module.named_buffers()),
            float(loss.detach()),
            {name: _array(each) for name, each in batch.items()},
            {
                id(each.weight): each.padding_idx
                for each in module.modules()
                if getattr(each, "padding_idx", None) is not None
                and getattr(each, "weight", None) is not None
            },
            tuple(sorted(kind for kind in modes if kind.startswith(_MODES))),
        )
    except Exception as error:
        raise OdtpackError(
            "torch-step-failed",
            f"{function} raised {type(error).__name__}: {str(error)[:300]}",
            where=str(file),
            hint="it returns the module, the loss and the inputs by name, and the loss has a "
            "gradient",
        ) from error
    finally:
        sys.path.pop(0)


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor)


def compared(package: Package, twin: Twin) -> dict[str, Any]:
    """The step of a package beside that of PyTorch."""
    manifest = package.manifest
    for item in manifest.inputs:
        if item.name not in twin.batch:
            what = f"the step in PyTorch does not return {item.name!r}, an input of the package"
            hint = f"add it to the returned inputs, which are {', '.join(twin.batch)}"
            raise OdtpackError("missing-input", what, hint=hint)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = open_module(package, state)
    dtypes = {item.name: item.dtype for item in manifest.inputs}
    names = module.input_names()
    fed = [np.ascontiguousarray(twin.batch[n].astype(dtypes[n], copy=False)) for n in names]
    loss = loss_of(module(*fed))
    known = {**twin.parameters, **twin.buffers}
    equal, different, left = list[str](), list[dict[str, Any]](), list[str]()
    trained = {p.name: p.module or p.name for p in manifest.parameters if p.role == "trainable"}
    taken = {id(known[label]) for label in trained.values() if label in known}  # tied: one for all
    same_loss = abs(loss - twin.loss) <= _NEAR * max(abs(twin.loss), _NEAR)
    for name, label in trained.items():
        shown, value = label, state.parameters[name].data
        gradient = state.parameters[name].grad
        if gradient is None:
            left.append(shown)
            continue
        gradient = gradient * manifest.accumulation_steps

        def distance(ways: list[_Way], gradient: np.ndarray = gradient) -> float:
            return min(_distance(gradient, wanted) for _, wanted in ways)

        if shown not in known:  # an exporter that reshapes a parameter renames it
            others = {
                each: fits for each, theirs in twin.parameters.items()
                if id(theirs) not in taken and (fits := _as_stored(theirs, value)[1])
            }  # fmt: skip
            shown = min(others, key=lambda each: distance(others[each]), default=shown)
            taken.add(id(known.get(shown)))
        theirs: Any = known.get(shown)
        ways, fits = ([], []) if theirs is None else _as_stored(theirs, value)
        if not ways:
            left.append(shown)
            continue
        error = distance(fits or ways)
        if error <= _NEAR:
            equal.append(shown)
            continue
        wanted = _gradient(theirs)
        why = _why(shown, theirs, gradient, wanted, twin, same_loss=same_loss)
        if not fits:
            why = "its values differ already: the file is not of this module, or was changed"
        different.append({"name": shown, "error": error, "why": why})
    for name, each in twin.parameters.items():
        if each.grad is not None and id(each) not in taken and _array(each.grad).any():
            taken.add(id(each))
            why = "it trains in PyTorch, and not in the package: frozen, or a constant of the model"
            different.append({"name": name, "error": 1.0, "why": why})
    return {
        "loss": loss,
        "torch_loss": twin.loss,
        "equal": equal,
        "different": different,
        "not_compared": left,
    }


_Way = tuple[np.ndarray, np.ndarray]


def _as_stored(theirs: Any, value: np.ndarray) -> tuple[list[_Way], list[_Way]]:
    """A parameter and its gradient in the ways that a file may store them, and those of its values.

    Some weights are stored transposed, which the shape of a square one does not show. Others have
    further axes of size 1, which counts only where the values agree: an order may differ too.
    """
    own, gradient = _array(theirs), _gradient(theirs)
    if own.size != value.size:
        return [], []
    both = ((own, gradient), (own.T, gradient.T))
    ways = [way for way in both if way[0].shape == value.shape]
    tried = ways or [(each.reshape(value.shape), more.reshape(value.shape)) for each, more in both]
    fits = [way for way in tried if np.allclose(value, way[0], rtol=1e-4, atol=1e-6)]
    return ways or fits, fits


def _gradient(theirs: Any) -> np.ndarray:
    """The gradient of a parameter, zeros where it has none."""
    return np.zeros(theirs.shape) if theirs.grad is None else _array(theirs.grad)


def _distance(gradient: np.ndarray, wanted: np.ndarray) -> float:
    """How far a gradient is from the wanted one, as part of the norm of that."""
    error = float(np.linalg.norm(gradient - wanted))
    return error / (float(np.linalg.norm(wanted)) or float(np.linalg.norm(gradient)) or 1.0)


def _why(
    name: str, theirs: Any, ours: np.ndarray, wanted: np.ndarray, twin: Twin, *, same_loss: bool
) -> str:
    """Why a gradient differs, and the option that corrects it."""
    freeze = f"--freeze {quoted(name)}, or --like names.txt for all of them"
    if name in twin.buffers:
        return f"a buffer in PyTorch: {freeze}"
    if not theirs.requires_grad:
        return f"requires_grad is False: {freeze}"
    if not same_loss:
        if twin.modes:
            return (
                f"the loss differs, and {', '.join(twin.modes)} is in training mode: exporters "
                "write evaluation mode unless they are told training=TrainingMode.TRAINING"
            )
        return "the loss differs: other inputs, another loss, or a model of another mode"
    row = twin.padding.get(id(theirs))
    if row is not None and ours.shape == wanted.shape and wanted[row].any():
        others = np.delete(ours, row, 0), np.delete(wanted, row, 0)
        if _distance(*others) <= _NEAR:
            return (
                f"row {row} is that of padding_idx, and the embedding is tied: PyTorch takes away "
                "the gradient of the look-up alone, --freeze-row that of both, and no option the "
                "first; if the model and the loss ignore padded tokens, both agree without one"
            )
    elif row is not None and ours[row].any():
        option = f"--freeze-row {quoted(f'{name}={row}')}"
        return f"row {row} is that of padding_idx and has no gradient: {option}"
    reached = "" if wanted.any() else "no gradient reaches it in PyTorch: "
    return (
        f"{reached}the loss is the same, but the gradient differs, as with detach or a "
        "straight-through estimator: --stop-gradient VALUE"
    )
