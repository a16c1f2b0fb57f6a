"""Frozen models used in training: references, teachers and reward models, and caches of their outputs."""

from lean_ft.frozen.reference import load_policy_reference, load_reference
from lean_ft.frozen.teacher import load_teacher, self_teacher

__all__ = ["load_policy_reference", "load_reference", "load_teacher", "self_teacher"]
