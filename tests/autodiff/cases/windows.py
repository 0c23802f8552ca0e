"""Convolutions and pools. Sizes are chosen so that every lowering is met."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Case, cases, joined, normal, spread

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def pad_all(x: torch.Tensor, pads: Sequence[int], value: float = 0.0) -> torch.Tensor:
    """Pad the spatial axes as ONNX writes it: all begins, then all ends."""
    half = len(pads) // 2
    pairs = [(pads[axis], pads[half + axis]) for axis in reversed(range(half))]
    return F.pad(x, list(itertools.chain(*pairs)), value=value)


def same_pads(size, kernel, strides, dilations, *, upper):
    totals = [
        max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        for n, k, s, d in zip(size, kernel, strides, dilations, strict=True)
    ]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return small + large if upper else large + small


def conv(x, w, label, *, opsets=(17,), bias=False, **attrs):
    """A convolution of input [N, C, size...] with weight [O, C / group, kernel...]."""
    rank = len(w) - 2
    fields = {k: attrs.pop(k) for k in ("wrt", "batch", "symbols") if k in attrs}
    strides, dilations = attrs.get("strides", [1] * rank), attrs.get("dilations", [1] * rank)
    auto, pads = attrs.get("auto_pad", "NOTSET"), attrs.get("pads", [0] * 2 * rank)
    if auto.startswith("SAME"):
        pads = same_pads(x[2:], w[2:], strides, dilations, upper=auto == "SAME_UPPER")

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        padded, groups = pad_all(x, pads), attrs.get("group", 1)
        return CONVOLUTIONS[rank](padded, w, b, strides, 0, dilations, groups)

    inputs = {"x": normal(*x, seed=1), "w": normal(*w, seed=2, scale=0.5)}
    if bias:
        inputs["b"] = normal(w[0], seed=3)
    name = f"{rank}d-{label}"
    return cases("Conv", inputs, function, opsets, label=name, **fields, **attrs)


def overhang(size, kernel, strides, dilations, pads):
    """Pads with what ceil_mode adds behind: the last window must start inside."""
    half = len(pads) // 2
    after = []
    for axis, (n, k, s, d) in enumerate(zip(size, kernel, strides, dilations, strict=True)):
        total = n + pads[axis] + pads[half + axis]
        reach = (k - 1) * d + 1
        count = -(-(total - reach) // s) + 1
        if (count - 1) * s >= n + pads[axis]:
            count -= 1
        after.append(pads[half + axis] + max(0, (count - 1) * s + reach - total))
    return [*pads[:half], *after]


def pool(op, x, label, *, opsets=(17,), **attrs):
    """A pool of input [N, C, size...], written in PyTorch as a pool of a padded input."""
    kernel = attrs["kernel_shape"]
    rank, size = len(kernel), x.shape[2:]
    names = ("batch", "differences", "outputs", "used", "symbols")
    fields = {k: attrs.pop(k) for k in names if k in attrs}
    strides, dilations = attrs.get("strides", [1] * rank), attrs.get("dilations", [1] * rank)
    auto, declared = attrs.get("auto_pad", "NOTSET"), attrs.get("pads", [0] * 2 * rank)
    if auto.startswith("SAME"):
        # ONNX Runtime pads for a kernel without dilations.
        declared = same_pads(size, kernel, strides, [1] * rank, upper=auto == "SAME_UPPER")
    pads = declared
    if attrs.get("ceil_mode"):
        pads = overhang(size, kernel, strides, dilations, declared)

    def maximum(x: torch.Tensor) -> torch.Tensor:
        padded = pad_all(x, pads, -torch.inf)
        return MAX_POOLS[rank](padded, kernel, strides, 0, dilations)

    def average(x: torch.Tensor) -> torch.Tensor:
        ones = pad_all(torch.ones_like(x), declared, float(attrs.get("count_include_pad", 0)))
        counted = pad_all(ones, [p - d for p, d in zip(pads, declared, strict=True)])
        parts = (patch_sums(pad_all(v, p), kernel, strides, dilations)
                 for v, p in ((x, pads), (counted, [0] * 2 * rank)))  # fmt: skip
        total, count = parts
        return total / count

    def norm(x: torch.Tensor) -> torch.Tensor:
        p = attrs.get("p", 2)
        return patch_sums(pad_all(x.abs() ** p, pads), kernel, strides, dilations) ** (1 / p)

    function = {"MaxPool": maximum, "AveragePool": average, "LpPool": norm}[op]
    return cases(op, {"x": x}, function, opsets, label=f"{rank}d-{label}", **fields, **attrs)


def patch_sums(x, kernel, strides, dilations):
    """The sum of every window: a depthwise convolution with ones."""
    weight = torch.ones(x.shape[1], 1, *kernel, dtype=x.dtype)
    return CONVOLUTIONS[len(kernel)](x, weight, None, strides, 0, dilations, x.shape[1])


def transposed(x, w, label, *, opsets=(17,), bias=False, **attrs):
    """A transposed convolution of input [N, C, size...] with weight [C, O / group, kernel...]."""
    rank = len(w) - 2
    fields = {k: attrs.pop(k) for k in ("batch", "symbols") if k in attrs}
    strides, dilations = attrs.get("strides", [1] * rank), attrs.get("dilations", [1] * rank)
    extra, auto = attrs.get("output_padding", [0] * rank), attrs.get("auto_pad", "NOTSET")
    full = [(n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(x[2:], strides, w[2:], dilations, strict=True)]  # fmt: skip
    wanted = attrs.get("output_shape")
    if auto.startswith("SAME"):
        wanted = [n * s for n, s in zip(x[2:], strides, strict=True)]
    pads = attrs.get("pads", [0] * 2 * rank)
    if wanted is not None:
        totals = [f - n for f, n in zip(full, wanted, strict=True)]
        small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = small + large if auto == "SAME_UPPER" else large + small

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        y = TRANSPOSED[rank](x, w, None, stride=strides, dilation=dilations,
                             groups=attrs.get("group", 1))  # fmt: skip
        cut = [e - p for e, p in zip(extra, pads[rank:], strict=True)]
        y = pad_all(y, [*(-p for p in pads[:rank]), *cut])
        return y if b is None else y + b.reshape(-1, *[1] * rank)

    inputs = {"x": normal(*x, seed=1), "w": normal(*w, seed=2, scale=0.5)}
    if bias:
        inputs["b"] = normal(w[1] * attrs.get("group", 1), seed=3)
    # The reference implementation knows neither groups nor padding of the output.
    return cases("ConvTranspose", inputs, function, opsets, label=f"{rank}d-{label}",
                 differences="torch", **fields, **attrs)  # fmt: skip


EVERY = (12, 18, 23)
SEVEN = spread(2, 2, 7, 6)
PLANE = spread(2, 3, 6, 4)
TIED = np.float32([[[[1, 1, 0, 2], [1, 0, 2, 2], [3, 0, 0, 0], [0, 3, 0, 0]]]])
WIDE = spread(2, 2, 9, 12)
WIDE_TIED = np.round(WIDE)

CASES: list[Case] = [
    # Dense convolutions: pointwise, few channels (joined taps), many channels (tap by tap)
    *conv([2, 3, 5, 4], [4, 3, 3, 2], "plain", opsets=EVERY, bias=True, batch=["x"]),
    *conv([2, 3, 5, 4], [4, 3, 3, 3], "padded", pads=[1, 1, 1, 1]),
    *conv([2, 3, 5, 4], [4, 3, 3, 3], "asymmetric", pads=[0, 2, 1, 0], batch=["x"]),
    *conv([2, 3, 7, 6], [4, 3, 3, 3], "strided", strides=[2, 2], pads=[1, 1, 1, 1], bias=True),
    *conv([2, 3, 8, 6], [4, 3, 3, 2], "unread-rest", strides=[3, 4]),
    *conv([2, 3, 8, 7], [4, 3, 1, 1], "strided-pointwise", strides=[3, 2]),
    *conv([2, 3, 8, 7], [4, 3, 3, 2], "dilated", dilations=[2, 3]),
    *conv([2, 3, 9, 9], [4, 3, 2, 3], "all", dilations=[3, 2], strides=[2, 3],
          pads=[1, 0, 2, 1], bias=True, batch=["x"]),
    *conv([2, 3, 7, 6], [4, 3, 3, 3], "same-upper", auto_pad="SAME_UPPER", strides=[2, 2]),
    *conv([2, 3, 7, 6], [4, 3, 2, 3], "same-lower", auto_pad="SAME_LOWER", strides=[1, 2]),
    *conv([2, 3, 7, 6], [4, 3, 1, 1], "same-strided-pointwise", auto_pad="SAME_UPPER",
          strides=[2, 3]),
    *conv([2, 3, 7, 6], [4, 3, 3, 3], "valid", auto_pad="VALID", strides=[2, 1]),
    *conv([2, 3, 5, 4], [4, 3, 1, 1], "pointwise", bias=True, batch=["x"]),
    *conv([2, 12, 1, 2], [12, 12, 1, 1], "pointwise-few-pixels", batch=["x"]),
    *conv([2, 3, 9, 8], [4, 3, 1, 1], "pointwise-many-pixels", bias=True, batch=["x"]),
    *conv([1, 132, 8, 8], [132, 132, 1, 1], "pointwise-many-channels"),
    *conv([2, 18, 5, 4], [3, 18, 3, 2], "many-channels", bias=True, batch=["x"]),
    *conv([2, 17, 7, 6], [3, 17, 3, 2], "many-channels-all", strides=[2, 3], dilations=[2, 1],
          pads=[1, 0, 2, 1]),
    *conv([2, 16, 4, 3], [3, 16, 4, 3], "whole-plane", batch=["x"]),
    *conv([2, 3, 8, 12], [5, 3, 4, 6], "patches", strides=[4, 6], bias=True, opsets=EVERY,
          batch=["x"]),
    *conv([2, 17, 4, 8], [3, 17, 4, 4], "patches-many-channels", strides=[4, 4]),
    *conv([2, 3, 5, 4], [4, 3, 3, 2], "weight-only", wrt=["w"]),
    *conv([2, 3, 5, 4], [4, 3, 3, 2], "input-only", wrt=["x"]),
    *conv([2, 3, 5, 4], [4, 3, 3, 2], "bias-only", wrt=["b"], bias=True),
    # One and three dimensions
    *conv([2, 3, 9], [4, 3, 3], "plain", opsets=EVERY, bias=True, batch=["x"]),
    *conv([2, 3, 9], [4, 3, 3], "all", strides=[2], dilations=[2], pads=[1, 2]),
    *conv([2, 3, 10], [4, 3, 2], "unread-rest", strides=[4]),
    *conv([2, 3, 9], [4, 3, 3], "same-lower", auto_pad="SAME_LOWER", strides=[2]),
    *conv([2, 3, 9], [4, 3, 1], "pointwise"),
    *conv([2, 3, 8], [4, 3, 4], "patches", strides=[4], batch=["x"]),
    *conv([2, 20, 6], [2, 20, 3], "many-channels", batch=["x"]),
    *conv([2, 6, 9], [6, 1, 3], "depthwise", group=6, pads=[1, 1], batch=["x"]),
    *conv([1, 2, 4, 3, 5], [3, 2, 2, 2, 3], "plain", opsets=EVERY, bias=True, batch=["x"]),
    *conv([1, 2, 5, 4, 5], [3, 2, 2, 3, 2], "all", strides=[2, 1, 2], dilations=[1, 1, 2],
          pads=[1, 0, 1, 0, 2, 1]),
    *conv([1, 4, 3, 3, 4], [4, 2, 2, 2, 2], "groups", group=2),
    # Groups and depthwise
    *conv([2, 6, 5, 4], [4, 3, 3, 2], "groups", group=2, opsets=EVERY, bias=True, batch=["x"]),
    *conv([2, 6, 7, 6], [6, 2, 3, 3], "groups-all", group=3, strides=[2, 2], pads=[1, 1, 1, 1]),
    *conv([2, 4, 5, 4], [8, 1, 3, 3], "depth-multiplier", group=4, pads=[1, 1, 1, 1]),
    *conv([2, 4, 5, 4], [4, 2, 1, 1], "groups-pointwise", group=2),
    *conv([2, 5, 7, 6], [5, 1, 3, 3], "depthwise", group=5, pads=[1, 1, 1, 1], opsets=EVERY,
          bias=True, batch=["x"]),
    *conv([2, 3, 7, 6], [3, 1, 3, 3], "depthwise-strided", group=3, strides=[2, 2],
          pads=[1, 1, 1, 1], batch=["x"]),
    *conv([2, 3, 8, 9], [3, 1, 3, 2], "depthwise-unread-rest", group=3, strides=[3, 4]),
    *conv([2, 3, 8, 9], [3, 1, 2, 3], "depthwise-all", group=3, strides=[2, 3], dilations=[3, 2],
          pads=[0, 2, 1, 0]),
    *conv([2, 3, 5, 4], [3, 1, 3, 3], "depthwise-much-padding", group=3, pads=[3, 2, 4, 3]),
    *conv([2, 3, 12, 11], [3, 1, 3, 2], "depthwise-rows-dilated", group=3, dilations=[2, 3],
          pads=[0, 2, 3, 0]),
    *conv([1, 2, 15, 14], [2, 1, 3, 3], "depthwise-many-pixels", group=2, pads=[1, 1, 1, 1],
          batch=["x"]),
    *conv([2, 3, 5, 5], [3, 1, 1, 1], "depthwise-pointwise", group=3, strides=[2, 2]),
    *conv([2, 3, 7, 6], [3, 1, 3, 3], "depthwise-same", group=3, strides=[2, 2],
          auto_pad="SAME_UPPER", batch=["x"]),
    # ... and on planes too large for one matrix of the whole plane
    *conv([2, 3, 12, 11], [3, 1, 3, 3], "depthwise-rows", group=3, pads=[1, 1, 1, 1], bias=True,
          batch=["x"]),
    *conv([1, 2, 18, 15], [2, 1, 3, 3], "depthwise-rows-strided", group=2, strides=[2, 2],
          pads=[1, 1, 1, 1], batch=["x"]),
    *conv([1, 2, 19, 23], [2, 1, 2, 3], "depthwise-rows-all", group=2, strides=[2, 3],
          dilations=[3, 2], pads=[0, 2, 1, 0]),
    *conv([1, 2, 17, 30], [2, 1, 3, 2], "depthwise-rows-unread-rest", group=2, strides=[3, 4]),
    *conv([1, 2, 10, 9], [2, 1, 3, 3], "depthwise-rows-much-padding", group=2, pads=[3, 2, 4, 3]),
    *conv([1, 2, 16, 15], [2, 1, 1, 1], "depthwise-rows-pointwise", group=2, strides=[2, 2]),
    *conv([1, 2, 17, 16], [2, 1, 3, 3], "depthwise-rows-same", group=2, strides=[2, 2],
          auto_pad="SAME_UPPER"),
    *conv([1, 2, 4, 70], [2, 1, 3, 3], "depthwise-wide", group=2, pads=[1, 1, 1, 1], bias=True,
          batch=["x"]),
    *conv([1, 2, 5, 50], [2, 1, 3, 4], "depthwise-wide-dilated", group=2, strides=[2, 1],
          dilations=[2, 1], pads=[1, 0, 2, 2], opsets=EVERY),
    *conv([2, 2, 4, 48], [2, 1, 2, 1], "depthwise-wide-columns", group=2),
    *conv([1, 2, 4, 66], [2, 1, 1, 3], "depthwise-wide-one-row", group=2, batch=["x"]),
    *conv([1, 2, 5, 70], [2, 1, 3, 5], "depthwise-wide-all", group=2, strides=[2, 3],
          dilations=[1, 2], pads=[1, 2, 0, 1]),
    *conv([1, 2, 3, 135], [2, 1, 2, 3], "depthwise-wide-strided", group=2, strides=[1, 2]),
    *conv([2, 2, 4, 67], [2, 1, 3, 5], "depthwise-wide-same", group=2, strides=[2, 3],
          auto_pad="SAME_UPPER", batch=["x"]),
    # Maxima: windows that tile the plane, and all others
    *pool("MaxPool", PLANE, "tiled", kernel_shape=[2, 2], strides=[2, 2], opsets=EVERY,
          batch=["x"]),
    *pool("MaxPool", spread(2, 2, 6, 3), "tiled-by-three", kernel_shape=[3, 3], strides=[3, 3]),
    *pool("MaxPool", SEVEN, "rest", kernel_shape=[2, 2], strides=[2, 2]),
    *pool("MaxPool", SEVEN, "overlapping", kernel_shape=[3, 3], strides=[2, 2], opsets=EVERY,
          batch=["x"]),
    *pool("MaxPool", SEVEN, "padded", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1],
          batch=["x"]),
    *pool("MaxPool", SEVEN, "dilated", kernel_shape=[2, 2], dilations=[3, 2]),
    *pool("MaxPool", SEVEN, "ceil", kernel_shape=[2, 2], strides=[2, 4], ceil_mode=1, batch=["x"]),
    *pool("MaxPool", SEVEN, "ceil-padded", kernel_shape=[3, 3], strides=[2, 2],
          pads=[1, 1, 1, 1], ceil_mode=1),
    *pool("MaxPool", SEVEN, "same-upper", kernel_shape=[3, 3], strides=[2, 2],
          auto_pad="SAME_UPPER"),
    *pool("MaxPool", SEVEN, "same-lower", kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    *pool("MaxPool", spread(2, 3, 8), "tiled", kernel_shape=[2], strides=[2], batch=["x"]),
    *pool("MaxPool", spread(2, 3, 8), "overlapping", kernel_shape=[3], strides=[2], pads=[1, 0]),
    *pool("MaxPool", spread(1, 2, 4, 4, 4), "tiled", kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    *pool("MaxPool", spread(1, 2, 3, 4, 5), "overlapping", kernel_shape=[2, 2, 3]),
    *pool("MaxPool", SEVEN, "with-indices", kernel_shape=[3, 3], strides=[2, 2], outputs=2,
          used=[0]),
    *pool("MaxPool", TIED, "tiled-ties", kernel_shape=[2, 2], strides=[2, 2], differences="none"),
    *pool("MaxPool", TIED, "ties", kernel_shape=[3, 3], pads=[1, 1, 1, 1], differences="none"),
    # Maxima of windows so large that the kernel reports their places
    *pool("MaxPool", WIDE, "large", kernel_shape=[5, 5], pads=[2, 2, 2, 2], batch=["x"],
          opsets=(12, 16, 17, 22, 26)),
    *pool("MaxPool", WIDE, "large-uneven", kernel_shape=[5, 7], pads=[2, 3, 2, 3],
          differences="torch"),
    *pool("MaxPool", WIDE, "large-strided", kernel_shape=[5, 4], strides=[2, 3]),
    *pool("MaxPool", WIDE, "large-dilated", kernel_shape=[4, 5], dilations=[3, 2],
          pads=[3, 2, 2, 3], batch=["x"]),
    *pool("MaxPool", WIDE, "large-ceil", kernel_shape=[5, 5], strides=[3, 4], ceil_mode=1,
          pads=[1, 1, 1, 1]),
    *pool("MaxPool", WIDE, "large-same", kernel_shape=[5, 6], auto_pad="SAME_LOWER"),
    *pool("MaxPool", WIDE, "large-open", kernel_shape=[5, 5], symbols={"x": [0, 1, 2, 3]},
          pads=[2, 2, 2, 2]),
    *pool("MaxPool", WIDE, "large-columns-first", kernel_shape=[5, 5], storage_order=1),
    *pool("MaxPool", WIDE, "large-with-indices", kernel_shape=[5, 5], outputs=2, used=[0]),
    *pool("MaxPool", WIDE, "whole-plane", kernel_shape=[9, 12]),
    *pool("MaxPool", spread(2, 3, 40), "large", kernel_shape=[17], strides=[2], pads=[8, 8]),
    *pool("MaxPool", spread(1, 2, 4, 4, 5), "large", kernel_shape=[3, 3, 3]),
    *pool("MaxPool", WIDE_TIED, "large-ties", kernel_shape=[5, 5], pads=[2, 2, 2, 2],
          differences="none", opsets=(15, 17)),
    # Means
    *pool("AveragePool", PLANE, "tiled", kernel_shape=[2, 2], strides=[2, 2], opsets=EVERY,
          batch=["x"]),
    *pool("AveragePool", SEVEN, "overlapping", kernel_shape=[3, 3], strides=[2, 2]),
    *pool("AveragePool", SEVEN, "padded", kernel_shape=[3, 3], strides=[2, 2],
          pads=[1, 1, 1, 1], batch=["x"], opsets=EVERY),
    *pool("AveragePool", SEVEN, "padding-counted", kernel_shape=[3, 2], strides=[2, 1],
          pads=[1, 0, 1, 1], count_include_pad=1, opsets=EVERY),
    *pool("AveragePool", SEVEN, "ceil", kernel_shape=[2, 2], strides=[2, 4], ceil_mode=1),
    *pool("AveragePool", SEVEN, "ceil-padded", kernel_shape=[3, 3], strides=[2, 2],
          pads=[1, 1, 1, 1], ceil_mode=1),
    *pool("AveragePool", SEVEN, "ceil-counted", kernel_shape=[3, 3], strides=[3, 2],
          pads=[1, 1, 1, 1], ceil_mode=1, count_include_pad=1, opsets=(12, 19, 22)),
    *pool("AveragePool", SEVEN, "same-upper", kernel_shape=[3, 3], strides=[2, 2],
          auto_pad="SAME_UPPER"),
    # Strides that leave gaps of two, where ONNX Runtime's windows are those of the standard; the
    # reference implementation fails of -1.
    *joined(pool(op, spread(1, 2, size), f"gaps-{size}", kernel_shape=[1], strides=[3],
                 auto_pad="SAME_UPPER", opsets=(18,), differences="torch")
            for op, size in (("AveragePool", 4), ("AveragePool", 7), ("LpPool", 4), ("LpPool", 5),
                             ("LpPool", 7))),
    *pool("AveragePool", SEVEN, "dilated", kernel_shape=[2, 2], dilations=[3, 2], opsets=(19, 22)),
    *pool("AveragePool", spread(2, 3, 8), "padded", kernel_shape=[3], strides=[2], pads=[1, 0],
          batch=["x"]),
    *pool("AveragePool", spread(1, 2, 3, 4, 5), "plain", kernel_shape=[2, 2, 3]),
    # Whole planes
    *joined(
        [*cases("GlobalAveragePool", {"x": spread(*shape)},
                lambda x: x.mean(tuple(range(2, x.ndim)), True), EVERY, batch=["x"],
                label=f"{len(shape) - 2}d"),
         *cases("GlobalMaxPool", {"x": spread(*shape)},
                lambda x: x.amax(tuple(range(2, x.ndim)), True), EVERY, batch=["x"],
                label=f"{len(shape) - 2}d", differences="torch")]
        for shape in ((2, 3, 4, 5), (2, 3, 5), (2, 3, 2, 3, 2))),
    *cases("GlobalMaxPool", {"x": TIED}, lambda x: x.amax((2, 3), True), differences="none",
           label="ties"),
    # Transposed convolutions
    *transposed([2, 4, 3, 4], [4, 3, 3, 2], "plain", opsets=EVERY, bias=True, batch=["x"]),
    *transposed([2, 4, 3, 4], [4, 3, 3, 3], "strided", strides=[2, 2], pads=[1, 1, 1, 1],
                output_padding=[1, 1], bias=True, batch=["x"]),
    *transposed([2, 4, 3, 4], [4, 3, 3, 2], "asymmetric", strides=[2, 3], pads=[1, 0, 0, 1]),
    *transposed([2, 4, 3, 4], [4, 3, 2, 2], "dilated", strides=[1, 2], dilations=[3, 3],
                output_padding=[0, 1], pads=[0, 1, 1, 1], batch=["x"]),
    *transposed([2, 4, 3, 4], [4, 3, 3, 3], "same-upper", strides=[2, 2], auto_pad="SAME_UPPER"),
    *transposed([2, 4, 3, 4], [4, 3, 4, 3], "same-lower", strides=[2, 2], auto_pad="SAME_LOWER"),
    *transposed([2, 4, 3, 4], [4, 3, 3, 3], "output-shape", strides=[2, 2], output_shape=[6, 9]),
    *transposed([2, 4, 3, 4], [4, 3, 2, 2], "gaps", strides=[3, 3]),
    *transposed([2, 4, 3, 4], [4, 2, 3, 3], "groups", strides=[2, 2], group=2, batch=["x"]),
    *transposed([2, 4, 3, 4], [4, 1, 3, 3], "depthwise", strides=[2, 2], group=4),
    *transposed([2, 18, 3, 4], [18, 17, 2, 2], "many-channels", strides=[2, 2]),
    *transposed([2, 4, 5], [4, 3, 3], "plain", strides=[2], pads=[1, 1], batch=["x"]),
    *transposed([1, 3, 2, 3, 2], [3, 2, 2, 2, 3], "plain", strides=[2, 1, 2]),
]  # fmt: skip
