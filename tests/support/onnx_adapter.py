"""What is a call of the ONNX operator ``Attention`` (opset 25) in cuflash's words?

Attributes and inputs have ONNX's names, meanings and defaults. The two differ in three points. ONNX
counts queries from the keys of the cache: the offset is the length of the past, without a cache 0,
and ``nonpad_kv_seqlen - seqlen_q`` where the cache is the caller's. It packs heads into the last
axis of 3-D tensors. Its ``attn_mask`` may have fewer columns than there are keys, and hides the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash import reference
from cuflash._arrays import array_module
from support import memory

Array = Any
#: Attributes and their defaults.
DEFAULTS: dict[str, Any] = {
    "is_causal": 0,
    "kv_num_heads": None,
    "left_window_size": -1,
    "q_num_heads": None,
    "qk_matmul_output_mode": 0,
    "right_window_size": -1,
    "scale": None,
    "softcap": 0.0,
    "softmax_precision": None,
}
#: TensorProto.DataType of float64, as softmax_precision names it.
DOUBLE = 11
#: Values of qk_matmul_output_mode.
RAW, AFTER_SOFTCAP, AFTER_MASK, AFTER_SOFTMAX = range(4)


class Outputs(NamedTuple):
    """The operator's outputs, in its order."""

    Y: Array
    present_key: Array
    present_value: Array
    qk_matmul_output: Array | None


def attention(
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    with_qk_matmul_output: bool = False,
) -> Outputs:
    """Run the operator by `cuflash.attention`; the last output only if it is asked for."""
    absent = (None,) * (7 - len(inputs))
    Q, K, V, mask, past_key, past_value, nonpad_kv_seqlen = (*inputs, *absent)
    given = {**DEFAULTS, **(attributes or {})}
    xp = array_module(Q)
    packed = Q.ndim == 3
    if packed:
        Q = _unpacked(Q, given["q_num_heads"])
        K, V = (_unpacked(a, given["kv_num_heads"]) for a in (K, V))
    if past_key is not None:
        K = xp.concatenate([past_key, K], axis=2)
        V = xp.concatenate([past_value, V], axis=2)
    options: dict[str, Any] = {
        "causal": bool(given["is_causal"]),
        "scale": given["scale"],
        "softcap": given["softcap"] or None,
        "enable_gqa": Q.shape[1] != K.shape[1],
    }
    if nonpad_kv_seqlen is not None:
        options["kv_lengths"] = nonpad_kv_seqlen.reshape(-1, 1)
    sides = (given["left_window_size"], given["right_window_size"])
    if options["causal"] or max(sides) >= 0:
        if nonpad_kv_seqlen is not None:
            options["offset"] = nonpad_kv_seqlen.reshape(-1, 1) - Q.shape[2]
        else:
            options["offset"] = 0 if past_key is None else past_key.shape[2]
        options["window"] = tuple(None if side < 0 else side for side in sides)
    if mask is not None:
        name = "mask" if mask.dtype == np.bool_ else "bias"
        options[name] = _to_width(xp, mask, K.shape[2])
    # Scores are float32 at least. Operands of higher precision give more.
    dtype = Q.dtype
    if given["softmax_precision"] == DOUBLE:
        dtype = np.dtype(np.float64)
    q, k, v = (a.astype(dtype, copy=False) for a in (Q, K, V))
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    scores = None
    mode = given["qk_matmul_output_mode"]
    if with_qk_matmul_output and mode == AFTER_SOFTMAX:
        scores = cuflash.weights(q, k, lse, rows=slice(None), **options).astype(Q.dtype)
    elif with_qk_matmul_output:
        scores = xp.asarray(_scores(q, k, options, mode).astype(Q.dtype))
    out = out.astype(Q.dtype, copy=False)
    if packed:
        out = out.swapaxes(1, 2).reshape(Q.shape[0], Q.shape[2], -1)
    return Outputs(out, K, V, scores)


def _unpacked(array: Array, num_heads: int | None) -> Array:
    """Return (batch, seqlen, heads * d) as a view (batch, heads, seqlen, d)."""
    if num_heads is None:
        raise ValueError("3-D inputs need q_num_heads and kv_num_heads")
    batch, seqlen, width = array.shape
    return array.reshape(batch, seqlen, num_heads, width // num_heads).swapaxes(1, 2)


def _to_width(xp: ModuleType, mask: Array, seqlen_k: int) -> Array:
    """Return ``attn_mask`` with at least two axes, its missing columns hidden."""
    mask = mask.reshape((1,) * (2 - mask.ndim) + mask.shape)
    missing = seqlen_k - mask.shape[-1]
    if not missing:
        return mask
    hidden = False if mask.dtype == np.bool_ else -np.inf
    tail = xp.full((*mask.shape[:-1], missing), hidden).astype(mask.dtype)
    return xp.concatenate([mask, tail], axis=-1)


def _scores(q: Array, k: Array, options: dict[str, Any], mode: int) -> np.ndarray:
    """Return scores of one stage by the definition, since cuflash never forms them."""
    known = {
        RAW: ("scale", "enable_gqa"),
        AFTER_SOFTCAP: ("scale", "softcap", "enable_gqa"),
        AFTER_MASK: tuple(options),
    }[mode]
    given = {name: options[name] for name in known}
    arrays = {name: memory.to_numpy(a) for name, a in given.items() if hasattr(a, "strides")}
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    return reference.scores(
        memory.to_numpy(q), memory.to_numpy(k), dtype=dtype, **{**given, **arrays}
    )
