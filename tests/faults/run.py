"""Make one fault at each call of an action, and look at what it leaves.

``python -m tests.faults.run ACTION FOLDER --every 3``, in the environment of
:func:`tests.faults.inject.environment`. Each attempt is a fork of this process; it prints one
line of JSON, with what is wrong about its end, if anything is.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from odtpack_runtime import OdtpackError
from odtpack_runtime.files.atomic import UNSYNCED
from tests.faults.actions import ACTIONS, Action
from tests.faults.inject import FAULTS, REMOVE, Control, Fault

REFUSED, NO_MEMORY, ABORTED, CRASHED = 3, 4, 5, 6
_LONGEST_SECONDS = 300


def apart(call: Callable[[], object], log: Path) -> tuple[int, int]:
    """Run in a fork; return exit code and signal. What it prints goes to a file."""
    pid = os.fork()
    if pid == 0:
        code = CRASHED
        signal.alarm(_LONGEST_SECONDS)  # a fault must not make it wait for ever
        try:
            with log.open("wb") as stream:
                os.dup2(stream.fileno(), 2)
                os.dup2(stream.fileno(), 1)
            call()
            code = 0
        except OdtpackError as error:
            code = REFUSED
            sys.stderr.write(str(error))
        except MemoryError:
            code = NO_MEMORY
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return -1, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), 0


class Harness:
    """Makes the faults of one action in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.action: Action = ACTIONS[name]
        self.control = Control(Path(os.environ["ODTPACK_FAULTS"]))
        self.work, self.template, self.log = (folder / part for part in ("work", "start", "log"))
        self.template.mkdir(parents=True)
        self.action.prepare(self.template)
        self.start = self._look(self.template)
        self._fresh()
        # Here and not in a fork: what is imported late is imported once.
        self.action.act(self.work)
        self.end = self._look(self.work)
        self._fresh()
        self.allowed = {self.start, self.end, *self.action.between(self.work)}
        gc.collect()
        gc.freeze()  # no fork walks through what all share

    def count(self, fault: Fault) -> int:
        """Number of calls in which it can happen."""
        self._attempt(fault, 0)
        return int(self.control.block.counter)

    def fault(self, fault: Fault, at: int) -> dict[str, object]:
        """Make one, and say what came of it."""
        code, killed = self._attempt(fault, at)
        found: dict[str, object] = {"fault": fault.name, "at": at, "code": code, "signal": killed}
        left = self._look(self.work)
        wrong = ""
        if left not in self.allowed:
            wrong = f"left {left}"
        elif code == CRASHED:
            wrong = "no clear error"
        elif fault.harmless and (code != 0 or left != self.end):
            wrong = f"ended with {code}"
        elif code == 0 and left != self.end:
            wrong = "said nothing, and is not at its end"
        elif code == REFUSED and left == self.end != self.start and not self._said():
            wrong = "is at its end, and says that it failed"
        elif code == REFUSED and not fault.kinds & REMOVE and (hidden := self._hidden()):
            wrong = f"failed and left {hidden}"
        elif killed not in (0, signal.SIGKILL, signal.SIGABRT):
            wrong = f"signal {killed}"
        else:
            again, _ = apart(lambda: self.action.act(self.work), self.log)
            rubbish = [path.name for path in self.work.rglob(".*")]
            if again != 0 or self._look(self.work) != self.end:
                wrong = f"the next run ended with {again}"
            elif rubbish:
                wrong = f"left {rubbish}"
        if wrong:
            with contextlib.suppress(OSError):
                wrong += "\n" + self.log.read_text(errors="replace")[-2000:]
        return {**found, "wrong": wrong, "done": left == self.end}

    def _said(self) -> bool:
        """Whether an error says that what was to be written is there, or will be."""
        text = " ".join(self.log.read_text(errors="replace").split())
        return any(
            words in text for words in (UNSYNCED, "was written, and", "was interrupted, and")
        )

    def _hidden(self) -> list[str]:
        """Temporary files; the plan and the stage of a write that will be finished are none."""
        names = [path.name for path in self.work.rglob(".*")]
        return [name for name in names if "odtpack-plan" not in name and "-update-" not in name]

    def _attempt(self, fault: Fault, at: int) -> tuple[int, int]:
        self._fresh()
        block = self.control.block

        def act() -> None:
            block.armed = 1
            try:
                self.action.act(self.work)
            finally:
                block.armed = 0

        self.control.plan(self.work, fault, at)
        try:
            return apart(act, self.log)
        finally:
            block.armed = 0

    def _fresh(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work)

    def _look(self, folder: Path) -> str:
        try:
            return self.action.look(folder)
        except OdtpackError as error:
            return f"{error.code}: {error.what}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only every so manieth call")
    parser.add_argument("--fault", action="append", help="name of a fault; all by default")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    # Faults are this process's: a build's other one runs models, and writes nothing of a package.
    os.environ.pop("LD_PRELOAD", None)
    harness = Harness(arguments.action, arguments.folder)
    for fault in FAULTS:
        if arguments.fault and fault.name not in arguments.fault:
            continue
        calls = harness.count(fault)
        # From one fault to the next the calls that are left out are others.
        first = 1 + FAULTS.index(fault) % arguments.every
        for at in range(first, calls + 1, arguments.every):
            print(json.dumps({"calls": calls, **harness.fault(fault, at)}), flush=True)


if __name__ == "__main__":
    main()
