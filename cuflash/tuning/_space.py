"""Which configurations of a kernel are legal for a problem on a device, and why are others not?"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuflash._errors import problem_with, wrong_type, wrong_value
from cuflash._kernels.config import RESERVED_SMEM, KernelConfig
from cuflash._select.choose import PORTABLE, Wanted, choose
from cuflash._select.hardware import Hardware, registers_of_thread, wanted
from cuflash.tuning._facts import TIME_LIMIT, Counted, Facts, compile_all
from cuflash.tuning._kernels import (
    KERNELS,
    kernel_type,
    lane_registers,
    shares_evenly,
    superset,
    tile_of,
    with_tile,
)
from cuflash.tuning._workload import Workload

#: Spaces of at most this many combinations list all illegal ones, too, with their reasons.
_FEW = 20_000


@dataclass(frozen=True)
class Candidate:
    """One combination of parameters: a configuration, or the reason why it is illegal.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(2, 16, 16, 4096, 4096, 128, 128, "bfloat16")
    >>> found = tuning.space(work, arch="sm_90a").candidate("128,128,2,2,1")
    >>> found.key, found.config.tile.block_m, found.refusal
    ('128,128,2,2,1', 128, '')
    """

    values: tuple[int, ...]
    config: KernelConfig | None
    refusal: str = ""

    @property
    def key(self) -> str:
        """The values as text; files use it as the combination's name."""
        return ",".join(map(str, self.values))


@dataclass
class Space:
    """Combinations of the parameters of one kernel, for one problem on one device.

    Iterating yields the legal combinations, all of them. ``default`` is the shipped configuration.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(2, 16, 16, 4096, 4096, 128, 128, "bfloat16")
    >>> space = tuning.space(work, arch="sm_90a")
    >>> space.kernel, sorted(space.parameters)[:2]
    ('forward_sm90', ['block_m', 'block_n'])
    >>> shipped = space.candidate(space.default_key)
    >>> shipped.config == space.default
    True
    >>> space.compile([shipped])[shipped.key].registers  # doctest: +SKIP
    168
    """

    workload: Workload
    kernel: str
    hardware: Hardware
    default: KernelConfig
    parameters: dict[str, tuple[int, ...]]
    candidates: list[Candidate]
    facts: dict[str, Facts] = field(default_factory=dict)  # by key, once compiled

    def __iter__(self) -> Iterator[Candidate]:
        return (c for c in self.candidates if c.config is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return any(c.key == key for c in self)

    @property
    def default_key(self) -> str:
        """Key of the shipped configuration; in the space unless its values were left out."""
        return ",".join(map(str, tile_of(self.default).values()))

    def candidate(self, key: str) -> Candidate:
        """The combination with this key; ValueError if the space has none."""
        for found in self.candidates:
            if found.key == key:
                return found
        raise problem_with(
            "key", ValueError, got=repr(key),
            expected=f"values of {', '.join(self.parameters)} that the space of {self.kernel} has",
        )  # fmt: skip

    def compile(
        self,
        chosen: Sequence[Candidate] | None = None,
        *,
        processes: int | None = None,
        time_limit: float = TIME_LIMIT,
        progress: Counted | None = None,
    ) -> dict[str, Facts]:
        """Compile legal combinations in parallel, without a GPU, and return static facts by key."""
        wanted = {c.key: c.config for c in chosen or self if c.config is not None}
        found = compile_all(
            wanted.values(), self.hardware,
            processes=processes, time_limit=time_limit, progress=progress,
        )  # fmt: skip
        self.facts |= {key: found[config] for key, config in wanted.items()}
        return self.facts


def space(
    workload: Workload,
    kernel: str | None = None,
    *,
    arch: str | None = None,
    parameters: Mapping[str, Sequence[int]] | None = None,
) -> Space:
    """List every configuration of a kernel for a problem.

    Parameters
    ----------
    workload : Workload
        Shape, dtype and options. Configurations depend on head sizes, dtype and the set of options,
        not on lengths.
    kernel : str, optional
        A source of ``kernels_cu`` without its suffix, such as ``"forward_sm90"`` or
        ``"backward_dkv_sm80"``. The default is the forward that the device would run.
    arch : str, optional
        An architecture, such as ``"sm_90a"``, to plan for its most common device. The default is
        the device of this machine, or sm_90 if there is none.
    parameters : mapping of str to sequence of int, optional
        Values to try, by parameter, instead of all values that a legal configuration may have.

    Returns
    -------
    Space
        Every legal combination, and illegal ones, each with its reason. With more than 20,000
        combinations some illegal ones are left out: those in which warps have unequal numbers of
        rows, and larger values of ``blocks_per_sm`` than the first that is too large.

    Raises
    ------
    ValueError
        For an unknown kernel, parameter or architecture, values without any legal combination,
        or a kernel that does not support the problem.
    TypeError
        Unless ``workload`` is a :class:`Workload` and ``parameters`` maps names to lists of ints.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(1, 16, 16, 4096, 4096, 128, 128, "bfloat16")
    >>> found = tuning.space(work, arch="sm_90a", parameters={"block_n": (80, 128)})
    >>> found.kernel, found.default_key in found
    ('forward_sm90', True)
    """
    if not isinstance(workload, Workload):
        raise wrong_type("workload", type(workload).__name__, "a cuflash.tuning.Workload")
    if not isinstance(parameters, Mapping | None):
        raise wrong_type("parameters", type(parameters).__name__, "a mapping of names to values")
    hardware = wanted(arch)
    default = default_configs(workload, kernel, hardware)[0]
    tried = {name: tuple(values) for name, values in superset(default).items()}
    for name, values in (parameters or {}).items():
        if name not in tried:
            raise wrong_value("parameters", repr(name), f"one of {', '.join(tried)}")
        named = tuple(dict.fromkeys(values)) if isinstance(values, Iterable) else (None,)
        if not all(isinstance(value, int) for value in named):
            raise wrong_type("parameters", f"{name} = {values!r}", "ints in a list")
        tried[name] = named
    candidates = _candidates(default, tried, hardware)
    if all(c.config is None for c in candidates):
        own = tuple(tile_of(default).values())
        nearest = max(candidates, key=lambda c: sum(map(operator.eq, c.values, own)), default=None)
        raise problem_with(
            "parameters", ValueError, got=f"{len(candidates)} combinations, none of them legal",
            expected="at least one legal combination",
            fix=f"{nearest.key}: {nearest.refusal}" if nearest else "",
        )  # fmt: skip
    for index, name in enumerate(tried):
        if name not in (parameters or {}):
            tried[name] = tuple(sorted({c.values[index] for c in candidates if c.config}))
    candidates = [c for c in candidates if all(map(operator.contains, tried.values(), c.values))]
    return Space(workload, default.kernel, hardware, default, tried, candidates)


def default_configs(
    workload: Workload, kernel: str | None, hardware: Hardware
) -> tuple[KernelConfig, ...]:
    """The shipped configuration for each pass of a kernel; dk and dv of wide heads are two passes.

    Raises a ValueError if the kernel does not support the problem.
    """
    if workload.seqlens:
        got = f"{len(workload.seqlens)} packed sequences"
        raise wrong_value(
            "seqlens", got, "none: tiles are timed on a batch, and packed sequences use them"
        )
    problem = workload.problem()
    if kernel is None:
        return tuple(s.config for s in choose(problem, hardware) if s.config.computes == "out")
    kernel_type(kernel)  # raises for an unknown kernel
    only = PORTABLE if kernel in PORTABLE else None
    asked: list[Wanted | None] = [None]
    if kernel.startswith("backward"):  # all three gradients at once may be one pass
        asked = [Wanted.of(names) for names in ("q", "kv", "qkv")]
    given: Any = {"only": only, "deterministic": workload.deterministic}
    calls = [choose(problem, hardware, wanted=names, **given) for names in asked]
    for steps in calls:
        own = tuple(step.config for step in steps if step.config.kernel == kernel)
        if own:
            return own
    chosen = (step.config.kernel for steps in calls for step in steps)
    serving = dict.fromkeys(name for name in chosen if name in KERNELS)
    got = f"{kernel} on {hardware.name} ({hardware.arch})"
    raise wrong_value(
        "kernel", got, f"a kernel that supports this problem on it: {', '.join(serving)}"
    )


def _candidates(
    default: KernelConfig, tried: Mapping[str, Sequence[int]], hardware: Hardware
) -> list[Candidate]:
    """Every legal combination of the values, and illegal ones: all in small spaces, else some.

    Large spaces leave out combinations in which warps do not share the rows evenly, and larger
    values of blocks_per_sm than the first that is refused, which would be refused as well.
    """
    few = math.prod(map(len, tried.values())) <= _FEW
    others = [name for name in tried if name != "blocks_per_sm"]
    found: list[Candidate] = []
    for chosen in itertools.product(*(tried[name] for name in others)):
        values = dict(zip(others, chosen, strict=True))
        if not (few or shares_evenly(default, values)):
            continue
        for blocks in sorted(tried.get("blocks_per_sm", (0,))):
            values["blocks_per_sm"] = blocks
            found.append(_candidate(default, {name: values[name] for name in tried}, hardware))
            if not few and found[-1].config is None:
                break
    return found


def _candidate(default: KernelConfig, values: dict[str, int], hardware: Hardware) -> Candidate:
    key = tuple(values.values())
    try:
        config = with_tile(default, values)
    except ValueError as error:
        return Candidate(key, None, str(error).replace("self.", ""))
    refusal = _too_large(config, hardware)
    return Candidate(key, None if refusal else config, refusal)


def _too_large(config: KernelConfig, hardware: Hardware) -> str:
    """Why a configuration does not fit on a device; empty if it fits."""
    limits, blocks = hardware.limits, config.blocks_per_sm
    if config.smem_bytes > limits.block_smem:
        return f"{_kib(config.smem_bytes)} of shared memory, a block has {_kib(limits.block_smem)}"
    if blocks * (config.smem_bytes + RESERVED_SMEM) > limits.multiprocessor_smem:
        return (
            f"{blocks} blocks with {_kib(config.smem_bytes)} of shared memory each, an SM has "
            f"{_kib(limits.multiprocessor_smem)}"
        )
    if blocks * config.num_threads > limits.threads:
        return (
            f"{blocks} blocks of {config.num_threads} threads, an SM has room for {limits.threads}"
        )
    if blocks > limits.blocks:
        return f"{blocks} blocks, an SM has room for {limits.blocks}"
    needed, there = lane_registers(config), registers_of_thread(config.num_threads, blocks)
    if needed > there:
        return f"scores and results need {needed} registers of a thread, it has {there}"
    return ""


def _kib(size: int) -> str:
    return f"{math.ceil(size / 1024)} KiB"
