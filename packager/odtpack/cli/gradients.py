"""``odtpack compare-gradients``: one step of a package beside PyTorch's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from odtpack.cli import _console, _options
from odtpack.cli._options import argument, option, takes_spec


@takes_spec(before="as_json")
def compare_gradients(
    path: Annotated[Path, argument("PKG|MODEL.onnx", "A package, or a model to build one from.")],
    torch: Annotated[
        str,
        option(
            "Your file, and a function in it that computes one step in PyTorch and returns the "
            "module, the loss (a scalar tensor) and a dict of all inputs, the target included, by "
            "the names of the model. The file is run.",
            "FILE.py:FUNCTION",
        ),
    ],
    as_json: Annotated[bool, _options.AS_JSON] = False,
    **given: Any,
) -> None:
    """Compare one step of a package with PyTorch's own, and say why parameters differ.

    Takes the options of build for a MODEL.onnx. Exit code 0 if every gradient is PyTorch's, 1 if
    one differs. Needs PyTorch: pip install torch.
    """
    from odtpack.cli._options import overlay
    from odtpack.cli._twin import compared, read_twin
    from odtpack_runtime.files.scratch import scratch_folder
    from odtpack_runtime.package.package import Package

    _console.results(as_json=as_json)
    twin = read_twin(torch)
    if path.is_dir():
        found = compared(Package.open(path), twin)
    else:
        from odtpack.build import build

        spec = overlay({"model": path, **given}, None, "compare-gradients")
        with scratch_folder("gradients") as folder:
            build(dataclasses.replace(spec, self_check=False), folder)
            found = compared(Package.open(Path(folder)), twin)
    _console.say(f"loss {found['loss']:.5g} in the package, {found['torch_loss']:.5g} in PyTorch")
    for each in found["different"]:
        _console.say(f"{each['name']} differs by {each['error']:.2g} of its norm", style="bold")
        _console.say(f"  {each['why']}")
    count = len(found["equal"])
    _console.say(f"{count} of {count + len(found['different'])} gradients are those of PyTorch")
    if found["not_compared"]:
        _console.say(f"not compared: {', '.join(found['not_compared'])}")
    _console.json_result(as_json, {"path": str(path), **found})
    if found["different"]:
        raise typer.Exit(_options.NOT_MET)
