"""Do imports only go down, and does every file keep its names to itself? Lazy imports count.

The GPU tests that go through `cuflash.distributed`, above the launch, must be named, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cuflash"
#: Packages and modules of cuflash, lowest first. Those of one line do not import each other.
ORDER = (
    ("_errors",),
    ("_cupy", "_dlpack"),
    ("_arrays",),
    ("_results", "_problem"),
    ("_host", "_kernels", "reference"),
    ("_jit",),
    ("_select",),
    ("_launch",),
    ("_api",),
    ("_timing",),
    ("tuning", "distributed", "testing"),
    ("_ahead",),
    ("__init__",),  # the public names
    ("_cli",),
    ("__main__",),
)
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}
UPWARD = {"cuflash.__version__"}  # a constant, read when the package is built
#: The files and packages that may import CuPy.
CUPY = {
    "_cupy", "_jit", "_launch", "_select/hardware", "_timing", "tuning", "_cli", "_api/show_config",
    "distributed/_nccl",
}  # fmt: skip


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield every imported module, and its name in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, (a.asname or a.name).split(".")[0]) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{a.name}", a.asname or a.name) for a in node.names)


def test_imports_only_go_down() -> None:
    wrong = []
    for name, tree in files():
        own = name.split("/")[0]
        for module, _ in imports(tree):
            package, _, rest = module.partition(".")
            other = rest.split(".")[0] if rest.split(".")[0] in RANKS else "__init__"
            if package != "cuflash" or module in UPWARD:
                continue
            if other != own and RANKS[other] >= RANKS[own]:
                wrong.append(f"{name} -> {module}")
    assert not wrong


def test_a_file_keeps_its_private_names_to_itself() -> None:
    wrong = []
    for name, tree in files():
        known = {short: module for module, short in imports(tree) if module.startswith("cuflash")}
        wrong += [f"{name}: {m}" for m in known.values() if is_private(m.split(".")[-1], m)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = known.get(node.value.id, "")
                fields = node.attr == "_fields" and owner.split(".")[-1][:1].isupper()
                if owner and not fields and is_private(node.attr, ""):
                    wrong.append(f"{name}: {owner}.{node.attr}")
    assert not wrong


def is_private(name: str, module: str) -> bool:
    """Return whether a name is private to its file; packages and modules of cuflash are not."""
    path = PACKAGE / "/".join(module.split(".")[1:])
    is_module = bool(module) and (path.is_dir() or path.with_suffix(".py").is_file())
    return name.startswith("_") and not name.startswith("__") and not is_module


def test_cupy_is_imported_in_named_places() -> None:
    found = {
        name for name, tree in files() for module, _ in imports(tree)
        if module.split(".")[0] in ("cupy", "cupy_backends")
    }  # fmt: skip
    assert {name for name in found if not {name, name.split("/")[0]} & CUPY} == set()


def test_gpu_tests_of_several_ranks_are_named() -> None:
    """GPU tests of several ranks are listed, since they alone run again when ranks change."""
    from gpu_report import OF_RANKS

    found = set()
    for path in (PACKAGE.parent / "tests").glob("test_*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        everywhere = any({"pytestmark", "gpu"} <= names_in(node) for node in body)
        for node in body:
            names = names_in(node)
            on_gpu = everywhere or not names.isdisjoint(("gpu", "xp"))
            if isinstance(node, ast.FunctionDef) and on_gpu and "distributed" in names:
                found.add(f"tests/{path.name}::{node.name}")
    assert found == OF_RANKS


def names_in(node: ast.AST) -> set[str]:
    return {
        str(getattr(part, field, "")) for part in ast.walk(node) for field in ("id", "attr", "arg")
    }
