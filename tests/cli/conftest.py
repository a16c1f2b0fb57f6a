"""Fixtures: a toy recipe that needs no torch, folders of recipes and presets, and functions that call `leanft`."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from lean_ft.cli.main import run_command_line
from lean_ft.system import catalog

TOY_RECIPE = '''"""A toy recipe: does what `act` says.

    leanft run toy
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from lean_ft.settings import ModelConfig, OptimizerConfig, Settings


class Config(Settings):
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: PositiveInt = Field(2, description="Sequences a forward pass.")
    act: str = Field("print", description="What to do.")


def main(cfg: Config) -> None:
    if cfg.act == "print":
        print("ran with", cfg.model.path, cfg.batch_size)
    elif cfg.act == "environment":
        import os

        print("allocator", os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    elif cfg.act == "refuse":
        raise ValueError("batch_size must be even; it is odd. Set batch_size=4.")
    elif cfg.act == "fail":
        raise RuntimeError("the loss is not finite\\nand a second line")
    elif cfg.act == "fail silently":
        raise RuntimeError
    elif cfg.act == "fail inside a library":
        import statistics

        statistics.quantiles([1.0, 2.0], n=0)  # its own ValueError subclass, raised by its own code
    elif cfg.act == "exhaust":
        raise MemoryError("can't allocate memory")
    elif cfg.act == "open":
        open("/no/such/file.jsonl")
    elif cfg.act == "interrupt":
        raise KeyboardInterrupt
    elif cfg.act == "exit":
        raise SystemExit(143)
    elif cfg.act == "flood":
        for line in range(10_000):
            print(line, "x" * 100)
'''


@dataclass
class Answer:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def toy_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY_RECIPE)
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `recipes/` and `configs/` replace lean_ft's in this process."""
    root = tmp_path / "shipped"
    (root / "recipes").mkdir(parents=True)
    (root / "recipes" / "toy_single_device.py").write_text(TOY_RECIPE)
    (root / "recipes" / "_draft.py").write_text("1 / 0")
    (root / "recipes" / "other.py").write_text('"""Another one,\nin two lines."""\n')
    (root / "configs" / "tiny").mkdir(parents=True)
    (root / "configs" / "tiny" / "toy.yaml").write_text("# The toy.\nmodel: {path: tiny}\noptimizer: {lr: 1e-5}\n")
    (root / "configs" / "foreign.yaml").write_text("lora: {rank: 8}\n")
    monkeypatch.setattr(catalog, "_shipped", lambda inside_wheel, beside_package: root / beside_package)
    return root


class Leanft:
    """Runs `leanft` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Answer:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            run_command_line([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return Answer(exited.value.code, printed.out, printed.err)

    def ok(self, *arguments: str | Path) -> Answer:
        """Run a command that succeeds."""
        answer = self(*arguments)
        assert answer.code == 0, answer.out + answer.err
        return answer

    def quiet(self, *arguments: str | Path) -> Answer:
        """Run a command that succeeds and prints nothing to stderr."""
        answer = self.ok(*arguments)
        assert answer.err == ""
        return answer

    def refused(self, *arguments: str | Path) -> str:
        """Run a command with wrong input. Return its message."""
        answer = self(*arguments)
        assert (answer.code, answer.out) == (2, ""), answer.err
        return answer.err


@pytest.fixture
def leanft(capsys: pytest.CaptureFixture[str]) -> Leanft:
    return Leanft(capsys)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of the embedded model, in the format of a run."""
    from lean_ft.models import load_model
    from lean_ft.peft import apply_lora, save_adapter
    from lean_ft.settings import LoRAConfig
    from tests.peft.conftest import randomize

    model = load_model("tiny")
    apply_lora(model, LoRAConfig(rank=2))
    randomize(model)
    save_adapter(model, folder := tmp_path_factory.mktemp("adapter"))
    return folder


@pytest.fixture(params=["of shapes", pytest.param("rehearsed", marks=pytest.mark.long)])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that follow from a few settings; or those of rehearsals, which take seconds each."""
    if request.param == "rehearsed":
        return
    from lean_ft.plan import known_plans, rehearsal, search
    from lean_ft.plan.devices import ONE_DEVICE
    from lean_ft.plan.result import Launches, Peak, Rehearsal

    def planned(recipe, cfg, device, machines=ONE_DEVICE, needs_timeline=False):
        kept = {"none": 8, "every_n": 6, "selective": 5, "full": 4}[cfg.memory.activation_checkpointing]
        numbers = [Launches(i + 1.0, 1e12 * i, 1e6 * i, i / 1000) for i in range(40)]
        return Rehearsal(
            Peak("loss", {"weights": 2**21, "activations": kept * 2**12 * cfg.data.max_length}),
            (30 - kept) * 1e10 / (device.flops_16bit or 1e9),
            cfg.data.batch_tokens or cfg.batch_size * cfg.data.max_length,
            885_888,
            [],
            reserved_bytes=kept * 2**21,
            machines=machines,
            sent_away_bytes=2**20,
            ledger={(f"layers.*.part_{i}", "mm"): number for i, number in enumerate(numbers)},
        )

    monkeypatch.setattr(rehearsal, "rehearse", planned)
    for module in (known_plans, search):
        monkeypatch.setattr(module, "known_or_new", planned)
