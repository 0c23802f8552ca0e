"""Records of JSON are checked strictly, and say where they are wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from odtpack_runtime.files.records import InvalidRecordError, Part, Rule, parse_json


@dataclass(frozen=True, kw_only=True)
class Square(Part):
    kind: Literal["square"]
    side: float


@dataclass(frozen=True, kw_only=True)
class Circle(Part):
    kind: Literal["circle"]
    radius: Annotated[int, Rule(minimum=1, maximum=9)]


@dataclass(frozen=True, kw_only=True)
class Drawing(Part):
    name: Annotated[str, Rule(minLength=1, pattern="^[a-z]+$")]
    shapes: tuple[Square | Circle, ...] = ()
    sizes: Annotated[tuple[int | str | None, ...], Rule(maxItems=2)] = ()
    about: dict[str, Any] = field(default_factory=dict)
    seen: bool = False

    def check(self, path: tuple[str | int, ...]) -> None:
        if self.seen and not self.shapes:
            raise InvalidRecordError("nothing can be seen", path)


GOOD = {
    "name": "a",
    "shapes": [{"kind": "square", "side": 2}, {"kind": "circle", "radius": 3}],
    "sizes": [1, None],
    "about": {"x": [1, {"y": None}]},
    "seen": True,
}


def test_what_is_read_comes_back() -> None:
    drawing = Drawing.read(GOOD)
    assert drawing.shapes == (Square(kind="square", side=2.0), Circle(kind="circle", radius=3))
    assert type(drawing.shapes[0].side) is float
    assert drawing.as_dict() == GOOD
    assert Drawing.read(drawing.as_dict()) == drawing
    assert Drawing.read({"name": "a"}).as_dict(defaults=False) == {"name": "a"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ""}, "name: it must not be empty"),
        ({"name": "A"}, "name: it must match"),
        ({"name": "a\n"}, "name: it must match"),
        ({"name": 1}, "name: it must be text"),
        ({"name": "\ud800"}, "name: it holds characters"),
        ({"more": 1}, "more: there is no such key"),
        ({"seen": 1}, "seen: it must be true or false"),
        ({"seen": True, "shapes": []}, "nothing can be seen"),
        ({"shapes": {}}, "shapes: it must be a list"),
        ({"shapes": [3]}, r"shapes\[0\]: its kind must be 'square' or 'circle'"),
        ({"shapes": [{"kind": []}]}, r"shapes\[0\]: its kind"),
        ({"shapes": [{"kind": "square"}]}, r"shapes\[0\]\.side: this key is missing"),
        ({"shapes": [{"kind": "square", "side": True}]}, "side: it must be a number"),
        ({"shapes": [{"kind": "square", "side": float("inf")}]}, "side: it must be a finite"),
        ({"shapes": [{"kind": "square", "side": 10**400}]}, "side: it must be a finite"),
        ({"shapes": [{"kind": "circle", "radius": 0}]}, "radius: it must be 1 or more"),
        ({"shapes": [{"kind": "circle", "radius": 10}]}, "radius: it must be 9 or less"),
        ({"shapes": [{"kind": "circle", "radius": 1.5}]}, "radius: it must be a whole number"),
        ({"shapes": [{"kind": "circle", "radius": True}]}, "radius: it must be a whole number"),
        ({"sizes": [1, 2, 3]}, "sizes: it must have 2 entries or fewer"),
        ({"sizes": [1.5]}, r"sizes\[0\]: it must be a whole number, or it must be text"),
        ({"about": []}, "about: it must be an object"),
        ({"about": {"x": float("nan")}}, r"about\.x: it must be a finite number"),
        ({"about": {"x": ["\ud800"]}}, r"about\.x\[0\]: it holds characters"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRecordError) as caught:
        Drawing.read(GOOD | change)
    assert re.search(says, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON in UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ("{}".encode("utf-16"), "not JSON"),
        (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b"[" * 100_000, "nests too deeply"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_texts_that_are_not_json(text: bytes, says: str) -> None:
    with pytest.raises(InvalidRecordError, match=says):
        parse_json(text)
