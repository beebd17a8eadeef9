"""
Clusters by mean shift
======================

Mean shift moves every point to the weighted mean of the data around it, and repeats this until the
points of each cluster meet. One step for 3,000 points is one call of :func:`cuflash.attention`. It
does not store the matrix of their 9 million distances.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

rng = np.random.default_rng(1)
centres = rng.uniform(-4, 4, (6, 2))
data = (centres[rng.integers(0, 6, 3000)] + 0.6 * rng.standard_normal((3000, 2))).astype(np.float32)
width = 0.6

# %%
# The weight of a data point y for a point x is ``exp(-|x - y|**2 / (2 width**2))``. A part of the
# exponent depends on x alone. It does not change the mean and can be left out. The rest is the dot
# product of ``(x, 1)`` and ``(y, -|y|**2 / 2)``, divided by the width squared.

keys = np.concatenate([data, -(data**2).sum(-1, keepdims=True) / 2], axis=-1)
one = np.ones((len(data), 1), np.float32)
path = [data]
while len(path) < 60 and (len(path) < 2 or np.abs(path[-1] - path[-2]).max() > 1e-3):
    queries = np.concatenate([path[-1], one], axis=-1)
    path.append(cuflash.attention(queries, keys, data, scale=width**-2))

# %%
# Points that end at the same place form one cluster.

ends = path[-1]
found = [ends[0]]
for end in ends:
    if min(np.linalg.norm(end - place) for place in found) > 0.5 * width:
        found.append(end)
found = np.array(found)
labels = np.linalg.norm(ends[:, None] - found, axis=-1).argmin(axis=1)
print(f"{len(path) - 1} steps, {len(found)} clusters")

figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), layout="constrained", sharex=True, sharey=True)
for axis, step in zip(axes, (0, 3, len(path) - 1), strict=True):
    axis.scatter(*path[step].T, c=labels, s=5, cmap="tab10")
    axis.set_title(f"after {step} steps" if step else "data", fontsize=10)
    axis.set_aspect("equal")
axes[2].plot(*found.T, "k+", markersize=12)
