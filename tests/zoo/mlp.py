"""A multilayer perceptron: ``Gemm`` and ``Relu``."""

from tests.zoo.graph_writer import GraphWriter, he, require, require_positive, xavier


def mlp(sizes=(784, 500, 10), *, opset=17, seed=0):
    """Builds ``fc1``, ``fc2`` and so on of these numbers of features, with a ``Relu`` between."""
    require(len(sizes) >= 2, "mlp", f"sizes needs an input and an output extent, not {sizes!r}")
    require_positive("mlp", **{f"sizes[{i}]": size for i, size in enumerate(sizes)})
    writer = GraphWriter("mlp", {"sizes": list(sizes)}, opset=opset, seed=seed)
    x = writer.input(["batch", sizes[0]])
    last = len(sizes) - 1
    for layer in range(1, last + 1):
        fan_in, fan_out = sizes[layer - 1], sizes[layer]
        std = he(fan_in) if layer < last else xavier(fan_in, fan_out)
        x = writer.linear(x, fan_in, fan_out, at=f"fc{layer}", std=std)
        if layer < last:
            x = writer.op("Relu", x, at=f"relu{layer}")
    return writer.finish(x, ["batch", sizes[-1]])
