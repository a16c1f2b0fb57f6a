"""A small recipe for the tests of `Run`, with the real decoder and optimizer and stubs for data and tokenizer.

The loop draws from every random number generator, so resuming is only correct if all of them are restored.
"""

import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lean_ft.data import DataReport
from lean_ft.models import load_model
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.settings import MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, ScheduleConfig
from lean_ft.system.contents import UNRECORDED
from lean_ft.training import Run, start

SLEEP_SECONDS = 0.0  # in step 2, for tests that interrupt it
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
        self.input_ids, self.labels = rows[:, :-1], rows[:, 1:]  # (B, T)
        self.num_tokens = self.labels.numel()
        self.num_targets = self.num_tokens - 1


class Batches:
    """Rows of random tokens, shuffled each epoch; the last batch of an epoch may be short."""

    report = DataReport("random tokens")
    unit = "sequences"

    def __init__(self, num_rows: int, batch_size: int, seed: int):
        self._rows = torch.randint(0, 64, (num_rows, 9), generator=torch.Generator().manual_seed(seed))
        self._batch_size, self._seed = batch_size, seed
        self._epoch = self._next = 0
        self.batches_per_epoch = -(-num_rows // batch_size)
        self.fingerprint, self.contents = f"{num_rows} rows", UNRECORDED

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


class Tokenizer:
    files, chat_template, media = (), None, ()

    def save(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")

    def decode(self, ids: list[int]) -> str:
        return str(ids)


def main(cfg: Config) -> None:
    device = start(cfg)
    model = load_model(cfg.model.path, device=device, random_init=cfg.model.random_init)
    optimizer = build_optimizer(model, cfg)
    batches = Batches(cfg.num_rows, cfg.batch_size, cfg.seed)
    run = Run(cfg, model=model, optimizer=optimizer, batches=batches, held_out=[], tokenizer=Tokenizer())

    for step in run.steps():
        print("began step", step, flush=True)
        if step == 2:
            time.sleep(SLEEP_SECONDS)
        if step == FAILING_STEP:
            raise KeyError("the loop's body failed")
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)
        micro_batches = batches.take(cfg.gradient_accumulation_steps)
        loss_sum = torch.zeros((), device=device)
        for i, batch in enumerate(micro_batches):
            logits = model(batch.input_ids.to(device))
            logits = logits + torch.randn_like(logits) * random.random() * np.random.rand()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten().to(device))
            loss = loss / len(micro_batches) * (torch.inf if step == BAD_STEP else 1.0)
            optimizer.scale(loss, last=i == len(micro_batches) - 1).backward()
            loss_sum += loss.detach()
        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss_sum, lr=lr, grad_norm=grad_norm, micro_batches=micro_batches)
        loss_sum.fill_(-1)  # does not change the logged value
        if run.evaluation_due():
            run.log_evaluation(eval_loss=1.5, num_eval_tokens=12)
