"""Errors of the trained autoencoder on sound windows and on anomalies, and how many it finds."""

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("personal.onnx")


def errors(file: str) -> np.ndarray:
    """The mean squared error of each window."""
    with np.load(file) as data:
        (output,) = session.run(["output"], {"window": data["window"]})
        return ((output - data["window"]) ** 2).mean(1)


limit = np.quantile(errors("train.npz"), 0.99)
sound, broken = errors("held_out.npz"), errors("anomalies.npz")
print(f"limit {limit:.4f}: {(sound > limit).mean():.0%} of sound windows above it, "
      f"{(broken > limit).mean():.0%} of the anomalies")  # fmt: skip
