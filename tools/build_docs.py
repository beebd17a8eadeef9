"""Build the documentation site into build/site/html; any warning is an error.

    python tools/build_docs.py [arguments for sphinx-build]

Sphinx reads a copy of docs/, because autosummary and sphinx-gallery write pages among their
sources. Beside the copy are symbolic links to the other folders, so that pages can link to a test
or to measured rows, and a broken link is a warning.
Names of other projects are looked up in docs/_inventories, without a network: to use a new name,
add a line there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
LINKED = ("benchmarks", "cuflash", "examples", "kernels_cu", "tests", "tools", "CHANGELOG.md")


def lay_out(root: Path, site: Path) -> Path:
    """Copy docs/ into the site's folder, and link the other folders beside it; return the copy."""
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(root / "docs", site / "docs")
    for name in LINKED:
        (site / name).symlink_to(root / name)
    return site / "docs"


def pack_inventories(folder: Path) -> None:
    """Convert the text inventories to Sphinx's format: four plain lines, the rest compressed."""
    for path in folder.glob("*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        head, rest = "".join(lines[:4]), "".join(lines[4:])
        path.with_suffix(".inv").write_bytes(head.encode() + zlib.compress(rest.encode()))


def main() -> int:
    start = time.perf_counter()
    source, html = lay_out(ROOT, SITE), SITE / "html"
    sphinx = [sys.executable, "-m", "sphinx", "--builder", "html", "--quiet"]
    pack_inventories(source / "_inventories")
    strict = ["--fail-on-warning", "--keep-going"]
    command = [*sphinx, *strict, *sys.argv[1:], str(source), str(html)]
    # One thread: on busy cores OpenBLAS's threads wait for each other, and examples take minutes.
    status = subprocess.call(command, env={"OPENBLAS_NUM_THREADS": "1"} | os.environ)
    verdict = "FAILED" if status else f"{len(list(html.rglob('*.html')))} pages"
    print(f"docs: {verdict} in {time.perf_counter() - start:.0f} s: {html}/index.html", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
