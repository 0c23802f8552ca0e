"""Models that read what is not theirs."""

from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper


def as_if_in_ort_format(model: onnx.ModelProto) -> bytes:
    """A model as bytes of which 4 to 8 are those of ORT format: they are a part of its producer."""
    model.ClearField("producer_name")
    return b"\x12\x06xxORTM" + model.SerializeToString()


def _secret() -> TensorProto:
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../base/checkpoint")
    return tensor


def outside(model: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and models with a tensor that lies in the checkpoint of another package."""
    for place in ("initializer", "default"):
        changed = onnx.load_model_from_string(model)
        if place == "initializer":
            changed.graph.initializer.append(_secret())
            node = helper.make_node("Identity", ["secret"], ["leak"])
        else:
            body = helper.make_node("Constant", [], ["o"])
            body.attribute.add(name="value", ref_attr_name="v", type=onnx.AttributeProto.TENSOR)
            function = helper.make_function(
                "d", "F", [], ["o"], [body], [helper.make_opsetid("", 17)]
            )
            function.attribute_proto.append(helper.make_attribute("v", _secret()))
            changed.functions.append(function)
            changed.opset_import.append(helper.make_opsetid("d", 1))
            node = helper.make_node("F", [], ["leak"], domain="d")
        changed.graph.node.append(node)
        changed.graph.output.append(helper.make_tensor_value_info("leak", TensorProto.FLOAT, [4]))
        yield f"outside_{place}", changed.SerializeToString()
        yield f"outside_{place}_as_if_in_ort_format", as_if_in_ort_format(changed)
