"""Chips by SoC and by the name on the box."""

from __future__ import annotations

import pytest

from export.targets import CHIPS, chip
from meki_edge.errors import UserError


def test_every_chip_by_both_names() -> None:
    for known in CHIPS:
        for name in (known.soc, known.soc.upper(), known.name, known.name.upper(), known.name.replace(" ", "-")):
            assert chip(name) is known
        assert chip(known.name.removeprefix("Snapdragon ")) is known


def test_the_table() -> None:
    assert {known.soc: (known.soc_model, known.arch) for known in CHIPS} == {
        "sm8550": (43, "v73"),
        "sm8650": (57, "v75"),
        "sm8750": (69, "v79"),
        "sm8850": (87, "v81"),
        "sc8380xp": (60, "v73"),
    }


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("sm8760", "sm87"), ("snapdragon 8 elit", "snapdragon 8 elite"), ("8 elite gen 6", "snapdragon 8 elite gen 5")],
)
def test_a_typo_gets_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        chip(typo)
    assert f"unknown chip {typo!r}; did you mean '{meant}" in caught.value.what
    assert "sm8750 (Snapdragon 8 Elite)" in caught.value.fix
