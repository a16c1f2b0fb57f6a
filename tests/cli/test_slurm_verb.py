"""`leanft slurm`: run the job script with fake Slurm commands."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ARGUMENTS = ("toy_single_device", "-c", "tiny/toy", "--nodes", "2", "--gpus-per-node", "4", "--partition", "gpu")
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; [ "$1" = show ] && echo node7 && echo node8; true',
    "scancel": 'echo "scancel $*" >> "$CALLS"; kill -TERM "$(cat "$CALLS.step")"',
    "srun": 'echo "srun $*" >> "$CALLS"; exec "$STEP"',
    "quick": "exit 3",
    "slow": 'trap "echo saved >> $CALLS; exit 143" TERM; echo $$ > "$CALLS.step"; while :; do sleep 0.05; done',
}


@pytest.fixture
def job(leanft, shipped, tmp_path, monkeypatch) -> Path:
    answer = leanft.ok("slurm", *ARGUMENTS, "model.path=my model")
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "CALLS": str(tmp_path / "calls"),
    }.items():
        monkeypatch.setenv(name, value)
    (path := tmp_path / "job.sbatch").write_text(answer.out)
    return path


RUN = (
    "srun --kill-on-bad-exit=1 leanft run --nproc-per-node 4 --nnodes 2 --max-restarts 3 --rdzv-endpoint node7:29500 "
    "--rdzv-id 17 toy_single_device --config tiny/toy model.path=my model"
)


def test_a_job_starts_an_agent_a_machine_and_ends_as_they_end(job, tmp_path, monkeypatch):
    monkeypatch.setenv("STEP", "quick")
    assert subprocess.run(["bash", job], timeout=20).returncode == 3
    assert (tmp_path / "calls").read_text().splitlines() == ["scontrol show hostnames node[7-8]", RUN]
    directives = [line for line in job.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=4"} <= set(directives)
    assert {"#SBATCH --signal=B:TERM@600", "#SBATCH --requeue", "#SBATCH --partition=gpu"} <= set(directives)


def test_a_job_that_is_warned_saves_and_is_queued_again(job, tmp_path, monkeypatch):
    monkeypatch.setenv("STEP", "slow")
    process = subprocess.Popen(["bash", job])
    deadline = time.monotonic() + 20
    while not (tmp_path / "calls.step").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[2:] == ["scancel --signal=TERM 17", "saved", "scontrol requeue 17"]
