"""What a GPU's matrix products can do."""

import torch

from lean_ft.torch_private import constant_for_compiler


@constant_for_compiler
def multiplies_into_float32(dtype: torch.dtype) -> bool:
    """Whether the GPU's products of matrices of `dtype` can be float32: of bfloat16 since compute capability 8.0."""
    return dtype != torch.bfloat16 or not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
