"""Does the demo reproduce published results, and would it say so if it did not?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import albert
import array_device
import atom_mapping
import long_sequence
import ml_dtypes
import numpy as np
import progress
import pytest
import reactions
import rxnmapper_weights
from rxnmapper_weights import WHEEL_NAME, Checkpoint, WheelUnavailableError

import cuflash

ROOT = Path(__file__).resolve().parents[1]

JUDGED = [a for a in atom_mapping.ARITHMETICS if a.allowed is not None]
DOUBLE = next(a for a in JUDGED if a.name == "float64")

NO_BRANCHES = str.maketrans("", "", "()")
# As rxnmapper's own tests print them. A branch that ends a molecule loses its parentheses there.
PUBLISHED_MAPPINGS = {
    "C(C)O.BrC(C)>>CCOCC": "[CH2:2]([CH3:1])[OH:3].Br[CH2:4][CH3:5]"
    ">>[CH3:1][CH2:2][O:3][CH2:4][CH3:5]",
    "CCO.BrCFC>>CCOCFC": "[CH3:1][CH2:2][OH:3].Br[CH2:4][F:5][CH3:6]"
    ">>[CH3:1][CH2:2][O:3][CH2:4][F:5][CH3:6]",
}


@pytest.fixture(scope="session")
def wheel():
    try:
        return rxnmapper_weights.obtain_wheel()
    except WheelUnavailableError as error:
        pytest.skip(f"the wheel of rxnmapper is not to be had: {error}")


@pytest.fixture(scope="session")
def checkpoint(wheel):
    return rxnmapper_weights.read_checkpoint(wheel)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Return an empty cache folder, and keep pip from asking any index."""
    monkeypatch.setattr(rxnmapper_weights, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def confidences(checkpoint, texts, arithmetic=DOUBLE, device=None):
    batch = [reactions.read_reaction(text) for text in texts]
    device = device or array_device.cpu()
    mappings, _ = atom_mapping.map_batch(checkpoint, batch, arithmetic, device)
    return [mapping.confidence for mapping in mappings]


def assert_published(checkpoint, published, arithmetic=DOUBLE, device=None):
    np.testing.assert_allclose(
        confidences(checkpoint, list(published), arithmetic, device), list(published.values()),
        rtol=0, atol=arithmetic.allowed,
    )  # fmt: skip


# --- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", JUDGED, ids=lambda a: a.name)
def test_published_confidences(checkpoint, arithmetic):
    assert_published(checkpoint, atom_mapping.PUBLISHED, arithmetic)


def test_published_numbers_are_those_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tests = archive.read("tests/test_mapper.py").decode()
    for text, confidence in (atom_mapping.PUBLISHED | atom_mapping.PUBLISHED_GENERAL).items():
        assert f'"{text}"' in tests
        assert repr(confidence) in tests
        assert PUBLISHED_MAPPINGS.get(text, "") in tests


def test_published_mappings(checkpoint):
    batch = [reactions.read_reaction(text) for text in PUBLISHED_MAPPINGS]
    mappings, _ = atom_mapping.map_batch(checkpoint, batch, DOUBLE, array_device.cpu())
    for reaction, mapping in zip(batch, mappings, strict=True):
        written = reactions.mapped_smiles(reaction, mapping)
        published = PUBLISHED_MAPPINGS[reaction.smiles]
        assert written.translate(NO_BRANCHES) == published.translate(NO_BRANCHES)


def test_general_smiles_through_rdkit(checkpoint):
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    # As rxnmapper's tests write it, with salts held together by a tilde.
    salts = reactions.canonical("CC[O-]~[Na+].BrCC.[Na+]~[H-]>>CCOCC")
    more = {salts: 0.9606074439250337, "[1*]C=C.O>>*CCO": 0.9988284870307568}
    assert_published(checkpoint, atom_mapping.PUBLISHED_GENERAL | more)


def test_every_layer_attends_through_cuflash(checkpoint, monkeypatch):
    dtypes = []
    real = cuflash.attention

    def counted(q, k, v, /, **options):
        dtypes.append({q.dtype, k.dtype, v.dtype})
        return real(q, k, v, **options)

    monkeypatch.setattr(cuflash, "attention", counted)
    for arithmetic in atom_mapping.ARITHMETICS:
        dtypes.clear()
        confidences(checkpoint, list(atom_mapping.PUBLISHED), arithmetic)
        assert dtypes == [{np.dtype(arithmetic.attention_dtype)}] * 12


def test_the_definition_of_attention_gives_the_same(checkpoint, monkeypatch):
    texts = list(atom_mapping.PUBLISHED)
    tiled = confidences(checkpoint, texts)

    def defined(q, k, v, /, *, out, **options):
        result = cuflash.reference.attention(q, k, v, **options)
        out[0][...], out[1][...] = result.out, result.lse

    monkeypatch.setattr(cuflash, "attention", defined)
    np.testing.assert_allclose(confidences(checkpoint, texts), tiled, rtol=1e-12)


def test_a_batch_maps_as_its_reactions_do_alone(checkpoint):
    texts = ["CO>>CO", *atom_mapping.PUBLISHED, "CCCCCCCCCCCCO.BrC>>CCCCCCCCCCCCOC"]
    alone = [confidences(checkpoint, [text])[0] for text in texts]
    np.testing.assert_allclose(confidences(checkpoint, texts), alone, rtol=1e-12)


def test_what_stands_in_the_padding_has_no_effect(checkpoint):
    model = albert.Albert(checkpoint.config, checkpoint.tensors)
    batch = [reactions.read_reaction(text) for text in ("CO>>CO", "CCCO.BrC>>CCCOC")]
    token_ids, lengths = atom_mapping.token_batch(checkpoint.vocabulary, batch, 512)
    hidden, _ = model.encode(token_ids, lengths, atom_mapping.LAYER)
    token_ids[0, lengths[0] :] = 100
    other, _ = model.encode(token_ids, lengths, atom_mapping.LAYER)
    np.testing.assert_array_equal(hidden[0, : lengths[0]], other[0, : lengths[0]])
    assert (hidden[0, lengths[0] :] != other[0, lengths[0] :]).any()


def test_two_float16_parts_add_up(checkpoint):
    model = albert.Albert(checkpoint.config, checkpoint.tensors, attention_dtype=np.float16)
    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    leading, rest = model.two_parts(x)
    assert leading.dtype == rest.dtype == np.float16
    np.testing.assert_allclose(leading.astype(np.float64) + rest, x, rtol=2.0**-21, atol=2.0**-24)


def attention_with_float16_weights(reference_off_by):
    """Return exact attention whose weights are rounded to float16, as in a kernel.

    The reference of a row may differ from its largest score by ``reference_off_by``. A weight that
    is exactly 1 relative to the row's maximum is then rounded, too.
    """

    def attention(q, k, v, /, *, options, out, **_):
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
def test_two_parts_leave_room_for_weights_in_float16(checkpoint, monkeypatch, reference_off_by):
    """The tolerance allows weights rounded to float16, whichever reference a kernel keeps."""
    [arithmetic] = [a for a in JUDGED if a.operand_parts == 2]
    monkeypatch.setattr(cuflash, "attention", attention_with_float16_weights(reference_off_by))
    test_published_confidences(checkpoint, arithmetic)


def test_rounding_operands_alone_moves_a_confidence_farther(checkpoint):
    """Rounding operands to float16 exceeds the tolerance even in exact attention."""
    [exact] = [a for a in atom_mapping.ARITHMETICS if a.name == "float16 exact"]
    published, farthest = np.array(list(atom_mapping.PUBLISHED.values())), 0.0
    for one_unit in (0, 1e-7, -1e-7):
        bent = {name: x * np.float32(1 + one_unit) for name, x in checkpoint.tensors.items()}
        other = Checkpoint(checkpoint.config, checkpoint.vocabulary, bent)
        found = confidences(other, list(atom_mapping.PUBLISHED), exact)
        farthest = max(farthest, float(abs(found - published).max()))
    assert 2e-5 < farthest < 1e-3


def test_too_long_reactions_are_refused(checkpoint):
    with pytest.raises(ValueError, match="1006 tokens, the model reads 512"):
        confidences(checkpoint, ["C" * 501 + ">>" + "C" * 502])


# --- the wheel ---------------------------------------------------------------------------------


def test_a_missing_download_is_one_line(no_network, monkeypatch):
    with pytest.raises(WheelUnavailableError, match="rxnmapper") as caught:
        rxnmapper_weights.obtain_wheel()
    assert "\n" not in str(caught.value)

    def silent(*args, timeout, **options):
        raise subprocess.TimeoutExpired("pip", timeout)

    monkeypatch.setattr(subprocess, "run", silent)
    with pytest.raises(WheelUnavailableError, match="no answer"):
        rxnmapper_weights.obtain_wheel()


def test_a_broken_file_in_the_cache_is_replaced_and_a_given_one_refused(
    wheel, no_network, monkeypatch
):
    cached = no_network / WHEEL_NAME
    no_network.mkdir()
    cached.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(WheelUnavailableError, match="pinned sha256"):
        rxnmapper_weights.obtain_wheel(cached)
    assert cached.exists()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert rxnmapper_weights.obtain_wheel() == cached
    assert cached.read_bytes() == wheel.read_bytes()


# --- reactions ---------------------------------------------------------------------------------


def test_tokens():
    smiles = "[Na+]~[OH-].BrC(Cl)=C/[C@@H](c1ccn(C)c%101)>>C#N"
    assert reactions.tokenise(smiles) == [
        *("[Na+]", "~", "[OH-]", ".", "Br", "C", "(", "Cl", ")", "=", "C", "/", "[C@@H]"),
        *("(", "c", "1", "c", "c", "n", "(", "C", ")", "c", "%10", "1", ")", ">>", "C", "#", "N"),
    ]
    for wrong in ("CCO", "C>>C>>C", "C!>>C", "C>>C "):
        with pytest.raises(ValueError, match=r"SMILES|reaction"):
            reactions.tokenise(wrong)


def test_small_reader():
    atoms = reactions.read_reaction("CC(F)(C)O.Br>>C").atoms
    assert atoms.elements.tolist() == ["C", "C", "F", "C", "O", "Br", "C"]
    assert atoms.hydrogens.tolist() == [3, 0, 0, 3, 1, 1, 4]
    bonds = {(int(a), int(b)) for a, b in np.argwhere(atoms.bonded) if a < b}
    assert bonds == {(0, 1), (1, 2), (1, 3), (1, 4)}
    with pytest.raises(ValueError, match="never opened"):
        reactions.read_reaction("C)C>>C")


def test_general_smiles_without_rdkit_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(ImportError, match=r"cuflash\[demo\]"):
        reactions.read_reaction("c1ccccc1>>C")


def random_chain(rng):
    parts = rng.choice(["C", "O", "C(C)", "C(OC)", "C(C(F)Br)", "C(C)(C)"], rng.integers(1, 6))
    return "".join(parts) + "C"


def test_small_reader_agrees_with_rdkit():
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = reactions.tokenise(f"{random_chain(rng)}.{random_chain(rng)}>>{random_chain(rng)}")
        small, rdkit = reactions.atoms_of_chains(tokens), reactions.atoms_by_rdkit(tokens)
        for name in ("tokens", "elements", "hydrogens", "bonded"):
            np.testing.assert_array_equal(getattr(small, name), getattr(rdkit, name))


def test_canonical_reactions():
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    assert reactions.canonical("OCC.C(C)[Br:3]>[Na+]~[H-]>CCOCC") == "CCBr.CCO.[H-]~[Na+]>>CCOCC"
    for wrong, why in (("C(C)(C)(C)(C)C>>C", "impossible"), ("CCO", "not a reaction")):
        with pytest.raises(ValueError, match=why):
            reactions.canonical(wrong)


def test_pairs_by_hand():
    """The clear pair is matched first; its neighbours then decide the pair that is not clear."""
    reaction = reactions.read_reaction("CO.CBr>>OC")
    attention = np.array([[9.0, 1.0, 9.0, 9.0], [0.3, 9.0, 0.6, 9.0]])
    mapping = reactions.map_atoms(reaction, attention)
    assert mapping.reactant_of_product.tolist() == [1, 0]
    # O sees one O. C then sees 90 times 0.3 against 0.6.
    np.testing.assert_allclose(mapping.confidences, [1, 27 / 27.6])
    assert reactions.mapped_smiles(reaction, mapping) == "[CH3:2][OH:1].CBr>>[OH:1][CH3:2]"


def test_atoms_out_of_nothing_stay_unpaired():
    reaction = reactions.read_reaction("CBr>>CO")
    mapping = reactions.map_atoms(reaction, np.ones((2, 2)))
    assert mapping.reactant_of_product.tolist() == [0, -1]
    assert mapping.confidence == 1
    assert reactions.mapped_smiles(reaction, mapping) == "[CH3:1]Br>>[CH3:1][OH:2]"


# --- the long sequence -------------------------------------------------------------------------


def long_inputs(seqlen, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, seqlen, 32)).astype(dtype) for _ in range(4)]


def test_unfused_is_the_definition():
    q, k, v, dout = long_inputs(96, np.float64)
    out, lse = cuflash.reference.attention(q, k, v, causal=True, return_lse=True)
    grads = cuflash.reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    wanted = {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    for name, array in long_sequence.unfused(q, k, v, dout).items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-10, atol=1e-12)


def test_checked_rows_are_those_of_the_whole():
    for dtype, seqlen, compute in (
        (np.float32, 96, long_sequence.unfused), (ml_dtypes.bfloat16, 512, long_sequence.fused)
    ):  # fmt: skip
        inputs = long_inputs(seqlen, dtype)
        errors = long_sequence.row_errors(np, compute(*inputs), inputs)
        assert max(errors.values()) < long_sequence.agreement(dtype, seqlen)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_wrong_result_is_noticed(name, dtype):
    inputs = long_inputs(512, dtype)
    arrays = long_sequence.fused(*inputs)
    arrays[name] = (arrays[name].astype(np.float32) * 1.03).astype(dtype)
    errors = long_sequence.row_errors(np, arrays, inputs)
    assert errors[name] > long_sequence.agreement(dtype, 512)


def test_a_wrong_diagonal_is_noticed(monkeypatch, capsys):
    assert long_sequence.show_on_cpu(quick=True)

    def shifted(q, k, v, dout):
        out, pullback = cuflash.attention_vjp(q, k, v, causal=True, offset=1)
        grads = pullback(dout)
        return {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    monkeypatch.setattr(long_sequence, "fused", shifted)
    assert not long_sequence.show_on_cpu(quick=True)


def test_peak_memory_counts_arrays():
    def compute(x):
        return {"out": np.concatenate([x, x])[::2].copy()}

    run = long_sequence.measure_on_cpu(compute, np.zeros(2**20, np.uint8))
    assert 3 * 2**20 <= run.peak_bytes < 3.1 * 2**20


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def program(wheel, capsys):
    """Run the demo on a CPU; return its status and output."""

    def run(*more):
        status = atom_mapping.main(["--quick", "--device", "cpu", "--wheel", str(wheel), *more])
        return status, capsys.readouterr().out

    return run


@pytest.mark.long
def test_the_command(wheel, tmp_path):
    script = str(ROOT / "examples" / "atom_mapping.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--device", "cpu", "--wheel", str(wheel)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok\n") >= 2 * len(JUDGED)
    assert PUBLISHED_MAPPINGS["CCO.BrCFC>>CCOCFC"] in done.stdout
    assert "everything checked agrees" in done.stdout


def test_offline_it_says_so_and_runs_the_long_sequence(no_network, capsys):
    assert atom_mapping.main(["--quick", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    [line] = [line for line in output.splitlines() if "no trained model to be had" in line]
    assert "rxnmapper" in line
    assert "largest difference of the two" in output


@pytest.mark.long
def test_other_weights_are_not_taken_for_the_published_ones(program, checkpoint, monkeypatch):
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.key.weight"
    bent = checkpoint.tensors | {name: checkpoint.tensors[name] * np.float32(1.01)}
    other = Checkpoint(checkpoint.config, checkpoint.vocabulary, bent)
    monkeypatch.setattr(rxnmapper_weights, "read_checkpoint", lambda path: other)
    status, output = program()
    assert status == 1
    assert "NOT REPRODUCED" in output
    assert "NOT EVERYTHING AGREES" in output


def test_an_arithmetic_that_cannot_run_is_skipped_in_words(program, monkeypatch):
    real = cuflash.attention

    def no_float64(q, k, v, /, **options):
        if q.dtype == np.float64:
            raise NotImplementedError("no float64 kernel")
        return real(q, k, v, **options)

    monkeypatch.setattr(cuflash, "attention", no_float64)
    status, output = program()
    assert status == 0
    assert "skipped   float64: no float64 kernel" in output
    assert program("--dtype", "float64")[0] == 1


def test_no_gpu_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "no GPU: CuPy is not installed" in array_device.choose_device("auto").description
    assert atom_mapping.main(["--device", "gpu"]) == 2
    assert capsys.readouterr().err == "error: CuPy is not installed\n"


@pytest.mark.gpu
@pytest.mark.parametrize("general", [False, True], ids=["chains", "general"])
@pytest.mark.parametrize("arithmetic", JUDGED, ids=lambda a: a.name)
def test_the_model_on_a_gpu(checkpoint, arithmetic, general):
    if general:
        pytest.importorskip("rdkit", reason="RDKit is not installed")
    published = atom_mapping.PUBLISHED_GENERAL if general else atom_mapping.PUBLISHED
    assert_published(checkpoint, published, arithmetic, array_device.gpu())


@pytest.mark.gpu
@pytest.mark.own_memory
def test_the_long_sequence_on_a_gpu():
    assert long_sequence.show_on_gpu(array_device.gpu().xp, quick=True)


@pytest.mark.parametrize("tqdm", ["tqdm", "its absence"])
def test_a_sign_of_life_comes_when_it_takes_long(tqdm, monkeypatch, capsys):
    if tqdm != "tqdm":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    cases = [(60, True, False), (0.01, True, True), (0.01, False, False)]
    for quiet_seconds, terminal, said in cases:
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress.sign_of_life("waiting", quiet_seconds):
            time.sleep(0.3 * (quiet_seconds < 1))
        assert ("waiting" in capsys.readouterr().err) == said
