"""Makes samples from texts: conversations become tokens, and only answers have labels.

Labels are the tokens themselves, as Hugging Face's causal models and the loss ``next_token`` take
them, and -100 where nothing is learned: on prompts and padding. Which tokens are an answer's is
found as ``trl`` finds it: the text up to the answer and the text with it are encoded, and what both
begin with is the prompt. That needs no positions of tokens in the text, which not every tokenizer
gives, and so it is the same on every device (``docs/guides/text.md``).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from odtpack.errors import OdtpackError, near_names, shortened
from odtpack.spec import TextSpec
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.files.atomic import atomic_write, open_regular

IGNORED: Final = -100
"""The label that does not count."""

_ROLES: Final = ("system", "user", "assistant", "tool")
_MAX_LINE: Final = 2**24
_MAX_FILE: Final = 2**28  # a tokenizer of 262,000 words takes 34 MB
_AT_ONCE: Final = 256  # rows that a question to the process is about

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Around what a template marks as an answer: no text has these, which are no characters."""

Row = tuple[list[dict[str, str]] | str, int]
"""Messages, or a text without any, and the line that they stand in."""
Tokens = tuple[list[int], list[int], int]
"""Tokens of a sample, their labels, and how many tokens there were before it was cut."""


@dataclasses.dataclass(frozen=True)
class Template:
    """How messages become one text, as a template of Jinja, and what it names."""

    text: str
    tokens: tuple[str, ...] = ()  # that the tokenizer must have
    bos: str = ""  # where tokenizer_config.json names none
    special: bool = False  # whether the tokenizer adds what it puts around a text


_FILE = "{% for message in messages %}"

TEMPLATES: Final = {
    "chatml": Template(
        _FILE + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'"
        " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": Template(
        "{{ bos_token }}" + _FILE + "{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
    ),
    "gemma": Template(
        "{{ bos_token }}{% set ns = namespace(system='') %}" + _FILE
        + "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\\n\\n' %}"
        "{% else %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else "
        "message['role']) + '\\n' + ns.system + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "<bos>",
    ),
    "plain": Template(
        _FILE + "{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
        special=True,
    ),
}  # fmt: skip
"""Templates by name; any other is a file."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What became of a file of texts."""

    rows: int  # that the file has
    samples: int
    tokens: int  # without padding
    learned_tokens: int  # that the loss counts
    shortened: int  # rows that were longer than a sample
    left_out: int  # rows without anything to learn


def prepare(
    path: Path,
    out: Path,
    spec: TextSpec,
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Write a file of samples that ``--data`` takes, whole or not at all."""
    # `path`: JSON lines, each with `messages`, or a prompt and an answer, or `text`.
    # `out`: an `.npz` file of `input_ids`, `attention_mask`, `position_ids` and `labels`, int64
    # [samples, length], padding at the end of each sample.
    # `on_read`: called with how many bytes of how many were read.
    if importlib.util.find_spec("tokenizers") is None:
        what = "texts are encoded by tokenizers, which is not installed"
        raise OdtpackError("tokenizer-not-installed", what)
    if not path.is_file():
        what = f"{path} is a folder" if path.is_dir() else f"there is no data file {path}"
        hint = "pass a .jsonl file: messages, a prompt and an answer, or a text in each line"
        raise OdtpackError("data-not-found", what, where=str(path), hint=hint)
    settings = _settings(spec)
    limits = apart.Limits.of([spec.tokenizer])
    samples: list[npt.NDArray[np.int64]] = []
    rows = cut = 0
    total = path.stat().st_size
    with apart.worker(start=True) as process, path.open("rb") as stream:
        found = _rows(stream, spec, str(path))
        while some := list(islice(found, _AT_ONCE)):
            for ids, labels, size in _encoded(process, limits, some, settings, str(path)):
                cut += size > spec.length
                if set(labels) - {IGNORED}:
                    samples.append(np.array([ids, labels], np.int64))
            rows += len(some)
            on_read(stream.tell(), total)
    if not samples:
        what = f"none of {rows} rows has an answer to learn"
        raise OdtpackError("text-without-answers", what, where=str(path))
    packed = _packed(samples, spec.length) if spec.pack else [[each] for each in samples]
    with atomic_write(out) as target:
        tokens, learned = _write(target, packed, spec.length)
    return Prepared(rows, len(packed), tokens, learned, cut, rows - len(samples))


# What is read.


def _rows(stream: Any, spec: TextSpec, where: str) -> Iterator[Row]:
    number = 0
    while line := stream.readline(_MAX_LINE + 1):
        number += 1
        try:
            if len(line) > _MAX_LINE:
                raise ValueError(f"it is longer than {_MAX_LINE} bytes")
            if line.strip():
                yield _row(json.loads(line.decode()), spec), number
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise OdtpackError(
                "text-invalid", f"line {number} is not a row of text: {reason}",
                where=f"{where}:{number}",
            ) from error  # fmt: skip


def _row(row: Any, spec: TextSpec) -> list[dict[str, str]] | str:
    """The messages of a row, or its text."""
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("its messages are not a list, or empty")
        return [_message(each, f"message {index}") for index, each in enumerate(messages, 1)]
    fields = (spec.prompt_field, spec.answer_field)
    if all(field in row for field in fields):
        prompt, answer = (_text(row[field], field) for field in fields)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if "text" in row:
        return _text(row["text"], "text")
    names = ", ".join(map(repr, islice(row, 8)))
    raise ValueError(
        f"it has neither 'messages', nor {fields[0]!r} and {fields[1]!r}, nor 'text', but "
        f"{shortened(names) or 'nothing'}"
    )


def _message(message: Any, name: str) -> dict[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise ValueError(f"{name} has none of the roles {', '.join(_ROLES)}")
    return {"role": role, "content": _text(message.get("content"), f"the content of {name}")}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shortened(name)} is not a text")
    value.encode()  # half a surrogate pair, which JSON can name, is not one
    return value


def _settings(spec: TextSpec) -> dict[str, Any]:
    """Tokenizer, template and special tokens, as the process that encodes takes them."""
    config = _config(Path(spec.tokenizer).with_name("tokenizer_config.json"))
    template = TEMPLATES.get(spec.template) or Template(_template_file(Path(spec.template)))
    bos, needed = _name(config, "bos_token") or template.bos, [*template.tokens, spec.end]
    if template.bos:
        needed.append(bos)
    return {
        "tokenizer": spec.tokenizer, "template": template.text, "special": template.special,
        "needed": [token for token in needed if token], "bos": bos, "length": spec.length,
        "end": _name(config, "eos_token") if spec.end is None else spec.end,
    }  # fmt: skip


def _read(path: Path, what: str, code: str) -> str:
    try:
        with open_regular(path) as stream:
            content = stream.read(min(os.fstat(stream.fileno()).st_size, _MAX_FILE) + 1)
        if len(content) > _MAX_FILE:
            raise ValueError(f"it is larger than {_MAX_FILE} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OdtpackError(
            code, f"the {what} {path.name!r} cannot be read: {reason}", where=str(path)
        ) from error


def _config(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json says; nothing without such a file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(_read(path, "configuration", "tokenizer-invalid"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        what = f"{path.name!r} is not a JSON object"
        raise OdtpackError("tokenizer-invalid", what, where=str(path)) from error
    return content


def _name(config: dict[str, Any], key: str) -> str | None:
    """A special token of a configuration."""
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _template_file(path: Path) -> str:
    """The template of a file of Jinja, or of a tokenizer_config.json."""
    if not path.is_file():
        what = f"there is no built-in template and no file {shortened(str(path))!r}"
        hint = near_names(str(path), TEMPLATES, f"there are {', '.join(TEMPLATES)}")
        raise OdtpackError("template-invalid", what, hint=hint)
    if path.suffix != ".json":
        return _read(path, "template", "template-invalid")
    found = _config(path).get("chat_template")
    if not isinstance(found, str):
        raise OdtpackError(
            "template-invalid", f"{path.name!r} has no chat_template that is a text",
            where=str(path), hint="pass the file of the template, often chat_template.jinja",
        )  # fmt: skip
    return found


# What is encoded, in a process with limits: a template is a program, and a tokenizer has patterns.


def _encoded(
    process: apart.Worker,
    limits: apart.Limits,
    rows: Sequence[Row],
    settings: dict[str, Any],
    where: str,
) -> list[Tokens]:
    try:
        found: list[Tokens] = process.call(
            "odtpack.text:encode", limits, rows=rows, settings=settings
        )
    except OdtpackError as error:
        if not error.code.startswith("models-"):
            error.where = error.where or where
            raise
        reason = {"models-stall": "did not end", "models-memory": "took too much memory"}
        raise OdtpackError(
            "template-invalid",
            f"the template or the tokenizer {reason.get(error.code, 'failed')} on lines "
            f"{rows[0][1]} to {rows[-1][1]}",
            where=where,
        ) from error
    return found


def encode(rows: Sequence[Row], settings: dict[str, Any]) -> list[Tokens]:
    """Encode some rows; to be called apart."""
    tokenizer = _tokenizer(settings["tokenizer"])

    def has(token: str) -> bool:
        return tokenizer.token_to_id(token) is not None

    for token in settings["needed"]:
        if not has(token):
            raise _no_token(token, settings)
    lacking = [t for t in map(settings.get, ("bos", "end")) if t and not has(t)]
    bos = tokenizer.token_to_id(settings["bos"])
    render = _renderer(settings["template"], settings["bos"], settings["end"] or "")
    found = []
    for content, line in rows:
        try:
            texts, special = _texts(content, render, settings)
        except ValueError as error:
            raise OdtpackError("template-invalid", f"line {line}: {error}") from error
        for token in lacking:
            if any(token in text for text in texts):
                raise _no_token(token, settings)
        ids = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=special)]
        labels = ids[0] if isinstance(content, str) else _labels(*ids)
        found.append((*_cut(ids[0], labels, settings["length"], bos), len(ids[0])))
    return found


def _no_token(token: str, settings: dict[str, Any]) -> OdtpackError:
    what = f"the tokenizer has no token {shortened(token)!r}, which the template writes"
    hint = "choose the template that the model was trained with, or add the token"
    return OdtpackError("template-invalid", what, where=settings["tokenizer"], hint=hint)


def _texts(
    content: list[dict[str, str]] | str, render: Any, settings: dict[str, Any]
) -> tuple[list[str], bool]:
    """The whole text, then before and with each answer; and whether special tokens are added."""
    end, special = settings["end"], settings["special"] or isinstance(content, str)
    if special and end is None:
        raise ValueError(
            "a text needs an end token: name one with --end, or as eos_token in a "
            "tokenizer_config.json beside the tokenizer"
        )
    if isinstance(content, str):
        return [content + end], special
    whole = render(content, False)
    texts = [whole]
    if _BEGIN in whole and "endgeneration" in settings["template"]:
        begun, *marked = whole.split(_BEGIN)
        texts = [whole.replace(_BEGIN, "").replace(_END, "")]
        for part in marked:
            learned, _, rest = part.partition(_END)
            texts += begun, begun + learned
            begun += learned + rest
        return texts, special
    for index, message in enumerate(content, 1):
        if message["role"] == "assistant":
            texts += render(content[: index - 1], True), render(content[:index], False)
            if not all(map(whole.startswith, texts[-2:])):
                raise ValueError(
                    f"the template changes message {index}, or earlier ones, if more messages "
                    "follow: put each answer into its own row"
                )
    return texts, special


def _labels(whole: list[int], *parts: list[int]) -> list[int]:
    """The labels of a text, by what it begins with: tokens before and with each answer."""
    labels = [IGNORED] * len(whole)
    for before, after in zip(parts[::2], parts[1::2], strict=True):
        start, end = _common(whole, before), _common(whole, after)
        labels[start:end] = whole[start:end]
    return labels


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@functools.cache
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    content = _read(Path(path), "tokenizer", "tokenizer-invalid")
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library has no class of its own
        what = f"{Path(path).name!r} is not a tokenizer: {shortened(str(error))}"
        raise OdtpackError("tokenizer-invalid", what, where=path) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@functools.cache
def _renderer(text: str, bos: str, end: str) -> Any:
    """What makes one text of messages, with what transformers lets templates use."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``, which marks answers: what is in it is written between marks."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Scope:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (
                jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (_BEGIN, _END)
            )
            return jinja2.nodes.Scope([first, *body, last], lineno=line)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def now(pattern: str) -> str:
        return datetime.now().strftime(pattern)  # local, as in transformers

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": fail, "strftime_now": now, "bos_token": bos, "eos_token": end
    }  # fmt: skip

    template = functools.cache(environment.from_string)  # which compiles

    def render(messages: list[dict[str, str]], prompt: bool) -> str:
        try:
            return template(text).render(
                messages=messages, add_generation_prompt=prompt, tools=None, documents=None
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the template failed: {shortened(str(error))}") from error

    return render


def _cut(
    ids: list[int], labels: list[int], length: int, bos: int | None
) -> tuple[list[int], list[int]]:
    """At most ``length`` tokens: the last answer, and as much before it as there is room for."""
    learned = [i for i, label in enumerate(labels) if label != IGNORED]
    if not learned:
        return [], []
    first, end = learned[-1], learned[-1] + 1
    while first and labels[first - 1] != IGNORED:
        first -= 1
    head = ids[:1] if end > length and ids[0] == bos else []
    room = length - len(head)
    # A token before the answer stays, from which its first one is predicted.
    start = max(len(head), min(end - room, first - 1 + len(head)))
    ids, labels = head + ids[start:end][:room], len(head) * [IGNORED] + labels[start:end][:room]
    return ids, [IGNORED, *labels[1:]]  # nothing predicts the first


# What is written.


def _packed(samples: list[Any], length: int) -> list[list[Any]]:
    """Samples side by side, the longest first, each where the least room is left after it."""
    groups: list[list[Any]] = []
    rooms: list[tuple[int, int]] = []  # what a group has room for, and its number
    for sample in sorted(samples, key=lambda each: -each.shape[1]):
        place = bisect.bisect_left(rooms, (sample.shape[1], 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
            groups[number].append(sample)
        else:
            room, number = length, len(groups)
            groups.append([sample])
        bisect.insort(rooms, (room - sample.shape[1], number))
    return groups


def _write(stream: BinaryIO, groups: list[list[Any]], length: int) -> tuple[int, int]:
    """Write the arrays; return how many tokens there are, and how many are learned."""
    shape = (len(groups), length)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    sizes = np.zeros((len(groups), 1), np.int64)
    for row, group in enumerate(groups):
        joined = np.concatenate(group, axis=1)
        sizes[row] = joined.shape[1]
        ids[row, : joined.shape[1]], labels[row, : joined.shape[1]] = joined
    places = np.broadcast_to(np.arange(length), shape)
    np.savez_compressed(
        stream, allow_pickle=False, input_ids=ids, position_ids=places, labels=labels,
        attention_mask=(places < sizes).astype(np.int64),
    )  # fmt: skip
    return int(sizes.sum()), int((labels != IGNORED).sum())
