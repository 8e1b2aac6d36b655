"""Files of models: what is read, and what is refused and how it says so."""

import json
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

import statecore as sc
from statecore.models.files import open_folder


def draw(*shape):
    return np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)


def write_json(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration and two shards."""
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    save_file({"a": draw(3, 4), "b": draw(5).astype(ml_dtypes.bfloat16)}, tmp_path / "m-1.safetensors")
    save_file({"c": np.arange(3, dtype=np.int64), "d": draw(2, 0)}, tmp_path / "m-2.safetensors")
    write_index(tmp_path, {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"})
    return tmp_path


def write_index(folder, files):
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def refusal(read, *words):
    """Returns the error's text, which holds all `words`."""
    with pytest.raises(sc.LoadError) as caught:
        read()
    text = str(caught.value)
    assert all(word in text for word in words), text
    return text


def test_two_shards_are_one_file(folder, tmp_path_factory):
    shards = open_folder(folder).tensors
    whole = tmp_path_factory.mktemp("whole")
    write_json(whole / "config.json", {})
    save_file({name: shards.read(name) for name in shards.shapes()}, whole / "model.safetensors")
    single = open_folder(str(whole)).tensors
    assert single.shapes() == shards.shapes() == {"a": (3, 4), "b": (5,), "c": (3,), "d": (2, 0)}
    assert single.dtypes() == shards.dtypes() and single.dtypes()["b"] == ml_dtypes.bfloat16
    for name in single.shapes():
        np.testing.assert_array_equal(single.read(name), shards.read(name))
    np.testing.assert_array_equal(single.read("a"), draw(3, 4))


def test_a_tensor_is_a_view_of_the_file(folder):
    array = open_folder(folder).tensors.read("a")
    assert type(array) is np.ndarray and not array.flags.owndata and not array.flags.writeable


def test_infinities_of_a_configuration(folder):
    write_json(folder / "config.json", '{"a": [0, {"__float__": "Infinity"}], "b": -Infinity, "c": null, "d": {}}')
    assert open_folder(folder).config == {"a": [0, math.inf], "b": -math.inf, "c": None, "d": {}}


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "is not JSON"), ("{", "is not JSON"), ("[1]", "must hold an object"), ('{"a": 1, "a": 2}', "'a' twice")],
)
def test_a_configuration_that_is_none(folder, text, word):
    write_json(folder / "config.json", text)
    refusal(lambda: open_folder(folder), "config.json", word)


def test_no_configuration(tmp_path):
    refusal(lambda: open_folder(tmp_path / "none"), "There is no folder")
    refusal(lambda: open_folder(tmp_path), "has no config.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    refusal(lambda: open_folder(tmp_path), "not UTF-8")
    refusal(lambda: open_folder(tmp_path / "config.json"), "is a file")


def test_a_missing_shard_is_named(folder):
    (folder / "m-2.safetensors").unlink()
    refusal(lambda: open_folder(folder).tensors, "lacks 1 of 2 shards: m-2.safetensors")


def test_a_tensor_in_the_wrong_shard(folder):
    write_index(folder, {"a": "m-2.safetensors", "c": "m-2.safetensors", "x": "m-1.safetensors"})
    refusal(lambda: open_folder(folder).tensors, "2 tensors are not in the shard", "a (m-2", "x (m-1")


def test_the_same_tensor_twice(folder):
    save_file({"a": draw(2)}, folder / "m-2.safetensors")
    refusal(lambda: open_folder(folder).tensors, "the tensor a twice", "m-1.safetensors", "m-2.safetensors")
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_safetensors(folder / "model.safetensors", f"{{{entry},{entry}}}", b"x")
    refusal(lambda: open_folder(folder).tensors, "model.safetensors")


@pytest.mark.parametrize(
    "name", ["../m-1.safetensors", "/m-1.safetensors", "a/../../m.safetensors", "..\\m.safetensors"]
)
def test_an_index_may_not_leave_its_folder(folder, name):
    write_index(folder, {"a": name})
    refusal(lambda: open_folder(folder).tensors, "outside the folder", repr(name))


def test_shards_that_no_folder_has(folder):
    write_index(folder, {"a": f"{'a' * 5000}.safetensors"})
    refusal(lambda: open_folder(folder).tensors, "lacks 1 of 1 shards: aaa")
    write_index(folder, {str(i): f"{i}.safetensors" for i in range(1000)})
    assert len(refusal(lambda: open_folder(folder).tensors, "lacks 1000 of 1000 shards", "and 990 more")) < 500
    write_index(folder, {"a": "m-1.safetensors", "b": "./m-1.safetensors"})
    refusal(lambda: open_folder(folder).tensors, "holds the tensor a twice")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": ["a"]}])
def test_an_index_without_files(folder, index):
    write_json(folder / "model.safetensors.index.json", index)
    refusal(lambda: open_folder(folder).tensors, "weight_map")


def test_pickles_are_never_opened(tmp_path):
    write_json(tmp_path / "config.json", {})
    refusal(lambda: open_folder(tmp_path).tensors, "has no weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    refusal(lambda: open_folder(tmp_path).tensors, "pickle files (pytorch_model.bin)", "safetensors")
    write_index(tmp_path, {"a": "pytorch_model.bin"})
    refusal(lambda: open_folder(tmp_path).tensors, "not a .safetensors file")
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({}, tmp_path / "model-1-of-2.safetensors")
    refusal(lambda: open_folder(tmp_path).tensors, "model-1-of-2.safetensors, but neither")


def write_safetensors(path, header, data):
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def test_a_file_may_be_changed_but_not_unnoticed(folder):
    tensors = open_folder(folder).tensors
    refusal(lambda: tensors.read("x"), "has no tensor x")
    save_file({"a": draw(1)}, folder / "m-1.safetensors")
    refusal(lambda: tensors.read("a"), "has changed")
    (folder / "m-1.safetensors").unlink()
    refusal(lambda: tensors.read("a"), "no longer")


DAMAGES = {
    "empty": lambda data: b"",
    "length past the end": lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
    "not JSON": lambda data: data[:8] + b"[" + data[9:],
    "data cut short": lambda data: data[:-1],
    "data too long": lambda data: data + b"x",
    "offsets outside": lambda data: data.replace(b"[0,48]", b"[9,57]"),
    "offsets that overlap": lambda data: save({"a": draw(2), "b": draw(2)}).replace(b"[8,16]", b"[4,12]"),
    "unknown dtype": lambda data: data.replace(b'"F32"', b'"X32"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_safetensors_file(folder, damage):
    data = save({"a": draw(3, 4)})
    (folder / "model.safetensors").write_bytes(DAMAGES[damage](data))
    refusal(lambda: open_folder(folder).tensors, "not a whole safetensors file", "download cut short")


def test_a_pointer_instead_of_a_file(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refusal(lambda: open_folder(folder).tensors, "git lfs pull")


def test_a_dtype_that_jax_cannot_take(folder):
    header = '{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    write_safetensors(folder / "model.safetensors", header, b"xx")
    refusal(lambda: open_folder(folder).tensors, "w has the dtype F4", "JAX cannot take")


@given(st.data())
def test_any_safetensors_file_is_read_or_refused(tmp_path_factory, data):
    whole = save({"a": draw(3, 4), "b": draw(2)})
    path = tmp_path_factory.mktemp("any")
    write_json(path / "config.json", {})
    (path / "model.safetensors").write_bytes(damaged(whole, data, len(whole) - 56))
    try:
        tensors = open_folder(path).tensors
    except sc.LoadError:
        return
    for name, shape in tensors.shapes().items():
        assert tensors.read(name).shape == shape


def damaged(whole, data, most):
    """Returns a file with some bytes changed among the first, or cut short."""
    found = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, most - 1), max_size=3)):
        found[at] = data.draw(st.sampled_from([0, 1, 9, 34, 127, 255]) | st.integers(0, 255))
    return bytes(found[: data.draw(st.sampled_from([len(found)] * 3) | st.integers(0, len(found) - 1))])


def test_importing_brings_nothing_heavy():
    code = "import sys, statecore.models.files._checkpoint as c; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ["gguf", "tokenizers", "jinja2"]
    run = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
