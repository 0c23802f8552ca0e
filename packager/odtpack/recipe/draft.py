"""Writes a recipe for a model: what must be said is said, the rest stands there as comments."""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir

from odtpack import choices
from odtpack.adapters.layers import find_layers
from odtpack.graph.graphs import dims_of
from odtpack.model.exporters import known_names
from odtpack.model.loading import load_model
from odtpack.ort.kernel_needs import oldest_runtime
from odtpack.package.candidates import candidates
from odtpack.recipe.schema import json_schema
from odtpack_simulator.values.text import toml_value
from odtpack_simulator.values.units import format_bytes

SCHEMA_NAME: Final = "recipe.schema.json"
_MOST_LINES: Final = 40
_USUAL_TARGET: Final = (1, 20)

_OPTIONAL: Final = """
# outputs = ["logits"]       # further values that the models return
# sizes = []                 # axes that are fixed, as in "tokens=512"
# stop_gradient = []         # values that no gradient passes, as after detach
# prediction = false         # no accuracy: the evaluation model returns the loss only
{head}
[optimizer]
kind = "adamw"               # {optimizers}
# weight_decay = 0.01
# decay_vectors = false      # no decay for biases and scales of normalizations

# [adapter]                  # a small adapter in place of the model's own parameters
# kind = "lora"              # lora, dora, ia3, bitfit or prompt
# on = [{on}]
# rank = 8
# alpha = 16

# [clip]
# norm = 1.0                 # or: value = 0.5

# [privacy]                  # clip each sample's gradient, and add noise
# clip_norm = 1.0
# noise_multiplier = 1.0

# [[groups]]                 # the first group whose pattern matches counts
# parameters = {pattern}
# learning_rate_scale = 10.0
# weight_decay = 0.0

# [schedule]
# kind = "cosine"            # constant, linear, cosine, step or multistep
# warmup_steps = 100
# floor = 0.1
# learning_rate = 0.003

# [batch]
# size = 32                  # samples of an optimizer step
# micro_batch = 8            # samples that the model sees at once

# [data]                     # texts that become samples of a language model
# tokenizer = "tokenizer.json"
# template = "chatml"        # llama3, gemma, plain, or a file of Jinja
# length = 256               # tokens of a sample

# [memory]
# budget = "60 MB"           # of training at its peak; activations are recomputed to fit

# [formats]
# ort = true                 # models in ORT format, too
# nominal = true             # a checkpoint without values, too
# self_check = false         # no first steps for devices to compare theirs with

# [target]
# onnxruntime = "{version}"       # oldest version that must load the package
# platforms = ["android", "ios"]
# sessions = "small"         # less memory for more time; not with glibc's defaults

# budgets = "budgets.toml"     # above all tables; or limits in tables:
# [budgets]
# package_size = "12 MB"
# peak_memory = "200 MB"
# [budgets.class.android]
# step_latency = {{ limit = "50 ms", level = "warn" }}
"""

_HEAD: Final = """
# [head]                     # classes for an encoder that has none
# pool = "mean"              # over its tokens; or: cls, the first of them
# classes = 10
"""
_TOKENS_AND_WIDTH: Final = 3  # dimensions of what an encoder returns: batch, tokens, width


def draft(model: Path, folder: Path) -> str:
    """The text of a recipe that builds as it is."""
    loaded = load_model(model)
    names = candidates(loaded)
    modules = _modules(loaded, names)
    pattern = toml_value(next(iter(_modules(loaded, _nearest(loaded.graph, names))), "*"))
    layers = find_layers(loaded.graph)
    on = toml_value(glob.escape(layers[-1].name) if layers else "*")
    kind, reason = _guess_loss(loaded)
    lowest = oldest_runtime([loaded])
    version = lowest.name if lowest.version > _USUAL_TARGET else "{}.{}".format(*_USUAL_TARGET)
    *others, last = choices.module_names("odtpack.optimizers")
    optimizers = f"{', '.join(others)} or {last}"
    dims = dims_of(loaded.graph.outputs[0])
    head = _HEAD if dims is not None and len(dims) == _TOKENS_AND_WIDTH else ""
    optional = _OPTIONAL.format(
        pattern=pattern, on=on, version=version, optimizers=optimizers, head=head
    )
    outputs, rest = optional.split("\n[optimizer]", 1)
    return "\n".join(
        [
            f"#:schema {SCHEMA_NAME}",
            "# Build it with: odtpack build --recipe recipe.toml",
            "",
            f"model = {toml_value(relative(model, folder))}",
            'package = "package"',
            outputs.strip(),
            "",
            "[loss]",
            f"# {reason}",
            f"kind = {toml_value(kind)}",
            "",
            "[parameters]",
            "# Without patterns all are trained. They are:",
            *_listed(modules),
            f"# train = [{pattern}]",
            "# freeze = []",
            "",
            f"[optimizer]{rest}",
        ]
    )


def schema_text() -> str:
    """The file that a recipe names as its schema."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def relative(path: Path, folder: Path) -> str:
    """A path from the recipe's folder; as it is where there is no way, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return path.resolve().as_posix()


def _modules(model: ir.Model, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """Parameters, elements and bytes by pattern, in the order of the model."""
    found: dict[str, tuple[int, int, int]] = {}
    known = known_names(model.graph)
    for initializer in names:
        tensor = model.graph.initializers[initializer].const_value
        name = next(iter(known.get(initializer, ())), initializer)
        prefix, dot, _ = name.rpartition(".")
        pattern = glob.escape(prefix) + ".*" if dot else glob.escape(name)
        count, elements, size = found.get(pattern, (0, 0, 0))
        if tensor is not None:
            elements += math.prod(tensor.shape.numpy())
            size += tensor.nbytes
        found[pattern] = count + 1, elements, size
    return found


def _nearest(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """The parameter that is nearest to the prediction, if there is one: the head's."""
    waiting, known, seen = [graph.outputs[0]], set(names), set[ir.Value]()
    found: list[str] = []
    for value in waiting:  # which grows
        if value.name in known:
            found.append(str(value.name))
            if len(value.shape or ()) > 1:  # not a factor or a bias behind the head
                return found[-1:]
        node = value.producer()
        inputs = () if node is None else node.inputs
        fresh = [v for v in dict.fromkeys(inputs) if v is not None and v not in seen]
        waiting += fresh
        seen.update(fresh)
    return found[:1]


def _listed(modules: dict[str, tuple[int, int, int]]) -> list[str]:
    shown = list(modules.items())[:_MOST_LINES]
    width = max((len(toml_value(pattern)) for pattern, _ in shown), default=0)
    lines = [
        f"#   {toml_value(pattern):<{width}}  {elements:>12,} in {count}, {format_bytes(size)}"
        for pattern, (count, elements, size) in shown
    ]
    if len(modules) > len(shown):
        lines.append(f"#   and {len(modules) - len(shown)} more: odtpack inspect lists them")
    return lines


def _guess_loss(model: ir.Model) -> tuple[str, str]:
    """A loss that fits the first output, and why."""
    output = model.graph.outputs[0]
    dims = dims_of(output)
    name = toml_value(str(output.name))
    if dims is not None and (not dims or dims == (1,)):
        return "none", f"The first output, {name}, is one number, as a loss is."
    shape = "of unknown shape" if dims is None else str([str(d) for d in dims]).replace("'", "")
    classes = dims[1] if dims is not None and len(dims) > 1 else None
    what = f"A guess: the first output, {name}, is {one_line(shape)}"
    if isinstance(classes, int) and classes > 1:
        return "cross_entropy", f"{what}, as logits of {classes} classes are."
    return "mse", f"{what}. mse compares it with a target of its shape."


def one_line(text: str) -> str:
    """The text in one line, without characters that do not print."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
