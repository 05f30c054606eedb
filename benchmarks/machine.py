"""What a measurement was made on and with: stored beside every result."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

try:
    import psutil
except ImportError:  # on a machine for GPUs, where nothing is counted but the GPU's time
    psutil = None

ROOT = Path(__file__).parents[1]
PACKAGES = ("attnres", "torch", "transformers", "numba", "triton", "fla-core", "flash-attn-res", "liger-kernel")


def describe(device: str) -> dict:
    """Machine, versions, commit and date, now."""
    machine = {
        "processor": _processor(),
        "cores": psutil and psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "memory_gib": psutil and round(psutil.virtual_memory().total / 2**30, 1),
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
        # What the measurements themselves write does not count.
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/README.md")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class Others:
    """How much of the machine's processors other processes take while it is being measured."""

    def __init__(self) -> None:
        self.start = self._seconds()

    def share(self) -> float:
        """Since this was made, from 0 to 1."""
        everyone, own, idle = (now - then for now, then in zip(self._seconds(), self.start))
        return max(0.0, everyone - own) / max(1e-9, everyone + idle)

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """Busy seconds of all processors, those of this process and the ones that it started, and idle seconds."""
        system, process = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = system.idle + getattr(system, "iowait", 0.0)
        # Guests are counted among the users already.
        busy = sum(system) - idle - getattr(system, "guest", 0.0) - getattr(system, "guest_nice", 0.0)
        return busy, sum(process[:4]), idle


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git(*arguments: str) -> str | None:
    """What git says, or None where there is no git or no repository."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None
