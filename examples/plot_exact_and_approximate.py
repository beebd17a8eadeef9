"""
Exact attention and its approximations
======================================

Attention over n positions takes n x n products. Can they be avoided? This page compares exact
attention with four well-known approximations of it. Each takes a few lines of array code in
``examples/approximate.py``:

- **Linear attention** replaces exp(q.k) by a product of features, (elu(q) + 1).(elu(k) + 1).
- **Performer** (FAVOR+) estimates exp(q.k) by random features.
- **Linformer** replaces the n keys by a few mixtures of keys, with a learned matrix.
- **Longformer** computes exact attention, but only to neighbours and to a few global positions.
  This takes two calls of ``cuflash`` and a merge.

The task is to remove noise from a photograph of scikit-learn. Each position is a pixel. Its query
and its key are the 5 x 5 patch around it, minus the mean patch, scaled to length 1. Its value is
its noisy colour. Attention then replaces each pixel by a mean over pixels with similar patches,
which removes noise (non-local means, Buades et al. 2005).
"""

import timeit
import tracemalloc

import approximate
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image

import cuflash

photograph = load_sample_image("china.jpg").astype(np.float32) / 255
rng = np.random.default_rng(0)
NOISE, PATCH, SHARPNESS = 0.1, 5, 16.0


def inputs(side, sharpness=SHARPNESS):
    """Return q, k (n, 75) and v (n, 3) of a square with n = side**2, and its clean colours.

    Logits are ``sharpness`` times the cosine between two patches.
    """
    edge, top, left = PATCH // 2, 180, 250
    square = photograph[top - edge : top + side + edge, left - edge : left + side + edge]
    noisy = square + NOISE * rng.standard_normal(square.shape, dtype=np.float32)
    patches = np.lib.stride_tricks.sliding_window_view(noisy, (PATCH, PATCH), axis=(0, 1))
    patches = patches.reshape(side * side, -1)
    patches = patches - patches.mean(axis=0)
    patches /= np.linalg.norm(patches, axis=-1, keepdims=True)
    q = patches * np.float32(np.sqrt(sharpness * np.sqrt(patches.shape[-1])))
    inner = slice(edge, -edge)
    return q, q, noisy[inner, inner].reshape(-1, 3), square[inner, inner].reshape(-1, 3)


# %%
# Methods
# -------
# The sizes of the methods do not grow with n: 256 random features (Performer), 64 keys (Linformer),
# and 128 neighbours on both sides with 32 global positions, spread over the square (Longformer).
# Linformer's matrices are fitted to each input. This is its best case, since a model learns one
# pair of matrices for all inputs. Fitting does not count as part of its time.

directions = approximate.orthogonal_directions(rng, 256, 3 * PATCH**2).astype(np.float32)


def dense(q, k, v):
    scores = q @ k.T
    scores *= np.float32(q.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores @ v / scores.sum(axis=-1, keepdims=True)


def spread_first(n, few=32):
    """Return an order of n positions: first a few, spread over all, then the rest in order."""
    is_global = np.zeros(n, bool)
    is_global[np.arange(few) * n // few] = True
    return np.argsort(~is_global, kind="stable")


def longformer(q, k, v):
    order = spread_first(len(q))
    out = np.empty_like(v)
    out[order] = approximate.longformer(q[order], k[order], v[order], reach=128, num_global=32)
    return out


def methods_for(q, k, v):
    e, f = approximate.fit_linformer(q, k, v, 64)
    return {
        "exact (cuflash)": cuflash.attention,
        "exact, with its n x n matrix": dense,
        "Longformer's pattern": longformer,
        "Linformer": lambda q, k, v: approximate.linformer(q, k, v, e, f),
        "Performer": lambda q, k, v: approximate.performer(q, k, v, directions),
        "linear attention": approximate.linear_attention,
    }


# %%
# Results
# -------
# The square has 4,096 pixels. The dB are the peak signal-to-noise ratio against the photograph
# without noise: more is better.


def measured(method, q, k, v):
    """Return the result, its peak memory, and the least seconds of three more calls."""
    tracemalloc.start()
    out = method(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    seconds = min(timeit.repeat(lambda: method(q, k, v), number=1, repeat=3))
    return out, seconds, peak


def decibels(image, clean):
    return -10 * np.log10(((image - clean) ** 2).mean())


SIDES = (16, 32, 64, 90)
results = {}
for side in SIDES:
    q, k, v, clean = inputs(side)
    for name, method in methods_for(q, k, v).items():
        results[name, side] = *measured(method, q, k, v), v, clean
names = list(dict.fromkeys(name for name, _ in results))
colours = dict(
    zip(names, ("#0072B2", "#999999", "#009E73", "#E69F00", "#CC79A7", "#D55E00"), strict=True)
)

*_, noisy, clean = results["exact (cuflash)", 64]
shown = {"with noise": noisy, "without": clean}
shown |= {name: results[name, 64][0] for name in names if name != "exact, with its n x n matrix"}
q, k, v, _ = inputs(64)
more = approximate.orthogonal_directions(rng, 4096, 3 * PATCH**2).astype(np.float32)
shown["Performer, 4,096 features"] = approximate.performer(q, k, v, more)
figure, panels = plt.subplots(2, 4, figsize=(11, 6), layout="constrained")
for axes, (name, image) in zip(panels.flat, shown.items(), strict=True):
    axes.set_axis_off()
    axes.imshow(np.clip(image, 0, 1).reshape(64, 64, 3))
    decibel = "" if image is clean else f"\n{decibels(image, clean):.1f} dB"
    axes.set_title(f"{name}{decibel}", fontsize=12)
plt.show()

# %%
# Error, time and memory
# ----------------------
# The error is relative to exact attention. An error of 1 is as bad as giving every pixel the mean
# of all pixels.


def error(out, exact):
    return np.linalg.norm(out - exact) / np.linalg.norm(exact - exact.mean(axis=0))


figure, panels = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
for name in names:
    exact = {side: results["exact (cuflash)", side][0] for side in SIDES}
    lines = (
        [error(results[name, side][0], exact[side]) for side in SIDES],
        [results[name, side][1] for side in SIDES],
        [results[name, side][2] / 1e6 for side in SIDES],
    )
    for axes, line in zip(panels, lines, strict=True):
        if axes is not panels[0] or not name.startswith("exact"):
            axes.loglog([side**2 for side in SIDES], line, "o-", color=colours[name], label=name)
for axes, title in zip(
    panels, ("error", "seconds, on one CPU", "memory beside inputs, MB"), strict=True
):
    axes.set_title(title)
    axes.set_xlabel("n, positions")
    axes.set_xticks([side**2 for side in SIDES], [f"{side**2:,}" for side in SIDES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %%
# Exact attention by tiles takes less memory than every approximation except Linformer. Only its
# time grows with the square of n.
#
# What the error depends on
# -------------------------
# The larger the logits, the fewer keys matter. Longformer's error falls, because the neighbours of
# a pixel are similar to it. Performer's error grows: the variance of its estimate grows
# exponentially with the logits, and only a model that was trained with Performer has suitable
# logits. The error of linear attention is near 1 everywhere. It does not estimate attention: it is
# a different function, and a model has to be trained for it.

sharpness = (1, 2, 4, 8, 16, 32)
errors = {}
for value in sharpness:
    q, k, v, _ = inputs(32, value)
    exact = cuflash.attention(q, k, v)
    for name, method in methods_for(q, k, v).items():
        errors.setdefault(name, []).append(error(method(q, k, v), exact))

figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
for name in names[2:]:
    axes.loglog(sharpness, errors[name], "o-", color=colours[name], label=name)
axes.set_xticks(sharpness, sharpness)
axes.minorticks_off()
axes.set_xlabel("largest logit")
axes.set_ylabel("error")
axes.set_title("n = 1024")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
