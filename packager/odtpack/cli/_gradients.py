"""Says which parameters would train in silence."""

from __future__ import annotations

from pathlib import Path

from odtpack.cli import _console


def report_zero_gradients(package: Path, data: Path) -> list[str]:
    """Run steps on sample data and warn of the parameters whose gradient stays zero.

    Raises:
        OdtpackError: The data do not fit the package.
    """
    from odtpack.cli import _fit
    from odtpack.errors import OdtpackError
    from odtpack_runtime.apart import worker as apart
    from odtpack_runtime.package.package import Package

    opened = Package.open(package)
    manifest = opened.manifest
    arrays = opened.load_data(data)
    samples = len(next(iter(arrays.values())))
    size = _fit.choose_batch_size(opened, None)
    if _fit.fixed_batch(opened) is None:
        size = min(size, samples)
    if samples < size:
        raise OdtpackError(
            "sample-too-small",
            f"the sample data have {samples} samples, and the models take batches of {size}",
            where=str(data),
            hint=f"pass a file with {size} samples or more",
        )
    files = [*(opened.path / file.path for file in manifest.files.all()), data]
    silent: list[str] = apart.call(
        "odtpack.cli._gradients:find_silent", apart.Limits.of(files), package=str(package),
        data=str(data), size=size,
    )  # fmt: skip
    for name in silent:
        _console.say(
            f"warning: the gradient of {name} is zero on {data}: it would not train", style="yellow"
        )
    if not silent:
        count = sum(parameter.role == "trainable" for parameter in manifest.parameters)
        _console.say(f"  on {data} each of {count} trained parameters gets a gradient")
    return silent


def find_silent(package: str, data: str, size: int) -> list[str]:
    """The parameters whose gradient stays zero; to be called apart, as it runs the models."""
    from odtpack_runtime.package.gradient_check import zero_gradients
    from odtpack_runtime.package.package import Package

    opened = Package.open(package)
    return list(zero_gradients(opened, opened.load_data(Path(data)), size))
