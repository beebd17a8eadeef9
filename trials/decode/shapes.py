# ruff: noqa: PT008
"""Which calls are tried, and what is turned off to have the kernels of before?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from benchmarks import decode  # noqa: E402
from cuflash._kernels import split_keys  # noqa: E402
from cuflash._kernels.forward_sm90 import ForwardSm90Config  # noqa: E402
from cuflash._select import pack_gqa  # noqa: E402
from cuflash.tuning import Workload  # noqa: E402

Patch = Callable[[], Any]


def _in_order(request: Any) -> dict[str, Any]:
    return _FIELDS(request) | {"overlaps": False}


def _suits(kernel: Any, request: Any) -> bool:
    old = not kernel.for_sm90 or (kernel.splits_keys and not split_keys.few(request.problem))
    return old and kernel.kernel != "forward_tf32_sm90"


_FIELDS = split_keys.fields
#: What a variant changes, by its name.
PATCHES: dict[str, tuple[Patch, ...]] = {
    "new": (),
    "combine after": (lambda: mock.patch.object(split_keys, "fields", _in_order),),
    "no such splits": (lambda: mock.patch.object(split_keys, "suits", _suits),),
    "unsplit": (lambda: mock.patch.object(split_keys, "wanted", lambda _: False),),
    "heads apart": (lambda: mock.patch.object(pack_gqa, "_with_queries_in_rows", lambda _: None),),
    "portable pages": (lambda: mock.patch.object(ForwardSm90Config, "reads_pages", False),),
    **{
        f"{parts} parts": (
            lambda: mock.patch.object(split_keys, "wanted", lambda _: True),
            lambda parts=parts: mock.patch.object(split_keys, "parts_of", lambda *_: parts),
        )
        for parts in (2, 4, 8)
    },
}
PATCHES["4 parts, combine after"] = (*PATCHES["4 parts"], *PATCHES["combine after"])


@contextmanager
def variant(name: str) -> Iterator[None]:
    """The kernels of a variant are chosen; no plan of another is known."""
    from cuflash._launch import plan_cache

    with ExitStack() as stack:
        for patch in PATCHES[name]:
            stack.enter_context(patch())
        plan_cache.forget()
        yield
    plan_cache.forget()


class Trial(NamedTuple):
    """One call, with keys in order (0) or in pages of so many, and its variants."""

    work: Workload
    page_size: int
    variants: tuple[str, ...]

    def __str__(self) -> str:
        lie = f"pages of {self.page_size}" if self.page_size else "in order"
        return f"{self.work.dtype} {self.work}, {lie}"

    def implementation(self) -> Any:
        """What makes its calls."""
        return decode.InPages(self.page_size) if self.page_size else decode.InOrder()


def _half(*shape: int, d: int = 64, **own: Any) -> Workload:
    return Workload(*shape, d, d, "bfloat16", **own)


STEP = tuple(_half(1, 8, 8, 1, keys) for keys in (512, 1024, 2048))
PARTS = ("unsplit", "2 parts", "4 parts", "4 parts, combine after", "8 parts")
FEW = ((1, 32, 8, 1, 131_072), (1, 32, 32, 1, 65_536))
CAUSAL = tuple(_half(1, 32, 8, m, 131_072, d=d, causal=True) for m in (4, 16) for d in (64, 128))
NARROW = (
    Workload(1, 1, 1, 512, 1 << 20, 3, 3, "float32"),
    Workload(1, 1, 1, 1024, 1 << 18, 3, 0, "float32"),
    Workload(1, 1, 1, 4, 1 << 18, 3, 3, "float32"),
    Workload(1, 1, 1, 512, 1 << 18, 3, 3, "float64"),
)
SINGLE = tuple(
    Workload(*shape, d, d, "float32", precision=precision)
    for shape in ((1, 8, 8, 512, 50_000), (1, 8, 8, 77, 4096))
    for d in (64, 128)
    for precision in ("ieee", "tf32")
)
MANY = (
    _half(4, 8, 8, 2048, 2048, causal=True),
    _half(4, 8, 8, 2048, 2048, d=128, causal=True),
    _half(1, 8, 8, 512, 50_176),
    _half(1, 8, 8, 512, 50_176, d=128),
)
GROUPS: dict[str, list[Trial]] = {
    "step": [Trial(work, size, PARTS) for size in (0, 16) for work in STEP],
    "combine": [
        Trial(_half(*shape, d=d), 0, ("new", "combine after")) for shape in FEW for d in (64, 128)
    ]
    + [Trial(_half(1, 8, 8, 77, 4096), 0, ("new", "combine after"))],
    "causal": [Trial(work, size, ("new", "heads apart")) for size in (0, 16) for work in CAUSAL],
    "pages": [Trial(work, size, ("new", "portable pages")) for size in (16, 128) for work in MANY],
    "narrow": [Trial(work, 0, ("new", "unsplit")) for work in NARROW],
    "float32": [Trial(work, 0, ("new", "no such splits")) for work in SINGLE],
}
