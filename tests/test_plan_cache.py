"""Is a known call recognised, and no other call taken for it?"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import MaskMod, Options
from cuflash._launch import plan_cache


@dataclass(frozen=True)
class Place:
    ptr: int = 4096
    device_id: int = 0


@dataclass(frozen=True)
class Array:
    """The attributes that cuflash reads from an array on a GPU."""

    shape: tuple[int, ...] = (2, 8, 4)
    strides: tuple[int, ...] = (64, 8, 2)
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float16))
    data: Place = field(default_factory=Place)


class OtherArray(Array):
    """The same attributes of an array of another library."""


@pytest.fixture
def known(monkeypatch):
    """Remember a call of three arrays, whose result is their addresses."""
    monkeypatch.setattr(plan_cache, "_plans", {})
    monkeypatch.setattr(plan_cache, "_kinds", set())
    plan_cache.remember(
        lambda *addresses: list(addresses), Options(causal=True), True, (Array(),) * 3
    )


@pytest.mark.usefixtures("known")
def test_new_addresses_are_the_same_call():
    for ptrs in ((4096, 4096, 4096), (16, 32, 48)):
        arrays = [replace(Array(), data=Place(ptr)) for ptr in ptrs]
        assert plan_cache.recall(Options(causal=True), True, arrays) == list(ptrs)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, 7, 4)},
        {"strides": (64, 16, 2)},
        {"dtype": np.dtype(np.uint16)},
        {"data": Place(4096 + 8)},
        {"data": Place(device_id=1)},
    ],
)
def test_another_layout_is_another_call(which, changes):
    arrays = [Array()] * 3
    arrays[which] = replace(Array(), **changes)
    assert plan_cache.recall(Options(causal=True), True, arrays) is None


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("options", "return_lse"),
    [
        (Options(causal=True), False),
        (Options(), True),
        (Options(causal="top_left"), True),
        (Options(causal=True, window=(3, 0)), True),
        (Options(causal=True, dropout=0.5, seed=0), True),
        (Options(causal=True, mask=np.ones((8, 8), bool)), True),
    ],
)
def test_other_options_are_another_call(options, return_lse):
    assert plan_cache.recall(options, return_lse, (Array(),) * 3) is None


@pytest.mark.usefixtures("known")
def test_arrays_of_another_library_are_not_known():
    for arrays in (
        (OtherArray(), Array(), Array()),
        ([1.0], Array(), Array()),
        (Array(), Array(), None),
    ):
        assert plan_cache.recall(Options(causal=True), True, arrays) is None


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("which", range(3))
def test_a_gradient_is_known_by_all_its_arrays(which):
    first, options = (Array(),) * 3, Options(causal=True)
    assert plan_cache.recall(options, True, first, first) is None  # a forward is no gradient
    plan_cache.remember(lambda *addresses: addresses, options, True, first, first)
    assert plan_cache.recall(options, True, first, first) == (4096,) * 6
    other = list(first)
    other[which] = replace(Array(), dtype=np.dtype(np.float32))
    for arrays in ((first, other), (other, first)):
        assert plan_cache.recall(options, True, *arrays) is None
    other[which] = None
    assert plan_cache.recall(options, True, first, other) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(causal=True, kv_lengths=3), True),
        (Options(dropout=0.5, seed=0), False),
        (Options(mask_mod=MaskMod("q > k", host=lambda b, h, q, k: q > k)), False),
    ],
)
def test_calls_that_draw_or_ask_a_formula_stay_unknown(options, expected):
    assert plan_cache.may_be_known(options) is expected


def with_mask(mask: object, **plain: object) -> Options:
    """Return options with an array on a GPU, as cuflash sees it."""
    options = Options(mask=np.ones((8, 8), bool), **plain)
    object.__setattr__(options, "arrays", {"mask": mask})
    return options


@pytest.mark.usefixtures("known")
def test_arrays_of_options_are_known_by_their_layouts_and_read_where_they_lie():
    first, at = (Array(),) * 3, lambda *place: replace(Array(), data=Place(*place))
    plan_cache.remember(lambda *addresses: addresses, with_mask(at(256)), True, first)
    assert plan_cache.recall(with_mask(at(512)), True, first) == (4096, 4096, 4096, 512)
    for mask in (at(520), at(512, 1), OtherArray(), np.ones((8, 8), bool)):
        assert plan_cache.recall(with_mask(mask), True, first) is None
    for options in (Options(), with_mask(at(512), causal=True), with_mask(at(512), seed=1)):
        assert plan_cache.recall(options, True, first) is None
    assert plan_cache.recall(with_mask(at(512)), True, first, first) is None
    assert not any(isinstance(part, Options) for key in plan_cache._plans for part in key)


@pytest.mark.usefixtures("known")
def test_calls_with_arrays_and_a_seed_are_not_remembered():
    count = len(plan_cache._plans)
    for plain in ({"dropout": 0.5, "seed": 1}, {"mask_mod": MaskMod("q > k", host=max)}):
        plan_cache.remember(lambda *_: 1, with_mask(Array(), **plain), True, (Array(),) * 3)
    plan_cache.remember(lambda *_: 1, with_mask(np.ones((8, 8), bool)), True, (Array(),) * 3)
    assert len(plan_cache._plans) == count


@pytest.mark.usefixtures("known")
def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(plan_cache, "_LIMIT", 3)
    for n in range(5):
        q = replace(Array(), shape=(n, 8, 4))
        plan_cache.remember(lambda *_: 1, Options(), False, (q, Array(), Array()))
        assert plan_cache.recall(Options(), False, (q, Array(), Array())) == 1
        assert len(plan_cache._plans) <= 3


def test_a_plan_is_found_by_values_not_identities():
    """Equal problems that are described anew find their plan; other strides of out need another."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._problem import problem
    from support.recorded_launches import recorded_launches

    with recorded_launches() as (library, launched):
        q = library.asarray(np.zeros((2, 8, 16), np.float16))
        out = library.asarray(np.zeros((2, 8, 32), np.float16))
        for count, columns in ((1, slice(0, 16)), (1, slice(0, 16)), (2, slice(0, 32, 2))):
            problem._describe.cache_clear()
            cuflash.attention(q, q, q, out=out[..., columns])
            assert len(plan_cache._plans) == count
        assert len(launched) == 3
        with cuflash.tuning.use(None):
            assert not plan_cache._plans, "another table of tiles chooses anew"


#: Arguments that a plain call does not have, each with a value that a checked call refuses.
REFUSED = {"axes": 3, "precision": "half", "deterministic": None, "workspace": 3, "config": 3}


@pytest.mark.parametrize("name", [*REFUSED, "out", "dlse", "wrt", "grads_out"])
def test_a_call_with_more_is_checked_although_the_plain_one_is_known(name):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from support.recorded_launches import recorded_launches

    with recorded_launches() as (library, launched):
        q = library.asarray(np.zeros((2, 8, 16), np.float16))
        result = cuflash.attention(q, q, q, return_lse=True)
        for _ in range(2):
            cuflash.attention(q, q, q)
            cuflash.attention_backward(q, q, q, q, *result)
        count = len(launched)
        if name not in ("dlse", "wrt", "grads_out"):
            with pytest.raises((TypeError, ValueError), match=f"{name}: got"):
                cuflash.attention(q, q, q, **{name: REFUSED.get(name, 3)})
        if name != "out":
            with pytest.raises((TypeError, ValueError), match=f"{name}: got"):
                cuflash.attention_backward(q, q, q, q, *result, **{name: REFUSED.get(name, 3)})
        assert len(launched) == count


@pytest.mark.parametrize("own", ["bias", "sink", "segment_ids"])
def test_a_known_call_launches_on_the_arrays_that_it_is_given(own, monkeypatch):
    """A known call launches the kernels and pointers of a checked call, those of options too."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._api import attention
    from cuflash._launch.kernel_launcher import KernelLauncher
    from support.recorded_launches import recorded_launches

    pointers = []
    run = KernelLauncher.run

    def noted(self, given, *rest):
        names = dict(zip(self.names, given, strict=False))
        pointers.append({n: at for n, at in names.items() if n in ("q", "dout") or own in n})
        run(self, given, *rest)

    monkeypatch.setattr(KernelLauncher, "run", noted)
    with recorded_launches() as (library, launched):
        made = {
            "bias": lambda: library.asarray(np.zeros((8, 8), np.float16)),
            "sink": lambda: library.asarray(np.zeros(3, np.float32)),
            "segment_ids": lambda: (library.asarray(np.zeros(8, np.int32)),) * 2,
        }[own]
        options = [Options(**{own: made()}) for _ in range(2)]
        q, dout = (library.asarray(np.zeros((2, 3, 8, 16), np.float16)) for _ in range(2))
        found = []
        for known in (False, True):
            for given in options:
                if not known:
                    plan_cache.forget()
                pointers.clear()
                launched.clear()
                lse = cuflash.attention(q, q, q, options=given, return_lse=True).lse
                cuflash.attention_backward(dout, q, q, q, dout, lse, options=given)
                found.append(([*pointers], [*launched]))
            monkeypatch.setattr(attention, "describe", None)  # nothing is checked from here on
    assert found[0][0] != found[1][0], "the arrays of the options lie elsewhere"
    assert found[2:] == found[:2]


def test_packed_arguments_of_all_launchers_are_bounded(monkeypatch):
    """A repeated launch packs nothing; how many arguments are kept does not grow with plans."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._jit.compilation import Kernel
    from cuflash._launch import kernel_launcher

    launched, packed = [], []

    def launch(*given):
        (argument,) = struct.unpack("<Q", ctypes.string_at(given[-2], 8))
        launched.append(ctypes.string_at(argument, 18))

    monkeypatch.setattr(kernel_launcher, "driver", SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(kernel_launcher, "_known", {})
    monkeypatch.setattr(kernel_launcher, "_LIMIT", 10)
    pack = kernel_launcher.KernelLauncher._packed
    monkeypatch.setattr(
        kernel_launcher.KernelLauncher, "_packed",
        lambda self, *given: packed.append(pack(self, *given)) or packed[-1],
    )  # fmt: skip
    for _ in range(6):
        launcher = kernel_launcher.KernelLauncher(Kernel(1, 128, 0, None), 1, ("q", "k"), b"12")
        for pointers in ((16, 32), (16, 48), (16, 32), (16, 48)):
            launcher.run(pointers, 0)
            assert len(kernel_launcher._known) <= 10
            assert launched[-1] == struct.pack("<2Q", *pointers) + b"12"
    assert len(packed) == 12
