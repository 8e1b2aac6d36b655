"""What `bench/decode.py` times is what it says; the reference's process is played by one without torch."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util

import statecore as sc
from bench import decode, decode_own
from bench.decode_folder import file_shapes, write_folder
from bench.decode_link import Peer, PeerCase, PeerError, compare_across
from bench.decode_memory import is_known, measure_load_apart
from bench.decode_shapes import SHAPES
from bench.harness import Case, Fact
from statecore.models.families import FAMILIES, Source
from statecore.models.families._sources import matrix, plain, taps, vector

# Answers as `decode_peer.py` does, with logits that are all the same.
_STAND_IN = """
import json, sys
import numpy as np
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "leave":
        sys.exit(3)
    if request.get("file"):
        np.save(request["file"], np.full((request["keep"] or len(request["ids"]), 96), float(sys.argv[1]), np.float32))
    print("nothing" if request["do"] == "babble" else json.dumps({"seconds": 0.5, "asked": request}), flush=True)
"""
_TINY = {
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16},
    "llama": {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1},
}


def tiny_shape(name: str):
    """Returns a shape of the table, cut down in every size."""
    shape = SHAPES[name]
    config = shape.config | _TINY[shape.family] | {"vocab_size": 96}
    return dataclasses.replace(shape, num_layers=2, config=config)


@pytest.fixture
def bed(tmp_path, monkeypatch):
    """A tiny model on a warm state."""
    for constant, size in (("NUM_PREFIX", 5), ("NUM_WINDOW", 3), ("NUM_PROMPT", 7), ("CAPACITY", 16)):
        monkeypatch.setattr(decode_own, constant, size)
    write_folder(tiny_shape("Mamba2-130M").full_config(), tmp_path)
    return decode_own.load_bed(tmp_path, decode_own.make_texts(96))


def stand_in(value: float = 0.0) -> Peer:
    return Peer([sys.executable, "-c", _STAND_IN, str(value)])


def test_shapes_have_the_sizes_they_are_named_for():
    for shape in SHAPES.values():
        if shape.family not in FAMILIES:
            continue
        _, params = sc.default_registry().lookup(shape.full_config()).describe()
        assert 125e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 150e6, shape.name
        assert shape.quick().full_config()["num_hidden_layers"] == shape.quick_layers


def test_hybrids_keep_each_kind_of_layer_when_cut_down():
    bamba = SHAPES["Bamba-130M"].quick()
    assert 0 < len(bamba.full_config()["attn_layer_indices"]) < bamba.num_layers
    assert set(SHAPES["Qwen3-Next-130M"].quick().full_config()["layer_types"]) == {
        "linear_attention",
        "full_attention",
    }


@pytest.mark.parametrize("name", ["Mamba2-130M", "SmolLM2-135M"])
def test_a_folder_of_random_weights_loads(name, tmp_path):
    """And is a model of the shape, whose logits are of a size that shows differences."""
    write_folder(tiny_shape(name).full_config(), tmp_path)
    model = sc.load(tmp_path, progress=False)
    assert model.name == SHAPES[name].family and model.params["layers"].keys() == {"layer_0", "layer_1"}
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(model.params))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_a_file_of_each_shape_can_be_made(shape):
    config = shape.quick().full_config()
    family = FAMILIES[config["model_type"]]
    decoder = family.decoder(config)
    wanted = traverse_util.flatten_dict(decoder.params, sep=".")
    for path, source in family.tensors(decoder).items():
        assert len(file_shapes(source, wanted[path].shape)) == len(source.names)


def test_shapes_of_a_file_are_found_for_each_way_to_build():
    ways = {
        plain("a"): ((3, 4), [(3, 4)]),
        matrix("a"): ((3, 4), [(4, 3)]),
        taps("a"): ((3, 4), [(4, 1, 3)]),
        vector("a", "b"): ((5,), [(3,), (2,)]),
        matrix("a", "b"): ((3, 5), [(3, 3), (2, 3)]),
    }
    for source, (shape, found) in ways.items():
        assert file_shapes(source, shape) == found
    odd = Source(names=("a",), build=lambda xp, array: array.reshape(-1)[:1])
    with pytest.raises(NotImplementedError, match="a were found"):
        file_shapes(odd, (3, 4))


def test_each_case_advances_a_copy_of_the_warm_state(bed):
    for case, length in ((bed.step(), 6), (bed.extend(), 8), (bed.verify(), 5), (bed.prefill(), 7)):
        for _ in range(2):
            state, logits, *_ = decode_own.leaves(case.call(case.setup()))
            assert state["position"].tolist() == [length] and bool(jnp.isfinite(logits).all())
    assert bed.state["position"].tolist() == [5]


def test_the_products_use_every_matrix_in_full(bed):
    """A matrix that is multiplied by only in part would make the chain cheaper than the model."""
    params = bed.model.params
    x = jnp.ones((1, 1, 32))
    gradient = jax.grad(lambda params: jnp.square(decode_own.multiply_all(params, x)).sum())(params)
    factors = [leaf for leaf in jax.tree.leaves(gradient) if decode_own.is_factor(leaf)]
    assert len(factors) == 2 * 2 + 1 and all(bool((leaf != 0).any(0).all()) for leaf in factors)
    assert bed.products(3).call().shape == (1, 3, 96)


def test_both_processes_take_turns_and_each_has_its_own_clock():
    turns = []
    own = Case(what="own", call=lambda: turns.append("own"))

    def call():
        turns.append("peer")
        return 0.25

    ratio = compare_across("turns", own, PeerCase(what="peer", call=call))
    assert turns == ["own", "peer"] * 17 and ratio.num_pairs == 15
    assert ratio.seconds_b == 0.25 and ratio.p10 <= ratio.median <= ratio.p90 < 0.1
    with pytest.raises(ValueError, match="15"):
        compare_across("few", own, PeerCase(what="peer", call=call), num_pairs=14)


def test_a_peer_answers_until_it_ends():
    with stand_in() as peer:
        assert peer.ask("run", ids=[1]) == {"seconds": 0.5, "asked": {"do": "run", "ids": [1]}}
        with pytest.raises(PeerError, match="answered 'nothing"):
            peer.ask("babble")
        with pytest.raises(PeerError, match="status 3 when asked to leave"):
            peer.ask("leave")


def test_rows_against_a_peer_that_agrees(bed, tmp_path):
    flat = bed.model.params | {"embed": bed.model.params["embed"] * 0.0}
    zero = dataclasses.replace(bed, model=dataclasses.replace(bed.model, params=flat))
    shape = tiny_shape("Mamba2-130M")
    with stand_in() as peer:
        fact = decode.check_logits(shape, zero, peer, tmp_path / "logits.npy")
        assert isinstance(fact, Fact) and fact.value == 0
        rows = list(decode.against_peer(shape, zero, peer, 15))
    assert [row.name.split(": ")[1] for row in rows] == [
        f"{name} / reference" for name in ("one token", "verify 8", "extend 8", "prefill")
    ]
    assert all(row.seconds_b == 0.5 for row in rows)


def test_nothing_is_timed_of_two_different_models(bed, tmp_path):
    with stand_in(7.0) as peer, pytest.raises(SystemExit, match="step differ from the reference's by"):
        decode.check_logits(tiny_shape("Mamba2-130M"), bed, peer, tmp_path / "logits.npy")


def test_own_rows_need_no_peer(bed):
    rows = list(decode.against_products(tiny_shape("Mamba2-130M"), bed, 15))
    assert [row.goal for row in rows] == ["<= 1.2", "<= 1.15", "<= 1.7"]


@pytest.mark.skipif(not is_known(), reason="this system does not tell the peak memory of a process")
def test_loading_is_measured_in_a_process_of_its_own(tmp_path):
    write_folder(tiny_shape("SmolLM2-135M").full_config(), tmp_path)
    taken = measure_load_apart(tmp_path)
    params = sc.load(tmp_path, progress=False).params
    assert taken["weights"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params)) and taken["growth"] >= 0


def test_the_command_line(tmp_path, monkeypatch, capsys):
    """A family that is not there is skipped with its reason; the records are written."""
    monkeypatch.setattr(decode, "FAMILIES", {})
    monkeypatch.setattr(decode, "_PEER_PYTHON", tmp_path / "none")
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["decode.py", "--quick", "--only", "Bamba-130M", "--json", str(file)])
    before = jax.config.jax_compilation_cache_dir
    decode.main()
    jax.config.update("jax_compilation_cache_dir", before)
    said = capsys.readouterr().err
    assert "Bamba-130M is skipped: no family bamba" in said and "only our own rows" in said
    assert json.loads(file.read_text())["records"] == []
    assert decode.find_peer(tmp_path, print) == tmp_path
