"""Presets: parameter counts against the published ones."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.job.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen2-0.5b", 494_032_768),
        ("qwen2-1.5b", 1_543_714_304),
        ("qwen2-7b", 7_615_616_512),
        ("qwen2-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
    ],
)
def test_counts_are_the_published_ones(name: str, count: int) -> None:
    assert preset(name).parameter_count == count


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("megatron-1.7b", 1.7), ("megatron-3.6b", 3.6), ("megatron-7.5b", 7.5), ("megatron-18b", 18.4),
        ("megatron-39b", 39.1), ("megatron-76b", 76.1), ("megatron-145b", 145.6), ("megatron-310b", 310.1),
        ("megatron-530b", 529.6), ("megatron-1t", 1008.0),
    ],
)  # fmt: skip
def test_megatron_table_one(name: str, billions: float) -> None:
    """Equation 2 of the paper, P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), and its table 1, first column.

    The equation leaves out the last LayerNorm (2 h parameters).
    """
    spec = preset(name)
    layers, hidden = spec.layers, spec.hidden
    equation = 12 * layers * hidden**2 + 13 * layers * hidden + (spec.vocabulary + spec.max_positions) * hidden
    assert spec.parameter_count == equation + 2 * hidden
    assert spec.parameter_count / 1e9 == pytest.approx(billions, abs=0.051)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt3-125m", 125), ("gpt3-350m", 356), ("gpt3-760m", 760), ("gpt3-1.3b", 1316), ("gpt3-2.7b", 2652),
     ("gpt3-6.7b", 6658), ("gpt3-13b", 12853), ("gpt3-175b", 174_600)],
)  # fmt: skip
def test_gpt3_family(name: str, millions: float) -> None:
    """Appendix D of the paper prints these counts (in millions); it leaves out small terms."""
    assert preset(name).parameter_count / 1e6 == pytest.approx(millions, rel=0.005)


def test_every_preset_is_a_valid_shape() -> None:
    for name in PRESETS:
        assert preset(name).name == name
    assert 9.5e6 < preset("llama-10m").parameter_count < 10.5e6


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"model.preset: 'lama3-8b' is not a preset; did you mean llama3-8b\?"):
        preset("lama3-8b")
