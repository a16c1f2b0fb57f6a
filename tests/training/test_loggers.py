"""Metrics loggers get the same numbers, one record per run across restarts, and no secrets."""

import csv
import json
import logging
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from lean_ft.settings import LogConfig
from lean_ft.training import loggers
from lean_ft.training.loggers import MLFLOW_FILE, Loggers
from tests.training.toy_runs import digests, metrics

TOKEN = "hf_" + "a1b2c3d4" * 4


def read_csv(run: Path) -> dict[int, float]:
    with (run / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


def read_tensorboard(run: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    told = events.Scalars("loss")
    assert len(told) == len({event.step for event in told})  # repeated steps are shown once
    return {event.step: event.value for event in told}


def wandb_records(file: Path) -> list[bytes]:
    """The records of an offline run: a LevelDB log with blocks of 32 KiB, after a 7-byte header of wandb."""
    data, records, at = file.read_bytes(), [b""], 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no space for a header: the block is padded
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        records[-1] += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            records.append(b"")
    return records[:-1]


def read_wandb(run: Path) -> dict[int, float]:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # wandb's process writes the file and may not be done when a run finishes
    told: dict[int, float] = {}
    ids = set()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file):
            record = Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            line = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "loss" in line:
                told[line["step"]] = line["loss"]
    assert len(ids) == 1
    return told


def read_mlflow(run: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{(run / MLFLOW_FILE).absolute()}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "lean_ft"]
    (record,) = client.search_runs([experiment.experiment_id])
    assert record.info.status == "FINISHED"
    assert record.data.params["optimizer.lr"] == "0.01"
    return {metric.step: metric.value for metric in client.get_metric_history(record.info.run_id, "loss")}


def read_trackio(run: Path) -> dict[int, float]:
    with sqlite3.connect(run / "trackio/lean_ft.db") as database:
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert json.loads(config)["optimizer.lr"] == "0.01"
    assert len({run_id for run_id, _, _ in rows}) == 1
    lines = [(step, json.loads(line)) for _, step, line in rows]
    return {step: line["loss"] for step, line in lines if "loss" in line}  # a repeated step is there twice


def read_swanlab(run: Path) -> dict[int, float]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # pyright: ignore[reportMissingImports]
    from swanlab.sdk.internal.core_python.store import DataStoreReader  # pyright: ignore[reportMissingImports]

    told, ids = {}, set()
    for file in sorted(run.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            if record.start.id:
                ids.add(record.start.id)
            if record.scalar.key == "loss":
                told[record.scalar.step] = record.scalar.value.number
    assert len(ids) == 1
    return told


READERS = {"csv": read_csv, "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
READERS |= {"trackio": read_trackio, "swanlab": read_swanlab}
MODULES = {name: name for name in READERS} | {"csv": "csv"}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "mlflow" else name for name in READERS]
)
def test_a_run_cut_up_is_one_record_of_the_same_numbers(name, train, interrupted, tmp_path, monkeypatch):
    if find_spec(MODULES[name]) is None:  # Trackio reads its folder when it is imported
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_API_KEY", TOKEN)
    settings = {"log__to": f"[{name},jsonl]", "log__offline": "true", "save_every": 2, "eval_every": 5, "epochs": 3}
    whole = train(tmp_path / "whole", epochs=3, save_every=2)
    # The first part has a step that is repeated: a crash after step 5, saved at step 4.
    interrupted(tmp_path / "run", 5, **settings)
    run = train(tmp_path / "run", **settings)

    expected = {row["step"]: row["loss"] for row in metrics(run) if "loss" in row}
    assert len(expected) == 6
    assert READERS[name](run) == pytest.approx(expected, rel=1e-6)
    assert digests(run / "step_00000006") == digests(whole / "step_00000006")  # loggers draw no random numbers
    assert not [file for file in run.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


class StandIn(ModuleType):
    """A module like trackio and swanlab: notes all calls of its functions and of its run."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.servers: list[str | None] = []  # as each run begins

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name == "init":
                self.servers.append(os.environ.get("TRACKIO_SPACE_ID"))
                return SimpleNamespace(id="made", log=self.log, finish=self.finish)
            return (name, args, kwargs)

        return call


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_a_service_gets_redacted_lines_of_one_run(name, tmp_path, monkeypatch):
    run, standin = tmp_path / "my_run", StandIn(name)
    run.mkdir()
    monkeypatch.setitem(sys.modules, name, standin)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr(standin, "utils", SimpleNamespace(TRACKIO_DIR=str(run / "trackio")), raising=False)
    cfg = LogConfig(to=[name], offline=True)  # type: ignore[list-item]
    for start_step in (0, 2):
        opened = Loggers(cfg, run, {"data.system": f"Use {TOKEN}", "optimizer.lr": 0.1}, start_step)
        opened.write([{"step": start_step + 1, "loss": 0.5, "lr": 0.1, "text": TOKEN, "non_finite": {"x": "nan"}}])
        opened.write_samples(start_step + 1, [{"prompt": TOKEN, "rewards": {"length": 1.0}}])
        opened.close(done=start_step == 2)
    first, second = (
        {**dict(zip(("project", "name"), args, strict=False)), **more}
        for call, args, more in standin.calls
        if call == "init"
    )
    assert (first["project"], first["name"], first["config"]["optimizer.lr"]) == ("lean_ft", "my_run", "0.1")
    assert second["resume"] == "allow" and first["resume"] != "allow"
    lines = [(args[0], kwargs["step"]) for call, args, kwargs in standin.calls if call == "log"]
    assert lines[0::2] == [({"loss": 0.5, "lr": 0.1}, 1), ({"loss": 0.5, "lr": 0.1}, 3)]
    assert list(lines[1][0]) == ["samples"]
    assert TOKEN not in repr(standin.calls)
    assert json.loads((run / "loggers.json").read_text()) == {name: "made"}
    if name == "swanlab":
        assert (first["mode"], first["log_dir"], second["id"]) == ("offline", str(run / "swanlab"), "made")
        (_, _, private), *_ = [call for call in standin.calls if call[0] == "Settings"]
        assert not any(private["probe"].values()) and private["terminal"] == {"proxy_type": "none"}
    else:
        assert standin.servers == [None, None]
        monkeypatch.setattr(standin, "utils", SimpleNamespace(TRACKIO_DIR="/elsewhere"))
        with pytest.raises(ValueError, match="Trackio has one folder per process, and it is /elsewhere"):
            Loggers(cfg, run, {}, 0)
    assert os.environ["TRACKIO_SPACE_ID"] == "me/space"


SECRETS = {
    "system": TOKEN,
    "name": "SiGnAtUrE1",
    "project": "Pass-Word2",
    "pattern": 'correct"horse\\battery',
    "raised": "aMZ/sIgNeD3",
    "key": "0123456789abcdef0123456789abcdef01234567",
    "url": "bAsE-pAsS4",
}
REWARD = """
def fail_at_the_third_call(completions, calls=[]):
    calls.append(1)
    if len(calls) == 3:
        raise RuntimeError("no answer from https://host/x?a=1&X-Amz-Signature=aMZ/sIgNeD3&b=2")
    return [float(len(text)) for text in completions]
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("loggers", "processes"),
    [("csv,tensorboard,wandb", 1), pytest.param("csv,tensorboard,wandb,mlflow", 2, marks=pytest.mark.long)],
)
def test_no_file_of_a_run_and_of_its_loggers_holds_a_secret(tmp_path, loggers, processes):
    """Secrets in settings, the command line, variables, URLs and an error; in one process and in the launcher's."""
    for name in loggers.split(",")[1:]:
        pytest.importorskip(name)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 2 + 2?", "answer": "4"}\n' * 32)
    variables = {"MY_API_KEY": SECRETS["pattern"], "DB_PASS": SECRETS["project"], "WANDB_API_KEY": SECRETS["key"]}
    variables |= {
        "WANDB_BASE_URL": f"https://me:{SECRETS['url']}@host.example",
        "LEAN_FT_CACHE": str(tmp_path / "cache"),
    }
    several = ["--nproc-per-node", f"{processes}", "--max-restarts", "1"] if processes > 1 else []
    given = ["model.path=tiny", "data.source=rows.jsonl", "rewards=[reward.py:fail_at_the_third_call]", "device=cpu"]
    given += [
        "batch_size=4",
        "gradient_accumulation_steps=2",
        "generation.num_answers=2",
        "generation.max_new_tokens=4",
    ]
    given += [
        "max_steps=6",
        "save_every=1",
        "sample_every=1",
        "output_dir=run",
        "log.offline=true",
        f"log.to=[{loggers}]",
    ]
    given += [f"data.system=Use {SECRETS['system']}.", f"log.name=a?b=1&sig={SECRETS['name']}"]
    given += [f"log.project=p-{SECRETS['project']}", f"eval_pattern='{SECRETS['pattern']}|(a)'"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lean_ft", "run", *several, "grpo", *given, "--debug"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
    )
    run = tmp_path / "run"
    assert done.returncode == 1, done.stderr.decode()
    assert b"X-Amz-Signature=[token]&b=2" in done.stderr
    assert {"config.yaml", "samples.jsonl", "metrics.csv", "step_00000002"} <= {p.name for p in run.iterdir()}
    written = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file() and not path.is_symlink()}
    assert any(name.endswith(".wandb") for name in written) and any("tfevents" in name for name in written)
    for name, content in {**written, "stdout": done.stdout, "stderr": done.stderr}.items():
        found = [one for one, secret in SECRETS.items() if any(form in content for form in forms_of(secret))]
        assert not found, (name, found)


def forms_of(secret: str) -> list[bytes]:
    return [form.encode() for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""))]


def test_one_that_fails_is_left_out_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    loggers = Loggers(LogConfig(to=["csv"]), tmp_path, {}, 0)
    (tmp_path / "metrics.jsonl").unlink()
    loggers.write([{"step": 2, "loss": 1.0, "new": 1}])
    loggers.write([{"step": 3, "loss": 1.0, "new": 1}])
    assert capsys.readouterr().out.count("log.to=csv failed and is disabled from now on") == 1


def test_a_package_that_is_missing_is_said_before_anything_starts(config, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"wandb is not installed here. Run .*pip install -e .*\[wandb\]"):
        config(tmp_path / "run", log__to="[wandb]")


@pytest.fixture(autouse=True)
def quiet_services(monkeypatch):
    """Disable what the services write to the home directory and the terminal."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # seconds, on a busy machine
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    logging.getLogger("mlflow").setLevel(logging.ERROR)


@pytest.mark.long
def test_answers_come_as_tables(tmp_path):
    rows = [{"prompt": "2 + 2 =", "answer": "4 | four\nfive", "reward": 1.0, "rewards": {"exact_answer": 1.0}}] * 2
    loggers = Loggers(LogConfig(to=["tensorboard", "wandb", "mlflow", "csv"], offline=True), tmp_path, {}, start_step=0)
    loggers.write_samples(7, rows)
    loggers.close(done=True)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7 and text.splitlines()[0] == "| prompt | answer | reward | rewards |"
    assert text.splitlines()[2:] == ['| 2 + 2 = | 4 \\| four<br>five | 1.0 | {"exact_answer": 1.0} |'] * 2
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    (other,) = tmp_path.glob("mlflow/*/artifacts/samples/step_00000007.json")
    for table in (json.loads(file.read_text()), json.loads(other.read_text())):
        assert table["columns"] == list(rows[0])
        assert table["data"] == [["2 + 2 =", "4 | four\nfive", 1.0, '{"exact_answer": 1.0}']] * 2


def test_wandb_without_a_key_is_refused_and_asks_for_nothing(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="log.to=wandb could not be opened: there is no API key. Run `wandb login`"):
        Loggers(LogConfig(to=["wandb"]), tmp_path, {}, 0)


@pytest.mark.parametrize("when", ["opened", "written to"])
def test_a_service_that_does_not_answer_is_left_out(tmp_path, monkeypatch, capsys, when):
    class Silent(loggers._Logger):
        def __init__(self, *_):
            if when == "opened":
                threading.Event().wait()

        def write(self, rows):
            threading.Event().wait()

    monkeypatch.setitem(loggers._OPENED, "wandb", Silent)
    monkeypatch.setitem(loggers._SERVICES, "wandb", "json")
    monkeypatch.setattr(loggers, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(loggers.Loggers._each, "__defaults__", (0.2,))
    opened = loggers.Loggers(LogConfig(to=["wandb"]), tmp_path, {}, 0)
    for _ in range(3):
        opened.write([{"step": 1}])
    opened.close(done=True)
    said = capsys.readouterr().out
    assert said.count("log.to=wandb failed and is disabled from now on (no answer within 0.2 s)") == 1
