"""Does the site get every page, links that lead somewhere, and names of other projects?"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

import build_docs

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
INVENTORIES = sorted((ROOT / "docs" / "_inventories").glob("*.txt"))


def test_sphinx_reads_a_copy_beside_the_other_folders(tmp_path):
    source = build_docs.lay_out(ROOT, tmp_path / "site")
    (source / "api").mkdir()  # as autosummary does
    assert not (ROOT / "docs" / "api").exists()
    assert (source / "../tests/mutants_report.json").is_file()
    build_docs.lay_out(ROOT, tmp_path / "site")
    assert not (source / "api").exists()


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda p: p.stem)
def test_inventories_are_read_as_they_were_written(path, tmp_path):
    """Packed inventories have Sphinx's format: four lines, then zlib."""
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    build_docs.pack_inventories(tmp_path)
    packed = copy.with_suffix(".inv").read_bytes()
    *head, rest = packed.split(b"\n", maxsplit=4)
    assert head[0] == b"# Sphinx inventory version 2"
    entries = zlib.decompress(rest).decode().splitlines()
    assert entries
    for entry in entries:
        # $ is short for the name, but only as the end of an address.
        assert re.fullmatch(r"([\w.]+) py:\w+ 1 reference/generated/\1\.html#\$ -", entry)
    assert entries == sorted(set(entries))


def file_of(page: Path, target: str) -> Path:
    """Return the file that a link leads to. Pages of the gallery are built from examples."""
    found = (page.parent / target.partition("#")[0]).resolve()
    if found.parent == ROOT / "docs" / "gallery":
        name = "GALLERY_HEADER.rst" if found.stem == "index" else f"{found.stem}.py"
        return ROOT / "examples" / name
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT / "docs").as_posix())
def test_links_of_pages_lead_to_files(path):
    """Relative links lead to files. Sphinx checks that too, but slowly and for the site alone."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r'\]\(([^)\s]+)(?: "[^"]*")?\)', text):
        if "://" not in target and not target.startswith("#"):
            assert file_of(path, target).exists(), target
