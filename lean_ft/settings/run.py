"""Settings of a whole run, and protocols for functions that read several groups."""

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
from lean_ft.settings.base import Device, Every, GroupT, RegularExpression, Resume, Settings
from lean_ft.settings.conflicts import check_conflicts
from lean_ft.settings.data import DataConfig, PromptDataConfig, SFTDataConfig
from lean_ft.settings.devices import MemoryConfig
from lean_ft.settings.losses import (
    DistillConfig,
    LossConfig,
    PreferenceLossConfig,
    ReferenceConfig,
    UnpairedLossConfig,
    ValueConfig,
)
from lean_ft.settings.model import LoRAConfig, ModelConfig
from lean_ft.settings.optimizer import OptimizerConfig, ScheduleConfig

LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # name -> module


def _have_their_packages(names: list[str]) -> list[str]:
    for name in names:
        if name in LOGGER_PACKAGES and importlib.util.find_spec(LOGGER_PACKAGES[name]) is None:
            raise ValueError(f"{name} is not installed here: pip install 'lean-ft[{name}]', or leave it out.")
    return names


class LogConfig(Settings):
    """Loggers of the run, in addition to metrics.jsonl."""

    to: Annotated[
        list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]], AfterValidator(_have_their_packages)
    ] = Field(
        default=["jsonl"],
        description="Loggers beside metrics.jsonl. `csv` writes metrics.csv and `tensorboard` writes event files, both "
        "into output_dir. `wandb` and `mlflow` are services, or folders in output_dir with log.offline. A "
        "resumed run continues the same record.",
    )
    project: str = Field(default="lean_ft", description="Project name in wandb, experiment name in mlflow.")
    name: str | None = Field(
        default=None, description="Run name in wandb and mlflow. null: the last part of output_dir."
    )
    offline: bool = Field(
        default=False, description="Write wandb's and mlflow's files into output_dir and use no network."
    )


class RecipeConfig(Settings):
    """The settings that every training recipe has."""

    batch_size: PositiveInt = Field(
        2, description="Sequences, pairs or completions per forward pass; packed rows if the data is packed."
    )
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Forward passes per optimizer step, counted over all processes."
    )
    clip_grad_norm: PositiveFloat | None = Field(
        None, description="Maximum global norm of the gradients. null does not clip."
    )
    epochs: PositiveFloat = Field(1, description="Passes over the data. A fraction is allowed: 2.5.")
    max_steps: PositiveInt | None = Field(
        None, description="Stop after this many optimizer steps, if the epochs have not ended before."
    )
    compile: bool = Field(False, description="Use torch.compile for each layer, the loss and the optimizer's update.")
    freeze: list[str] = Field(
        default_factory=list,
        description="Parameters that do not train: ends of parameter or module names (embed_tokens, mlp, lora_A), or "
        "names with wildcards (model.layers.[0-3].*).",
    )
    train: list[str] = Field(
        default_factory=list,
        description="Train only these parameters, named as in `freeze`. An empty list trains all that are not frozen.",
    )
    neftune_alpha: NonNegativeFloat = Field(
        0.0,
        description="NEFTune: add uniform noise to the embeddings while training, of at most neftune_alpha / sqrt(tokens "
        "* hidden size). The paper uses 5 to 15. 0 adds none.",
    )
    eval_every: Every = Field(
        0,
        description="Evaluate every N optimizer steps, after each `epoch`, or after this fraction of an epoch (0.25). 0 "
        "evaluates only at the end.",
    )
    stop_after_evals: NonNegativeInt = Field(
        0,
        description="Early stopping: end the run after this many evaluations in a row without a new lowest held-out loss."
        " 0 never stops early.",
    )
    eval_answers: NonNegativeInt = Field(
        0,
        description="Number of held-out questions that the model answers before and after training. An answer is right if"
        " it equals the held-out one. 0 asks none.",
    )
    eval_pattern: RegularExpression | None = Field(
        None,
        description="Regular expression that selects what eval_answers compares: the first group of its last match, in "
        "the model's answer and in the held-out one. For GSM8K: `#### (.*)`.",
    )
    eval_tasks: list[str] = Field(
        default_factory=list,
        description="Tasks of lm-evaluation-harness to run after training, by name or as YAML files. Install the extra "
        "`eval`.",
    )
    eval_tasks_every: Every = Field(
        0, description="Also run eval_tasks during training, as often as in eval_every. 0 runs them only at the end."
    )
    eval_tasks_limit: PositiveInt | None = Field(None, description="Questions per task. null uses all.")
    save_every: Every | Literal["auto"] = Field(
        "auto",
        description="Save a checkpoint as often as in eval_every; 0 saves only at the end. `auto` saves after each epoch "
        "if saving takes less than a tenth of the time, and at least every 30 minutes. It keeps the last two "
        "unless keep_last is set.",
    )
    save_async: bool = Field(
        False,
        description="Copy the checkpoint to host memory and write it while training continues. The copy takes the memory "
        "of the trained weights and the optimizer state once more until it is written. The run waits for the "
        "last checkpoint.",
    )
    keep_last: PositiveInt | None = Field(
        None,
        description="Number of newest checkpoints to keep; older ones are deleted. null keeps all, or the last two if "
        "save_every is auto.",
    )
    keep_every: NonNegativeInt = Field(
        0, description="Also keep checkpoints whose step is a multiple of this number. 0 keeps none of them."
    )
    keep_best: NonNegativeInt = Field(
        0,
        description="Also keep this many checkpoints with the lowest held-out loss. Requires keep_last, and an evaluation"
        " at each checkpoint: save_every must be a multiple of eval_every.",
    )
    max_bad_steps: NonNegativeInt = Field(
        10,
        description="Number of steps with a non-finite loss or gradient that the run skips. Their batches are saved in "
        "output_dir/bad_batches. One more stops the run with a report.",
    )
    log_every: PositiveInt = Field(
        1, description="Optimizer steps between lines of metrics.jsonl and updates of the progress bar."
    )
    log: LogConfig = LogConfig()
    profile: bool = Field(
        False,
        description="Profile a few steps with torch.profiler. The trace and a table of the largest operations go to "
        "output_dir/profile.",
    )
    profile_steps: tuple[NonNegativeInt, NonNegativeInt, PositiveInt] = Field(
        (2, 1, 2), description="With `profile`: number of steps to wait, to warm up and to record."
    )
    seed: NonNegativeInt = Field(0, description="Seed of the data order, dropout, sampling and stochastic rounding.")
    device: Device = "auto"
    plan: Literal["auto"] | bool = Field(
        "auto",
        description="Simulate one step before the weights are loaded, and print its peak memory. `auto` does so for the "
        "recipes of lean_ft. For your own recipe, run `leanft plan`.",
    )
    output_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        description="The run directory: configuration, metrics and checkpoints."
    )
    resume: Resume = Field(
        "auto",
        description="`auto` resumes from the newest complete checkpoint in output_dir. `never` refuses a directory that "
        "holds a run. A path resumes from that checkpoint.",
    )

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> "RecipeConfig":
        check_conflicts(self)
        return self

    @property
    def most_kept(self) -> int | None:
        """Number of newest checkpoints to keep; None keeps all."""
        return 2 if self.keep_last is None and self.save_every == "auto" else self.keep_last

    @property
    def row_tokens(self) -> int | None:
        """Maximum tokens per row of a batch; None if the recipe does not use lean_ft's data settings."""
        if (data := self.group(DataConfig)) is not None:
            return data.max_length
        prompts, generation = self.group(PromptDataConfig), self.group(GenerationConfig)
        return prompts.max_prompt_length + generation.max_new_tokens if prompts and generation else None

    @property
    def pass_tokens(self) -> int | None:
        """Maximum tokens per forward pass; None if the recipe does not use lean_ft's data settings."""
        data, row_tokens = self.group(DataConfig), self.row_tokens
        if data is not None and data.batch_tokens is not None:
            return data.batch_tokens
        return None if row_tokens is None else self.batch_size * row_tokens

    def group(self, kind: type[GroupT]) -> GroupT | None:
        """Return the recipe's first group of settings of this class, or None."""
        return next((value for _, value in self if isinstance(value, kind)), None)

    def needed(self, kind: type[GroupT]) -> GroupT:
        """Return the recipe's first group of settings of this class. Raises ValueError if it has none."""
        if (group := self.group(kind)) is None:
            raise ValueError(
                f"the recipe's Config has no settings of the class {kind.__name__}, which a function of the recipe reads. "
                f"Add a field of this class, such as `data: {kind.__name__}`."
            )
        return group


class AnswersConfig(RecipeConfig):
    """Settings of recipes that train on completions and a frozen reference model, except for data and loss."""

    model: ModelConfig
    lora: LoRAConfig | None = None  # null: train all parameters
    reference: ReferenceConfig = ReferenceConfig.model_validate({})
    optimizer: OptimizerConfig = OptimizerConfig.model_validate({"lr": 1e-6})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({})
    memory: MemoryConfig = MemoryConfig.model_validate({})


class OnlineConfig(AnswersConfig):
    """Settings of recipes that train on sampled completions, except for the loss."""

    data: PromptDataConfig
    rewards: list[Reward | str] = Field(
        description="Reward functions, added up: your own function `my_rewards.py:name`, a built-in one (`exact_answer`, "
        "`format`, `length`), or a reward model's folder. Use {function or model, weight, pattern} to set "
        "more."
    )
    generation: GenerationConfig = GenerationConfig.model_validate({})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({"name": "constant"})
    sample_every: NonNegativeInt = Field(
        10,
        description="Optimizer steps between prompts and completions that are printed and written to samples.jsonl. 0 "
        "writes none.",
    )


class KeepTeacherConfig(Settings):
    """Settings of `leanft score --top-k`, which stores a teacher's likeliest tokens."""

    model: ModelConfig
    data: SFTDataConfig
    destination: Path = Field(description="Folder to write, for distill.cached.")
    top_k: PositiveInt = Field(64, description="Number of likeliest next tokens to keep per target; 8 bytes each.")
    temperature: PositiveFloat = Field(
        1.0, description="Temperature of the distillation; set distill.temperature to the same value."
    )
    nf4: bool = Field(False, description="Keep the model's linear layers in 4 bits.")
    batch_size: PositiveInt = Field(8, description="Sequences per forward pass; packed rows if the data is packed.")
    memory: MemoryConfig = MemoryConfig.model_validate({})
    compile: bool = Field(False, description="Use torch.compile for each layer.")
    device: Device = "auto"


_NAMES_A_MODEL: dict[type[Settings], str] = {ModelConfig: "path", DistillConfig: "teacher", ValueConfig: "path"}


def models_of(cfg: BaseModel) -> dict[tuple[str, str], str]:
    """Return every model path in the settings by (group, setting): {("model", "path"): "tiny"}."""
    found: dict[tuple[str, str], str | None] = {
        (group, name): getattr(value, name)
        for group, value in cfg
        for kind, name in _NAMES_A_MODEL.items()
        if isinstance(value, kind)
    }
    return {place: path for place, path in found.items() if path is not None}


class TrainingConfig(Protocol):
    """Settings that the Config of every training recipe has."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    memory: MemoryConfig
    clip_grad_norm: float | None
    compile: bool


class LogitsConfig(Protocol):
    """Settings that a forward pass with a loss reads."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def memory(self) -> MemoryConfig: ...
    @property
    def compile(self) -> bool: ...


class ComparisonConfig(LogitsConfig, Protocol):
    """Settings for losses that compare whole completions."""

    @property
    def loss(self) -> PreferenceLossConfig | UnpairedLossConfig: ...


class SampledConfig(LogitsConfig, Protocol):
    """Settings for losses on sampled completions."""

    @property
    def generation(self) -> GenerationConfig: ...


class TaughtConfig(LogitsConfig, Protocol):
    """Settings for distillation."""

    @property
    def distill(self) -> DistillConfig: ...
