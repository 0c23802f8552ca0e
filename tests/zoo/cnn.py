"""A small convolutional network for digits and icons."""

from tests.zoo.graph_writer import GraphWriter, he, require_positive


def cnn(channels=1, size=28, classes=10, width=(32, 64), *, hidden=None, opset=17, seed=0):
    """Builds two blocks of 3x3 ``Conv``, ``Relu`` and 2x2 ``MaxPool``, then a classifier."""
    # `input` is float32 [batch, channels, size, size], with a `size` of 4 or more. Layers are
    # `conv1`, `conv2` (with `width` channels after them) and `fc`, or, with `hidden` features of
    # a layer with `Relu` before the classifier, `fc1` and `fc2`.
    extents = {"channels": channels, "size // 4": size // 4, "classes": classes}
    extents |= {"width[0]": width[0], "width[1]": width[1]}
    require_positive("cnn", **extents, **({} if hidden is None else {"hidden": hidden}))
    arguments = {
        "channels": channels, "size": size, "classes": classes, "width": list(width),
        "hidden": hidden,
    }  # fmt: skip
    writer = GraphWriter("cnn", arguments, opset=opset, seed=seed)
    x = writer.input(["batch", channels, size, size])
    fan_in = channels
    for layer, fan_out in enumerate(width, start=1):
        at = f"conv{layer}"
        weight = writer.uniform(f"{at}.weight", (fan_out, fan_in, 3, 3), std=_std(fan_in * 9))
        bias = writer.fill(f"{at}.bias", (fan_out,), 0.0)
        x = writer.op(
            "Conv", x, weight, bias, at=at, kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1]
        )
        x = writer.op("Relu", x, at=f"relu{layer}")
        x = writer.op("MaxPool", x, at=f"pool{layer}", kernel_shape=[2, 2], strides=[2, 2])
        fan_in = fan_out
    x = writer.op("Flatten", x, at="flatten", axis=1)
    features = fan_in * (size // 4) ** 2
    if hidden is None:
        x = writer.linear(x, features, classes, at="fc", std=_std(features))
    else:
        x = writer.linear(x, features, hidden, at="fc1", std=_std(features))
        x = writer.op("Relu", x, at="relu3")
        x = writer.linear(x, hidden, classes, at="fc2", std=_std(hidden))
    return writer.finish(x, ["batch", classes])


def _std(fan_in: int) -> float:
    """Deviation that PyTorch gives its layers."""
    # He initialization would be six times that in variance, and the thousands of features before
    # the classifier then make plain SGD overshoot from the first step.
    return he(fan_in) / 6**0.5
