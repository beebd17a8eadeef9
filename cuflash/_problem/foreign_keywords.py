"""What is another library's keyword called here? The answer to a keyword that does not exist."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from cuflash._errors import wrong_type

P = ParamSpec("P")
R = TypeVar("R")

#: Similarity of misspelt names: "attn_mask" is like "mask" (0.615), "out" unlike "dropout" (0.6).
_NEAR = 0.61
_MASK = "did you mean mask= (bool, True where the query may attend) or bias= (added to the score)?"
_LENGTHS = "did you mean {}_lengths=? It is an int, or an integer array of shape (batch, 1)"
_POSITION = (
    "write attention(q, k, v, ...), attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, ...), "
    "attention_backward(dout, q, k, v, out, lse, ...), logsumexp(q, k, ...)"
)
_PACKED = "packed sequences are attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)"
_PAGES = (
    "pages are attention_paged(q, k_pages, v_pages, page_table, kv_lengths), and have no gradient"
)
_CALL = "it is a parameter of the call and no score option: attention(q, k, v, {}=...)"
#: Keywords of flash-attn, PyTorch, JAX, xformers, flashinfer and ONNX, and what to write here.
ADVICE = {
    **dict.fromkeys(("q", "k", "v", "query", "key", "value", "dout", "lse"), _POSITION),
    **dict.fromkeys(
        ("softmax_scale", "sm_scale", "qk_scale", "scaling"),
        "did you mean scale=? The default is 1 / sqrt(head_dim)",
    ),
    **dict.fromkeys(
        ("return_softmax_lse", "return_residual", "return_aux"),
        "did you mean return_lse=True? The result is then (out, lse)",
    ),
    **dict.fromkeys(
        ("return_attn_probs", "need_weights", "return_weights"),
        "did you mean cuflash.weights(q, k, lse, rows=...)? It computes the rows that you name",
    ),
    **dict.fromkeys(
        ("window_size", "local_window_size", "sliding_window", "local_window"),
        "did you mean window=(left, right)? None means no bound, which is -1 in flash-attn",
    ),
    "is_causal": 'did you mean causal=? PyTorch and JAX align at the first key: causal="top_left"',
    **dict.fromkeys(("attn_mask", "attention_mask"), _MASK),
    "key_padding_mask": "did you mean kv_lengths=, or mask=~padding[:, None, None, :]?",
    "block_mask": "did you mean mask_mod=cuflash.MaskMod(...), or segment_ids=?",
    "attn_bias": "did you mean bias=? It is added to the score",
    **dict.fromkeys(
        ("dropout_p", "dropout_rate", "attn_dropout"),
        "did you mean dropout=? It needs seed= as well",
    ),
    **dict.fromkeys(("dropout_rng", "rng", "dropout_seed"), "did you mean seed=, an int?"),
    **dict.fromkeys(
        ("soft_cap", "logits_soft_cap", "logit_softcap", "softcap_value"),
        "did you mean softcap=?",
    ),
    **dict.fromkeys(("query_seq_lengths", "seqused_q"), _LENGTHS.format("q")),
    **dict.fromkeys(
        ("key_value_seq_lengths", "seqused_k", "cache_seqlens", "kv_seq_lengths"),
        _LENGTHS.format("kv"),
    ),
    **dict.fromkeys(("q_segment_ids", "kv_segment_ids"), "did you mean segment_ids=(ids, ids)?"),
    **dict.fromkeys(("s_aux", "sinks", "learnable_sink", "attention_sink"), "did you mean sink=?"),
    **dict.fromkeys(("slopes", "alibi"), "did you mean alibi_slopes=?"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), _PACKED),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), f"leave it out: {_PACKED}"),
    **dict.fromkeys(
        ("block_table", "block_tables", "k_cache", "v_cache", "page_table", "k_pages", "v_pages"),
        _PAGES,
    ),
    **dict.fromkeys(
        ("rotary_cos", "rotary_sin", "rotary_interleaved"),
        "rotate q and k before the call: cuflash.rotary(x, positions)",
    ),
    "layout": "did you mean axes=? (batch, seqlen, heads, head_dim) is axes=[(-3, -1)] * 4",
    "num_splits": "leave it out: the number of splits follows from the shapes",
    **dict.fromkeys(("implementation", "backend"), "leave it out: array and device decide"),
    "dtype": "leave it out: the result has the dtype of q, k and v",
    **{
        name: _CALL.format(name)
        for name in ("axes", "config", "deterministic", "precision", "return_lse", "workspace")
    },
    "out": _CALL.format("out"),
}


#: What to write in functions without score options or with other arguments than attention.
_SIZES = (
    "did you mean {}=? Sizes of a cache are KVCache(sequences, heads, head_dim, max_length=...)"
)
ADVICE_FOR_OTHERS = {
    **dict.fromkeys(
        ("cos", "sin", "cos_sin_cache", "rotary_cos", "rotary_sin"),
        "angles are positions times frequencies=: rotary(x, positions, frequencies=...)",
    ),
    **dict.fromkeys(
        ("theta", "base", "rope_theta"), "write frequencies=theta ** (-np.arange(0, d, 2) / d)"
    ),
    **dict.fromkeys(
        ("seqlen_offsets", "offsets", "position_ids"),
        "did you mean positions? rotary(x, positions)",
    ),
    **dict.fromkeys(("num_blocks", "num_pages"), _SIZES.format("pages")),
    **dict.fromkeys(("block_size", "page_block_size"), _SIZES.format("page_size")),
    **dict.fromkeys(("max_seqlen", "max_seq_len", "capacity"), _SIZES.format("max_length")),
    "device": "did you mean like=? The cache is allocated on the device of this array",
    "dim": "did you mean axis=?",
}
_LENGTHS_FOR_PAGES = (
    "lengths are positional: attention_paged(q, k_pages, v_pages, page_table, kv_lengths), "
    "kv_lengths of shape (sequences,)"
)
ADVICE_FOR_PAGES = dict.fromkeys(
    (
        "cache_seqlens", "seqused_k", "kv_seq_lengths", "key_value_seq_lengths", "seq_lens",
        "context_lens", "block_table", "block_tables", "k_cache", "v_cache",
    ),
    _LENGTHS_FOR_PAGES,
)  # fmt: skip
ADVICE_FOR_RANKS = {
    **dict.fromkeys(("out", "grads_out"), "leave it out: ranks allocate their results"),
    "workspace": "leave it out: ranks allocate their workspace",
    "config": "leave it out: ranks choose a configuration for each part of a call",
}


def unknown_keyword(
    name: str,
    known: Collection[str],
    advice: Mapping[str, str] = ADVICE,
    kind: str = "score option",
) -> Exception:
    """Build the TypeError for a keyword that is none of the ``known`` ones."""
    from difflib import get_close_matches  # correct calls do not need it

    if advice.get(name) is _POSITION:
        return wrong_type(name, "a keyword", "a positional argument", _POSITION)
    near = get_close_matches(name, known, n=1, cutoff=_NEAR)
    kinds = kind.replace(" ", "s ", 1) if kind.startswith("keyword") else f"{kind}s"
    spelt = f"did you mean {near[0]}=?" if near else f"{kinds} are {', '.join(known)}"
    expected = f"a parameter of this function or a {kind}" if advice is ADVICE else f"a {kind}"
    return wrong_type(name, "an unknown keyword", expected, advice.get(name, spelt))


def explain_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function without score options say what to write instead of an unknown keyword."""
    code = inspect.unwrap(function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[: code.co_posonlyargcount]
    known = tuple(n for n in names[code.co_posonlyargcount :] if n != "self")

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name in positional:
                order = ", ".join(n for n in positional if n != "self")
                raise wrong_type(name, "a keyword", f"a positional argument: ({order}, ...)")
            if name not in known:
                answer = ADVICE_FOR_OTHERS.get(name, "")
                is_of_this = not set(re.findall(r"\w+", answer)).isdisjoint(names)
                advice = {name: answer} if is_of_this else {}
                raise unknown_keyword(name, known, advice, "keyword of this function")
        return function(*args, **keywords)

    return call


def refuse_keywords(keywords: Collection[str], advice: Mapping[str, str]) -> None:
    """Raise for a keyword in ``advice``, with the answer from there instead of attention's."""
    for name in keywords:
        if name in advice:
            raise wrong_type(name, "an unknown keyword", "a score option", advice[name])
