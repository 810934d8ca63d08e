"""Makes zeroed memory for tensors, on a host without writing it.

Where there is no address space, torch is asked.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

_MIN_MAPPED_BYTES = 2**20  # below this, a mapping of its own costs more than writing zeros
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # torch's words for it, by platform


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory that any later forward may write in place, in or out of inference mode.

    On a host, large memory is mapped, not written: a page costs nothing until it is used.

    Raises:
        torch.OutOfMemoryError: memory runs out, also where torch raises another error for that.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return zeros(shape, dtype, device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= _MIN_MAPPED_BYTES:
        with contextlib.suppress(OSError):  # no address space: let torch say so
            return torch.frombuffer(_mapped(num_bytes), dtype=dtype).view(shape)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _mapped(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory of this process alone; a forked one gets a copy. Raises OSError without address space."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no forks
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
