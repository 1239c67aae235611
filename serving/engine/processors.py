"""How many processors this process may use: the affinity mask, and the quota of its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path

PROCESS_GROUPS = Path("/proc/self/cgroup")
GROUPS_ROOT = Path("/sys/fs/cgroup")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _share(quota: str, period: str) -> float:
    """Processors that `quota` microseconds in each `period` amount to; infinite without a limit."""
    try:
        processors = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return math.inf
    return processors if processors > 0 else math.inf  # version 1 writes -1 for no limit


def _folders(root: Path, group: str) -> list[Path]:
    """The group's folder and those above it: the narrowest quota on the way holds."""
    folder = root / group.lstrip("/")
    folders = [folder, *folder.parents]
    return folders[: folders.index(root) + 1]


def quota(process_groups: Path = PROCESS_GROUPS, root: Path = GROUPS_ROOT) -> float:
    """Processors that the control groups (version 1 or 2) grant; infinite where they set no limit."""
    shares = [math.inf]
    for line in _read(process_groups).splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            for folder in _folders(root, group):
                quota_text, _, period = _read(folder / "cpu.max").partition(" ")
                shares.append(_share(quota_text, period))
        elif "cpu" in controllers.split(","):
            for folder in _folders(root / "cpu", group):
                shares.append(_share(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    return min(shares)


def usable() -> int:
    """Processors that this process can keep busy, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, math.floor(min(quota(), allowed))))
