from typing import Any

import pytest

from tests.optim.tiny_training import CONFIGS


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of each rule in turn, with weight decay."""
    return {"weight_decay": 0.1, **request.param}
