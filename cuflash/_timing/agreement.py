"""How far may two correct results of the same call be apart?"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash._arrays import array_module

#: Two correct results differ by a few roundings of the operands; a wrong mask by order 1.
AGREEMENT = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-10}


def difference(a: Any, b: Any) -> float:
    """Frobenius norm of a - b relative to that of b, NaN where either is not finite."""
    xp = array_module(a)
    a, b = a.astype(np.float32), b.astype(np.float32)
    return float(xp.sqrt(xp.square(a - b).sum() / xp.square(b).sum()))
