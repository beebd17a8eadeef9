"""Does the demo reproduce what was published, and would it say so if it did not?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import albert  # noqa: E402
import array_device  # noqa: E402
import atom_mapping  # noqa: E402
import long_sequence  # noqa: E402
import progress  # noqa: E402
import reactions  # noqa: E402
import rxnmapper_weights  # noqa: E402
from rxnmapper_weights import WHEEL_NAME, Checkpoint, WheelUnavailableError  # noqa: E402

JUDGED = [a for a in atom_mapping.ARITHMETICS if a.allowed is not None]
DOUBLE = next(a for a in JUDGED if a.name == "float64")

# As rxnmapper's own tests print them; a branch that ends a molecule loses its parentheses there.
PUBLISHED_MAPPINGS = {
    "C(C)O.BrC(C)>>CCOCC": "[CH2:2]([CH3:1])[OH:3].Br[CH2:4][CH3:5]"
    ">>[CH3:1][CH2:2][O:3][CH2:4][CH3:5]",
    "CCO.BrCFC>>CCOCFC": "[CH3:1][CH2:2][OH:3].Br[CH2:4][F:5][CH3:6]"
    ">>[CH3:1][CH2:2][O:3][CH2:4][F:5][CH3:6]",
}


@pytest.fixture(scope="session")
def wheel() -> Path:
    try:
        return rxnmapper_weights.obtain_wheel()
    except WheelUnavailableError as error:
        pytest.skip(f"the wheel of rxnmapper is not to be had: {error}")


@pytest.fixture(scope="session")
def checkpoint(wheel: Path) -> Checkpoint:
    return rxnmapper_weights.read_checkpoint(wheel)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a pip that may not ask any index; returns the cache folder."""
    monkeypatch.setattr(rxnmapper_weights, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def confidences(
    checkpoint: Checkpoint, texts: list[str], arithmetic: atom_mapping.Arithmetic = DOUBLE
) -> list[float]:
    batch = [reactions.read_reaction(text) for text in texts]
    mappings, _ = atom_mapping.map_batch(checkpoint, batch, arithmetic, array_device.cpu())
    return [mapping.confidence for mapping in mappings]


# --- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", JUDGED, ids=lambda a: a.name)
def test_published_confidences(checkpoint: Checkpoint, arithmetic: atom_mapping.Arithmetic) -> None:
    found = confidences(checkpoint, list(atom_mapping.PUBLISHED), arithmetic)
    np.testing.assert_allclose(
        found, list(atom_mapping.PUBLISHED.values()), rtol=0, atol=arithmetic.allowed
    )


def test_published_numbers_are_those_of_the_wheel(wheel: Path) -> None:
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        tests = archive.read("tests/test_mapper.py").decode()
    for text, confidence in atom_mapping.PUBLISHED.items():
        assert f'"{text}"' in tests
        assert repr(confidence) in tests
        assert PUBLISHED_MAPPINGS[text] in tests
    for text, confidence in atom_mapping.PUBLISHED_GENERAL.items():
        assert f'"{text}"' in tests
        assert repr(confidence) in tests


def test_published_mappings(checkpoint: Checkpoint) -> None:
    batch = [reactions.read_reaction(text) for text in PUBLISHED_MAPPINGS]
    mappings, _ = atom_mapping.map_batch(checkpoint, batch, DOUBLE, array_device.cpu())

    def chain(text: str) -> str:
        return text.replace("(", "").replace(")", "")

    for reaction, mapping in zip(batch, mappings, strict=True):
        written = reactions.mapped_smiles(reaction, mapping)
        assert chain(written) == chain(PUBLISHED_MAPPINGS[reaction.smiles])


def test_general_smiles_through_rdkit(checkpoint: Checkpoint) -> None:
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    published = atom_mapping.PUBLISHED_GENERAL | {
        # As the tests of rxnmapper write it, with salts held together by a tilde.
        reactions.canonical("CC[O-]~[Na+].BrCC.[Na+]~[H-]>>CCOCC"): 0.9606074439250337,
        "[1*]C=C.O>>*CCO": 0.9988284870307568,
    }
    np.testing.assert_allclose(
        confidences(checkpoint, list(published)), list(published.values()), rtol=0, atol=1e-6
    )


def test_every_layer_attends_through_cuflash(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []
    real = cuflash.attention

    def counted(q: Any, k: Any, v: Any, /, **options: Any) -> Any:
        dtypes.append({q.dtype, k.dtype, v.dtype})
        return real(q, k, v, **options)

    monkeypatch.setattr(cuflash, "attention", counted)
    for arithmetic in atom_mapping.ARITHMETICS:
        dtypes.clear()
        confidences(checkpoint, list(atom_mapping.PUBLISHED), arithmetic)
        assert dtypes == [{np.dtype(arithmetic.attention_dtype)}] * 12


def test_the_definition_of_attention_gives_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list(atom_mapping.PUBLISHED)
    tiled = confidences(checkpoint, texts)

    def defined(q: Any, k: Any, v: Any, /, *, out: Any, **options: Any) -> None:
        result = cuflash.reference.attention(q, k, v, **options)
        out[0][...], out[1][...] = result.out, result.lse

    monkeypatch.setattr(cuflash, "attention", defined)
    np.testing.assert_allclose(confidences(checkpoint, texts), tiled, rtol=1e-12)


def test_a_batch_maps_as_its_reactions_do_alone(checkpoint: Checkpoint) -> None:
    texts = ["CO>>CO", *atom_mapping.PUBLISHED, "CCCCCCCCCCCCO.BrC>>CCCCCCCCCCCCOC"]
    alone = [confidences(checkpoint, [text])[0] for text in texts]
    np.testing.assert_allclose(confidences(checkpoint, texts), alone, rtol=1e-12)


def test_what_stands_in_the_padding_has_no_effect(checkpoint: Checkpoint) -> None:
    model = albert.Albert(checkpoint.config, checkpoint.tensors)
    batch = [reactions.read_reaction(text) for text in ("CO>>CO", "CCCO.BrC>>CCCOC")]
    token_ids, lengths = atom_mapping.token_batch(checkpoint.vocabulary, batch, 512)
    hidden, _ = model.encode(token_ids, lengths, atom_mapping.LAYER)
    token_ids[0, lengths[0] :] = 100
    other, _ = model.encode(token_ids, lengths, atom_mapping.LAYER)
    np.testing.assert_array_equal(hidden[0, : lengths[0]], other[0, : lengths[0]])
    assert (hidden[0, lengths[0] :] != other[0, lengths[0] :]).any()


def test_two_float16_parts_add_up(checkpoint: Checkpoint) -> None:
    model = albert.Albert(checkpoint.config, checkpoint.tensors, attention_dtype=np.float16)
    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    leading, rest = model.two_parts(x)
    assert leading.dtype == rest.dtype == np.float16
    np.testing.assert_allclose(leading.astype(np.float64) + rest, x, rtol=2.0**-21, atol=2.0**-24)


def attention_with_float16_weights(reference_off_by: float) -> Any:
    """A kernel's arithmetic, exact but for weights that a product of float16 takes rounded.

    They are relative to a reference that need not be the row's largest score: what is one weight
    of 1 to a reference that follows every maximum is here rounded, too.
    """

    def attention(q: Any, k: Any, v: Any, /, *, options: Any, out: Any, **_: Any) -> None:
        wide_q, wide_k, wide_v = (np.moveaxis(x.astype(np.float64), 1, 2) for x in (q, k, v))
        scores = options.scale * wide_q @ np.swapaxes(wide_k, -1, -2)
        hidden = np.arange(k.shape[1]) >= np.asarray(options.kv_lengths)[..., None, None]
        scores = np.where(hidden, -np.inf, scores)
        reference = scores.max(-1, keepdims=True) + reference_off_by
        p = np.exp(scores - reference)
        total = p.sum(-1, keepdims=True)
        rounded = p.astype(np.float16).astype(np.float64)
        out[0][...] = np.moveaxis(rounded @ wide_v / total, 1, 2)
        out[1][...] = (reference + np.log(total))[..., 0]

    return attention


@pytest.mark.parametrize("reference_off_by", [0.0, 0.2, 0.37, -0.09, -0.2, 0.27])
def test_two_parts_leave_room_for_weights_in_float16(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, reference_off_by: float
) -> None:
    """Whatever reference a kernel keeps, it may round its weights: what is allowed is fair."""
    [arithmetic] = [a for a in JUDGED if a.operand_parts == 2]
    monkeypatch.setattr(cuflash, "attention", attention_with_float16_weights(reference_off_by))
    test_published_confidences(checkpoint, arithmetic)


def test_rounding_operands_alone_moves_a_confidence_farther(checkpoint: Checkpoint) -> None:
    """Plain float16 cannot be judged by what is allowed: exact attention would fail."""
    [exact] = [a for a in atom_mapping.ARITHMETICS if a.name == "float16 exact"]
    published = np.array(list(atom_mapping.PUBLISHED.values()))
    farthest = 0.0
    for one_unit in (0, 1e-7, -1e-7):
        bent = Checkpoint(
            checkpoint.config, checkpoint.vocabulary,
            {name: x * np.float32(1 + one_unit) for name, x in checkpoint.tensors.items()},
        )  # fmt: skip
        found = confidences(bent, list(atom_mapping.PUBLISHED), exact)
        farthest = max(farthest, float(abs(found - published).max()))
    assert 2e-5 < farthest < 1e-3


def test_too_long_reactions_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="1006 tokens, the model reads 512"):
        confidences(checkpoint, ["C" * 501 + ">>" + "C" * 502])


# --- the wheel ---------------------------------------------------------------------------------


def test_a_missing_download_is_one_line(no_network: Path) -> None:
    with pytest.raises(WheelUnavailableError) as caught:
        rxnmapper_weights.obtain_wheel()
    assert "rxnmapper" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pip_that_does_not_answer(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*args: Any, timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired("pip", timeout)

    monkeypatch.setattr(subprocess, "run", silent)
    with pytest.raises(WheelUnavailableError, match="no answer"):
        rxnmapper_weights.obtain_wheel()


def test_a_cache_that_cannot_be_made(no_network: Path) -> None:
    no_network.write_text("a file where the folder would be")
    with pytest.raises(WheelUnavailableError):
        rxnmapper_weights.obtain_wheel()


def test_a_broken_file_in_the_cache_is_replaced(
    wheel: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = no_network / WHEEL_NAME
    no_network.mkdir()
    cached.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(WheelUnavailableError):
        rxnmapper_weights.obtain_wheel()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert rxnmapper_weights.obtain_wheel() == cached
    assert cached.read_bytes() == wheel.read_bytes()


def test_a_given_wheel_is_checked_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / WHEEL_NAME
    path.write_bytes(b"PK")
    with pytest.raises(WheelUnavailableError, match="pinned sha256"):
        rxnmapper_weights.obtain_wheel(path)
    assert path.read_bytes() == b"PK"


# --- reactions ---------------------------------------------------------------------------------


def test_tokens() -> None:
    smiles = "[Na+]~[OH-].BrC(Cl)=C/[C@@H](c1ccn(C)c%101)>>C#N"
    assert reactions.tokenise(smiles) == [
        *("[Na+]", "~", "[OH-]", ".", "Br", "C", "(", "Cl", ")", "=", "C", "/", "[C@@H]"),
        *("(", "c", "1", "c", "c", "n", "(", "C", ")", "c", "%10", "1", ")", ">>", "C", "#", "N"),
    ]
    for wrong in ("CCO", "C>>C>>C", "C!>>C", "C>>C "):
        with pytest.raises(ValueError, match=r"SMILES|reaction"):
            reactions.tokenise(wrong)


def test_small_reader() -> None:
    atoms = reactions.read_reaction("CC(F)(C)O.Br>>C").atoms
    assert atoms.elements.tolist() == ["C", "C", "F", "C", "O", "Br", "C"]
    assert atoms.hydrogens.tolist() == [3, 0, 0, 3, 1, 1, 4]
    bonds = {(int(a), int(b)) for a, b in np.argwhere(atoms.bonded) if a < b}
    assert bonds == {(0, 1), (1, 2), (1, 3), (1, 4)}
    with pytest.raises(ValueError, match="never opened"):
        reactions.read_reaction("C)C>>C")


def test_general_smiles_without_rdkit_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(ImportError, match=r"cuflash\[demo\]"):
        reactions.read_reaction("c1ccccc1>>C")


def random_chain(rng: np.random.Generator) -> str:
    text = ""
    for _ in range(rng.integers(1, 6)):
        text += rng.choice(["C", "O", "C(C)", "C(OC)", "C(C(F)Br)", "C(C)(C)"])
    return text + "C"


def test_small_reader_agrees_with_rdkit() -> None:
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = reactions.tokenise(f"{random_chain(rng)}.{random_chain(rng)}>>{random_chain(rng)}")
        small, rdkit = reactions.atoms_of_chains(tokens), reactions.atoms_by_rdkit(tokens)
        for name in ("tokens", "elements", "hydrogens", "bonded"):
            np.testing.assert_array_equal(getattr(small, name), getattr(rdkit, name))


def test_canonical_reactions() -> None:
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    assert reactions.canonical("OCC.C(C)[Br:3]>[Na+]~[H-]>CCOCC") == "CCBr.CCO.[H-]~[Na+]>>CCOCC"
    with pytest.raises(ValueError, match="impossible"):
        reactions.canonical("C(C)(C)(C)(C)C>>C")
    with pytest.raises(ValueError, match="not a reaction"):
        reactions.canonical("CCO")


def test_pairs_by_hand() -> None:
    """The clear pair goes first and settles, through its neighbours, the pair that is not."""
    reaction = reactions.read_reaction("CO.CBr>>OC")
    attention = np.array([[9.0, 1.0, 9.0, 9.0], [0.3, 9.0, 0.6, 9.0]])
    mapping = reactions.map_atoms(reaction, attention)
    assert mapping.reactant_of_product.tolist() == [1, 0]
    # O sees one O. C then sees 90 times 0.3 against 0.6.
    np.testing.assert_allclose(mapping.confidences, [1, 27 / 27.6])
    assert reactions.mapped_smiles(reaction, mapping) == "[CH3:2][OH:1].CBr>>[OH:1][CH3:2]"


def test_atoms_out_of_nothing_stay_unpaired() -> None:
    reaction = reactions.read_reaction("CBr>>CO")
    mapping = reactions.map_atoms(reaction, np.ones((2, 2)))
    assert mapping.reactant_of_product.tolist() == [0, -1]
    assert mapping.confidence == 1
    assert reactions.mapped_smiles(reaction, mapping) == "[CH3:1]Br>>[CH3:1][OH:2]"


# --- the long sequence -------------------------------------------------------------------------


def long_inputs(seqlen: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, seqlen, 32)).astype(dtype) for _ in range(4)]


def test_unfused_is_the_definition() -> None:
    q, k, v, dout = long_inputs(96, np.float64)
    out, lse = cuflash.reference.attention(q, k, v, causal=True, return_lse=True)
    grads = cuflash.reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    wanted = {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    for name, array in long_sequence.unfused(q, k, v, dout).items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-10, atol=1e-12)


def test_checked_rows_are_those_of_the_whole() -> None:
    inputs = long_inputs(96)
    errors = long_sequence.row_errors(np, long_sequence.unfused(*inputs), inputs)
    assert max(errors.values()) < long_sequence.agreement(np.float32, 96)


def test_bfloat16_agrees_on_the_checked_rows() -> None:
    inputs = long_inputs(512, ml_dtypes.bfloat16)
    errors = long_sequence.row_errors(np, long_sequence.fused(*inputs), inputs)
    assert max(errors.values()) < long_sequence.agreement(ml_dtypes.bfloat16, 512)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_wrong_result_is_noticed(name: str, dtype: Any) -> None:
    inputs = long_inputs(512, dtype)
    arrays = long_sequence.fused(*inputs)
    arrays[name] = (arrays[name].astype(np.float32) * 1.03).astype(dtype)
    errors = long_sequence.row_errors(np, arrays, inputs)
    assert errors[name] > long_sequence.agreement(dtype, 512)


def test_a_wrong_diagonal_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert long_sequence.show_on_cpu(quick=True)

    def shifted(q: Any, k: Any, v: Any, dout: Any) -> dict[str, Any]:
        out, pullback = cuflash.attention_vjp(q, k, v, causal=True, offset=1)
        grads = pullback(dout)
        return {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    monkeypatch.setattr(long_sequence, "fused", shifted)
    assert not long_sequence.show_on_cpu(quick=True)


def test_peak_memory_counts_arrays() -> None:
    def compute(x: np.ndarray) -> dict[str, np.ndarray]:
        return {"out": np.concatenate([x, x])[::2].copy()}

    run = long_sequence.measure_on_cpu(compute, np.zeros(2**20, np.uint8))
    assert 3 * 2**20 <= run.peak_bytes < 3.1 * 2**20


# --- the command -------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "atom_mapping.py"), "--quick", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--wheel", str(wheel)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok\n") >= 2 * len(JUDGED)
    assert PUBLISHED_MAPPINGS["CCO.BrCFC>>CCOCFC"] in done.stdout
    assert "everything checked agrees" in done.stdout


def test_offline_it_says_so_and_runs_the_long_sequence(
    no_network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atom_mapping.main(["--quick", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    [line] = [line for line in output.splitlines() if "no trained model to be had" in line]
    assert "rxnmapper" in line
    assert "largest difference of the two" in output


@pytest.mark.long
def test_other_weights_are_not_taken_for_the_published_ones(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = rxnmapper_weights.read_checkpoint

    def bent(path: Path) -> Checkpoint:
        checkpoint = read(path)
        name = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.key.weight"
        return Checkpoint(
            checkpoint.config,
            checkpoint.vocabulary,
            checkpoint.tensors | {name: checkpoint.tensors[name] * np.float32(1.01)},
        )

    monkeypatch.setattr(rxnmapper_weights, "read_checkpoint", bent)
    assert atom_mapping.main(["--quick", "--device", "cpu", "--wheel", str(wheel)]) == 1
    output = capsys.readouterr().out
    assert "NOT REPRODUCED" in output
    assert "NOT EVERYTHING AGREES" in output


def test_an_arithmetic_that_cannot_run_is_skipped_in_words(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cuflash.attention

    def only_float16(q: Any, k: Any, v: Any, /, **options: Any) -> Any:
        if q.dtype == np.float64:
            raise NotImplementedError("no float64 kernel")
        return real(q, k, v, **options)

    monkeypatch.setattr(cuflash, "attention", only_float16)
    arguments = ["--quick", "--device", "cpu", "--wheel", str(wheel)]
    assert atom_mapping.main(arguments) == 0
    output = capsys.readouterr().out
    assert "skipped   float64: no float64 kernel" in output
    assert "float32       0.97" in output
    assert atom_mapping.main([*arguments, "--dtype", "float64"]) == 1


def test_no_gpu_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "no GPU: CuPy is not installed" in array_device.choose_device("auto").description
    assert atom_mapping.main(["--device", "gpu"]) == 2
    assert capsys.readouterr().err == "error: CuPy is not installed\n"


@pytest.mark.gpu
@pytest.mark.parametrize("general", [False, True], ids=["chains", "general"])
@pytest.mark.parametrize("arithmetic", JUDGED, ids=lambda a: a.name)
def test_the_model_on_a_gpu(
    checkpoint: Checkpoint, arithmetic: atom_mapping.Arithmetic, general: bool
) -> None:
    if general:
        pytest.importorskip("rdkit", reason="RDKit is not installed")
    published = atom_mapping.PUBLISHED_GENERAL if general else atom_mapping.PUBLISHED
    batch = [reactions.read_reaction(text) for text in published]
    mappings, _ = atom_mapping.map_batch(checkpoint, batch, arithmetic, array_device.gpu())
    np.testing.assert_allclose(
        [mapping.confidence for mapping in mappings],
        list(published.values()),
        rtol=0,
        atol=arithmetic.allowed,
    )


@pytest.mark.gpu
@pytest.mark.own_memory
def test_the_long_sequence_on_a_gpu() -> None:
    assert long_sequence.show_on_gpu(array_device.gpu().xp, quick=True)


# --- progress ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_a_sign_of_life_comes_when_it_takes_long(
    with_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if with_tqdm:
        pytest.importorskip("tqdm", reason="tqdm is not installed")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress.sign_of_life("waiting", quiet_seconds=0.01):
        time.sleep(0.3)
    assert "waiting" in capsys.readouterr().err
    with progress.sign_of_life("waiting", quiet_seconds=60):
        pass
    assert capsys.readouterr().err == ""
