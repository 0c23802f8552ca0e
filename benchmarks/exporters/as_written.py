"""Where an exporter writes something else than its model, and the module that computes the same.

An adapter is trained beside that module then: the file is tried all the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import nn


def _root_mean_square(module: nn.Module) -> None:
    def forward(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    for each in module.modules():
        if type(each).__name__ == "OlmoLayerNorm":
            each.forward = types.MethodType(forward, each)


def _uncapped(module: nn.Module) -> None:
    for each in module.modules():
        if hasattr(each, "attn_logit_softcapping"):
            each.attn_logit_softcapping = None


_OPTIMUM = "optimum leaves out the soft cap of Gemma 2's attention"
_DIFFERENT: dict[tuple[str, str], tuple[str, Callable[[nn.Module], None]]] = {
    ("genai-*", "olmo"): ("genai's builder writes RMSNorm for OLMo's LayerNorm", _root_mean_square),
    ("optimum*", "gemma2"): (_OPTIMUM, _uncapped),
    ("olive-*", "gemma2"): (_OPTIMUM, _uncapped),
    ("ort-*", "gemma2"): (_OPTIMUM, _uncapped),
}
"""By patterns of the exporter and the model: what it writes, and what makes the module the same."""


def as_written(exporter: str, model: str, module: nn.Module) -> str | None:
    """Change a module to what the exporter writes; says what that is, None for the model itself."""
    for (pattern, name), (said, change) in _DIFFERENT.items():
        if name == model and fnmatchcase(exporter, pattern):
            change(module)
            return said
    return None
