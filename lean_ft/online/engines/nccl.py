"""NCCL with other programs: a communicator from an id that is exchanged outside of it.

`torch.distributed` joins programs that share a store, and `torch.cuda.nccl.init_rank` fails in Python 3.10 and later.
So this calls the library that torch has loaded.

Source: nccl.h, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

_ID_BYTES = 128
_SUM = 0
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


@cache
def _library() -> ctypes.CDLL:
    """Raises OSError if there is no NCCL."""
    library = ctypes.CDLL("libnccl.so.2")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    return library


def _call(name: str, *arguments: object) -> None:
    """Call a function of the library. Raises RuntimeError if it fails."""
    if code := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name} failed: {_library().ncclGetErrorString(code).decode()}")


def unique_id() -> bytes:
    """A new id for a communicator, 128 bytes."""
    drawn = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(drawn))
    return bytes(drawn)


class Communicator:
    """Rank 0 of a communicator. All ranks must join at the same time."""

    def __init__(self, unique_id: bytes, size: int) -> None:
        self._handle = ctypes.c_void_p()
        _call("ncclCommInitRank", ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(unique_id), 0)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, on the current stream."""
        data, stream = tensor.data_ptr(), torch.cuda.current_stream(tensor.device).cuda_stream
        _call("ncclAllReduce", data, data, tensor.numel(), _TYPES[tensor.dtype], _SUM, self._handle, stream)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor to all ranks, on the current stream."""
        assert tensor.is_contiguous()
        data, stream = tensor.data_ptr(), torch.cuda.current_stream(tensor.device).cuda_stream
        _call("ncclBroadcast", data, data, tensor.numel(), _TYPES[tensor.dtype], 0, self._handle, stream)
