"""The planner: what a recipe takes, known before it runs, and which settings fit."""

from lean_ft.plan.devices import CUDA_RESERVED_BYTES, Device, choose_device
from lean_ft.plan.rehearsal import Rehearsal, rehearse
from lean_ft.plan.search import Candidate, Search, search

__all__ = ["CUDA_RESERVED_BYTES", "Candidate", "Device", "Rehearsal", "Search", "choose_device", "rehearse", "search"]
