"""Figures that papers print, from the planner's own formulas."""

from __future__ import annotations

import numpy as np
import pytest

from bench.published_rows import stated_flops
from meshwright.job.cluster import load_cluster
from meshwright.job.model_spec import ModelSpec
from meshwright.job.presets import preset
from meshwright.plan.array_memory import layer_bytes, memory_use, rank_memory
from meshwright.plan.arrays import RECOMPUTES, Layouts, Work
from meshwright.plan.evaluate import evaluate
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape
from meshwright.plan.stages import held

_YEAR = 365 * 86400.0
_MEGATRON = Rules(name="megatron", fused_attention=False, fused_softmax=True, dropout=True)


def _step(spec: ModelSpec, sequence: int = 2048, batch: int = 1) -> Shape:
    return Shape.of(Work(spec, sequence, batch))


def _per_token(shape: Shape, convention: str) -> float:
    return stated_flops(shape, convention) / float(shape.sequence * shape.global_batch)


def test_narayanan_2021_flops_formula() -> None:
    """Formula 3 of arXiv 2104.04473: ``96 B s l h^2 (1 + s / 6h + V / 16lh)``, recomputation counted."""
    spec = preset("megatron-145b")
    shape = _step(spec, batch=3)
    s, h, layers, vocabulary = 2048, spec.hidden, spec.layers, spec.vocabulary
    wanted = 96 * 3 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert stated_flops(shape, "hardware (recompute counted)") == pytest.approx(wanted, rel=1e-12)


def test_gpt3_takes_288_years_on_one_v100() -> None:
    """Section 1 of arXiv 2104.04473, with the 300 billion tokens and a V100 at about 46 TFLOP/s."""
    spec = preset("gpt3-175b").model_copy(update={"vocabulary": 51200})
    seconds = 300e9 * _per_token(_step(spec), "hardware") / 46e12
    assert seconds / _YEAR == pytest.approx(288, rel=0.03)


def test_gpt3_takes_34_days_on_1024_a100() -> None:
    """Section 5.1 of arXiv 2104.04473: 175B parameters, 300B tokens, 1,024 A100 at 140 TFLOP/s."""
    spec = preset("gpt3-175b").model_copy(update={"vocabulary": 51200})
    seconds = 300e9 * _per_token(_step(spec), "hardware") / (1024 * 140e12)
    assert seconds / 86400 == pytest.approx(34, rel=0.03)


def test_gpt3_takes_355_gpu_years() -> None:
    """Lambda's often quoted figure: 3.14e23 FLOPs (table D.1 of arXiv 2005.14165) on a V100 at 28 TFLOP/s."""
    flops = 6 * preset("gpt3-175b").parameter_count * 300e9
    assert flops == pytest.approx(3.14e23, rel=0.01)
    assert flops / 28e12 / _YEAR == pytest.approx(355, rel=0.01)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(zero: int, gigabytes: float) -> None:
    """Figure 1 of arXiv 1910.02054: model states of 7.5B parameters on 64 ranks, K = 12."""
    rules = Rules(name="zero", gradient_bytes=2.0)
    shape = _step(preset("megatron-7.5b"))
    layouts = Layouts.make(dp=64, zero=zero, micro_batches=1)
    parts = rank_memory(shape, layouts, rules, 2.0, held(layouts, shape.layers)[0])
    state = sum(float(parts[name][0]) for name in ("parameters", "gradients", "optimizer"))
    scale = 7.5e9 / float(shape.parameters())
    assert state * scale / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_a_v100_holds_about_1_2_billion_parameters() -> None:
    """Shoeybi et al. 2019 (arXiv 1909.08053) train 1.2B on one V100 of 32 GB, and split 2.5B over two."""
    layouts = Layouts.make(micro_batch=2, micro_batches=4, recompute=RECOMPUTES.index("full"), sequence_parallel=False)

    def fits(hidden: int, layers: int, heads: int) -> bool:
        spec = preset("gpt2").model_copy(
            update={"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": heads, "head_size": hidden // heads,
                    "ffn_hidden": 4 * hidden}
        )  # fmt: skip
        peak = memory_use(_step(spec, 1024, 8), layouts, _MEGATRON).peak
        return bool(peak[0] <= 32 * 2**30)

    assert fits(1536, 40, 16)
    assert not fits(1920, 54, 20)


@pytest.mark.parametrize("tp", [1, 8])
def test_korthikanti_activations(tp: int) -> None:
    """Table 2 of arXiv 2205.05198, bytes of a layer in 16 bits, unfused attention with dropout."""
    spec, s, b = preset("megatron-39b"), 2048, 2
    h, a = spec.hidden, spec.heads

    def kept(recompute: str, sequence_parallel: bool) -> float:
        layouts = Layouts.make(
            tp=tp, micro_batch=b, micro_batches=1, recompute=RECOMPUTES.index(recompute),
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        return float(layer_bytes(_step(spec), layouts, _MEGATRON, 2.0)[0])

    scores = 5 * a * s / h
    assert kept("none", False) == pytest.approx(s * b * h * (10 + 24 / tp + scores / tp), rel=1e-12)
    assert kept("none", True) == pytest.approx(s * b * h / tp * (34 + scores), rel=1e-12)
    assert kept("selective", True) == pytest.approx(34 * s * b * h / tp, rel=1e-12)
    assert kept("full", False) == pytest.approx(2 * s * b * h, rel=1e-12)


def test_causal_attention_has_half_the_flops_of_whole() -> None:
    """Llama 2 7B at 4,096 tokens: counting whole attention adds 8 % to the model FLOPs."""
    shape = _step(preset("llama2-7b"), 4096)
    attention = 3 * float(shape.layers * shape.attention_flops())
    causal, whole = stated_flops(shape, "model, causal attention"), stated_flops(shape, "model, non-causal")
    assert causal == pytest.approx(float(shape.model_flops()), rel=1e-12)
    assert whole - causal == pytest.approx(attention, rel=1e-12)
    assert whole / causal == pytest.approx(1.075, abs=0.005)


def test_one_device_is_the_mean_over_all() -> None:
    """Model FLOPs of a device times the devices are the step's, whatever the layout."""
    work = Work(preset("llama3-8b"), 8192, 64)
    layouts = Layouts.make(dp=[8, 4, 1], tp=[1, 2, 2], pp=[1, 1, 4], zero=[3, 1, 0], micro_batches=[8, 16, 64])
    result = evaluate(work, load_cluster("1x8 H100-SXM5-80GB"), layouts)
    assert np.allclose(result.model_flops * layouts.ranks, float(Shape.of(work).model_flops()))
