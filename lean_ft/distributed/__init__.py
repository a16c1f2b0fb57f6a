"""Several processes that train one model: who they are, and how parameters are cut over them."""

from lean_ft.distributed.parallelize import parallelize
from lean_ft.distributed.ranks import join

__all__ = ["join", "parallelize"]
