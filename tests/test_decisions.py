"""Is every decision of docs/decisions.md cited, and does every citation have an entry?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
FOLDERS = ("cuflash", "kernels_cu", "benchmarks", "docs", "examples", "tests", "tools")
MOST_ENTRIES, MOST_LINES, WIDTH = 150, 3, 120


def citing() -> dict[str, str]:
    """Return path -> text of all files that may cite: neither the entries nor this file."""
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in FOLDERS:
        paths += [
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in {".py", ".cu", ".cuh", ".h", ".md"}
        ]
    own = {ROOT / "docs" / "decisions.md", Path(__file__).resolve()}
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path not in own
    }


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\bD(\d+)\b", text)}


def breaches(entries: str, files: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with the entries and their citations; a table may follow an entry."""
    found = re.findall(r"^(- \*\*D(\d+)\*\* .*(?:\n  .+)*)", entries, re.MULTILINE)
    known = [int(number) for _, number in found]
    if len(known) != len(set(known)):
        yield "two entries have one number"
    if len(known) > MOST_ENTRIES:
        yield f"{len(known)} entries, at most {MOST_ENTRIES}"
    for text, number in found:
        lines = text.split("\n")
        if len(lines) > MOST_LINES or max(map(len, lines)) > WIDTH:
            yield f"D{number}: at most {MOST_LINES} lines of {WIDTH} columns"
        if not re.search(r"\b20\d\d-\d\d-\d\d\b", text):
            yield f"D{number}: no date"
    for path, text in {"decisions.md": entries, **files}.items():
        for number in sorted(numbers(text) - set(known)):
            yield f"{path}: there is no D{number}"
    for number in sorted(set(known) - set().union(*map(numbers, files.values()))):
        yield f"D{number}: cited nowhere"


def test_entries_and_citations_agree():
    assert list(breaches(ENTRIES, citing())) == []


def test_citations_are_in_comments_of_the_code():
    """CUDA code cites decisions in comments only: a number in a name or a string may be chance."""
    for path, text in citing().items():
        if path.endswith((".cu", ".cuh")):
            code = re.sub(r"//[^\n]*", "", text)
            assert numbers(code) == set(), path


def test_breaches_are_noticed():
    entry = "- **D1** A rule (H100, 2026-11-24).\n"
    cited = {"a.cu": "// Why. (D1)"}
    assert list(breaches(entry, cited)) == []
    for entries, files in (
        (entry, {"a.cu": "// Why."}),
        (entry, {"a.cu": "// Why. (D1, D2)"}),
        (entry + "  as D3 says\n", cited),
        (entry + entry, cited),
        ("- **D1** A rule.\n", cited),
        (entry + "  more\n" * MOST_LINES, cited),
        (entry + "  " + "m" * WIDTH, cited),
        (
            "".join(entry.replace("D1", f"D{n}") for n in range(1, MOST_ENTRIES + 2)),
            {"a.cu": " ".join(f"D{n}" for n in range(1, MOST_ENTRIES + 2))},
        ),
    ):
        assert len(list(breaches(entries, files))) == 1
