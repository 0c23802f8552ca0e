"""Made-up results of a search."""

from odtpack.fit.outcome import FitResult

CHOICE = {
    "batch_size": 32, "micro_batch": 8, "frozen": "nothing", "freeze": [], "trained_parameters": 9,
    "optimizer": "sgd", "learning_rate": 0.1, "frozen_dtype": "float32",
}  # fmt: skip
SOLUTION = {
    "number": 1, "choice": CHOICE, "metric": None, "loss": 1.0, "peak_bytes": 1, "time_s": None,
    "energy_j": None, "package_bytes": 1, "predicted_peak_bytes": 1, "devices": [], "failed": [],
    "recipe": "model = 1",
}  # fmt: skip
RESULT = {
    "tool_version": "0", "model": "m.onnx", "devices": ["a/b"], "epochs": 1, "seed": 0,
    "samples": 10, "held_out_samples": 2, "space": [], "candidates": 3, "looked_at": 3,
    "trained": 3, "objectives": [], "not_judged": [], "pareto": [], "beaten": [],
    "over_budget": [], "left": [],
}  # fmt: skip


def made_fit(**changes: object) -> FitResult:
    """Of nothing, but for what is given."""
    return FitResult.model_validate(RESULT | changes)
