"""Do the numbers of docs/tuning.md follow from committed rows, and its counts from its commands?

The numbers of the same sweeps in docs/decisions.md are checked, too.
"""

from __future__ import annotations

import json
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
import shipped_tiles

from cuflash import _cli, tuning
from cuflash._cli import io_model, tune
from cuflash._cli.problem_arguments import problem_of
from cuflash._select import hardware
from cuflash.tuning import _kernels, _space
from cuflash.tuning._space import default_configs
from cuflash.tuning._table import table_rows

H100 = hardware.typical("sm_90")
ROOT = Path(__file__).resolve().parents[1]
SWEEPS, RESULTS = ROOT / "benchmarks" / "sweeps", ROOT / "benchmarks" / "results"
LINES = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8").splitlines()
FACTS = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").splitlines()


def says(sentence: str, lines: list[str] = LINES) -> None:
    """Assert that the document has a sentence once, however its lines are broken."""
    name = "tuning.md" if lines is LINES else "decisions.md"
    count = " ".join(" ".join(lines).split()).count(sentence)
    assert count == 1, f"expected once in docs/{name}: {sentence}"


def swept(name: str, folder: str = "") -> tuning.Sweep:
    return tuning.load(SWEEPS / folder / f"h100-{name}.jsonl")


def result(topic: str) -> tuple[dict[str, Any], str]:
    """Return the newest committed result of a topic, and how the document names its file."""
    path = sorted(RESULTS.glob(f"h100-{topic}-????-??-??.json"))[-1]
    return json.loads(path.read_text(encoding="utf-8")), f"`benchmarks/results/{path.name}`"


def levels() -> dict[str, float]:
    """Return name -> value of the result of ``bench --memory``."""
    return {row["name"]: row["value"] for row in result("memory")[0]["rows"]}


def quotient(found: tuning.Sweep) -> float:
    """Return the time of the best tile over the shipped tile's, in the last comparison."""
    final = found.finals[-1]
    return final["ms"][found.best["key"]] / final["default_ms"]


def tile(found: tuning.Sweep) -> str:
    values = found.best["values"]
    return f"{values['block_m']} x {values['block_n']}"


def space_of_command(start: str) -> tuning.Space:
    """Return the space that a command of the document sweeps."""
    (line,) = (line for line in LINES if line.startswith(f"python -m cuflash {start}"))
    given = _cli.parser().parse_args(shlex.split(line)[3:])
    values = tune.parameters_of(given.parameters)
    arch = given.arch or "sm_90a"
    return tuning.space(problem_of(given), given.kernel, arch=arch, parameters=values)


def test_counts_of_configurations():
    listed, portable = (space_of_command(f"tune --list --arch {a}") for a in ("sm_90a", "sm_80"))
    says(f"compiles {len(listed)} configurations on all cores")
    says(f"1 of {len(listed)} compiled ... {len(listed)} of {len(listed)} compiled")
    refused = len(listed.candidates) - len(listed)
    says(f"{len(listed)} legal, {refused} combinations are not (--json says why)")
    says(f"This one has {len(portable)}:")
    found = swept("forward-sm90-d128")
    legal = tuning.space(found.workload, found.kernel, arch="sm_90a")
    command = space_of_command("tune --head-dim 128 --seqlen 8192")
    assert {c.key for c in command} == found.done
    says(f"That is {len(found.rows)} of the {len(legal)} that are legal")
    forward, dq, dkv = (
        len(tuning.space(found.workload, f"{name}_sm80", arch="sm_90a"))
        for name in ("forward", "backward_dq", "backward_dkv")
    )
    says(
        f"{len(legal)} of Hopper's forward, {forward} of the portable one, {dq} and {dkv} of the "
        "portable gradients, dq and dk with dv."
    )
    says(f"Of more than {_space._FEW:,} combinations the list omits")


def test_facts_of_the_configurations_that_are_listed():
    """The document has the committed facts of configurations, except seconds."""
    space = space_of_command("tune --list --arch sm_90a")
    facts = {row["key"]: row["facts"] for row in swept("forward-sm90-d128").rows}
    shown = [line for line in LINES if line.partition(" ")[0] in facts]
    assert len(shown) == 3
    for line in shown:
        words = line.split()
        key, own = words[0], facts[words[0]]
        assert key in {candidate.key for candidate in space}
        threads = space.candidate(key).config.num_threads
        assert words[1:7] == [
            f"{own['smem_bytes'] / 1024:.1f}", str(threads), str(own["registers"]),
            str(own["spill_bytes"]), str(own["blocks_per_multiprocessor"]),
            str(own["warps_per_multiprocessor"]),
        ]  # fmt: skip
        last = " ".join(own["warnings"] + ["<- shipped"] * (key == space.default_key))
        assert " ".join(words[8:]) == last


def test_the_sweep_that_was_done_twice():
    first, again = (swept("forward-sm90-d128", folder) for folder in ("", "repeated"))
    count, header = len(first.rows), first.header
    assert {row["status"] for row in first.rows + again.rows} == {"ok"}
    long, short = (found.finals[-1]["seconds"] for found in (first, again))
    took = (
        f"took {long:.0f} s, about {long - short:.0f} of them to compile, and {short:.0f} s where "
        "the store had the kernels"
    )
    says(f"Sweeps of these {count} {took}")
    for name in ("driver", "nvrtc", "kernels"):
        assert again.header[name] == header[name]
    assert (header["driver"].rpartition(".")[0], header["nvrtc"]) == ("580.159", "13.0")
    says("driver 580.159, CuPy 14.2 for CUDA 13 with NVRTC 13.0, 16 cores", FACTS)
    says(f"{header['date'][:10]}, sources {header['kernels'][:9]}, `--parameters num_sta", FACTS)
    says(f"two sweeps of {count} forwards at head size 128 {took}; all {count} were right", FACTS)
    assert first.best["key"] == again.best["key"] == header["default"]
    says("The shipped tile won each.")
    assert first.best["values"]["overlap_quarters"] == 4
    says(
        f"the same winner, {tile(first)} with all four quarters of the exponentials tied before "
        f"the wait for p v, which is the shipped tile: {quotient(first):.3f} and "
        f"{quotient(again):.3f} of its time",
        FACTS,
    )
    relative = {row["key"]: row["relative"] for row in again.rows}
    pairs = [sorted((row["relative"], relative[row["key"]])) for row in first.rows]
    apart = [100 * (slow / fast - 1) for fast, slow in pairs]
    says(
        "quotient of a tile's time and the shipped tile's differs between the two sweeps by "
        f"{statistics.median(apart):.1f} % in the median ({max(apart):.1f} % at most)",
        FACTS,
    )
    says(f"differ by {max(apart):.1f} % at most from one sweep to the next")


def test_the_sweep_of_the_whole_space():
    found = swept("forward-sm90-d128", "every")
    assert found.done == {c.key for c in tuning.space(found.workload, found.kernel, arch="sm_90a")}
    assert {row["status"] for row in found.rows} == {"ok"}
    assert found.best["key"] == found.header["default"]
    count, seconds = len(found.rows), found.finals[-1]["seconds"]
    says(f"one of all {count} took {seconds:.0f} s. The shipped tile won each.")


def test_sweeps_of_other_problems():
    names = ("2048", "causal", "causal-2048")
    full, causal, causal_2048 = (swept(f"forward-sm90-d128-{name}") for name in names)
    says(
        f"at 2048 keys {tile(full)} takes {quotient(full):.3f} of the shipped tile's time, and "
        f"under a causal bound {tile(causal)} takes {quotient(causal):.3f} at 8192 keys and "
        f"{tile(causal_2048)} {quotient(causal_2048):.3f} at 2048.",
        FACTS,
    )
    says(f"worth its {100 * (1 - quotient(causal)):.0f} %")
    narrow, narrow_2048 = swept("forward-sm90-d64"), swept("forward-sm90-d64-2048")
    for found in (narrow, narrow_2048):
        shipped = found.default_values
        assert shipped["num_stages"] == 4
        assert found.best["values"] == shipped | {"num_stages": 3}
        assert len(found.rows) == len(narrow.rows)
    says(
        f"of the {len(narrow.rows)} others the best, the same with three, takes "
        f"{quotient(narrow):.3f} and {quotient(narrow_2048):.3f} of its time at 8192 and 2048 keys",
        FACTS,
    )


def tiles_of(name: str) -> int:
    """Return how many tiles each of two lengths has; none was 2 % faster than the shipped one."""
    found = [swept(name), swept(f"{name}-2048")]
    assert min(map(quotient, found)) > 0.98
    (count,) = {len(own.rows) for own in found}
    return count


def test_sweeps_of_other_kernels():
    one_pass = [tiles_of(f"backward-sm90-d{d}") for d in (64, 96, 128)]
    one_pass += [tiles_of(f"backward-pair-sm90-d{d}") for d in (192, 256)]
    *first, last = map(str, one_pass)
    says(
        "gradients in one pass at 64, 96, 128, 192 and 256, of "
        f"{', '.join(first)} and {last} tiles",
        FACTS,
    )
    says(f"the forward at 256, of {tiles_of('forward-sm90-d256')}", FACTS)
    forwards = [tiles_of(f"forward-tf32-sm90-d{d}-float32") for d in (64, 128)]
    gradients = [tiles_of(f"backward-{name}-tf32-sm90-d64-float32") for name in ("dq", "dkv")]
    says(
        f"in float32 the forward at 64 and 128, of {forwards[0]} and {forwards[1]}, dq and dk with "
        f"dv at 64, of {gradients[0]} and {gradients[1]}",
        FACTS,
    )


#: Tiles that replaced one of the tables': the document's name for the row, the sweep without a
#: causal bound, what follows its head size with one, and the tile.
REPLACED = (
    ("dq at 96", "backward-dq-sm90-d96", "", "128,80,3,0"),
    ("dq at 128", "backward-dq-sm90-d128", "", "128,64,3,0"),
    ("dq at 192", "backward-dq-sm90-d192", "", "128,48,3,0"),
    ("dq at 256", "backward-dq-sm90-d256", "", "128,32,3,0"),
    ("one pass at 192", "backward-pair-sm90-d192", "", "64,64,2,0"),
    ("the same, float16", "backward-pair-sm90-d192-float16", "", "64,64,2,0"),
    ("one pass at 192 and 128", "backward-pair-sm90-d192-128", "", "64,64,2,0"),
    ("forward at 128, softcap", "forward-sm90-d128", "-softcap", "128,128,2,2,4"),
    ("float64 forward at 128", "forward-sm80-d128-float64", "", "128,16,8,1,1"),
)


@pytest.mark.parametrize(("name", "start", "end", "key"), REPLACED, ids=str)
def test_tiles_that_replaced_others(name, start, end, key):
    """The document has the times of tiles that replaced others, and the tables have these tiles."""
    (line,) = (text.strip() for text in FACTS if text.strip().startswith(f"| {name} |"))
    cells = []
    for mask in ("", "-causal"):
        found = [swept(f"{start}{mask}{end}{length}") for length in ("", "-2048")]
        for sweep in found:
            (own,) = (row["values"] for row in sweep.timed if row["key"] == key)
            (default, *_) = default_configs(sweep.workload, sweep.kernel, H100._replace(name=""))
            assert _kernels.tile_of(default) == own
        times = (shipped_tiles.relative_times(sweep)[tuple(own.items())] for sweep in found)
        cells.append(", ".join(f"{time:.3f}" for time in times))
    assert line.endswith(f"| {cells[0]} | {cells[1]} |")


def test_one_tile_at_six_lengths():
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    taken = {}
    for n in lengths:
        final = swept(f"forward-sm90-d128-causal-{n}", "lengths").finals[-1]
        taken[n] = f"{final['ms']['192,64,3,2,4'] / final['default_ms']:.3f}"
    says(
        f"192 x 64 with three stages takes {taken[8192]} of the shipped tile's time at 8192 keys, "
        f"and {taken[1024]} at 1024."
    )
    *first, last = taken.values()
    says(f"`benchmarks/sweeps/lengths`) 192 x 64 takes {', '.join(first)} and {last} of", FACTS)


def test_rows_that_are_shipped():
    """The document says how many rows are shipped, and the gain of those for exact options."""
    rows = {row.key: row for row in shipped_tiles.rows()}
    gains: dict[object, list[float]] = {}
    for path in sorted(SWEEPS.glob("*.jsonl"), key=lambda path: path.stem):  # 8192 keys, then 2048
        found = tuning.load(path)
        for table in table_rows(found):
            tile = rows[table.key].values
            if tile != table.values:
                times = shipped_tiles.relative_times(found)
                gains.setdefault(table.key, []).append(times[tile] / times[table.values])
    says(f"The tables have the best tiles of {len(rows)} problems. {len(gains)} of them have rows")
    for long, short in gains.values():
        says(f"{long:.3f} and {short:.3f} (", FACTS)


def test_how_near_the_roof_of_l2_tiles_are():
    found, shares = swept("forward-sm90-d128"), []
    for row in found.timed:
        values = row["values"]
        if values["block_m"] == 128:
            own = values["block_m"], values["block_n"], row["facts"]["smem_bytes"]
            moved = io_model.forward(found.workload, *own, boxes=True).fused
            shares.append(moved / found.steady_ms(row) / 1e6 / levels()["L2 read"])
    says(f"tiles of 128 rows reach {max(shares):.2f} of its roof at head size 128")


def test_levels_of_memory():
    value, file = levels(), result("memory")[1]

    def speed(name: str) -> str:
        return f"{value[name] / 1e3:#.3g} TB/s"

    def wait(name: str) -> str:
        return f"{value[f'{name} latency']:.0f} ns"

    far = "device memory"
    says(f"`bench --memory` on the same kind of machine ({file};")
    says(
        f"| {far} | {speed(f'{far} read')}, {wait(f'{far} read')} | {speed(f'{far} write')}, "
        f"{wait(f'{far} write')} | {speed(f'{far} copy')} |"
    )
    says(f"| L2 | {speed('L2 read')}, {wait('L2 read')} | {wait('L2 write')} | |")
    says(f"| shared memory | {speed('shared memory read')} | | |")
    says(f"plot roofline h100.jsonl --memory {file.strip('`')}")
    says(f"A dependent read takes {wait(f'{far} read')} from device memory")


def counted(name: str, *seqlens: int, kernel: str = "") -> list[float]:
    """Return the shares of the model's bytes that ncu counted."""
    return [
        row["measured"][name] / row[io_model.PREDICTED[name]]
        for row in result("io")[0]["rows"]
        if row["kernel"].startswith(kernel) and (not seqlens or row["seqlen"] in seqlens)
    ]


def test_bytes_that_forwards_move():
    found, file = result("io")
    seqlens = sorted({row["seqlen"] for row in found["rows"]})
    commit = found["meta"]["commit"][:8]
    says(f"lengths {seqlens[0]} to {seqlens[-1]}, commit {commit}, {file}) against the model:")
    to_processors = {f"{share:.3f}" for share in counted("L2 to processors")}
    says(f"| L2 to SMs, every kernel and tile | {' to '.join(to_processors)} |")
    read = counted("device memory read", *(n for n in seqlens if n <= 4096))
    says(f"| device memory read, up to 4096 keys | {min(read):.3f} to {max(read):.2f} | |")
    long = [counted("device memory read", n) for n in (8192, 16384)]
    spans = ", ".join(f"{min(shares):.2f} to {max(shares):.2f}" for shares in long)
    says(f"| device memory read, 8192 and 16384 keys | {spans} |")
    back = counted("processors to L2", kernel="forward_sm90")
    says(f"| SMs to L2, Hopper | {min(back):.3f} to {max(back):.3f} | |")
    back = counted("processors to L2", kernel="forward_sm80")
    says(f"| SMs to L2, portable | {min(back):.2f} to {max(back):.2f} |")
    (row,) = (
        row for row in found["rows"]
        if (row["kernel"], row["seqlen"], row["block_m"]) == ("forward_sm90", 4096, 128)
    )  # fmt: skip
    moved = []
    ways = ("device memory read", "L2 to processors", "processors to L2", "device memory write")
    for name in ways:
        size = row["measured"][name]
        moved.append(f"{size / 1e6:.2f} MB, {size / row[io_model.PREDICTED[name]]:.3f}")
    says(
        f"device memory read {moved[0]} of the model's, L2 to SMs {moved[1]}, back to "
        f"L2 {moved[2]}, device memory written {moved[3]} for the last reason of the table"
    )
    written = counted("device memory write")
    says(f"| device memory write | {min(written):.0f} to {max(written):.2f} |")


def test_what_a_speed_draws_from_l2():
    roof = levels()["L2 read"] / 1e3
    tiles = [
        row for row in result("io")[0]["rows"]
        if (row["kernel"], row["seqlen"]) == ("forward_sm90", 8192)
    ]  # fmt: skip
    assert [row["block_m"] for row in tiles] == [128, 192]
    seconds = 4 * 16 * 8192**2 * 128 / 700e12
    drawn = [row["loaded"] / seconds / 1e12 for row in tiles]
    says(
        f"700 TFLOP/s on 8192 keys read {drawn[0]:.1f} TB/s from L2 with tiles of 128 rows, "
        f"{drawn[1]:.1f} with 192: {drawn[0] / roof:.2f} and {drawn[1] / roof:.2f} of the speed of "
        "L2"
    )
    asked = max(row["measured"]["device memory read"] + row["stored"] for row in tiles)
    assert 0.1 < asked / seconds / 1e12 < 0.2
    says("Device memory delivers less than 0.2 TB/s.")


def test_what_a_call_holds_beside_its_inputs():
    found, file = result("allocations")
    held = {(row["impl"], row["pass"], row["seqlen_q"]): row["bytes"] for row in found["memory"]}
    (tokens,) = {row["batch"] * row["seqlen_q"] for row in found["memory"]}
    says(f"for {tokens:,} tokens in sequences of several lengths")
    says(f"`bench --set memory`, {file}):")
    names = {
        "cuflash": "cuflash", "fa2": "FlashAttention-2", "cudnn": "cuDNN",
        "fa4": "FlashAttention-4", "naive": "unfused",
    }  # fmt: skip
    for impl, name in names.items():
        cells = [held[impl, pass_, n] for pass_ in ("fwd", "bwd") for n in (1024, 16384)]
        says(f"| {name} | {' | '.join(f'{size / 1e9:.3g}' for size in cells)} |")
        lengths = {n for own, _, n in held if own == impl}
        for pass_ in ("fwd", "bwd"):
            sizes = [held[impl, pass_, n] for n in lengths]
            assert (max(sizes) < 1.01 * min(sizes)) == (impl != "naive")
