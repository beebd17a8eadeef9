"""What does cuflash compute? The definition: dense attention and its gradient in float64 NumPy.

Every function has the signature of its fast counterpart and the keyword ``dtype``, the dtype of the
arithmetic and of the results (float64; use ``np.longdouble`` as the truth for float64 inputs).
Memory is O(M N). If the fast functions and this package disagree, this package is right.

A score is computed in this order::

    scale * q.k  ->  softcap * tanh(score / softcap)  ->  + bias - slope * |m + offset - n|
                 ->  score_mod  ->  -inf where invisible

Then ``out = dropout(softmax(score)) v`` and ``lse = log(sum(exp(score)))``, over the visible keys
of a row and its sink, which is a score without a value. A row that sees no key has out = 0 and
lse = -inf, or the sink as its lse. Its only gradient is the gradient of lse with respect to the
sink. Rows beyond ``q_lengths`` are not queries and have no sink: out = 0, lse = -inf, no gradient.

A key or value that a row cannot see has no effect on that row, whatever it holds: the products
below read an operand only where it is seen, so that 0 * NaN does not occur.
"""

from cuflash.reference._dense import (
    attention,
    attention_backward,
    attention_vjp,
    logsumexp,
    logsumexp_backward,
    merge,
    merge_backward,
    scores,
    weights,
)  # fmt: skip
from cuflash.reference._packed import attention_varlen, attention_varlen_backward
from cuflash.reference._paged import attention_paged, rotary
from cuflash.reference._score import dropout_mask, visible

__all__ = [
    "attention", "attention_backward", "attention_paged", "attention_varlen",
    "attention_varlen_backward", "attention_vjp", "dropout_mask", "logsumexp", "logsumexp_backward",
    "merge", "merge_backward", "rotary", "scores", "visible", "weights",
]  # fmt: skip
