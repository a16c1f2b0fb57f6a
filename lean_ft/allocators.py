"""What the memory allocators are told before torch starts; a user's own choice, in the environment, stands.

Each variable is read once by torch or a library in it:

- `PYTORCH_ALLOC_CONF=expandable_segments:True`: the CUDA allocator grows its segments, which fragment less.
- `THP_MEM_ALLOC_ENABLE=1`: large CPU tensors lie on huge pages (Linux). Activations come and go at every layer, and
  each time the kernel maps and clears their pages anew: writing a fresh 40 MB tensor took 22 ms on pages of 4 KiB and
  8 ms on pages of 2 MiB, on two cores; writing it again takes 7 ms.
- `ONEDNN_PRIMITIVE_CACHE_CAPACITY`: a CPU's 16-bit products run code compiled for their shape, which is kept for the
  next of that shape, 0.5 MB each. By default 1,024 of them are, so that rows of ever new lengths take 500 MB more in a
  run's first hundred steps. Here as many are kept as come again in a step; compiling another takes 0.4 ms.
- `LRU_CACHE_CAPACITY=1`: torch's own layer above that library keeps 1,024 as well, 0.2 MB more each, and finds them no
  faster.

Source: PyTorch's notes on CUDA memory management; c10/core/impl/alloc_cpu.cpp; oneDNN's guide, "Primitive Cache"; ideep's
lru_cache.hpp. Figures of the last two: an Intel Xeon with AMX, torch 2.13.
"""

import os

# The first of these that is set is the one torch takes.
CUDA_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PRODUCTS_VARIABLES = ("DNNL_PRIMITIVE_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def prepare_allocators() -> None:
    """Sets the variables that the user has not set; call it before torch allocates anything."""
    _set_default(CUDA_ALLOCATOR_VARIABLES, "expandable_segments:True")
    _set_default(("THP_MEM_ALLOC_ENABLE",), "1")


def keep_compiled_products(num_shapes: int) -> None:
    """Bounds what is kept of 16-bit products on a CPU; call it before the first of them."""
    _set_default(PRODUCTS_VARIABLES, str(num_shapes))
    _set_default(("LRU_CACHE_CAPACITY",), "1")


def _set_default(names: tuple[str, ...], value: str) -> None:
    """Sets the last of several names for the same thing, where none is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[-1]] = value
