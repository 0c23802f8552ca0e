"""What can be chosen about a package. This module imports nothing large, for the command line."""

from __future__ import annotations

from typing import Final, Literal, get_args

Runtime = Literal["onnxruntime", "ort-training"]
"""What runs a package."""

STOCK: Final = "onnxruntime"
ORT_TRAINING: Final = "ort-training"
"""onnxruntime-training, whose own operators accumulate and update in place."""

Sessions = Literal["fast", "small"]
"""How the sessions of a package come by their memory: see :data:`SESSIONS`."""

SESSIONS: Final[dict[Sessions, dict[str, bool]]] = {
    "fast": {"shared_allocator": True},
    "small": {"arena": False},
}
"""Setting -> fields of :class:`odtpack_runtime.package.manifest_device.SessionInfo`. What was
measured is in docs/adr/0012.

``fast``: all sessions of a training take their memory from one arena. What one has freed the
next one uses, and what an app holds does not hang on the system's allocator. ``small``: no
arena, every tensor is the system's: what is freed goes back if the system takes it, which the
allocators of iOS and Android do, and glibc's below a threshold that the app sets. It takes
about a tenth less, and a step 1.6 to 2.6 times the time.
"""

StepModel = Literal["auto", "always", "never"]
"""Whether a package carries a step model; by itself, where its gradients are worth one."""

Storage = Literal["float16", "int8"]
"""How large frozen weights may be stored."""

AdapterKind = Literal["lora", "dora", "ia3", "bitfit", "prompt"]
"""What is trained beside a frozen model."""

BaseKind = Literal["int8", "int4", "nf4"]
"""How the frozen matrices of a model may be stored inside the models."""

Pool = Literal["mean", "cls", "none"]
"""How a head makes one vector of the tokens of a sequence."""

STORAGES: Final[tuple[Storage, ...]] = get_args(Storage)
