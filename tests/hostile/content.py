"""What a checkpoint holds, as one digest that readers of any language can compute."""

import hashlib
import struct

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.parameters import Array


def content_digest(data: CheckpointData) -> str:
    """Return the SHA-256 of the lines of a checkpoint, as ``docs/formats/kits.md`` has them."""
    lines: list[str] = []
    parameters = [(name, "t", array) for name, array in data.trainable.items()]
    parameters += [(name, "f", array) for name, array in data.frozen.items()]
    for name, kind, array in sorted(parameters, key=lambda item: _hex(item[0])):
        shape = "x".join(map(str, () if data.nominal else array.shape)) or "-"
        lines.append(f"P {kind} {array.dtype.name} {shape} {_sha(array)} {_hex(name)}")
    if data.optimizer is not None:
        state = data.optimizer
        lines.append(f"O {state.step} {_bits(state.learning_rate)}")
        for number, names in enumerate(state.groups or (tuple(state.moments),)):
            lines += sorted(
                (
                    f"M {number} momentum{index} {_sha(moment)} {_hex(name)}"
                    for name in names
                    for index, moment in enumerate(state.moments[name])
                ),
                key=lambda line: (line.rsplit(" ", 1)[1], line.split(" ")[2]),
            )
    for name, value in sorted(data.properties.items(), key=lambda item: _hex(item[0])):
        if isinstance(value, str):
            text = f"s {_hex(value)}"
        else:
            text = f"f {_bits(value)}" if isinstance(value, float) else f"i {value}"
        lines.append(f"V {text} {_hex(name)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _hex(text: str) -> str:
    return text.encode().hex()


def _sha(array: Array) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _bits(value: float) -> str:
    return struct.pack(">f", value).hex()
