"""Sentences of nine words as numbers. Whom one meets decides when and where, as habits do."""

import numpy as np
from samples import write

WHO = ["mum", "dad", "anna", "ben", "the-team", "my-boss", "the-kids", "grandma"]
VERB = ["meet", "call", "see", "visit"]
WHERE = ["home", "work", "school", "the-park", "the-lake", "downtown", "the-cafe", "the-gym"]
WHEN = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "tonight"]
HOUR = ["nine", "ten", "noon", "three", "five", "six", "seven", "eight"]
WORDS = ["<end>", "i", "we", "will", "should", "on", "at", "in", "around", "can", "must", "shall",
         *WHO, *VERB, *WHERE, *WHEN, *HOUR]  # fmt: skip
NUMBER = {word: number for number, word in enumerate(WORDS)}
random = np.random.default_rng(0)


def sentence() -> list[int]:
    """Such as: we should visit grandma on sunday around noon <end>."""
    who = random.integers(len(WHO))
    habit = random.random() < 0.85
    when, hour = (who, who) if habit else random.integers(8, size=2)
    text = [random.choice(["i", "we"]), random.choice(["will", "should", "can", "must", "shall"]),
            VERB[who % len(VERB)], WHO[who], random.choice(["on", "at"], p=[0.7, 0.3])]  # fmt: skip
    text += [WHEN[when] if text[-1] == "on" else WHERE[who], "around", HOUR[hour], "<end>"]
    return [NUMBER[word] for word in text]


def sentences(count: int) -> dict[str, np.ndarray]:
    """So many. The loss compares each prediction with the next word, so labels are the words."""
    words = np.array([sentence() for _ in range(count)])
    return {"words": words, "labels": words}


write(sentences(640), sentences(160))
