"""``odtpack head``: a classification head on an encoder that has none."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import MODEL


class Pooling(StrEnum):
    """How the tokens of a sequence become one vector."""

    MEAN = "mean"
    CLS = "cls"
    NONE = "none"


def head(
    model: Annotated[Path, MODEL],
    pool: Annotated[
        Pooling,
        typer.Option(
            help="Mean over the tokens (those of attention_mask), the first token, "
            "or none for an output [batch, width]."
        ),
    ],
    classes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of classes.")],
    out: Annotated[Path, typer.Option(metavar="FILE.onnx", help="Model to write.")],
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of the new weight.")] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="NAME",
            show_default=False,
            help="Output of the encoder that the head reads. Default: the first that fits.",
        ),
    ] = None,
) -> None:
    """Put a trainable classification head on an encoder that has none.

    The head is pooling over the tokens and a linear layer, head.weight and head.bias; its
    output, logits, replaces the encoder's outputs.
    """
    from odtpack.cli._files import check_writable
    from odtpack.model.head import add_head
    from odtpack_runtime.files.atomic import atomic_write

    check_writable(out, "--out")
    content = add_head(model, pool.value, classes, seed=seed, name=name)
    with atomic_write(out) as stream:
        stream.write(content)
    _console.say(f"wrote {out}")
    _console.say(
        f"next: odtpack build {shlex.quote(str(out))} --out package --loss cross_entropy "
        "--train 'head.*'"
    )
