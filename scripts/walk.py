"""The way of one model through the files of a build, in visits.

    python -m scripts.walk

Traces a build of a small network with ``sys.setprofile``. A call from one file into another that
passes a model, a graph or a specification on is a visit; consecutive calls into one file are one
visit, and a loop is walked through once. A file that was visited before is revisited. Leaves stand
apart: files that import no other file of ours but ``errors``.
"""

import collections
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import onnx
import onnx_ir as ir

from odtpack import build
from odtpack.package.task import Graphs, Task
from odtpack.spec import BuildSpec
from scripts.harness import ROOT, scratch
from tests import zoo

PACKAGES = {"odtpack": "packager", "odtpack_runtime": "runtime", "odtpack_simulator": "runtime"}


def files() -> dict[str, set[str]]:
    """Each file of ours by its path, with the files that it imports, ``errors`` left out."""

    def path(module: str) -> str:
        place = ROOT.joinpath(PACKAGES[module.partition(".")[0]], *module.split("."))
        return str(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))

    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    return {
        path(module): {path(name) for name in names if name != "odtpack" and "errors" not in name}
        for module, names in imported.items()
    }


PASSED = (ir.Model, ir.Graph, onnx.ModelProto, onnx.GraphProto, Task, Graphs, BuildSpec)


class Walk:
    """Collects the visits of a thread while it is traced."""

    def __init__(self, shown: set[str]) -> None:
        self.visits: list[str] = []  # paths, in order
        self._shown = shown
        self._sites = collections.defaultdict[FrameType, set[tuple[int, str]]](set)
        self._last: dict[FrameType, str] = {}
        self._muted: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Take an event of ``sys.setprofile``."""
        if event == "return":
            self._sites.pop(frame, None)
            self._last.pop(frame, None)
            if frame is self._muted:
                self._muted = None
        path = frame.f_code.co_filename
        if event != "call" or self._muted is not None or path not in self._shown:
            return
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if code.co_name == "<module>" or not any(isinstance(each, PASSED) for each in given):
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename not in self._shown:
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename == path:
            if not self.visits:
                self.visits.append(path)
            return
        site = (caller.f_lineno, path)
        if site in self._sites[caller]:
            self._muted = frame  # the loop's next round
            return
        self._sites[caller].add(site)
        if self._last.get(caller) != path and self.visits[-1:] != [path]:
            self.visits.append(path)
        self._last[caller] = path


def trace(shown: set[str]) -> list[str]:
    """The files that a build visits, in order."""
    with scratch() as folder:
        path = folder / "model.onnx"
        onnx.save(zoo.mlp((4, 3, 2)), path)
        make = partial(build.build_package, path, loss="cross_entropy", train=["fc*"])
        make(folder / "warm")
        walk = Walk(shown)
        sys.setprofile(walk)
        try:
            make(folder / "package")
        finally:
            sys.setprofile(None)
    return walk.visits


def main() -> None:
    """Print visits and revisits by file, then the leaves."""
    imported = files()
    leaves = {path for path, names in imported.items() if not names}
    everything, visits = trace(set(imported)), trace(imported.keys() - leaves)

    def name(path: str) -> str:
        return Path(path).relative_to(ROOT).as_posix().partition("/")[2]

    for path, count in collections.Counter(visits).most_common():
        print(f"{count:>5}  {name(path)}")
    seen = sorted(map(name, leaves & set(everything)))
    revisits = len(visits) - len(set(visits))
    print(f"\n{len(visits)} visits, {revisits} of them revisits, leaves apart")
    print(f"{len(seen)} leaves were visited: {', '.join(seen)}")


if __name__ == "__main__":
    main()
