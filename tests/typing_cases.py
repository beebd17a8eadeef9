"""What does a type checker know of a call? Checkers read this file, and nobody runs it.

``# E`` marks a line that has to be an error.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import cuflash
from cuflash import AttentionResult, Gradients, Options, distributed

Floats = npt.NDArray[np.float32]


def arrays_keep_their_type(q: Floats, k: Floats, v: Floats, mask: npt.NDArray[np.bool_]) -> None:
    assert_type(cuflash.attention(q, k, v), Floats)
    assert_type(cuflash.attention(q, k, v, causal=True, mask=mask), Floats)
    assert_type(cuflash.attention(q, k, v, options=Options(window=(3, None))), Floats)
    assert_type(cuflash.attention_varlen(q, k, v, [0, 3], [0, 3]), Floats)
    assert_type(cuflash.attention_paged(q, k, v, [[0]], [3]), Floats)
    assert_type(cuflash.rotary(q, 3), Floats)
    assert_type(cuflash.merge([q, k], [v, v]), AttentionResult[Floats])
    assert_type(cuflash.merge(q, v).out, Floats)
    assert_type(cuflash.merge_backward(v, [q, k], [v, v]).out, Floats)


def results_of_another_dtype(
    q: Floats, half: npt.NDArray[np.float16], double: npt.NDArray[np.float64], unknown: Any
) -> None:
    assert_type(cuflash.logsumexp(q, q, causal=True), Floats)
    assert_type(cuflash.logsumexp(half, half), Floats)
    assert_type(cuflash.logsumexp(double, double), npt.NDArray[np.float64])
    assert_type(cuflash.logsumexp(unknown, unknown), Any)
    assert_type(cuflash.weights(half, half, q, rows=[0]), Floats)
    assert_type(cuflash.weights(double, double, double, rows=[0]), npt.NDArray[np.float64])
    assert_type(cuflash.dropout_mask((2, 4), 0.5, seed=1), npt.NDArray[np.bool_])
    array, scale = cuflash.quantize(q)
    assert_type(array, npt.NDArray[Any])
    assert_type(scale, npt.NDArray[Any])


def with_lse_the_result_is_a_pair(q: Floats, k: Floats, v: Floats) -> None:
    result = cuflash.attention(q, k, v, return_lse=True)
    assert_type(result, AttentionResult[Floats])
    out, _lse = result
    assert_type(out, Floats)
    assert_type(result.out, Floats)
    assert_type(
        cuflash.attention_varlen(q, k, v, [0, 3], [0, 3], return_lse=True),
        AttentionResult[Floats],
    )


def gradients_that_were_asked_for_are_there(q: Floats, k: Floats, v: Floats) -> None:
    out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
    assert_type(out, Floats)
    dq, dk, dv = pullback(out)
    assert_type(dq, Floats)
    assert_type(dk, Floats)
    assert_type(dv, Floats)
    gradients = pullback(out)
    assert_type(gradients.dq, Floats)
    gradients.dq.sum()
    assert_type(gradients.dbias, None)
    pullback(out, wrt=("q", "scale")).dscale.sum()
    result, pullback = cuflash.attention_vjp(q, k, v, return_lse=True)
    assert_type(result, AttentionResult[Floats])
    again = cuflash.attention_backward(out, q, k, v, out, result.lse)
    assert_type(again, Gradients[Floats, None])
    some = cuflash.attention_backward(out, q, k, v, out, result.lse, wrt=("sink",))
    some.dsink.sum()
    dq, dk = cuflash.logsumexp_backward(result.lse, q, k, result.lse)
    assert_type(dq, Floats)
    assert_type(dk, Floats)


def ranks_have_the_types_of_one(q: Floats, parts: list[Floats]) -> None:
    comm = distributed.connect(0, 1)
    assert_type(distributed.attention(q, q, q, comm=comm, causal=True), Floats)
    result, pullback = distributed.attention_vjp(q, q, q, comm=comm, return_lse=True)
    assert_type(result, AttentionResult[Floats])
    dq, _dk, _dv = pullback(q)
    assert_type(dq, Floats)
    some = distributed.attention_backward(q, q, q, q, q, result.lse, comm=comm, wrt=("sink",))
    some.dsink.sum()
    assert_type(distributed.unshard(q, comm=comm), Floats)
    outs, pullback = distributed.attention_vjp(parts, parts, parts, comm=distributed.simulated(2))
    pullback(outs)[0].dq.sum()


def annotations_need_no_parameters(gradients: Gradients, result: AttentionResult) -> None:
    gradients.dk.sum()
    result.out.sum()


def a_flag_that_is_a_variable(q: Floats, k: Floats, v: Floats, flag: bool) -> None:
    assert_type(cuflash.attention(q, k, v, return_lse=flag), Any)


class Tensor:
    """An array of another library. The result is an array of NumPy or CuPy."""


def other_arrays_are_taken(q: Tensor) -> None:
    assert_type(cuflash.attention(q, q, q), Any)


def mistakes_are_found(q: Floats, k: Floats, v: Floats) -> None:
    cuflash.attention(q, k, v, casual=True)  # type: ignore # E
    cuflash.attention(q, k, v, window=3)  # type: ignore # E
    cuflash.attention(q=q, k=k, v=v)  # type: ignore # E
    cuflash.attention(q, k)  # type: ignore # E
    Options(casual=True)  # type: ignore # E
