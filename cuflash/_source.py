"""Where are the CUDA sources, and what is the whole text of one kernel?"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')


@functools.cache
def kernels_dir() -> Path:
    """Folder of the CUDA sources: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    candidates = (package / "kernels_cu", package.parent / "kernels_cu")
    for folder in candidates:
        if (folder / "config.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no kernel sources in {candidates[0]} or {candidates[1]}")


def digest() -> str:
    """Sha256 over names and contents of all CUDA sources: which state of them is this?"""
    total = hashlib.sha256()
    for path in sorted(p for p in kernels_dir().rglob("*") if p.is_file()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(kernels_dir()).as_posix()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


@functools.cache
def flatten(name: str, replaced: tuple[tuple[str, str], ...] = ()) -> str:
    """Text of a source with every quoted include in place, once each.

    Stored kernels are found by this text: an edited header is another text and another kernel.
    ``#line`` keeps compiler messages pointing at the real files.
    ``replaced`` are files with another text.
    """
    seen: set[str] = set()
    texts = dict(replaced)

    def expand(relative: str) -> list[str]:
        lines = [f'#line 1 "{relative}"']
        text = texts.get(relative)
        if text is None:
            text = (kernels_dir() / relative).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match is None:
                if line.strip() != "#pragma once":
                    lines.append(line)
                else:
                    lines.append("")
                continue
            if match[1] not in seen:
                seen.add(match[1])
                lines += expand(match[1])
            lines.append(f'#line {number + 1} "{relative}"')
        return lines

    return "\n".join(expand(name)) + "\n"
