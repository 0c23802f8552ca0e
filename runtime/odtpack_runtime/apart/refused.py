"""Whether an error means that memory was refused."""

from __future__ import annotations

from odtpack_runtime.errors import OdtpackError

_ALLOCATION_FAILED = (
    "bad_alloc",
    "bad allocation",
    "failed to allocate",
    "cannot allocate memory",
    "std::length_error",
)
"""How ONNX Runtime, C++ and the system word that memory was refused, in lower case."""


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that memory was refused."""
    while error is not None:
        if isinstance(error, MemoryError) or says_refused(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def says_refused(text: str) -> bool:
    """Whether a message says that memory was refused."""
    return any(words in text.lower() for words in _ALLOCATION_FAILED)


def too_large(limit: int) -> OdtpackError:
    """Return the error for models that take more memory than they are given."""
    return OdtpackError(
        "models-memory", f"A step on the models takes more than {limit / 2**30:.3g} GiB of memory."
    )
