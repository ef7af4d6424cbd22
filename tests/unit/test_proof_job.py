"""Proofs run any job at proof size: what it sets for its own schedule, type or update does not stand in their way."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.check import dtype_settings
from meshwright.job.job import load_job
from meshwright.prove.check import OptimizerName, proof_job
from meshwright.prove.matrix import layout_cases

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SETTINGS = (
    [],
    ["optimizer.schedule=wsd", "optimizer.decay_steps=10"],
    ["optimizer.name=sgd", "optimizer.momentum=0.5"],
    ["precision.dtype=float16", "precision.loss_scale_initial=1024", "precision.loss_scale_growth_interval=7"],
    ["checkpoint.interval=auto", "checkpoint.mtbf_hours=3", "checkpoint.mode=async"],
    ["recovery.digest_every=1", "recovery.memory_every=2", "recovery.outlier=9", 'fault.inject=["nan rank=0 step=1"]'],
    ["train.nonfinite=skip", "train.deterministic=true", "batch.micro_batch_limits=[4, 4]", "batch.split=auto"],
)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings) or "as it is")
def test_every_legal_job_can_be_proven(settings: list[str], optimizer: OptimizerName) -> None:
    job = load_job(QUICKSTART, settings)
    for case in layout_cases(4):
        small = proof_job(job, case, "float64", optimizer)
        assert (small.optimizer.name, small.precision.dtype, small.layout) == (optimizer, "float64", case.layout)


def test_another_dtype_by_command_leaves_the_scale_of_float16_out() -> None:
    job = load_job(QUICKSTART, [*SETTINGS[3], *dtype_settings("float64")])
    assert job.precision.dtype == "float64"
    assert load_job(QUICKSTART, [*SETTINGS[3], *dtype_settings("float16")]).precision.loss_scale_initial == 1024
