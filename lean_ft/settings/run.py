"""Settings of a whole run, and protocols for functions that read several groups."""

import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, get_args

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

from lean_ft.settings.answers import GenerationConfig, Reward, ToolsConfig
from lean_ft.settings.base import (
    Device,
    Every,
    FilePath,
    FunctionName,
    GroupT,
    Name,
    OwnFactory,
    RegularExpression,
    Resume,
    Settings,
)
from lean_ft.settings.conflicts import check_conflicts
from lean_ft.settings.data import DataConfig, PromptDataConfig, RowsConfig, SFTDataConfig
from lean_ft.settings.devices import MemoryConfig
from lean_ft.settings.losses import (
    SELF,
    DistillConfig,
    LossConfig,
    PreferenceLossConfig,
    ReferenceConfig,
    UnpairedLossConfig,
    ValueConfig,
)
from lean_ft.settings.model import LoRAConfig, ModelConfig
from lean_ft.settings.optimizer import OptimizerConfig, ScheduleConfig, UsualRates
from lean_ft.settings.source_names import SourceName, check_watched
from lean_ft.system.installation import install_command
from lean_ft.system.user_functions import check_factory

DEFAULT_OUTPUT_DIR = Path("runs/<model>_<recipe>")
LOGGER_PACKAGES = {name: name for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")}  # name -> module


def _have_their_packages(names: list[str]) -> list[str]:
    for name in names:
        if name in LOGGER_PACKAGES and importlib.util.find_spec(LOGGER_PACKAGES[name]) is None:
            raise ValueError(f"{name} is not installed here. Run {install_command(name)}, or leave it out.")
    return names


class LogConfig(Settings):
    """Loggers of the run, in addition to metrics.jsonl."""

    to: Annotated[
        list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow", "trackio", "swanlab"]],
        AfterValidator(_have_their_packages),
    ] = Field(default=["jsonl"])
    """Loggers beside metrics.jsonl. `csv` writes metrics.csv and `tensorboard` writes event files, both into
    output_dir. `wandb`, `mlflow`, `trackio` and `swanlab` are services, or folders in output_dir with log.offline. A
    resumed run continues the same record."""
    project: Name = "lean_ft"
    """Project name in wandb, trackio and swanlab, experiment name in mlflow."""
    name: Name | None = None
    """Run name in these services. null: the last part of output_dir."""
    offline: bool = False
    """Write the files of these services into output_dir and use no network."""


class RecipeConfig(Settings):
    """The settings that every training recipe has."""

    usual_lr: ClassVar[UsualRates] = UsualRates(2e-5, adapter=2e-4)
    """What optimizer.lr=null stands for. Recipes with another objective have others."""

    batch_size: PositiveInt = 2
    """Sequences, pairs or completions per forward pass; packed rows if the data is packed."""
    gradient_accumulation_steps: PositiveInt = 1
    """Forward passes per optimizer step, counted over all processes."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum global norm of the gradients. null does not clip."""
    epochs: PositiveFloat = 1
    """Passes over the data. A fraction is allowed: 2.5."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, if the epochs have not ended before."""
    compile: bool = False
    """Use torch.compile for each layer, the loss and the optimizer's update."""
    freeze: list[str] = Field(default_factory=list)
    """Parameters that do not train: ends of parameter or module names (embed_tokens, mlp, lora_A), or names with
    wildcards (model.layers.[0-3].*)."""
    train: list[str] = Field(default_factory=list)
    """Train only these parameters, named as in `freeze`. An empty list trains all that are not frozen."""
    neftune_alpha: NonNegativeFloat = 0.0
    """NEFTune: add uniform noise to the embeddings while training, of at most neftune_alpha / sqrt(tokens * hidden
    size). The paper uses 5 to 15. 0 adds none."""
    eval_every: Every = 0
    """Evaluate every N optimizer steps, after each `epoch`, or after this fraction of an epoch (0.25). 0 evaluates only
    at the end."""
    stop_after_evals: NonNegativeInt = 0
    """Early stopping: end the run after this many evaluations in a row without a new lowest held-out loss. 0 never
    stops early."""
    watched_source: SourceName | None = None
    """Name of a source of held-out rows, whose loss alone decides for stop_after_evals and keep_best. null: the loss
    of all held-out rows."""
    eval_answers: NonNegativeInt = 0
    """Number of held-out questions that the model answers before and after training. An answer is right if it equals
    the held-out one. 0 asks none."""
    eval_pattern: RegularExpression | None = None
    """Regular expression that selects what eval_answers compares: the first group of its last match, in the model's
    answer and in the held-out one. For GSM8K: `#### (.*)`."""
    eval_tasks: list[Name] = Field(default_factory=list)
    """Tasks of lm-evaluation-harness to run after training, by name or as YAML files. Install the extra `eval`."""
    eval_tasks_every: Every = 0
    """Also run eval_tasks during training, as often as in eval_every. 0 runs them only at the end."""
    eval_tasks_limit: PositiveInt | None = None
    """Questions per task. null uses all."""
    save_every: Every | Literal["auto"] = "auto"
    """Save a checkpoint as often as in eval_every; 0 saves only at the end. `auto` saves after each epoch if saving
    takes less than a tenth of the time, and at least every 30 minutes. It keeps the last two unless keep_last is
    set."""
    save_async: bool = False
    """Copy the checkpoint to host memory and write it while training continues. The copy takes the memory of the
    trained weights and the optimizer state once more until it is written. The run waits for the last checkpoint."""
    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep; older ones are deleted. null keeps all, or the last two if save_every is
    auto."""
    keep_every: NonNegativeInt = 0
    """Also keep checkpoints whose step is a multiple of this number. 0 keeps none of them."""
    keep_best: NonNegativeInt = 0
    """Also keep this many checkpoints with the lowest held-out loss. Requires keep_last, and an evaluation at each
    checkpoint: save_every must be a multiple of eval_every."""
    max_bad_steps: NonNegativeInt = 10
    """Number of steps with a non-finite loss or gradient that the run skips. Their batches are saved in
    output_dir/bad_batches. One more stops the run with a report."""
    log_every: PositiveInt = 1
    """Optimizer steps between lines of metrics.jsonl and updates of the progress bar."""
    log: LogConfig = LogConfig()
    profile: bool = False
    """Profile a few steps with torch.profiler. The trace and a table of the largest operations go to
    output_dir/profile."""
    profile_steps: tuple[NonNegativeInt, NonNegativeInt, PositiveInt] = (2, 1, 2)
    """With `profile`: number of steps to wait, to warm up and to record."""
    seed: NonNegativeInt = 0
    """Seed of the data order, dropout, sampling and stochastic rounding."""
    device: Device = "auto"
    plan: Literal["auto"] | bool = "auto"
    """Simulate one step before the weights are loaded, and print its peak memory. `auto` does so for the recipes of
    lean_ft. For your own recipe, run `leanft plan`."""
    output_dir: Annotated[FilePath, AfterValidator(Path.expanduser)] = Field(
        DEFAULT_OUTPUT_DIR,
        validate_default=False,  # a Path, where strict JSON has text
    )
    """The run directory: configuration, metrics and checkpoints. If it is not set, the same command resumes an
    unfinished run; after a finished run, or with other settings, the run gets the next free name:
    runs/<model>_<recipe>_2."""
    resume: Resume = "auto"
    """`auto` resumes from the newest complete checkpoint in output_dir. `never` refuses a directory that holds a run. A
    path resumes from that checkpoint."""

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> "RecipeConfig":
        check_conflicts(self)
        return self

    @model_validator(mode="after")
    def _watches_a_source(self) -> "RecipeConfig":
        check_watched(self.watched_source, self.group(RowsConfig))
        return self

    @model_validator(mode="after")
    def _has_output_dir(self) -> "RecipeConfig":
        if self.output_dir == DEFAULT_OUTPUT_DIR:
            object.__setattr__(self, "output_dir", self.default_output_dir)  # the settings are frozen
            self.model_fields_set.discard("output_dir")  # a preset may have a copy of the default
        return self

    @model_validator(mode="after")
    def _has_learning_rate(self) -> "RecipeConfig":
        for name, group in self:
            if isinstance(group, OptimizerConfig) and group.lr is None:
                object.__setattr__(self, name, _with_usual_rate(group, self.usual_rate))
        return self

    @property
    def usual_rate(self) -> float:
        """The learning rate that these settings have without optimizer.lr."""
        return self.usual_lr.all_parameters if self.group(LoRAConfig) is None else self.usual_lr.adapter

    @classmethod
    def meanings_of_null(cls) -> dict[str, str]:
        rates = str(cls.usual_lr if _fields_of(cls, LoRAConfig) else f"{cls.usual_lr.all_parameters:g}")
        return {f"{name}.lr": rates for name in _fields_of(cls, OptimizerConfig)}

    @property
    def default_output_dir(self) -> Path:
        """`runs/<model>_<recipe>`, with the last part of the model's path and the name of the recipe's file."""
        model = self.group(ModelConfig)
        name = f"{_short_name(model.path)}_{recipe_name(self)}" if model is not None else recipe_name(self)
        return DEFAULT_OUTPUT_DIR.with_name(name)

    @property
    def batches_of_a_round(self) -> int:
        """The number that gradient_accumulation_steps must be a multiple of, so that a round of sampled completions has
        all completions of each prompt; 1 for recipes that sample none."""
        generation = self.group(GenerationConfig)
        if generation is None or self.group(PreferenceLossConfig) is not None:  # a pair is chosen from all completions
            return 1
        return generation.num_answers // math.gcd(generation.num_answers, self.batch_size * generation.steps_per_round)

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
        return prompts.max_prompt_length + self.completion_tokens if prompts and generation else None

    @property
    def completion_tokens(self) -> int:
        """Maximum tokens of a sampled completion, with those that tools or an environment give."""
        generation = self.needed(GenerationConfig)
        return generation.max_new_tokens + generation.max_given_tokens * self.has_turns

    @property
    def has_turns(self) -> bool:
        """Whether a completion may have several turns, with tools or an environment."""
        tools = self.group(ToolsConfig)
        return (tools is not None and bool(tools.functions)) or getattr(self, "environment", None) is not None

    @property
    def pass_tokens(self) -> int | None:
        """Maximum tokens per forward pass; None if the recipe does not use lean_ft's data settings."""
        data, row_tokens = self.group(DataConfig), self.row_tokens
        if data is not None and data.batch_tokens is not None:
            return data.batch_tokens
        return None if row_tokens is None else self.batch_size * row_tokens

    def group(self, group_class: type[GroupT]) -> GroupT | None:
        """Return the recipe's first group of settings of this class, or None."""
        return next((value for _, value in self if isinstance(value, group_class)), None)

    def needed(self, group_class: type[GroupT]) -> GroupT:
        """Return the recipe's first group of settings of this class. Raises ValueError if it has none."""
        if (group := self.group(group_class)) is None:
            raise ValueError(
                f"the recipe's Config has no settings of the class {group_class.__name__}, which a function of the "
                f"recipe reads. Add a field of this class, such as `data: {group_class.__name__}`."
            )
        return group


class AnswersConfig(RecipeConfig):
    """Settings of recipes that train on completions and a frozen reference model, except for data and loss."""

    usual_lr: ClassVar[UsualRates] = UsualRates(1e-6, adapter=1e-5)

    model: ModelConfig
    lora: LoRAConfig | None = None  # null: train all parameters
    reference: ReferenceConfig = ReferenceConfig.model_validate({})
    optimizer: OptimizerConfig = OptimizerConfig.model_validate({})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({})
    memory: MemoryConfig = MemoryConfig.model_validate({})


class OnlineConfig(AnswersConfig):
    """Settings of recipes that train on sampled completions, except for the loss."""

    data: PromptDataConfig
    rewards: list[Reward | FunctionName]
    """Reward functions, added up: your own function `my_rewards.py:name`, a built-in one (`exact_answer`,
    `math_answer`, `format`, `length`, and `environment`, the environment's own reward), or a reward model's folder. Use
    {function or model, weight, pattern} to set more."""
    generation: GenerationConfig = GenerationConfig.model_validate({})
    tools: ToolsConfig = ToolsConfig.model_validate({})
    environment: Annotated[OwnFactory, AfterValidator(check_factory)] | None = None
    """Your own environment, `my_env.py:Env`: a class with `reset(row)`, which returns what is added to the prompt, and
    `step(action)`, which returns an observation, a reward and whether the episode is over. Or a class whose methods are
    tools, with `reset(**row)` and perhaps `get_reward()`, as TRL's environment_factory. Or a function that makes an
    environment of Gymnasium or OpenEnv. See docs/online.md."""
    batch_size: PositiveInt = 8
    """Completions, or pairs of them, per forward pass. If a round would not have all generation.num_answers completions
    of each prompt, and gradient_accumulation_steps is not set, it is raised."""
    schedule: ScheduleConfig = ScheduleConfig.model_validate({"name": "constant"})
    sample_every: NonNegativeInt = 10
    """Optimizer steps between prompts and completions that are printed and written to samples.jsonl. 0 writes none."""


class KeepTeacherConfig(Settings):
    """Settings of `leanft score --top-k`, which stores a teacher's likeliest tokens."""

    model: ModelConfig
    data: SFTDataConfig
    destination: FilePath
    """Folder to write, for distill.cached."""
    top_k: PositiveInt = 64
    """Number of likeliest next tokens to keep per target; 8 bytes each."""
    temperature: PositiveFloat = 1.0
    """Temperature of the distillation; set distill.temperature to the same value."""
    nf4: bool = False
    """Keep the model's linear layers in 4 bits."""
    batch_size: PositiveInt = 8
    """Sequences per forward pass; packed rows if the data is packed."""
    memory: MemoryConfig = MemoryConfig.model_validate({})
    compile: bool = False
    """Use torch.compile for each layer."""
    device: Device = "auto"


def recipe_name(cfg: BaseModel) -> str:
    """Return the name of the recipe file that `cfg` belongs to."""
    module = type(cfg).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).stem if file else module.rpartition(".")[2]


def _fields_of(config_class: type[BaseModel], group_class: type[Settings]) -> list[str]:
    """The names of the fields that hold a group of this class, or null."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in config_class.model_fields.items()}
    return [name for name in kinds if any(isinstance(k, type) and issubclass(k, group_class) for k in kinds[name])]


def _with_usual_rate(optimizer: OptimizerConfig, rate: float) -> OptimizerConfig:
    """The settings with a learning rate that nobody set."""
    changed = optimizer.model_copy(update={"lr": rate})
    changed.model_fields_set.discard("lr")
    return changed


def _short_name(model_path: str) -> str:
    """Return the last part of a model's path as a file name: `name` for `org/name@revision`, `org/name:name.gguf` and
    the run directory or checkpoint `runs/name/step_00000100`."""
    parts = Path(os.path.abspath(Path(model_path).expanduser())).parts
    last = parts[-2] if re.fullmatch(r"step_\d{8}", parts[-1]) else parts[-1]
    name = re.sub(r"@[^:]*", "", last).rpartition(":")[2].removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


_NAMES_A_MODEL: dict[type[Settings], str] = {ModelConfig: "path", DistillConfig: "teacher", ValueConfig: "path"}


def models_of(cfg: BaseModel) -> dict[tuple[str, str], str]:
    """Return every model path in the settings by (group, setting): {("model", "path"): "tiny"}."""
    paths: dict[tuple[str, str], str | None] = {
        (group, name): getattr(value, name)
        for group, value in cfg
        for settings_class, name in _NAMES_A_MODEL.items()
        if isinstance(value, settings_class)
    }
    return {place: path for place, path in paths.items() if path is not None and (place[1], path) != ("teacher", SELF)}


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
