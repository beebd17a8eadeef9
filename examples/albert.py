"""How does a trained transformer run on plain arrays, with cuflash for attention?

ALBERT (Lan et al. 2019, https://arxiv.org/abs/1909.11942) is BERT with one set of weights that all
layers share, and a narrow embedding that is widened once. Everything except attention is plain
array code for an array module ``xp``, which is NumPy or CuPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

Array = Any

LAYER = "encoder.albert_layer_groups.0.albert_layers.0."

# The projections return q, k and v as (batch, seqlen, heads, head_dim). With these axes cuflash
# reads and writes this layout without a copy.
SEQUENCE_BEFORE_HEADS = [(-3, -1)] * 4

_COLUMNS_OF_ONES = 8  # one is enough; with eight, 16-bit rows stay multiples of 16 bytes


@dataclass(frozen=True)
class LayerAttention:
    """The operands of one layer's attention: enough to compute any probability afterwards.

    ``q`` and ``k`` are (batch, seqlen, heads, head_dim or 3 head_dim), as attention received them;
    ``lse`` is (batch, heads, seqlen).
    """

    q: Array
    k: Array
    lse: Array
    options: cuflash.Options


class Albert:
    """The encoder of a checkpoint, with arithmetic in ``dtype`` and arrays of the module ``xp``.

    Parameters
    ----------
    config, tensors
        Configuration and weights from the checkpoint.
    xp
        ``numpy`` or ``cupy``.
    dtype
        Dtype of everything except attention.
    attention_dtype
        Dtype of the q, k and v that attention receives; its result is converted to ``dtype``.
    rounded_to
        Dtype to which q, k and v are rounded first; the default is ``attention_dtype``.
    operand_parts
        With 1, attention receives the rounded operands. With 2, each operand is a sum of two
        numbers of ``attention_dtype``, which gives 22 bits with float16: q.k = q1.k1 + q2.k1 +
        q1.k2 is one product over 3 head_dim, and v has the columns of its two parts side by side.
        Further columns of ones sum the weights as attention rounded them, and the result is divided
        by that sum. (D121)
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, np.ndarray],
        *,
        xp: Any = np,
        dtype: Any = np.float32,
        attention_dtype: Any = np.float32,
        rounded_to: Any = None,
        operand_parts: int = 1,
    ) -> None:
        if config["hidden_act"] != "gelu" or config["num_hidden_groups"] != 1:
            raise NotImplementedError("only ALBERT with exact gelu and one layer group")
        self.config = config
        self.xp = xp
        self.dtype = dtype
        self.attention_dtype = attention_dtype
        self.rounded_to = attention_dtype if rounded_to is None else rounded_to
        self.operand_parts = operand_parts
        self.weights = {
            name.removeprefix("albert."): xp.asarray(tensor, dtype=dtype)
            for name, tensor in tensors.items()
            if name.startswith("albert.")
        }

    def encode(
        self, token_ids: np.ndarray, lengths: np.ndarray, keep: int
    ) -> tuple[Array, LayerAttention]:
        """Run all layers on a padded batch.

        Parameters
        ----------
        token_ids
            (batch, seqlen) int, padded on the right.
        lengths
            (batch,) int, number of tokens in each row, without padding.
        keep
            Index of the layer whose attention is returned.

        Returns
        -------
        hidden
            (batch, seqlen, hidden_size); rows of padding have no meaning.
        attention
            The :class:`LayerAttention` of that layer.
        """
        positions = np.arange(token_ids.shape[1])
        x = (
            self.weights["embeddings.word_embeddings.weight"][self.xp.asarray(token_ids)]
            + self.weights["embeddings.position_embeddings.weight"][self.xp.asarray(positions)]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self.layer_norm(x, "embeddings.LayerNorm")
        x = self.linear(x, "encoder.embedding_hidden_mapping_in")
        # Lengths broadcast against (batch, heads): one per batch entry needs a trailing axis of 1.
        options = cuflash.Options(
            kv_lengths=self.xp.asarray(lengths)[:, None],
            scale=(self.config["hidden_size"] // self.config["num_attention_heads"]) ** -0.5,
        )
        kept = None
        for index in range(self.config["num_hidden_layers"]):
            x, attention = self.layer(x, options)
            if index == keep:
                kept = attention
        if kept is None:
            raise ValueError(f"the model has no layer {keep}")
        return x, kept

    def layer(self, x: Array, options: cuflash.Options) -> tuple[Array, LayerAttention]:
        """Attention, then a feed-forward network; each is added to its input and normalised."""
        q, k, v = (
            self.heads(self.linear(x, f"{LAYER}attention.{operand}"))
            for operand in ("query", "key", "value")
        )
        context, attention = self.attend(q, k, v, options)
        projected = self.linear(context.reshape(x.shape), f"{LAYER}attention.dense")
        x = self.layer_norm(x + projected, f"{LAYER}attention.LayerNorm")
        inner = self.gelu(self.linear(x, f"{LAYER}ffn"))
        outer = self.linear(inner, f"{LAYER}ffn_output")
        return self.layer_norm(x + outer, f"{LAYER}full_layer_layer_norm"), attention

    def attend(
        self, q: Array, k: Array, v: Array, options: cuflash.Options
    ) -> tuple[Array, LayerAttention]:
        """Attention of one layer; operands and result are (batch, seqlen, heads, head_dim)."""
        xp = self.xp
        head_dim = v.shape[-1]
        if self.operand_parts == 2:
            (q, q_rest), (k, k_rest), (v, v_rest) = map(self.two_parts, (q, k, v))
            q = xp.concatenate([q, q_rest, q], axis=-1)
            k = xp.concatenate([k, k, k_rest], axis=-1)
            ones = xp.ones((*v.shape[:-1], _COLUMNS_OF_ONES), v.dtype)
            v = xp.concatenate([v, v_rest, ones], axis=-1)
        else:
            q, k, v = (x.astype(self.rounded_to, copy=False) for x in (q, k, v))
            q, k, v = (x.astype(self.attention_dtype, copy=False) for x in (q, k, v))
        batch, seqlen, num_heads, _ = q.shape
        wide = np.result_type(self.dtype, self.attention_dtype)
        out, lse = xp.empty(v.shape, wide), xp.empty((batch, num_heads, seqlen), wide)
        cuflash.attention(
            q, k, v, options=options, axes=SEQUENCE_BEFORE_HEADS, return_lse=True, out=(out, lse)
        )
        if self.operand_parts == 2:
            leading, rest, sums = xp.split(out, [head_dim, 2 * head_dim], axis=-1)
            out = (leading + rest) / sums[..., :1]
        return out.astype(self.dtype, copy=False), LayerAttention(q, k, lse, options)

    def two_parts(self, x: Array) -> tuple[Array, Array]:
        """Split an array into two of ``attention_dtype`` whose sum is almost exactly the array."""
        leading = x.astype(self.attention_dtype)
        return leading, (x - leading.astype(x.dtype)).astype(self.attention_dtype)

    def heads(self, x: Array) -> Array:
        """(batch, seqlen, hidden_size) -> (batch, seqlen, heads, head_dim)"""
        return x.reshape(*x.shape[:-1], self.config["num_attention_heads"], -1)

    def linear(self, x: Array, name: str) -> Array:
        """(..., features in) -> (..., features out)"""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, x: Array, name: str) -> Array:
        """Normalise the features of each token to mean 0 and variance 1, then scale and shift."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        x = centred / self.xp.sqrt(variance + self.config["layer_norm_eps"])
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def gelu(self, x: Array) -> Array:
        """The exact Gaussian error linear unit, x * Phi(x), not its tanh approximation."""
        return x * (1 + self.erf(x * math.sqrt(0.5))) * 0.5

    def erf(self, x: Array) -> Array:
        """The error function, which NumPy does not have."""
        if self.xp is np:
            return np.vectorize(math.erf, otypes=[x.dtype])(x)
        from cupyx.scipy.special import erf

        return erf(x)
