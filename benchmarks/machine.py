"""Describe the machine and the software of a measurement. The description is stored beside every result."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("attnres", "torch", "transformers", "numba", "triton", "fla-core", "flash-attn-res", "liger-kernel")


def describe(device: str) -> dict:
    """Return the machine, versions, commit and date. `device` is `"cpu"` or a CUDA device."""
    machine = {
        "processor": _processor(),
        **_cores_and_memory(),
        "logical_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device != "cpu":
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    return {
        "machine": machine,
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": _git("rev-parse", "HEAD"),
        # The files that measurements write are left out, because they say nothing of the measured code.
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/README.md")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class Others:
    """The share of the machine's processors that other processes take, counted from when the instance is made."""

    def __init__(self) -> None:
        self.start = self._seconds()

    def share(self) -> float:
        """Return the share so far, from 0 to 1."""
        everyone, ours, idle = (now - then for now, then in zip(self._seconds(), self.start))
        return max(0.0, everyone - ours) / max(1e-9, everyone + idle)

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """Return busy seconds of all processes, busy seconds of this process and its children, and idle seconds."""
        import psutil  # a measurement on a GPU, which does without this package, does not come here

        system, process = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = system.idle + getattr(system, "iowait", 0.0)
        # The times `guest` and `guest_nice` are already in `user` and `nice`.
        busy = sum(system) - idle - getattr(system, "guest", 0.0) - getattr(system, "guest_nice", 0.0)
        return busy, sum(process[:4]), idle


def _cores_and_memory() -> dict[str, float | None]:
    """Return the cores, and the memory in GiB; `None` where `psutil` is not installed, as on a machine with a GPU."""
    try:
        import psutil
    except ImportError:
        return {"cores": None, "memory_gib": None}
    return {
        "cores": psutil.cpu_count(logical=False),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _git(*arguments: str) -> str | None:
    """Return the output of git, or `None` without git or a repository."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None
