"""How the layers of a decoder are called in transformers, where onnxruntime-genai calls them else.

The builder gives the layers of every architecture Llama's names, joins the queries, keys and
values of any, and parts what some modules join. What the model is says a file beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import onnx_ir as ir

from odtpack.model.exporters import ARCHITECTURE

_LARGEST: Final = 1 << 20  # bytes of a file that are read
_JOINED: Final = {"phi3", "phi3v", "phi3_v", "phi4mm"}
_JOINT = re.compile(r"model\.layers\.\d+\.self_attn\.qkv_proj")
_PARTS = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkv]|mlp\.(gate|up))_proj")


def noted(path: Path) -> dict[str, str]:
    """Metadata of the graph in a file: what another file beside it says that it is."""
    for name, part in (("genai_config.json", "type"), ("config.json", "model_type")):
        try:
            with (path.parent / name).open("rb") as stream:
                content = json.loads(stream.read(_LARGEST))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and part == "type":
            content = content.get("model")
        kind = content.get(part) if isinstance(content, dict) else None
        if isinstance(kind, str):
            return {ARCHITECTURE: kind}
    return {}


def absent(graph: ir.Graph, layers: Iterable[str]) -> tuple[str, ...]:
    """Those of some layers that transformers' module does not have, as far as that is known."""
    kind = graph.metadata_props.get(ARCHITECTURE)
    if kind is None:
        return ()
    pattern = _PARTS if kind in _JOINED else _JOINT
    return tuple(name for name in layers if pattern.fullmatch(name))
