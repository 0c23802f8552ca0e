"""A badge: how much room the tightest budget of a result leaves."""

import json
import math
from typing import Final, Literal

from odtpack_simulator.figures.simulated import CHECKS, METRICS
from odtpack_simulator.reports import svg
from odtpack_simulator.result import SimulationResult
from odtpack_simulator.values.figure import Check, Verdict
from odtpack_simulator.values.units import format_percent

_COLORS: Final[dict[Verdict, str]] = {
    "pass": "#2d7d46",
    "warn": "#946200",
    "fail": "#b3261e",
    "not judged": "#5f6368",
}
_LABEL: Final = "odtpack"
_CHARACTER: Final = 6.6  # pixels of a character in 11 px Verdana, at most about
_HEIGHT: Final = 20


def headroom(check: Check) -> float | None:
    """The share of a limit that is left, below 0 where it is exceeded; None if that is unknown."""
    if check.actual is None or check.limit is None or not math.isfinite(check.actual):
        return None
    if check.limit == 0.0:  # no share of it
        return -math.inf if check.status == "fail" else None
    kind = CHECKS.get(check.metric)
    left = (check.limit - check.actual) / abs(check.limit)
    return -left if kind is not None and kind.better == "higher" else left


def in_words(check: Check, left: float) -> str:
    """A headroom as people read it."""
    floor = CHECKS[check.metric].better == "higher"
    if left >= 0:
        return f"{format_percent(left)} {'above' if floor else 'left'}"
    by = f" by {format_percent(-left)}" if math.isfinite(left) else ""
    return f"{'below' if floor else 'over'}{by}"


def badge_text(result: SimulationResult) -> str:
    """What the badge says: the budget that leaves least, and how much."""
    # Only limits of the budget file: the team did not choose a device's own, nor that of samples.
    own = [check for _, check in result.all_checks() if check.budget_location is not None]
    chosen = [check for check in own if check.metric in METRICS]
    known = [(left, check) for check in chosen if (left := headroom(check)) is not None]
    unknown = sum(check.status == "not judged" for check in chosen)
    also = f", {unknown} not judged" if unknown else ""
    if not known:
        return f"{result.verdict}{also}"
    left, tightest = min(known, key=lambda pair: pair[0])
    failing = result.verdict == "fail" and left >= 0
    text = f"{CHECKS[tightest.metric].title.lower()} {in_words(tightest, left)}{also}"
    return f"fail, {text}" if failing else text


def render_badge(result: SimulationResult, form: Literal["svg", "json"]) -> bytes:
    """The badge as a picture, or as the JSON of an endpoint badge of shields.io."""
    text, color = badge_text(result), _COLORS[result.verdict]
    if form == "json":
        content = {"schemaVersion": 1, "label": _LABEL, "message": text, "color": color}
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()
    left, right = (round(_CHARACTER * len(each) + 12) for each in (_LABEL, text))
    style: dict[str, svg.Attribute] = {
        "font_size": 11,
        "font_family": "Verdana,DejaVu Sans,sans-serif",
        "fill": "#fff",
    }
    drawn = svg.element(
        "svg",
        svg.element("title", f"{_LABEL}: {text}"),
        svg.element("rect", width=left + right, height=_HEIGHT, rx=3, fill="#444"),
        svg.element("rect", x=left, width=right, height=_HEIGHT, rx=3, fill=color),
        svg.element("text", _LABEL, x=left / 2, y=14, text_anchor="middle", **style),
        svg.element("text", text, x=left + right / 2, y=14, text_anchor="middle", **style),
        xmlns="http://www.w3.org/2000/svg",
        width=left + right,
        height=_HEIGHT,
        role="img",
        aria_label=f"{_LABEL}: {text}",
    )
    return f"{drawn}\n".encode()
