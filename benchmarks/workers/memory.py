"""How much memory this process has, and had at most since the last reset, in MB; `nan` where Linux is not."""

from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _line(name):
    if not _STATUS.exists():
        return float("nan")
    found = [line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith(name)]
    return int(found[0]) * 1024 / 1e6


def resident():
    """What it has now."""
    return _line("VmRSS:")


def reset():
    """Begins to look for the peak anew."""
    if _RESET.exists():
        _RESET.write_text("5")
    return resident()


def peak():
    """The most since the last reset."""
    return _line("VmHWM:")
