"""Training blocks: gradients of parameters and inputs, evaluation models, checkpoints."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch.nn import functional as F

from odtpack import onnxblock
from odtpack.errors import OdtpackError
from odtpack.onnxblock import blocks
from odtpack_runtime import CheckpointState
from tests import model_text, zoo
from tests.model_text import parsed
from tests.onnxblock.nets import Forward, Train, Twin, batch, built, mlp, names, run, values
from tests.packaging_tools import statistic_names, trainable_names
from tests.refused import refused

BUFFER, OUT = "_grad.accumulation.buffer", "_grad.accumulation.out"


class CrossEntropy(onnxblock.TrainingBlock):
    """The loss, and the values that it is given."""

    def __init__(self, *, more: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.loss = onnxblock.loss.CrossEntropyLoss()
        self.more = more

    def build(self, name: str) -> Any:
        loss = self.loss(name)
        return (loss, *self.more) if self.more else loss


def trained(model, block, *outputs, on=None, **wanted):
    for name in names(model) if on is None else on:
        block.requires_grad(name, wanted.get(name.replace(".", "_"), True))
    with onnxblock.base(model):
        block(*(outputs or ("output-0",)))
    return block


def inputs_and_outputs(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    return [v.name for v in model.graph.input], [v.name for v in model.graph.output]


# The models


def test_inputs_and_outputs():
    model, block = mlp(), CrossEntropy()
    for name in names(model):
        block.requires_grad(name)
    with onnxblock.base(model):
        loss = block("output-0")
    parameters = names(model)
    training, evaluation = block.to_model_proto()
    assert inputs_and_outputs(training) == (
        ["input-0", "labels", *parameters, *(p + BUFFER for p in parameters), "lazy_reset_grad"],
        [loss, *(p + OUT for p in parameters)],
    )
    assert inputs_and_outputs(evaluation) == (["input-0", "labels", *parameters], [loss])
    for each in (training, evaluation):
        onnx.checker.check_model(each, full_check=True)
        assert {node.domain for node in each.graph.node} == {""}


def test_the_base_becomes_the_training_model():
    block = CrossEntropy()
    block.requires_grad("fc1.weight")
    with onnxblock.base(mlp()) as accessor:
        block("output-0")
        assert accessor.model == block.to_model_proto()[0]
        assert onnxblock.blocks.Neg()(accessor.model.graph.output[1].name)


def test_additional_outputs():
    model, block = mlp(), CrossEntropy(more=("output-0", "hidden"))
    trained(model, block)
    x, labels = batch(model), np.arange(7) % 5
    feeds = {"input-0": x, "labels": labels} | values(model)
    for each in block.to_model_proto():
        results = run(each, feeds)
        assert [*results][1:3] == ["output-0", "hidden"]
        expected = Twin(model)(torch.from_numpy(x).double()).detach().numpy()
        np.testing.assert_allclose(results["output-0"], expected, rtol=1e-5, atol=1e-6)


def test_the_same_block_gives_the_same_bytes():
    def build() -> list[bytes]:
        block = trained(mlp(), CrossEntropy())
        return [m.SerializeToString(deterministic=True) for m in block.to_model_proto()]

    assert build() == build()


# Parameters


def test_parameters():
    model = mlp()
    block = trained(model, CrossEntropy(), fc1_weight=False, fc1_bias=False)
    trainable, frozen = block.parameters()
    assert [tensor.name for tensor in trainable] == ["fc2.weight", "fc2.bias"]
    assert [tensor.name for tensor in frozen] == ["fc1.weight", "fc1.bias"]
    given = values(model)
    for tensor in (*trainable, *frozen):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), given[tensor.name])


def test_what_was_asked_for_last_counts():
    block = CrossEntropy()
    block.requires_grad("fc1.weight")
    block.requires_grad("fc1.weight", False)
    block.requires_grad("fc2.weight", False)
    block.requires_grad("fc2.weight", True)
    built(block, "output-0", on=mlp())
    trainable, frozen = block.parameters()
    assert [t.name for t in trainable] == ["fc2.weight"]
    assert [t.name for t in frozen] == ["fc1.weight"]


def test_before_the_block_is_called():
    block = CrossEntropy()
    for ask in (block.parameters, block.to_model_proto):
        with refused("not-built", "has not been built yet"):
            ask()


def test_no_gradient_is_the_default():
    block = trained(mlp(), CrossEntropy(), on=())
    training, evaluation = block.to_model_proto()
    assert block.parameters() == ([], [])
    assert inputs_and_outputs(training) == inputs_and_outputs(evaluation)


def test_batch_norm_statistics_are_no_trainable_parameters():
    model = zoo.mobilenet_v2(32, 5, 0.2, "train", stages=2)
    trainable = trainable_names(model)
    block = trained(model, CrossEntropy(), model.graph.output[0].name, on=trainable)
    assert {t.name for t in block.parameters()[1]} == set(statistic_names(model))


# Gradients


def test_gradients_of_inputs():
    """The reference names them like those of parameters, and so do we."""
    model = mlp()
    frozen: Any = dict.fromkeys(("fc1_weight", "fc1_bias", "fc2_bias"), False)
    block = trained(model, CrossEntropy(), on=["input-0", *names(model)], **frozen)
    training = block.to_model_proto()[0]
    inputs, outputs = inputs_and_outputs(training)
    assert f"input-0{BUFFER}" in inputs
    assert f"input-0{OUT}" in outputs
    x, labels = batch(model), np.arange(7) % 5
    tensor = torch.from_numpy(x).double().requires_grad_()
    twin = Twin(model)
    F.cross_entropy(twin(tensor), torch.from_numpy(labels)).backward()
    for optimized in (False, True):
        results = run(training, {"input-0": x, "labels": labels} | values(model), optimized)
        expected = {"input-0": tensor.grad.numpy(), "fc2.weight": twin.gradients()["fc2.weight"]}
        for name, gradient in expected.items():
            np.testing.assert_allclose(results[name + OUT], gradient, rtol=1e-5, atol=1e-7)


def test_gradients_of_inputs_only():
    model = mlp()
    training = trained(model, CrossEntropy(), on=["input-0"]).to_model_proto()[0]
    inputs = ["input-0", "labels", f"input-0{BUFFER}", "lazy_reset_grad"]
    assert inputs_and_outputs(training)[0] == inputs
    x = batch(model)
    before = np.ones_like(x)
    feeds = {"input-0": x, "labels": np.arange(7) % 5, f"input-0{BUFFER}": before}
    fresh = run(training, {k: feeds[k] for k in ("input-0", "labels")})[f"input-0{OUT}"]
    more = feeds | {"lazy_reset_grad": np.zeros(1, np.bool_)}
    kept = model_text.run(training, more)[f"input-0{OUT}"]
    np.testing.assert_allclose(kept, fresh + 1, rtol=1e-6)


class WeightedAverage(onnxblock.TrainingBlock):
    """0.3 MSE + 0.7 cross-entropy over two heads; and, as it happens, no super().__init__()."""

    def __init__(self) -> None:
        self.losses = onnxblock.loss.MSELoss(), onnxblock.loss.CrossEntropyLoss()
        self.weights = onnxblock.blocks.Constant(0.3), onnxblock.blocks.Constant(0.7)
        self.mul, self.add = onnxblock.blocks.Mul(), onnxblock.blocks.Add()

    def build(self, first: str, second: str) -> str:
        mse = self.losses[0](first, target_name="wanted")
        entropy = self.losses[1](second, labels_name="classes")
        result: str = self.add(
            self.mul(self.weights[0](), mse), self.mul(self.weights[1](), entropy)
        )
        return result


@pytest.mark.parametrize("optimized", [False, True])
def test_weighted_average_of_two_losses(optimized):
    model = mlp(outputs=2)
    block = trained(model, WeightedAverage(), "output-0", "output-1")
    training, evaluation = block.to_model_proto()
    assert inputs_and_outputs(evaluation)[0][:3] == ["input-0", "wanted", "classes"]
    x = batch(model)
    wanted, classes = np.random.default_rng(6).random((7, 5), np.float32), np.arange(7) % 5
    twin = Twin(model)
    first, second = twin(torch.from_numpy(x).double())
    reference = 0.3 * F.mse_loss(first, torch.from_numpy(wanted).double())
    reference = reference + 0.7 * F.cross_entropy(second, torch.from_numpy(classes))
    reference.backward()
    feeds = {"input-0": x, "wanted": wanted, "classes": classes} | values(model)
    results = run(training, feeds, optimized)
    for loss in (next(iter(results.values())), *run(evaluation, feeds, optimized).values()):
        assert float(loss) == pytest.approx(reference.item(), rel=1e-5)
    for name, gradient in twin.gradients().items():
        np.testing.assert_allclose(results[name + OUT], gradient, rtol=2e-5, atol=1e-6)


def test_a_penalty_of_the_weights():
    def regularized(name: str) -> Any:
        norm = blocks.ReduceAllL2()("fc1.weight", "fc2.weight")
        penalty = blocks.Mul()(blocks.Constant(0.1)(), norm)
        return blocks.Add()(onnxblock.loss.L1Loss()(name), penalty)

    model = mlp()
    block = trained(model, Train(regularized))
    x, target = batch(model), np.random.default_rng(6).random((7, 5), np.float32)
    results = run(block.to_model_proto()[0], {"input-0": x, "target": target} | values(model))
    twin = Twin(model)
    y = twin(torch.from_numpy(x).double())
    norm = torch.cat([twin.p[f"fc{i}_weight"].flatten() for i in (1, 2)]).norm()
    (F.l1_loss(y, torch.from_numpy(target).double()) + 0.1 * norm).backward()
    for name, gradient in twin.gradients().items():
        np.testing.assert_allclose(results[name + OUT], gradient, rtol=2e-5, atol=1e-6)


# Evaluation models


def test_dropout_and_batch_norm_do_not_train_in_evaluation():
    model = parsed(
        "trains (float[batch, 5] x) => (float[batch, 5] y) <float ratio = {0.5}, bool on = {1}> {"
        " d = Dropout(x, ratio, on) y, new_mean, new_var = BatchNormalization <training_mode = 1>"
        " (d, scale, bias, mean, var) }",
        scale=np.full(5, 2, np.float32), bias=np.ones(5, np.float32),
        mean=np.full(5, 0.5, np.float32), var=np.full(5, 4, np.float32),
    )  # fmt: skip
    block = trained(model, CrossEntropy(more=("y",)), "y", on=("scale", "bias"))
    evaluation = block.to_model_proto()[1]
    x = batch(model)
    state = {name: array for name, array in values(model).items() if len(array.shape) == 1}
    results = run(evaluation, {"x": x, "labels": np.arange(7) % 5} | state)
    np.testing.assert_allclose(results["y"], (x - 0.5) / np.sqrt(4 + 1e-5) * 2 + 1, rtol=1e-5)


# Checkpoints


def test_checkpoints(tmp_path):
    model = mlp()
    block = trained(model, CrossEntropy(), fc1_weight=False)
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "nominal", nominal_checkpoint=True)
    assert (tmp_path / "nominal").stat().st_size < (tmp_path / "checkpoint").stat().st_size
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {n: p.requires_grad for n, p in state.parameters} == {
        name: name != "fc1.weight" for name in names(model)
    }
    assert CheckpointState.load_checkpoint(tmp_path / "nominal").is_nominal

    zero = model_text.with_arrays(model, lambda name, array: np.zeros_like(array))
    zero.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(3), "other"))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", zero)
    loaded = values(zero)
    assert loaded.pop("other") == 3
    for name, array in values(model).items():
        np.testing.assert_array_equal(loaded[name], array)


def test_checkpoints_that_do_not_fit(tmp_path):
    with refused("no-parameters", "no parameters"):
        onnxblock.save_checkpoint(None, tmp_path / "checkpoint")
    parameters = trained(mlp(), CrossEntropy()).parameters()
    with pytest.raises(OdtpackError, match="one name"):
        onnxblock.save_checkpoint((parameters[0], parameters[0][:1]), tmp_path / "checkpoint")
    onnxblock.save_checkpoint(parameters, tmp_path / "checkpoint")
    onnxblock.save_checkpoint(parameters, tmp_path / "nominal", nominal_checkpoint=True)
    other = mlp((12, 9, 5))
    before = other.SerializeToString()
    with refused("parameter-mismatch", r"'fc1\.weight'"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", other)
    with pytest.raises(OdtpackError, match="no values"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", mlp())
    assert other.SerializeToString() == before


# Blocks that are used wrongly say so in one sentence, as the exception the reference raises.


def test_one_base_at_a_time():
    with onnxblock.base(mlp()):
        for nested in (onnxblock.base(mlp()), onnxblock.empty_base()):
            with refused("base-open", "open already"), nested:
                pass
    with onnxblock.base(mlp()):
        pass


def test_a_base_is_closed_by_an_error():
    with pytest.raises(ZeroDivisionError), onnxblock.base(mlp()):
        raise ZeroDivisionError
    with onnxblock.empty_base():
        pass


def test_no_base():
    with refused("no-base", "without a model"):
        blocks.Add()("a", "b")
    with pytest.raises(OdtpackError, match=r"onnxblock\.base\(model\)"):
        onnxblock.loss.MSELoss()("a")


@pytest.mark.parametrize("model", [None, "model.onnx", b""])
def test_base_of_something_else(model):
    with pytest.raises(RuntimeError, match=r"onnx\.load"), onnxblock.base(model):
        pass


def test_opsets_that_do_not_work():
    for opset, word in ((11, "opset 12"), (99, "loads at most")):
        with pytest.raises(OdtpackError, match=word), onnxblock.empty_base(opset):
            pass


def test_the_path_of_the_base():
    with onnxblock.base(mlp()) as accessor:
        assert not accessor.has_path
        with pytest.raises(RuntimeError, match="no path"):
            _ = accessor.path
    with onnxblock.base(mlp(), "some/model.onnx") as accessor:
        assert accessor.has_path
        assert accessor.path == "some/model.onnx"


def test_external_data_beside_the_path(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, size_threshold=0, location="data")
    model = onnx.load(path, load_external_data=False)
    with onnxblock.base(model, str(path)) as accessor:
        loaded = values(accessor.model)
    for name, array in values(mlp()).items():
        np.testing.assert_array_equal(loaded[name], array)
    with pytest.raises(OdtpackError, match="in memory"), onnxblock.base(model):
        pass


@pytest.mark.parametrize(("block", "names"), [
    (blocks.Add(), ("output-0", "nothing")),
    (blocks.InputLike("nothing"), ()),
    (onnxblock.loss.MSELoss(), ("nothing",)),
    (onnxblock.loss.CrossEntropyLoss(), ("nothing",)),
])  # fmt: skip
def test_unknown_names(block, names):
    with onnxblock.base(mlp()) as accessor:
        before = accessor.model.SerializeToString()
        with pytest.raises(LookupError, match=r"'nothing'.*\n.*'output-0'"):
            block(*names)
        assert accessor.model.SerializeToString() == before


def test_unknown_results():
    def wrong(result: Any) -> onnxblock.ForwardBlock:
        return Forward(lambda: result)

    with onnxblock.base(mlp()):
        with pytest.raises(LookupError, match="'nothing'"):
            wrong("nothing")()
        for result in (None, (), 3, ("output-0", None)):
            with pytest.raises(OdtpackError, match="must return a name"):
                wrong(result)()
        with pytest.raises(OdtpackError, match="twice"):
            wrong(("output-0", "output-0"))()
    with pytest.raises(RuntimeError, match="has not been built"):
        wrong("output-0").to_model_proto()


def test_names_that_are_taken():
    with onnxblock.base(mlp()), pytest.raises(OdtpackError, match="already has 'hidden'"):
        blocks.InputLike("output-0")("hidden")


@pytest.mark.parametrize("node", [
    helper.make_node("Add", ["output-0"], ["z"]),
    helper.make_node("Relu", ["output-0"], ["z"], slope=1),
    helper.make_node("Concat", ["output-0", "hidden"], ["z"], axis=0),
    helper.make_node("NoSuchOperator", ["output-0"], ["z"]),
], ids=lambda node: node.op_type)  # fmt: skip
def test_nodes_that_onnx_refuses(node):
    class Own(onnxblock.Block):
        def build(self) -> str:
            self.base.graph.node.append(node)
            return "z"

    with onnxblock.base(mlp()), refused("invalid-block", "what Own wrote"):
        Own()()


def test_losses_that_cannot_be_trained():
    def train(name: str, reduction: str = "mean") -> None:
        block = Train(onnxblock.loss.MSELoss(reduction))
        block.requires_grad(name)
        block("output-0")

    for wanted, code in (
        (("fc1.weight", "none"), "loss-not-scalar"),
        (("zzz",), "unknown-parameter"),
    ):
        with onnxblock.base(mlp()), refused(code):
            train(*wanted)
    model = mlp()
    model.graph.input.append(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"]))
    with onnxblock.base(model), pytest.raises(OdtpackError, match="only float32 inputs"):
        train("ids")


@pytest.mark.parametrize(("make", "error", "word"), [
    (lambda: onnxblock.loss.MSELoss("max"), RuntimeError, "'mean' or 'sum'"),
    (lambda: onnxblock.loss.CrossEntropyLoss(reduction=1), RuntimeError, "'mean' or 'sum'"),
    (lambda: onnxblock.loss.Loss("hinge"), RuntimeError, "cross_entropy"),
    (lambda: onnxblock.loss.Loss("mse", delta=1), RuntimeError, "'delta'"),
    (lambda: blocks.Linear(0, 3), RuntimeError, "in_features"),
    (lambda: onnxblock.optim.ClipGradNorm(0), RuntimeError, "above 0"),
    (lambda: onnxblock.optim.AdamW(betas=(1, 2)), RuntimeError, "beta1"),
    (lambda: onnxblock.optim.SGD(clip_grad=2.5), TypeError, "ClipGradNorm"),
    (onnxblock.ForwardBlock, TypeError, "abstract"),
])  # fmt: skip
def test_arguments_out_of_range(make, error, word):
    with pytest.raises(error, match=word):
        make()


def test_absolute_temporary_files():
    class Own(onnxblock.Block):
        def __init__(self, name: str) -> None:
            super().__init__(name)

        def build(self) -> None:
            return None

    Own("part.onnx")
    with pytest.raises(RuntimeError, match="relative"):
        Own("/part.onnx")


def test_custom_op_library(tmp_path):
    library = tmp_path / "library.so"
    with pytest.raises(RuntimeError, match="not a file"), onnxblock.custom_op_library(library):
        pass
    library.write_bytes(b"")
    with onnxblock.custom_op_library(library) as path:
        assert path == library
        with pytest.raises(RuntimeError, match="already"), onnxblock.custom_op_library(library):
            pass
