"""What [sync] refuses, in one sentence with the legal values."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from tests.small_jobs import small_job


@pytest.mark.parametrize(
    ("sync", "others", "sentence"),
    [
        (
            {"algorithm": "leaders"},
            {},
            "sync.node_size is missing, but sync.algorithm=leaders must know which ranks share a node; "
            "give the ranks of a node, 1 to 4",
        ),
        (
            {"algorithm": "hierarchical", "node_size": 5},
            {},
            "sync.node_size: 5 is above the 4 ranks of the layout; use 1 to 4",
        ),
        (
            {"algorithm": "ring", "node_size": 2},
            {},
            "sync.node_size: 2 is not used by sync.algorithm=ring; leave it out, or use "
            "algorithm=hierarchical or leaders, or compression_level=slow with a compression",
        ),
        (
            {"algorithm": "ring"},
            {"train": {"deterministic": True}},
            "sync.algorithm: ring would replace the one order of sums that train.deterministic=true keeps for every "
            "dp; use algorithm=auto, or deterministic=false",
        ),
        (
            {"algorithm": "ring"},
            {"cluster": {"device": "cuda"}},
            "sync.algorithm: ring sends from host memory, but cluster.device=cuda; use auto, direct or backend, "
            "or device=cpu",
        ),
        (
            {"algorithm": "rings"},
            {},
            'sync.algorithm: "rings" must be auto, direct, backend, ring, tree, halving-doubling, hierarchical, '
            "leaders or ordered (did you mean ring?)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sync: dict[str, Any], others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        small_job("dp=4 micro_batch=1", sync=sync, **others)
    assert str(refused.value) == sentence
