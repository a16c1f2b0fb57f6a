"""Metrics loggers besides metrics.jsonl: a CSV file, TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab.

Each logger gets the numbers of every line of metrics.jsonl under the same names, by optimizer step, and the run's
settings. All but CSV also get the samples of online runs. All that a logger gets is redacted here, and no logger
records the command. A resumed run continues the same record: the service's id of the run is kept in `loggers.json` of
the run directory. A logger that fails during the run (a lost network) is disabled with one log line; the metrics that
it misses are in metrics.jsonl. The packages come with the extras `tensorboard`, `wandb`, `mlflow`, `trackio` and
`swanlab`.
"""

import csv
import importlib
import inspect
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from lean_ft.settings import LogConfig
from lean_ft.system.log import say
from lean_ft.system.redaction import redact_values
from lean_ft.system.run_directory import read_rows
from lean_ft.system.whole_files import open_in_place, read_json, write_json, write_whole
from lean_ft.training.metrics import Row, is_number

T = TypeVar("T")
CONNECT_SECONDS, CLOSE_SECONDS = 10, 60  # time limits for a service to answer, and to take the last data
# service -> module
_SERVICES = {"wandb": "wandb", "mlflow": "mlflow.tracking", "trackio": "trackio", "swanlab": "swanlab"}
# service -> variables, one of which sends the metrics to a server; without them the service writes to the disk
_SERVERS = {"mlflow": ("MLFLOW_TRACKING_URI",), "trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")}
RECORDS_FILE = "loggers.json"  # service -> its id of this run
MLFLOW_FILE = "mlflow.db"


class _Logger:
    """A metrics logger. If it raises, the logger is disabled and training continues."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def write_samples(self, step: int, rows: Sequence[Row]) -> None: ...

    def close(self, done: bool) -> None: ...


class Loggers:
    """The loggers in `log.to`, as one."""

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, Any], start_step: int):
        """Open the loggers for the run in `directory`, which resumes after `start_step`.

        Raises ValueError if a logger cannot be opened, because that is better now than after an hour.
        """
        self._open: dict[str, _Logger] = {}
        self._offline = cfg.offline
        settings = {name: as_text(value) for name, value in redact_values(settings).items()}
        names = redact_values({"project": cfg.project, "name": cfg.name or directory.name})
        cfg = cfg.model_copy(update=names)
        for name in cfg.to:
            if name == "jsonl":
                continue
            try:
                if not self._is_local(name):
                    importlib.import_module(_SERVICES[name])  # takes seconds and needs no network
                open_it = partial(_OPENED[name], cfg, directory, settings, start_step)
                self._open[name] = self._in_time(name, open_it, CONNECT_SECONDS)
            except TimeoutError as error:
                self._leave_out(name, error)
            except Exception as error:
                raise ValueError(f"log.to={name} could not be opened: {error}") from error

    def write(self, rows: Sequence[Row]) -> None:
        rows = redact_values(rows)
        self._each(lambda logger: logger.write(rows))

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Log a few completions after `step` steps, as a table. All rows have the same columns."""
        rows = redact_values(rows)
        self._each(lambda logger: logger.write_samples(step, rows))

    def close(self, *, done: bool) -> None:
        """`done`: all steps were made, or early stopping ended the run."""
        self._each(lambda logger: logger.close(done), CLOSE_SECONDS)

    def _each(self, call: Callable[[_Logger], None], seconds: int = CONNECT_SECONDS) -> None:
        for name, logger in list(self._open.items()):
            try:
                self._in_time(name, partial(call, logger), seconds)
            except Exception as error:
                del self._open[name]
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        say("WARNING", f"log.to={name} failed and is disabled from now on ({error}). metrics.jsonl has every line")

    def _is_local(self, name: str) -> bool:
        """Whether a logger only writes to the disk."""
        return (
            self._offline
            or name not in _SERVICES
            or (name in _SERVERS and not any(map(os.environ.get, _SERVERS[name])))
        )

    def _in_time(self, name: str, call: Callable[[], T], seconds: int) -> T:
        """Run `call`. Raises TimeoutError if a service has not answered after `seconds`; its thread is abandoned."""
        if self._is_local(name):
            return call()
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return result.result(seconds)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {seconds} s") from None


class _Csv(_Logger):
    """metrics.csv: the lines of metrics.jsonl, with a column for every name in any line."""

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, str], start_step: int):
        self._file, self._lines = directory / "metrics.csv", directory / "metrics.jsonl"
        self._columns: list[str] = []
        if self._lines.exists():
            self._write_whole()

    def write(self, rows: Sequence[Row]) -> None:
        if any(name not in self._columns for row in rows for name in _flat(row)):
            self._write_whole()  # from metrics.jsonl, which has these rows already
            return
        with open_in_place(self._file, "a") as file:
            csv.DictWriter(file, self._columns).writerows(_flat(row) for row in rows)

    def _write_whole(self) -> None:
        rows = [_flat(row) for row in read_rows(self._lines)]
        self._columns = list({name: None for row in rows for name in row})
        with write_whole(self._file) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


class _TensorBoard(_Logger):
    """Event files in the run directory: `tensorboard --logdir runs` shows all runs below it."""

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, str], start_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Hides the steps of an earlier start that this one repeats.
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=start_step + 1 if start_step else None)
        if not start_step:
            self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in _numbers(row).items():
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(_flat(row).values()) for row in rows)]
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def close(self, done: bool) -> None:
        self._writer.close()


def _has_wandb_key(wandb: ModuleType) -> bool:
    """Whether wandb has an API key. `wandb.init` would ask for one in the terminal, and its question aborts Python at
    the end of the run if nobody answers."""
    if "prompt" in inspect.signature(wandb.login).parameters:  # newer versions
        return bool(wandb.login(prompt=False, verify=False))
    return bool(wandb.api.api_key)


class _WeightsAndBiases(_Logger):
    """A wandb run, resumed under the same id. It gets no command, environment, console output, code or git remote.

    wandb writes in a process of its own. If both are killed, wandb loses its last lines, which metrics.jsonl has.
    """

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, str], start_step: int):
        import wandb

        online = not cfg.offline and os.environ.get("WANDB_MODE", "online") == "online"
        if online and not _has_wandb_key(wandb):
            raise ValueError("there is no API key. Run `wandb login`, set WANDB_API_KEY, or set log.offline=true.")
        run_id = _records(directory).get("wandb") if start_step else None
        self._run = wandb.init(
            project=cfg.project,
            name=cfg.name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(directory),
            config=settings,
            mode="offline" if cfg.offline else None,
            save_code=False,
            settings=wandb.Settings(x_disable_meta=True, disable_git=True, disable_code=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # steps repeated after a resume count again
        _keep_record(directory, "wandb", self._run.id)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"step": row["step"], **_numbers(row)})

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        import wandb

        data: Any = [list(_flat(row).values()) for row in rows]
        self._run.log({"step": step, "samples": wandb.Table(columns=list(rows[0]), data=data)})

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class _MLflow(_Logger):
    """An MLflow run, at MLFLOW_TRACKING_URI or in `mlflow.db` of the run directory."""

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, str], start_step: int):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        local = cfg.offline or not os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(f"sqlite:///{(directory / MLFLOW_FILE).absolute()}" if local else None)
        run_id = _records(directory).get("mlflow") if start_step else None
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return
        experiment = self._client.get_experiment_by_name(cfg.project)
        # The default place is below the working folder.
        place = (directory / "mlflow").absolute().as_uri() if local else None
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(cfg.project, place)
        self._id = self._client.create_run(experiment_id, run_name=cfg.name).info.run_id
        # MLflow's limits: 500 characters per value, 100 parameters per call.
        params = [Param(name, value[:500]) for name, value in settings.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])
        _keep_record(directory, "mlflow", self._id)

    def write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # milliseconds
        metrics = [Metric(name, value, now, row["step"]) for row in rows for name, value in _numbers(row).items()]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self._id, metrics=metrics[start : start + 500])

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        table = {"columns": list(rows[0]), "data": [list(_flat(row).values()) for row in rows]}
        self._client.log_dict(self._id, table, f"samples/step_{step:08d}.json")

    def close(self, done: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if done else "KILLED")


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager that sets environment variables of this process, or removes those that are None."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class _Trackio(_Logger):
    """A Trackio run: on the server that a variable names, or in Trackio's folder; with log.offline in the run
    directory.

    Trackio's threads write the lines. A step that is repeated after a resume is there twice. Trackio asks the Hub for
    the name of the account, if this machine has a token; HF_HUB_OFFLINE=1 prevents it.
    """

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, str], start_step: int):
        where = (directory / "trackio").absolute()
        run_id = _records(directory).get("trackio") if start_step else None
        # Trackio reads its folder once, when it is imported, and the server when a run begins.
        offline = {"TRACKIO_DIR": str(where), **dict.fromkeys(_SERVERS["trackio"])}
        with _environment(offline if cfg.offline else {}):
            trackio = importlib.import_module("trackio")
            if cfg.offline and Path(trackio.utils.TRACKIO_DIR) != where:
                raise ValueError(
                    f"Trackio has one folder per process, and it is {trackio.utils.TRACKIO_DIR}. Start this run in a "
                    "new process, or set log.offline=false."
                )
            quiet = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
            resume = "allow" if run_id else "never"
            self._run = trackio.init(cfg.project, cfg.name, config=settings, resume=resume, **quiet)
        self._run.id = run_id or self._run.id  # Trackio resumes the newest run of this name
        _keep_record(directory, "trackio", self._run.id)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(_numbers(row), step=row["step"])

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        trackio = importlib.import_module("trackio")
        self._run.log({"samples": trackio.Table(data=[_flat(row) for row in rows])}, step=step)

    def close(self, done: bool) -> None:
        self._run.finish()


class _SwanLab(_Trackio):
    """A SwanLab run, resumed under the same id. It gets no command, environment, console output, packages or git
    remote.

    With log.offline, each start writes a folder below `swanlab/` of the run directory, with the same id of the run.
    SwanLab writes the last lines when the run ends; if it is killed, only metrics.jsonl has them.
    """

    def __init__(self, cfg: LogConfig, directory: Path, settings: dict[str, str], start_step: int):
        swanlab = importlib.import_module("swanlab")
        run_id = _records(directory).get("swanlab") if start_step else None
        nothing = dict.fromkeys(("hardware", "runtime", "requirements", "git", "swanlab", "monitor"), False)
        random_state = random.getstate()  # SwanLab draws a color from Python's generator, which the run uses too
        self._run = swanlab.init(
            reinit=True,
            project=cfg.project,
            name=cfg.name,
            id=run_id,
            resume="allow" if run_id else None,
            log_dir=str(directory / "swanlab"),
            config=settings,
            mode="offline" if cfg.offline else None,
            settings=swanlab.Settings(interactive=False, probe=nothing, terminal={"proxy_type": "none"}),
        )
        random.setstate(random_state)
        _keep_record(directory, "swanlab", self._run.id)

    def write_samples(self, step: int, rows: Sequence[Row]) -> None:
        swanlab = importlib.import_module("swanlab")
        texts = ["\n".join(f"{name}: {value}" for name, value in _flat(row).items()) for row in rows]
        self._run.log({"samples": [swanlab.Text(text) for text in texts]}, step=step)

    def close(self, done: bool) -> None:
        self._run.finish(state="success" if done else "aborted")


_OPENED: dict[str, Callable[[LogConfig, Path, dict[str, str], int], _Logger]] = {
    "csv": _Csv,
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
    "trackio": _Trackio,
    "swanlab": _SwanLab,
}


def _numbers(row: Row) -> dict[str, float]:
    """The numbers in a line, except `step`."""
    return {name: float(value) for name, value in row.items() if is_number(value) and name != "step"}


def _flat(row: Row) -> Row:
    """A line for a table, with nested values (`non_finite`) as JSON."""
    return {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in row.items()}


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _records(directory: Path) -> dict[str, str]:
    records = read_json(directory / RECORDS_FILE)
    return {service: record for service, record in records.items() if isinstance(record, str)}


def _keep_record(directory: Path, service: str, record: str) -> None:
    write_json(directory / RECORDS_FILE, _records(directory) | {service: record}, on_disk=True)
