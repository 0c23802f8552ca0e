"""The digits of scikit-learn. The fleet's simulation deals them out to its phones."""

import numpy as np
from samples import write
from sklearn.datasets import load_digits

images, digits = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
labels = digits.astype(np.int64)
write(
    {"image": images[:1440], "labels": labels[:1440]},
    {"image": images[1440:], "labels": labels[1440:]},
)
