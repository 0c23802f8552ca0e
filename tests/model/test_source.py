"""Large tensors stay in the file, and nothing else about a model changes by it."""

from pathlib import Path

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack.errors import OdtpackError
from odtpack.model import external_data, source
from odtpack.model.loading import load_model
from tests import zoo
from tests.model_text import parsed
from tests.refused import refused

LENGTHS = st.sampled_from([0, 1, 255, 256, 257, 300, 5000])


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """Models whose initializers lie on both sides of the limit of 1024 bytes."""
    graph = onnx.GraphProto(name=draw(st.text(max_size=4)))
    for index, length in enumerate(draw(st.lists(LENGTHS, max_size=5))):
        array = np.arange(length, dtype=np.float32)
        tensor = onnx.numpy_helper.from_array(array, f"w{index}")
        if draw(st.booleans()):  # values in a field of their own, not in raw_data
            tensor = onnx.helper.make_tensor(tensor.name, tensor.data_type, [length], array)
        tensor.doc_string = draw(st.text(max_size=3))
        graph.initializer.append(tensor)
        graph.node.add(op_type="Relu", input=[tensor.name], output=[f"y{index}"])
    model = onnx.ModelProto(ir_version=8, graph=graph, doc_string=draw(st.text(max_size=200)))
    model.opset_import.add(version=17)
    return model


@given(models())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_is_left_out_can_be_put_back(model):
    content = memoryview(model.SerializeToString())
    light, bodies = external_data.detach(content)
    restored = onnx.ModelProto.FromString(bytes(light))
    large = [
        i for i, t in enumerate(model.graph.initializer) if len(t.raw_data) >= external_data.LEAST
    ]
    assert sorted(bodies) == large
    for index, body in bodies.items():
        assert not restored.graph.initializer[index].raw_data
        restored.graph.initializer[index].raw_data = bytes(body)
    assert restored == model


@given(models(), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_damaged_bytes_are_left_to_protobuf(model, data):
    content = bytearray(model.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    whole = memoryview(bytes(content))[: data.draw(st.integers(0, len(content)))]
    light, bodies = external_data.detach(whole)
    assert all(len(body) >= external_data.LEAST for body in bodies.values())
    try:
        expected = onnx.ModelProto.FromString(bytes(whole))
    except Exception:
        # What protobuf refuses it also refuses without the bytes that were left out.
        with pytest.raises(Exception, match="Error parsing"):
            onnx.ModelProto.FromString(bytes(light))
        return
    restored = onnx.ModelProto.FromString(bytes(light))
    for index, body in bodies.items():
        restored.graph.initializer[index].raw_data = bytes(body)
    assert restored.SerializeToString() == expected.SerializeToString()


def values(model: ir.Model) -> dict[str, np.ndarray]:
    kept = model.graph.initializers.items()
    return {name: v.const_value.numpy() for name, v in kept if v.const_value is not None}


def test_a_model_is_the_same_wherever_it_comes_from(tmp_path):
    model = zoo.mlp()
    inline, external = tmp_path / "inline.onnx", tmp_path / "external.onnx"
    onnx.save(model, inline)
    onnx.save(
        model, external, save_as_external_data=True, location="weights", size_threshold=1 << 16
    )
    expected = {t.name: onnx.numpy_helper.to_array(t) for t in zoo.mlp().graph.initializer}
    for given_model in (inline, external, zoo.mlp(), ir.from_proto(zoo.mlp()), ir.load(external)):
        found = values(load_model(given_model))
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind", ["path", "proto", "ir"])
def test_a_large_tensor_must_have_all_its_bytes(kind, tmp_path):
    model = zoo.mlp()
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    if kind == "ir":  # onnx_ir itself finds out when it reads them
        with pytest.raises((OdtpackError, ValueError)):
            load_model(ir.from_proto(model))
        return
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with refused("initializer-size", "and not"):
        load_model(path if kind == "path" else model)


def test_two_large_tensors_of_one_name_are_refused(tmp_path):
    model = zoo.mlp()
    model.graph.initializer.append(model.graph.initializer[0])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with refused("invalid-model"):
        load_model(path)


def test_bfloat16_weights_are_read(tmp_path):
    model = parsed("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    bits = np.arange(4000, dtype=np.uint16)
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.BFLOAT16, dims=[4000])
    tensor.raw_data = bits.tobytes()
    model.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    np.testing.assert_array_equal(values(load_model(path))["w"].view(np.uint16), bits)


def constants(count: int, folder: Path) -> Path:
    """A model of so many constants that all lie in one place of a file."""
    (folder / "data").write_bytes(bytes(4096))
    graph = onnx.GraphProto(name="g")
    for index in range(count):
        tensor = onnx.TensorProto(name=f"t{index}", data_type=onnx.TensorProto.FLOAT, dims=[1024])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="data")
        graph.node.append(onnx.helper.make_node("Constant", [], [f"y{index}"], value=tensor))
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.add(version=17)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_a_file_is_not_copied_over_and_over(tmp_path):
    assert len(source.open_model(constants(2, tmp_path)).proto.graph.node) == 2
    with refused("external-data-repeated", "12288 bytes", "4096"):
        source.open_model(constants(3, tmp_path))


@pytest.mark.parametrize("size", [2**40 + 1, 2**62])
def test_an_axis_that_no_manifest_can_hold(size, tmp_path):
    model = zoo.mlp((6, 5, 3))
    more = onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, ["n", size])
    model.graph.input.append(more)
    with refused("invalid-model", rf"'more' has the shape \[n, {size}\]"):
        load_model(model)
