"""Which tiles that a user measured take precedence over the tables of ``cuflash/_kernels``?

Rows of the file of ``cuflash.tuning.use(file)``, or of the environment variable CUFLASH_TILES: the
path of a file, or "user" for this user's table. A file is JSON,
{"format": ..., "tiles": [row, ...]}. A row holds for one kernel, dtype, head sizes, set of options
and device. With "replaces" it holds only instead of that tile of the tables, which may choose tiles
by lengths.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cuflash._errors import problem_with
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.score_config import CHANGING, COMPILED
from cuflash._problem.option_table import of_stages

FORMAT = "cuflash tiles 1"
VARIABLE = "CUFLASH_TILES"
_DEEPEST = 16  # levels of nesting; over twice those of any file of ours
AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)


class Key(NamedTuple):
    """Which configurations a row holds for."""

    kernel: str
    dtype: str
    head_dim: int  # padded
    head_dim_v: int  # padded
    options: str  # see :func:`options_of`
    device: str  # name of the device
    replaces: str = ""  # text of the tile of the tables that it replaces; empty: any tile


class Row(NamedTuple):
    """A tile for a key, and how it was measured."""

    key: Key
    values: tuple[tuple[str, int], ...]  # (field, value)
    measured: str = ""  # a sentence about the measurement


#: Fields that say what a kernel computes, and the word for each in ``Key.options``.
_WORDS = {
    "window_left": "window",
    "window_right": "causal",
    **{o.name: o.name for o in of_stages() if o in COMPILED or o.stage == "formula"},
    "cu_seqlens": "packed",
    "simt": "cores",
    **{option.name: option.name for option in of_stages("row")},
}


#: Fields that say how a kernel computes, not what. They are the fields of a row, in the order of
#: its text. (D103)
TILE_FIELDS = (
    "num_warps", "block_m", "block_n", "blocks_per_sm", "num_stages", "num_q_stages",
    "overlap_quarters", "scores_ahead", "keys_in_registers",
)  # fmt: skip


def options_of(config: Any) -> str:
    """The options that are compiled into a kernel: "causal sink"; "plain" where there are none.

    A measured tile is used for exactly the options that it was measured with, as options differ in
    the registers that they take.
    """
    words = [
        word for name, word in _WORDS.items() if getattr(config, name, False) not in (False, "none")
    ]
    plain = set(CHANGING).isdisjoint(words)
    if plain and not config.scale_in_exponent:
        words.append("scaled")
    if config.precision == "tf32":
        words.append("tf32")
    if config.offset in ("int32", "int64"):
        words.append("offset")
    if config.computes == "dkv":
        words += [] if config.grad_k and config.grad_v else ["dk" if config.grad_k else "dv"]
    if config.copy_bytes < 16:
        words.append("narrow")
    if config.computes == "dqkv" and not config.deterministic:
        words.append("unordered")
    if config.row_numbers:
        words.append(f"{config.width}x{config.width_v}")
        words += ["shared"] if config.key_bias else []
    if config.computes == "out" and config.out_dtype != config.dtype:
        words.append(config.out_dtype)
    if getattr(config, "kv_dtype", "none") != "none":
        words.append(f"k:{config.kv_dtype}")
    return " ".join(words) or "plain"


def key_of(config: KernelConfig, device: str) -> Key:
    """The key by which a row for a configuration is looked up."""
    sizes = (config.head_dim, config.head_dim_v)
    return Key(config.kernel, config.dtype, *sizes, options_of(config), device, tile_text(config))


def tile_text(config: KernelConfig) -> str:
    """A tile in words: "num_warps=12 block_m=128 ..."."""
    return " ".join(f"{name}={int(value)}" for name, value in tile_fields(config).items())


def tile_fields(config: KernelConfig) -> dict[str, int]:
    """The fields of a configuration that a row may hold."""
    values = config.values()
    return {name: values[name] for name in TILE_FIELDS if name in values}


def parse(text: str) -> Any:
    """The value of a JSON text; a ValueError if it is no JSON, or nested too deep to be printed."""
    import json

    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(_DEEPEST):
        inner = [
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        ]
        if not inner:
            return value
        level = [value for values in inner for value in values]
    raise ValueError("nested too deep")


def is_sweep(path: Path) -> bool:
    """Whether a file holds a sweep, by its first line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"kind": "sweep"' in file.readline()


def read(path: Path) -> list[Row]:
    """The rows of a file; a ValueError names the first place that is wrong."""
    expected = f'a file of tiles, {{"format": "{FORMAT}", "tiles": [...]}}'
    if is_sweep(path):
        raise problem_with(
            str(path), ValueError, got="a sweep", expected=expected,
            fix=f"unset {VARIABLE}; then write a file of tiles by cuflash.tuning.save("
            f"cuflash.tuning.load({str(path)!r}), 'tiles.json'), or save the best tile for "
            f"{VARIABLE}=user by python -m cuflash tune --file {path} --save, with the sweep's "
            "other arguments",
        )  # fmt: skip
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        got = f"invalid JSON ({error})"
        raise problem_with(str(path), ValueError, got=got, expected=expected) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise problem_with(str(path), ValueError, got="another format", expected=expected)
    tiles = content.get("tiles")
    if not isinstance(tiles, list):
        raise problem_with(str(path), ValueError, got='no list "tiles"', expected=expected)
    return [_row(path, number, given) for number, given in enumerate(tiles)]


def _row(path: Path, number: int, given: Any) -> Row:
    where = f"{path}: tiles[{number}]"
    kinds = {name: int if name.startswith("head") else str for name in Key._fields}
    if isinstance(given, dict):
        given = {"replaces": "", **given}
    if not isinstance(given, dict) or not isinstance(given.get("values"), dict):
        raise problem_with(where, ValueError, got=repr(given)[:80], expected='a row with "values"')
    for name, kind in kinds.items():
        if not isinstance(given.get(name), kind):
            raise problem_with(
                where, ValueError, got=f"{name} {given.get(name)!r}", expected=f"{kind.__name__}"
            )
    values = given["values"]
    if not values or not all(isinstance(value, int) for value in values.values()):
        raise problem_with(where, ValueError, got=f"values {values}", expected="integers by name")
    key = Key(**{name: given[name] for name in Key._fields})
    return Row(key, tuple(values.items()), str(given.get("measured", "")))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a file of tiles, sorted by key; it is replaced as a whole."""
    import json

    ordered = sorted(rows, key=lambda row: row.key)
    tiles = [
        {name: value for name, value in row.key._asdict().items() if value != ""}
        | {"values": dict(row.values), "measured": row.measured}
        for row in ordered
    ]
    lines = ",\n".join(json.dumps(tile) for tile in tiles)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.write_text(f'{{"format": "{FORMAT}", "tiles": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(temporary, path)


def user_file() -> Path:
    """Path of this user's table, in the platform's folder for caches."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "cuflash", "tiles.json")


#: The rows in use by key: None before the variable is read, empty if there are none.
_in_use: dict[Key, Row] | None = None


def in_use() -> Mapping[Key, Row]:
    """The rows in use: those of :func:`replace_rows`, or else those of the variable."""
    global _in_use
    if _in_use is None:
        named = os.environ.get(VARIABLE, "")
        path = user_file() if named == "user" else Path(named)
        if named not in ("", "user") and not path.is_file():
            raise problem_with(
                VARIABLE, FileNotFoundError, got=f"{named}, which is not a file",
                expected='a file of tiles, or "user" for this user\'s table',
            )  # fmt: skip
        rows = read(path) if named and (named != "user" or path.exists()) else []
        _in_use = {row.key: row for row in rows}
    return _in_use


def replace_rows(rows: Mapping[Key, Row] | None) -> None:
    """Use these rows from now on; None: the rows of the variable."""
    global _in_use
    _in_use = None if rows is None else dict(rows)


def row_of(config: KernelConfig, device: str) -> Row | None:
    """The measured row for a choice of the tables; None where there is none."""
    rows, key = in_use(), key_of(config, device)
    return rows.get(key) or rows.get(key._replace(replaces=""))


def row_behind(config: KernelConfig, device: str) -> Row | None:
    """The measured row that a configuration's tile is from; None if it is from the tables."""
    key = key_of(config, device)._replace(replaces="")
    for row in in_use().values():
        if row.key._replace(replaces="") != key:  # other kernels have other parameters
            continue
        if all(getattr(config, name, None) == value for name, value in row.values):
            return row
    return None


def applied(
    chosen: AnyConfig, device: str, smem_limit: int, of_any_device: KernelConfig
) -> AnyConfig:
    """``chosen`` with the tile that was measured for it; unchanged where there is none.

    ``smem_limit`` is the shared memory of a thread block in bytes: rows may be written by hand. A
    row with ``replaces`` names the tile of ``of_any_device``, which tables choose on any device.
    """
    row = row_of(of_any_device, device)
    if row is None:
        return chosen
    try:
        found = with_values(chosen, dict(row.values))
        if found.smem_bytes > smem_limit:
            raise ValueError(
                f"{found.smem_bytes} bytes of shared memory, a thread block has {smem_limit}"
            )
        return found
    except ValueError as error:
        raise problem_with(
            f"{VARIABLE} or tuning.use", ValueError,
            got=f"{row.key.kernel} for {device} with {dict(row.values)}",
            expected="a legal tile", fix=str(error).replace("self.", ""),
        ) from None  # fmt: skip


def with_values(config: AnyConfig, values: Mapping[str, int]) -> AnyConfig:
    """The configuration with another tile; a ValueError for an unknown field or illegal value."""
    known = tile_fields(config)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise problem_with(
            "parameter", ValueError, got=unknown[0],
            expected=f"one of {', '.join(known)} of {config.__class__.__name__}",
        )  # fmt: skip
    changed = {name: type(known[name])(value) for name, value in values.items()}  # int or bool
    if config.other_warps and config.owned in changed:  # its tile decides how many warps there are
        changed["num_warps"] = config.warps_for(changed[config.owned])
    return config.replace(**changed)
