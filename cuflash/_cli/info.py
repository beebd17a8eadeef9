"""What is installed, and which device does this machine have?"""

from __future__ import annotations

import argparse
import json

from cuflash import show_config
from cuflash._select import hardware, measured

SUMMARY = "versions, device and folders, for a bug report"
EXAMPLES = """\
examples:
  python -m cuflash info
  python -m cuflash info --json
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    p.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print `cuflash.show_config` and the limits of the device."""
    table = show_config(mode="dicts")
    found = hardware.present()
    try:
        rows = measured.in_use()
        table["measured tiles"] = f"{len(rows)} of {measured.VARIABLE}"
        if found is not None:
            own = sum(key.device == found.name for key in rows)
            table["measured tiles"] += f" ({own} for this device)"
    except (ValueError, OSError) as error:
        table["measured tiles"] = f"none of {measured.VARIABLE}: {error}"
    if found is not None:
        limits, peak = found.limits, found.peak
        table["limits"] = (
            f"{found.multiprocessors} SMs, {limits.block_smem // 1024} KiB of shared "
            f"memory a block, {found.l2_bytes >> 20} MiB of L2"
        )
        if peak is not None:
            table["data sheet"] = f"{peak.tflops:g} TFLOP/s in 16 bits, {peak.gbytes:g} GB/s"
    if arguments.json:
        print(json.dumps(table, indent=1))
        return 0
    width = max(map(len, table))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in table.items()))
    return 0


def no_device() -> str:
    """The message that no device can be used, with the reason from `cuflash.show_config`."""
    found = show_config(mode="dicts")
    name = "device" if found["device"].startswith("unavailable") else "cupy"
    return f"no NVIDIA device can be used ({name} {found[name]})"
