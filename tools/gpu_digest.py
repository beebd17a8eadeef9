"""Which state of the sources does a GPU test report belong to?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files that decide what runs on a GPU, sorted by relative path."""
    package = [path for kind in ("*.py", "*.json") for path in (root / "cuflash").rglob(kind)]
    kernels = [path for path in (root / "kernels_cu").rglob("*") if path.is_file()]
    files = (path for path in package + kernels if path.is_file())
    yield from sorted(files, key=lambda path: path.relative_to(root).as_posix())


def digest(root: Path = ROOT) -> str:
    """Return the sha256 over the sorted relative paths and contents of those files."""
    total = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(root).as_posix()
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


if __name__ == "__main__":
    print(digest())
