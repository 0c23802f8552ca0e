"""What can be chosen about a package. This module imports nothing large, for the command line.

Losses and optimizers are found by their files, so that a new one is one new file: the command line
lists their names without importing one.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Literal, TypeVar, get_args

Runtime = Literal["onnxruntime", "webgpu", "ort-training"]
"""What runs a package."""

STOCK: Final = "onnxruntime"
WEBGPU: Final = "webgpu"
"""Stock ONNX Runtime, with models whose operators all run on its WebGPU provider."""

ORT_TRAINING: Final = "ort-training"
"""onnxruntime-training, whose own operators accumulate and update in place."""

Sessions = Literal["fast", "small"]
"""Memory allocation for the sessions of a package: see :data:`SESSIONS`."""

SESSIONS: Final[dict[Sessions, dict[str, bool]]] = {
    "fast": {"shared_allocator": True},
    "small": {"arena": False},
}
"""Setting -> fields of :class:`odtpack_runtime.package.records.SessionInfo`. What was
measured is in docs/adr/0012.

``fast``: all sessions of a training take their memory from one arena. What one has freed the
next one uses, and what an app holds does not depend on the system's allocator. ``small``: no
arena, every tensor is the system's: what is freed goes back if the system takes it, which the
allocators of iOS and Android do, and glibc's from ``MALLOC_MMAP_THRESHOLD_`` bytes on if the app
sets it. It takes about a tenth less, and a step 1.6 to 2.6 times the time.
"""

StepModel = Literal["auto", "always", "never"]
"""Whether a package has a step model; ``auto``: if its gradients take a megabyte or more."""

Precision = Literal["model", "mixed"]
"""What a training step computes in; ``model``: in the types that the model has."""

Storage = Literal["float16", "int8"]
"""How large frozen weights may be stored."""

AdapterKind = Literal["lora", "dora", "ia3", "bitfit", "prompt"]
"""What is trained beside a frozen model."""

BaseKind = Literal["int8", "int4", "nf4"]
"""How the frozen matrices of a model may be stored inside the models."""

Pool = Literal["mean", "cls", "none", "global", "flatten"]
"""How a head makes one vector of the tokens of a sequence."""

STORAGES: Final[tuple[Storage, ...]] = get_args(Storage)

ORT_SUFFIX: Final = ".ort"


class Style(StrEnum):
    """How a model in ORT format is optimized."""

    FIXED = "fixed"
    """Once, by the conversion: what the file holds is what runs."""
    RUNTIME = "runtime"
    """What is safe for every provider by the conversion; the rest is recorded, and applied
    by sessions that set ``session.enable_saved_runtime_optimizations``."""


class Platform(StrEnum):
    """Processors that a model may be optimized for; without one it fits all of them."""

    ARM = "arm"
    AMD64 = "amd64"


@dataclass(frozen=True)
class OrtFormat:
    """Which files each model becomes."""

    styles: tuple[Style, ...] = (Style.FIXED,)  # at least one
    platforms: tuple[Platform | None, ...] = (None,)  # at least one; None for all processors

    def variants(self) -> list[tuple[Style, Platform | None]]:
        """Return every combination, in the order of the fields."""
        return [(style, platform) for platform in self.platforms for style in self.styles]

    def names(self, stem: str) -> list[str]:
        """Return the names of the files that ``<stem>.onnx`` becomes."""
        return [self.name(stem, style, platform) for style, platform in self.variants()]

    def name(self, stem: str, style: Style, platform: Platform | None) -> str:
        """Return the name of a file: the reference's, with the platform if there are several."""
        middle = f".{platform}" if platform is not None and len(self.platforms) > 1 else ""
        late = ".with_runtime_opt" if style is Style.RUNTIME else ""
        return f"{stem}{middle}{late}{ORT_SUFFIX}"


class Mode(StrEnum):
    """What a build of ONNX Runtime is for."""

    TRAIN = "train"
    """Training, evaluation and optimizer model."""
    INFER = "infer"
    """The exported inference model."""
    BOTH = "both"


class Format(StrEnum):
    """Which files an app loads."""

    ORT = "ort"
    ONNX = "onnx"


class Types(StrEnum):
    """How a configuration limits types."""

    NONE = "none"
    OPERATOR = "operator"
    """Each operator to the types that the models feed to it."""
    GLOBAL = "global"
    """All operators to the types that stand anywhere in the models."""


T = TypeVar("T")


def module_names(package: str) -> tuple[str, ...]:
    """Names of the modules of a package, sorted; of what it holds nothing is imported."""
    spec = find_spec(package)
    folders = None if spec is None else spec.submodule_search_locations
    return tuple(sorted(found.name for found in pkgutil.iter_modules(folders) if not found.ispkg))


def declared_classes(package: str, base: type[T], attribute: str = "name") -> dict[str, type[T]]:
    """The class that each module of a package declares, by the name of the module."""
    found = {}
    for name in module_names(package):
        module = import_module(f"{package}.{name}")
        declared = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
            and not getattr(value, "__abstractmethods__", None)
        ]
        if len(declared) != 1 or getattr(declared[0], attribute, None) != name:
            msg = (
                f"{module.__name__} must declare one {base.__name__} whose {attribute} is {name!r}"
            )
            raise TypeError(msg)
        found[name] = declared[0]
    return found
