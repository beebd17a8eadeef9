"""
A curve through noisy points
============================

Kernel regression (Nadaraya and Watson) is a form of attention. A prediction is the mean of the
observed values, weighted by a Gaussian of the distance. This example finds the width of the
Gaussian by gradient descent. The loss is the error of each point when the other points predict it,
and cuflash returns its gradient with respect to ``scale``.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

rng = np.random.default_rng(0)
x = np.sort(rng.random(400)) * 10
y = np.sin(x) + 0.3 * np.sin(5 * x) + 0.3 * rng.standard_normal(x.size)

# %%
# The exponent of the Gaussian is ``-(a - b)**2 / 2 = a b - b**2 / 2 - a**2 / 2``, divided by the
# width squared. Its last term is the same for all keys of a query, so softmax cancels it. The other
# two terms are a dot product: a query is ``(a, 1)``, a key is ``(b, -b**2 / 2)``, and ``scale`` is
# one over the width squared.


def queries(a):
    return np.stack([a, np.ones_like(a)], axis=-1)


keys = np.stack([x, -(x**2) / 2], axis=-1)
others = ~np.eye(x.size, dtype=bool)  # hide each point from its own prediction

log_width, errors = np.log(2.0), []
for _ in range(60):
    scale = np.exp(-2 * log_width)
    predicted, pullback = cuflash.attention_vjp(
        queries(x), keys, y[:, None], scale=scale, mask=others
    )
    residual = predicted[:, 0] - y
    errors.append((residual**2).mean())
    dscale = pullback(2 * residual[:, None] / x.size, wrt=("scale",)).dscale
    slope = dscale * scale * -2  # chain rule: scale = exp(-2 * log_width)
    log_width -= 0.1 * np.sign(slope) * min(1.0, abs(10 * slope))

# %%
# With the width found, one call predicts the curve at any places:

places = np.linspace(0, 10, 500)
figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 1)
)
left.plot(x, y, ".", color="0.75", label="observed")
for width, colour in ((2.0, "tab:orange"), (float(np.exp(log_width)), "tab:blue")):
    curve = cuflash.attention(queries(places), keys, y[:, None], scale=width**-2)
    left.plot(places, curve[:, 0], color=colour, label=f"width {width:.2f}")
left.plot(places, np.sin(places) + 0.3 * np.sin(5 * places), "k:", label="without noise")
left.legend(ncols=2, fontsize=9)
right.plot(errors)
right.set_xlabel("step")
right.set_title("error of left-out points", fontsize=10)
print(f"width {np.exp(log_width):.3f}, error {errors[0]:.3f} before and {errors[-1]:.3f} after")
assert errors[-1] < 0.5 * errors[0]
