"""Settings of a run as a whole, and what is asked of all groups together."""

import importlib.util
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from lean_ft.settings.answers import GenerationConfig, Reward
from lean_ft.settings.base import Device, Every, GroupT, RegularExpression, Settings
from lean_ft.settings.data import DataConfig, PromptDataConfig, SFTDataConfig
from lean_ft.settings.devices import MemoryConfig
from lean_ft.settings.losses import DistillConfig, LossConfig, ReferenceConfig, ValueConfig
from lean_ft.settings.model import LoRAConfig, ModelConfig
from lean_ft.settings.optimizer import OptimizerConfig, ScheduleConfig

LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # name -> module


def _have_their_packages(names: list[str]) -> list[str]:
    for name in names:
        if name in LOGGER_PACKAGES and importlib.util.find_spec(LOGGER_PACKAGES[name]) is None:
            raise ValueError(f"{name} is not installed here: pip install 'lean-ft[{name}]', or leave it out.")
    return names


class LogConfig(Settings):
    """Where a run's numbers go beside metrics.jsonl, which every run writes."""

    to: Annotated[
        list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]], AfterValidator(_have_their_packages)
    ] = Field(
        default=["jsonl"],
        description="`csv` writes metrics.csv, `tensorboard` event files, both into output_dir; `wandb` and `mlflow` are "
        "services, or with log.offline folders in output_dir. A resumed run goes on in the same record.",
    )
    project: str = Field(default="lean_ft", description="What wandb calls a project, and mlflow an experiment.")
    name: str | None = Field(default=None, description="The run's name there; null: the last part of output_dir.")
    offline: bool = Field(
        default=False, description="wandb and mlflow write into output_dir, and nothing goes to a network."
    )


class RecipeConfig(Settings):
    """The settings that every training recipe has."""

    batch_size: PositiveInt = Field(2, description="Sequences (packed rows, when packing) a forward pass.")
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Forward passes an optimizer step, those of all processes together."
    )
    clip_grad_norm: PositiveFloat | None = Field(
        None, description="Largest global norm of the gradients; null does not clip."
    )
    epochs: PositiveFloat = Field(1, description="Passes over the data, the last of which may be a part: 2.5.")
    max_steps: PositiveInt | None = Field(
        None, description="Optimizer steps after which to stop, if before the epochs end."
    )
    compile: bool = Field(False, description="torch.compile each layer, the loss and the optimizer's update.")
    freeze: list[str] = Field(
        default_factory=list,
        description="Parameters that keep their values: ends of names, of parameters or of what holds them "
        "(embed_tokens, mlp, lora_A), or names with wildcards (model.layers.[0-3].*).",
    )
    train: list[str] = Field(
        default_factory=list,
        description="Of what would train, the parameters that do, named as in freeze; empty leaves all of it.",
    )
    neftune_alpha: NonNegativeFloat = Field(
        0.0,
        description="NEFTune: noise on the embeddings in training, evenly from -1 to 1 times this over the root of a "
        "sequence's tokens times the hidden size. Its authors took 5 to 15; 0 adds none.",
    )
    eval_every: Every = Field(
        0,
        description="How often to evaluate: after so many optimizer steps, after each `epoch`, or after a share of one "
        "(0.25); 0 evaluates only at the end.",
    )
    stop_after_evals: NonNegativeInt = Field(
        0,
        description="Early stopping: ends the run after so many evaluations in a row without a held-out loss below the "
        "lowest before; 0 never does.",
    )
    eval_answers: NonNegativeInt = Field(
        0,
        description="Held-out questions that the model answers before and after training, right where the whole answer is "
        "the held-out one; 0 asks none.",
    )
    eval_pattern: RegularExpression | None = Field(
        None,
        description="What of an answer eval_answers compares: the first group of this regular expression's last match, in "
        "the model's answer and in the held-out one. GSM8K: `#### (.*)`.",
    )
    eval_tasks: list[str] = Field(
        default_factory=list,
        description="Tasks of lm-evaluation-harness (the extra eval), by name or as YAML files, that the model does after "
        "training, and as often before as eval_tasks_every says.",
    )
    eval_tasks_every: Every = Field(0, description="How often, as eval_every; 0 only at the end. They take their time.")
    eval_tasks_limit: PositiveInt | None = Field(None, description="Questions of each of them; null asks all.")
    save_every: Every | Literal["auto"] = Field(
        "auto",
        description="How often to save a checkpoint, as eval_every; 0 saves only at the end. `auto` saves after each "
        "epoch, as long as saving takes less than a tenth of the time, and at least every 30 minutes; of these it keeps "
        "the last two unless keep_last says otherwise.",
    )
    save_async: bool = Field(
        False,
        description="Copy what a checkpoint holds to host memory and write it while training goes on. The copy takes "
        "the trained weights and the optimizer's state once more until it is written: on a CPU that doubles them. The "
        "last checkpoint is waited for.",
    )
    keep_last: PositiveInt | None = Field(
        None,
        description="Checkpoints kept, the newest ones; older ones are deleted. null keeps all, or the last two where "
        "save_every is auto.",
    )
    keep_every: NonNegativeInt = Field(
        0, description="Beside the newest: checkpoints of steps that are multiples of this are kept as well; 0: none."
    )
    keep_best: NonNegativeInt = Field(
        0,
        description="With keep_last: checkpoints kept as well, those with the lowest held-out loss. Needs an evaluation "
        "at each checkpoint: save_every a multiple of eval_every.",
    )
    max_bad_steps: NonNegativeInt = Field(
        10,
        description="Steps of a run whose loss or gradients may be not finite: each is skipped and its batch kept in "
        "output_dir/bad_batches. One more stops the run with a report.",
    )
    log_every: PositiveInt = Field(
        1, description="Optimizer steps between writes to metrics.jsonl and the progress bar."
    )
    log: LogConfig = LogConfig()
    profile: bool = Field(
        False,
        description="Profile a few steps by torch.profiler: a trace, the largest operations by module, and memory over time "
        "beside the plan, in output_dir/profile.",
    )
    profile_steps: tuple[NonNegativeInt, NonNegativeInt, PositiveInt] = Field(
        (2, 1, 2), description="With profile: steps that it waits, warms up, and watches."
    )
    seed: NonNegativeInt = Field(0, description="Seeds data order, dropout and stochastic rounding.")
    device: Device = "auto"
    plan: Literal["auto"] | bool = Field(
        "auto",
        description="Rehearse one step on shapes before weights are loaded, and tell its peak memory. `auto` does for the "
        "recipes that come with lean_ft, and runs no file of yours twice; `leanft plan` plans that.",
    )
    output_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        description="The run directory: config, metrics and checkpoints."
    )
    resume: str = Field(
        "auto",
        description="`auto` goes on from the newest whole checkpoint in output_dir, `never` refuses a directory that "
        "holds a run, a path names a checkpoint.",
    )

    @model_validator(mode="after")
    def _check_retention(self) -> "RecipeConfig":
        if self.most_kept is None and (self.keep_every or self.keep_best):
            name = "keep_every" if self.keep_every else "keep_best"
            raise ValueError(
                f"{name} tells what is kept beyond the last checkpoints, and keep_last=null keeps all of them. "
                f"Set keep_last (1 keeps the newest), or leave {name} out."
            )
        if self.keep_best and self.save_every and not _is_multiple(self.save_every, self.eval_every):
            raise ValueError(
                f"keep_best={self.keep_best} compares checkpoints by their held-out loss, and with "
                f"save_every={self.save_every} and eval_every={self.eval_every} some would have none. Set save_every to "
                f"a multiple of eval_every."
            )
        if self.stop_after_evals and not self.eval_every:
            raise ValueError(
                f"stop_after_evals={self.stop_after_evals} compares evaluations, and with eval_every=0 there is only the "
                "last. Set eval_every (epoch evaluates after each epoch), or leave it out."
            )
        return self

    @property
    def most_kept(self) -> int | None:
        """Checkpoints kept for being the newest; None keeps all."""
        return 2 if self.keep_last is None and self.save_every == "auto" else self.keep_last

    @property
    def row_tokens(self) -> int | None:
        """Tokens that a row of a batch may have; None where the recipe has no data of ours."""
        if (data := self.group(DataConfig)) is not None:
            return data.max_length
        prompts, generation = self.group(PromptDataConfig), self.group(GenerationConfig)
        return prompts.max_prompt_length + generation.max_new_tokens if prompts and generation else None

    @property
    def pass_tokens(self) -> int | None:
        """Tokens that a forward pass may have; None where the recipe has no data of ours."""
        data, row_tokens = self.group(DataConfig), self.row_tokens
        if data is not None and data.batch_tokens is not None:
            return data.batch_tokens
        return None if row_tokens is None else self.batch_size * row_tokens

    def group(self, kind: type[GroupT]) -> GroupT | None:
        """The recipe's group of settings of this kind, the first of several; None where it has none."""
        return next((value for _, value in self if isinstance(value, kind)), None)


def _is_multiple(every: Every | Literal["auto"], other: Every) -> bool:
    """Whether what happens `every` so often comes together with what happens each `other`, whatever an epoch has."""
    long, short = (1.0 if value == "epoch" else value for value in (every, other))
    if isinstance(long, str) or isinstance(short, str) or type(long) is not type(short) or not short:
        return False
    return abs(long / short - round(long / short)) < 1e-9


class AnswersConfig(RecipeConfig):
    """What recipes have that learn from answers measured against a frozen reference; data and loss are left to them."""

    model: ModelConfig
    lora: LoRAConfig | None = None  # null: all parameters train
    reference: ReferenceConfig = ReferenceConfig.model_validate({})
    optimizer: OptimizerConfig = OptimizerConfig.model_validate({"lr": 1e-6})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({})
    memory: MemoryConfig = MemoryConfig.model_validate({})


class OnlineConfig(AnswersConfig):
    """What every recipe has that learns from answers of its own; its loss is left to it."""

    data: PromptDataConfig
    rewards: list[Reward | str] = Field(
        description="What answers are judged by, added up: a function of your own, `my_rewards.py:name`, or `exact_answer`, "
        "`format`, `length`, or a reward model's folder; or {function or model, weight, pattern}."
    )
    generation: GenerationConfig = GenerationConfig.model_validate({})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({"name": "constant"})
    sample_every: NonNegativeInt = Field(
        10,
        description="Optimizer steps between prompts and answers that are shown, and kept in samples.jsonl; 0: none.",
    )


class KeepTeacherConfig(Settings):
    """What `leanft score --top-k` keeps of a teacher's predictions."""

    model: ModelConfig
    data: SFTDataConfig
    destination: Path = Field(description="The folder to write, for distill.cached.")
    top_k: PositiveInt = Field(64, description="Likeliest next tokens kept of each target; 8 bytes each.")
    temperature: PositiveFloat = Field(1.0, description="That of the student's distill.temperature.")
    nf4: bool = Field(False, description="Keep the model's linear layers in 4 bits.")
    batch_size: PositiveInt = Field(8, description="Sequences (packed rows, when packing) a forward pass.")
    memory: MemoryConfig = MemoryConfig.model_validate({})
    compile: bool = Field(False, description="torch.compile each layer.")
    device: Device = "auto"


_NAMES_A_MODEL: dict[type[Settings], str] = {ModelConfig: "path", DistillConfig: "teacher", ValueConfig: "path"}


def models_of(cfg: BaseModel) -> dict[tuple[str, str], str]:
    """Every model that settings name, by its group and name there: {("model", "path"): "tiny"}."""
    found: dict[tuple[str, str], str | None] = {
        (group, name): getattr(value, name)
        for group, value in cfg
        for kind, name in _NAMES_A_MODEL.items()
        if isinstance(value, kind)
    }
    return {place: path for place, path in found.items() if path is not None}


class TrainingConfig(Protocol):
    """What the Config of a recipe that trains has, whatever its objective: for calls that take the whole of it."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    memory: MemoryConfig
    clip_grad_norm: float | None
    compile: bool
