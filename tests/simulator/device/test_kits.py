"""Kits: named once, and chosen by the system where nobody says which."""

from __future__ import annotations

from typing import get_args

from odtpack.cli.device.simulate import KitName
from odtpack_simulator.device.kits import KITS, Kit, kit_of
from odtpack_simulator.device.profile import OsClass


def test_every_place_names_the_same_kits() -> None:
    assert list(KITS) == list(get_args(Kit)) == [kit.value for kit in KitName]


def test_every_system_has_a_kit() -> None:
    chosen = {system: kit_of(system) for system in get_args(OsClass)}
    assert set(chosen.values()) <= set(KITS)
    assert (chosen["android"], chosen["ios"], chosen["web"]) == ("kotlin", "swift", "js")
    assert not KITS["kotlin"]
    assert not KITS["js"]
