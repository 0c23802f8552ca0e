"""Scalable vector graphics as text: elements, escaped attributes, and number formats.

Positions along an axis are percentages of the drawing, text and strokes are in
pixels. A drawing therefore stretches with the page while its labels stay
readable, on a phone as on a desk.
"""

from __future__ import annotations

from markupsafe import Markup, escape

from odtpack_simulator.values.plain_text import clean

Attribute = str | float | int | None


def element(tag: str, *children: Markup | str, **attributes: Attribute) -> Markup:
    """One element; strings among the children are escaped, ``Markup`` is not.

    Attributes: ``class_`` means ``class``, other underscores become hyphens,
    None leaves the attribute out, floats are written with three decimals.
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else str(value)
            parts.append(f'{_attribute_name(name)}="{escape(clean(text))}"')
    safe = (child if isinstance(child, Markup) else clean(child) for child in children)
    inner = Markup("").join(escape(child) for child in safe)
    # Attributes and children were escaped one by one; only the fixed names of tags are not.
    return Markup(f"<{' '.join(parts)}>{inner}</{tag}>")  # noqa: S704


def _attribute_name(name: str) -> str:
    # SVG writes two of its attributes in camel case; HTML parsers restore them only there.
    camel = {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio"}
    return camel.get(name, name.rstrip("_").replace("_", "-"))


def number(value: float) -> str:
    """A short decimal: at most three places, no trailing zeros, no exponent."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"


def percent(share: float) -> str:
    """A position or length along the drawing: ``0.25`` gives ``25%``."""
    return f"{number(100.0 * share)}%"
