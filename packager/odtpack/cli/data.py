"""``odtpack data``: samples from what people write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from odtpack.cli import _console
from odtpack.cli._options import Json, command, group, takes_spec
from odtpack.spec import TextSpec

if TYPE_CHECKING:
    from odtpack.recipe import Recipe
    from odtpack.text import Prepared


@takes_spec(before="out", of=TextSpec)
def prepare(texts: Path, *, out: Path, **given: Any) -> Json:
    r"""Make samples for a language model from texts.

    Writes input_ids, attention_mask, position_ids and labels, each [samples, length]. Labels are
    -100 on prompts and padding, so that only answers are learned. Needs tokenizers: pip install
    tokenizers.

    Parameters:
        texts TEXTS.jsonl: JSON lines: messages with role and content, a prompt and an answer, or a
            text.
        out DATA.npz: Data file to write, for odtpack train.

    Examples:
        odtpack data prepare chats.jsonl --tokenizer tokenizer.json --template chatml \
            --length 256 --out data.npz
        odtpack data prepare questions.jsonl --tokenizer tokenizer.json --length 128 \
            --prompt-field question --answer-field reply --pack --out data.npz
    """
    from odtpack.cli._files import check_writable

    spec = TextSpec(**{name: value for name, value in given.items() if value is not None})
    check_writable(out, "--out", [texts, Path(spec.tokenizer), Path(spec.template)])
    found = _prepare(texts, out, spec)
    _console.wrote(out)
    _console.say(f"next: odtpack train PKG --data {quote(str(out))}")
    return {"path": str(out), **dataclasses.asdict(found)}


def _prepare(texts: Path, out: Path, spec: TextSpec) -> Prepared:
    from odtpack.text import prepare as write

    with _console.Progress("encoding, bytes") as progress:
        found = write(texts, out, spec, progress.update)
    _console.say(
        f"{found.rows:,} rows, {found.samples:,} samples of {spec.length} tokens; "
        f"{found.learned_tokens:,} of {found.tokens:,} tokens are learned"
    )
    if found.shortened:
        _console.say(f"  cut, as they are longer: {found.shortened:,}")
    if found.left_out:
        _console.say(f"  left out, as they have no answer: {found.left_out:,}")
    return found


@contextmanager
def as_samples(
    recipe: Recipe | None, data: Path, evaluation: Path | None
) -> Iterator[tuple[Path, Path | None]]:
    """Files of samples for ``--data`` and ``--eval``; of texts, such as last as long as a block."""
    from odtpack.errors import OdtpackError
    from odtpack_runtime.files.scratch import scratch_folder

    texts = [path for path in (data, evaluation) if path is not None and path.suffix == ".jsonl"]
    if not texts:
        yield data, evaluation
        return
    spec = None if recipe is None else recipe.texts()
    if spec is None:
        what = f"{str(texts[0])!r} holds texts, which need a recipe with a table [data]"
        hint = "name the recipe, --recipe recipe.toml, or write samples: odtpack data prepare"
        raise OdtpackError("usage", what, hint=hint)
    with scratch_folder("texts") as folder:
        made = {path: Path(folder) / f"{index}.npz" for index, path in enumerate(texts)}
        for path, out in made.items():
            _prepare(path, out, spec)
        yield made.get(data, data), evaluation and made.get(evaluation, evaluation)


data = group(
    "data",
    "Make data for training.",
    "odtpack data prepare chats.jsonl --tokenizer tokenizer.json --template chatml \\",
    "    --length 256 --out data.npz",
)
command(data)(prepare)
