"""Does every wrong call say what is wrong, and leave everything as it was?"""

from __future__ import annotations

import ctypes
import operator
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import Options
from cuflash._problem import destinations


def arrays() -> SimpleNamespace:
    """Return a legal (2, 4, 5, 8) x (2, 4, 7, 8) problem, with arrays that wrong calls may need."""
    rng = np.random.default_rng(0)
    a = SimpleNamespace(
        q=rng.standard_normal((2, 4, 5, 8), dtype=np.float32),
        k=rng.standard_normal((2, 4, 7, 8), dtype=np.float32),
        v=rng.standard_normal((2, 4, 7, 6), dtype=np.float32),
        out=np.zeros((2, 4, 5, 6), np.float32),
        lse=np.zeros((2, 4, 5), np.float32),
        dout=rng.standard_normal((2, 4, 5, 6), dtype=np.float32),
    )
    a.qkv = (a.q, a.k, a.v)
    return a


def call(**keywords):
    return lambda a: cuflash.attention(*a.qkv, **keywords)


def backward(**keywords):
    return lambda a: cuflash.attention_backward(a.dout, *a.qkv, a.out, a.lse, **keywords)


def read_only(array):
    array.flags.writeable = False
    return array


class OnAGpu:
    """Pretends to be a scalar array on a GPU."""

    __cuda_array_interface__ = None

    def __float__(self):
        return 1.0


# name: (wrong call, exception, argument named, pattern of the rest)
WRONG = {
    # what is an array
    "q a list": (
        lambda a: cuflash.attention([[1.0]], a.k, a.v), TypeError, "q", "list.*np.asarray"),
    "v a list": (lambda a: cuflash.attention(a.q, a.k, [1.0]), TypeError, "v", "list"),
    "k None": (lambda a: cuflash.attention(a.q, None, a.v), TypeError, "k", "NoneType"),
    "masked array": (
        lambda a: cuflash.attention(np.ma.masked_array(a.q), a.k, a.v), TypeError, "q", "mask="),
    "ctypes buffer": (
        lambda a: cuflash.attention(a.q, a.k, (ctypes.c_float * 4)()), TypeError, "v", "c_float"),
    "v a NumPy scalar": (
        lambda a: cuflash.attention(a.q, a.k, np.float32(1)), TypeError, "v", "float32"),
    # ranks and shapes
    "q of rank 1": (
        lambda a: cuflash.attention(a.q[0, 0, 0], a.k, a.v), ValueError, "q", r"q\[None, :\]"),
    "v of rank 0": (
        lambda a: cuflash.attention(a.q, a.k, np.array(1.0)), ValueError, "v",
        "two axes"),
    "head_dim differs": (
        lambda a: cuflash.attention(a.q, a.k[..., :7], a.v), ValueError, "k", "head_dim 7.*8"),
    "values for other keys": (
        lambda a: cuflash.attention(a.q, a.k, a.v[..., :6, :]), ValueError, "v", "6 values.*7"),
    "keys without values": (
        lambda a: cuflash.attention(a.q, a.k[..., :6, :], a.v), ValueError, "v", "7 values.*6"),
    "head_dim 0": (
        lambda a: cuflash.attention(a.q[..., :0], a.k[..., :0], a.v), ValueError, "q",
        "at least 1"),
    "batches do not broadcast": (
        lambda a: cuflash.attention(a.q, a.k[:, :3], a.v[:, :3]), ValueError, "q, k, v",
        "broadcast"),
    "grouped heads without the flag": (
        lambda a: cuflash.attention(a.q, a.k[:, :2], a.v[:, :2]), ValueError, "q, k, v",
        "enable_gqa=True"),
    "heads not divisible": (
        lambda a: cuflash.attention(a.q, a.k[:, :3], a.v[:, :3], enable_gqa=True), ValueError, "k",
        "divisor of the 4"),
    "k and v heads differ under GQA": (
        lambda a: cuflash.attention(a.q, a.k[:, :2], a.v[:, :1], enable_gqa=True), ValueError, "v",
        "2 heads"),
    "more axes than NumPy broadcasts": (
        lambda a: cuflash.attention(*[np.ones((1,) * 31 + (2, 2))] * 3), ValueError, "q",
        "31 batch axes.*at most 30"),
    "more axes of groups": (
        lambda a: cuflash.attention(*[np.ones((1,) * 30 + (2, 2))] * 3, enable_gqa=True),
        ValueError, "q", "30 batch axes.*at most 29"),
    "parts of more axes than can be stacked": (
        lambda a: cuflash.merge([np.ones((1,) * 64)], [np.ones((1,) * 63)]), ValueError,
        r"outs\[0\]", "64 axes.*fewer than 64"),
    "GQA without heads": (
        lambda a: cuflash.attention(a.q[0, 0], a.k[0, 0], a.v[0, 0], enable_gqa=True), ValueError,
        "q", "heads axis"),
    # dtypes
    "integers": (
        lambda a: cuflash.attention(a.q.astype(int), a.k, a.v), TypeError, "q",
        r"int64.*astype\(np.float32\)"),
    "complex": (
        lambda a: cuflash.attention(a.q, a.k.astype(complex), a.v), TypeError, "k", "complex128"),
    "longdouble": (
        lambda a: cuflash.attention(a.q, a.k, a.v.astype(np.longdouble)), TypeError, "v",
        "float64"),
    "float16 with bfloat16": (
        lambda a: cuflash.attention(
            a.q.astype(np.float16), a.k.astype(ml_dtypes.bfloat16), a.v.astype(np.float16)),
        TypeError, "q, k, v", "not both"),
    "float8": (
        lambda a: cuflash.attention(a.q.astype(ml_dtypes.float8_e4m3), a.k, a.v), TypeError, "q",
        "float8_e4m3"),
    # axes
    "axes an int": (call(axes=-2), TypeError, "axes", "four pairs"),
    "axes of three pairs": (call(axes=[(-2, -1)] * 3), ValueError, "axes", "four pairs"),
    "axes a triple": (call(axes=[(-3, -2, -1)] * 4), ValueError, "axes", "four pairs"),
    "axes beyond the rank": (call(axes=[(-5, -1)] * 4), ValueError, "axes", "axis -5 for q"),
    "axes twice the same": (call(axes=[(3, -1)] * 4), ValueError, "axes", "two different"),
    "axes as floats": (call(axes=[(-2.0, -1.0)] * 4), TypeError, "axes", "pairs"),
    # option values
    "causal an int": (call(causal=1), TypeError, "causal", "top_left"),
    "causal misspelt": (call(causal="topleft"), ValueError, "causal", "top_left"),
    "alignment word with offset": (
        call(causal="top_left", offset=3), ValueError, "offset", "causal=True"),
    "offset a float": (call(offset=1.5), TypeError, "offset", "integer"),
    "offset a bool": (call(offset=True), TypeError, "offset", "integer"),
    "offset per batch of shape (B,)": (
        call(offset=np.array([1, 2])), ValueError, "offset",
        r"write offset\[:, None\], .*\(2, 1\)"),
    "kv_lengths a list of (B,)": (
        call(kv_lengths=[1, 2]), ValueError, "kv_lengths",
        r"list np\.array\(kv_lengths\)\[:, None\]"),
    "lists of different lengths": (
        call(kv_lengths=[[1], [2, 3]]), TypeError, "kv_lengths", "list.*an integer array"),
    "lengths a list of floats": (
        call(kv_lengths=[[1.5], [2.0]]), TypeError, "kv_lengths", "dtype float64"),
    "window an int": (call(window=3), TypeError, "window", r"\(3, 3\)"),
    "window negative": (call(window=(-1, 0)), ValueError, "window", "None means no bound"),
    "window of floats": (call(window=(1.5, None)), TypeError, "window", "pair"),
    "window of three": (call(window=(1, 2, 3)), TypeError, "window", "pair"),
    "window of arrays": (call(window=(np.array([1, 2]), 0)), TypeError, "window", "pair"),
    "offset beyond any array": (
        call(causal=True, offset=2**63 - 1), ValueError, "offset", "63 bits.*2\\^59"),
    "window of bools": (call(window=(True, None)), TypeError, "window", "pair"),
    "scale NaN": (call(scale=float("nan")), ValueError, "scale", "finite"),
    "scale infinite": (call(scale=np.inf), ValueError, "scale", "finite"),
    "scale a class": (call(scale=float), TypeError, "scale", "number"),
    "offset a class": (call(offset=int), TypeError, "offset", "got type"),
    "scale a string": (call(scale="auto"), TypeError, "scale", "number"),
    "scale an array": (call(scale=np.ones(2)), TypeError, "scale", r"shape \(2,\)"),
    "scale on a GPU": (call(scale=OnAGpu()), TypeError, "scale", "float"),
    "scale beyond float": (call(scale=10**400), ValueError, "scale", "int beyond.*finite"),
    "scale complex": (call(scale=np.complex64(1)), TypeError, "scale", "finite number"),
    "scale a bool": (call(scale=np.bool_(True)), TypeError, "scale", "finite number"),
    "softcap zero": (call(softcap=0.0), ValueError, "softcap", "positive"),
    "softcap negative": (call(softcap=-30), ValueError, "softcap", "positive"),
    "softcap infinite": (call(softcap=np.inf), ValueError, "softcap", "finite"),
    "mask of ints": (call(mask=np.ones((5, 7), int)), TypeError, "mask", "bool.*bias="),
    "mask a list": (call(mask=[[True]]), TypeError, "mask", "np.asarray"),
    "mask of a wrong shape": (
        call(mask=np.ones((7, 5), bool)), ValueError, "mask", r"\(7, 5\).*\(2, 4, 5, 7\)"),
    "mask of rank 1": (call(mask=np.ones(7, bool)), ValueError, "mask",
        r"for example \(2, 1, 5, 7\); write mask\[None, None, None, :\]"),
    "mask of (batch, keys)": (
        call(mask=np.ones((2, 7), bool)), ValueError, "mask", r"write mask\[:, None, None, :\]"),
    "mask of (batch, keys), as many as queries": (
        lambda a: cuflash.attention(a.q, a.q, a.q, mask=np.ones((2, 5), bool)),
        ValueError, "mask", r"write mask\[:, None, None, :\]"),
    "mask of (batch, queries, keys)": (
        call(mask=np.ones((2, 5, 7), bool)), ValueError, "mask", r"write mask\[:, None, :, :\]"),
    "mask of (batch, queries)": (
        call(mask=np.ones((2, 5), bool)), ValueError, "mask", r"write mask\[:, None, :, None\]"),
    "mask that no new axis mends": (
        call(mask=np.ones((3, 7), bool)), ValueError, "mask", r"for example \(2, 1, 5, 7\)$"),
    "segment_ids of (batch, keys)": (
        call(segment_ids=(np.ones((2, 1, 5), int), np.ones((2, 7), int))), ValueError,
        r"segment_ids\[1\]", r"write segment_ids\[1\]\[:, None, :\]"),
    "mask with more batch axes": (
        call(mask=np.ones((3, 2, 4, 5, 7), bool)), ValueError, "mask", "broadcasts to"),
    "bias of bools": (call(bias=np.ones((5, 7), bool)), TypeError, "bias", "mask="),
    "bias of ints": (call(bias=np.ones((5, 7), int)), TypeError, "bias", "floating"),
    "bias of a wrong shape": (
        call(bias=np.ones((2, 5, 7), np.float32)), ValueError, "bias", "broadcasts to"),
    "bias a number": (call(bias=1.0), TypeError, "bias", "np.asarray"),
    "kv_lengths too long": (call(kv_lengths=8), ValueError, "kv_lengths", "from 0 to 7"),
    "kv_lengths negative": (call(kv_lengths=-1), ValueError, "kv_lengths", "from 0 to 7"),
    "kv_lengths of shape (B,)": (
        call(kv_lengths=np.array([3, 4])), ValueError, "kv_lengths", r"\(2, 1\).*heads"),
    "kv_lengths with one too long": (
        call(kv_lengths=np.array([[3], [8]])), ValueError, "kv_lengths", "3 to 8.*0 to 7"),
    "q_lengths of floats": (
        call(q_lengths=np.array([[3.0], [4.0]])), TypeError, "q_lengths", "float64.*integer"),
    "q_lengths too long": (call(q_lengths=6), ValueError, "q_lengths", "from 0 to 5"),
    "q_lengths a tuple": (call(q_lengths=(3, 4)), ValueError, "q_lengths", r"np\.array\("),
    "slopes of a wrong shape": (
        call(alibi_slopes=np.ones(3)), ValueError, "alibi_slopes", r"\(2, 4\)"),
    "slopes of ints": (call(alibi_slopes=np.ones(4, int)), TypeError, "alibi_slopes", "floating"),
    "slopes a list of words": (
        call(alibi_slopes=["1.0"]), TypeError, "alibi_slopes", "floating dtype"),
    "sink of a wrong shape": (
        call(sink=np.ones((2, 4, 5))), ValueError, "sink", r"\(2, 4\), for example \(2, 1\)"),
    "sink of bools": (call(sink=np.ones(4, bool)), TypeError, "sink", "floating"),
    "segment_ids one array": (
        call(segment_ids=np.zeros(5, int)), TypeError, "segment_ids", r"\(ids, ids\)"),
    "segment_ids of floats": (
        call(segment_ids=(np.zeros(5), np.zeros(7))), TypeError, "segment_ids", "float64"),
    "segment_ids of bools": (
        call(segment_ids=(np.zeros(5, bool), np.zeros(7, int))), TypeError, "segment_ids", "bool"),
    "segment_ids of a wrong length": (
        call(segment_ids=(np.zeros(5, int), np.zeros(5, int))), ValueError,
        r"segment_ids\[1\]", r"\(2, 4, 7\)"),
    "dropout without seed": (call(dropout=0.1), ValueError, "seed", "2\\^64"),
    "dropout above 1": (call(dropout=1.1, seed=1), ValueError, "dropout", "from 0 to 1"),
    "dropout NaN": (call(dropout=np.nan, seed=1), ValueError, "dropout", "finite"),
    "dropout a bool": (
        call(dropout=True, seed=1), TypeError, "dropout", "expected a finite number from 0 to 1"),
    "dropout None": (call(dropout=None), ValueError, "dropout", "from 0 to 1"),
    "seed negative": (call(dropout=0.1, seed=-1), ValueError, "seed", "2\\^64"),
    "seed a float": (call(dropout=0.1, seed=1.0), TypeError, "seed", "int"),
    "dropout_mask of one axis": (
        lambda a: cuflash.dropout_mask((3,), 0.5, 1), ValueError, "shape", r"\(m, n\)"),
    "dropout_mask of a fraction": (
        lambda a: cuflash.dropout_mask((2.5, 4), 0.5, 1), TypeError, "shape", "extents"),
    "dropout_mask of a negative extent": (
        lambda a: cuflash.dropout_mask((-1, 4), 0.5, 1), ValueError, "shape", ">= 0"),
    "dropout_mask of a negative extent of keys": (
        lambda a: cuflash.dropout_mask((2, -2), 0.5, 1), ValueError, "shape", ">= 0"),
    "enable_gqa a string": (call(enable_gqa="yes"), TypeError, "enable_gqa", "True or False"),
    "a misspelt keyword": (call(casual=True), TypeError, "casual", "did you mean causal"),
    "Options misspelt": (lambda a: Options(casual=True), TypeError, "casual", "mean causal="),
    "beside options": (
        call(options=Options(), softmax_scale=1), TypeError, "softmax_scale", "mean scale="),
    "operands as keywords": (
        lambda a: cuflash.attention(q=a.q, k=a.k, v=a.v), TypeError, "q",
        r"positional argument; write attention\(q, k, v, \.\.\.\)"),
    "one operand as a keyword": (
        lambda a: cuflash.attention(a.q, a.k, v=a.v), TypeError, "v", "positional"),
    "no values": (lambda a: cuflash.attention(a.q, a.k), TypeError, "v", "NoneType"),
    "keywords of logsumexp": (
        lambda a: cuflash.logsumexp(q=a.q, k=a.k), TypeError, "q", r"logsumexp\(q, k, \.\.\.\)"),
    "keywords of the gradient": (
        lambda a: cuflash.attention_backward(a.dout, q=a.q, k=a.k, v=a.v, out=a.out, lse=a.lse),
        TypeError, "q", "positional"),
    "batch outside of heads": (
        lambda a: cuflash.attention(*(np.ones((2, n, 4, 8)) for n in (5, 7, 7))), ValueError,
        "q, k, v", r"\(batch, seqlen, heads, head_dim\) write axes=\[\(-3, -1\)\] \* 4"),
    "return_lse for logsumexp": (
        lambda a: cuflash.logsumexp(a.q, a.k, return_lse=True), TypeError, "return_lse",
        r"attention\(q, k, v, return_lse=...\)"),
    "out of another dtype for logsumexp": (
        lambda a: cuflash.logsumexp(a.q, a.k, out=a.lse.astype(np.float16)), TypeError, "out",
        "float32"),
    "options a dict": (call(options={"causal": True}), TypeError, "options", "cuflash.Options"),
    "options with keywords": (
        call(options=Options(causal=True), scale=0.5), TypeError, "options",
        "together with scale"),
    "score_mod a string": (call(score_mod="score"), TypeError, "score_mod", "cuflash.ScoreMod"),
    "mask_mod a callable": (call(mask_mod=min), TypeError, "mask_mod", "cuflash.MaskMod"),
    "formula no text": (
        lambda a: cuflash.MaskMod(None, host=min), TypeError, "expression", "expression"),
    "formula empty": (lambda a: cuflash.MaskMod(" ", host=min), ValueError, "expression", "' '"),
    "host no callable": (
        lambda a: cuflash.MaskMod("q < k", host="q < k"), TypeError, "host", "callable"),
    "formula's array named like an index": (
        lambda a: cuflash.MaskMod("q", host=min, arrays={"q": a.q}), ValueError, "arrays",
        "'q'.*identifier"),
    "formula's array with a bad name": (
        lambda a: cuflash.MaskMod("q", host=min, arrays={"a;b": a.q}), ValueError, "arrays",
        "identifier"),
    "a wrong slope": (
        lambda a: cuflash.ScoreMod(
            "score * score", grad="score", host=lambda s, *_: s * s, host_grad=lambda s, *_: s
        ).check(),
        ValueError, "host_grad", "the slope of host"),
    # how to compute
    "precision unknown": (call(precision="fast"), ValueError, "precision", "tf32"),
    "deterministic a string": (
        call(deterministic="yes"), TypeError, "deterministic", "True or False"),
    "workspace of floats": (call(workspace=np.zeros(4)), TypeError, "workspace", "uint8"),
    "workspace of bools": (call(workspace=np.zeros(4, bool)), TypeError, "workspace", "uint8"),
    "config for NumPy": (call(config=object()), TypeError, "config", "None for NumPy"),
    "config for logsumexp of NumPy": (
        lambda a: cuflash.logsumexp(a.q, a.k, config=object()), TypeError, "config", "None for"),
    "config for the gradient of logsumexp of NumPy": (
        lambda a: cuflash.logsumexp_backward(a.lse, a.q, a.k, a.lse, config=object()),
        TypeError, "config", "None for"),
    # where to write
    "out of a wrong shape": (
        lambda a: cuflash.attention(*a.qkv, out=a.q), ValueError, "out", r"\(2, 4, 5, 6\)"),
    "out of a wrong dtype": (
        lambda a: cuflash.attention(*a.qkv, out=a.out.astype(np.float64)), TypeError, "out",
        "float64.*float32"),
    "out of float32 for float64": (
        lambda a: cuflash.attention(a.q.astype(np.float64), a.k, a.v, out=a.out), TypeError, "out",
        "expected dtype float64"),
    "out read-only": (
        lambda a: cuflash.attention(*a.qkv, out=read_only(a.out)), ValueError, "out",
        "can be written"),
    "out overlapping itself": (
        lambda a: cuflash.attention(
            *a.qkv, out=np.lib.stride_tricks.as_strided(a.out, a.out.shape, (0, 120, 24, 4))),
        ValueError, "out", "overlap"),
    "out of rows that overlap in part": (
        lambda a: cuflash.attention(
            *a.qkv, out=np.lib.stride_tricks.as_strided(a.out, a.out.shape, (480, 120, 20, 4))),
        ValueError, "out", "overlap"),
    "out inside q": (
        lambda a: cuflash.attention(a.q, a.k, a.v, out=a.q[..., 1:7]), ValueError, "out",
        "shared with q"),
    "out a list": (call(out=[]), TypeError, "out", "list"),
    "out alone with return_lse": (
        lambda a: cuflash.attention(*a.qkv, return_lse=True, out=a.out), TypeError, "out",
        "pair"),
    "lse of a wrong shape": (
        lambda a: cuflash.attention(*a.qkv, return_lse=True, out=(a.out, a.lse[0])), ValueError,
        "lse", r"\(2, 4, 5\)"),
    "lse of integers": (
        lambda a: cuflash.attention(
            *a.qkv, return_lse=True, out=(a.out, a.lse.astype(np.int32))),
        TypeError, "out", "lse of dtype int32.*float32"),
    "lse of a wrong dtype": (
        lambda a: cuflash.attention(
            *a.qkv, return_lse=True, out=(a.out, a.lse.astype(np.float64))),
        TypeError, "out", "float64"),
    "scale beyond float32": (call(scale=1e39), ValueError, "scale", "float32.*float64"),
    "an array of far offsets": (
        call(offset=np.array(2**60)), ValueError, "offset", "2\\^59"),
    "a pair without return_lse": (
        lambda a: cuflash.attention(*a.qkv, out=(a.out, a.lse)), TypeError, "out", "return_lse"),
    "lse inside out": (
        lambda a: cuflash.attention(
            *a.qkv, return_lse=True, out=(a.out, a.out.reshape(-1)[:40].reshape(2, 4, 5))),
        ValueError, "lse", "shared with out"),
    "out on the memory of a promoted k": (
        lambda a: cuflash.attention(
            a.q.astype(np.float64), a.k, a.v[..., :3],
            out=a.k.reshape(-1)[:240].view(np.float64).reshape(2, 4, 5, 3)),
        ValueError, "out", "shared with k"),
    "precision a list": (call(precision=[]), TypeError, "precision", "tf32"),
    # backward
    "dout of a wrong shape": (
        lambda a: cuflash.attention_backward(a.q, *a.qkv, a.out, a.lse), ValueError, "dout",
        r"\(2, 4, 5, 6\)"),
    "dout a list": (
        lambda a: cuflash.attention_backward([1.0], *a.qkv, a.out, a.lse), TypeError, "dout",
        "list"),
    "out of ints in backward": (
        lambda a: cuflash.attention_backward(a.dout, *a.qkv, a.out.astype(int), a.lse), TypeError,
        "out", "int64"),
    "lse with a trailing axis": (
        lambda a: cuflash.attention_backward(a.dout, *a.qkv, a.out, a.lse[..., None]), ValueError,
        "lse", r"\(2, 4, 5\)"),
    "dlse of a wrong shape": (backward(dlse=np.zeros((2, 4))), ValueError, "dlse", "lse"),
    "wrt a string": (backward(wrt="q"), TypeError, "wrt", "tuple"),
    "wrt unknown": (backward(wrt=("dq",)), ValueError, "wrt", "'q'"),
    "wrt an option that is absent": (backward(wrt=("bias",)), ValueError, "wrt", "has no bias"),
    "grads_out of a wrong shape": (
        lambda a: backward(grads_out=cuflash.Gradients(dq=a.k.copy()))(a), ValueError,
        "grads_out.dq", r"\(2, 4, 5, 8\)"),
    "grads_out of a wrong dtype": (
        lambda a: backward(grads_out=cuflash.Gradients(dq=a.q.astype(np.float64)))(a), TypeError,
        "grads_out.dq", "float32"),
    "grads_out inside an input": (
        lambda a: backward(grads_out=cuflash.Gradients(dk=a.k))(a), ValueError, "grads_out.dk",
        "shared with k"),
    "the same grads_out twice": (
        lambda a: (lambda b: backward(grads_out=cuflash.Gradients(dk=b, dv=b[..., :6]))(a))(
            a.k.copy()),
        ValueError, "grads_out.dv", "shared with grads_out.dk"),
    "grads_out inside dlse": (
        lambda a: (lambda b: backward(
            dlse=b[..., 0], grads_out=cuflash.Gradients(dq=b))(a))(a.q.copy()),
        ValueError, "grads_out.dq", "shared with dlse"),
    "grads_out a tuple": (
        lambda a: backward(grads_out=(a.q, a.k, a.v))(a), TypeError, "grads_out", "Gradients"),
    "grads_out of a list": (
        backward(grads_out=cuflash.Gradients(dq=[1.0])), TypeError, "grads_out.dq", "list"),
    "wrt a list of lists": (backward(wrt=([],)), ValueError, "wrt", "'q'"),
    # merge and weights
    "merge of nothing": (lambda a: cuflash.merge([], []), ValueError, "outs", "no parts"),
    "merge of other shapes": (
        lambda a: cuflash.merge([a.out, a.out[:1]], [a.lse, a.lse]), ValueError, r"outs\[1\]",
        "shape"),
    "merge of other dtypes": (
        lambda a: cuflash.merge([a.out, a.out.astype(np.float64)], [a.lse, a.lse]), TypeError,
        r"outs\[1\]", "float64"),
    "merge with too few lses": (
        lambda a: cuflash.merge([a.out, a.out], [a.lse]), ValueError, "lses", "shape"),
    "merge along a feature": (
        lambda a: cuflash.merge(a.out[None], a.lse[None], axis=4), ValueError, "axis", "from 0"),
    "merge of a sequence along axis 1": (
        lambda a: cuflash.merge([a.out], [a.lse], axis=1), ValueError, "axis", "0 for a list"),
    "weights of everything": (
        lambda a: cuflash.weights(a.q, a.k, a.lse), ValueError, "rows", r"slice\(None\)"),
    "weights of a bool selection": (
        lambda a: cuflash.weights(a.q, a.k, a.lse, rows=np.ones(5, bool)), TypeError, "rows",
        "integers"),
    "weights of rows that are not there": (
        lambda a: cuflash.weights(a.q, a.k, a.lse, rows=[0, 5]), ValueError, "rows",
        "from 0 to 5.*from -5 to 4"),
    "weights of keys before the first": (
        lambda a: cuflash.weights(a.q, a.k, a.lse, cols=np.array([-8])), ValueError, "cols",
        "from -7 to 6"),
    "weights with a wrong lse": (
        lambda a: cuflash.weights(a.q, a.k, a.lse[0], cols=[0]), ValueError, "lse", "shape"),
}  # fmt: skip


def test_a_wrong_call_is_no_better_after_an_equal_one():
    """A wrong call is refused though an equal one (1 == True == 1.0) was right and is cached."""
    q, k, v = np.zeros((3, 4, 8), np.float32)
    cuflash.attention(q, k, v, window=(1, None), axes=[(0, 1)] * 4, kv_lengths=1)
    for wrong in ({"window": (True, None)}, {"window": (1.0, None)}, {"kv_lengths": True},
                  {"kv_lengths": 1.0}, {"axes": [(0.0, 1.0)] * 4},
                  {"axes": [(False, True)] * 4}):  # fmt: skip
        right = {"window": (1, None), "axes": [(0, 1)] * 4, "kv_lengths": 1}
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}: "):
            cuflash.attention(q, k, v, **{**right, **wrong})


@pytest.mark.parametrize("form", [int, np.array, lambda x: np.array([[x], [3]])])
@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [("q_lengths", 0, 5), ("kv_lengths", 0, 7), ("offset", -(2**59), 2**59)],
)
def test_integers_are_legal_up_to_their_bounds(name, lowest, highest, form):
    for legal in (lowest, highest):
        call(**{name: form(legal)})(arrays())
    for wrong in (lowest - 1, highest + 1):
        with pytest.raises(ValueError, match=f"{name}: "):
            call(**{name: form(wrong)})(arrays())


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "step"), [("seed", 0, 2**64 - 1, 1), ("dropout", 0.0, 1.0, 1e-9)]
)
def test_numbers_of_dropout_are_legal_up_to_their_bounds(name, lowest, highest, step):
    rest = {"dropout": 0.5, "seed": 1}
    for legal in (lowest, highest):
        call(**rest | {name: legal})(arrays())
    for wrong in (lowest - step, highest + step):
        with pytest.raises(ValueError, match=f"{name}: "):
            call(**rest | {name: wrong})(arrays())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_is_named(name):
    wrong, kind, argument, rest = WRONG[name]
    given = arrays()
    before = {key: value.copy() for key, value in vars(given).items() if key != "qkv"}
    with pytest.raises(kind) as caught:
        wrong(given)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert re.match(rf"(\w+\()?{argument}: ", message), message
    assert re.search(rest, message), message
    if kind is not NotImplementedError:
        assert "got " in message
        assert "expected " in message
    for key, value in before.items():
        np.testing.assert_array_equal(getattr(given, key), value)


def test_a_selection_may_be_empty_and_count_from_the_end():
    a = arrays()
    for nothing in ([], (), np.zeros(0), np.zeros(0, int)):
        assert cuflash.weights(a.q, a.k, a.lse, rows=nothing).shape == (2, 4, 0, 7)
    last = cuflash.weights(a.q, a.k, a.lse, rows=[-1, 4, -5])
    np.testing.assert_array_equal(last, cuflash.weights(a.q, a.k, a.lse, rows=[4, 4, 0]))


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_as_many_axes_as_are_served(enable_gqa):
    """Arrays with the most axes that are supported are right, with every option that broadcasts."""
    few = arrays()
    lead = (1,) * (27 if enable_gqa else 28)
    q, k, v = (a.reshape(*lead, *a.shape) for a in few.qkv)
    rng = np.random.default_rng(1)
    options = {
        "bias": rng.standard_normal((2, 4, 5, 7)), "sink": np.ones((2, 4)), "dropout": 0.5,
        "seed": 3, "alibi_slopes": np.ones(4), "kv_lengths": np.full((2, 1), 6), "causal": True,
        "mask": rng.random((2, 4, 5, 7)) < 0.9, "enable_gqa": enable_gqa,
    }  # fmt: skip
    mask = cuflash.MaskMod("q != k", host=lambda b, h, q, k: q != k)
    score = cuflash.ScoreMod(
        "score / 2", grad="0.5", host=lambda s, *_: s / 2, host_grad=lambda s, *_: 0.5
    )
    options |= {"mask_mod": mask, "score_mod": score}
    out, pullback = cuflash.attention_vjp(q, k, v, **options)
    expected, of_few = cuflash.attention_vjp(*few.qkv, **options)
    np.testing.assert_array_equal(out.reshape(expected.shape), expected)
    wrt = ("q", "k", "v", "bias", "alibi_slopes", "sink", "scale")
    found, expected = pullback(np.ones_like(out), wrt=wrt), of_few(np.ones_like(few.out), wrt=wrt)
    for name in found.order:
        own, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(own.reshape(other.shape), other, err_msg=name)


def test_the_table_is_long_enough():
    assert len(WRONG) >= 60


def test_the_legal_neighbour_of_every_wrong_call_passes():
    a = arrays()
    result = cuflash.attention(*a.qkv, return_lse=True, out=(a.out, a.lse))
    assert result.out is a.out
    assert result.lse is a.lse
    np.testing.assert_allclose(a.out, cuflash.reference.attention(*a.qkv), rtol=1e-5, atol=1e-6)
    cuflash.attention_backward(a.dout, *a.qkv, a.out, a.lse, dlse=np.ones((2, 4, 5)))
    cuflash.attention(a.q.astype(np.float64), a.k, a.v, scale=1e39)


ARRAY_OPTIONS = {
    "bias": lambda a: a[..., :1],
    "alibi_slopes": lambda a: a[..., 0, 0],
    "sink": lambda a: a[..., 0, 0],
    "mask": lambda a: a.view(bool)[..., :1],
    "offset": lambda a: a.view(np.int32)[..., 0, 0],
    "q_lengths": lambda a: a.view(np.int32)[..., 0, 0],
    "kv_lengths": lambda a: a.view(np.int32)[..., 0, 0],
    "segment_ids": lambda a: (a.view(np.int32)[..., 0], np.zeros(7, np.int32)),
    "score_mod": lambda a: cuflash.ScoreMod(
        "score", grad="1.0f", arrays={"a": a}, host=lambda score, *_, a: score,
        host_grad=lambda score, *_, a: 0 * score + 1,
    ),
    "mask_mod": lambda a: cuflash.MaskMod(
        "true", arrays={"a": a}, host=lambda *_, a: np.array(True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("result", ["out", "lse", "grads_out.dq"])
@pytest.mark.parametrize("name", ARRAY_OPTIONS)
def test_no_result_lies_on_the_memory_of_an_option(name, result):
    a = arrays()
    room = {"out": a.out, "lse": a.lse[..., None], "grads_out.dq": np.zeros_like(a.q)}[result]
    options = {name: ARRAY_OPTIONS[name](room)}
    wrong = {
        "out": call(out=a.out, **options),
        "lse": call(return_lse=True, out=(a.out, a.lse), **options),
        "grads_out.dq": backward(grads_out=cuflash.Gradients(dq=room), **options),
    }[result]
    with pytest.raises(ValueError, match=f"{result}: got memory shared with {name}"):
        wrong(a)
    assert not room.any()


def test_output_may_interleave_with_an_input():
    packed = np.zeros((2, 4, 5, 14), np.float32)
    packed[..., :8] = arrays().q
    q, out = packed[..., :8], packed[..., 8:]
    a = arrays()
    cuflash.attention(q, a.k, a.v, out=out)
    np.testing.assert_array_equal(out, cuflash.attention(a.q, a.k, a.v))
    np.testing.assert_array_equal(q, a.q)


@given(
    itemsize=st.sampled_from((1, 2, 4)),
    axes=st.lists(st.tuples(st.integers(0, 4), st.integers(-13, 13)), max_size=3),
)
def test_no_overlap_of_elements_is_overlooked(itemsize, axes):
    """Overlap is found where any bytes of elements coincide, at any strides in bytes."""
    shape, strides = zip(*axes, strict=True) if axes else ((), ())
    memory = np.zeros(512, np.uint8)[256:].view(f"u{itemsize}")
    array = np.lib.stride_tricks.as_strided(memory, shape, strides)
    elements = [sum(map(operator.mul, index, strides)) for index in np.ndindex(shape)]
    touched = [first + byte for first in elements for byte in range(itemsize)]
    if len(set(touched)) < len(touched):
        assert destinations._overlaps_itself(array)
    elif sum(n > 1 for n in shape) <= 1:
        assert not destinations._overlaps_itself(array)


def test_arrays_count_as_overlapping_where_it_takes_too_long_to_know():
    """What takes too long to know counts as overlap: an example of numpy.shares_memory's manual."""
    memory = np.zeros(192_163_377, np.int8)  # never touched
    as_strided = np.lib.stride_tricks.as_strided
    one = as_strided(memory, (1049, 1049, 1049), (36674, 61119, 85569))
    other = as_strided(memory[64_023_025:], (1049, 1049, 1), (12223, 12224, 1))
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(one, other, max_work=destinations._OVERLAP_WORK)
    assert destinations._share_memory(one, other)


def test_destinations_and_workspace_are_of_the_inputs_library():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def on_a_gpu(shape, dtype=np.float32, device=0):
        memory = cupy.cuda.UnownedMemory(4096, 1 << 20, None, device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    a = arrays()
    out, lse = on_a_gpu(a.out.shape), on_a_gpu(a.lse.shape)
    with pytest.raises(TypeError, match="out: got a cupy array"):
        cuflash.attention(*a.qkv, out=out)
    with pytest.raises(TypeError, match="lse: got a cupy array"):
        cuflash.attention(*a.qkv, return_lse=True, out=(a.out, lse))
    with pytest.raises(TypeError, match="workspace: got a cupy array"):
        cuflash.attention(*a.qkv, workspace=on_a_gpu((64,), np.uint8))
    with pytest.raises(ValueError, match=r"v: got .* on device 1, expected .* 0 like q"):
        cuflash.attention(on_a_gpu(a.q.shape), on_a_gpu(a.k.shape), on_a_gpu(a.v.shape, device=1))
    halves = [on_a_gpu(x.shape, np.float16) for x in a.qkv]
    with pytest.raises(TypeError, match="out: got a numpy array"):
        cuflash.attention(*halves, out=a.out.astype(np.float16))
