"""Loading: what fits is loaded as it was asked for; what does not is refused by name, and nothing stays behind."""

import gc
import json
import shutil
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FOLDER, NAMES, fixture
from safetensors.numpy import load_file, save_file

import statecore as sc
from statecore.backend import _registry
from statecore.models.families import FAMILIES
from statecore.models.files import open_folder


@pytest.fixture
def folder(tmp_path):
    """A copy of a fixture that a test may damage."""
    return shutil.copytree(FOLDER / "llama-tied", tmp_path / "model", ignore=lambda *_: ["expected.safetensors"])


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(target, *words, **options):
    """Asserts that a load is refused in these words and leaves no array behind."""
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(sc.LoadError) as refusal:
        sc.load(target, **options)
    for word in words:
        assert word in str(refusal.value), str(refusal.value)
    del refusal
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_every_tensor_is_accounted_for(folder):
    """Missing, unexpected and misshapen ones in one error, before anything is placed."""

    def damage(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.norm.weight"] = np.zeros(7, np.float32)

    edit_tensors(folder, damage)
    refused(
        folder,
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.2.mlp.up_proj.weight is unexpected",
        "model.norm.weight [7] cannot be norm [32]",
    )


def test_a_config_that_disagrees_with_its_tensors(folder):
    edit_config(folder, num_attention_heads=2, num_key_value_heads=2)
    refused(folder, "self_attn.q_proj.weight", "cannot be layers.layer_0.attention.qkv_proj", "of one model")


def test_a_folder_without_a_config(tmp_path):
    refused(tmp_path, "no config.json")


def test_names_that_are_nothing():
    refused("no-such-model", "no model 'no-such-model'", "tiny-hybrid")
    refused("no/such/folder", "There is no folder")
    refused(3, "not 3")


def test_an_unknown_architecture(folder):
    edit_config(folder, model_type="gpt2")
    refused(folder, "no model 'gpt2'", "llama, ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "truncate": 3}}, "`truncate` = 3"),
        ({"hidden_act": "gelu"}, "`hidden_act` = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` = 0"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_size": None}, "no `hidden_size`"),
        ({"rms_norm_eps": "small"}, "`rms_norm_eps` = 'small'"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` = 'yes'"),
        ({"dtype": "float8"}, "dtype 'float8'"),
    ],
)
def test_an_option_that_is_not_implemented_is_named(folder, change, words):
    """F59: a flag of the layout is never ignored."""
    edit_config(folder, **change)
    refused(folder, words)


@pytest.mark.parametrize("name", NAMES)
def test_no_option_of_a_family_is_ignored(name):
    """Whatever key is added to a configuration is refused, and every key that is there was read."""
    config = open_folder(FOLDER / name).config
    family = FAMILIES[config["model_type"]]
    family.decoder(config)
    with pytest.raises(sc.LoadError, match="`use_magic` = True"):
        family.decoder(config | {"use_magic": True})


def test_layers_that_a_file_lacks_are_not_all_listed(folder):
    edit_config(folder, num_hidden_layers=1000)
    with pytest.raises(sc.LoadError, match="is missing.*and [0-9]{4,} more") as refusal:
        sc.load(folder)
    assert len(str(refusal.value)) < 2500


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_beside_a_tied_embedding(folder, is_equal):
    """As in the reference it is used where it is another than the embedding, whatever the configuration says."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    head[3] += 0 if is_equal else 1
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    params = sc.load(folder).params
    assert ("head" in params) == (not is_equal)
    if not is_equal:
        np.testing.assert_array_equal(np.array(params["head"]), head.T)


def test_a_tokenizer_of_another_vocabulary(folder):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
    made.save(str(folder / "tokenizer.json"))
    refused(folder, "500", "112")


def test_pickles_are_never_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin")


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16])
def test_a_dtype_is_chosen_at_load(dtype):
    """Recurrent planes stay float32."""
    model = sc.load(FOLDER / "mamba2-one-group", dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
    state = model.backend.init(model.params, capacity=8)
    assert state["hidden"].dtype == jnp.float32 and state["conv"].dtype == jnp.dtype(dtype)
    state, logits = sc.extend(model.backend, model.params, state, fixture("mamba2-one-group").ids[:1, :8])
    assert state["hidden"].dtype == jnp.float32
    wanted = fixture("mamba2-one-group").logits[:1, :8]
    assert np.abs(np.array(logits, np.float32) - wanted).max() < 0.3  # of a deviation of 1, in half precision


def test_a_sharding_is_chosen_at_load():
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh([device], ("model",))
    seen = {}

    def place(path, shape):
        seen[path] = shape
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))

    model = sc.load(FOLDER / "llama-gqa", sharding=place)
    assert seen["layers.layer_1.mlp.gate_up"] == (32, 112) and len(seen) == len(jax.tree.leaves(model.params))
    assert all(isinstance(leaf.sharding, jax.sharding.NamedSharding) for leaf in jax.tree.leaves(model.params))


def test_parameters_do_not_refer_to_the_file(folder):
    """The file may be removed or written to after it was loaded."""
    model = sc.load(folder)
    before = jax.tree.map(np.array, model.params)
    edit_tensors(folder, lambda tensors: [leaf.fill(0) for leaf in tensors.values()])
    for leaf, old in zip(jax.tree.leaves(model.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.array(leaf), old)


def test_a_progress_bar_on_request(capfd):
    sc.load(FOLDER / "llama-gqa", progress=True)
    assert "loading" in capfd.readouterr().err
    sc.load(FOLDER / "llama-gqa")
    assert not capfd.readouterr().err


def test_a_configuration_alone_gives_untrained_weights():
    config = json.loads((FOLDER / "qwen3-tied" / "config.json").read_text())
    model = sc.load(config)
    _, logits = sc.step(model.backend, model.params, model.backend.init(model.params, capacity=4), [1])
    assert np.isfinite(np.array(logits)).all() and np.array(logits).std() > 0


def test_a_pair_is_taken_as_it_is():
    model = fixture("llama-gqa").model
    with pytest.raises(sc.LoadError, match="dtype cannot be chosen"):
        sc.load((model.backend, model.params), dtype="float32")


def test_a_geometry_without_weights():
    """It is that of the loaded model, for every model with a configuration."""
    entry = sc.default_registry().lookup(open_folder(FOLDER / "mamba2-two-groups").config)
    loaded = fixture("mamba2-two-groups").model.geometry(batch=3, capacity=17)
    assert entry.geometry(batch=3, capacity=17) == loaded
    assert sc.default_registry().lookup("tiny-hybrid").geometry(capacity=64).capacity == 64


def test_a_package_adds_a_family(monkeypatch):
    """By an entry point, which cannot replace one of ours, and is imported when it is used."""
    points = [
        EntryPoint("plug", "test_load:plugged", _registry.ENTRY_POINTS),
        EntryPoint("broken", "no_such_module:loader", _registry.ENTRY_POINTS),
        EntryPoint("llama", "test_load:plugged", _registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(_registry, "entry_points", lambda group: points)
    assert sc.load("plug").name == "plugged"
    with pytest.raises(sc.LoadError, match="broken, no_such_module:loader, cannot be imported"):
        sc.load("broken")
    with pytest.raises(sc.UnsupportedError, match="only by loading it"):
        sc.default_registry().lookup("plug").geometry(capacity=4)
    assert sc.load(FOLDER / "llama-gqa").name == "llama"


def plugged(config):
    del config
    from statecore import testing

    return sc.Model(name="plugged", backend=testing.digit_backend(), params=None)
