"""Every attribute of convolutions and pools with every other, on known and on unknown sizes."""

import itertools
from collections.abc import Iterator
from typing import Any

from tests.autodiff.cases.windows import conv, pool, transposed
from tests.autodiff.oracle import Case, spread

PADDINGS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
# With ceil_mode no window starts behind the input: there the standard's shape inference before
# opset 22 counts one window more than the runtime has.
SIZES = {1: [7], 2: [7, 5], 3: [5, 5, 5]}
KERNELS = {1: [3], 2: [3, 3], 3: [3, 3, 2]}
# Since-versions of the operators, and the newest opset.
OPSETS = (12, 15, 18, 19, 22, 26)


def padding(auto: str, rank: int) -> dict[str, Any]:
    """Explicit pads that differ at both ends, or the name of a rule for them."""
    if auto == "NOTSET":
        return {"pads": [*[1, 0, 0][:rank], *[0, 1, 0][:rank]]}
    return {"auto_pad": auto}


def unknown(rank: int, number: int) -> dict[str, Any]:
    """Sizes that are known only when the model runs: space, or channels and samples as well."""
    return {"symbols": {"x": tuple(range(2 if number % 2 else 0, 2 + rank))}}


def convolutions() -> Iterator[Case]:
    product = itertools.product((1, 2, 3), PADDINGS, (1, 2), (1, 2), (1, 2), (False, True))
    for number, (rank, auto, stride, dilation, group, open_) in enumerate(product):
        if auto.startswith("SAME") and dilation > 1:
            continue  # ONNX Runtime: "Dilation not supported for AutoPadType::SAME_UPPER or ..."
        x, w = [2, 4, *SIZES[rank]], [2, 4 // group, *KERNELS[rank]]
        yield from conv(
            x, w, f"sweep-{auto}-{stride}-{dilation}-{group}", opsets=[OPSETS[number % 6]],
            bias=number % 3 == 0, strides=[stride] * rank, dilations=[dilation] * rank,
            group=group, **padding(auto, rank), **(unknown(rank, number // 2) if open_ else {}),
        )  # fmt: skip


def transposed_convolutions() -> Iterator[Case]:
    kinds: list[dict[str, Any]] = [
        {}, {"auto_pad": "VALID"}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"},
        {"pads": True}, {"output_padding": True, "pads": True}, {"output_shape": 0},
        {"output_shape": 2},
    ]  # fmt: skip
    product = itertools.product((1, 2, 3), kinds, (1, 2), (1, 2), (1, 2), (False, True))
    for number, (rank, kind, stride, dilation, group, open_) in enumerate(product):
        if stride == 1 and ("output_padding" in kind or kind.get("output_shape") == 2):
            continue  # what is added behind must be less than the stride
        if stride + dilation == 4 and group == 2:
            continue  # said already by the others
        size, kernel = [3, 4, 2][:rank], [3] * rank
        attrs = {key: value for key, value in kind.items() if key == "auto_pad"}
        if "pads" in kind:
            attrs["pads"] = [1] * rank + [0] * rank
        if "output_padding" in kind:
            attrs["output_padding"] = [1] * rank
        if "output_shape" in kind:  # as long as the input, and longer than the windows reach
            full = [(n - 1) * stride + 2 * dilation + 1 for n in size]
            more = kind["output_shape"]
            attrs["output_shape"] = [n + more - 1 for n in full]
        yield from transposed(
            [2, 4, *size], [4, 2 // group, *kernel],
            f"sweep-{'-'.join(f'{k}{v}' for k, v in kind.items())}-{stride}-{dilation}-{group}",
            opsets=[OPSETS[number % 6]], bias=number % 3 == 0, strides=[stride] * rank,
            dilations=[dilation] * rank, group=group, **attrs,
            **(unknown(rank, number // 2) if open_ else {}),
        )  # fmt: skip


def pools() -> Iterator[Case]:
    product = itertools.product((1, 2, 3), PADDINGS, (0, 1), (1, 2), (False, True))
    for number, (rank, auto, ceil, dilation, open_) in enumerate(product):
        if auto.startswith("SAME") and dilation > 1 and not open_:
            continue  # the standard's inference gives other sizes than ONNX Runtime
        x = spread(2, 2, *SIZES[rank])
        shape: dict[str, Any] = {
            "kernel_shape": KERNELS[rank], "strides": [2] * rank, **padding(auto, rank),
            # The reference implementation refuses ceil_mode with auto_pad, and has other
            # windows than the runtime for auto_pad with dilations.
            "differences": "onnx" if auto == "NOTSET" else "torch",
            **(unknown(rank, number // 2) if open_ else {}),
        }  # fmt: skip
        steps = {"ceil_mode": ceil, "dilations": [dilation] * rank}
        label = f"sweep-{auto}-{ceil}-{dilation}"
        opset = OPSETS[number % 6]
        yield from pool("MaxPool", x, label, opsets=[opset], **steps, **shape)
        for include in (0, 1):
            opset = OPSETS[3 + (number + include) % 3] if dilation > 1 else opset
            attrs = dict(steps) if dilation > 1 else {"ceil_mode": ceil}
            yield from pool("AveragePool", x, f"{label}-{include}", opsets=[opset],
                            count_include_pad=include, **attrs, **shape)  # fmt: skip
        new = ceil or dilation > 1
        opset = (18, 22, 26)[number % 3] if new else (12, 18, 22)[number % 3]
        yield from pool("LpPool", x, f"{label}-{1 + number % 3}", opsets=[opset],
                        p=1 + number % 4, **(steps if new else {}),
                        **shape | {"differences": "torch"})  # fmt: skip


CASES: list[Case] = [*convolutions(), *transposed_convolutions(), *pools()]
