"""Which tensors of a PyTorch module train: a text file, written beside the export.

A line for each tensor: its name, its shape, ``parameter`` or ``buffer``, and whether it requires a
gradient; a tied one names the line of the same tensor::

    encoder.0.weight [8,6] parameter true
    decoder.weight [8,6] parameter true of encoder.0.weight
    loss.pos_weight [3] buffer false
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Final

_TITLE: Final = "# odtpack names: name [shape] kind requires_grad\n"
_SHAPE: Final = r"(?:\d{1,18}(?:,\d{1,18})*)?"
_LINE: Final = re.compile(rf"(\S.*) \[({_SHAPE})\] (parameter|buffer) (true|false)(?: of (\S.*))?")
_LIMIT: Final = 2**24


@dataclasses.dataclass(frozen=True)
class Named:
    """A tensor of a module."""

    name: str
    shape: tuple[int, ...]
    parameter: bool  # whether it is a parameter, not a buffer
    trained: bool  # whether it requires a gradient
    tensor: str  # the first of its names


def names(module: Any, path: str | os.PathLike[str] | None = None) -> str:
    """List the tensors of a module, for ``odtpack build --like``.

    Args:
        module: A ``torch.nn.Module``, as it is exported.
        path: Where to write the list; None to write nothing.

    Returns:
        The text: a line for each parameter and buffer, tied ones under each of their names.
    """
    lines, first = [_TITLE], dict[int, str]()
    for kind in ("parameter", "buffer"):
        for name, tensor in getattr(module, f"named_{kind}s")(remove_duplicate=False):
            shape = ",".join(map(str, tensor.shape))
            same = first.setdefault(id(tensor), name)
            trains = str(bool(tensor.requires_grad)).lower()
            lines.append(f"{name} [{shape}] {kind} {trains}{f' of {same}' * (same != name)}\n")
    text = "".join(lines)
    if path is not None:
        from odtpack_runtime.files.atomic import write_whole

        write_whole(path, text.encode())
    return text


def read_names(path: Path) -> tuple[Named, ...]:
    """What a list says, or a safetensors file, all of whose tensors train."""
    from odtpack.errors import OdtpackError
    from odtpack_simulator.values.text import read_bounded

    if path.suffix == ".safetensors":
        return _of_safetensors(path)
    data = read_bounded(path, limit=_LIMIT, code="names", what="list of names")
    if data[:2] in (b"PK", b"\x80\x02") or path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        what = "a file of torch.save is a pickle, which runs code when it is read"
        hint = "write a list: odtpack.names(module, 'names.txt'), then --like names.txt"
        raise OdtpackError("names-malformed", what, where=str(path), hint=hint)
    found = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            what = f"{line[:60]!r} does not have the form NAME SHAPE parameter|buffer true|false"
            hint = "write the list with odtpack.names(module, 'names.txt')"
            raise OdtpackError("names-malformed", what, where=f"{path}:{number}", hint=hint)
        shape = tuple(int(size) for size in match[2].split(",") if size)
        parameter, trained = match[3] == "parameter", match[4] == "true"
        found.append(Named(match[1], shape, parameter, trained, match[5] or match[1]))
    return tuple(found)


def _of_safetensors(path: Path) -> tuple[Named, ...]:
    import safetensors

    from odtpack.errors import OdtpackError

    try:
        with safetensors.safe_open(path, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (safetensors.SafetensorError, OSError) as error:
        what = f"{path.name!r} cannot be read: {error}"
        raise OdtpackError("names-unreadable", what, where=str(path)) from error
    for name in shapes:
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            what = f"{name!r} is a buffer: the file holds more than what trains"
            hint = "write a list: odtpack.names(module, 'names.txt'), then --like names.txt"
            raise OdtpackError("names-malformed", what, where=str(path), hint=hint)
    return tuple(Named(name, shape, True, True, name) for name, shape in shapes.items())
