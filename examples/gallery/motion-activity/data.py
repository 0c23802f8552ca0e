"""Two seconds of six sensors at 50 Hz, [100, 6], and what the user did: one of four activities."""

import numpy as np
from samples import write

# cadence in Hz, swing in m/s², share of the second harmonic, turn in rad/s
ACTIVITIES = np.array([[0.3, 0.05, 0.0, 0.02], [1.8, 2.0, 0.6, 0.8],
                       [2.8, 8.0, 0.3, 2.0], [1.5, 2.5, 0.1, 1.2]])  # fmt: skip
random = np.random.default_rng(0)


def windows(count: int) -> dict[str, np.ndarray]:
    """So many windows."""
    labels = random.integers(0, len(ACTIVITIES), count)
    cadence, swing, second, turn = (ACTIVITIES[labels] * random.normal(1, 0.1, (count, 4))).T
    phase = 2 * np.pi * (cadence[:, None] * np.arange(100) / 50 + random.random((count, 1)))
    up = swing[:, None] * (np.sin(phase) + second[:, None] * np.sin(2 * phase))
    ahead = 0.5 * swing[:, None] * np.cos(phase)
    around = turn[:, None] * np.cos(phase / 2)
    still = np.zeros_like(up)
    # The phone lies in the pocket as it happens to: a random rotation, and gravity with it.
    turned, _ = np.linalg.qr(random.normal(0, 0.3, (count, 3, 3)) + np.eye(3))
    acceleration = np.stack([ahead, still, up + 9.81], 2) @ turned
    rotation = np.stack([still, around, still], 2) @ turned
    motion = np.concatenate([acceleration / 9.81, rotation], 2)
    motion += random.normal(0, 0.05, motion.shape)
    return {"motion": motion.astype(np.float32), "labels": labels}


write(windows(640), windows(160))
