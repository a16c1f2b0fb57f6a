"""PPO's value model: predicts, before each token of a completion, the reward still to come.

In full training it is a separate model with an output layer of one number. With an adapter it is such a layer on the
policy's hidden states: policy, value model and reference then share one base, it needs no forward pass of its own, and
its loss also trains the adapter. It is sharded as the policy is.

Shapes: G completions, A tokens of the longest, N tokens of all, D hidden size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.losses import AnswerTokens, hidden_states, on_grid
from lean_ft.memory import apply_memory
from lean_ft.models import Decoder
from lean_ft.models.config_json import REWARD_LABELS
from lean_ft.parallel import cut, parallelize, sharded_linear
from lean_ft.peft import load_with_adapter
from lean_ft.settings import AnswersConfig, ParallelConfig, ValueConfig
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Ranks, local


class ValueModel(nn.Module):
    """`value(batch, now)`: (G, A) float32, 0 after a completion's end."""

    def __init__(self, cfg: AnswersConfig, model: Decoder, ranks: Ranks = ALONE) -> None:
        """model: the policy. Raises ValueError for `value.path` with an adapter, or as `load_with_adapter`, `cut` and
        `parallelize` do."""
        super().__init__()
        path, parallel = cfg.needed(ValueConfig).path, cfg.needed(ParallelConfig)
        self._is_float16, device = cfg.model.dtype == "float16", model.device
        self.own: Decoder | None = None
        if cfg.lora is None:
            from_path = {} if path is None else {"path": path}
            self.own = load_with_adapter(cfg.model.model_copy(update=from_path), None, device, ranks, REWARD_LABELS)
            cut(self.own, parallel, ranks)
            apply_memory(self.own, cfg.memory, compile=cfg.compile)
            parallelize(self.own, parallel, ranks)
        elif path is not None:
            raise ValueError(
                f"value.path={path} is a separate model, but with an adapter the value model is an output layer on the "
                "policy. Remove value.path, or set lora=null."
            )
        else:
            if model.config.head_bias:
                raise ValueError(
                    "lora: the value model would be an output layer on the policy, which is not supported for models "
                    "whose output layer has a bias. Set lora=null."
                )
            self.score = sharded_linear(model.config.hidden_size, 1, ranks)
            self.score.to_empty(device=device)
            nn.init.zeros_(local(self.score.weight))
        say("value model", "an output layer on the policy" if self.own is None else "a separate model")

    @property
    def output_weight(self) -> Tensor:
        """(1, D)."""
        return self.score.weight if self.own is None else self.own.output_weight

    def forward(self, batch: Any, now: AnswerTokens) -> Tensor:
        hidden = now.hidden
        if self.own is not None:
            with torch.autocast(hidden.device.type, torch.float16, enabled=self._is_float16):
                inputs = {name: value for name, value in batch.inputs.items() if name != "recorded_experts"}
                hidden, _ = hidden_states(self.own, replace(batch, inputs=inputs), of_rows=True)
        read = hidden.flatten(0, 1).index_select(0, batch.index).float()  # (N, D): before each token
        values = self.score(read) if self.own is None else read @ self.output_weight.float().T  # (N, 1)
        return on_grid(values[:, 0], batch)
