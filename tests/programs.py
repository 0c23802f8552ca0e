"""Programs that are run to their end."""

import subprocess
import sys
from typing import Any


def ran(*words: object, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a command printed, which must end with this code if one is given."""
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, check=False, **options
    )
    assert code in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
    return done


def started(program: str, *words: object) -> subprocess.Popen[bytes]:
    """A Python program that runs on, and whose output is read."""
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)
