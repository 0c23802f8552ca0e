"""A multilayer perceptron: ``Gemm`` and ``Relu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.zoo.graph_writer import GraphWriter, he, require, require_positive, xavier

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx


def mlp(
    sizes: Sequence[int] = (784, 500, 10), *, opset: int = 17, seed: int = 0
) -> onnx.ModelProto:
    """Builds a multilayer perceptron with a ``Relu`` between its layers.

    Parameters are ``fc1.weight`` [sizes[1], sizes[0]], ``fc1.bias``, ``fc2.weight`` and so on.

    Args:
        sizes: Features of the input, of each hidden layer, and number of classes.
        opset: Version of the default operator set, 12 to 23.
        seed: Seed of the parameters.

    Returns:
        Model with ``input`` float32 [batch, sizes[0]] and ``output`` float32 [batch, sizes[-1]].

    Raises:
        OdtpackError: An argument is out of range.
    """
    require(len(sizes) >= 2, "mlp", f"sizes needs an input and an output extent, not {sizes!r}")
    require_positive("mlp", **{f"sizes[{i}]": size for i, size in enumerate(sizes)})
    writer = GraphWriter("mlp", {"sizes": list(sizes)}, opset=opset, seed=seed)
    x = writer.input(["batch", sizes[0]])
    last = len(sizes) - 1
    for layer in range(1, last + 1):
        at = f"fc{layer}"
        fan_in, fan_out = sizes[layer - 1], sizes[layer]
        std = he(fan_in) if layer < last else xavier(fan_in, fan_out)
        x = writer.linear(x, fan_in, fan_out, at=at, std=std)
        if layer < last:
            x = writer.op("Relu", x, at=f"relu{layer}")
    return writer.finish(x, ["batch", sizes[-1]])
