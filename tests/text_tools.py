"""Tokenizers that are trained on the spot, and texts in many scripts, from a seed."""

from pathlib import Path
from typing import Any

import numpy as np

# First and last letter of each script; those that have case, or marks, are among them.
SCRIPTS = {
    "latin": "az", "accents": "àÿ", "cyrillic": "ая", "greek": "αω", "arabic": "ءي",
    "hebrew": "את", "devanagari": "कह", "thai": "กฮ", "chinese": "一丿", "japanese": "あん",
    "korean": "가갛", "emoji": "😀🙏",
}  # fmt: skip
PIECES = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", " ", "\u200b", "e\u0301", "ﬁ", "①", "İ", "ẞ",
    "👩‍🚀", "🇬🇷", "if (x != y) { return a[i]->b; }", "def f(x):\n    return x**2\n",
    "https://example.com/?q=1&r=é", "12345.678", "don't", "I'LL", "<html>&amp;</html>",
    "\\u0041", "...!?", "नमस्ते", "สวัสดี", "한국어",
]  # fmt: skip
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<s>", "[CLS]", "[SEP]"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of words in some scripts, spaces, code and special tokens."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        parts = []
        for name in random.choice([*SCRIPTS], random.integers(1, 4)):
            first, last = map(ord, SCRIPTS[name])
            for _ in range(random.integers(1, 6)):
                letters = random.integers(first, last + 1, random.integers(1, 8))
                word = "".join(map(chr, letters))
                parts += [word.title() if random.random() < 0.2 else word, " "]
            parts.append(str(random.choice(PIECES)))
        if random.random() < 0.1:
            parts.insert(int(random.integers(len(parts))), str(random.choice(SPECIAL[1:])))
        found.append("".join(parts))
    return found


def tokenizer(kind: str, words: int = 1200, corpus: list[str] | None = None) -> Any:
    """A byte-level BPE, a WordPiece or a Unigram tokenizer, trained on texts of another seed."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    if kind == "bpe":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=words, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token=SPECIAL[0]))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=words, special_tokens=SPECIAL, show_progress=False
        )
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=words, special_tokens=SPECIAL, unk_token=SPECIAL[0], show_progress=False
        )
    made.train_from_iterator(texts(400, seed=1) if corpus is None else corpus, trainer)
    first, last = ("[CLS]", "[SEP]") if kind == "wordpiece" else ("<s>", "")
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(),
        special_tokens=[(each, made.token_to_id(each)) for each in ("[CLS]", "[SEP]", "<s>")],
    )
    return made


def saved(made: Any, folder: Path) -> Path:
    """The tokenizer's file, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
