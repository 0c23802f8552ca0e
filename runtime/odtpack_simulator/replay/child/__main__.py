"""The process in which a replay trains: ``python -m odtpack_simulator.replay.child JOB.json``.

It speaks to its parent in lines of JSON on standard output (see ``job.py``).
Running out of the memory it was given is an outcome and is reported like one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from odtpack_runtime.apart.child import die_with_parent
from odtpack_runtime.errors import OdtpackError, out_of_memory
from odtpack_simulator.memory.process_memory import lift_limit
from odtpack_simulator.replay.child.training_run import train
from odtpack_simulator.replay.job import Job


def main(arguments: list[str]) -> int:
    """Run one job. The exit code is 0 whenever the outcome was reported in a message."""
    # Standard output is for messages: what libraries print goes to standard error.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    die_with_parent()

    def send(event: str, **content: Any) -> None:
        channel.write(json.dumps({"event": event, **content}, allow_nan=False) + "\n")
        channel.flush()

    try:
        job = Job.read(Path(arguments[0]))
        if job.task == "train":
            train(job, send)
        else:
            from odtpack_simulator.replay.child.timing_run import time_steps

            time_steps(job, send)
    except BrokenPipeError:
        return 1  # nothing reads the pipe any more
    except Exception as error:
        lift_limit()
        if out_of_memory(error):
            send("out-of-memory", message=_first_line(error))
        elif isinstance(error, OdtpackError):
            send("error", code=error.code, what=error.what, where=error.where, hint=error.hint)
        else:
            send("crash", message=f"{type(error).__name__}: {_first_line(error)}")
    return 0


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
