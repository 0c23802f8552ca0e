"""Losses with their options, data, and the same in PyTorch."""

import itertools
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from tests.losses.harness import Case, TorchLoss

SHAPES = {"vector": (6, 5), "sequence": (3, 5, 4), "image": (2, 5, 3, 4)}
WEIGHT = (0.5, 2.0, 0.0, 1.25, 1.0)


def normal(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def labels(shape: tuple[int, ...], ignored: int | None = None) -> np.ndarray:
    random = np.random.default_rng(2)
    found = random.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignored is not None:
        found[random.random(found.shape) < 0.3] = ignored
        found.flat[0], found.flat[1] = ignored, 1
    return found


def probabilities(*shape: int) -> np.ndarray:
    """Over axis 1, some of them 0."""
    p = np.exp(normal(*shape, seed=5))
    p[:, 0] = 0
    return p / p.sum(1, keepdims=True)


def _classification() -> dict[str, Case]:
    cases = {}
    for shape_name, shape in SHAPES.items():
        for label, options in {
            "plain": {},
            "sum": {"reduction": "sum"},
            "weight": {"weight": WEIGHT},
            "weight-sum": {"weight": WEIGHT, "reduction": "sum"},
            "ignore": {"ignore_index": -100},
            "ignore-class": {"ignore_index": 2, "weight": WEIGHT},
            "ignore-sum": {"ignore_index": -1, "reduction": "sum"},
            "smooth": {"label_smoothing": 0.1},
            "smooth-sum": {"label_smoothing": 0.1, "reduction": "sum", "weight": WEIGHT},
            "all": {"weight": WEIGHT, "ignore_index": -7, "label_smoothing": 0.3},
            "soft": {"labels": "probabilities"},
            "soft-all": {"labels": "probabilities", "weight": WEIGHT, "label_smoothing": 0.3},
            "soft-sum": {"labels": "probabilities", "weight": WEIGHT, "reduction": "sum"},
        }.items():
            ignored, soft = options.get("ignore_index"), "labels" in options
            given = {name: value for name, value in options.items() if name != "labels"}
            if "weight" in given:
                given["weight"] = torch.tensor(WEIGHT).double()
            target = probabilities(*shape) if soft else labels(shape, ignored)
            oracles = {"cross_entropy": F.cross_entropy, "nll": F.nll_loss}
            if soft or "label_smoothing" in options:
                del oracles["nll"]
            for name, oracle in oracles.items():
                cases[f"{name}-{label}-{shape_name}"] = Case(
                    name, options, (normal(*shape),), (target,), partial(oracle, **given)
                )
    return cases


def _next_token() -> dict[str, Case]:
    tokens = np.random.default_rng(11).integers(0, 5, (3, 6))
    completion = np.where(np.arange(6) < [[2], [4], [5]], -100, tokens)
    cases = {}

    def oracle(y: torch.Tensor, t: torch.Tensor, **options: object) -> torch.Tensor:
        rows = y[:, :-1].reshape(-1, y.shape[-1])
        return F.cross_entropy(rows, t[:, 1:].reshape(-1), **options)

    for label, options, given in (
        ("plain", {}, tokens), ("completion", {}, completion),
        ("sum", {"reduction": "sum"}, completion), ("padding", {"ignore_index": 0}, tokens),
    ):  # fmt: skip
        cases[f"next_token-{label}"] = Case(
            "next_token", options, (normal(3, 6, 5),), (given,), partial(oracle, **options)
        )
    return cases


def _elementwise() -> dict[str, Case]:
    cases = {}
    weight, pos_weight = np.abs(normal(4, seed=8)), np.abs(normal(3, 1, seed=9)) * 3
    for shape_name, shape in SHAPES.items():
        x, target = (normal(*shape),), (normal(*shape, seed=4) * 2,)
        for reduction in ("mean", "sum"):
            how = {"reduction": reduction}
            for name, options, oracle in (
                ("mse", {}, F.mse_loss), ("l1", {}, F.l1_loss), ("huber", {}, F.huber_loss),
                ("huber", {"delta": 0.3}, F.huber_loss), ("smooth_l1", {}, F.smooth_l1_loss),
                ("smooth_l1", {"beta": 2.5}, F.smooth_l1_loss),
            ):  # fmt: skip
                given = how | options
                key = "-".join([name, reduction, *map(str, options), shape_name])
                cases[key] = Case(name, given, x, target, partial(oracle, **given))
        share = (np.random.default_rng(7).random(shape, np.float32),)
        for label, options in {
            "plain": {}, "sum": {"reduction": "sum"}, "pos_weight": {"pos_weight": 3.0},
            "weight": {"weight": 0.25, "reduction": "sum"},
        }.items():  # fmt: skip
            cases[f"bce_with_logits-{label}-{shape_name}"] = Case(
                "bce_with_logits", options, x, share, _bce(options)
            )
    arrays = {"weight": weight, "pos_weight": pos_weight}
    share = (np.random.default_rng(7).random((2, 3, 4), np.float32),)
    cases["bce_with_logits-arrays"] = Case(
        "bce_with_logits", arrays, (normal(2, 3, 4),), share, _bce(arrays)
    )
    return cases


def _bce(options: Mapping[str, object]) -> TorchLoss:
    given = {
        key: value if key == "reduction" else torch.as_tensor(value).double()
        for key, value in options.items()
    }
    return partial(F.binary_cross_entropy_with_logits, **given)


def kl(y: torch.Tensor, q: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Mean divergence of the rows of [N, C], from probabilities that already are tempered."""
    return F.kl_div(F.log_softmax(y / temperature, 1), q, reduction="batchmean") * temperature**2


def _rows(y: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = [v.movedim(1, -1).reshape(-1, y.shape[1]) for v in (y, t)]
    return flat[0], flat[1]


def _from_logits(y: torch.Tensor, t: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    y, t = _rows(y, t)
    return kl(y, F.softmax(t / temperature, 1), temperature)


def _from_probabilities(y: torch.Tensor, t: torch.Tensor, temperature: float) -> torch.Tensor:
    y, t = _rows(y, t)
    power = t ** (1 / temperature)
    return kl(y, power / power.sum(1, keepdim=True), temperature)


def _distillation() -> dict[str, Case]:
    cases = {}
    for temperature in (1.0, 4.0):
        options: dict[str, object] = {"temperature": temperature}
        soft = options | {"teacher": "probabilities"}
        for shape_name, shape in SHAPES.items():
            key, xs = f"{temperature:g}-{shape_name}", (normal(*shape),)
            scores, shares = (normal(*shape, seed=6) * 2,), (probabilities(*shape),)
            oracle = partial(_from_logits, temperature=temperature)
            cases[f"kl_div-logits-{key}"] = Case("kl_div", options, xs, scores, oracle)
            oracle = partial(_from_probabilities, temperature=temperature)
            cases[f"kl_div-probabilities-{key}"] = Case("kl_div", soft, xs, shares, oracle)

    cases["kl_div-sum"] = Case(
        "kl_div", {"reduction": "sum"}, (normal(6, 5),), (normal(6, 5, seed=6),),
        lambda y, t: _from_logits(y, t) * len(y),
    )  # fmt: skip

    def mixed_sum(y: torch.Tensor, labels: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        soft = _from_probabilities(y, t, 2) * len(y)
        return 0.5 * soft + 0.5 * F.cross_entropy(y, labels, reduction="sum")

    cases["distillation-probabilities-sum"] = Case(
        "distillation", {"reduction": "sum", "teacher": "probabilities"}, (normal(6, 5),),
        (labels((6, 5)), probabilities(6, 5)), mixed_sum,
    )  # fmt: skip

    def mixed(y: torch.Tensor, labels: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return 0.7 * _from_logits(y, t, 3) + 0.3 * F.cross_entropy(y, labels, ignore_index=-1)

    for shape_name in ("vector", "sequence"):
        shape = SHAPES[shape_name]
        cases[f"distillation-{shape_name}"] = Case(
            "distillation", {"alpha": 0.7, "temperature": 3.0, "ignore_index": -1},
            (normal(*shape),), (labels(shape, -1), normal(*shape, seed=6)), mixed,
        )  # fmt: skip
    return cases


def _metric() -> dict[str, Case]:
    cases = {}
    three = tuple(normal(8, 6, seed=seed) for seed in (1, 2, 3))
    for label, options in {
        "plain": {}, "sum": {"reduction": "sum", "margin": 0.5}, "norm-1": {"p": 1, "margin": 2.0},
        "swap": {"swap": True},
    }.items():  # fmt: skip
        oracle = partial(F.triplet_margin_loss, **options)
        cases[f"triplet_margin-{label}"] = Case("triplet_margin", options, three, (), oracle)
    together = np.array([1, 0, 0, 1, 1, 0, 0, 1], np.float32)

    def contrastive(a: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        d = F.pairwise_distance(a, b)
        return (t * d**2 + (1 - t) * F.relu(4 - d) ** 2).mean()

    cases["contrastive"] = Case("contrastive", {"margin": 4.0}, three[:2], (together,), contrastive)

    cases["contrastive-sum"] = Case(
        "contrastive", {"margin": 4.0, "reduction": "sum"}, three[:2], (together,),
        lambda a, b, t: contrastive(a, b, t) * len(a),
    )  # fmt: skip

    def info_nce(q, k, *, normalize=True, symmetric=False, reduction="mean"):
        if normalize:
            q, k = F.normalize(q), F.normalize(k)
        logits = q @ k.T / 0.5
        own = torch.arange(len(q))
        forth = F.cross_entropy(logits, own, reduction=reduction)
        return (forth + F.cross_entropy(logits.T, own)) / 2 if symmetric else forth

    settings = {"info_nce-sum": {"reduction": "sum"}}
    for normalize, symmetric in itertools.product((True, False), repeat=2):
        label = f"info_nce{'-normalize' * normalize}{'-symmetric' * symmetric}"
        settings[label] = {"normalize": normalize, "symmetric": symmetric}
    for label, given in settings.items():
        options = {"temperature": 0.5, **given}
        cases[label] = Case("info_nce", options, three[:2], (), partial(info_nce, **given))
    return cases


CTC_LABELS = np.array([[1, 1, 2, 0], [2, 3, 0, 0], [3, 3, 3, 1]])
"""Repeated labels; what lies behind a length does not count."""
CTC_LENGTHS = np.array([9, 7, 8]), np.array([3, 2, 4])


def ctc_case(reduction: str = "mean", blank: int = 0, layout: str = "TNC") -> Case:
    """Nine steps of five classes for three samples."""
    options = {"reduction": reduction, "blank": blank, "layout": layout}
    found = CTC_LABELS if blank == 0 else CTC_LABELS.clip(0, 3)
    x = normal(*((9, 3, 5) if layout == "TNC" else (3, 9, 5)))

    def oracle(y: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        log_p = F.log_softmax(y if layout == "TNC" else y.transpose(0, 1), 2)
        return F.ctc_loss(log_p, *targets, blank=blank, reduction=reduction)

    return Case("ctc", options, (x,), (found, *CTC_LENGTHS), oracle)


def _classes_last(cases: dict[str, Case]) -> dict[str, Case]:
    """The same numbers with the classes on the last axis."""
    found = {}
    for name, case in cases.items():
        axes = case.xs[0].ndim

        def oracle(y: torch.Tensor, *t: torch.Tensor, case: Case = case) -> torch.Tensor:
            axes = y.ndim
            return case.oracle(*(v.movedim(-1, 1) if v.ndim == axes else v for v in (y, *t)))

        xs, targets = (
            tuple(np.moveaxis(v, 1, -1) if v.ndim == axes else v for v in each)
            for each in (case.xs, case.targets)
        )
        options = {**case.options, "layout": "NLC"}
        found[f"{name}-last"] = Case(case.name, options, xs, targets, oracle)
    return found


_FIRST = _classification() | _distillation()
_MOVED = ("cross_entropy-all-image", "nll-weight-sequence", "cross_entropy-plain-vector")
_TAUGHT = [
    next(n for n, c in _FIRST.items() if c.name == loss and c.xs[0].ndim > 2)
    for loss in ("kl_div", "distillation")
]

CASES = (
    _classes_last({name: _FIRST[name] for name in (*_MOVED, *_TAUGHT)})
    | _classification()
    | _next_token()
    | _elementwise()
    | _distillation()
    | _metric()
    | {"ctc": ctc_case()}
)
