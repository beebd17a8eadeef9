"""Which atom of the product was which atom of the reactants? A trained transformer answers.

The transformer from the PyPI package rxnmapper runs on cuflash.attention, without torch, and
reproduces the confidences that were published with it. Then one long sequence shows time and
memory.

    python examples/atom_mapping.py
    python examples/atom_mapping.py --reaction "CC(=O)Cl.CCO>>CC(=O)OCC"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import long_sequence
import numpy as np
import reactions
import rxnmapper_weights
from albert import Albert
from array_device import Device, choose_device
from progress import sign_of_life

import cuflash

# The attention head that learned to follow atoms (Schwaller et al. 2021); both count from 0.
LAYER = 10
HEAD = 5

# Confidences published in rxnmapper 0.4.3, in its tests and its README.
PUBLISHED = {
    "C(C)O.BrC(C)>>CCOCC": 0.9754605679009868,
    "CCO.BrCFC>>CCOCFC": 0.9730222157275086,
}
PUBLISHED_GENERAL = {
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F": 0.9565619900376546,
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl"
    ">>O=C(O)CONC(=O)NCc1cccc2ccccc12": 0.9704424331552834,
}


@dataclass(frozen=True)
class Arithmetic:
    """One way to run the model: its name, its dtypes, and the allowed difference."""

    name: str
    dtype: Any  # of everything except attention
    attention_dtype: Any
    rounded_to: Any  # dtype to which q, k and v are rounded first
    operand_parts: int
    allowed: float | None  # of a confidence; None: not judged


# Twelve layers amplify rounding. In measurements, rounding q, k and v to float16 changed a
# confidence by 2e-5 (one standard deviation; at most 5e-5 in twelve), even with exact attention. No
# kernel could do better. So plain float16 is not judged, but shown beside exact attention of the
# same operands. Two float16 parts of each operand have 22 bits: then only the kernel's own rounding
# remains.
ARITHMETICS = (
    Arithmetic("float64", np.float64, np.float64, np.float64, 1, 1e-6),
    Arithmetic("float32", np.float32, np.float32, np.float32, 1, 1e-6),
    Arithmetic("float16 x 2", np.float32, np.float16, np.float16, 2, 2e-5),
    Arithmetic("float16", np.float32, np.float16, np.float16, 1, None),
    Arithmetic("float16 exact", np.float32, np.float64, np.float16, 1, None),
)


def token_batch(
    vocabulary: list[str], batch: Sequence[reactions.Reaction], longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids, (reactions, seqlen) padded on the right, and their lengths."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    rows = [
        [ids.get(token, ids["[UNK]"]) for token in ("[CLS]", *reaction.tokens, "[SEP]")]
        for reaction in batch
    ]
    lengths = np.array([len(row) for row in rows])
    if lengths.max() > longest:
        raise ValueError(f"a reaction has {lengths.max()} tokens, the model reads {longest}")
    token_ids = np.full((len(rows), lengths.max()), ids["[PAD]"])
    for row, padded in zip(rows, token_ids, strict=True):
        padded[: len(row)] = row
    return token_ids, lengths


def atom_attention(kept: Any, index: int, length: int, reaction: reactions.Reaction) -> np.ndarray:
    """Attention between the atoms of one reaction, summed over both directions.

    Only the needed probabilities are computed, from the stored logsumexp: a block of (product
    atoms, reactant atoms) and a block of (reactant atoms, product atoms).
    """
    tokens = reaction.atoms.tokens + 1  # [CLS] comes first
    reactant, product = np.split(tokens, [reaction.num_reactant_atoms])
    q, k, lse = kept.q[index, :, HEAD], kept.k[index, :, HEAD], kept.lse[index, HEAD]
    options = cuflash.Options(kv_lengths=int(length), scale=kept.options.scale)
    forth = cuflash.weights(q, k, lse, rows=product, cols=reactant, options=options)
    back = cuflash.weights(q, k, lse, rows=reactant, cols=product, options=options)
    both = forth + back.T
    return both if isinstance(both, np.ndarray) else both.get()


def map_batch(
    checkpoint: rxnmapper_weights.Checkpoint,
    batch: Sequence[reactions.Reaction],
    arithmetic: Arithmetic,
    device: Device,
) -> tuple[list[reactions.Mapping], float]:
    """Map all reactions in one padded call of the model; return the mappings and the seconds."""
    model = Albert(
        checkpoint.config,
        checkpoint.tensors,
        xp=device.xp,
        dtype=arithmetic.dtype,
        attention_dtype=arithmetic.attention_dtype,
        rounded_to=arithmetic.rounded_to,
        operand_parts=arithmetic.operand_parts,
    )
    longest = checkpoint.config["max_position_embeddings"]
    token_ids, lengths = token_batch(checkpoint.vocabulary, batch, longest)
    if device.is_gpu:
        model.encode(token_ids, lengths, LAYER)  # the first call compiles the kernels
    device.synchronize()
    start = time.perf_counter()
    _, kept = model.encode(token_ids, lengths, LAYER)
    device.synchronize()
    seconds = time.perf_counter() - start
    mappings = [
        reactions.map_atoms(reaction, atom_attention(kept, index, length, reaction))
        for index, (reaction, length) in enumerate(zip(batch, lengths, strict=True))
    ]
    return mappings, seconds


def published_reactions() -> dict[str, float]:
    """The published reactions that can be read; reactions with rings need RDKit."""
    try:
        reactions.import_rdkit()
    except ImportError as error:
        print(f"  skipped   {len(PUBLISHED_GENERAL)} more published reactions: {error}")
        return PUBLISHED
    return PUBLISHED | PUBLISHED_GENERAL


def show_mapping(
    arguments: argparse.Namespace, checkpoint: rxnmapper_weights.Checkpoint, device: Device
) -> bool:
    """Map the reactions in every arithmetic; return whether all published numbers came out."""
    if arguments.reaction:
        texts = [
            text if arguments.as_written or text in PUBLISHED else reactions.canonical(text)
            for text in arguments.reaction
        ]
    else:
        texts = list(published_reactions())
    batch = [reactions.read_reaction(text) for text in texts]
    chosen = [a for a in ARITHMETICS if arguments.dtype in ("all", a.rounded_to.__name__)]
    results: dict[str, list[reactions.Mapping]] = {}
    times: dict[str, float] = {}
    for arithmetic in chosen:
        with sign_of_life(f"12 layers, attention in {arithmetic.name}"):
            try:
                mappings, seconds = map_batch(checkpoint, batch, arithmetic, device)
            except NotImplementedError as error:
                print(f"  skipped   {arithmetic.name}: {error}")
                continue
        results[arithmetic.name], times[arithmetic.name] = mappings, seconds
    tokens = sorted(len(reaction.tokens) + 2 for reaction in batch)
    print(f"  batch     {len(batch)} reactions of {tokens[0]} to {tokens[-1]} tokens in one call,")
    print("            padded; kv_lengths hides the padding")
    shown = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in times.items())
    print(f"  time      {shown}\n")
    agreed = bool(results)
    for index, reaction in enumerate(batch):
        of_reaction = {name: of_batch[index] for name, of_batch in results.items()}
        agreed &= show_reaction(reaction, of_reaction, chosen)
    print("  Equal numbers mark the same atom before and after the arrow.")
    if "float16" in results:
        print("  float16 x 2: operands of attention as sums of two float16 numbers, so that what")
        print("  differs is the kernel's own rounding. Plain float16 is shown, not judged: it also")
        print(
            "  rounds q, k and v, as the last line does; its attention of rounded inputs is exact."
        )
    print()
    return agreed


def show_reaction(
    reaction: reactions.Reaction,
    mappings: dict[str, reactions.Mapping],
    chosen: Sequence[Arithmetic],
) -> bool:
    """Print one reaction, mapped, and its confidence beside the published one."""
    published = (PUBLISHED | PUBLISHED_GENERAL).get(reaction.smiles)
    print(f"  {reaction.smiles}")
    for text in dict.fromkeys(reactions.mapped_smiles(reaction, m) for m in mappings.values()):
        print(f"  {text}")
    print(f"    {'attention in':<14}{'confidence':>12}", end="")
    print("" if published is None else f"{'published':>14}{'difference':>12}{'allowed':>9}")
    agreed = True
    for arithmetic in chosen:
        if arithmetic.name not in mappings:
            continue
        confidence = mappings[arithmetic.name].confidence
        print(f"    {arithmetic.name:<14}{confidence:12.10f}", end="")
        if published is None:
            print()
            continue
        difference = confidence - published
        print(f"{published:14.10f}{difference:12.1e}", end="")
        if arithmetic.allowed is None:
            print(f"{'-':>9}")
            continue
        within = abs(difference) <= arithmetic.allowed
        agreed &= within
        print(f"{arithmetic.allowed:9.0e}  {'ok' if within else 'NOT REPRODUCED'}")
    print()
    return agreed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A trained transformer maps the atoms of chemical reactions, all its "
        "attention through cuflash; then one long sequence shows time and memory."
    )
    parser.add_argument(
        "--reaction",
        metavar="SMILES",
        action="append",
        help="map this reaction (repeatable) instead of the published ones; needs RDKit, "
        "which the extra 'demo' brings",
    )
    parser.add_argument(
        "--as-written",
        action="store_true",
        help="do not rewrite reactions as canonical SMILES first",
    )
    parser.add_argument(
        "--dtype",
        choices=("all", "float64", "float32", "float16"),
        default="all",
        help="dtype of attention; the rest of the model is float32 beside float16 (default: all)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="default: auto, a GPU where cuflash can use one",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        help=f"a downloaded {rxnmapper_weights.WHEEL_NAME}, for machines without network",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a long sequence of 1/{long_sequence.QUICK_FACTOR} of the length",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0: all published numbers reproduced, 1: some not, 2: it cannot run."""
    arguments = parse(argv)
    try:
        return show(arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def show(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    print("In a chemical reaction atoms change partners; a transformer tells which went where.\n")
    print("1. A trained model: which atom of the product was which atom before?\n")
    device = choose_device(arguments.device)
    print(f"  device    {device.description}")
    agreed, mapped = True, False
    try:
        with sign_of_life(f"downloading {rxnmapper_weights.REQUIREMENT}"):
            wheel = rxnmapper_weights.obtain_wheel(arguments.wheel)
    except rxnmapper_weights.WheelUnavailableError as error:
        print(f"  skipped   no trained model to be had: {error}\n")
    else:
        checkpoint = rxnmapper_weights.read_checkpoint(wheel)
        config = checkpoint.config
        print(
            f"  model     ALBERT of {rxnmapper_weights.REQUIREMENT}:"
            f" {config['num_hidden_layers']} layers, {config['num_attention_heads']} heads,"
            f" head_dim {config['hidden_size'] // config['num_attention_heads']}"
        )
        agreed, mapped = show_mapping(arguments, checkpoint, device), not arguments.reaction
    print("2. One long sequence\n")
    if device.is_gpu:
        agreed &= long_sequence.show_on_gpu(device.xp, quick=arguments.quick)
    else:
        agreed &= long_sequence.show_on_cpu(quick=arguments.quick)
    verdict = "everything checked agrees" if agreed else "NOT EVERYTHING AGREES"
    print(f"\n  {verdict}; {time.perf_counter() - start:.0f} s in total")
    if agreed:
        told = "the trained model gave its published answers, and " if mapped else ""
        print(f"  In short: {told}attention over a long sequence fitted into memory.")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
