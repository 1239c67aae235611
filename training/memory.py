"""Memory that a training step frees and needs again at once."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the C allocator keep what is freed instead of giving it back to the kernel.

    A step allocates and frees hundreds of megabytes of activations. By default glibc maps each large block anew, and
    the page faults can cost as much as the arithmetic. Elsewhere than on glibc it does nothing.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 256 * 2**20)
