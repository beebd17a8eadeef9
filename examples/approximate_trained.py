"""How large are the errors of approximations in a transformer that was trained without them?

RXNMapper's ALBERT reads one text of several reactions. The methods of `approximate.py` compute each
head from its q, k and v. The error of a head is relative to the variation of its rows. Then each
method replaces attention in all layers, and the error of the last hidden features is measured.

    python examples/approximate_trained.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import approximate
import numpy as np
import reactions
import rxnmapper_weights
from albert import Albert, LayerAttention
from atom_mapping import PUBLISHED, PUBLISHED_GENERAL

import cuflash

Array = Any
Method = Callable[[Array, Array, Array], Array]

#: Two sizes for each method.
KEYS, FEATURES, REACHES = (16, 64), (256, 4096), (8, 32)


class Watched(Albert):
    """The model, which computes every head by ``method`` and keeps the operands of all heads."""

    method: Method = staticmethod(cuflash.attention)

    def attend(
        self, q: Array, k: Array, v: Array, options: cuflash.Options
    ) -> tuple[Array, LayerAttention]:
        """Attention of one layer, (1, seqlen, heads, head_dim)."""
        heads = [tuple(x[0, :, h] for x in (q, k, v)) for h in range(q.shape[2])]
        self.seen = [*getattr(self, "seen", []), *heads]
        out = np.stack([self.method(*one) for one in heads], axis=1)[None]
        return out, LayerAttention(q, k, np.empty(0), options)


def methods(head_dim: int) -> dict[str, Method]:
    """The methods by name and size."""
    rng = np.random.default_rng(0)
    found: dict[str, Method] = {"linear attention": approximate.linear_attention}
    found |= {f"Linformer, {r} keys": partial(fitted_linformer, r) for r in KEYS}
    for count in FEATURES:
        directions = approximate.orthogonal_directions(rng, count, head_dim)
        name = f"Performer, {count} features"
        found[name] = partial(approximate.performer, directions=directions)
    for reach in REACHES:  # the global position is [CLS]
        name = f"Longformer, {reach} neighbours"
        found[name] = partial(approximate.longformer, reach=reach, num_global=1)
    return found


def fitted_linformer(r: int, q: Array, k: Array, v: Array) -> Array:
    """Linformer, fitted to the head itself, which is the best case for this method."""
    return approximate.linformer(q, k, v, *approximate.fit_linformer(q, k, v, r))


def error(found: Array, exact: Array) -> float:
    """Relative error; 1 is as bad as a result in which all rows are the mean row."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact - exact.mean(axis=0)))


def token_ids(vocabulary: list[str]) -> np.ndarray:
    """Token ids (1, seqlen) of all published reactions, joined into one."""
    sides = [text.split(reactions.ARROW) for text in PUBLISHED | PUBLISHED_GENERAL]
    text = reactions.ARROW.join(".".join(side) for side in zip(*sides, strict=True))
    tokens = ["[CLS]", *reactions.tokenise(text), "[SEP]"]
    return np.array([[vocabulary.index(token) for token in tokens]])


def run(checkpoint: rxnmapper_weights.Checkpoint) -> dict[str, tuple[float, float, float]]:
    """By method: median and largest error of heads, and the error of the last features."""
    ids = token_ids(checkpoint.vocabulary)
    lengths = np.array([ids.shape[1]])

    def encoded(method: Method) -> tuple[Array, list[Any]]:
        model = Watched(checkpoint.config, checkpoint.tensors, dtype=np.float64)
        model.method = method
        hidden, _ = model.encode(ids, lengths, 0)
        return hidden[0], model.seen

    wanted, heads = encoded(cuflash.attention)
    found = {}
    for name, method in methods(heads[0][0].shape[-1]).items():
        errors = [error(method(*one), cuflash.attention(*one)) for one in heads]
        hidden, _ = encoded(method)
        found[name] = float(np.median(errors)), max(errors), error(hidden, wanted)
    print(f"  {ids.shape[1]} tokens, {len(heads)} heads of 12 layers, float64\n")
    return found


def main() -> int:
    """Print the table; return 2 if the model cannot be downloaded."""
    try:
        checkpoint = rxnmapper_weights.read_checkpoint(rxnmapper_weights.obtain_wheel())
    except rxnmapper_weights.WheelUnavailableError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    found = run(checkpoint)
    print(f"  {'error of':27}{'median head':>12}{'worst head':>12}{'last features':>15}")
    for name, errors in found.items():
        print(f"  {name:27}{errors[0]:12.3f}{errors[1]:12.3f}{errors[2]:15.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
