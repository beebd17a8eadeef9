"""Are float64 kernels within the budget in the shapes they are optimised for, with any options?

Calls have enough rows for the rules on samples, at the head sizes with the fastest tiles: gradients
whose blocks are shared by partners, and the forward with one buffer. Arrays of families are not
aligned to the 16 bytes of a copy; those of options are. Options are also tested at wide heads,
there also in float32, for which Hopper has no kernel of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash.testing._budget import SAMPLE, Budget
from cuflash.testing._families import OF_EVERY_DTYPE
from support.memory import Placement
from support.problems import Call, make_call, probe, run

pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

ROWS, KEYS = 330, 300
BATCH, HEADS, FEWER = 2, 2, (170, 210)  # rows and keys of a call with options
_RNG = np.random.default_rng(11)
_SLOPES, _SINK = np.array([0.01, 0.3]), np.array([0.5, -2.0])
_MASK = _RNG.random((BATCH, 1, *FEWER)) < 0.7
_MASK[:, :, 17] = False  # a row that sees nothing
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (90, 20), "offset": np.array([[-25], [60]])},
    "lengths": {
        "causal": True, "q_lengths": np.array([[133], [170]]), "kv_lengths": np.array([[210], [0]]),
    },
    "softcap": {"softcap": 2.0, "scale": -0.3},
    "bias": {"bias": _RNG.standard_normal((HEADS, *FEWER))},
    "mask": {"mask": _MASK, "window": (None, 40)},
    "segments": {
        "segment_ids": tuple(np.sort(_RNG.integers(0, 4, (BATCH, 1, n)), -1) for n in FEWER),
    },
    "slopes": {"alibi_slopes": _SLOPES, "causal": True},
    "sink": {"sink": _SINK},
    "dropout": {"dropout": 0.3, "seed": 2**40 + 3},
    "groups": {"enable_gqa": True, "causal": True},
    "together": {"softcap": 2.0, "alibi_slopes": _SLOPES, "sink": _SINK, "window": (90, 20),
                 "dropout": 0.3, "seed": 5},
}  # fmt: skip


def call_of(head_dim: int, name: str, dtype: Any = np.float64) -> Call:
    (rows, keys), options = FEWER, OPTIONS[name]
    of_keys = (BATCH, 1 if name == "groups" else HEADS, keys, head_dim)
    of_rows = (BATCH, HEADS, rows, head_dim)
    call = make_call("normal", 5, dtype, of_rows, of_keys, of_keys, options=options)
    operands = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
    return call.but(
        wrt=("q", "k", "v", *({"bias", "alibi_slopes", "sink"} & set(options))),
        dlse=np.random.default_rng(12).standard_normal(of_rows[:-1]).astype(dtype),
        placements=dict.fromkeys(operands, Placement.dense(4, lead=64)),
    )


def check(call: Call) -> None:
    """Check results and gradients against the budget."""
    import cupy

    result, budget = run(cupy, call, with_out=True), Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.parametrize("family", OF_EVERY_DTYPE)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_family_of_inputs(head_dim: int, causal: bool, family: str) -> None:
    rows, keys = ((1, 2, n, head_dim) for n in (ROWS, KEYS))
    call = make_call(family, 8, np.float64, rows, keys, keys, options={"causal": causal})
    assert call.q.size >= SAMPLE
    check(call)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sums_of_two_thousand_terms(causal: bool) -> None:
    """Sums of 2000 terms are right in 900 rows, with dout = 0 in the others: longdouble is slow."""
    import cupy

    rows, keys = (1, 2000, 64), (1, 2300, 64)
    call = make_call("normal", 9, np.float64, rows, keys, keys, options={"causal": causal})
    some = np.sort(np.random.default_rng(10).permutation(2000)[:900])
    dout = np.zeros_like(call.dout)
    dout[:, some] = call.dout[:, some]
    result = run(cupy, call.but(dout=dout), with_out=True)
    options = {"mask": np.tri(2000, 2300, 300, dtype=bool)[some]} if causal else {}
    budget = Budget(call.but(q=call.q[:, some], dout=dout[:, some], options=options))
    out, lse, dq = (a[:, some] for a in (result.out, result.lse, result.gradients["q"]))
    budget.check_forward(out, lse)
    budget.check_backward(result.gradients | {"q": dq}, given=(out, lse))
    assert not np.delete(result.gradients["q"], some, axis=1).any()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(np.float64, 64), (np.float64, 128), (np.float64, 192), (np.float64, 256),
     (np.float32, 192), (np.float32, 256)],
)  # fmt: skip
def test_every_option(dtype: Any, head_dim: int, name: str) -> None:
    check(call_of(head_dim, name, dtype))


@pytest.mark.parametrize("family", OF_EVERY_DTYPE)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_weights_are_exact_one_by_one(head_dim: int, family: str) -> None:
    """Single weights are exact: values of 0 and 1 sum them, and their errors cannot cancel."""
    import cupy

    rows, keys = ((1, 2, n, head_dim) for n in (ROWS, KEYS))
    call = probe(make_call(family, 8, np.float64, rows, keys, keys, options={"causal": True}))
    Budget(call).check_probe(run(cupy, call, backward=False).out)
