"""How is one block of a sharded call computed, as a one-GPU call with float32 results?

The options of the call refer to whole sequences: bias, mask and segment ids have the local rows and
all keys, and lengths and offset count in the whole sequence. A block gets its part of the arrays,
an offset between its own first query and key, and the origin from which dropout and formulas count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash._api.dispatch import launch, run_backward, run_forward
from cuflash._arrays import Array, Triple, array_module, is_cupy
from cuflash._host.scores import arithmetic
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import Options
from cuflash._problem.philox import Origin
from cuflash._problem.problem import describe
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, Bounds
from cuflash.distributed._sums import Merged, Summed

#: Options that depend on no position. If a call has only these and bounds, blocks may be joined.
_WITHOUT_POSITIONS = {"sink"}


@functools.lru_cache(maxsize=1024)
def _replaced(options: Options, changes: tuple[tuple[str, Any], ...]) -> Options:
    """Options without arrays, with other values. Cached: repeated calls have equal blocks."""
    return replace(options, **dict(changes))


def _of_block(block: Block, q: Array, k: Array, v: Array) -> Triple:
    """The rows of q, k and v that a block computes."""
    return q[..., block.rows, :], k[..., block.keys, :], v[..., block.keys, :]


@dataclass(frozen=True)
class Heads:
    """Some of the query heads: from ``start`` to ``stop`` of ``total``."""

    start: int
    stop: int
    total: int

    @property
    def all(self) -> bool:
        """Whether these are all heads."""
        return self.stop - self.start == self.total


class Stage(NamedTuple):
    """Heads that are computed together; all heads if there is no axis to cut."""

    heads: Heads | None
    q: slice | None = None
    kv: slice | None = None

    def of_q(self, array: Array) -> Array:
        """Return the stage's heads of an array like q."""
        return array if self.q is None else array[..., self.q, :, :]

    def of_lse(self, array: Array) -> Array:
        """Return the stage's heads of an array like lse."""
        return array if self.q is None else array[..., self.q, :]

    def of_kv(self, array: Array) -> Array:
        """Return the stage's heads of an array like k."""
        return array if self.kv is None else array[..., self.kv, :, :]

    def of_saved(self, saved: Saved) -> Saved:
        """Return the stage's heads of the arrays that a gradient reads beside q, k and v."""
        dlse = None if saved.dlse is None else self.of_lse(saved.dlse)
        return Saved(self.of_q(saved.dout), self.of_q(saved.out), self.of_lse(saved.lse), dlse)


def stages_of(heads: Heads | None, q: Array, k: Array, v: Array, *, most: int) -> list[Stage]:
    """Cut the ``heads`` of q into equal stages, at most ``most``."""
    extents = [a.shape[-3] if a.ndim > 2 else 1 for a in (q, k, v)]
    number = None if heads is None else heads.stop - heads.start
    heads_kv = extents[1]
    alike = extents[0] == number and extents[1] == extents[2] and heads_kv > 1
    if heads is None or number is None or not alike or number % heads_kv:
        return [Stage(heads)]
    parts = max(n for n in range(1, most + 1) if heads_kv % n == 0)
    of_q, of_kv = number // parts, heads_kv // parts
    return [
        Stage(
            Heads(heads.start + i * of_q, heads.start + (i + 1) * of_q, heads.total),
            slice(i * of_q, (i + 1) * of_q), slice(i * of_kv, (i + 1) * of_kv),
        )
        for i in range(parts)
    ]  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """What all blocks of one call have in common, and how a block is computed."""

    options: Options
    seqlen_q: int  # of the whole call
    seqlen_k: int
    precision: str | None
    deterministic: bool
    heads: Heads | None = None  # None without an axis of heads

    @property
    def bounds(self) -> Bounds:
        """The bounds by position that the options set: which query sees which key."""
        options = self.options
        left, right = options.window or (None, None)
        offset = self._offset()
        alone = not (options.arrays.keys() - _WITHOUT_POSITIONS) and not options.dropout
        alone = alone and options.score_mod is None and options.mask_mod is None
        alone = alone and options.q_lengths is None and options.kv_lengths is None
        return Bounds(
            left, 0 if options.causal else right, offset if isinstance(offset, int) else None, alone
        )

    def scores(self, block: Block) -> int:
        """Approximate number of scores of a block, to compare the work of ranks."""
        return block.pairs * (1 if self.heads is None else self.heads.stop - self.heads.start)

    def forward(
        self, block: Block, qkv: Triple, out: Array, lse: Array, so_far: Array | None = None
    ) -> None:
        """Write ``out`` and lse of a block's rows.

        With ``so_far``, the output over the keys so far, ``lse`` holds its lse and both are joined.
        """
        options, qkv = self._options_of(block), _of_block(block, *qkv)
        problem = describe(*qkv, options, precision=self.precision, out=out)
        joined = {} if so_far is None else {"so_far": so_far}
        run_forward(problem, qkv, options, out, lse, origin=self._origin(block), **joined)

    def forward_onto(self, merged: Merged, block: Block, qkv: Triple, *, last: bool) -> None:
        """Merge out and lse of a block into ``merged``, within the kernel if it supports that.

        ``last`` says that no later block has any of its rows.
        """
        so_far = merged.so_far(block.rows)
        if so_far is None or self._joins(block, qkv, so_far):
            out, lse = merged.room(block.rows, last=last)
            return self.forward(block, qkv, out, lse, so_far)
        out, lse = merged.part(block.rows)
        self.forward(block, qkv, out, lse)
        return merged.merge(block.rows, out, lse)

    def _joins(self, block: Block, qkv: Triple, so_far: Array) -> bool:
        """Whether the kernel of a block can join its result with the output so far."""
        if not is_cupy(so_far):
            return False
        options, qkv = self._options_of(block), _of_block(block, *qkv)
        problem = describe(*qkv, options, precision=self.precision, out=so_far)
        return bool(launch().can_merge_partial(problem, qkv, options))

    def backward(
        self,
        block: Block,
        qkv: Triple,
        saved: Saved,
        wanted: tuple[str, ...],
        onto: Mapping[str, Summed],
    ) -> dict[str, Array]:
        """Add a block's dq, dk and dv to the sums ``onto``; return its gradients of options.

        ``saved`` has out and lse over all keys.
        """
        xp, options = array_module(qkv[0]), self._options_of(block)
        qkv = _of_block(block, *qkv)
        problem = describe(*qkv, options, precision=self.precision)
        shapes = {name: a.shape for name, a in options.arrays.items()} | {"scale": ()}
        gradients = {
            n: xp.empty(shapes[n], np.float64 if n == "scale" else arithmetic(problem.dtype))
            for n in wanted
            if n in shapes
        }
        others, rows, to_add = tuple(gradients), block.rows, []
        for name, target in onto.items():
            own = block.rows if name == "q" else block.keys
            gradients[name], adds = target.begin(own)
            to_add += [(target, own, gradients[name])] * adds
        of_rows = Saved(
            saved.dout[..., rows, :], saved.out[..., rows, :], saved.lse[..., rows],
            None if saved.dlse is None else saved.dlse[..., rows],
        )  # fmt: skip
        run_backward(
            problem, qkv, options, of_rows, gradients,
            origin=self._origin(block), deterministic=self.deterministic,
        )  # fmt: skip
        for target, own, part in to_add:
            target.add(own, part)
        return {name: gradients[name] for name in others}

    def rows_and_keys(self, name: str, block: Block, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Index of a block's part in an option's array of this shape."""
        core = ARRAYS[name][1]
        index: list[Any] = [slice(None)] * len(shape)
        first = block.first_key
        columns = slice(first, first + block.keys.stop - block.keys.start)
        for axis, of in zip(range(-len(core), 0), core, strict=True):
            if shape[axis] != 1:
                index[axis] = block.rows if of == "m" else columns
        heads = -len(core) - 1
        if self.heads is not None and -heads <= len(shape) and shape[heads] != 1:
            index[heads] = slice(self.heads.start, self.heads.stop)
        return (..., *index)  # an array of no axes stays one

    def _options_of(self, block: Block) -> Options:
        options = self.options
        changes: dict[str, Any] = {}
        for name, array in options.arrays.items():
            part = array[self.rows_and_keys(name, block, array.shape)]
            option = ARRAYS[name][0]
            changes[option.name] = (
                (*changes.get(option.name, ()), part) if len(option.arrays) > 1 else part
            )
        if "sink" in changes and not block.with_sink:
            changes["sink"] = None
        for name, first, extent in (
            ("q_lengths", block.first_query, block.rows.stop - block.rows.start),
            ("kv_lengths", block.first_key, block.keys.stop - block.keys.start),
        ):
            length = changes.get(name, getattr(options, name))
            if isinstance(length, int):
                changes[name] = min(max(length - first, 0), extent)
            elif length is not None:
                changes[name] = array_module(length).clip(
                    length.astype(np.int64) - first, 0, extent
                )
        changes |= {"causal": False, "window": None, "offset": None}
        if block.bounded:
            changes |= {"causal": bool(options.causal), "window": options.window}
        if block.bounded or options.alibi_slopes is not None:
            changes["offset"] = self._offset(block) + block.first_query - block.first_key
        if options.arrays or options.score_mod or options.mask_mod:
            return replace(options, **changes)
        return _replaced(options, tuple(changes.items()))

    def _offset(self, block: Block | None = None) -> Any:
        """Offset of the whole call: an int or an array (for a block, of own heads only)."""
        options = self.options

        def own(value: Any, name: str) -> Any:
            if isinstance(value, int) or block is None:
                return value
            own_heads = value[self.rows_and_keys(name, block, value.shape)]
            return own_heads.astype(np.int64)

        if options.causal == "top_left":
            return 0
        if options.offset is not None:
            return own(options.offset, "offset")
        q_length = self.seqlen_q if options.q_lengths is None else options.q_lengths
        kv_length = self.seqlen_k if options.kv_lengths is None else options.kv_lengths
        return own(kv_length, "kv_lengths") - own(q_length, "q_lengths")

    def _origin(self, block: Block) -> Origin:
        heads = self.heads
        if heads is None or heads.all:
            return Origin(0, 0, block.first_query, block.first_key)
        elsewhere = heads.total - (heads.stop - heads.start)
        return Origin(heads.start, elsewhere, block.first_query, block.first_key)
