"""Sets up releases of ONNX Runtime, each in a virtual environment of its own.

``python scripts/old_runtimes.py 1.14 1.20`` leaves ``.venv-runtimes/1.14`` and so on. A release
has wheels for some versions of Python only; the newest of those that is installed is taken, from
PATH, from pyenv or from uv. What cannot be set up is said, and the others are.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".venv-runtimes"

TRAINED = ("1.14", "1.16", "1.17", "1.19", "1.20", "1.22", "1.24")
"""Releases on which ``make runtimes`` trains, besides the installed one."""

REFUSING = ("1.12", "1.13")
"""Releases that only show that what needs a newer one is refused."""

# The oldest and the newest minor version of Python 3 with wheels, by the release since which.
_PYTHONS = {
    (1, 8): (6, 9), (1, 12): (7, 10), (1, 15): (8, 11), (1, 17): (8, 12),
    (1, 20): (10, 13), (1, 23): (10, 13), (1, 24): (11, 14),
}  # fmt: skip
_FIRST_WITH_NUMPY_2 = (1, 19)


class NoPythonError(RuntimeError):
    """No installed Python has wheels of a release."""


def environment(release: str) -> Path:
    """The Python of an environment with a release such as 1.20, set up if it is not there."""
    folder = CACHE / release
    python = folder / "bin" / "python"
    numpy = "numpy" if _version(release) >= _FIRST_WITH_NUMPY_2 else "numpy<2"
    wanted = f"onnxruntime=={release}.*\n{numpy}\n"
    stamp = folder / ".ready"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"setting up {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([_python_for(release), "-m", "venv", folder], check=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--only-binary=:all:", *wanted.split()],
        check=True,
    )  # fmt: skip
    stamp.write_text(wanted)  # last, so that an interrupted set-up is done again
    return python


def _version(release: str) -> tuple[int, int]:
    major, minor = map(int, release.split("."))
    return major, minor


def _python_for(release: str) -> str:
    oldest, newest = _PYTHONS[max(r for r in _PYTHONS if r <= _version(release))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    for minor in range(newest, oldest - 1, -1):
        installed = [*pyenv.glob(f"3.{minor}.*/bin/python"),
                     *uv.glob(f"cpython-3.{minor}.*/bin/python3")]  # fmt: skip
        for candidate in (f"python3.{minor}", *sorted(map(str, installed))):
            if _works(candidate):
                return candidate
    raise NoPythonError(
        f"ONNX Runtime {release} has wheels for Python 3.{oldest} to 3.{newest}, and none of them "
        "is installed"
    )


@functools.cache
def _works(python: str) -> bool:
    """Whether it starts, which a shim of pyenv may not do, and makes environments."""
    if shutil.which(python) is None:
        return False
    check = [python, "-c", "import ensurepip, venv"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def main(releases: Sequence[str]) -> int:
    """Set up each release that can be; return 2 if one could not, whose error is printed."""
    failed = []
    for release in releases:
        try:
            environment(release)
        except NoPythonError as error:
            failed.append(f"{error}\n  help: pyenv install 3.10, or uv python install 3.10")
        except subprocess.CalledProcessError as error:
            said = f"ONNX Runtime {release} could not be installed\n  the command was: "
            failed.append(said + shlex.join(map(str, error.cmd)))
    print("".join(f"error: {each}\n" for each in failed), end="", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or (*REFUSING, *TRAINED)))
