# ruff: noqa: D103, T201
"""Is it right? Each change against the reference within the error budget, and its bits many times.

python trials/decode/check.py [NAME] [--runs 200]
python trials/decode/check.py --dry       # on NumPy arrays: are the cases themselves right?
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import shapes  # noqa: F401  says where cuflash is

import cuflash  # isort: skip
from cuflash.testing._budget import Budget  # isort: skip
from ml_dtypes import bfloat16  # isort: skip
from support.problems import Call, make_call  # isort: skip
from test_few_queries import options_of  # isort: skip
from test_paged import Paged  # isort: skip

Case = Callable[[Any, int], None]
CASES: dict[str, Case] = {}


def on(xp: Any, value: Any) -> Any:
    """A value of the call, where it runs."""
    if isinstance(value, tuple):
        return tuple(on(xp, own) for own in value)
    if not isinstance(value, np.ndarray) or xp is np:
        return value
    return xp.asarray(value.view(f"u{value.itemsize}")).view(value.dtype)


def back(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    bits = array.view(f"u{array.itemsize}").get()
    return bits.view(np.dtype(str(array.dtype)) if array.dtype != bfloat16 else bfloat16)


def same_bits(xp: Any, runs: int, compute: Callable[[], Any]) -> Any:
    """The result, which has the same bits while another stream keeps the device busy."""
    first = compute()
    expected = [back(a).tobytes() for a in first]
    if xp is np:
        return first
    busy = xp.cuda.Stream(non_blocking=True)
    noise = xp.ones((2048, 2048), np.float32)
    for run in range(runs):
        if run % 4 == 0:
            with busy:
                noise @ noise
        assert [back(a).tobytes() for a in compute()] == expected, f"other bits in run {run}"
    return first


def attend(xp: Any, call: Call, runs: int) -> None:
    q, k, v = (on(xp, call.array(name)) for name in "qkv")
    options = cuflash.Options(**{name: on(xp, own) for name, own in call.options.items()})

    def compute() -> Any:
        return cuflash.attention(q, k, v, options=options, return_lse=True)

    out, lse = same_bits(xp, runs, compute)
    Budget(call).check_forward(back(out), back(lse))


def add(name: str, dtype: Any, shape: tuple[Any, ...], options: dict[str, Any]) -> None:
    call = make_call("normal", 1, np.dtype(dtype), *shape, options=options, wrt=())
    CASES[name] = lambda xp, runs: attend(xp, call, runs)


def three(batch: tuple[int, ...], heads_kv: int, rows: int, keys: int, d: int) -> Any:
    whole = (*batch[:-1], heads_kv, keys, d)
    return (*batch, rows, d), whole, whole


for kind, given in {"plain": {}, **options_of(130, 4096)}.items():
    add(f"float32, {kind}", np.float32, three((2, 2), 2, 130, 4096, 64), given)
for kind in ("plain", "causal", "sink", "mask", "lengths"):
    given = {"plain": {}, **options_of(300, 4096)}[kind]
    add(f"narrow, {kind}", np.float32, three((2, 2), 2, 300, 4096, 3), given)
    add(f"narrow float64, {kind}", np.float64, three((2, 2), 2, 300, 4096, 8), given)
BOUNDS = {
    "causal": {"causal": True},
    "lengths": {"causal": True, "kv_lengths": np.array([[3], [290]])},
    "window": {"window": (700, 0)},
    "offsets": {"window": (90, 1), "offset": np.array([[300], [-1]])},
}
for kind, given in BOUNDS.items():
    for rows, keys in ((4, 5000), (16, 5000), (5, 300)):
        add(
            f"heads in rows, {kind}, {rows} x {keys}", bfloat16,
            three((2, 8), 2, rows, keys, 128), {"enable_gqa": True, **given},
        )  # fmt: skip


def add_pages(size: int, rows: int, columns: int, d: int, kind: str, dtype: Any) -> None:
    def run(xp: Any, runs: int) -> None:
        call = Paged(7, size, columns, rows, dtype, d)
        call.v_pages = np.ascontiguousarray(call.k_pages[..., ::-1])
        options = call.options(kind)
        used = np.zeros((len(call.k_pages), size), bool)
        for row, length in zip(call.table, call.lengths, strict=True):
            for n in range(length):
                used[row[n // size], n % size] = True
        q, k, v = call.contiguous()
        for pages in (call.k_pages, call.v_pages):  # what no sequence has is never seen
            pages.swapaxes(1, 2)[~used] = np.nan
        arrays = [on(xp, a) for a in call.arrays()]
        given = cuflash.Options(**{name: on(xp, own) for name, own in options.items()})

        def compute() -> Any:
            return cuflash.attention_paged(*arrays, options=given, return_lse=True)

        out, lse = same_bits(xp, runs, compute)
        own = options | {"kv_lengths": call.lengths[:, None]}
        clean = Call(q, k, v, np.zeros_like(q), options=own, wrt=())
        Budget(clean).check_forward(back(out), back(lse))

    CASES[f"pages of {size}, {rows} queries, d {d}, {kind}, {np.dtype(dtype)}"] = run


for size, columns in ((8, 60), (16, 40), (64, 9), (128, 5), (256, 3)):
    for d in (64, 128):
        add_pages(size, 200, columns, d, "causal", np.float16)
for kind in ("none", "window", "sink", "mask", "alibi_slopes", "segment_ids", "q_lengths",
             "softcap", "dropout"):  # fmt: skip
    add_pages(16, 150, 30, 64, kind, bfloat16)
add_pages(16, 150, 30, 256, "causal", np.float16)
add_pages(16, 100, 400, 64, "none", np.float16)  # split, by Hopper's kernel
add_pages(16, 4, 400, 128, "causal", np.float16)


def numbers_of_no_page(xp: Any, _runs: int) -> None:
    """A page that does not exist is replaced before a key is written through its number."""
    if xp is np:
        return
    cache = cuflash.KVCache(2, 2, 8, max_length=30, page_size=4, pages=20, dtype=np.float32,
                            like=xp.zeros(1))  # fmt: skip
    k = xp.ones((2, 2, 2, 8), np.float32)
    for number in (-5, 20, 10**9):
        cache.take([-1, -1])
        cache.append(k, k)
        cache.page_table[1, 0] = number
        cache.append(k, k)
        assert cache.lengths.get().tolist() == [4, 4]
        assert 0 <= int(cache.page_table[1, 0]) < 20


CASES["numbers of no page"] = numbers_of_no_page


class _Known(Exception):
    pass


def compile_ahead(wanted: str, folder: Path) -> None:
    """Compile the kernels of these cases, found by calls on NumPy arrays that end early."""
    from cuflash._api import dispatch, paged
    from cuflash._select import hardware
    from cuflash._select.choose import choose
    from cuflash.tuning._facts import compile_all

    device = hardware.typical("sm_90")._replace(name="NVIDIA H200")
    found = {}

    def note(problem: Any) -> None:
        found.update(dict.fromkeys(step.config for step in choose(problem, device)))
        raise _Known

    dispatch.forward = lambda problem, *_, **__: note(problem)
    paged._on_the_host = lambda problem, own, *_: note(paged._for_kernels(problem, own)[0])
    for name, case in CASES.items():
        if wanted in name:
            try:
                case(np, 1)
            except _Known:
                pass
    folder.mkdir(exist_ok=True)
    for config, own in compile_all(found, device, shared=folder).items():
        print(config.kernel, own.registers, own.spill_bytes, own.warnings, own.error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", default="", help="what the names of cases contain")
    parser.add_argument("--runs", type=int, default=200, help="of which all have the same bits")
    parser.add_argument("--dry", action="store_true", help="on NumPy arrays")
    parser.add_argument("--compile", type=Path, help="put the kernels there; needs no GPU")
    given = parser.parse_args()
    if given.compile:
        compile_ahead(given.name, given.compile)
        return 0
    if given.dry:
        xp: Any = np
    else:
        import cupy as xp
    failed = 0
    for name, case in CASES.items():
        if given.name not in name:
            continue
        began = time.perf_counter()
        try:
            case(xp, given.runs)
            verdict = "right"
        except Exception:
            failed += 1
            verdict = f"WRONG\n{traceback.format_exc(limit=-2)}"
        print(f"{name}: {verdict} [{time.perf_counter() - began:.1f} s]", flush=True)
    print(f"{failed} of {len(CASES)} are wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
