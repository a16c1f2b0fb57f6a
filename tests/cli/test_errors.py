"""Classification of errors by type and message."""

import pytest

from lean_ft.cli.errors import is_out_of_memory


class AcceleratorError(RuntimeError):
    """Named like torch's error of the CUDA runtime, which replaces OutOfMemoryError for pinned memory, for example."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("the loss is not finite"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_failures(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
