"""What is the slope of a function along a direction? Finite differences for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from support.problems import Call


def along(
    f: Callable[[np.ndarray], float], x: np.ndarray, direction: np.ndarray, step: float = 1e-3
) -> float:
    """Return the derivative of ``f`` along ``direction``, by central differences of order four."""
    near = f(x + step * direction) - f(x - step * direction)
    far = f(x + 2 * step * direction) - f(x - 2 * step * direction)
    return (8 * near - far) / (12 * step)


def check_gradients(
    call: Call,
    attend: Callable[[Call], tuple[np.ndarray, np.ndarray]],
    gradients: Mapping[str, np.ndarray],
) -> None:
    """Check float64 ``gradients`` against differences of the call's own out and lse, to 1e-7."""
    rng = np.random.default_rng(1)
    scale = np.asarray(call.options.get("scale", call.q.shape[-1] ** -0.5))

    def along_with(name: str, x: np.ndarray) -> float:
        if name in ("q", "k", "v"):
            moved = call.but(**{name: x})
        else:
            moved = call.with_options(**{name: float(x) if name == "scale" else x})
        out, lse = attend(moved)
        total = float((call.dout * out).sum())
        if call.dlse is not None:
            total += float((call.dlse * np.where(np.isneginf(lse), 0, lse)).sum())
        return total

    for name in sorted(call.wrt):
        # Slopes are multiplied by distances of up to a hundred keys: a step of 1e-3 is too large.
        step = 1e-4 if name == "alibi_slopes" else 1e-3
        x = scale if name == "scale" else call.array(name)
        assert x.dtype == gradients[name].dtype == np.float64, name
        direction = np.asarray(rng.standard_normal(x.shape))
        direction /= max(float(np.linalg.norm(direction)), 1.0)
        expected = along(lambda moved, name=name: along_with(name, moved), x, direction, step)
        got = float((gradients[name] * direction).sum())
        size = max(1.0, float(np.linalg.norm(gradients[name])))
        assert abs(got - expected) <= 1e-7 * size, f"d{name}: {got} against {expected}"
