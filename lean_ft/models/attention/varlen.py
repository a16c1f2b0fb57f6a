"""PyTorch's flash kernels for documents. Their module imports the compiler, which takes a second, so import this one in
functions that run a kernel."""

import inspect
from typing import Any

from torch.nn.attention.varlen import AuxRequest as AuxRequest
from torch.nn.attention.varlen import varlen_attn as varlen_attn

_OPTIONS = inspect.signature(varlen_attn).parameters
TAKES_LENGTHS = "seqused_k" in _OPTIONS
# Versions of torch without this flag accept grouped heads by default.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _OPTIONS else {}
