"""How is a reaction in SMILES notation split into tokens and atoms, and how are its atoms paired?

The pairing follows Schwaller et al. 2021 (https://doi.org/10.1126/sciadv.abe4166). One attention
head of the model has learned, without supervision, to attend from an atom of the product to the
same atom in the reactants. The pair with the largest attention is taken first. Then pairs of its
neighbours get a larger weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOSPFI]|[bcnosp]|%[0-9]{2}|[0-9]|>>|[()=#.~:@?>*$/\\+-]")
ARROW = ">>"
BETWEEN_MOLECULES = {".", "~", ARROW}

# Number of bonds of each element that the small reader below knows. Free bonds hold hydrogen.
VALENCES = {"C": 4, "O": 2, "F": 1, "Br": 1}
SMALL_READER_TOKENS = {*VALENCES, "(", ")", ".", ARROW}

# Factor for pairs of neighbours of a found pair (Schwaller et al., section Methods).
NEIGHBOUR_BOOST = 90.0


@dataclass(frozen=True)
class Atoms:
    """The atoms of a reaction, reactants first, in the order of their tokens.

    ``tokens`` are indices into the reaction's tokens; ``bonded`` is (atoms, atoms) bool.
    """

    tokens: np.ndarray
    elements: np.ndarray
    hydrogens: np.ndarray
    bonded: np.ndarray


@dataclass(frozen=True)
class Reaction:
    """A reaction with its tokens and atoms; the first ``num_reactant_atoms`` are reactants'."""

    smiles: str
    tokens: list[str]
    atoms: Atoms
    num_reactant_atoms: int


@dataclass(frozen=True)
class Mapping:
    """For each product atom: its reactant atom or -1, and the confidence of the model."""

    reactant_of_product: np.ndarray
    confidences: np.ndarray

    @property
    def confidence(self) -> float:
        """The product of the confidences of all atoms."""
        return float(np.prod(self.confidences))


def tokenise(smiles: str) -> list[str]:
    """Split a reaction SMILES into the tokens on which the model was trained."""
    tokens = TOKEN.findall(smiles)
    if "".join(tokens) != smiles:
        raise ValueError(f"{smiles!r} holds characters that are not SMILES")
    if tokens.count(ARROW) != 1:
        raise ValueError(f"{smiles!r} is not a reaction: expected reactants>>products")
    return tokens


def read_reaction(smiles: str) -> Reaction:
    """Find the atoms of a reaction, by RDKit if the small reader does not support the SMILES."""
    tokens = tokenise(smiles)
    small = set(tokens) <= SMALL_READER_TOKENS
    atoms = atoms_of_chains(tokens) if small else atoms_by_rdkit(tokens)
    num_reactant_atoms = int(np.sum(atoms.tokens < tokens.index(ARROW)))
    return Reaction(smiles, tokens, atoms, num_reactant_atoms)


def atoms_of_chains(tokens: list[str]) -> Atoms:
    """Read branched chains of C, O, F and Br with single bonds, and nothing else."""
    indices: list[int] = []
    bonds: list[tuple[int, int]] = []
    previous: int | None = None
    branches: list[int | None] = []
    for index, token in enumerate(tokens):
        if token in VALENCES:
            if previous is not None:
                bonds.append((previous, len(indices)))
            previous = len(indices)
            indices.append(index)
        elif token == "(":
            branches.append(previous)
        elif token == ")":
            if not branches:
                raise ValueError(f"{''.join(tokens)!r} closes a branch that it never opened")
            previous = branches.pop()
        else:
            previous = None
    bonded = np.zeros((len(indices), len(indices)), dtype=bool)
    for a, b in bonds:
        bonded[a, b] = bonded[b, a] = True
    elements = np.array([tokens[index] for index in indices])
    free = np.array([VALENCES[element] for element in elements]) - bonded.sum(axis=1)
    return Atoms(np.array(indices), elements, np.maximum(free, 0), bonded)


def import_rdkit() -> Any:
    """Return ``rdkit.Chem``; ImportError with the extra to install if it is missing."""
    try:
        from rdkit import Chem, RDLogger
    except ImportError:
        raise ImportError(
            "general SMILES are read by RDKit, which is not installed: pip install 'cuflash[demo]'"
        ) from None
    RDLogger.DisableLog("rdApp.*")
    return Chem


def atoms_by_rdkit(tokens: list[str]) -> Atoms:
    """Read any SMILES without sanitising, so that atoms keep their form and order."""
    chem = import_rdkit()
    parameters = chem.SmilesParserParams()
    parameters.sanitize = False
    parameters.removeHs = False
    molecules = []
    for smiles in split_molecules(tokens):
        molecule = chem.MolFromSmiles(smiles, parameters)
        if molecule is None:
            raise ValueError(f"RDKit cannot read {smiles!r}")
        molecule.UpdatePropertyCache(strict=False)
        molecules.append(molecule)
    atoms = [atom for molecule in molecules for atom in molecule.GetAtoms()]
    indices = np.array([index for index, token in enumerate(tokens) if is_atom(token)])
    if len(atoms) != len(indices):
        raise ValueError(f"{''.join(tokens)!r}: RDKit finds other atoms than the tokens show")
    bonded = np.zeros((len(atoms), len(atoms)), dtype=bool)
    start = 0
    for molecule in molecules:
        end = start + molecule.GetNumAtoms()
        bonded[start:end, start:end] = chem.GetAdjacencyMatrix(molecule)
        start = end
    elements = np.array([atom.GetSymbol() for atom in atoms])
    return Atoms(indices, elements, np.array([atom.GetTotalNumHs() for atom in atoms]), bonded)


def is_atom(token: str) -> bool:
    return token[0].isalpha() or token[0] == "[" or token == "*"


def split_molecules(tokens: list[str]) -> list[str]:
    """["C", "O", ".", "C", ">>", "C"] -> ["CO", "C", "C"]"""
    spaced = " ".join("\n" if token in BETWEEN_MOLECULES else token for token in tokens)
    return [line.replace(" ", "") for line in spaced.split("\n") if line.strip()]


def canonical(smiles: str) -> str:
    """Rewrite a reaction in the form of the model's training data.

    Reagents are added to the reactants, atom numbers are dropped, each molecule is written as
    RDKit's canonical SMILES, and the molecules of a side are sorted.
    """
    chem = import_rdkit()

    def side(text: str) -> str:
        molecules = []
        for part in filter(None, text.split(".")):
            molecule = chem.MolFromSmiles(part.replace("~", "."))
            if molecule is None:
                raise ValueError(f"RDKit finds {part!r} chemically impossible or misspelt")
            for atom in molecule.GetAtoms():
                atom.SetAtomMapNum(0)
            molecules.append(chem.MolToSmiles(molecule).replace(".", "~"))
        return ".".join(sorted(molecules))

    parts = smiles.split(">")
    if len(parts) != 3:
        raise ValueError(f"{smiles!r} is not a reaction: expected reactants>>products")
    return f"{side(parts[0] + '.' + parts[1])}{ARROW}{side(parts[2])}"


def map_atoms(reaction: Reaction, product_to_reactant: np.ndarray) -> Mapping:
    """Pair each product atom with a reactant atom of the same element, by attention.

    Parameters
    ----------
    reaction
        The reaction.
    product_to_reactant
        (product atoms, reactant atoms): attention between the atoms, summed over both directions.
    """
    split = reaction.num_reactant_atoms
    atoms = reaction.atoms
    same_element = atoms.elements[split:, None] == atoms.elements[None, :split]
    scores = np.where(same_element, product_to_reactant.astype(np.float64), 0.0)
    reactant_of_product = np.full(len(scores), -1)
    confidences = np.ones(len(scores))
    for _ in range(len(scores)):
        sums = scores.sum(axis=1, keepdims=True)
        share = np.divide(scores, sums, out=np.zeros_like(scores), where=sums != 0)
        product, reactant = np.unravel_index(np.argmax(share), share.shape)
        if np.isclose(share[product, reactant], 0):
            break
        reactant_of_product[product] = reactant
        confidences[product] = share[product, reactant]
        product_neighbours = atoms.bonded[split:, split:][product]
        reactant_neighbours = atoms.bonded[:split, :split][reactant]
        scores[np.ix_(product_neighbours, reactant_neighbours)] *= NEIGHBOUR_BOOST
        scores[product] = 0
        scores[:, reactant] = 0
    return Mapping(reactant_of_product, confidences)


def mapped_smiles(reaction: Reaction, mapping: Mapping) -> str:
    """Write the reaction; equal numbers mark the same atom before and after it."""
    split = reaction.num_reactant_atoms
    atoms = reaction.atoms
    numbers = np.zeros(len(atoms.tokens), dtype=int)
    numbers[split:] = np.arange(1, len(numbers) - split + 1)
    found = np.flatnonzero(mapping.reactant_of_product >= 0)
    numbers[mapping.reactant_of_product[found]] = found + 1
    text = list(reaction.tokens)
    for index, hydrogens, number in zip(atoms.tokens, atoms.hydrogens, numbers, strict=True):
        if number:
            text[index] = numbered_atom(text[index], int(hydrogens), int(number))
    return "".join(text)


def numbered_atom(token: str, hydrogens: int, number: int) -> str:
    """("C", 2, 5) -> "[CH2:5]"; an atom in brackets already has its number of hydrogens."""
    if token.startswith("["):
        return f"{token[:-1]}:{number}]"
    count = {0: "", 1: "H"}.get(hydrogens, f"H{hydrogens}")
    return f"[{token}{count}:{number}]"
