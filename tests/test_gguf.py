"""GGUF files: written as llama.cpp's converter does it, read back as the originals."""

import math

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_files import damaged, draw, refusal

import statecore as sc
from statecore.models.files import open_gguf

HEADS, GROUPS, WIDTH, HEAD, LAYERS, VOCAB = 4, 2, 32, 8, 2, 48
LAYER = {
    "attn_norm": ("input_layernorm", (WIDTH,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD, WIDTH)),
    "attn_k": ("self_attn.k_proj", (GROUPS * HEAD, WIDTH)),
    "attn_v": ("self_attn.v_proj", (GROUPS * HEAD, WIDTH)),
    "attn_output": ("self_attn.o_proj", (WIDTH, HEADS * HEAD)),
    "ffn_norm": ("post_attention_layernorm", (WIDTH,)),
    "ffn_gate": ("mlp.gate_proj", (64, WIDTH)),
    "ffn_up": ("mlp.up_proj", (64, WIDTH)),
    "ffn_down": ("mlp.down_proj", (WIDTH, 64)),
}
NORMS = {"attn_q_norm": ("self_attn.q_norm", (HEAD,)), "attn_k_norm": ("self_attn.k_norm", (HEAD,))}
LAYERS_OF = {
    "llama": LAYER,
    "qwen2": LAYER,
    "qwen3": {**LAYER, **NORMS},
    "gemma3": {
        **LAYER,
        **NORMS,
        "post_attention_norm": ("post_attention_layernorm", (WIDTH,)),
        "ffn_norm": ("pre_feedforward_layernorm", (WIDTH,)),
        "post_ffw_norm": ("post_feedforward_layernorm", (WIDTH,)),
    },
}
FIELDS = {
    "context_length": 64,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": 64,
    "attention.head_count": HEADS,
    "attention.head_count_kv": GROUPS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def names(arch, *, tied=True):
    """Returns shapes by GGUF name and by Hugging Face name, in one order."""
    top = {"token_embd": ("model.embed_tokens", (VOCAB, WIDTH)), "output_norm": ("model.norm", (WIDTH,))}
    top |= {} if tied else {"output": ("lm_head", (VOCAB, WIDTH))}
    table = {f"{name}.weight": (f"{to}.weight", shape) for name, (to, shape) in top.items()}
    for layer in range(LAYERS):
        for name, (to, shape) in LAYERS_OF[arch].items():
            table[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{to}.weight", shape)
    return table


def permuted(array, heads):
    """Llama's rows as the converter leaves them: the two halves of each head interleaved."""
    return array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, arch, *, fields=(), kinds=(), extra=(), tied=True):
    """Writes a file; returns the originals by Hugging Face name."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**FIELDS, **dict(fields)}.items():
        if value is not None:
            add(writer, key if key.startswith(("tokenizer.", "split.", "general.")) else f"{arch}.{key}", value)
    originals, kinds = {}, dict(kinds)
    for name, (to, shape) in names(arch, tied=tied).items():
        array = originals[to] = draw(*shape) + np.float32(len(originals))
        if arch == "llama" and "attn_q" in name:
            array = permuted(array, HEADS)
        elif arch == "llama" and "attn_k" in name:
            array = permuted(array, GROUPS)
        elif arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        put(writer, name, array, kinds.get(name, gguf.GGMLQuantizationType.F32))
    for name, array in dict(extra).items():
        put(writer, name, array, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return originals


def add(writer, key, value):
    whole = writer.add_int32 if value is not True and type(value) is int and value < 0 else writer.add_uint32
    adders = {bool: writer.add_bool, int: whole, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def put(writer, name, array, kind):
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", LAYERS_OF)
def test_gguf_gives_the_originals(tmp_path, arch, tied):
    window = {"attention.sliding_window": 16} if arch == "gemma3" else {}
    originals = write_gguf(tmp_path / "m.gguf", arch, fields=window, tied=tied)
    checkpoint = open_gguf(str(tmp_path / "m.gguf"))
    assert checkpoint.tensors.shapes() == {name: array.shape for name, array in originals.items()}
    for name, array in originals.items():
        np.testing.assert_allclose(checkpoint.tensors.read(name), array, rtol=0, atol=4e-6, err_msg=name)
    config = checkpoint.config
    assert config["model_type"] == ("gemma3_text" if arch == "gemma3" else arch)
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (VOCAB, HEAD, GROUPS)
    assert config["tie_word_embeddings"] is tied and checkpoint.tokenizer is None


def test_gguf_agrees_with_the_reader_of_the_package(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", fields={"tokenizer.ggml.tokens": ["a", "é"], "tokenizer.ggml.scores": [0.5, -1.0]})
    from statecore.models.files._gguf_header import read_header

    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in header.fields.items()}
    assert found == fields
    assert {info.name: (info.kind, info.offset) for info in header.tensors.values()} == {
        tensor.name: (tensor.tensor_type, tensor.data_offset) for tensor in reader.tensors
    }


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantized_tensors(tmp_path, kind):
    which = gguf.GGMLQuantizationType[kind]
    quantized = {name: which for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight")}
    originals = write_gguf(tmp_path / "m.gguf", "llama", kinds=quantized)
    tensors = open_gguf(tmp_path / "m.gguf").tensors
    for name in ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        array = originals[f"{name}.weight"]
        found = tensors.read(f"{name}.weight")
        assert found.dtype == tensors.dtypes()[f"{name}.weight"]
        # Rows are quantized one by one, so their order does not matter to their values.
        wanted = gguf.dequantize(gguf.quantize(array, which), which)
        np.testing.assert_array_equal(found.astype(np.float32), wanted)
    plain = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(kind, np.float32)
    assert tensors.dtypes()["model.embed_tokens.weight"] == plain
    assert tensors.dtypes()["model.norm.weight"] == np.float32


def test_gemma3_layers(tmp_path):
    window = {"attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    for pattern, wanted in ((None, "ss"), (2, "sf"), ([False, True], "fs")):
        write_gguf(tmp_path / "m.gguf", "gemma3", fields={**window, "attention.sliding_window_pattern": pattern})
        config = open_gguf(tmp_path / "m.gguf").config
        assert "".join(kind[0] for kind in config["layer_types"]) == wanted
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
        assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (16, HEAD)


def test_frequencies_of_llama_3_1(tmp_path):
    # As in the reference: transformers' _compute_llama3_parameters.
    wavelengths = 2 * math.pi * 500000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    factors = [
        1.0 if long < 2048 else 32.0 if long > 8192 else 1 / ((1 - (x := (8192 / long - 1) / 3)) / 32 + x)
        for long in wavelengths
    ]
    fields = {"rope.freq_base": 500000.0}
    write_gguf(tmp_path / "m.gguf", "llama", fields=fields, extra={"rope_freqs.weight": np.float32(factors)})
    checkpoint = open_gguf(tmp_path / "m.gguf")
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors.shapes()
    factors[1] *= 1.5
    write_gguf(tmp_path / "m.gguf", "llama", fields=fields, extra={"rope_freqs.weight": np.float32(factors)})
    refusal(lambda: open_gguf(tmp_path / "m.gguf"), "rope_freqs.weight", "not implemented")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expert_count": 8}, ["llama.expert_count is 8"]),
        ({"rope.scaling.type": "yarn"}, ["llama.rope.scaling.type is 'yarn'", "'linear'"]),
        ({"attention.clamp_kqv": 8.0, "logit_scale": 2.0}, ["llama.attention.clamp_kqv, llama.logit_scale"]),
        ({"rope.dimension_count": 4}, ["llama.rope.dimension_count is 4", "8"]),
        ({"attention.head_count_kv": [2, 0]}, ["llama.attention.head_count_kv is", "one number"]),
        ({"embedding_length": None}, ["llama.embedding_length is missing"]),
        ({"block_count": 2_000_000_000}, ["llama.block_count is 2000000000", "20 tensors"]),
        ({"split.count": [1, 2]}, ["split.count"]),
        ({"attention.head_count": -4}, ["llama.attention.head_count is -4", "from 1 to"]),
        ({"attention.layer_norm_rms_epsilon": math.nan}, ["attention.layer_norm_rms_epsilon is nan", "finite"]),
        ({"rope.freq_base": math.inf}, ["llama.rope.freq_base is inf", "finite"]),
        ({"split.count": 3}, ["one of 3 parts", "llama-gguf-split"]),
        ({"attention.head_count": 5}, ["blk.0.attn_q.weight is [32, 32]", "5 heads"]),
    ],
)
def test_options_that_are_not_implemented(tmp_path, fields, words):
    write_gguf(tmp_path / "m.gguf", "llama", fields=fields)
    refusal(lambda: open_gguf(tmp_path / "m.gguf"), *words)


def test_an_architecture_that_is_not_read(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", fields={"general.name": "x"})
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"llama", b"bloom"))
    refusal(lambda: open_gguf(tmp_path / "m.gguf"), "'bloom'", "llama, qwen2, qwen3, gemma3")


def test_a_tensor_that_is_not_known_is_listed(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", extra={"blk.0.attn_sinks.weight": draw(4)})
    assert "blk.0.attn_sinks.weight" in open_gguf(tmp_path / "m.gguf").tensors.shapes()


def test_a_quantization_that_is_not_known(tmp_path):
    originals = write_gguf(tmp_path / "m.gguf", "llama")
    data, name = bytearray((tmp_path / "m.gguf").read_bytes()), b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8
    data[at : at + 4] = (99).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(data)
    refusal(lambda: open_gguf(tmp_path / "m.gguf"), "output_norm.weight has the quantization 99")
    assert len(originals)


def test_what_is_not_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    refusal(lambda: open_gguf(path), "There is no file")
    for data, word in (
        (b"", "cannot be read as GGUF"),
        (b"PK\x03\x04" * 9, "starts with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") * 9, "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") * 9, "big-endian"),
    ):
        path.write_bytes(data)
        refusal(lambda: open_gguf(path), word)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", fields={"tokenizer.ggml.scores": [1.0] * 100})
    data = path.read_bytes()
    for length in [*range(0, 4000, 37), *range(len(data) - 64, len(data))]:
        path.write_bytes(data[:length])
        refusal(lambda: open_gguf(path), str(path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A GGUF file with a tokenizer."""
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    tokenizer = {"model": "llama", "tokens": ["<s>", "a", "b", "ab", "<0x0A>"], "scores": [0.0, -1.0, -1.0, -2.0, 0.0]}
    tokenizer |= {"token_type": [3, 1, 1, 1, 6], "bos_token_id": 0}
    write_gguf(
        path,
        "gemma3",
        fields={"attention.sliding_window": 9} | {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()},
    )
    return path.read_bytes()


@given(st.data())
def test_any_gguf_file_is_read_or_refused(whole, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "m.gguf"
    path.write_bytes(damaged(whole, data, 3000))
    try:
        checkpoint = open_gguf(path)
        checkpoint.tokenizer  # noqa: B018
    except sc.LoadError:
        return
    for name, shape in checkpoint.tensors.shapes().items():
        with np.errstate(all="ignore"):
            assert checkpoint.tensors.read(name).shape == shape
