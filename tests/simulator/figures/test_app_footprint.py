"""What an app holds beside a training counts against the limit of its process."""

import re
from pathlib import Path

import pytest

from odtpack_simulator.device.app import (
    APP_FOOTPRINTS,
    RUNTIME_LIBRARY_BYTES,
    default_footprint,
    runtime_bytes,
)
from odtpack_simulator.device.profile import list_profiles, load_profile
from odtpack_simulator.figures.compare import compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.memory_plan import Item, MemoryPlan, Phase
from odtpack_simulator.reports import render_report
from odtpack_simulator.reports.simulation import drawn_bar
from odtpack_simulator.result import DeviceMemory, Policy, SimulationResult
from odtpack_simulator.simulation import _memory
from odtpack_simulator.values.figure import Check
from tests.refused import refused
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result
from tests.simulator.judged import check, judged

PIXEL = "google/pixel-8a"


def with_memory(result: SimulationResult, **changes: object) -> SimulationResult:
    (device,) = result.devices
    memory = DeviceMemory.model_validate(
        {**device.memory.model_dump(), "measured_peak_bytes": None, **changes}
    )
    return on_devices(result, memory=memory)


def limit_check(result: SimulationResult) -> Check:
    return check(result, "memory_limit")


def test_every_system_has_a_stated_default_with_its_source():
    for name in list_profiles():
        app = default_footprint(load_profile(name))
        assert app is APP_FOOTPRINTS[load_profile(name).os]
        assert app.kind in {"measured", "published", "assumed"}
        assert len(app.source) > 20


@pytest.mark.parametrize(
    ("room", "outcome"), [(103_000_000, "fits"), (102_999_999, "close"), (99_999_999, "over")]
)
def test_the_process_is_held_to_the_limit(room, outcome):
    limit = room + 150_000_000 + RUNTIME_LIBRARY_BYTES
    result = with_memory(
        make_result([PIXEL], app=True), predicted_peak_bytes=100_000_000, limit_bytes=limit,
        limit_low_bytes=limit, held_bytes=None,
    )  # fmt: skip
    found = judge(result)
    assert found.devices[0].memory.outcome == outcome
    assert limit_check(found).actual == 100_000_000 + 150_000_000 + RUNTIME_LIBRARY_BYTES
    words = "150 MB of the app (assumed) and 7.80 MB of ONNX Runtime's library"
    assert words in limit_check(found).message


@pytest.mark.parametrize(("text", "app"), [
    ('[budgets]\napp_footprint = "50 MB"', 50_000_000),
    ('[budgets]\napp_footprint = "50 MB"\n[class.android]\napp_footprint = "60 MiB"', 60 * 2**20),
    (
        '[class.android]\napp_footprint = "60 MB"\n' f'[device."{PIXEL}"]\napp_footprint = "70 MB"',
        70_000_000,
    ),
    ('[class.ios]\napp_footprint = "60 MB"', 150_000_000),
])  # fmt: skip
def test_the_narrowest_table_says_what_the_app_holds(text, app):
    budgets = parse_budgets(text.encode())
    (device,) = judge(make_result([PIXEL], app=True), budgets).devices
    assert device.memory.app_bytes == app
    assert budgets.footprint_of(load_profile(PIXEL)).nbytes == app


def test_where_the_budgets_say_it_the_report_names_the_line():
    budgets = parse_budgets(b'[budgets]\napp_footprint = "50 MB"', "limits.toml")
    found = judge(make_result([PIXEL], app=True), budgets)
    assert found.devices[0].memory.app_source == "limits.toml:2"
    assert "50.0 MB of the app (by the budgets)" in limit_check(found).message
    assert "limits.toml:2" in render_report(found, "html").decode()


def test_budgets_say_what_the_app_holds_also_where_others_said_it_before():
    """A result that was simulated with other budgets, in a baseline too."""
    measured = judged(make_result([PIXEL], app=True), '[budgets]\napp_footprint = "50 MB"')
    assert judge(measured) == measured  # without budgets it is the app that was measured for
    other = parse_budgets(b'[budgets]\nmemory_headroom = "-0 %"')
    again = judge(measured, other, baseline=measured)
    memory = again.devices[0].memory
    default = make_result([PIXEL], app=True).devices[0].memory
    assert (memory.app_bytes, memory.app_source) == (default.app_bytes, default.app_source)
    assert check(again, "memory_headroom").status == "pass"
    plain = judge(on_devices(make_result([PIXEL], app=True), memory={
        "runtime_bytes": memory.runtime_bytes
    }))  # fmt: skip
    note = "app around the training: 50.0 MB before, 150 MB now"
    for budgets, notes in ((None, [note]), (other, [])):
        found = compare(measured, plain, budgets)
        assert [note for note in found.notes if note.startswith("app ")] == notes
        (headroom,) = (f for _, f in found.figures() if f.metric == "memory_headroom")
        assert (headroom.direction == "same") == (budgets is not None)


@pytest.mark.parametrize("value", ["50", "50000000", '"50 s"', '"-5 MB"', "[1]"])
def test_it_needs_a_unit(value):
    text = f"[budgets]\napp_footprint = {value}"
    with refused("budgets-invalid", what="app_footprint"):
        parse_budgets(text.encode())


def test_a_replay_that_was_ended_is_not_judged_with_more_room():
    limit = 300_000_000
    result = make_result([PIXEL], app=True)
    runtime = runtime_bytes("kotlin", "android", result.devices[0].memory.predicted_peak_bytes)
    room = limit - 150_000_000 - runtime
    result = with_memory(
        result, limit_bytes=limit, runtime_bytes=runtime,
        limit_low_bytes=limit, outcome="killed", held_bytes=room,
    )  # fmt: skip
    assert limit_check(judge(result)).status == "fail"
    for more, status in ((1, "not judged"), (0, "fail"), (-1, "fail")):
        found = judged(result, f'[budgets]\napp_footprint = "{150_000_000 - more} B"')
        assert limit_check(found).status == status
        assert limit_check(judge(found)).status == status  # nothing was lost


def test_budgets_that_say_what_the_app_holds_count_the_kit_as_well():
    result = make_result([PIXEL])
    peak = result.devices[0].memory.predicted_peak_bytes
    assert limit_check(judge(result)).actual == peak
    found = limit_check(judged(result, '[budgets]\napp_footprint = "50 MB"'))
    assert found.actual == peak + 50_000_000 + runtime_bytes("kotlin", "android", peak)
    assert "the kotlin kit's process (24.0 MB and 25 % of the peak)" in found.message


def test_a_process_takes_no_more_than_what_is_counted():
    """Every row that was measured of a JVM and of Node."""
    text = (Path(__file__).parents[3] / "docs" / "fidelity.md").read_text()
    pattern = r"^\| (kotlin|js) \| .* \| ([\d.]+) MB \| [\d.]+ MB \| \+([\d.]+) MB"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) > 12
    for kit, planned, above in rows:
        counted = runtime_bytes(kit, "linux", int(float(planned) * 1e6))
        assert float(above) * 1e6 <= counted - RUNTIME_LIBRARY_BYTES
    assert runtime_bytes("js", "web", 10**8) == RUNTIME_LIBRARY_BYTES


def test_an_app_that_takes_the_limit_by_itself():
    result = judged(make_result([PIXEL], app=True), '[budgets]\napp_footprint = "5 GB"')
    assert limit_check(result).status == "fail"
    assert "app_footprint" in str(limit_check(result).advice)


def bar(app: int, runtime: int, training: int, limit: int | None) -> str:
    sizes = {"app_bytes": app, "runtime_bytes": runtime, "predicted_peak_bytes": training}
    result = with_memory(make_result([PIXEL]), **sizes, limit_bytes=limit, measured_peak_bytes=None)
    return drawn_bar(result.devices[0].memory)


def test_the_bar_in_characters():
    assert bar(12, 6, 6, 48) == "aaaaaarrrttt............|"
    assert bar(12, 6, 30, 24) == "aaaaaarrrttt|" + "t" * 12
    assert bar(1, 1, 1000, 4000) == "artttttt................|"
    assert bar(12, 6, 6, None) == "a" * 12 + "r" * 6 + "t" * 6


def test_every_report_shows_app_library_training_and_limit():
    result = judge(make_result([PIXEL], app=True))
    memory = result.devices[0].memory
    assert (memory.app_bytes, memory.runtime_bytes) == (150_000_000, RUNTIME_LIBRARY_BYTES)
    page = render_report(result, "html").decode()
    assert page.count('class="bar app"') == 2  # the legend and the bar
    assert page.count('class="bar library"') == 2
    assert "kotlin kit, 1 thread, an arena for each session" in page
    text = render_report(result, "markdown").decode()
    assert drawn_bar(memory).replace("|", r"\|") in text
    assert '"app_bytes": 150000000' in render_report(result, "json").decode()


def test_a_comparison_says_that_the_kit_is_another():
    base = make_result([PIXEL], app=True)
    head = changed(on_devices(base, memory={"sharing": "shared"}), policy={"kit": "kotlin"})
    notes = compare(base, head).notes
    assert "arenas of the sessions: own before, shared now" in notes
    # That of the whole result may be of a device which only one of both has.
    other = changed(base, memory={"sharing": "shared"})
    assert not any("arenas" in note for note in compare(base, other).notes)
    assert "kit: the usual before, kotlin now" in notes


# The limit with the platform's entitlement for more memory, in a result.


def memory_of(name: str, policy: Policy) -> DeviceMemory:
    profile = load_profile(name)
    plan = MemoryPlan((Phase("training step", (Item("x", 1, "inputs"),)),), (), ())
    use, footprint = SessionUse("shared", False), default_footprint(profile)
    return _memory(profile, policy, "swift", use, plan, footprint, native=False)


@pytest.mark.parametrize("state", ["foreground", "background"])
def test_the_entitlement_is_for_the_foreground(state):
    profile = load_profile("apple/iphone-16-pro")
    memory = memory_of(profile.name, Policy(state=state))
    assert memory.limit_bytes == profile.memory_limit_bytes(state)
    assert (memory.entitled_limit_bytes is not None) == (state == "foreground")


def test_an_entitled_app_is_held_to_its_own_limit():
    entitled = Policy(entitled=True)
    memory = memory_of("apple/iphone-15-pro", entitled)
    assert (memory.limit_bytes, memory.limit_entitled) == (6_000_000_000, True)
    assert memory.warning_bytes is None
    assert memory_of("apple/iphone-13-pro", entitled).limit_bytes == 4_200_000_000
    assert (memory_of("apple/iphone-13-pro", Policy()).limit_bytes or 0) < 4_000_000_000


def test_what_the_app_holds_is_not_left_to_the_training():
    memory = memory_of("apple/iphone-15-pro", Policy())
    assert memory.room_bytes == memory.limit_bytes - 150_000_000 - RUNTIME_LIBRARY_BYTES
    assert memory.need_bytes == 1 + 150_000_000 + RUNTIME_LIBRARY_BYTES
    assert (memory.kit, memory.sharing) == ("swift", "shared")


@pytest.mark.parametrize(("name", "state"), [
    ("apple/iphone-xr", "foreground"),  # nobody measured it there
    ("samsung/galaxy-a12", "foreground"),  # Android has none
    ("apple/iphone-15-pro", "background"),
])  # fmt: skip
def test_where_the_entitlement_changes_nothing(name, state):
    plain, entitled = (
        memory_of(name, Policy(state=state, entitled=given)) for given in (False, True)
    )
    assert entitled == plain
    assert not entitled.limit_entitled
