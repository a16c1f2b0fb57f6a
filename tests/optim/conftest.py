from typing import Any

import pytest

from tests.optim.tiny_training import CONFIGS

# One form of each rule, and stochastic rounding once.
QUICK = ("sgd", "sgd_momentum", "adamw", "adamw_rounding", "adamw_8bit", "adamw_8bit_torchao", "adamw_4bit", "muon")
QUICK += ("apollo_mini", "adafactor")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CONFIGS])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of each rule in turn, with weight decay."""
    return {"weight_decay": 0.1, **CONFIGS[request.param]}
