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

import torch
from torch import Tensor

NUM_ANSWERS, NUM_TOKENS = 6, 7
EMPTY = (
    *("omegaconf", "tensordict", "transformers", "verl", "verl.trainer", "verl.trainer.config", "verl.utils"),
    *("verl.utils.device", "verl.utils.import_utils", "verl.workers", "verl.workers.config"),
)


class ActorConfig(dict):
    """The settings of verl's policy that its losses read."""

    clip_ratio = None
    clip_ratio_low = property(lambda self: self["low"])
    clip_ratio_high = property(lambda self: self["high"])
    global_batch_info = property(lambda self: {})


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

    old, moved = -noise(1.0).abs(), noise(0.6)
    noise(1.0)  # the stored values were drawn after advantages that nothing uses now
    given = {
        "mask": (torch.arange(NUM_TOKENS) < torch.tensor([7, 1, 4, 0, 2, 6])[:, None]).double(),  # one is empty
        "old_logps": old,
        "logps": old + moved,
        "values": noise(1.0),
        "old_values": noise(1.0),
        "rewards": noise(1.0),
    }
    mask, logps = given["mask"], given["logps"].clone().requires_grad_()
    values = given["values"].clone().requires_grad_()

    no_second_clip = ActorConfig(low=0.2, high=0.2, clip_ratio_c=1e9)
    vanilla = verl.POLICY_LOSS_REGISTRY["vanilla"]
    policy_loss, *_ = vanilla(given["old_logps"], logps, given["rewards"], mask, "token-mean", no_second_clip)
    above, returns = verl.compute_gae_advantage_return(given["rewards"], given["old_values"], mask, 0.97, 0.9)
    value_loss, _ = verl.compute_value_loss(values, returns, given["old_values"], mask, 0.3)

    def listed(tensor: Tensor) -> list:
        return [float(f"{value:.12g}") for value in tensor.detach().flatten().tolist()]

    result = {
        "verl": subprocess.check_output(["git", "-C", clone, "rev-parse", "HEAD"], text=True).strip(),
        "shape": [NUM_ANSWERS, NUM_TOKENS],
        "given": {name: listed(tensor) for name, tensor in given.items()},
        "policy_loss": [policy_loss.item(), listed(torch.autograd.grad(policy_loss, logps)[0])],
        "whitened": listed(above * mask),
        "returns": listed(returns * mask),
        "value_loss": [value_loss.item(), listed(torch.autograd.grad(value_loss, values)[0])],
    }
    Path(__file__).with_name("verl_values.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
