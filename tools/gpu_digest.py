"""Which state of the code does a GPU test report belong to?

The digest covers the code that runs: the flattened text of each kernel without comments and
``#line``, and the code of each Python module that a launch uses without comments, docstrings and
imports. Moving a file does not change the digest; changing a token does. Calls of several ranks
also use ``cuflash/distributed``, which has a digest of its own.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash._jit import source  # noqa: E402

kernel_code = functools.lru_cache(maxsize=1024)(source.code_of)
RANKS = "distributed"
#: Packages and modules that no call on one GPU uses.
ON_THE_CPU = tuple(f"_host/{name}.py" for name in ("backward", "cores", "forward", "tiles"))
APART = ("_cli", "_timing", RANKS, "testing", "tuning", *ON_THE_CPU)


def digest(root: Path = ROOT, apart: Collection[str] = APART) -> str:
    """Return the digest of the code that decides a launch and its results, and of the tables."""
    return _digest([*kernel_texts(root), *package_texts(root / "cuflash", apart)])


def ranks_digest(root: Path = ROOT) -> str:
    """Return the digest of the code that calls of several ranks use in addition."""
    return _digest(package_texts(root / "cuflash" / RANKS))


def sources() -> dict[str, str]:
    """Return the digests that a report of GPU tests records."""
    return {"digest": digest(), "ranks_digest": ranks_digest()}


def _digest(texts: Iterable[str]) -> str:
    """Return a sha256 over texts that does not depend on their order or file names."""
    digests = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def kernel_texts(root: Path) -> Iterator[str]:
    """Yield the code of each kernel."""
    kernels = root / "kernels_cu"
    for path in kernels.rglob("*.cu"):
        name = path.relative_to(kernels).as_posix()
        yield kernel_code(source.flatten.__wrapped__(name, folder=kernels))  # reads the file again


def package_texts(package: Path, apart: Collection[str] = ()) -> Iterator[str]:
    """Yield the code of Python modules and the text of JSON tables, except those in ``apart``."""
    for path in package.rglob("*"):
        if any(path.relative_to(package).is_relative_to(name) for name in apart):
            continue
        if path.suffix == ".py":
            yield python_code(path.read_text(encoding="utf-8"))
        elif path.suffix == ".json":
            yield path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1024)
def python_code(text: str) -> str:
    """Return Python code without comments, docstrings, imports and line breaks."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            for number in range(node.lineno - 1, node.end_lineno or 0):  # type: ignore[attr-defined]
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column]
    return " ".join(" ".join(lines).split())


def _is_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


if __name__ == "__main__":
    print(sources())
