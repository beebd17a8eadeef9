"""What is the slope of a function along a direction? Finite differences for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def along(
    f: Callable[[np.ndarray], float], x: np.ndarray, direction: np.ndarray, step: float = 1e-3
) -> float:
    """Derivative of ``f`` at ``x`` along ``direction`` by central differences of order four."""
    near = f(x + step * direction) - f(x - step * direction)
    far = f(x + 2 * step * direction) - f(x - 2 * step * direction)
    return (8 * near - far) / (12 * step)
