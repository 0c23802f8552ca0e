"""What an adapter shall be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from odtpack.arguments import check_choice, check_names, check_type
from odtpack.choices import AdapterKind
from odtpack.errors import OdtpackError

_LARGEST_SEED = 2**63 - 1
_LOW_RANK = ("lora", "dora")


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """An adapter, and the layers that it goes on.

    Attributes:
        kind: ``lora`` (Hu et al., 2021), ``dora`` (Liu et al., 2024), ``ia3`` (Liu et al., 2022),
            ``bitfit`` (Ben Zaken et al., 2021) or ``prompt`` (Lester et al., 2021).
        on: Patterns of the layers, by their names without ``.weight``; all if empty, which only
            ``bitfit`` takes. ``prompt`` goes on none.
        feedforward: ``ia3``: of those layers, patterns of the ones whose input is scaled.
        rank: ``lora``, ``dora``: rows of A and columns of B.
        alpha: ``lora``, ``dora``: B A counts ``alpha / rank`` times.
        dropout: ``lora``: share of the inputs that A does not see in a training step.
        seed: ``lora``, ``dora``: seed of A; ``prompt``: of its vectors.
        tokens: ``prompt``: vectors before the tokens of every sequence.

    Raises:
        OdtpackError: ``bad-adapter``: a value out of range, or one that the kind does not have;
            ``bad-argument``: a value of another type.
    """

    kind: AdapterKind
    on: tuple[str, ...] = ()
    feedforward: tuple[str, ...] = ()
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    seed: int = 0
    tokens: int = 8

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(AdapterKind))
        check_names("on", self.on)
        check_names("feedforward", self.feedforward)
        check_type("rank", self.rank, int, "8")
        check_type("seed", self.seed, int, "0")
        check_type("tokens", self.tokens, int, "8")
        check_type("alpha", self.alpha, (int, float), "16")
        check_type("dropout", self.dropout, (int, float), "0.1")
        if not 1 <= self.rank < 2**31:
            raise _bad(f"an adapter of rank {self.rank} has no parameters", "--rank 8")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise _bad(f"alpha is {self.alpha:g}; it must be a number above 0", "--alpha 16")
        if not 0 <= self.dropout < 1:
            raise _bad(
                f"the dropout is {self.dropout:g}; it must be from 0 to below 1",
                "--adapter-dropout 0.1",
            )
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise _bad(f"the seed is {self.seed}; it must be 0 or more", "--adapter-seed 0")
        if not 1 <= self.tokens < 2**31:
            raise _bad(f"a prompt of {self.tokens} vectors trains nothing", "--prompt-tokens 8")
        if self.on and self.kind == "prompt":
            raise _bad("prompt goes before the tokens, and on no layer", "--adapter prompt")
        if not self.on and self.kind not in ("bitfit", "prompt"):
            raise _bad(f"{self.kind} needs to know on which layers it goes", "--on '*.q_proj'")
        if self.feedforward and self.kind != "ia3":
            raise _bad(f"{self.kind} has no feedforward layers, only ia3 has", "--adapter ia3")
        if self.dropout and self.kind != "lora":
            raise _bad(f"{self.kind} has no dropout, only lora has", "--adapter lora")

    @property
    def scaling(self) -> float:
        """How often B A counts."""
        return self.alpha / self.rank

    @property
    def low_rank(self) -> bool:
        """Whether it has matrices A and B."""
        return self.kind in _LOW_RANK


def adapter_spec(kind: AdapterKind | None, settings: Mapping[str, Any]) -> AdapterSpec | None:
    """The adapter that options ask for; None if they ask for none.

    Args:
        kind: Its kind, or None.
        settings: The other attributes of :class:`AdapterSpec`.

    Raises:
        OdtpackError: As :class:`AdapterSpec`; or there are settings and no kind.
    """
    if kind is not None:
        return AdapterSpec(kind, **settings)
    fields = {field.name: field.default for field in dataclasses.fields(AdapterSpec)}
    given = [name for name, value in settings.items() if value != fields[name]]
    if given:
        raise OdtpackError(
            "option-not-used",
            f"{given[0]!r} is a setting of an adapter, and none is asked for",
            hint="name its kind: --adapter lora",
        )
    return None


def _bad(what: str, example: str) -> OdtpackError:
    return OdtpackError("bad-adapter", what, hint=f"write for example: {example}")
