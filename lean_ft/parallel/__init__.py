"""Training one model with several processes: the process group, and sharding of the model and its computation."""

from lean_ft.parallel.cutting import cut, refuse_cuts
from lean_ft.parallel.generating import generating
from lean_ft.parallel.parallelize import parallelize, sharded_linear
from lean_ft.parallel.ranks import check_number, join

__all__ = ["check_number", "cut", "generating", "join", "parallelize", "refuse_cuts", "sharded_linear"]
