"""Devices, latencies and campaigns in few words, for the tests of the campaign."""

from odtpack_simulator.campaign import FIGURES, run_campaign
from odtpack_simulator.device.profile import DeviceProfile, parse_profile
from odtpack_simulator.result import DeviceCampaign, DeviceLatency, EvaluationPoint, Policy
from odtpack_simulator.values.units import Interval

UNITS = {
    "sustained_fraction": "1", "time_to_throttle": "s", "background_window": "s", "power.idle": "W",
    "power.load": "W", "power.battery": "J", "storage.read": "B/s", "storage.write": "B/s",
}  # fmt: skip
MB = 1_000_000


def profile(**figures: float | tuple[float, float, float]) -> DeviceProfile:
    """A device with these figures, points or (low, typical, high), in the base units."""
    lines: dict[str, list[str]] = {"": [], "power": [], "storage": []}
    for name, figure in figures.items():
        section, _, key = name.rpartition("__")
        low, value, high = figure if isinstance(figure, tuple) else (figure,) * 3
        unit = UNITS[name.replace("__", ".")]
        lines[section].append(
            f"{key} = {{ value = {value}, low = {low}, high = {high}, "
            f'unit = "{unit}", kind = "assumed", source = "test" }}'
        )
    text = 'schema_version = 1\nname = "a/b"\ntitle = "B"\nvendor = "A"\nos = "android"\n'
    text += "validated = false\n" + "\n".join(lines.pop(""))
    for section, content in lines.items():
        text += f"\n[{section}]\n" + "\n".join(content)
    return parse_profile(text.encode(), "b.toml")


def ms(low: float, typical: float | None = None, high: float | None = None) -> Interval:
    typical = low if typical is None else typical
    return Interval(low=low, typical=typical, high=typical if high is None else high)


def latency(
    step: Interval, *, first: Interval | None = None, creation: Interval | None = None,
    load: Interval | None = None, save: Interval | None = None,
) -> DeviceLatency:  # fmt: skip
    return DeviceLatency(
        step_ms=step, first_step_ms=first or step, session_creation_ms=creation or ms(0),
        checkpoint_load_ms=load, checkpoint_save_ms=save, basis="test",
    )  # fmt: skip


FULL = latency(ms(100), first=ms(300), creation=ms(1000), load=ms(200), save=ms(400))


def campaign(
    device: DeviceProfile, times: DeviceLatency = FULL, policy: Policy | None = None, *,
    steps: int | list[int] = 100, checkpoint_bytes: int = MB, at: tuple[int, ...] = (),
) -> DeviceCampaign:  # fmt: skip
    return run_campaign(
        device, times, policy or Policy(), steps=[steps] if isinstance(steps, int) else steps,
        checkpoint_bytes=checkpoint_bytes,
        curve=[EvaluationPoint(step=step, loss=1.0, metric=0.5) for step in at],
    )  # fmt: skip


def triple(figure: Interval | None) -> tuple[float, float, float]:
    return figure.low, figure.typical, figure.high


def same(figure: Interval | None) -> float:
    """The figure where all scenarios agree."""
    low, typical, high = triple(figure)
    assert low == typical == high
    return typical


def reasons(result: DeviceCampaign) -> dict[str, str]:
    names = [entry.figure for entry in result.not_judged]
    assert len(names) == len(set(names))
    null = {name for name in FIGURES if getattr(result, name) is None}
    assert set(names) == null
    return {entry.figure: entry.reason for entry in result.not_judged}
