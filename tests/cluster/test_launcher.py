"""Variables of launchers that are hidden from frameworks: all with a rank or a size."""

import sys

from mpigossip.cluster import launcher

RANK = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "FLUX_TASK_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "RANK": "1",
    "WORLD_SIZE": "4",
}
# devices, the allocation's end, the lock and the topology are read later
KEPT = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MPI_LOCALRANKID": "1",
    "SLURM_LOCALID": "1",
    "FLUX_JOB_SIZE": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_END_TIME": "9",
    "MASTER_ADDR": "host",
}


def test_with_a_framework_rank_and_size_are_hidden_and_others_stay(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    environment = RANK | KEPT
    assert launcher.hide(environment) == RANK
    assert environment == KEPT
    assert launcher.launcher_ranks(environment) == []
    assert launcher.hide(environment) == {}
    environment["RANK"] = "7"  # set again since
    launcher.restore(RANK, environment)
    assert environment == RANK | KEPT | {"RANK": "7"}


def test_without_a_framework_no_variable_is_hidden(monkeypatch):
    for name in launcher.FRAMEWORKS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    environment = RANK | KEPT
    assert launcher.hide(environment) == {}
    assert environment == RANK | KEPT
