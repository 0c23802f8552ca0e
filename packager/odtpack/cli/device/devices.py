"""``odtpack devices``: the profiles that ship, one's own checked, and one made of this machine."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import odtpack_simulator as sim
from odtpack.cli import _completion, _console
from odtpack.cli._options import Json, command, group

if TYPE_CHECKING:
    from odtpack_simulator.device.profile_check import ProfileReport


devices = group(
    "devices",
    "List, show, check, measure and import device profiles.",
    "odtpack devices list",
    "odtpack devices show pixel-8a",
)


@command(devices, "list")
def list_devices() -> list[Json]:
    """List the device profiles that ship with odtpack.

    Examples:
        odtpack devices list
        odtpack devices list --json
    """
    from odtpack_simulator.values.units import format_bytes

    _console.results()
    profiles = [sim.load_profile(name) for name in sim.list_profiles()]
    rows = []
    for profile in profiles:
        limit, threads = profile.memory_limit_bytes(), profile.training_threads()
        rate = profile.gemm_flops(threads)
        rows.append(
            (
                profile.name,
                profile.title,
                profile.os,
                "unknown" if limit is None else format_bytes(limit),
                "unknown" if rate is None else f"{rate.typical / 1e9:.3g} GFLOPS",
                "unknown" if threads is None else str(threads),
                "yes" if profile.validated else "no",
            )
        )
    header = ("Name", "Device", "System", "App memory", "fp32 GEMM", "Threads", "Validated")
    _console.table(rows, header, figures="App memory,fp32 GEMM,Threads")
    _console.say("odtpack devices show NAME names the source of every figure.")
    return [_summary(profile) for profile in profiles]


@command(devices, "show")
def show_device(device: Annotated[str, ("autocompletion", _completion.devices)]) -> Json:
    """Show every figure of a device profile.

    Parameters:
        device NAME|FILE: A shipped profile, or the path of a .toml file.

    Examples:
        odtpack devices show pixel-8a
        odtpack devices show ./phone.toml --json
    """
    _console.results()
    profile = sim.load_profile(device)
    _console.say(f"{profile.title} ({profile.name})", style="bold")
    _console.say(f"  {profile.soc or 'chip not named'}, {profile.os}")
    if not profile.validated:
        _console.say("  not validated: times it predicts were never compared with the device")
    figures = profile.figures()
    width = max(len(figure.key) for figure in figures)
    for figure in figures:
        kind = "" if figure.value is None else f"  ({figure.kind})"
        text = figure.text.replace(" cores", "")  # the key says what is counted
        _console.say(f"{figure.key:<{width}}  {text}{kind}")
        _console.say(f"    {figure.source}", style="dim")
    return _with_figures(profile)


@command(devices, "check")
def check_devices(
    files: Annotated[list[str], ("autocompletion", _completion.devices)],
) -> tuple[list[Json], int]:
    """Check device profiles.

    Reports errors with their place (exit code 2). For a valid profile, lists what a simulation can
    judge, what it cannot and which figures are missing, and suspicious values.

    Parameters:
        files FILE: Paths of .toml files, or names of shipped profiles.

    Examples:
        odtpack devices check my-phone.toml
        odtpack devices check phone.toml tablet.toml --json
    """
    from odtpack_runtime.errors import OdtpackError
    from odtpack_simulator.device.profile_check import check_profile

    _console.results()
    entries: list[dict[str, Any]] = []
    for file in files:
        try:
            report = check_profile(sim.load_profile(file))
        except OdtpackError as error:
            _console.error(error.code, error.what, where=error.where, hint=error.hint)
            problem = {k: getattr(error, k) for k in ("code", "what", "where", "hint")}
            entries.append({"file": file, "valid": False, "error": problem, "report": None})
        else:
            _say_report(file, report)
            content = report.model_dump(mode="json")
            entries.append({"file": file, "valid": True, "error": None, "report": content})
    return entries, 0 if all(entry["valid"] for entry in entries) else 2


def _say_report(file: str, report: ProfileReport) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    _console.say(f"{file} is a valid profile: {report.name}", style="bold")
    _console.say(f"  figures     {kinds}")
    _console.say(f"  judged      {', '.join(report.judged) or 'nothing'}")
    for item in report.not_judged:
        _console.say(f"  not judged  {item.subject}, for lack of {' and '.join(item.lacking)}")
        for why in dict.fromkeys(item.why):
            _console.say(f"                {why}", style="dim")
    _console.warn(*report.warnings)


@command(devices, "measure")
def measure_devices(
    *,
    out: Path,
    name: str = "local/machine",
    title: str = "This machine",
    threads: int | None = None,
    target: Literal["webgpu"] | None = None,
) -> Json:
    """Measure this machine, and write its profile.

    Measures matrix products, a convolution, memory bandwidth, the allocator and the storage
    that the file is written to, in less than two minutes. Run nothing else meanwhile.

    Parameters:
        out FILE.toml: Profile to write. The storage of its folder is measured.
        name VENDOR/DEVICE: Name of the profile.
        title TEXT: Display name.
        threads N: Threads for training. [default: one per performance core]
        target: GPU to measure as well, through its provider.

    Examples:
        odtpack devices measure --out my-machine.toml
        odtpack devices measure --out edge.toml --name acme/edge-1 --title 'Edge 1' --threads 4
    """
    from odtpack_simulator.measure.host import BUSY
    from odtpack_simulator.measure.measured_profile import measure_device

    _check_name(out)
    with _console.Progress("measuring this machine") as progress:
        profile = measure_device(
            out.parent, name=name, title=title, threads=threads, gpu=target,
            on_progress=progress.update,
        )  # fmt: skip
    _write(profile, out, "measure", "no measurement shows")
    if any(BUSY in figure.source for figure in profile.figures()):
        _console.warn(f"{BUSY}: measure again while nothing else runs")
    return _finish(profile, out)


@command(devices, "import")
def import_device(
    measured: Path,
    *,
    out: Path | None = None,
    name: str = "local/device",
    title: str | None = None,
    system: Literal["android", "ios", "linux", "macos", "windows", "web"] | None = None,
    like: Annotated[str | None, ("autocompletion", _completion.devices)] = None,
) -> Json:
    r"""Write a profile from what a kit measured on a phone.

    Every kit has a benchmark that an app can run on its device; it writes JSON. The profile
    has validated = true, and intervals from the spread of the repetitions.

    Parameters:
        measured MEASURED.json: Output of a training kit's benchmark on the device.
        out FILE.toml: Profile to write. [default: MEASURED.toml in the current folder]
        name VENDOR/DEVICE: Name of the profile.
        title TEXT: Display name. [default: from the file]
        system: Operating system, if the file does not name it.
        like NAME|FILE: Profile of the same device, for figures that were not measured.

    Examples:
        odtpack devices import measured.json --out pixel.toml --name google/pixel-8a \
          --title 'Pixel 8a' --os android --like pixel-8a
    """
    from odtpack_simulator.measure.measured_profile import imported_profile, load_measurements

    out = out or Path(f"{measured.stem}.toml")
    _check_name(out, measured)
    content = load_measurements(measured)
    profile = imported_profile(
        content,
        name=name,
        title=title or content.device or "Measured device",
        system=system,
        like=None if like is None else sim.load_profile(like),
    )
    _write(profile, out, "import", "the benchmark does not measure")
    return _finish(profile, out)


def _check_name(out: Path, *inputs: Path) -> None:
    from odtpack.cli._files import check_writable
    from odtpack_runtime.errors import OdtpackError

    if out.suffix != ".toml":
        what = f"--out {str(out)!r} does not end in .toml, by which a profile is known"
        hint = f"--out {quote(str(out.with_suffix('.toml')))}"
        raise OdtpackError("profile-suffix", what, hint=hint)
    check_writable(out, "--out", inputs)


def _write(profile: sim.DeviceProfile, out: Path, command: str, unknown: str) -> None:
    from odtpack.cli._files import write_file
    from odtpack_simulator.device.profile import profile_toml

    comment = (
        f"Made by odtpack devices {command}. What {unknown} is unknown: fill it in\nwhere you know "
        "it, with its kind (measured, published or assumed) and its source."
    )
    write_file(out, profile_toml(profile, comment=comment).encode())


def _finish(profile: sim.DeviceProfile, out: Path) -> Json:
    """Say what the new profile is good for."""
    from odtpack_simulator.device.profile_check import check_profile

    _say_report(str(out), check_profile(profile))
    return _with_figures(profile)


def _with_figures(profile: sim.DeviceProfile) -> Json:
    figures = [figure.model_dump(mode="json") for figure in profile.figures()]
    return {**_summary(profile), "figures": figures}


def _summary(profile: sim.DeviceProfile) -> Json:
    names = ("name", "title", "vendor", "soc", "os", "validated", "digest")
    own = {name: getattr(profile, name) for name in names}
    return {**own, "app_memory_foreground_bytes": profile.memory_limit_bytes()}
