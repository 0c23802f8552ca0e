"""Writes samples as odtpack and the training loops read them."""

from pathlib import Path

import numpy as np


def write(train: dict[str, np.ndarray], held_out: dict[str, np.ndarray]) -> None:
    """Write train.npz and held_out.npz, and the first as one file of numbers per input in data/."""
    np.savez("train.npz", **train)
    np.savez("held_out.npz", **held_out)
    Path("data").mkdir(exist_ok=True)
    for name, array in train.items():
        np.ascontiguousarray(array).tofile(f"data/{name}.bin")
