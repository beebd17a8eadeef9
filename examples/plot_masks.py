"""
Which keys does a query see?
============================

This page shows masks, windows and other options as pictures. Each panel has the attention weights
of 24 queries (rows) over 24 keys (columns). :func:`cuflash.weights` returns this matrix.
:func:`cuflash.attention` with the same options never stores it.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

rng = np.random.default_rng(0)
q, k = rng.standard_normal((2, 24, 16))
segments = np.repeat([0, 1, 2], [5, 11, 8])
holes = rng.random((24, 24)) < 0.6
holes[:, 0] = True

panels = {
    "no option": {},
    "causal=True": {"causal": True},
    "window=(4, 4)": {"window": (4, 4)},
    "causal=True, window=(6, None)": {"causal": True, "window": (6, None)},
    "segment_ids": {"segment_ids": (segments, segments)},
    "mask": {"mask": holes},
    "alibi_slopes=0.5": {"alibi_slopes": np.array(0.5)},
    "causal=True, sink=2": {"causal": True, "sink": np.array(2.0)},
}

figure, axes = plt.subplots(2, 4, figsize=(11, 5.8), layout="constrained")
for axis, (title, options) in zip(axes.flat, panels.items(), strict=True):
    lse = cuflash.logsumexp(q, k, **options)
    shown = cuflash.weights(q, k, lse, rows=slice(None), **options)
    axis.imshow(np.where(shown > 0, shown, np.nan), cmap="Blues", vmin=0, vmax=0.4)
    axis.set_facecolor("0.88")  # grey: keys that a query does not see
    axis.set_title(title, fontsize=10)
    axis.set_xticks([])
    axis.set_yticks([])
figure.supxlabel("keys")
figure.supylabel("queries")

# %%
# The weights of each query sum to 1. With a sink they sum to less, because the sink takes a share.

for title, options in panels.items():
    lse = cuflash.logsumexp(q, k, **options)
    total = cuflash.weights(q, k, lse, rows=slice(None), **options).sum(axis=-1)
    print(f"{title:30} {total.min():.3f} to {total.max():.3f}")
