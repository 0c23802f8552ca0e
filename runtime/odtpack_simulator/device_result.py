"""What the shared measurements say about one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odtpack_simulator.campaign.campaign import run_campaign
from odtpack_simulator.device.app_footprint import RUNTIME_LIBRARY_BYTES, AppFootprint
from odtpack_simulator.device.kits import Kit
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.latency.latency import HostTiming, carry
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.memory_phases import MemoryPlan
from odtpack_simulator.replay.limits_search import HELD_STEPS, LimitOutcome, Peaks
from odtpack_simulator.replay.replay import ReplayResult, final_loss
from odtpack_simulator.result.result import DeviceMemory, DeviceResult, DeviceTraining, Policy
from odtpack_simulator.values.quantities import Quantity
from odtpack_simulator.values.units import format_bytes


@dataclass(frozen=True, slots=True)
class AppOnDevice:
    """The app on one device, before anything is measured."""

    profile: DeviceProfile  # The device
    policy: Policy  # How the app trains
    kit: Kit  # What it trains with
    sessions: SessionUse  # How the kit's sessions allocate memory, and of which models they are
    footprint: AppFootprint  # What the app holds besides the training

    @property
    def limit(self) -> int | None:
        """What the device grants the app's process, in bytes; None if unknown."""
        policy = self.policy
        return self.profile.memory_limit_bytes(policy.state, entitled=policy.entitled)

    @property
    def room(self) -> int | None:
        """What the limit leaves a training; None if the limit is unknown."""
        others = self.footprint.nbytes + RUNTIME_LIBRARY_BYTES
        return None if self.limit is None else max(0, self.limit - others)


def device_result(
    app: AppOnDevice,
    plan: MemoryPlan,
    peaks: Peaks,
    free: ReplayResult,
    settled: Mapping[int, LimitOutcome],
    timing: HostTiming,
    steps: Sequence[int],
) -> DeviceResult:
    """Everything about one device, not yet judged. Nothing is run."""
    # `settled`: The limits that replays were held to: what is left for a training.
    profile = app.profile
    held = settled.get(app.room) if app.room is not None else None
    latency = carry(timing, profile)
    return DeviceResult(
        name=profile.name,
        title=profile.title,
        os=profile.os,
        validated=profile.validated,
        profile_digest=profile.digest,
        memory=_memory(app, plan, peaks, held),
        latency=latency,
        campaign=run_campaign(
            profile,
            latency,
            app.policy,
            steps=steps,
            checkpoint_bytes=timing.checkpoint_bytes,
            curve=free.curve,
        ),
        training=_training(app.limit, free, held),
        figures=profile.figures(),
    )


def _memory(
    app: AppOnDevice,
    plan: MemoryPlan,
    peaks: Peaks,
    held: LimitOutcome | None,
) -> DeviceMemory:
    profile, policy = app.profile, app.policy
    limit = profile.memory_limit(policy.state, entitled=policy.entitled)
    entitled = profile.memory.app_limit_entitled
    foreground = policy.state == "foreground"
    killed = held is not None and held.run.outcome == "killed"
    measured = held.run.peak_bytes if held is not None and held.exact else peaks.nbytes
    return DeviceMemory(
        limit_bytes=app.limit,
        limit_low_bytes=None if limit is None else int(limit.interval("bytes").low),
        limit_kind=limit.kind if limit else None,
        limit_source=limit.source if limit else None,
        limit_state=policy.state,
        limit_entitled=policy.entitled and foreground and profile.has_entitled_limit,
        entitled_limit_bytes=(
            int(entitled.interval("bytes").typical)
            if isinstance(entitled, Quantity) and foreground
            else None
        ),
        predicted_peak_bytes=plan.peak.nbytes,
        measured_peak_bytes=None if killed else measured,
        outcome="killed" if killed else "not judged",
        held=held.run.limit_method if held is not None and held.exact else None,
        held_bytes=held.run.limit_bytes if held is not None else None,
        warning_bytes=profile.warning_bytes(policy.state, entitled=policy.entitled),
        unmeasured_bytes=plan.unmeasured_bytes(peaks.phases),
        phase=plan.highest_phase(peaks.phases),
        app_bytes=app.footprint.nbytes,
        app_kind=app.footprint.kind,
        app_source=app.footprint.source,
        runtime_bytes=RUNTIME_LIBRARY_BYTES,
        kit=app.kit,
        sharing=app.sessions.sharing,
        detail=_ending(held) if held is not None and killed else "",
    )


def _ending(held: LimitOutcome) -> str:
    """How the replay ended, and at which limit where it was not this one."""
    if held.exact or held.run.limit_bytes is None:
        return held.run.detail
    return f"held to {format_bytes(held.run.limit_bytes)}, which is more: {held.run.detail}"


def _training(limit: int | None, free: ReplayResult, held: LimitOutcome | None) -> DeviceTraining:
    if held is not None and held.run.outcome == "killed":
        run = held.run
        return DeviceTraining(
            outcome="killed",
            steps_done=run.steps_done,
            final_loss=final_loss(run),
            detail=_ending(held),
        )
    if limit is None:
        detail = "the limit is unknown: trained without one"
    elif held is None:
        detail = "trained without a limit: this one is far above what was needed"
    elif held.run.detail:
        detail = held.run.detail
    elif held.exact:
        detail = f"held to the limit for {HELD_STEPS} steps, loading, evaluation and saving"
    else:
        lower = format_bytes(held.run.limit_bytes or 0)
        detail = f"held to {lower}, which is less, for {HELD_STEPS} steps"
    return DeviceTraining(
        outcome="completed",
        steps_done=free.steps_done,
        final_loss=final_loss(free),
        detail=detail,
    )
