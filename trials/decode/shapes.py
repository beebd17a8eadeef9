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
PATCHES |= {
    f"least {least}": (
        lambda least=least: mock.patch.object(
            split_keys, "WORTH", dict.fromkeys(split_keys.WORTH, split_keys.Worth(64, least))
        ),
    )
    for least in (64, 96, 128, 256)
}


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


MANY = (
    _half(4, 8, 8, 2048, 2048, causal=True),
    _half(4, 8, 8, 2048, 2048, d=128, causal=True),
    _half(1, 8, 8, 512, 50_176),
    _half(1, 8, 8, 512, 50_176, d=128),
)
LEAST = ("unsplit", "new", "least 64", "least 128", "least 256")
GROUPS: dict[str, list[Trial]] = {
    "order": [
        Trial(_half(1, 8, 8, 1, 1024), 0, LEAST),
        Trial(_half(1, 8, 8, 1, 2048), 0, LEAST[1:]),
        Trial(_half(1, 8, 8, 1, 4096), 0, LEAST[1:]),
        Trial(_half(1, 1, 1, 1, 16384), 0, LEAST[1:]),
        Trial(_half(8, 8, 8, 1, 1024), 0, LEAST),
        Trial(_half(1, 8, 8, 64, 1024), 0, LEAST),
        Trial(_half(1, 8, 8, 1, 1024, d=128), 0, LEAST),
        Trial(_half(1, 8, 8, 100, 1024), 0, ("unsplit", "least 128", "least 256")),
    ],
    "paged": [
        Trial(_half(1, 8, 8, 1, 256), 16, ("unsplit", "least 64", "least 128")),
        Trial(_half(1, 8, 8, 1, 512), 16, LEAST[:-1]),
        Trial(_half(1, 8, 8, 1, 2048), 16, LEAST[1:]),
        Trial(_half(8, 8, 8, 1, 512), 16, LEAST),
        Trial(_half(1, 8, 8, 1, 512, d=128), 16, LEAST[:-1]),
    ],
    "boxes": [Trial(work, size, ("new",)) for work in MANY for size in (0, 16, 128)],
}
