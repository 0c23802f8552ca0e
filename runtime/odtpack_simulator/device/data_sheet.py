"""What ONNX Runtime makes of a data sheet: shares of the published peaks that it reaches.

A data sheet has clocks, vector units and memory chips; a training has matrix products and
copies. How much of the one becomes the other depends on the kind of core and on ONNX
Runtime's kernels (MLAS), so the shares are here and not in each device's profile.

Matrix products, in share of the peak of fused multiply-adds at the highest clock:

- 0.83 through ONNX Runtime 1.31 on Zen 3 (93 of 112 GFLOPS at 3.5 GHz, one thread; 0.78 a
  core with two).
- 0.80 and 0.86 to 0.90 of one Cortex-A76 (Raspberry Pi 5, Rock 5B; 0.51 and 0.85 of all
  four), 0.80 of one Cortex-A72 and 0.62 of four: HPL in double precision, of which nearly all
  is matrix products (github.com/OpenMathLib/OpenBLAS issues 4581 and 4149).
- 0.60 of Cortex-A55, 0.48 to 0.57 of Cortex-A53: single-precision products that are tuned for
  these cores (the same, issue 3279 and pull request 2643). They issue in order, and wait for
  each load.

With SME, ONNX Runtime 1.23 and later hands products to KleidiAI, by which whole networks became
1.2 to 1.8 times as fast on M4 (github.com/microsoft/onnxruntime pull request 24346).

Copies by one thread reach 0.21 of the memory chips' peak on Raspberry Pi 4, 0.28 on Pi 5, 0.32
on QCS6490 and a half on A18 Pro, and never more than a core can have under way: 1.1 bytes per
cycle on Cortex-A53, 2.7 to 3.2 on Zen 3 (this library's own copies), 3 to 4.5 on Cortex-A78.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from odtpack_simulator.values.units import Interval

Extension = Literal["dotprod", "i8mm", "bf16", "sve", "sme", "avx2", "avx512", "vnni", "amx"]
"""Instructions for which ONNX Runtime has kernels of their own."""


@dataclass(frozen=True, slots=True)
class CoreKind:
    """What one kind of core reaches."""

    gemm: Interval  # Share of its peak, in a matrix product
    dram: Interval  # Share of the memory chips' peak, in a copy by one thread
    copy_bytes: Interval  # Bytes that it copies per cycle at most


_SHARE: Final = Interval.of(0.17, 0.28, 0.5)
_OUT_OF_ORDER: Final = Interval.of(0.55, 0.8, 0.95)
ARM: Final = CoreKind(_OUT_OF_ORDER, _SHARE, Interval.of(3, 5, 8))
IN_ORDER: Final = CoreKind(Interval.of(0.35, 0.55, 0.75), _SHARE, Interval.of(0.5, 1, 1.5))
APPLE: Final = CoreKind(_OUT_OF_ORDER, Interval.of(0.25, 0.5, 0.6), Interval.of(5, 8, 12))
X86: Final = CoreKind(_OUT_OF_ORDER, _SHARE, Interval.of(2, 3, 5))

_IN_ORDER_NAMES: Final = re.compile(r"A(?:35|53|55|510|520)\b")
_X86_NAMES: Final = re.compile(r"x86|EPYC|Ryzen|Xeon|Core\b.*\bi\d|Zen|Atom|Celeron|Pentium", re.I)
_X86_EXTENSIONS: Final = frozenset({"avx2", "avx512", "vnni", "amx"})

SME: Final = Interval.of(1.0, 1.5, 1.8)
"""Rate of products with SME over that without, of whole networks."""

_INT8: Final[tuple[tuple[str, Interval], ...]] = (
    # Multiply-adds per instruction over those of a single-precision one: 16 lanes in four for
    # SDOT, 32 for SMMLA; the low end is what packing and requantizing leave of it.
    ("amx", Interval.of(4, 8, 16)),
    ("i8mm", Interval.of(2.5, 4.5, 8)),
    ("vnni", Interval.of(2, 3, 4)),
    ("dotprod", Interval.of(1.7, 3, 4)),
    ("avx2", Interval.of(1, 1.6, 2)),
)
_INT8_PLAIN: Final = Interval.of(0.7, 1.2, 2)


def core_kind(core: str, vendor: str, extensions: Sequence[str]) -> CoreKind:
    """The kind of a core, from its name, its maker and the instructions it has."""
    if vendor == "Apple":
        return APPLE
    if not _X86_EXTENSIONS.isdisjoint(extensions) or _X86_NAMES.search(core):
        return X86
    return IN_ORDER if _IN_ORDER_NAMES.search(core) else ARM


def gemm_share(kind: CoreKind, extensions: Sequence[str]) -> Interval:
    """What a float32 product reaches, in share of the peak without SME; it may exceed 1 with it."""
    return kind.gemm.times(SME) if "sme" in extensions else kind.gemm


def int8_factor(extensions: Sequence[str]) -> Interval:
    """Operations per second of an int8 product over those of a float32 one."""
    factor = next((factor for name, factor in _INT8 if name in extensions), _INT8_PLAIN)
    if "sme" not in extensions:
        return factor
    # Of what float32 products gain by SME, these are only sure to have the plain part.
    return Interval.of(
        factor.low / SME.typical, factor.typical / SME.typical, factor.high / SME.typical
    )


def copy_rate(kind: CoreKind, dram: Interval, clock: Interval | None) -> Interval:
    """Bytes per second that one thread copies."""
    # `dram`: Peak of the memory chips in bytes per second.
    # `clock`: Of the fastest core in Hz; None if unknown.
    share = dram.times(kind.dram)
    if clock is None:
        return share
    most = clock.times(kind.copy_bytes)
    return Interval.of(
        min(share.low, most.low), min(share.typical, most.typical), min(share.high, most.high)
    )
