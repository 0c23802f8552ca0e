"""Sums of products, determinants, cumulative sums and products, Fourier transforms."""

import numpy as np
import torch

from tests.autodiff.oracle import Array, Case, cases, joined, normal, spread

EVERY = (12, 18, 24)
X = spread(2, 3, 4)
ZEROS = np.float32([[1, 0, 3, 0, 2], [0, 1.5, 2, 3, 1], [1, 2, 3, 4, 0], [1, 2, 0, 2, 1]])

EQUATIONS = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "ij,jk": [(2, 3), (3, 4)],
    "ij->ji": [(2, 3)],
    "ij->i": [(2, 3)],
    "ij->": [(2, 3)],
    "i,j->ij": [(2,), (3,)],
    "i,i->": [(3,), (3,)],
    "bhqd, bhkd -> bhqk": [(2, 2, 3, 4), (2, 2, 5, 4)],
    "bij,jk,bk->bi": [(2, 3, 4), (4, 5), (2, 5)],
    "...ij,...jk->...ik": [(2, 2, 3, 4), (2, 2, 4, 5)],
    "...ij,jk": [(2, 3, 4), (4, 5)],
    "ij,ik->j": [(2, 3), (2, 4)],
    # A diagonal
    "ii->i": [(3, 3)],
    "ii->": [(3, 3)],
    "ii": [(3, 3)],
    "iii->i": [(2, 2, 2)],
    "iij->ij": [(3, 3, 2)],
    "iji->j": [(3, 2, 3)],
    "iijj->ij": [(2, 2, 3, 3)],
    "iijj->": [(2, 2, 3, 3)],
    "...ii->...i": [(2, 3, 3)],
    "ijj,jk->ik": [(2, 3, 3), (3, 4)],
    "ii,ij->j": [(2, 2), (2, 3)],
    # An axis of length 1 beside a longer one
    "bij,bij->b": [(2, 3, 4), (1, 3, 4)],
    "bij,bij->ij": [(2, 3, 4), (1, 3, 4)],
    "bij,bij->bij": [(2, 3, 4), (2, 1, 4)],
    "bi,bi->i": [(2, 3), (1, 3)],
    "bij,bjk->bik": [(2, 3, 4), (1, 4, 5)],
    # More operands
    "i,j,k->ijk": [(2,), (3,), (4,)],
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 5)],
}


def cumulative(x: torch.Tensor, name: str, reverse: int, exclusive: int) -> torch.Tensor:
    """CumSum or CumProd along axis 1."""
    x = x.flip(1) if reverse else x
    if exclusive:
        neutral = torch.zeros_like if name == "cumsum" else torch.ones_like
        x = torch.cat([neutral(x[:, :1]), x[:, :-1]], 1)
    y = getattr(x, name)(1)
    return y.flip(1) if reverse else y


def cumulatives(op: str, x: Array, opsets: tuple[int, ...], label: str = ""):  # type: ignore[no-untyped-def]
    """All four kinds."""
    return joined(
        cases(op, {"x": x, "axis": np.array(1 if reverse else 1 - x.ndim)},
              lambda x, _, r=reverse, e=exclusive: cumulative(x, op.lower(), r, e), opsets,
              reverse=reverse, exclusive=exclusive, batch=["x"], double=True, differences="torch",
              label=f"reverse{reverse}-exclusive{exclusive}{label}")
        for reverse in (0, 1) for exclusive in (0, 1)
    )  # fmt: skip


def complex_of(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0] + 0j


def transform(kind: str, length: int | None, axis: int):  # type: ignore[no-untyped-def]
    """fft, ifft or rfft of numbers as ONNX holds them: parts along the last axis."""

    def function(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        numbers = x[..., 0] if kind == "rfft" else complex_of(x)
        return torch.view_as_real(getattr(torch.fft, kind)(numbers, length, axis))

    return function


def dft(parts: int, kind: str, length: int | None):  # type: ignore[no-untyped-def]
    """Along axis 1 of three, given as attribute and, from opset 20 on, as input."""
    inputs: dict[str, Array | None] = {"x": normal(2, 5, 3, parts)}
    if length is not None:
        inputs["length"] = np.array(length)
    options = {"inverse": int(kind == "ifft"), "onesided": int(kind == "rfft"), "batch": ["x"],
               "differences": "torch", "label": f"{kind}-{parts}-{length}"}  # fmt: skip
    function, axis = transform(kind, length, 1), {"axis": np.array(-3)}
    default = {"label": f"{kind}-{parts}-{length}-default"}
    return [
        *cases("DFT", inputs, function, (17, 19), axis=1, **options),
        *cases("DFT", {"x": None, "length": None} | inputs | axis, function, (20, 24), **options),
        *cases("DFT", inputs, transform(kind, length, 2), (20,), **options | default),
    ]


def framed(step: int, length: int, onesided: int):  # type: ignore[no-untyped-def]
    """STFT frame by frame."""

    def function(x: torch.Tensor, _: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        frames = x.unfold(1, length, step).transpose(2, 3)
        numbers = frames[..., 0] if onesided else complex_of(frames)
        windowed = numbers * rest[0] if rest and rest[0].ndim == 1 else numbers
        return torch.view_as_real((torch.fft.rfft if onesided else torch.fft.fft)(windowed))

    return function


def stft(parts: int, onesided: int):  # type: ignore[no-untyped-def]
    x, options = normal(2, 11, parts), {"onesided": onesided, "differences": "torch"}
    label = f"{parts}-onesided{onesided}"
    return [
        *cases("STFT", {"x": x, "step": np.array(3), "window": normal(4, seed=2)},
               framed(3, 4, onesided), (17, 24), batch=["x"], label=label, **options),
        *cases("STFT", {"x": x, "step": np.array(2), "window": normal(5, seed=2),
                        "length": np.array(5)},
               framed(2, 5, onesided), (17, 24), label=f"{label}-length", **options),
        *cases("STFT", {"x": x, "step": np.array(5), "window": None, "length": np.array(4)},
               framed(5, 4, onesided), (17, 24), batch=["x"], label=f"{label}-gaps", **options),
    ]  # fmt: skip


def flat_stft():  # type: ignore[no-untyped-def]
    """Of a signal [batch, samples], as PyTorch's exporter writes it."""
    inputs = {"x": normal(2, 11), "step": np.array(3), "window": normal(4, seed=2)}
    function = framed(3, 4, 1)
    return cases(
        "STFT", inputs, lambda x, *rest: function(x[..., None], *rest), (17, 24),
        label="flat", onesided=1, differences="torch",
    )  # fmt: skip


CASES: list[Case] = [
    # Sums of products
    *joined(cases("Einsum", {f"x{i}": normal(*shape, seed=i) for i, shape in enumerate(shapes)},
                  lambda *x, equation=equation: torch.einsum(equation, *x),
                  equation=equation, label=equation.replace(" ", ""))
            for equation, shapes in EQUATIONS.items()),
    *cases("Einsum", {"a": normal(2, 3, 4), "b": normal(2, 4, 5)},
           lambda a, b: a @ b, EVERY, equation="bij,bjk->bik", batch=["a", "b"], double=True),
    *cumulatives("CumSum", X, EVERY),
    *cumulatives("CumProd", normal(2, 4), (26,)),
    *cumulatives("CumProd", ZEROS, (26,), "-zeros"),
    *cases("Det", {"x": normal(2, 3, 3)}, torch.linalg.det, (12, 17, 22), batch=["x"]),
    *cases("Det", {"x": normal(4, 4)}, torch.linalg.det, (12, 22), label="one-matrix"),
    *cases("Det", {"x": normal(2, 1, 1)}, torch.linalg.det, label="numbers"),
    *cases("Det", {"x": np.float32([[1, 2], [2, 4]])}, lambda x: x[0, 0] * x[1, 1] - x[0, 1] *
           x[1, 0], label="singular"),
    *joined(dft(*each, length)
            for each in ((1, "fft"), (2, "fft"), (1, "ifft"), (2, "ifft"), (1, "rfft"))
            for length in (None, 4, 8)),
    *stft(1, 1),
    *stft(1, 0),
    *stft(2, 0),
    *flat_stft(),
]  # fmt: skip
