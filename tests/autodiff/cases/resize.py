"""Resize, as the affine map that ONNX Runtime's own kernel is."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Array, Case, forward_model, session, spread

NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
COORDINATES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric",
               "align_corners", "tf_crop_and_resize")  # fmt: skip
REGION = [0.0, 0.0, 0.15, -0.2, 1.0, 1.0, 0.95, 0.7]


def affine_map(case: Case) -> tuple[Array, Array]:
    """What the kernel makes of zero, and of each unit vector less that: [y], [x, y]."""
    running = session(ir.to_proto(forward_model(case)), "off")
    fixed = {name: array for name, array in case.present.items() if name not in case.constants}
    x = fixed.pop("x")
    units = [np.zeros_like(x), *np.eye(x.size, dtype=np.float32).reshape(-1, *x.shape)]
    zero, *others = (running.run(None, {"x": unit, **fixed})[0] for unit in units)
    return zero.astype(float), np.stack(others).astype(float) - zero


def resize(
    opset: int, *, shape: Sequence[int] = (1, 2, 4, 5), sizes: Sequence[int] | None = None,
    scales: Sequence[float] | None = None, roi: Sequence[float] | None = None,
    symbolic: Sequence[int] = (), runtime: Sequence[str] = (), **attrs: Any,
) -> Case:  # fmt: skip
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize" and roi is None:
        roi = REGION
    inputs: dict[str, Array | None] = {
        "x": spread(*shape),
        "roi": None if roi is None else np.float32(roi),
        "scales": None if scales is None else np.float32(scales),
        "sizes": None if sizes is None else np.array(sizes, np.int64),
    }
    parts = {"sizes": sizes, "scales": scales, **attrs}
    label = "-".join(str(v).replace(" ", "") for v in parts.values() if v is not None)
    case = Case(
        "Resize", inputs, torch.relu, opset, attrs, wrt=["x"], runtime=runtime,
        const=["roi", "scales"], symbols={"x": symbolic} if symbolic else {},
        label="-".join([label, *runtime]),
    )  # fmt: skip
    known = functools.cache(lambda: affine_map(case))

    def function(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        zero, rows = (torch.tensor(part) for part in known())
        return zero + torch.tensordot(x.flatten(), rows, 1)

    # The kernel's own map is exact to 1e-6: too coarse where a filter is this steep.
    steep = (attrs.get("antialias"), attrs.get("mode")) == (1, "cubic")
    # The reference implementation pairs scales with axes in ascending order.
    unordered = scales is not None and min(attrs.get("axes", [0])) < 0
    differences = "torch" if steep or unordered else "onnx"
    return dataclasses.replace(case, torch=function, differences=differences)


def coordinates(place: str, **attrs: Any) -> dict[str, Any]:
    return {"coordinate_transformation_mode": place, **attrs}


def fixed() -> Iterator[Case]:
    """Known sizes: up along one axis, down along the other."""
    for opset, place in itertools.product((13, 18, 23), COORDINATES):
        if place == "half_pixel_symmetric" and opset < 19:
            continue
        cubic = coordinates(place, mode="cubic", exclude_outside=opset % 2)
        for attrs in (
            *(coordinates(place, mode="nearest", nearest_mode=n) for n in NEAREST[opset % 2 :: 2]),
            coordinates(place, mode="linear"),
            cubic,
            cubic | {"exclude_outside": 1 - opset % 2, "cubic_coeff_a": -0.5},
        ):
            more = {"extrapolation_value": 2.0} if place == "tf_crop_and_resize" else {}
            yield resize(opset, sizes=(1, 2, 7, 3), **attrs, **more)
        if opset >= 18:
            for mode, outside in itertools.product(("linear", "cubic"), (0, 1)):
                attrs = coordinates(place, mode=mode, exclude_outside=outside, antialias=1)
                yield resize(opset, sizes=(1, 2, 6, 2), **attrs)


def at_run_time() -> Iterator[Case]:
    """Sizes, scales, or the region known only when the model runs; all are exact in binary."""
    line = {"shape": (1, 1, 4, 8)}
    kinds: list[dict[str, Any]] = [
        {"mode": "nearest", "nearest_mode": "floor"}, {"mode": "nearest"}, {"mode": "linear"},
        {"mode": "cubic"}, {"mode": "cubic", "exclude_outside": 1},
        {"mode": "linear", "antialias": 1}, {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
    ]  # fmt: skip
    for place, kind, opset in itertools.product(COORDINATES, kinds, (12, 19)):
        if opset < 19 and (kind.get("antialias") or place == "half_pixel_symmetric"):
            continue
        roi = REGION if opset < 13 else None  # which the older operator always has
        attrs = coordinates(place, roi=roi, **kind)
        yield resize(opset, scales=(1, 1, 1.75, 0.625), symbolic=(0, 2, 3), **line, **attrs)
        if opset < 19:
            continue
        ways = ("scales", "sizes") if place != "tf_crop_and_resize" else ("scales", "sizes", "roi")
        for way in ways:
            size = {"sizes": (1, 1, 7, 5)} if way == "sizes" else {"scales": (1, 1, 1.75, 0.625)}
            whole = (0, 1, 2, 3) if way == "sizes" else ()
            yield resize(opset, runtime=[way], symbolic=whole, **line, **size, **attrs)


def policies() -> Iterator[Case]:
    for policy, mode, runtime in itertools.product(
        ("not_larger", "not_smaller"), ("nearest", "linear", "cubic"), (False, True)
    ):
        yield resize(18, sizes=(7, 9), axes=[2, 3], mode=mode, keep_aspect_ratio_policy=policy,
                     runtime=["sizes"] if runtime else [],
                     symbolic=(2, 3) if runtime else ())  # fmt: skip


def layouts() -> list[Case]:
    """Other ranks, axes, and layouts."""
    line: dict[str, Any] = {"mode": "linear", "opset": 18}
    half: dict[str, Any] = {
        "opset": 19, "shape": (1, 2, 5), "scales": (1, 1, 1.5), "mode": "linear"}  # fmt: skip
    one = (1, 2, 1, 1)
    return [
        resize(13, shape=(4, 5), sizes=(7, 3), mode="linear"),
        resize(13, shape=(2, 5), sizes=(2, 8), mode="nearest"),
        resize(13, shape=(2, 3, 4), sizes=(2, 5, 2), mode="linear"),
        resize(13, shape=(4, 5), sizes=(7, 3), mode="cubic"),
        resize(13, shape=(1, 2, 3, 4, 3), scales=(1, 1, 2, 0.5, 1.4), mode="linear"),
        resize(13, shape=(1, 2, 3, 4, 3), scales=(1, 1, 2, 0.5, 1.4), mode="nearest"),
        resize(18, shape=(1, 2, 3, 4, 3), scales=(1, 1, 0.7, 0.5, 1.4), mode="linear",
               antialias=1),
        resize(13, shape=(1, 4, 5, 2), scales=(1, 2, 0.7, 1), mode="linear"),
        resize(18, shape=(1, 4, 5, 2), scales=(1, 2, 0.7, 1), mode="linear", antialias=1),
        resize(13, shape=(2, 2, 3, 2), scales=(2, 0.5, 1.5, 2), mode="nearest"),
        resize(**line, axes=[3, 2], sizes=(3, 7)),
        resize(**line, axes=[-1], scales=(1.6,)),
        resize(**line, axes=[-1, 2], scales=(1.6, 0.5), symbolic=(0, 1, 2, 3)),
        resize(**line, axes=[3, 2], sizes=(3, 7), roi=[0.1, 0.0, 0.9, 0.8],
               **coordinates("tf_crop_and_resize")),
        resize(13, sizes=one, mode="linear", **coordinates("pytorch_half_pixel")),
        resize(13, sizes=one, mode="cubic", **coordinates("align_corners")),
        resize(**half, symbolic=(0, 2), **coordinates("half_pixel_symmetric")),
        resize(**half, **coordinates("half_pixel_symmetric")),
        resize(13, sizes=one, mode="linear", **coordinates("tf_crop_and_resize")),
    ]  # fmt: skip


def copied() -> list[Case]:
    """Scales that leave a length as it was, which the runtime copies."""
    kinds: list[dict[str, Any]] = [
        {"mode": "nearest"}, {"mode": "linear"}, {"mode": "cubic"},
        {"mode": "linear", "antialias": 1}, {"mode": "cubic", "antialias": 1},
        {"mode": "linear", **coordinates("tf_crop_and_resize")},
    ]  # fmt: skip
    # With antialias an axis is copied even if another grows.
    found = [
        resize(18, shape=(2, 1, 2, 3), scales=(1, 1, up, 1.3), symbolic=symbolic, **kind)
        for kind, up, symbolic in itertools.product(kinds, (1, 2), ((), (0,)))
    ]
    return [dataclasses.replace(case, differences="torch") for case in found]


def rounded() -> list[Case]:
    """Positions between two elements, where the last bit of float32 decides."""
    found = [
        resize(18, shape=(1, 1, 1, old), sizes=(1, 1, 1, new), mode="nearest", nearest_mode=nearest,
               **coordinates(place))
        for old, new, place, nearest in (
            (14, 19, "half_pixel", "round_prefer_floor"),
            (14, 1, "half_pixel", "round_prefer_ceil"),
            (8, 27, "align_corners", "round_prefer_floor"),
            (29, 37, "asymmetric", "floor"),
        )
    ] + [
        resize(13, shape=(1, 1, old, 5), scales=(1, 1, *scales), mode="nearest",
               nearest_mode="floor", **coordinates("asymmetric"))
        for old, scales in ((1, (1, 1.1)), (2, (2, 1.1)), (14, (0.7, 0.6)), (28, (0.3, 1.6)))
    ]  # fmt: skip
    return [dataclasses.replace(case, differences="torch") for case in found]


def by_torch() -> list[Case]:
    """PyTorch's own resizing in place of the map of the kernel."""
    floor = {"nearest_mode": "floor", **coordinates("asymmetric")}
    scaled = resize(18, scales=(1, 1, 2, 2), mode="nearest", **floor)
    smooth = resize(18, sizes=(1, 2, 6, 3), mode="linear", antialias=1, exclude_outside=1)
    cubic = resize(18, sizes=(1, 2, 7, 9), mode="cubic", **coordinates("align_corners"))
    functions = [
        lambda x, *_: F.interpolate(x, scale_factor=2),
        lambda x, *_: F.interpolate(x, (6, 3), mode="bilinear", antialias=True),
        lambda x, *_: F.interpolate(x, (7, 9), mode="bicubic", align_corners=True),
    ]
    return [
        dataclasses.replace(case, torch=function, label=f"{case.label}-torch")
        for case, function in zip((scaled, smooth, cubic), functions, strict=True)
    ]


CASES: list[Case] = [
    *fixed(), *at_run_time(), *policies(), *layouts(), *copied(), *rounded(), *by_torch(),
]  # fmt: skip
