"""Sampling by a server, which runs beside the training processes."""

from lean_ft.online.engines.server import VLLMServer

__all__ = ["VLLMServer"]
