"""Trains packages on the ONNX Runtime of this Python, as an app would that has nothing else.

It runs in the environments of old releases, so it is written for Python 3.8 and imports nothing
of this project. Every session runs on one thread.

usage: worker.py JOB.json    prints the version, and losses or an error for each package
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

LEVELS = {
    None: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "disable": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class Model:
    def __init__(self, path, level):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.graph_optimization_level = LEVELS[level]
        options.enable_mem_pattern = False  # as for every package: see docs/runtimes.md
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(self, feeds):
        given = {name: feeds[name] for name in self.inputs}
        return dict(zip(self.outputs, self.session.run(None, given)))  # noqa: B905 - Python 3.9


def train(job):
    """Loss of each step, and of the evaluation model after the last."""
    training, evaluation, optimizer = (
        Model(job["models"][key], job["levels"][key])
        for key in ("training_model", "eval_model", "optimizer_model")
    )
    with np.load(job["feeds"]) as arrays:
        feeds = {name: arrays[f"a{i}"] for i, name in enumerate(job["names"])}
    kept = {name: {} for name in job["trainable"]}
    losses = []
    onnxruntime.set_seed(job["seed"])
    for step in range(1, job["steps"] + 1):
        results = training.run(feeds)
        losses.append(float(results[training.outputs[0]]))
        for name in job["trainable"]:
            gradient = results[name + "_grad.accumulation.out"]
            zeros = np.zeros(gradient.size, gradient.dtype)
            state = dict.fromkeys(optimizer.inputs, zeros)
            state.update(kept[name])
            state["learning_rate"] = np.full(1, job["rate"], np.float32)
            state["step"] = np.full(1, step, np.int64)
            state["params"] = feeds[name].reshape(-1)
            state["gradients"] = gradient.reshape(-1)
            made = optimizer.run(state)
            feeds[name] = made.pop("params.out").reshape(gradient.shape)
            kept[name] = {key[: -len(".out")]: value for key, value in made.items()}
    losses.append(float(evaluation.run(feeds)[evaluation.outputs[0]]))
    return losses


def outcome(job):
    try:
        return {"losses": train(job)}
    except Exception as error:
        return {"error": str(error)}


if __name__ == "__main__":
    with Path(sys.argv[1]).open() as stream:
        jobs = json.load(stream)
    results = {name: outcome(job) for name, job in jobs.items()}
    print(json.dumps({"version": onnxruntime.__version__, "results": results}))
