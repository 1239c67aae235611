"""Freed memory stays in the process, where the next step wants it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from training import memory

# Frees 40 MB five times, and reports how many page faults that took.
FAULTS = """
import ctypes, resource, sys
from training.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    block = libc.malloc(40 << 20)
    ctypes.memset(block, 1, 40 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS, mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such settings")
def test_blocks_are_used_again_instead_of_mapped_anew() -> None:
    assert faults("keep") * 3 < faults("leave")


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(memory.ctypes, "CDLL")  # would be called
    memory.keep_freed_memory()
