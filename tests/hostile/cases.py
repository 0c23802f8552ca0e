"""What a case of the corpus is, and the decision that every reader shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

READERS = ("python", "cpp", "kotlin", "swift", "node", "browser", "js", "csharp")
"""Names that ``stricter`` may have; ``js`` is both of JavaScript's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file or a folder, and what becomes of it.

    Attributes:
        name: Name of the case, and of its folder.
        action: ``open``: open the package with all checks. ``checkpoint``: read the file.
            ``session``: load the checkpoint, and make a training session of the package.
        package: Folder of the package, relative to the corpus.
        checkpoint: The checkpoint, relative to the corpus.
        codes: Codes that a refusal may have; none if it is accepted.
        stricter: Readers that refuse what others accept, and why.
    """

    name: str
    action: Literal["open", "checkpoint", "session"]
    package: str | None = None
    checkpoint: str | None = None
    codes: tuple[str, ...] = ()
    stricter: Mapping[str, str] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """The case as the index has it."""
        found: dict[str, Any] = {"name": self.name, "action": self.action}
        for key in ("package", "checkpoint"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        found["expect"] = "refuse" if self.codes else "accept"
        found["codes"] = list(self.codes)
        found["stricter"] = dict(self.stricter)
        return found


def everyone(why: str) -> dict[str, str]:
    """Any reader may refuse what Python accepts, or the other way round."""
    return dict.fromkeys(READERS, why)
