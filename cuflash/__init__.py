"""Exact, IO-aware attention on CuPy and NumPy arrays.

``attention(q, k, v)`` computes ``softmax(q k^T / sqrt(head_dim)) v`` without storing the matrix of
scores, and ``attention_vjp`` computes the gradient too. ``Options`` holds masks, windows, biases
and every other option that changes a score. ``reference`` defines each function in dense float64
NumPy. ``show_config()`` prints versions and folders for a bug report.
"""

from cuflash import reference
from cuflash._ahead import compile  # noqa: A004
from cuflash._api.attention import attention, attention_backward, attention_vjp
from cuflash._api.kv_cache import KVCache
from cuflash._api.merge import merge, merge_backward
from cuflash._api.paged import attention_paged
from cuflash._api.probabilities import dropout_mask, logsumexp, logsumexp_backward, weights
from cuflash._api.quantize import Quantized, quantize
from cuflash._api.rotary import rotary
from cuflash._api.show_config import show_config
from cuflash._api.varlen import attention_varlen, attention_varlen_backward
from cuflash._api.workspace_size import workspace_size
from cuflash._errors import CompileError
from cuflash._problem.options import Options
from cuflash._problem.score_mod import MaskMod, ScoreMod
from cuflash._results import AttentionResult, Gradients

for _public in (
    AttentionResult, CompileError, Gradients, KVCache, MaskMod, Options, Quantized, ScoreMod
):  # fmt: skip
    _public.__module__ = __name__  # pickles and errors name cuflash: private modules can move

__version__ = "0.2.0"

__all__ = [
    "AttentionResult", "CompileError", "Gradients", "KVCache", "MaskMod", "Options", "Quantized",
    "ScoreMod",
    "attention", "attention_backward", "attention_paged", "attention_varlen",
    "attention_varlen_backward", "attention_vjp", "compile", "distributed", "dropout_mask",
    "logsumexp", "logsumexp_backward", "merge", "merge_backward", "quantize", "reference", "rotary",
    "show_config", "testing", "tuning", "weights", "workspace_size",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import tuning, distributed or testing on first use: attention needs none of them."""
    if name == "tuning":
        import cuflash.tuning as tuning

        return tuning
    if name == "distributed":
        import cuflash.distributed as distributed

        return distributed
    if name == "testing":
        import cuflash.testing as testing

        return testing
    raise AttributeError(f"module 'cuflash' has no attribute {name!r}")
