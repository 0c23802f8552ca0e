"""The digits 5 to 9 of scikit-learn, as the samples of one user."""

import numpy as np
from samples import write
from sklearn.datasets import load_digits

images, digits = load_digits(return_X_y=True)
mine = digits >= 5
images = (images[mine] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
labels = digits[mine].astype(np.int64) - 5
write(
    {"image": images[:640], "labels": labels[:640]},
    {"image": images[640:], "labels": labels[640:]},
)
