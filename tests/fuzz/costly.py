"""Inputs of a few bytes or megabytes that would take far more: refused, or read, within the bounds.

Damaging sound files at random seldom makes one. They are made, not kept: some are large.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx

from tests import zoo
from tests.hostile.checkpoints import checkpoints, many_tensors, shared_table
from tests.hostile.corpus import build_base
from tests.hostile.manifests import manifests
from tests.trust.test_endless import CHANGES, functions, loop


def of_checkpoints() -> list[bytes]:
    """Lengths and offsets that lie, tables that occur a million times."""
    refused = [data for _, data, codes in checkpoints() if codes]
    return [*refused, shared_table(990_000), many_tensors(50_000)]


@cache
def _good() -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        base = build_base(Path(folder) / "package")
        return dict(json.loads((base / "manifest.json").read_text()))


def of_manifests() -> list[bytes]:
    """Those of the corpus that all readers share, and some that fill 4 MiB, or 60."""
    made = [
        text if isinstance(text, bytes) else json.dumps(text).encode()
        for _, text, _, _ in manifests(_good())
    ]
    return [
        *made, b'{"parameters": [' + b"[]," * 20_000_000 + b"[]]}",
        b'{"parameters": [' + b"[]," * 1_300_000 + b"[]]}",
        b'{"loss_options": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}",
        b'{"loss_options": {' + b",".join(b'"k%d":1' % i for i in range(190_000)) + b"}}",
        b"[" * 2_000_000 + b"]" * 2_000_000, b'{"a": "' + b"\\" * 4_000_000,
        b'{"release": ' + b"9" * 4_000_000 + b"}",
    ]  # fmt: skip


def of_models() -> list[bytes]:
    """Models that never end, as far as their graphs say so."""
    return [
        functions(40), functions(400, calls=9), loop(None), loop(None, grows=True), loop(2**62),
        loop(2**62, computed=True), loop(None, computed=True, grows=True),
    ]  # fmt: skip


def of_shown_models() -> list[bytes]:
    """The same, and one that is large enough once its functions are inlined."""
    return [*of_models(), functions(12)]


def of_run_models() -> list[bytes]:
    """Models of which only running them shows that they never end, or take all memory."""
    return [loop(None, computed=True), loop(None, computed=True, grows=True)]


def of_model_files() -> list[bytes]:
    """Models that ask for files, memory or options."""

    def made() -> Iterator[bytes]:
        for change in CHANGES.values():
            model = zoo.mlp((4, 3, 2))
            change(model)
            yield model.SerializeToString()

    return [*made(), functions(400, calls=9)]


def named_so() -> bytes:
    """A sound model that has to be taken apart before it is known to be one."""
    model: onnx.ModelProto = zoo.mlp((4, 3, 2))
    model.doc_string = "location, ort_config"
    return model.SerializeToString()
