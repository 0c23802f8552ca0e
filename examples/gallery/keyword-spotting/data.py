"""Eight words as spectrograms: sequences of three vowels, buzzes that formants shape."""

import numpy as np
from samples import write

RATE, FRAMES, BANDS, WORDS = 8_000, 32, 32, 8
random = np.random.default_rng(0)
FORMANTS = random.uniform([300, 900], [900, 3_000], (WORDS, 3, 2))


def spoken(word: int) -> np.ndarray:
    """One second of sound."""
    time = np.arange(RATE) / RATE
    pitch, start, length = random.uniform([90, 0.05, 0.5], [240, 0.2, 0.75])
    harmonics = np.arange(pitch, 3_600, pitch)
    waves = np.sin(2 * np.pi * np.outer(harmonics, time))
    peaks = np.exp(-(((harmonics - FORMANTS[word][..., None]) / 150) ** 2)).sum(1)
    middles = start + length * (np.arange(3)[:, None] + 0.5) / 3
    envelopes = np.exp(-(((time - middles) / (length / 7)) ** 2))
    return (envelopes * (peaks @ waves)).sum(0) + random.normal(0, 0.02, RATE)


def spectrogram(sound: np.ndarray) -> np.ndarray:
    """Logarithmic power of bands over time, [1, bands, frames]."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, 500)[:: (RATE - 500) // (FRAMES - 1)]
    power = np.abs(np.fft.rfft(frames[:FRAMES] * np.hanning(500), 512))[:, : 8 * BANDS] ** 2
    bands = np.log(power.reshape(FRAMES, BANDS, -1).mean(2) + 1e-3)
    return (bands.T[None] / 5).astype(np.float32)


def words(count: int) -> dict[str, np.ndarray]:
    """So many words."""
    labels = random.integers(0, WORDS, count)
    return {"spectrogram": np.stack([spectrogram(spoken(word)) for word in labels]),
            "labels": labels}  # fmt: skip


write(words(320), words(120))
