"""A recipe in miniature, with the real decoder and stand-ins for data and optimizer, for the tests of `Run`.

    python toy_recipe.py key=value ...

The loop draws from every random number generator, so that a resumed run is only right if all of them are restored.
"""

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lean_ft.config import load_config
from lean_ft.models import load_model
from lean_ft.optim import LossScaler
from lean_ft.settings import MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, ScheduleConfig
from lean_ft.training import Run, start

SLEEP_SECONDS = float(os.environ.get("TOY_SLEEP_SECONDS", "0"))  # in step 2, for tests that interrupt it
BAD_STEP = -1  # the step whose loss is infinite
FAILING_STEP = -1  # the step whose body raises


class Config(RecipeConfig):
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-2)
    schedule: ScheduleConfig = ScheduleConfig(name="constant")
    memory: MemoryConfig = MemoryConfig()
    num_rows: int = 7


class Batch:
    def __init__(self, rows: torch.Tensor):
        self.rows = rows  # (B, T + 1)
        self.num_tokens = rows[:, :-1].numel()
        self.num_targets = self.num_tokens - 1


class Batches:
    """Rows of random tokens, shuffled each epoch; the last batch of an epoch may be short."""

    report = "random tokens"

    def __init__(self, num_rows: int, batch_size: int, seed: int):
        self._rows = torch.randint(0, 64, (num_rows, 9), generator=torch.Generator().manual_seed(seed))
        self._batch_size, self._seed = batch_size, seed
        self._epoch = self._next = 0
        self.batches_per_epoch = -(-num_rows // batch_size)
        self.fingerprint = f"{num_rows} rows"

    def take(self, count: int) -> list[Batch]:
        if self._next == self.batches_per_epoch:
            self._epoch, self._next = self._epoch + 1, 0
        generator = torch.Generator().manual_seed(1000 * self._seed + self._epoch)
        shuffled = self._rows[torch.randperm(len(self._rows), generator=generator)]
        begin, self._next = self._next, min(self._next + count, self.batches_per_epoch)
        return [Batch(rows) for rows in shuffled.split(self._batch_size)[begin : self._next]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._next = state["epoch"], state["next"]


class AdamW:
    """torch's AdamW with its state as a flat mapping."""

    def __init__(self, model: nn.Module, lr: float):
        self._names = [name for name, _ in model.named_parameters()]
        self._inner = torch.optim.AdamW(model.parameters(), lr=lr)
        self.state_bytes = 8 * sum(p.numel() for p in model.parameters())
        self.scaler = LossScaler(enabled=False)
        self.zero_grad, self.step = self._inner.zero_grad, self._inner.step

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = self._inner.state_dict()["state"]
        return {f"{self._names[i]}.{key}": tensor for i, kept in state.items() for key, tensor in kept.items()}

    def load_state_dict(self, tensors) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            parameter, _, key = name.rpartition(".")
            state.setdefault(self._names.index(parameter), {})[key] = tensor
        self._inner.load_state_dict({**self._inner.state_dict(), "state": state})


class Tokenizer:
    def save(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")


def main(cfg: Config) -> None:
    device = start(cfg)
    model = load_model(cfg.model.path, device=device, random_init=cfg.model.random_init)
    optimizer = AdamW(model, cfg.optimizer.lr)
    batches = Batches(cfg.num_rows, cfg.batch_size, cfg.seed)
    run = Run(cfg, model=model, optimizer=optimizer, batches=batches, tokenizer=Tokenizer())

    for step in run.steps():
        print("began step", step, flush=True)
        if step == 2:
            time.sleep(SLEEP_SECONDS)
        if step == FAILING_STEP:
            raise KeyError("the loop's body failed")
        micro_batches = batches.take(cfg.gradient_accumulation_steps)
        loss_sum = torch.zeros((), device=device)
        for batch in micro_batches:
            rows = batch.rows.to(device)
            logits = model(rows[:, :-1])
            logits = logits + torch.randn_like(logits) * random.random() * np.random.rand()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / len(micro_batches)
            loss.backward()
            loss_sum += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if step == BAD_STEP:
            loss_sum.fill_(torch.inf)
        run.log(loss=loss_sum, lr=cfg.optimizer.lr, grad_norm=grad_norm, micro_batches=micro_batches)
        loss_sum.fill_(-1)  # what was logged is what it was then
        if run.evaluation_due():
            run.log_evaluation(loss=1.5, num_eval_tokens=12)


if __name__ == "__main__":
    main(load_config(Config, None, sys.argv[1:]))
