"""The costs against the sizes that the papers publish."""

from __future__ import annotations

import pytest
from conftest import tiny_config

from meki_edge.memory_costs import MemoryCost, cost, survey

KIB = 1024


def at(
    kind: str, layers: int, *, vocab: int, hidden: int, ffn: int = 64, total: int | None = None, **options: object
) -> MemoryCost:
    total = total or layers
    shape = tiny_config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=total,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    return cost(shape, kind, options, tuple(range(layers)))


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "width", "rom", "kib", "ram"),
    [
        (28, 1024, 3072, 128, 0.544e9, 7, None),
        (28, 2048, 6144, 256, 1.087e9, 14, 29.4e6),
        (36, 2560, 9728, 512, 2.796e9, 36, None),
    ],
)
def test_meki(layers: int, hidden: int, ffn: int, width: int, rom: float, kib: int, ram: float | None) -> None:
    found = at("meki", layers, vocab=151_680, hidden=hidden, ffn=ffn, memory_dim=width)
    assert found.rom_parameters == pytest.approx(rom, rel=1e-3)
    assert found.bytes_per_token == kib * KIB
    assert found.ram_parameters == layers * (2 * hidden * width + hidden)
    if ram:
        assert found.ram_parameters == pytest.approx(ram, rel=2e-3)
        assert found.flops_per_token == pytest.approx(58.7e6, rel=1e-3)


def test_stem_reads_80_kib_and_saves_its_up_projection() -> None:
    found = at("stem", 5, vocab=128_256, hidden=2048, ffn=8192)
    assert found.bytes_per_token == 80 * KIB
    assert found.ram_parameters == -5 * 2048 * 8192
    assert found.flops_per_token == -5 * 2 * 2048 * 8192


def test_staple() -> None:
    full = at("staple", 12, vocab=100_352, hidden=2048, ffn=8192)
    assert full.rom_bytes == pytest.approx(19.73e9, rel=1e-3) and full.bytes_per_token == 192 * KIB
    assert full.ram_parameters == 0
    low = at("staple", 12, vocab=100_352, hidden=2048, ffn=8192, rank=512)
    assert low.bytes_per_token == 12 * KIB and low.ram_parameters / 12 == pytest.approx(4.2e6, rel=2e-3)


def test_l3_holds_a_billion_parameters_a_layer_and_reads_a_megabyte_and_a_half() -> None:
    found = at("l3", 1, vocab=180_000, hidden=1024, num_entries=710_000, max_entries=512, up_dim=4096)
    assert found.rom_parameters == pytest.approx(1.09e9, rel=2e-3)
    assert found.bytes_per_token == 1.5 * KIB * KIB
    assert found.flops_per_token == 2 * 512 * 1536 + 2 * 4096 * 512 + 2 * 1024 * (1024 + 4096)
    tied = at("l3", 1, vocab=180_000, hidden=1024, num_entries=710_000, max_entries=512, tied=True)
    assert tied.bytes_per_token == KIB * KIB


def test_ple_at_gemma_3n_e4b() -> None:
    found = at("ple", 35, vocab=262_144, hidden=2048, ffn=16_384, memory_dim=256, layer_scalar=False)
    assert found.rom_parameters == pytest.approx(2.35e9, rel=2e-3)
    assert found.bytes_per_token == 17.5 * KIB
    assert found.ram_parameters == pytest.approx(36.8e6, rel=3e-3)
    assert found.training_parameters - found.ram_parameters - found.rom_parameters == pytest.approx(18.4e6, rel=3e-3)


def test_engram_27b_reads_5_kib_for_two_layers() -> None:
    found = at("engram", 2, vocab=129_280, hidden=2560, table_size=646_400, memory_dim=1280)
    assert found.bytes_per_token == 5 * KIB
    heads = 2 * 16
    assert found.rom_parameters == pytest.approx(heads * 646_400 * 80, rel=1e-2)
    assert found.flops_per_token == 2 * (4 * 2560 * 1280 + 8 * 2560)


def test_mole_410m_with_16_experts() -> None:
    found = at("mole", 24, vocab=50_304, hidden=1024, ffn=4096, num_experts=16)
    assert found.bytes_per_token == 768 * KIB
    assert found.rom_parameters == pytest.approx(19.7e9, rel=5e-3)


def test_the_survey_names_every_kind() -> None:
    found = survey(tiny_config())
    assert [entry.kind for entry in found] == "meki ple stem staple l3 engram mole staple".split()
    assert all(entry.rom_bytes > 0 and entry.bytes_per_token > 0 for entry in found)
