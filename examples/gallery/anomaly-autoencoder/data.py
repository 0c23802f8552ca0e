"""Windows of a motor's vibration, [64]: sound ones to learn from, and a broken bearing."""

import numpy as np
from samples import write

random = np.random.default_rng(0)


def windows(count: int, *, broken: bool = False) -> dict[str, np.ndarray]:
    """So many windows; the target is the window itself."""
    speed, begin = random.uniform([2.5, 0], [3.5, 2 * np.pi], (count, 2)).T
    phase = 2 * np.pi * speed[:, None] * np.arange(64) / 64 + begin[:, None]
    window = np.sin(phase) + 0.4 * np.sin(2 * phase + 0.5) + random.normal(0, 0.05, phase.shape)
    if broken:  # a click in each turn
        window += 1.5 * (np.cos(phase * 2.7) > 0.95)
    window = window.astype(np.float32)
    return {"window": window, "target": window}


write(windows(640), windows(160))
np.savez("anomalies.npz", **windows(160, broken=True))
