"""Where are the CUDA sources, and what is the whole text of one kernel?"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

#: A quoted include, or the line that keeps a header from being read twice.
_DIRECTIVE = re.compile(r'^[ \t]*#(?:include[ \t]+"([^"\n]+)"|pragma once)[ \t]*$', re.MULTILINE)


@functools.cache
def kernels_dir() -> Path:
    """Folder of the CUDA sources: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "kernels_cu", package.parent / "kernels_cu")
    for folder in candidates:
        if (folder / "config.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no kernel sources in {candidates[0]} or {candidates[1]}")


def digest() -> str:
    """Sha256 over names and contents of all CUDA sources, which identifies their state."""
    total = hashlib.sha256()
    for path in sorted(p for p in kernels_dir().rglob("*") if p.is_file()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(kernels_dir()).as_posix()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def digest_of(name: str) -> str:
    """Sha256 over the code of one kernel, without its comments and line breaks."""
    return hashlib.sha256(code_of(flatten(name)).encode()).hexdigest()


def code_of(text: str) -> str:
    """CUDA text without comments, ``#line`` and line breaks."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/|#line [^\n]*", "", text, flags=re.DOTALL)
    return " ".join(code.split())


@functools.lru_cache(maxsize=64)
def flatten(
    name: str, replaced: tuple[tuple[str, str], ...] = (), *, folder: Path | None = None
) -> str:
    """Text of a source with the text of every quoted include in its place, once each.

    Stored kernels are found by this text: an edited header gives another text and another kernel.
    ``#line`` keeps compiler messages pointing at the real files.
    ``replaced`` holds (name, text) of files to replace. ``folder`` holds the sources, by default
    :func:`kernels_dir`.
    """
    seen: set[str] = set()
    texts = dict(replaced)

    def expand(relative: str) -> list[str]:
        text = texts.get(relative)
        if text is None:
            text = ((folder or kernels_dir()) / relative).read_text(encoding="utf-8")
        parts = [f'#line 1 "{relative}"\n']
        end, lines = 0, 1
        for found in _DIRECTIVE.finditer(text):
            parts.append(text[end : found.start()])
            lines += text.count("\n", end, found.end())
            end = found.end()
            if found[1] is None:
                continue
            if found[1] not in seen:
                seen.add(found[1])
                parts += expand(found[1])
            parts.append(f'#line {lines + 1} "{relative}"')
        parts.append(text[end:] if text.endswith("\n") else f"{text[end:]}\n")
        return parts

    return "".join(expand(name))
