"""What is installed here, and which device is it?"""

from __future__ import annotations

import argparse
import json

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
    """Print what `cuflash.show_config` knows, and the limits of the device."""
    from cuflash import _hardware, _tuned, show_config

    table = show_config(mode="dicts")
    found = _hardware.present()
    sources = {"shipped": _tuned.shipped(), f"of {_tuned.VARIABLE}": _tuned.in_use()}
    counts = [f"{len(rows)} {name}" for name, rows in sources.items()]
    if found is not None:
        own = [sum(key.device == found.name for key in rows) for rows in sources.values()]
        counts = [f"{text} ({n} for this device)" for text, n in zip(counts, own, strict=True)]
    table["measured tiles"] = ", ".join(counts)
    if found is not None:
        limits, peak = found.limits, found.peak
        table["limits"] = (
            f"{found.multiprocessors} multiprocessors, {limits.block_smem // 1024} KiB of shared "
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
