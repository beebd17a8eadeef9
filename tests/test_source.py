"""Is the flattened text of a kernel whole, and does it point back at the real files?"""

from __future__ import annotations

from pathlib import Path

import pytest

from cuflash._jit import source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the kernels' folder by an empty one."""
    monkeypatch.setattr(source, "kernels_dir", lambda: tmp_path)
    source.flatten.cache_clear()
    yield tmp_path
    source.flatten.cache_clear()


def test_includes_are_expanded_once_in_order(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep/a.cuh").write_text("#pragma once\nint a;\n")
    (folder / "b.cuh").write_text('#pragma once\n#include "deep/a.cuh"\nint b;\n')
    text = '#include "b.cuh"\n#include "deep/a.cuh"\n#include <x.h>\nint k;\n'
    (folder / "k.cu").write_text(text)
    code = [line for line in source.flatten("k.cu").splitlines() if line.startswith(("int", "#i"))]
    assert code == ["int a;", "int b;", "#include <x.h>", "int k;"]


def test_line_numbers_are_those_of_the_files(folder: Path) -> None:
    (folder / "a.cuh").write_text("#pragma once\n\nint a;\n")
    (folder / "k.cu").write_text('// first\n#include "a.cuh"\nint k;\n')
    where = {}
    file, number = "", 0
    for line in source.flatten("k.cu").splitlines():
        if line.startswith("#line"):
            _, number_text, quoted = line.split()
            file, number = quoted.strip('"'), int(number_text)
            continue
        where[line] = (file, number)
        number += 1
    assert where["int a;"] == ("a.cuh", 3)
    assert where["int k;"] == ("k.cu", 3)


def test_a_digest_is_that_of_the_code(folder: Path) -> None:
    (folder / "a.cuh").write_text("#pragma once\nint a;  // one\n")
    (folder / "b.cuh").write_text("int b;\n")
    (folder / "k.cu").write_text('#include "a.cuh"\nint k;\n')

    def digest() -> str:
        source.flatten.cache_clear()
        return source.digest_of("k.cu")

    first = digest()
    (folder / "a.cuh").write_text("#pragma once\n/* another\n comment */\nint\n  a;\n")
    (folder / "b.cuh").write_text("int other;\n")
    assert digest() == first
    (folder / "a.cuh").write_text("#pragma once\nint c;\n")
    assert digest() != first


def test_a_missing_include_is_an_error(folder: Path) -> None:
    (folder / "k.cu").write_text('#include "nowhere.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cuh"):
        source.flatten("k.cu")


def test_every_kernel_is_self_contained() -> None:
    for path in source.kernels_dir().glob("*.cu"):
        text = source.flatten(path.name)
        assert '#include "' not in text
        assert f"cuflash_{path.stem}(" in text
        assert text.count("struct Config ") == 1


def test_neither_place_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "__file__", str(tmp_path / "package" / "_jit/source.py"))
    source.kernels_dir.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match="kernels_cu"):
            source.kernels_dir()
    finally:
        source.kernels_dir.cache_clear()
