"""Each block computes what it says; blocks compose, and names depend on nothing but the model."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F

from odtpack import onnxblock
from odtpack.onnxblock import blocks, loss
from tests.model_text import parsed
from tests.onnxblock.nets import Forward, Train, Twin, batch, built, mlp, names, run, values

X = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
Y = np.random.default_rng(2).uniform(1, 2, (3, 4)).astype(np.float32)


class Apply(onnxblock.ForwardBlock):
    """One block over the graph inputs x and y, or those that it takes."""

    def __init__(self, block: onnxblock.Block, *reads: str) -> None:
        super().__init__()
        self.block, self.reads = block, reads

    def build(self) -> Any:
        self.base.graph.input.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"
        )
        return self.block(*self.reads)


def apply(block: onnxblock.Block, *reads: str, opset: int = 17) -> list[np.ndarray]:
    return [*run(built(Apply(block, *reads), on=opset), {"x": X, "y": Y}).values()]


CASES: dict[str, tuple[Callable[[], onnxblock.Block], str, np.ndarray]] = {
    "Add": (blocks.Add, "xy", X + Y),
    "Sub": (blocks.Sub, "xy", X - Y),
    "Mul": (blocks.Mul, "xy", X * Y),
    "Div": (blocks.Div, "xy", X / Y),
    "Pow": (lambda: blocks.Pow(3), "x", X**3),
    "Pow-half": (lambda: blocks.Pow(0.5), "y", Y**0.5),
    "ReduceMean": (blocks.ReduceMean, "x", X.mean(keepdims=True)),
    "ReduceMean-scalar": (lambda: blocks.ReduceMean(keepdims=False), "x", X.mean()),
    "ReduceSum": (blocks.ReduceSum, "x", X.sum(keepdims=True)),
    "ReduceSum-scalar": (lambda: blocks.ReduceSum(keepdims=False), "x", X.sum()),
    "Sigmoid": (blocks.Sigmoid, "x", 1 / (1 + np.exp(-X))),
    "Log": (blocks.Log, "y", np.log(Y)),
    "Neg": (blocks.Neg, "x", -X),
    "Abs": (blocks.Abs, "x", np.abs(X)),
    "ReduceAllL2": (blocks.ReduceAllL2, "xy", np.sqrt((X**2).sum() + (Y**2).sum())),
    "StopGradient": (blocks.StopGradient, "x", X),
    "Clip": (lambda: blocks.Clip(-0.5, 0.25), "x", X.clip(-0.5, 0.25)),
    "Clip-below": (lambda: blocks.Clip(clip_min=-0.5), "x", X.clip(-0.5)),
    "Clip-above": (lambda: blocks.Clip(clip_max=0.25), "x", X.clip(None, 0.25)),
    "Clip-not": (blocks.Clip, "x", X),
    "Cast": (lambda: blocks.Cast(TensorProto.INT64), "y", Y.astype(np.int64)),
}


@pytest.mark.parametrize("opset", [12, 17, 21])
@pytest.mark.parametrize("name", CASES)
def test_what_a_block_computes(name, opset):
    make, reads, expected = CASES[name]
    (result,) = apply(make(), *reads, opset=opset)
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, rtol=2e-6)


def test_constant():
    (result,) = apply(blocks.Constant(0.3))
    assert result.shape == ()
    assert result == np.float32(0.3)


def test_pass_through():
    with onnxblock.empty_base():
        assert blocks.PassThrough()("a", "b") == ("a", "b")
        assert blocks.PassThrough()() == ()


def test_sequence():
    (result,) = apply(blocks.SequenceConstruct(), "x", "y")
    np.testing.assert_array_equal(result, [X, Y])


@pytest.mark.parametrize(("keys", "given", "expected"), [
    ({"keys_int64s": [7, 3], "values_int64s": [0, 1]}, np.array([3, 7, 5]), [1, 0, -1]),
    ({"keys_strings": ["a", "b"], "values_int64s": [4, 5]}, np.array(["b", "z"], object), [5, -1]),
    ({"keys_int64s": [1], "values_floats": [2.5]}, np.array([1, 2]), [2.5, 0]),
    ({"keys_floats": [0.5], "values_strings": ["half"]}, np.float32([0.5, 1]), ["half", "_Unused"]),
])  # fmt: skip
def test_label_encoder(keys, given, expected):
    kinds = {"O": TensorProto.STRING, "i": TensorProto.INT64, "f": TensorProto.FLOAT}

    class Encode(onnxblock.ForwardBlock):
        def build(self) -> str:
            info = helper.make_tensor_value_info("keys", kinds[given.dtype.kind], ["n"])
            self.base.graph.input.append(info)
            result: str = blocks.LabelEncoder(**keys)("keys")
            return result

    (result,) = run(built(Encode()), {"keys": given}).values()
    assert list(result) == expected


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    model = built(Apply(blocks.Linear(4, 2, bias=bias, alpha=0.5, beta=2.0), "x"))
    tensors = values(model)
    assert set(tensors) == {"linear.weight", *(["linear.bias"] if bias else [])}
    assert tensors["linear.weight"].shape == (4, 2)
    assert all(np.abs(tensor).max() <= 1 / math.sqrt(4) for tensor in tensors.values())
    (result,) = run(model, {"x": X, "y": Y}).values()
    expected = 0.5 * X @ tensors["linear.weight"] + 2 * tensors.get("linear.bias", np.float32(0))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_two_layers_differ():
    first, second = blocks.Linear(5, 5), blocks.Linear(5, 5)
    two = Forward(lambda name: second(first(name)))
    tensors = values(built(two, "output-0", on=mlp()))
    assert not np.array_equal(tensors["linear.weight"], tensors["linear_2.weight"])
    assert {"linear.bias", "linear_2.bias"} < set(tensors)


@pytest.mark.parametrize("like", ["input-0", "output-0", "hidden", "fc1.weight"])
def test_input_like(like):
    """Inputs and outputs, as in the reference; and any other value of the model."""
    with onnxblock.base(mlp()) as accessor:
        assert blocks.InputLike(like)("mine") == "mine"
        other = blocks.InputLike(like)()
        added = {value.name: value for value in accessor.model.graph.input}
        assert added["mine"].type == added[other].type
        dims = [d.dim_value or d.dim_param for d in added["mine"].type.tensor_type.shape.dim]
    expected = {"input-0": ["batch", 12], "output-0": ["batch", 5], "hidden": ["batch", 8]}
    assert dims == expected.get(like, [8, 12])


class WeightedAverage(onnxblock.ForwardBlock):
    """0.4 of one value and 0.6 of another."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [blocks.Constant(0.4), blocks.Constant(0.6)]
        self.mul, self.add = blocks.Mul(), blocks.Add()

    def build(self, first: str, second: str) -> str:
        parts = [self.mul(w(), x) for w, x in zip(self.weights, (first, second), strict=True)]
        result: str = self.add(*parts)
        return result


def test_blocks_compose():
    model = mlp(outputs=2)
    average = WeightedAverage()
    with onnxblock.base(model) as accessor:
        name = average("output-0", "output-1")
        assert [output.name for output in accessor.model.graph.output] == [name]
    assert [output.name for output in model.graph.output] == ["output-0", "output-1"]
    x = batch(model)
    expected = run(model, {"input-0": x})
    (result,) = run(average.to_model_proto(), {"input-0": x}).values()
    np.testing.assert_allclose(
        result, 0.4 * expected["output-0"] + 0.6 * expected["output-1"], rtol=1e-5
    )


def test_the_same_blocks_give_the_same_bytes():
    def build() -> bytes:
        model = built(WeightedAverage(), "output-0", "output-1", on=mlp(outputs=2))
        return model.SerializeToString(deterministic=True)

    assert build() == build()


def test_names_of_the_model_are_avoided():
    model = mlp()
    model.graph.node.append(helper.make_node("Neg", ["output-0"], ["Abs/Abs"], name="Abs/Abs_2"))
    forward = blocks.Abs()
    with onnxblock.base(model) as accessor:
        assert forward("output-0") == "Abs/Abs_3"
        onnx.checker.check_model(accessor.model)


def test_a_block_of_nodes_of_its_own():
    """Written with onnx.helper, as the reference's documentation does it."""

    class Softplus(onnxblock.Block):
        def __init__(self) -> None:
            pass  # without super().__init__()

        def build(self, name: str) -> str:
            table = numpy_helper.from_array(np.float32([2.0]), "two")
            self.base.graph.initializer.append(table)
            self.base.graph.node.append(helper.make_node("Softplus", [name], ["soft"]))
            self.base.graph.node.append(helper.make_node("Mul", ["soft", "two"], ["twice"]))
            return "twice"

    model, both = mlp(), Forward(lambda name: blocks.Neg()(Softplus()(name)))
    x = batch(model)
    expected = -2 * np.log1p(np.exp(run(model, {"input-0": x})["output-0"]))
    (result,) = run(built(both, "output-0", on=model), {"input-0": x}).values()
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_many_blocks_take_linear_time():
    """The work of a block does not grow with the model that it writes into."""
    with onnxblock.base(mlp()) as accessor:
        part = accessor._part
        sizes = []

        def counted(nodes: Any, who: str) -> onnx.ModelProto:
            sizes.append(len(nodes))
            return part(nodes, who)

        accessor._part = counted  # type: ignore[method-assign]
        name, negate = "output-0", blocks.Neg()
        for _ in range(300):
            name = negate(name)
    assert sizes == [1] * 300


def test_infer_shapes_on_base():
    class Look(onnxblock.Block):
        def build(self, name: str) -> str:
            result: str = blocks.Neg()(name)
            inferred = {v.name: v for v in self.infer_shapes_on_base().graph.value_info}
            assert inferred[result].type.tensor_type.shape.dim[1].dim_value == 5
            return result

    with onnxblock.base(mlp()):
        Look()("output-0")


# Loss blocks agree with PyTorch, in value and in gradient, with every option.

SHAPE = (7, 5)
RANDOM = np.random.default_rng(3)
TARGET = RANDOM.random(SHAPE, np.float32)
LABELS = RANDOM.integers(0, 5, 7)
WEIGHT = np.array([1.0, 0.5, 2.0, 0.25, 3.0])


LOSSES: dict[str, tuple[onnxblock.Block, Any, np.ndarray]] = {}
FIVE, REVERSED = torch.tensor(WEIGHT), torch.tensor(WEIGHT[::-1].copy())
for how in ("mean", "sum", "none"):
    for label, block, oracle, target in (
        ("mse", loss.MSELoss(how), F.mse_loss, TARGET),
        ("l1", loss.L1Loss(how), F.l1_loss, TARGET),
        ("cross_entropy", loss.CrossEntropyLoss(reduction=how), F.cross_entropy, LABELS),
        ("cross_entropy-weight", loss.CrossEntropyLoss(WEIGHT, how, ignore_index=3),
         partial(F.cross_entropy, weight=FIVE, ignore_index=3), LABELS),
        ("bce_with_logits", loss.BCEWithLogitsLoss(reduction=how),
         F.binary_cross_entropy_with_logits, TARGET),
        ("bce_with_logits-weight", loss.BCEWithLogitsLoss(WEIGHT, how, pos_weight=WEIGHT[::-1]),
         partial(F.binary_cross_entropy_with_logits, weight=FIVE, pos_weight=REVERSED), TARGET),
    ):  # fmt: skip
        LOSSES[f"{label}-{how}"] = block, partial(oracle, reduction=how), target


def _tensor(target: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(target)
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", LOSSES)
def test_values(name):
    block, oracle, target = LOSSES[name]
    model = mlp()
    forward = built(Forward(block), "output-0", on=model)
    onnx.checker.check_model(forward, full_check=True)
    x = batch(model)
    feeds = {"input-0": x, "labels" if target.dtype == np.int64 else "target": target}
    (result,) = run(forward, feeds).values()
    expected = oracle(Twin(model)(torch.from_numpy(x).double()), _tensor(target))
    assert result.shape == tuple(expected.shape)
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", [name for name in LOSSES if "none" not in name])
def test_gradients(name, optimized):
    block, oracle, target = LOSSES[name]
    model, train = mlp(), Train(block)
    for parameter in names(model):
        train.requires_grad(parameter)
    training, _ = built(train, "output-0", on=model)
    x = batch(model)
    feeds = {"input-0": x, "labels" if target.dtype == np.int64 else "target": target}
    results = run(training, feeds | values(model), optimized)
    twin = Twin(model)
    reference = oracle(twin(torch.from_numpy(x).double()), _tensor(target))
    reference.backward()
    assert float(next(iter(results.values()))) == pytest.approx(reference.item(), rel=1e-5)
    gradients = twin.gradients()
    assert set(gradients) == set(names(model))
    for parameter, expected in gradients.items():
        ours = results[f"{parameter}_grad.accumulation.out"]
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6, err_msg=parameter)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_of_pixels(reduction):
    """[N, C, h, w] has labels [N, h, w]; the reference drops the last axis instead."""
    scores = RANDOM.standard_normal((2, 3, 4, 6)).astype(np.float32)
    labels = RANDOM.integers(0, 3, (2, 4, 6))
    model = parsed("pixels (float[N, 3, 4, 6] x) => (float[N, 3, 4, 6] y) { y = Identity(x) }")
    forward = built(Forward(loss.CrossEntropyLoss(reduction=reduction)), "y", on=model)
    info = next(i for i in forward.graph.input if i.name == "labels")
    assert [d.dim_value or d.dim_param for d in info.type.tensor_type.shape.dim] == ["N", 4, 6]
    (result,) = run(forward, {"x": scores, "labels": labels}).values()
    expected = F.cross_entropy(torch.tensor(scores), torch.tensor(labels), reduction=reduction)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_any_loss_by_name():
    model, triplet = mlp(outputs=3), Forward(loss.Loss("triplet_margin", margin=0.5))
    forward = built(triplet, "output-0", "output-1", "output-2", on=model)
    assert [i.name for i in forward.graph.input] == ["input-0"]
    x = batch(model)
    (result,) = run(forward, {"input-0": x}).values()
    embeddings = Twin(model)(torch.from_numpy(x).double())
    expected = F.triplet_margin_loss(*embeddings, margin=0.5).item()
    assert float(result) == pytest.approx(expected, rel=1e-5)


def test_targets_of_any_name():
    forward = Forward(loss.MSELoss())
    for target, outputs, more in (("wanted", 1, ["wanted"]), ("fresh", 1, ["fresh"]),
                                  ("output-1", 2, [])):  # fmt: skip
        with onnxblock.base(mlp(outputs=outputs)) as accessor:
            if target == "wanted":
                blocks.InputLike("output-0")(target)
            forward("output-0", target)
            assert [value.name for value in accessor.model.graph.input] == ["input-0", *more]
