"""The job files of docs/jobs: leanft accepts their commands, and their runs save after SIGTERM and resume.

Stand-ins replace Slurm, the cluster's names and, in the first test, `leanft`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lean_ft.cli.main import run_command_line
from lean_ft.system.launch import Launch
from tests.parallel.processes import free_port

JOBS = Path(__file__).parents[1] / "docs" / "jobs"
FILES = sorted(path.name for path in JOBS.iterdir())
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; [ "$1" = show ] && echo localhost; true',
    "scancel": 'echo "scancel $*" >> "$CALLS"; kill -TERM "$(cat "$CALLS.step")"',
    "srun": 'echo "srun $1" >> "$CALLS"; shift; echo $$ > "$CALLS.step"; exec "$@"',
    "getent": "true",
}
RECORDER = (
    f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps(sys.argv[1:]), file=open(os.environ['CALLS'], 'a'))\n"
)
ENVIRONMENT = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_NUM_NODES": "4",
    "JOB_COMPLETION_INDEX": "0",
}
DEADLINE = 600  # seconds; processes start slowly where others use the cores
EXPECTED = {  # file -> machines, processes on each, endpoint, who hosts it
    "one_machine.sh": (1, 8, "", None),
    "several_machines.sh": (2, 8, "node1:29500", None),
    "slurm.sbatch": (4, 8, "localhost:29500", None),
    "kubernetes.yaml": (2, 8, "leanft-node-0-0.leanft:29500", True),
}


def pod(name: str) -> dict:
    (job,) = yaml.safe_load((JOBS / name).read_text())["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def script_of(name: str) -> str:
    """The shell script of a job file."""
    if not name.endswith(".yaml"):
        return (JOBS / name).read_text()
    (container,) = pod(name)["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return container["args"][0]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a user's rows; stand-ins are on PATH."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (container,) = pod("kubernetes.yaml")["template"]["spec"]["containers"]
    for name, value in {one["name"]: one["value"] for one in container["env"] if "value" in one}.items():
        monkeypatch.setenv(name, value)
    for name, value in (ENVIRONMENT | {"CALLS": str(tmp_path / "calls")}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    chat = [{"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": "It is 42."}]
    Path("my_chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_leanft_accepts_the_command_of_a_job(folder, monkeypatch, capsys, name: str):
    (folder / "bin" / "leanft").write_text(RECORDER)
    (folder / "bin" / "leanft").chmod(0o755)
    subprocess.run(["bash", "-c", script_of(name)], check=True, timeout=20)
    verb, *words = json.loads((folder / "calls").read_text().splitlines()[-1])
    launched = list[tuple[Launch, list[str]]]()
    monkeypatch.setattr("lean_ft.cli.run.launch", lambda plan, arguments, minutes: launched.append((plan, arguments)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(SystemExit) as exited:
        run_command_line([verb, *words])
    assert exited.value.code == 0, capsys.readouterr().err
    ((plan, arguments),) = launched
    assert (plan.max_nodes, plan.processes_per_node, plan.endpoint, plan.is_host) == EXPECTED[name]
    assert plan.run_id == ("17" if name == "slurm.sbatch" else "leanft")
    assert plan.max_restarts == (0 if name == "kubernetes.yaml" else 3)
    settings = arguments[arguments.index("finetune") :]
    assert any(word.startswith("output_dir=") for word in settings)  # the next start finds the checkpoints
    with pytest.raises(SystemExit) as exited:
        run_command_line(["validate", *settings])
    assert exited.value.code == 0, capsys.readouterr().err


def test_slurm_and_kubernetes_reserve_the_processes_of_the_command():
    directives = re.findall(r"^#SBATCH (.+)$", script_of("slurm.sbatch"), re.MULTILINE)
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue", "--signal=B:TERM@600"} <= {
        *directives
    }
    jobset, job = yaml.safe_load((JOBS / "kubernetes.yaml").read_text()), pod("kubernetes.yaml")
    (template,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert job["completions"] == job["parallelism"] == int(values["NODES"])
    # DNS name of a pod of a JobSet: JOBSET-JOB-INDEX_OF_JOB-INDEX_OF_POD.JOBSET
    assert values["HEAD"] == f"{jobset['metadata']['name']}-{template['name']}-0-0.{jobset['metadata']['name']}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in job["template"]["spec"]["volumes"]
    }
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs this
    codes = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == [[128 + signal.SIGTERM]]


def start(script: str, machines: int) -> list[subprocess.Popen]:
    """Start a script on each machine."""
    command, options = ["bash", "-c", script], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    indices = [os.environ | {"JOB_COMPLETION_INDEX": f"{index}"} for index in range(machines)]
    return [subprocess.Popen(command, env=environment, **options) for environment in indices]


def await_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_a_job_saves_after_sigterm_and_its_next_start_resumes(folder, monkeypatch, name: str):
    machines = 2 if name in ("several_machines.sh", "kubernetes.yaml") else 1
    (folder / "bin" / "leanft").write_text(f'#!/bin/bash\nexec {sys.executable} -W ignore -P -m lean_ft "$@"\n')
    (folder / "bin" / "leanft").chmod(0o755)
    per_machine, port = 2 // machines, free_port()
    for variable, value in {"SLURM_JOB_NUM_NODES": 1, "SLURM_GPUS_ON_NODE": 2}.items():
        monkeypatch.setenv(variable, f"{value}")
    run = folder / "run"
    tiny = f"run=(finetune --config tiny/full device=cpu eval_answers=0 batch_size=4 max_steps=$STEPS output_dir={run})"
    script, num_runs = re.subn(r"run=\(.*\)", tiny, script_of(name))
    assert num_runs == 1
    script = script.replace("--nproc-per-node gpu", f"--nproc-per-node {per_machine}").replace("node1:", "localhost:")
    script = script.replace(":29500", f":{port}").replace("$HEAD:", "localhost:")
    monkeypatch.setenv("STEPS", "4000")
    agents = start(script, machines)
    await_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text(), agents[0])
    for agent in agents[1:] if name == "kubernetes.yaml" else agents:  # one pod is evicted
        agent.send_signal(signal.SIGTERM)
    outputs = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
    assert {agent.returncode for agent in agents} == {0 if name == "slurm.sbatch" else 143}, outputs
    saved = int(max(run.glob("step_*")).name.removeprefix("step_"))
    assert saved < 4000
    if name == "slurm.sbatch":
        calls = (folder / "calls").read_text().splitlines()
        assert calls[1:] == ["srun --kill-on-bad-exit=1", "scancel --signal=TERM 17", "scontrol requeue 17"]
    monkeypatch.setenv("STEPS", f"{saved + 2}")
    agents = start(script, machines)
    outputs = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
    assert {agent.returncode for agent in agents} == {0} and "resuming" in "".join(outputs), outputs
    steps = [json.loads(line).get("step") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert saved + 2 in steps
