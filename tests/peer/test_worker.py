"""The worker that drives the reference, judged by PyTorch: what it reports must be true."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from tests import zoo
from tests.torch_twins import twin


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Path]:
    """A small model and data for it on disk."""
    random = np.random.default_rng(0)
    paths = {name: tmp_path / name for name in ("model.onnx", "data.npz", "artifacts")}
    onnx.save(zoo.mlp((6, 8, 4)), paths["model.onnx"])
    x = random.standard_normal((12, 6), dtype=np.float32)
    np.savez(paths["data.npz"], input=x, labels=random.integers(0, 4, 12))
    return paths


def test_training_follows_pytorch(peer, job, tmp_path):
    files = {key: tmp_path / key for key in ("gradients.npz", "parameters.npz", "saved")}
    made, result, loaded = peer.run_jobs([
        {"command": "generate", "model": job["model.onnx"], "folder": job["artifacts"],
         "optimizer": "sgd"},
        {"command": "train", "folder": job["artifacts"], "inputs": job["data.npz"], "steps": 3,
         "batch": 5, "accumulate": 2, "learning_rate": 0.1, "gradients": files["gradients.npz"],
         "parameters": files["parameters.npz"], "save": files["saved"], "optimizer_state": True,
         "properties": {"epoch": 3, "rate": 0.5, "note": "fine"}},
        {"command": "load", "checkpoint": files["saved"], "parameters": tmp_path / "loaded.npz"},
    ])  # fmt: skip
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert made["requires_grad"] == names
    assert {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"} == set(
        made["files"]
    )

    module = twin(onnx.load(job["model.onnx"]))
    data = np.load(job["data.npz"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, position, first = [], 0, {}
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            rows = np.arange(position, position + 5) % 12
            position += 5
            x, labels = (torch.from_numpy(data[key][rows]) for key in ("input", "labels"))
            loss = torch.nn.functional.cross_entropy(module(x), labels)
            loss.backward()
            losses.append(loss.item())
        first = first or {n: p.grad.numpy().copy() for n, p in module.named_parameters()}
        optimizer.step()
    x, labels = (torch.from_numpy(data[key][:5]) for key in ("input", "labels"))
    final = torch.nn.functional.cross_entropy(module(x), labels).item()

    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert result["eval_loss"] == pytest.approx(final, rel=1e-5)
    gradients, parameters = np.load(files["gradients.npz"]), np.load(files["parameters.npz"])
    assert set(gradients) == set(parameters) == set(names)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(gradients[name], first[name], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            parameters[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6
        )

    assert loaded["properties"] == {"epoch": 3, "rate": 0.5, "note": "fine"}
    assert loaded["parameters"]["fc1.weight"] == {
        "shape": [8, 6], "dtype": "float32", "requires_grad": True,
    }  # fmt: skip
    for name, values in np.load(tmp_path / "loaded.npz").items():
        np.testing.assert_array_equal(values, parameters[name])


def test_frozen_parameters_do_not_move(peer, job, tmp_path):
    frozen = ["fc1.weight", "fc1.bias"]
    optimizer = {"kind": "adamw", "eps": 1e-8, "weight_decay": 0.01, "clip_grad": 1.0}
    made = peer.generate(
        model=job["model.onnx"], folder=job["artifacts"], frozen=frozen, optimizer=optimizer
    )
    assert made["requires_grad"] == ["fc2.weight", "fc2.bias"]
    peer.train(
        folder=job["artifacts"], inputs=job["data.npz"], steps=2, learning_rate=0.1,
        parameters=tmp_path / "after.npz",
    )  # fmt: skip
    after = np.load(tmp_path / "after.npz")
    for tensor in onnx.load(job["model.onnx"]).graph.initializer:
        before = onnx.numpy_helper.to_array(tensor)
        assert np.array_equal(after[tensor.name], before) == (tensor.name in frozen)


def test_bench_reports_every_timed_step(peer, job):
    peer.generate(model=job["model.onnx"], folder=job["artifacts"])
    result = peer.bench(folder=job["artifacts"], inputs=job["data.npz"], steps=4, warm_up=2)
    assert len(result["train_ms"]) == len(result["optimizer_ms"]) == 4
    assert len(result["losses"]) == 6
    assert result["losses"][-1] < result["losses"][0]
    assert 0 < result["peak_bytes"] < 200e6


def test_what_the_reference_raises_comes_back(peer, job):
    with pytest.raises(peer.PeerError, match="zzz") as caught:
        peer.generate(model=job["model.onnx"], folder=job["artifacts"], requires_grad=["zzz"])
    assert caught.value.kind == "RuntimeError"


def test_a_missing_environment_is_explained(monkeypatch, tmp_path):
    from tests.peer import client

    monkeypatch.setattr(client, "ENVIRONMENT", tmp_path)
    reason = client.peer_available()
    assert reason is not None
    assert "make peer" in reason


@pytest.mark.parametrize(
    ("script", "kind"),
    [("import os; os.abort()", "crash"), ("import time; time.sleep(60)", "timeout")],
)
def test_a_dead_worker_is_an_error(monkeypatch, tmp_path, script, kind):
    import sys

    from tests.peer import client

    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.symlink_to(sys.executable)
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(client, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(client, "WORKER", worker)
    limit = 1 if kind == "timeout" else 300
    with pytest.raises(client.PeerError) as caught:
        client.load(checkpoint=json.dumps("nothing"), timeout_seconds=limit)
    assert caught.value.kind == kind
