"""Every setting a recipe takes: its name, default, unit and meaning, stated here and nowhere else.

A recipe's `Config` subclasses `RecipeConfig` and lists the groups below that it uses. `lean_ft.settings.text` turns
YAML and `key=value` overrides into one of these; `leanft cat RECIPE` prints them all.
"""

from lean_ft.settings.answers import AskConfig, AskedModelConfig, GenerationConfig, Reward, SamplingConfig
from lean_ft.settings.base import Device, Dtype, Every, Fraction, GroupT, Settings, spelled_out
from lean_ft.settings.data import (
    AnswerDataConfig,
    DataConfig,
    FormatName,
    PreferenceDataConfig,
    PromptDataConfig,
    RewardDataConfig,
    RowsConfig,
    SFTDataConfig,
    Source,
    Sources,
    UnpairedDataConfig,
)
from lean_ft.settings.devices import MemoryConfig, ParallelConfig
from lean_ft.settings.losses import (
    LOSS_READS,
    POLICY_LOSS_READS,
    DistillConfig,
    LossConfig,
    PolicyLossConfig,
    PPOLossConfig,
    PreferenceLossConfig,
    ReferenceConfig,
    RewardLossConfig,
    UnpairedLossConfig,
    ValueConfig,
)
from lean_ft.settings.model import GroupSize, LoRAConfig, ModelConfig, QuantizeConfig, QuantizedKind
from lean_ft.settings.optimizer import MUON_MOMENTUM, OptimizerConfig, ScheduleConfig
from lean_ft.settings.run import (
    LOGGER_PACKAGES,
    AnswersConfig,
    KeepTeacherConfig,
    LogConfig,
    OnlineConfig,
    RecipeConfig,
    TrainingConfig,
    models_of,
)

__all__ = [
    "LOGGER_PACKAGES",
    "LOSS_READS",
    "MUON_MOMENTUM",
    "POLICY_LOSS_READS",
    "AnswerDataConfig",
    "AnswersConfig",
    "AskConfig",
    "AskedModelConfig",
    "DataConfig",
    "Device",
    "DistillConfig",
    "Dtype",
    "Every",
    "FormatName",
    "Fraction",
    "GenerationConfig",
    "GroupSize",
    "GroupT",
    "KeepTeacherConfig",
    "LoRAConfig",
    "LogConfig",
    "LossConfig",
    "MemoryConfig",
    "ModelConfig",
    "OnlineConfig",
    "OptimizerConfig",
    "PPOLossConfig",
    "ParallelConfig",
    "PolicyLossConfig",
    "PreferenceDataConfig",
    "PreferenceLossConfig",
    "PromptDataConfig",
    "QuantizeConfig",
    "QuantizedKind",
    "RecipeConfig",
    "ReferenceConfig",
    "Reward",
    "RewardDataConfig",
    "RewardLossConfig",
    "RowsConfig",
    "SFTDataConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "Settings",
    "Source",
    "Sources",
    "TrainingConfig",
    "UnpairedDataConfig",
    "UnpairedLossConfig",
    "ValueConfig",
    "models_of",
    "spelled_out",
]
