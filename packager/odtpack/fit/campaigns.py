"""Time and energy of the whole training on each device, where the simulation left them out."""

from __future__ import annotations

from collections.abc import Mapping

from odtpack_runtime.simulator.campaign import run_campaign
from odtpack_runtime.simulator.profile import DeviceProfile
from odtpack_runtime.simulator.result import DeviceResult, NotJudged, SimulationResult

_WRITTEN = ("written_bytes", "written_bytes_per_day")


def with_campaigns(
    result: SimulationResult, profiles: Mapping[str, DeviceProfile]
) -> SimulationResult:
    """The same result in which every device has a campaign.

    Args:
        result: A simulation that was not judged.
        profiles: The devices by name.
    """
    return result.model_copy(
        update={"devices": [_with_campaign(d, profiles[d.name], result) for d in result.devices]}
    )


def _with_campaign(
    device: DeviceResult, profile: DeviceProfile, result: SimulationResult
) -> DeviceResult:
    if device.campaign is not None:
        return device
    size = result.latency_host.checkpoint_bytes
    campaign = run_campaign(
        profile,
        device.latency,
        result.policy,
        steps=result.data.steps,
        checkpoint_bytes=size or 0,
        curve=result.training.curve,
    )
    if size is None:
        reason = "the size of a checkpoint was not measured"
        unknown = [NotJudged(figure=name, reason=reason) for name in _WRITTEN]
        campaign = campaign.model_copy(
            update=dict.fromkeys(_WRITTEN)
            | {"not_judged": [n for n in campaign.not_judged if n.figure not in _WRITTEN] + unknown}
        )
    return device.model_copy(update={"campaign": campaign})
