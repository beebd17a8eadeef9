"""Are calls for a GPU of few kinds, in which every dtype meets every set of options?"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import problems
from support.shared_kernels import Kind, kinds

LIMITS = problems._DEVICE
KINDS = kinds(LIMITS.dtypes, LIMITS.option_sets, LIMITS.head_dims)


def test_every_dtype_meets_every_set_of_options() -> None:
    met = {(kind.dtypes, kind.options) for kind in KINDS}
    for dtype, options in itertools.product(LIMITS.dtypes, LIMITS.option_sets):
        assert ((dtype,) * 3, options) in met
    for dtypes in {kind.dtypes for kind in KINDS if len(set(kind.dtypes)) == 1}:
        places = [(kind.head_dim, kind.aligned) for kind in KINDS if kind.dtypes == dtypes]
        assert set(map(max, zip(*places, strict=True))) == {64, True}, dtypes
        assert set(map(min, zip(*places, strict=True))) == {40, False}, dtypes
    assert {kind.integers for kind in KINDS} == {"", "int32", "int64"}
    assert {kind.window for kind in KINDS} == {(True, True), (True, False), (False, True)}


def test_properties_share_the_kinds_of_an_option_set() -> None:
    def of(*options: str) -> set[Kind]:
        return set(kinds(LIMITS.dtypes, LIMITS.option_sets, LIMITS.head_dims, options))

    assert {kind.options for kind in of("sink")} == {frozenset(), frozenset({"sink"})}
    assert of("sink") <= of("sink", "causal") | {
        own for own in of("sink") if len({*own.dtypes}) > 1
    }


@given(data=st.data())
def test_a_drawn_call_is_of_a_kind(data: st.DataObject) -> None:
    call = data.draw(problems.calls(LIMITS, gradients=True))
    dtypes = tuple(a.dtype.name for a in call.qkv)
    of_dtypes = [kind for kind in KINDS if kind.dtypes == dtypes]
    (kind,) = (k for k in of_dtypes if k.options == set(call.options) - {"seed", "enable_gqa"})
    assert call.q.shape[-1] == kind.head_dim
    assert call.dout.dtype == call.dtype
    assert call.dlse is None or call.dlse.dtype == call.lse_dtype
    for name, value in call.options.items():
        if name in ("offset", "q_lengths", "kv_lengths"):
            assert str(getattr(value, "dtype", "")) == kind.integers
        if name in ("bias", "alibi_slopes", "sink"):
            assert value.dtype == (call.dtype if kind.own_floats else np.float32)
        if name == "window":
            assert tuple(side is not None for side in value) == kind.window
    problems.run(np, call)
