"""Every private name of torch is in the table and exists in this torch. The tests of its users show what it does."""

import re
from pathlib import Path

import pytest

from lean_ft import torch_private
from lean_ft.torch_private import PRIVATE_NAMES, PrivateName, missing_names


def test_a_name_that_torch_lacks_is_reported(monkeypatch):
    assert missing_names() == {}
    gone = PrivateName("torch:_no_such_name", "nothing", "nothing fails")
    monkeypatch.setitem(PRIVATE_NAMES, "gone", gone)
    assert missing_names() == {"gone": gone}
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch_private.gone


def test_private_names_stand_nowhere_else():
    """The pattern of the lint, which also runs here: pre-commit is not part of `make test`."""
    root = Path(__file__).parents[1]
    config = (root / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pattern = re.compile(config.split("id: private-torch")[1].split("entry: '")[1].split("'\n")[0])
    assert pattern.search("from torch._dynamo import config") and pattern.search("torch.ops.aten._softmax(x)")
    found = [
        f"{path.relative_to(root)}: {match.group()}"
        for folder in ("lean_ft", "recipes")
        for path in (root / folder).rglob("*.py")
        if path.name != "torch_private.py"
        if (match := pattern.search(path.read_text(encoding="utf-8")))
    ]
    assert not found
