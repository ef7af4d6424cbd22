"""Who started us: torchrun, Slurm, Kubernetes, or nobody."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.recovery.environment import RankPlace, detect_environment, first_slurm_host, restarted

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "1234"}


def test_nobody_started_us() -> None:
    assert detect_environment({}) is None
    assert detect_environment({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None, "a batch script is no step"
    assert detect_environment({"JOB_COMPLETION_INDEX": "0"}) is None


def test_torchrun() -> None:
    place = detect_environment(TORCHRUN)
    assert place == RankPlace(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_address="node1",
        master_port=29400,
        source="torchrun",
    )


def test_whether_torchrun_starts_us_again() -> None:
    assert not restarted({}) and not restarted({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "0"})
    assert restarted({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})


def test_slurm_is_mapped_to_torch_s_names() -> None:
    place = detect_environment(SLURM)
    assert place is not None and place.source == "srun"
    environment: dict[str, str] = {}
    place.export(environment)
    port = environment.pop("MASTER_PORT")
    assert environment == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu003",
    }
    assert 10000 <= int(port) < 30000


def test_all_slurm_tasks_agree_on_the_port_and_other_steps_differ() -> None:
    def port(**changes: str) -> int:
        place = detect_environment({**SLURM, **changes})
        assert place is not None
        return place.master_port

    assert port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0") == port()
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="4243")}) == 3
    assert port(MASTER_PORT="777") == 777


def test_one_slurm_task_starts_its_own_ranks() -> None:
    assert detect_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_uneven_slurm_nodes() -> None:
    uneven = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,5", "SLURM_LOCALID": "4"}
    place = detect_environment(uneven)
    assert place is not None and place.local_world_size == 5


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu003", "gpu003"),
        ("gpu[003-006,9]", "gpu003"),
        ("a1,b[2-3]", "a1"),
        ("rack[2,4]-x[07-09],z", "rack2-x07"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_indexed_kubernetes_job() -> None:
    place = detect_environment(INDEXED_JOB)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.master_address) == (3, 4, 0, "job-0.job")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set although other rank variables are"),
        ({"WORLD_SIZE": "2"}, "RANK is not set although other rank variables are"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of world size 8; legal are 0 to 7"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4 on this host; legal are 0 to 3"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "gave no MASTER_ADDR"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000; legal are 1 to 65535"),
        ({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "world size 0; it must be at least 1"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "four"}, "'four' is not a list such as"),
    ],
)
def test_wrong_variables_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        detect_environment(environment)
