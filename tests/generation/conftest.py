"""The random tiny checkpoints of tests/models."""

from tests.models.conftest import make_checkpoint

__all__ = ["make_checkpoint"]
