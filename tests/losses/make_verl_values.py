"""Write verl_values.json, the results of verl's functions on a few completions, for test_verl.py.

    python tests/losses/make_verl_values.py CLONE_OF_VERL

verl's file of algorithms runs unchanged at the clone's HEAD. Its imports other than torch and numpy are replaced by
empty modules, because the functions called here do not need them.
"""

import json
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

NUM_ANSWERS, NUM_TOKENS, LONGEST = 6, 7, 12
GROUPS = [0, 0, 0, 1, 1, 1]
EMPTY = (
    *("omegaconf", "tensordict", "transformers", "verl", "verl.trainer", "verl.trainer.config", "verl.utils"),
    *("verl.utils.device", "verl.utils.import_utils", "verl.workers", "verl.workers.config"),
)


class ActorConfig(dict):
    """The settings of verl's policy that its losses read."""

    clip_ratio = None
    clip_ratio_low = property(lambda self: self["low"])
    clip_ratio_high = property(lambda self: self["high"])
    global_batch_info = property(lambda self: self.get("denominators", {}))


def load(clone: str, path: str, name: str) -> types.ModuleType:
    """Load a module of verl from its source."""
    text = subprocess.check_output(["git", "-C", clone, "show", f"HEAD:{path}"], text=True)
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, path, "exec"), vars(module))
    return module


def main(clone: str) -> None:
    sys.modules |= {name: MagicMock() for name in EMPTY}
    sys.modules["verl.workers.config"].ActorConfig = ActorConfig
    sys.modules["verl.trainer.config"].AlgoConfig = type("AlgoConfig", (), {})
    functional = load(clone, "verl/utils/torch_functional.py", "verl.utils.torch_functional")
    sys.modules["verl.utils"].torch_functional = sys.modules["verl"].utils.torch_functional = functional
    verl = load(clone, "verl/trainer/ppo/core_algos.py", "verl.trainer.ppo.core_algos")

    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return (scale * torch.randn(NUM_ANSWERS, NUM_TOKENS, generator=generator, dtype=torch.float64)).round(
            decimals=6
        )

    old = -noise(1.0).abs()
    given = {
        "mask": (torch.arange(NUM_TOKENS) < torch.tensor([7, 1, 4, 0, 2, 6])[:, None]).double(),  # one is empty
        "old_logps": old,
        "logps": old + noise(0.6),
        "advantages": noise(1.0)[:, :1].repeat(1, NUM_TOKENS),  # per completion, so that both versions of gspo agree
        "values": noise(1.0),
        "old_values": noise(1.0),
        "rewards": noise(1.0),
    }
    mask, logps = given["mask"], given["logps"].clone().requires_grad_()
    values = given["values"].clone().requires_grad_()

    def loss(
        name: str, divided: str, low: float, high: float, advantages: str = "advantages", **denominators
    ) -> Tensor:
        cfg = ActorConfig(low=low, high=high, clip_ratio_c=1e9, denominators=denominators)  # no second clip
        return verl.POLICY_LOSS_REGISTRY[name](given["old_logps"], logps, given[advantages], mask, divided, cfg)[0]

    counted = int((mask.sum(1) > 0).sum())
    losses = {
        "grpo": loss("vanilla", "seq-mean-token-mean", 0.2, 0.2),
        "dapo": loss("vanilla", "token-mean", 0.2, 0.28),
        "dr_grpo": loss("vanilla", "seq-mean-token-sum-norm", 0.2, 0.2, loss_scale_factor=LONGEST * counted),
        "gspo": loss("gspo", "seq-mean-token-mean", 3e-4, 4e-4),
        "cispo": loss("cispo", "token-mean", 1.0, 4.0),
        "ppo": loss("vanilla", "token-mean", 0.2, 0.2, "rewards"),  # tokens of a completion differ
    }
    rewards = given["rewards"][:, :1] * mask.new_ones(1, NUM_TOKENS).eq(1).cumsum(1).eq(1)  # at one token
    of_groups = {"token_level_rewards": rewards, "response_mask": torch.ones_like(mask), "index": np.array(GROUPS)}
    advantages = {
        "group": verl.compute_grpo_outcome_advantage(**of_groups, epsilon=1e-4),
        "mean": verl.compute_grpo_outcome_advantage(**of_groups, norm_adv_by_std_in_grpo=False),
        "leave_one_out": verl.compute_rloo_outcome_advantage(**of_groups),
    }
    above, returns = verl.compute_gae_advantage_return(given["rewards"], given["old_values"], mask, 0.97, 0.9)
    value_loss, _ = verl.compute_value_loss(values, returns, given["old_values"], mask, 0.3)

    def listed(tensor: Tensor) -> list:
        return [float(f"{value:.12g}") for value in tensor.detach().flatten().tolist()]

    result = {
        "verl": subprocess.check_output(["git", "-C", clone, "rev-parse", "HEAD"], text=True).strip(),
        "shape": [NUM_ANSWERS, NUM_TOKENS],
        "longest": LONGEST,
        "given": {name: listed(tensor) for name, tensor in given.items()},
        "losses": {name: [one.item(), listed(torch.autograd.grad(one, logps)[0])] for name, one in losses.items()},
        "advantages": {name: listed(found[0][:, 0]) for name, found in advantages.items()},
        "whitened": listed(above * mask),
        "returns": listed(returns * mask),
        "value_loss": [value_loss.item(), listed(torch.autograd.grad(value_loss, values)[0])],
    }
    Path(__file__).with_name("verl_values.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
