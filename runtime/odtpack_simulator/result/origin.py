"""When a result was made, and from which commit."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from odtpack_simulator.result.base import Origin

_SECONDS = 5.0


def find_origin(folder: Path) -> Origin:
    """The time of now, and the commit that is checked out around a folder.

    A pipeline's own word for the commit (``GITHUB_SHA``, ``CI_COMMIT_SHA``) comes first.
    ``SOURCE_DATE_EPOCH``, in seconds, takes the place of the time.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    named = os.environ.get("GITHUB_SHA") or os.environ.get("CI_COMMIT_SHA")
    commit = (named or _checked_out(folder)).strip().lower()
    known = 7 <= len(commit) <= 64 and set(commit) <= set("0123456789abcdef")
    return Origin(commit=commit if known else None, date=now.isoformat(timespec="minutes"))


def _checked_out(folder: Path) -> str:
    """What git says; empty without it, or outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
