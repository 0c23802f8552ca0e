"""Pools over regions and deformable convolutions, written out in PyTorch from their definitions."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Case, cases, ints, joined, normal, spread

# x1, y1, x2, y2: inside, over the border, beyond it, and smaller than an element.
BOXES = np.float32([[0.31, 0.72, 3.13, 4.24], [-2.1, 1.2, 3.3, 3.1], [2.4, 2.3, 9.1, 9.2],
                    [1.1, 1.2, 1.43, 1.51], [0.2, 0.1, 4.9, 5.3]])  # fmt: skip
OWNERS = ints(0, 1, 1, 0, 0)


def samples(start: float, step: float, part: int, count: int, size: int) -> list[torch.Tensor]:
    """Weights [size] of each sample of one bin along one axis: linear, zero far outside."""
    found = []
    for number in range(count):
        at = start + (part + (number + 0.5) / count) * step
        weight = torch.zeros(size, dtype=torch.double)
        if -1 <= at <= size:
            inside = min(max(at, 0.0), size - 1)
            low = min(int(inside), size - 1)
            weight[low] += 1 - (inside - low)
            if low + 1 < size:
                weight[low + 1] += inside - low
        found.append(weight)
    return found


def roi_align(x, boxes, owners, attrs, opset):
    """From the definition, bin by bin. A maximum is that of the weighted elements: see the rule."""
    default = "half_pixel" if opset >= 16 else "output_half_pixel"
    half = attrs.get("coordinate_transformation_mode", default) == "half_pixel"
    bins = attrs.get("output_height", 1), attrs.get("output_width", 1)
    each = attrs.get("sampling_ratio", 0)
    results = []
    for box, owner in zip(boxes.astype(float) * attrs["spatial_scale"], owners, strict=True):
        axes = []
        for axis in range(2):
            start, end = box[[1 - axis, 3 - axis]] - (0.5 if half else 0)
            step = (end - start if half else max(end - start, 1.0)) / bins[axis]
            count = each or math.ceil(step)
            axes.append([samples(start, step, part, count, x.shape[2 + axis])
                         for part in range(bins[axis])])  # fmt: skip
        for rows, columns in itertools.product(*axes):
            weights = torch.stack([torch.outer(r, c) for r, c in itertools.product(rows, columns)])
            products = weights * x[owner][:, None]
            if attrs.get("mode", "avg") == "avg":
                results.append(products.sum((1, 2, 3)) / len(weights))
            else:  # of positive x: what weighs nothing wins only where nothing is read
                results.append(products.amax((1, 2, 3)))
    return torch.stack(results).reshape(len(boxes), *bins, -1).permute(0, 3, 1, 2)


def align(opset, mode, coordinates, each, *, symbolic=False, sized=True):
    """Without ``sized`` each region gives one number, as without the attributes."""
    attrs: dict[str, Any] = {"sampling_ratio": each, "spatial_scale": 0.8, "mode": mode}
    attrs |= {"output_height": 2, "output_width": 3} if sized else {}
    if coordinates is not None:
        attrs["coordinate_transformation_mode"] = coordinates
    x = spread(2, 2, 5, 6, low=0.5, high=4.0)  # positive: elements that weigh nothing never win

    def function(x: torch.Tensor, boxes: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        return roi_align(x, BOXES, OWNERS, attrs, opset)

    inputs = {"x": x, "r": BOXES, "b": OWNERS}
    axes = {"x": (0, 1, 2, 3), "r": (0,), "b": (0,)} if symbolic else {}
    label = f"{mode}-{coordinates}-{each}{'-unsized' * (not sized)}"
    return cases("RoiAlign", inputs, function, (opset,), wrt=["x"], runtime=["b"], symbols=axes,
                 label=label, differences="torch", **attrs)  # fmt: skip


def max_roi_pool(scale, bins=(2, 3), *, symbolic=False):
    boxes = np.float32([[0, 0, 0, 3, 3], [1, 1, 2, 5, 4], [1, 4, 1, 9, 9], [0, 2, 2, 2, 2]])

    def function(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        results = []
        for owner, *corners in boxes:
            left, top, right, bottom = (math.floor(c * scale + 0.5) for c in corners)
            for row, column in itertools.product(*map(range, bins)):
                parts = []
                for part, count, low, high, size in (
                    (row, bins[0], top, bottom, x.shape[2]),
                    (column, bins[1], left, right, x.shape[3]),
                ):
                    step = max(high - low + 1, 1) / count
                    begin, end = math.floor(part * step), math.ceil((part + 1) * step)
                    parts.append(slice(*(min(max(low + e, 0), size) for e in (begin, end))))
                seen = x[int(owner)][:, parts[0], parts[1]].flatten(1)
                results.append(seen.amax(1) if seen.shape[1] else seen.sum(1))
        return torch.stack(results).reshape(len(boxes), *bins, -1).permute(0, 3, 1, 2)

    axes = {"x": (0, 1, 2, 3), "r": (0,)} if symbolic else {}
    return cases("MaxRoiPool", {"x": spread(2, 2, 5, 6), "r": boxes}, function, (16, 21),
                 wrt=["x"], pooled_shape=bins, spatial_scale=scale, differences="torch",
                 symbols=axes, label=f"{scale}-{bins[0]}x{bins[1]}")  # fmt: skip


def deform(opset: int, label: str, *, channels: int = 4, features: int = 4, kernel: int = 3,
           bias: bool = False, mask: bool = False, symbolic: bool = False,
           **attrs: Any) -> list[Case]:  # fmt: skip
    """In PyTorch one GridSample for each tap and offset group, then a product."""
    strides, dilations = attrs.get("strides", [1, 1]), attrs.get("dilations", [1, 1])
    pads, groups = attrs.get("pads", [0] * 4), attrs.get("group", 1)
    shared, size = attrs.get("offset_group", 1), (5, 6)
    out = [
        (n + pads[i] + pads[i + 2] - (kernel - 1) * dilations[i] - 1) // strides[i] + 1
        for i, n in enumerate(size)
    ]
    count = kernel * kernel
    generator = np.random.default_rng(3)
    # Off the elements: a whole number and 0.25 to 0.4.
    offset = generator.integers(-2, 2, (2, shared * count * 2, *out)) + generator.choice(
        [0.25, 0.4], (2, shared * count * 2, *out)
    )
    inputs: dict[str, Any] = {
        "x": normal(2, channels, *size, seed=1),
        "w": normal(features, channels // groups, kernel, kernel, seed=2, scale=0.5),
        "o": offset.astype(np.float32),
        "b": normal(features, seed=3) if bias else None,
    }
    if mask:
        inputs["m"] = normal(2, shared * count, *out, seed=4)

    def function(x, w, o, *more):
        rest = list(more)
        b = rest.pop(0) if bias else None
        moves = o.reshape(2, shared, count, 2, *out)
        read = []
        for tap, (ky, kx) in enumerate(itertools.product(range(kernel), repeat=2)):
            groups_read = []
            for part, plane in enumerate(x.chunk(shared, 1)):
                grid = []
                for axis, k in ((1, kx), (0, ky)):
                    steps = torch.arange(out[axis], dtype=x.dtype) * strides[axis] - pads[axis]
                    steps = steps.reshape((1, -1) if axis else (-1, 1)) + k * dilations[axis]
                    at = moves[:, part, tap, axis] + steps
                    grid.append(2 * at / (size[axis] - 1) - 1)
                sampled = F.grid_sample(plane, torch.stack(grid, -1), align_corners=True)
                if mask:
                    sampled = sampled * rest[-1].reshape(2, shared, count, *out)[:, part, tap, None]
                groups_read.append(sampled)
            read.append(torch.cat(groups_read, 1))
        columns = torch.stack(read, 2).reshape(2, groups, channels // groups, count, *out)
        weight = w.reshape(groups, features // groups, channels // groups, count)
        y = torch.einsum("ngckhw,gock->ngohw", columns, weight).reshape(2, features, *out)
        return y if b is None else y + b.reshape(-1, 1, 1)

    axes = {"x": (0, 2, 3), "o": (0, 2, 3)} | ({"m": (0, 2, 3)} if mask else {}) if symbolic else {}
    return cases("DeformConv", inputs, function, (opset,), label=label, symbols=axes,
                 double=opset == 22, differences="torch", **attrs)  # fmt: skip


MODES = (None, "half_pixel", "output_half_pixel")

CASES: list[Case] = [
    *joined(align(opset, "avg", None, each) for opset in (12, 15) for each in (0, 2)),
    *joined(align(*each)
            for each in itertools.product((16, 21), ("avg", "max"), MODES, (0, 1, 2))),
    *joined(align(18, mode, None, each, symbolic=True) for mode in ("avg", "max")
            for each in (0, 2)),
    *align(16, "avg", None, 2, sized=False),
    *max_roi_pool(1.0),
    *max_roi_pool(0.7),
    *max_roi_pool(0.7, (3, 1)),
    *max_roi_pool(0.7, symbolic=True),
    *joined(
        [
            *deform(opset, "plain"),
            *deform(opset, "bias", bias=True, pads=[1, 1, 1, 1]),
            *deform(opset, "mask", mask=True, pads=[1, 0, 1, 2], strides=[2, 1]),
            *deform(opset, "dilated", kernel=2, dilations=[2, 3], features=2, mask=True, bias=True),
            *deform(opset, "groups", group=2, pads=[1, 1, 1, 1]),
            *deform(opset, "offset-groups", offset_group=2, mask=True, kernel=2, features=3),
            *deform(opset, "all", group=2, offset_group=4, mask=True, bias=True, kernel=2,
                    strides=[2, 2], dilations=[2, 1], pads=[1, 2, 0, 1]),
            *deform(opset, "open", group=2, offset_group=2, mask=True, bias=True,
                    strides=[2, 2], pads=[1, 1, 1, 1], symbolic=True),
        ]
        for opset in (19, 22)),
]  # fmt: skip
