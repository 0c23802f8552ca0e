"""What a user opened lately, an item that was shown, and whether it was opened."""

import numpy as np
from samples import write

ITEMS, TOPICS = 300, 12
random = np.random.default_rng(0)
FAVORITES = random.permutation(TOPICS)[:3]


def of_topics(topics: np.ndarray) -> np.ndarray:
    """An item of each topic: item i belongs to topic i % TOPICS."""
    return topics + TOPICS * random.integers(0, ITEMS // TOPICS, topics.shape)


def shown(count: int) -> dict[str, np.ndarray]:
    """So many items that were shown. In a session the user stays with one of the favorites."""
    session = random.choice(FAVORITES, count)
    history = of_topics(np.where(random.random((count, 8)) < 0.8, session[:, None],
                                 random.integers(0, TOPICS, (count, 8))))  # fmt: skip
    topic = np.where(random.random(count) < 0.5, session, random.integers(0, TOPICS, count))
    chance = np.where(topic == session, 0.95, 0.05)
    opened = random.random(count) < chance
    return {"history": history, "item": of_topics(topic), "target": opened.astype(np.float32)}


write(shown(960), shown(240))
