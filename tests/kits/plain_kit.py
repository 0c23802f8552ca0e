"""A training kit in as few lines as the format allows: it knows the manifest and nothing else.

It shares no code with :mod:`odtpack_runtime` beyond the checkpoint's reader and writer.
"""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.parameters import Array

LEVELS = {
    "disabled": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class PlainKit:
    """A package in training, step by step as docs/formats/kits.md has it."""

    def __init__(self, package, checkpoint, models, threads):
        self.manifest = json.loads((package / "manifest.json").read_text())
        self.package = package
        files = {key: entry["path"] for key, entry in self.manifest["files"].items()
                 if key != "extra"} | models  # fmt: skip
        self.sessions = {
            key: onnxruntime.InferenceSession(
                str(package / files[key]), self._options(threads),
                providers=["CPUExecutionProvider"],
            )
            for key in ("training_model", "eval_model", "optimizer_model")
        }  # fmt: skip
        self.layout = self.manifest["layout"]
        data = read_checkpoint(checkpoint)
        self.others = data.frozen
        self.properties = data.properties
        trained = (p for p in self.manifest["parameters"] if p["role"] == "trainable")
        self.trained = sorted(trained, key=lambda p: p["offset"])
        self.dtype = np.dtype(self.layout["dtype"])
        vectors = ["params", "gradients"]
        if self.layout["run"] != "parameters":
            vectors += [entry["name"] for entry in self.layout.get("state", ())]
        self.vectors = {name: np.zeros(self.layout["elements"], self.dtype) for name in vectors}
        for p in self.trained:
            self._view("params", p)[...] = data.trainable[p["name"]]
        self.state = {
            (entry["name"], p["name"]): np.zeros(self._state_shape(entry, p), self.dtype)
            if entry["name"] not in self.vectors
            else self._view(entry["name"], p)
            for entry in self.layout.get("state", ())
            for p in self.trained
        }
        self.step_count, self.rate, self.reset = 0, np.float32(0.001), True
        self.skipped_steps, self.nothing_to_step = 0, False
        if data.optimizer is not None:
            self.step_count = data.optimizer.step
            self.rate = np.float32(data.optimizer.learning_rate)
            for (name, parameter), array in self.state.items():
                index = [entry["name"] for entry in self.layout["state"]].index(name)
                array[...] = data.optimizer.moments[parameter][index]

    def _options(self, threads: int) -> onnxruntime.SessionOptions:
        said = self.manifest["session"]
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVELS[said["optimization_level"]]
        options.enable_mem_pattern = said.get("memory_pattern", True)
        options.enable_cpu_mem_arena = said.get("arena", True)
        options.intra_op_num_threads = threads
        for key, value in said.get("config", {}).items():
            options.add_session_config_entry(key, value)
        return options

    def _view(self, vector: str, p: dict[str, Any]) -> Array:
        size = math.prod(p["shape"])
        return self.vectors[vector][p["offset"] : p["offset"] + size].reshape(p["shape"])

    def _parameters(self) -> dict[str, Array]:
        return {p["name"]: self._view("params", p) for p in self.trained} | self.others

    def train_step(self, batch: dict[str, Array]) -> list[Array]:
        """Accumulate the gradients of a batch; return its outputs, the loss first."""
        shown = [item["name"] for item in self.manifest["outputs"]]
        state = [p["name"] for p in self.manifest["parameters"] if p["role"] == "state"]
        buffers = {p["name"] + "_grad.accumulation.buffer": self._view("gradients", p)
                   for p in self.trained}  # fmt: skip
        names = [*shown, *(p["name"] + "_grad.accumulation.out" for p in self.trained),
                 *(name + ".update.out" for name in state)]  # fmt: skip
        fed = batch | self._parameters() | buffers | {"lazy_reset_grad": np.array([self.reset])}
        self.nothing_to_step |= self.reset  # until the step is seen to be good
        results = self.sessions["training_model"].run(names, fed)
        if not all(np.isfinite(r).all() for r in (results[0], *results[len(shown) :])):
            self.skipped_steps += 1
            return results[: len(shown)]
        for p, gradient in zip(self.trained, results[len(shown) :], strict=False):
            self._view("gradients", p)[...] = gradient
        for name, value in zip(state, results[len(shown) + len(self.trained) :], strict=True):
            self.others[name] = value
        self.reset = self.nothing_to_step = False
        return results[: len(shown)]

    def evaluate(self, batch: dict[str, Array]) -> list[Array]:
        """Return the outputs of the evaluation model."""
        return self.sessions["eval_model"].run(None, batch | self._parameters())

    def optimizer_step(self) -> None:
        """Change the parameters by their gradients; not if all batches were not finite."""
        if self.nothing_to_step:
            return
        groups = self.manifest.get("groups") or [
            {"learning_rate_scale": 1.0, "weight_decay": 0.0,
             "parameters": [p["name"] for p in self.trained]}
        ]  # fmt: skip
        owner = {name: group for group in groups for name in group["parameters"]}
        wide = self.vectors["gradients"].astype(np.float64)
        for group, vectors, shape in self._runs(owner):
            scalars = {
                "learning_rate": np.array([float(self.rate) * group["learning_rate_scale"]],
                                          np.float32),
                "step": np.array([self.step_count + 1]),
                "gradient_norm": np.array([math.sqrt(math.fsum(wide * wide))], self.dtype),
                "weight_decay": np.array([group["weight_decay"]], self.dtype),
                "factored": np.array([len(shape) >= 2]),
            }  # fmt: skip
            names = [name for name in vectors if name != "gradients"]
            fed = {n: (vectors | scalars)[n] for n in self.layout["inputs"]}
            results = self.sessions["optimizer_model"].run([f"{n}.out" for n in names], fed)
            for name, result in zip(names, results, strict=True):
                vectors[name][...] = result
        self.step_count += 1
        self.reset = True

    def _runs(self, owner: dict[str, Any]) -> list[tuple[Any, dict[str, Array], list[int]]]:
        if self.layout["run"] == "parameters":
            some = [p for p in self.trained if math.prod(p["shape"])]
            return [(owner[p["name"]], self._matrices(p), p["shape"]) for p in some]
        chunk = self.layout["chunk_elements"]
        firsts = [
            p for i, p in enumerate(self.trained)
            if not i or owner[p["name"]] is not owner[self.trained[i - 1]["name"]]
        ]  # fmt: skip
        ends = [*(p["offset"] for p in firsts), self.layout["elements"]]
        runs = []
        for p, (start, end) in zip(firsts, pairwise(ends), strict=True):
            step = chunk if self.layout["run"] == "chunks" else max(end - start, 1)
            for at in range(start, end, step):
                part = slice(at, min(at + step, end))
                cut = {name: vector[part] for name, vector in self.vectors.items()}
                runs.append((owner[p["name"]], cut, []))
        return runs

    def _matrices(self, p: dict[str, Any]) -> dict[str, Array]:
        rows, columns = _matrix(p["shape"])
        found = {name: self._view(name, p).reshape(rows, columns)
                 for name in ("params", "gradients")}  # fmt: skip
        for entry in self.layout["state"]:
            shape = [size if i in entry["axes"] else 1 for i, size in enumerate((rows, columns))]
            found[entry["name"]] = self.state[entry["name"], p["name"]].reshape(shape)
        return found

    def _state_shape(self, entry: dict[str, Any], p: dict[str, Any]) -> list[int]:
        cut = _cut(p["shape"])
        return [s if int(i >= cut) in entry["axes"] else 1 for i, s in enumerate(p["shape"])]

    def content(self) -> CheckpointData:
        """What a checkpoint of this moment holds."""
        names = [entry["name"] for entry in self.layout.get("state", ())]
        moments = {p["name"]: [self.state[name, p["name"]] for name in names]
                   for p in self.trained if names}  # fmt: skip
        groups = [tuple(group["parameters"]) for group in self.manifest.get("groups", ())]
        optimizer = OptimizerState(
            self.step_count, float(self.rate), moments, tuple(groups) if len(groups) > 1 else (),
            self.manifest["optimizer"]["kind"],
        )  # fmt: skip
        trained = {p["name"]: self._view("params", p) for p in self.trained}
        return CheckpointData(trained, self.others, optimizer=optimizer, properties=self.properties)

    def export(self) -> bytes:
        """Return the trained model: the inference template and a fragment for each parameter."""
        name = self.manifest["files"]["inference_template"]["path"]
        known = {p["name"]: p for p in self.manifest["parameters"]}
        values = self._parameters()
        made = (self.package / name).read_bytes()
        for name in self.manifest["inference"]["parameters"]:
            p, value = known[name], values[name]
            if "scale" in p:
                value = value.astype(np.float32) * values[p["scale"]]
            elif "model_dtype" in p:
                value = value.astype(p["model_dtype"])
            code = {"float32": 1, "float16": 10, "float64": 11, "int64": 7}[value.dtype.name]
            tensor = b"".join(b"\x08" + _varint(dim) for dim in value.shape)
            tensor += b"\x10" + _varint(code)
            tensor += b"\x42" + _sized(name.encode()) + b"\x4a" + _sized(value.tobytes())
            made += b"\x3a" + _sized(b"\x2a" + _sized(tensor))
        return made


def _cut(shape: list[int]) -> int:
    sums = [math.prod(shape[:i]) + math.prod(shape[i:]) for i in range(1, len(shape))]
    return sums.index(min(sums)) + 1 if sums else 0


def _matrix(shape: list[int]) -> tuple[int, int]:
    return math.prod(shape[: _cut(shape)]), math.prod(shape[_cut(shape) :])


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
