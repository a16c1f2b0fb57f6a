"""Frozen models beside the one that trains: references, teachers, reward models, and caches of what they compute."""

from lean_ft.frozen.reference import load_policy_reference, load_reference
from lean_ft.frozen.teacher import load_teacher

__all__ = ["load_policy_reference", "load_reference", "load_teacher"]
