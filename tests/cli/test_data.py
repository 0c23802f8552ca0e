"""``odtpack data prepare``: what it prints, and what it refuses, in one clear error."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from tests.adapters.conftest import needs_peft
from tests.adapters.written.models import HERE, VOCABULARY, causal
from tests.test_docs import ROOT, blocks
from tests.text_tools import saved, tokenizer

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}
PAIR = '{"prompt": "a", "answer": "b"}'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = saved(tokenizer("bpe"), tmp_path_factory.mktemp("tokenizer"))
    return path.rename(path.with_name("t.json"))


def test_what_was_made_is_told_and_is_json(made, tmp_path, run):
    texts, out = tmp_path / "texts.jsonl", tmp_path / "data.npz"
    rows = [CHAT, {"messages": CHAT["messages"][:1]}, {"prompt": 300 * "x", "answer": "y"}]
    texts.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    arguments = ("--tokenizer", made, "--template", "chatml", "--length", 40, "--out", out)
    outcome = run("data", "prepare", texts, *arguments, "--json", code=0)
    for words in ("3 rows, 2 samples of 40 tokens", "longer: 1", "no answer: 1", f"wrote {out}"):
        assert words in outcome.err
    with np.load(out) as data:
        assert outcome.json() == {
            "path": str(out), "rows": 3, "samples": 2, "shortened": 1, "left_out": 1,
            "tokens": data["attention_mask"].sum(),
            "learned_tokens": (data["labels"] != -100).sum(),
        }  # fmt: skip
    first = out.read_bytes()
    assert run("data", "prepare", texts, *arguments).out == ""
    assert out.read_bytes() == first


ROWS = {
    "not json": ("{", "text-invalid", "line 2"),
    "no object": ("[1]", "text-invalid", "not a JSON object"),
    "deep": ('{"text": ' + "[" * 100_000, "text-invalid", "line 2"),
    "not utf-8": (b'{"text": "\xff"}', "text-invalid", "line 2"),
    "half a pair": ('{"text": "\\ud800"}', "text-invalid", "surrogates"),
    "long": ('{"text": "' + "x" * 2**24 + '"}', "text-invalid", "longer than"),
    "no fields": ('{"prompt": "a"}', "text-invalid", "'answer'"),
    "no text": ('{"text": 3}', "text-invalid", "text is not a text"),
    "no messages": ('{"messages": []}', "text-invalid", "not a list"),
    "role": ('{"messages": [{"role": "a<|im_end|>", "content": ""}]}', "text-invalid", "message 1"),
    "content": ('{"messages": [{"role": "user"}]}', "text-invalid", "content of message 1"),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_rows(name, made, tmp_path, refused):
    row, code, words = ROWS[name]
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(f"{PAIR}\n".encode() + (row if isinstance(row, bytes) else row.encode()))
    options = "--tokenizer", made, "--length", 9, "--end", "<s>", "--out", tmp_path / "data.npz"
    refused(("data", "prepare", texts, *options), code, f"in: {texts}:2", words)


OPTIONS = {
    "no end": ((), "template-invalid", "line 1", "--end"),
    "end": (("--end", "<end>"), "template-invalid", "'<end>'"),
    "tokens": (("--template", "gemma"), "template-invalid", "'<start_of_turn>'"),
    "name": (("--template", "chatlm"), "template-invalid", "did you mean chatml?"),
    "syntax": (("--template", "{% for %}"), "template-invalid", "line 1", "the template failed"),
    "raises": (
        ("--template", "{{ raise_exception('no system') }}"), "template-invalid", "no system",
    ),
    "memory": (("--template", "{{ 'a' * 2 ** 36 }}"), "template-invalid", "memory"),
    "attributes": (("--template", "{{ messages.__class__.mro() }}"), "template-invalid", "unsafe"),
    "not a prefix": (("--template", "{{ messages | length }}"), "template-invalid", "message 2"),
    "silent": (("--template", "{{ '' }}"), "text-without-answers", "none of 1 rows"),
    "length": (("--template", "chatml", "--length", 1), "bad-argument", "length is 1", "--length"),
    "tokenizer": (("--tokenizer", "texts.jsonl"), "tokenizer-invalid", "is not a tokenizer"),
    "missing": (("--tokenizer", "none.json"), "tokenizer-invalid", "No such file"),
    "out": (("--out", "texts.jsonl"), "cannot-write", "read by the same command"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options(name, made, tmp_path, refused, monkeypatch):
    given, code, *words = OPTIONS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text(PAIR)
    options = {"--tokenizer": made, "--length": 9, "--out": "data.npz"}
    options |= dict(zip(given[::2], given[1::2], strict=True))
    if "{" in str(options.get("--template")):
        (tmp_path / "chat.jinja").write_text(str(options["--template"]))
        options["--template"] = "chat.jinja"
    refused(("data", "prepare", "texts.jsonl", *sum(options.items(), ())), code, *words)


def test_a_configuration_beside_the_tokenizer_names_template_and_tokens(made, tmp_path, run):
    (tmp_path / "tokenizer.json").write_bytes(made.read_bytes())
    (tmp_path / "texts.jsonl").write_text(f'{json.dumps(CHAT)}\n{{"text": "d"}}')
    config = tmp_path / "tokenizer_config.json"
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
    content = {"eos_token": {"content": "[SEP]"}, "bos_token": "[CLS]"}
    template = text + "{{ eos_token }}{% endif %}{% endfor %}"
    config.write_text(json.dumps({**content, "chat_template": template}))
    options = "--tokenizer", tmp_path / "tokenizer.json", "--template", config, "--length", 9
    out = tmp_path / "data.npz"
    run("data", "prepare", tmp_path / "texts.jsonl", *options, "--out", out, code=0)
    ours = tokenizer("bpe")
    for row, whole in enumerate(("[CLS]ab c[SEP]", "<s>d[SEP]")):
        ids = ours.encode(whole, add_special_tokens=False).ids
        with np.load(tmp_path / "data.npz") as data:
            assert data["input_ids"][row, : len(ids)].tolist() == ids
            assert data["attention_mask"][row].sum() == len(ids)


@needs_peft
def test_a_recipe_trains_and_simulates_from_texts(tmp_path, run):
    saved(tokenizer("wordpiece", VOCABULARY, ["abcdefgh ijklmn opq rst uvw xyz " * 9]), tmp_path)
    model = HERE / "genai-llama-tied-fp32" / "model.onnx"
    adapter = AdapterSpec("lora", ("*.q_proj",))
    build_package(model, tmp_path / "package", loss="next_token", adapter=adapter)
    names = ("recipe.toml", "train.jsonl", "eval.jsonl", "trained.ckpt")
    recipe, train, held, out = (tmp_path / name for name in names)
    (page,) = (each for each in blocks(ROOT / "docs" / "recipe.md", "toml") if "[data]" in each)
    settings = page.partition("[data]")[2].replace("256", "24")
    recipe.write_text(
        f'model = "{model}"\npackage = "package"\nloss.kind = "next_token"\n'
        f"[data]{settings}"
        '[target]\ndevices = ["pi-5"]\n[budgets]\nperplexity = 1\n'
    )
    pairs = [("abc opq", "xyz rst uvw"), ("ijklmn", "abcdefgh"), ("rst", "opq opq xyz ab cd ef")]
    for path, some in (train, pairs * 2), (held, pairs):
        rows = ({"prompt": a, "answer": b} for a, b in some)
        path.write_text("\n".join(map(json.dumps, rows)))
        made = ("--tokenizer", tmp_path / "tokenizer.json", "--template", "chatml")
        run("data", "prepare", path, *made, "--length", 24, "--out", path.with_suffix(".npz"))
    more = ("--epochs", 1, "--batch-size", 2, "--json", "--out", out)
    data, evaluation = train.with_suffix(".npz"), held.with_suffix(".npz")
    of_arrays = run("train", tmp_path / "package", "--data", data, "--eval", evaluation, *more)
    texts = ("--data", train, "--eval", held, "--recipe", recipe)
    of_texts = run("train", tmp_path / "package", *texts, *more, code=0)
    found = of_texts.json()
    assert found == of_arrays.json()

    # Of the tokens of answers, one by one, in batches of 2 and 1 samples.
    with np.load(evaluation) as arrays:
        ids, labels = arrays["input_ids"], arrays["labels"]
    with torch.no_grad():
        logits = causal("Llama", True, 32).double()(torch.from_numpy(ids)).logits
    rows, places = np.nonzero(labels != -100)
    terms = torch.log_softmax(logits[rows, places - 1], -1)[range(len(rows)), labels[rows, places]]
    perplexity = float(torch.exp(-terms.mean()))
    assert found["eval_tokens"] == len(rows)
    assert found["perplexity_before"] == pytest.approx(perplexity, rel=1e-5)
    assert found["perplexity_after"] < perplexity
    assert f"perplexity {perplexity:.4g} of {len(rows)} tokens" in of_texts.err

    page = tmp_path / "report.html"
    options = ("--epochs", 1, "--interruptions", 0, "--json", "--report", f"html:{page}")
    result = run("simulate", tmp_path / "package", *texts, *options, code=1).json()
    training = result["training"]
    assert training["tokens"] == len(rows)
    assert training["perplexity_before"] == pytest.approx(perplexity, rel=1e-5)
    assert training["perplexity_after"] < perplexity
    (check,) = (each for each in result["checks"] if each["metric"] == "perplexity")
    assert (check["status"], check["actual"]) == ("fail", training["perplexity_after"])
    assert f"{len(rows)} held-out tokens" in page.read_text()


def test_texts_without_a_recipe(tmp_path, shared, refused):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model = "model.onnx"\nloss.kind = "mse"\n')
    arguments = "--data", "texts.jsonl", "--recipe", recipe, "--out", tmp_path / "c"
    words = "texts.jsonl", "[data]", "odtpack data prepare"
    refused(("train", shared.package, *arguments), "usage", *words)


def test_without_tokenizers_the_error_names_the_extra(made, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ("--tokenizer", made, "--length", 9, "--out", tmp_path / "data.npz")
    words = "tokenizer-not-installed", "pip install tokenizers"
    refused(("data", "prepare", tmp_path / "x", *arguments), *words)
