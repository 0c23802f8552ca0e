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

from odtpack.model.exporters import ARCHITECTURE, HEADS

_LARGEST: Final = 1 << 20  # bytes of a file that are read
_JOINED: Final = {"phi3", "phi3v", "phi3_v", "phi4mm"}
_JOINT = re.compile(r"(model\.layers\.\d+\.self_attn\.)qkv_proj")
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
        if not isinstance(content, dict) or not isinstance(kind := content.get(part), str):
            continue
        inner = content.get("decoder", content)
        sizes = inner if isinstance(inner, dict) else {}
        heads = sizes.get("num_attention_heads")
        found = (heads, sizes.get("num_key_value_heads", heads))
        known = all(type(count) is int and 0 < count < 1 << 16 for count in found)
        return {ARCHITECTURE: kind} | ({HEADS: f"{found[0]} {found[1]}"} if known else {})
    return {}


def joined(graph: ir.Graph, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Layers of transformers' module that are several in the file, and those, in order."""
    known = set(names)
    if graph.metadata_props.get(ARCHITECTURE) not in _JOINED:
        return {}
    found = {}
    for name in sorted(known):
        for first, all_of in (("q", ("q", "k", "v")), ("gate", ("gate", "up"))):
            stem = name.removesuffix(f".{first}_proj")
            parts = tuple(f"{stem}.{each}_proj" for each in all_of)
            if _PARTS.fullmatch(name) and name == parts[0] and known.issuperset(parts):
                found[f"{stem}.{'_'.join(all_of) if first == 'gate' else 'qkv'}_proj"] = parts
    return found


def parted(graph: ir.Graph, name: str, rows: int) -> dict[str, tuple[int, int]]:
    """Layers of the module that are one in the file, and which of its rows, from and to."""
    kind, match = graph.metadata_props.get(ARCHITECTURE), _JOINT.fullmatch(name)
    if kind is None or kind in _JOINED or match is None or HEADS not in graph.metadata_props:
        return {}
    heads, keys = map(int, graph.metadata_props[HEADS].split())
    size, rest = divmod(rows, heads + 2 * keys)
    if rest or not size:
        return {}
    ends = [0, heads * size, (heads + keys) * size, rows]
    return {f"{match[1]}{n}_proj": (ends[i], ends[i + 1]) for i, n in enumerate("qkv")}


def absent(graph: ir.Graph, layers: Iterable[str]) -> tuple[str, ...]:
    """Those of some layers that transformers' module does not have, as far as that is known."""
    kind = graph.metadata_props.get(ARCHITECTURE)
    if kind is None:
        return ()
    pattern = _PARTS if kind in _JOINED else _JOINT
    return tuple(name for name in layers if pattern.fullmatch(name))
