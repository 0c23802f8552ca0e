"""Samples of conversations have the tokens of transformers, and train as PyTorch trains on them."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from odtpack.spec import TextSpec
from odtpack.text import _BEGIN, _END, IGNORED, TEMPLATES, _cut, _renderer, prepare
from odtpack_runtime.apart import worker
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import follow
from tests.adapters.test_written_by_tools import SPEC
from tests.adapters.written.models import HERE, VOCABULARY, causal
from tests.refused import refused
from tests.text_tools import saved, texts, tokenizer

# As published, with the answers marked for transformers' own mask.
GENERATION = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "<|begin_of_text|>{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "<bos><start_of_turn>user\n{{ messages[0].content + '\n\n' + messages[1].content | trim }}"
        "<end_of_turn>\n{% for m in messages[2:] %}{% if m.role == 'assistant' %}"
        "{{ '<start_of_turn>model\n' }}{% generation %}{{ m.content | trim + '<end_of_turn>\n' }}"
        "{% endgeneration %}{% else %}{{ '<start_of_turn>user\n' + m.content | trim }}"
        "{{ '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    ),
}
GENERATION["marked"] = GENERATION["chatml"].replace(
    "'<|im_end|>\n' }}{% endgeneration %}", "'<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
)
TOKENS = [
    "<|im_end|>", "<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip


def conversations(count: int) -> list[list[dict[str, str]]]:
    """A system message, a question, an answer, and the same again."""
    found, roles = texts(5 * count, seed=3), ("system", *2 * ("user", "assistant"))
    each = [found[index : index + 5] for index in range(0, len(found), 5)]
    return [
        # Whitespace before an answer could be one token with the line break before it.
        [{"role": r, "content": t.strip() or "a"} for r, t in zip(roles, some, strict=True)]
        for some in each
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(folder: Path, rows: list[Any], spec: TextSpec) -> dict[str, np.ndarray]:
    prepare(write(folder / "rows.jsonl", rows), folder / "data.npz", spec)
    with np.load(folder / "data.npz") as data:
        return dict(data)


@needs_peft
@pytest.mark.parametrize("template", GENERATION)
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_tokens_and_labels_are_those_of_transformers(kind, template, tmp_path):
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer(kind)
    ours.add_special_tokens(TOKENS)
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours, chat_template=GENERATION[template])
    rows = conversations(20)
    own = template
    if template not in TEMPLATES:
        own = str(tmp_path / "own.jinja")
        Path(own).write_text(GENERATION[template])
    data = made(
        tmp_path,
        [{"messages": each} for each in rows],
        TextSpec(str(saved(ours, tmp_path / "t")), 400, own),
    )
    for row, messages in enumerate(rows):
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = np.array(expected["input_ids"]), np.array(expected["assistant_masks"])
        size = int(np.flatnonzero(mask)[-1]) + 1  # what follows the last answer is left out
        assert 0 < mask.sum() < size <= 400
        ids, mask = ids[:size], mask[:size]
        np.testing.assert_array_equal(data["input_ids"][row, :size], ids)
        np.testing.assert_array_equal(data["labels"][row, :size], np.where(mask, ids, IGNORED))
        np.testing.assert_array_equal(data["attention_mask"][row], np.arange(400) < size)
        assert (data["labels"][row, size:] == IGNORED).all()
        np.testing.assert_array_equal(data["position_ids"][row], np.arange(400))


@needs_peft
@pytest.mark.parametrize("template", [
    *GENERATION.values(),
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ loop.index ~ m.role }}{% endgeneration %}"
    "{% endfor %}",
    "{{ strftime_now('%Y %B') }}",
    "{% if tools is not none or documents is not none %}tools{% endif %}{{ [1] | tojson }}",
])  # fmt: skip
def test_templates_are_rendered_as_by_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    (messages,) = conversations(1)
    ((expected,), _) = render_jinja_template([messages], chat_template=template)
    found = _renderer(template, "", "")(messages, False)
    assert found.replace(_BEGIN, "").replace(_END, "") == expected


def test_a_template_stays_in_its_sandbox():
    inside = "{{ strftime_now.__globals__['json'] }}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for template in (inside, f"{{% generation %}}{inside}{{% endgeneration %}}"):
        with pytest.raises(ValueError, match="unsafe"):
            _renderer(template, "", "")([], False)


def test_a_template_that_never_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(worker.Limits, "of", lambda _: worker.Limits(seconds=2))
    template = tmp_path / "template.jinja"
    template.write_text("{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2)
    tokens = saved(tokenizer("bpe"), tmp_path / "t")
    with refused("template-invalid", "did not end on lines 1 to 1"):
        made(tmp_path, [{"prompt": "a", "answer": "b"}], TextSpec(str(tokens), 64, str(template)))


def test_an_end_that_is_no_token_is_refused_where_it_is_written(tmp_path):
    path = saved(tokenizer("bpe"), tmp_path / "t")
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    answer = [{"prompt": "a", "answer": "b"}]
    for rows in (answer, [{"text": "a"}]):
        with refused("template-invalid", "endoftext"):
            made(tmp_path, rows, TextSpec(str(path), 64))
    assert made(tmp_path, answer, TextSpec(str(path), 64, "chatml"))["labels"].shape == (1, 64)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_plain_rows_are_their_texts_with_an_end(kind, tmp_path):
    ours = tokenizer(kind)
    spec = TextSpec(str(saved(ours, tmp_path / "t")), 400, end="<|im_end|>", answer_field="reply")
    some = texts(20, seed=4)
    rows = [{"prompt": a, "reply": b} for a, b in zip(some[::2], some[1::2], strict=True)]
    data = made(tmp_path, [*rows, *({"text": each} for each in some)], spec)
    wholes = [row["prompt"] + row["reply"] for row in rows] + some
    for row, whole in enumerate(wholes):
        ids = ours.encode(whole + "<|im_end|>").ids
        np.testing.assert_array_equal(data["input_ids"][row, : len(ids)], ids)
        learned = data["labels"][row] != IGNORED
        np.testing.assert_array_equal(data["labels"][row][learned], data["input_ids"][row][learned])
        assert learned[len(ids) - 1]
        if row >= len(rows):
            assert learned.sum() == len(ids) - 1
        else:  # all of the prompt but what is one token with the answer
            prompt = len(ours.encode(rows[row]["prompt"], add_special_tokens=False).ids)
            assert 0 <= prompt + 1 - np.argmax(learned) <= 1


def test_what_is_too_long_loses_the_start_of_the_prompt_first():
    ids = [*range(10, 20)]
    for answer in range(10):  # tokens of the answer
        labels = (10 - answer) * [IGNORED] + ids[10 - answer :]
        for length in range(2, 12):
            for bos in (None, 10):
                kept, found = _cut(ids, labels, length, bos)
                if not answer:
                    assert kept == []
                    continue
                assert len(kept) == len(found) <= length
                assert found[0] == IGNORED
                learned = [label for label in found if label != IGNORED]
                assert learned == ids[10 - answer :][: length - 1]
                assert [k for k, f in zip(kept, found, strict=True) if f != IGNORED] == learned
                assert len(kept) == min(length, 10)
                start = 1 if length < 10 and bos else 0
                assert kept[:start] == ids[:start]
                assert kept[start:] == [*range(kept[start], kept[start] + len(kept) - start)]


def test_packed_samples_learn_the_same_tokens(tmp_path):
    path = str(saved(tokenizer("bpe"), tmp_path / "t"))
    rows = [{"text": each} for each in texts(60, seed=5)]
    apart, packed = (
        made(tmp_path, rows, TextSpec(path, 300, end="<|im_end|>", pack=pack))
        for pack in (False, True)
    )

    def learned(data: dict[str, np.ndarray]) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for ids, labels, mask in zip(
            data["input_ids"], data["labels"], data["attention_mask"], strict=True
        ):
            count = mask.sum()
            assert mask[:count].all()
            starts = [*np.flatnonzero(labels[:count] == IGNORED), count]
            found.update(tuple(ids[a:b]) for a, b in pairwise(starts))
            np.testing.assert_array_equal(
                labels[:count], np.where(np.isin(np.arange(count), starts), IGNORED, ids[:count])
            )
        return found

    assert learned(apart) == learned(packed)
    assert apart["attention_mask"].sum() == packed["attention_mask"].sum()
    assert len(packed["labels"]) <= np.ceil(1.1 * packed["attention_mask"].sum() / 300) < 30


@needs_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", ["genai-llama-tied-fp32", "optimum-llama-tied-past"])
def test_ten_steps_agree_with_peft_on_answers_only(name, tmp_path):
    ours = tokenizer("wordpiece", VOCABULARY, ["abcdefgh ijklmn opq rst uvw xyz " * 9])
    assert ours.get_vocab_size() <= VOCABULARY
    pairs = [("abc opq", "xyz rst uvw"), ("ijklmn", "abcdefgh"), ("rst", "opq opq xyz ab cd ef")]
    data = made(
        tmp_path,
        [{"prompt": a, "answer": b} for a, b in pairs],
        TextSpec(str(saved(ours, tmp_path / "t")), 20, "chatml"),
    )
    ids, mask, places, labels = (
        data[key] for key in ("input_ids", "attention_mask", "position_ids", "labels")
    )
    batch = (ids, labels) if name.startswith("genai") else (ids, mask, places, labels)

    def loss(output: Any, _: torch.Tensor) -> torch.Tensor:
        """The mean over the answers' tokens, which are counted anew."""
        terms = []
        for row, (prompt, answer) in enumerate(pairs):
            turns = (f"user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>\n")
            first, second = (
                ours.encode("<|im_start|>" * (not i) + turn, add_special_tokens=False).ids
                for i, turn in enumerate(turns)
            )
            where = range(len(first), len(first) + len(second))
            logits = output.logits[row, [place - 1 for place in where]]
            terms.append(
                nn.functional.cross_entropy(logits, torch.tensor(second), reduction="none")
            )
        assert output.logits.dtype == torch.float64
        return torch.cat(terms).mean()

    follow(
        causal("Llama", True, 32), HERE / name / "model.onnx", tmp_path / "package", SPEC,
        ("next_token", loss), batch,
    )  # fmt: skip
