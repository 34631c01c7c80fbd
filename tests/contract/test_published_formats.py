"""Checkpoints in published formats: the numbers of each weight, answers as of these numbers, and the packed file."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodeKind
from tandem.compute.ops import Kernels, Matrix
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights import coded
from tandem.compute.weights.base import Weight
from tandem.compute.weights.coded import CodedWeight
from tandem.compute.weights.dense import MatrixWeight
from tandem.compute.weights.int8_activations import Int8Product
from tandem.compute.weights.plain_codes import Blocks, PlainCodes
from tandem.compute.weights.rotations import NO_ROTATIONS, rotate_blocks
from tandem.core.errors import CheckpointError, CorruptCheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models import packed
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import (
    FORMATS,
    MIXED,
    PER_TOKEN,
    Numbers,
    Published,
    compressed,
    ct_int8,
    integers,
    rounds_rows,
    save_gpt_oss_blocks,
    save_published,
)
from tests.helpers.rounded_oracle import generate_rounded
from tests.helpers.tokenizers import write_byte_tokenizer

# NOTE: no size is a multiple of 128, so that blocks of fp8 have edges; all are of 64, for bitsandbytes
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
BUILDERS = {
    "llama": lambda path: checkpoints.save_tiny_llama(path, **SIZES),
    "qwen3_moe": lambda path: checkpoints.save_tiny_qwen3_moe(path, **SIZES | {"moe_intermediate_size": 64}),
}
LATENT: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 64, "kv_lora_rank": 64}
LATENT_FORMATS = ("fp8 blocks", "compressed int4 groups")
BUILDERS_OF_A_FEW = {"deepseek_v3": lambda path: checkpoints.save_tiny_deepseek_v3(path, **LATENT)}
PROMPTS = ([5, 9, 13, 2], list(range(40, 75)), [7])
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
GPT_OSS = "gpt-oss"


@pytest.fixture(
    params=[
        *((name, family) for name in FORMATS for family in BUILDERS),
        *((name, "deepseek_v3") for name in LATENT_FORMATS),
        (GPT_OSS, GPT_OSS),
    ],
    ids="-".join,
    scope="module",
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the checkpoints `coded` and `decoded`."""
    (name, family), place = request.param, tmp_path_factory.mktemp("published")
    is_gpt_oss = name == GPT_OSS
    path = (
        checkpoints.save_tiny_gpt_oss(place / "plain")
        if is_gpt_oss
        else (BUILDERS | BUILDERS_OF_A_FEW)[family](place / "plain")
    )
    write_byte_tokenizer(path)
    if is_gpt_oss:
        save_gpt_oss_blocks(path, place / "coded", place / "decoded")
    else:
        save_published(path, FORMATS[name], place / "coded", place / "decoded")
    return place


def loaded(path: Path, kernels: Kernels | None = None, **options: Any) -> LoadedModel:
    cpu = torch.device("cpu")
    return load_model(str(path), dtype="float32", device=cpu, kernels=kernels or TorchKernels(), **options)


def weights_of(model: LoadedModel) -> Mapping[str, Weight]:
    return model.decoder.parameters.weights


def served(path: Path, *, is_native: bool) -> list[list[int]]:
    """Token ids of the greedy answers to `PROMPTS`, all served at once."""
    backend = "auto" if is_native else "reference"
    engine = build_engine(replace(TINY, model=str(path), native_kernels=is_native, attention_backend=backend))
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


def test_numbers_are_those_of_the_definition(checkpoint: Path) -> None:
    coded, decoded = weights_of(loaded(checkpoint / "coded")), weights_of(loaded(checkpoint / "decoded"))
    num_coded = 0
    for name, weight in coded.items():
        expected = decoded[name].matrix
        assert isinstance(expected, Matrix)
        if isinstance(weight, CodedWeight):
            torch.testing.assert_close(weight.coded.decode(), expected.tensor, rtol=1e-6, atol=1e-6)
            assert weight.num_bytes < expected.tensor.nbytes * 0.45
            num_coded += 1
        else:
            assert isinstance(weight.matrix, Matrix)
            assert torch.equal(weight.matrix.tensor, expected.tensor)
    assert num_coded > 9


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
def test_answers_are_those_of_the_numbers_that_codes_stand_for(checkpoint: Path, is_native: bool) -> None:
    if is_native:
        load_or_skip()
    if rounds_rows(checkpoint / "coded"):
        reference = checkpoints.load_reference(checkpoint / "decoded")
        expected = [generate_rounded(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]
    else:
        expected = served(checkpoint / "decoded", is_native=is_native)
    assert served(checkpoint / "coded", is_native=is_native) == expected
    assert len({tuple(answer) for answer in expected}) > 1


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
def test_latents_of_codes_are_served_in_16_bits(is_native: bool, tmp_path: Path) -> None:
    """Regression: the maps of latents were floats of 32 bits whatever the rows were."""
    plain = write_byte_tokenizer(BUILDERS_OF_A_FEW["deepseek_v3"](tmp_path / "plain"))
    save_published(plain, FORMATS["fp8 blocks"], tmp_path / "coded", tmp_path / "decoded")
    config = replace(TINY, model=str(tmp_path / "coded"), dtype="bfloat16", native_kernels=is_native)
    engine = build_engine(replace(config, attention_backend="auto"))
    request_id = engine.add_request(PROMPTS[0], GREEDY)
    assert len(token_ids(drain(engine)[request_id, 0])) == GREEDY.max_tokens


def test_a_packed_file_holds_the_same_codes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    for kernels in (TorchKernels(), load_or_skip()):
        plain = weights_of(loaded(checkpoint / "coded", kernels))
        for _ in range(2):
            found = weights_of(loaded(checkpoint / "coded", kernels, packed_dir=tmp_path / "packed"))
            for name, weight in plain.items():
                if isinstance(weight, CodedWeight):
                    other = found[name]
                    assert isinstance(other, CodedWeight)
                    assert other.coded.order is weight.coded.order
                    assert torch.equal(other.coded.codes.view(torch.uint8), weight.coded.codes.view(torch.uint8))
                    x = torch.randn(3, weight.shape[1])
                    assert torch.equal(other(x), weight(x))
            if isinstance(kernels, TorchKernels):
                assert not any(w.coded.order is Order.STRIPS for w in plain.values() if isinstance(w, CodedWeight))


IN_PIECES = ("gptq 3 bits", "fp8 blocks", "compressed nvfp4", "bitsandbytes nf4 nested", "awq")


@pytest.mark.parametrize(
    "name", [*IN_PIECES, *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS if name not in IN_PIECES)]
)
def test_a_matrix_that_is_read_in_pieces_is_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the packed file, byte for byte."""
    save_published(BUILDERS["llama"](tmp_path / "plain"), FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    for kernels in (TorchKernels(), load_or_skip()):
        plain = weights_of(loaded(tmp_path / "coded", kernels))
        loaded(tmp_path / "coded", kernels, packed_dir=tmp_path / "whole")
        with monkeypatch.context() as patched:
            patched.setattr(coded, "_PIECE_BYTES", 1)
            parts = weights_of(loaded(tmp_path / "coded", kernels))
            loaded(tmp_path / "coded", kernels, packed_dir=tmp_path / "parts")
        for key, weight in plain.items():
            other = parts[key]
            if isinstance(weight, CodedWeight) and isinstance(other, CodedWeight):
                found = dict(other.coded.tensors())
                for part, tensor in weight.coded.tensors():
                    assert torch.equal(found[part].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), (
                        key,
                        part,
                    )
                assert other.coded.factor == weight.coded.factor
        for file in (tmp_path / "whole").glob("*.safetensors"):
            assert (tmp_path / "parts" / file.name).read_bytes() == file.read_bytes()


def test_large_matrices_are_read_in_pieces() -> None:
    """Pieces end where blocks of scales do, but for the last."""
    codings = [PlainCodes(CodeKind.E4M3, Blocks(rows, 128), "scale", None) for rows in (1, 128)]
    channels, blocks = (
        coded.PackedCoded(coding, load_or_skip(), CodedWeight, NO_ROTATIONS, rounds_rows=False) for coding in codings
    )
    whole, cut = TensorSpec("a.weight", (5120, 2048)), TensorSpec("a.weight", (5000, 2048))
    for form, weight in ((channels, whole), (channels, cut), (blocks, whole), (blocks, cut)):
        rows = [piece.shape[0] for piece in form.pieces(weight)]
        assert sum(rows) == weight.shape[0]
        assert len(rows) > 3
        assert {size % 128 for size in rows[:-1]} == {0}


FUSED = (
    "fp8 blocks",
    "fp8 tensors",
    "compressed int4 with zero points",
    "compressed int4 in an order",
    "compressed nvfp4",
    "gptq 2 in an order",
    "awq",
    "bitsandbytes nf4 nested",
)


@pytest.mark.parametrize("name", FUSED)
def test_projections_in_one_tensor_are_taken_apart(name: str, tmp_path: Path) -> None:
    """q, k and v, and gate and up, whose rows begin where blocks and words do."""
    plain = checkpoints.save_tiny_phi3(
        tmp_path / "plain", hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_key_value_heads=2
    )
    save_published(plain, FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
    coded, decoded = weights_of(loaded(tmp_path / "coded")), weights_of(loaded(tmp_path / "decoded"))
    compared = {name: weight for name, weight in coded.items() if isinstance(weight, CodedWeight)}
    assert len(compared) == 7
    for name, weight in compared.items():
        expected = decoded[name].matrix
        assert isinstance(expected, Matrix)
        torch.testing.assert_close(weight.coded.decode(), expected.tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
def test_projections_may_share_blocks_of_scales(
    is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 320 and 96 outputs begin and end within blocks of 128; read in pieces, too."""
    monkeypatch.setattr(coded, "_PIECE_BYTES", 1)
    plain = checkpoints.save_tiny_phi3(
        tmp_path / "plain", hidden_size=192, intermediate_size=320, num_hidden_layers=1, num_key_value_heads=2
    )
    save_published(plain, FORMATS["fp8 blocks"], tmp_path / "coded", tmp_path / "decoded")
    kernels = load_or_skip() if is_native else TorchKernels()
    found, decoded = weights_of(loaded(tmp_path / "coded", kernels)), weights_of(loaded(tmp_path / "decoded"))
    compared = {name: weight for name, weight in found.items() if isinstance(weight, CodedWeight)}
    assert len(compared) == 7
    for name, weight in compared.items():
        expected = decoded[name].matrix
        assert isinstance(expected, Matrix)
        rows = torch.eye(weight.shape[1])
        torch.testing.assert_close(weight(rows), expected.tensor.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["experts first", "experts last"])
def test_modules_of_one_file_have_several_formats(is_turned: bool, is_native: bool, tmp_path: Path) -> None:
    """Experts in int4, the rest of the layers in fp8, one projection in floats."""
    plain = write_byte_tokenizer(BUILDERS["qwen3_moe"](tmp_path / "plain"))
    save_published(plain, MIXED, tmp_path / "coded", tmp_path / "decoded")
    if is_turned:
        groups = dict(reversed(MIXED.config["config_groups"].items()))
        checkpoints.edit_config(tmp_path / "coded", quantization_config=MIXED.config | {"config_groups": groups})
    kinds = {
        name: weight.coded.kind
        for name, weight in weights_of(loaded(tmp_path / "coded")).items()
        if isinstance(weight, CodedWeight)
    }
    assert all(kind is (CodeKind.TABLE4 if "experts" in name else CodeKind.E4M3) for name, kind in kinds.items())
    assert not any("v_proj" in name for name in kinds)
    if is_native:
        load_or_skip()
    assert served(tmp_path / "coded", is_native=is_native) == served(tmp_path / "decoded", is_native=is_native)


def test_a_group_of_the_class_before_others_leaves_them_their_modules(tmp_path: Path) -> None:
    """Regression: a group of "Linear" had every module, so those of later groups were loaded by its scheme: rows were
    rounded to 8 bits that should not be, and other bits were refused.
    """
    published = FORMATS["compressed W8A8"]
    save_published(BUILDERS["llama"](tmp_path / "plain"), published, tmp_path / "coded", tmp_path / "decoded")
    all_linear = published.config["config_groups"]["group_0"]
    plain = all_linear | {"targets": [r"re:.*down_proj$"], "input_activations": None}
    groups = {"group_0": all_linear, "group_1": plain}
    checkpoints.edit_config(tmp_path / "coded", quantization_config=published.config | {"config_groups": groups})
    rounding = {name for name, each in weights_of(loaded(tmp_path / "coded")).items() if isinstance(each, Int8Product)}
    assert len(rounding) == 12
    assert not any("down_proj" in name for name in rounding)


def test_a_configuration_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    """As ModelOpt wrote them before `quantization_config`."""
    plain = BUILDERS["llama"](tmp_path / "plain")
    save_published(plain, FORMATS["modelopt nvfp4"], tmp_path / "coded", tmp_path / "decoded")
    checkpoints.edit_config(tmp_path / "coded", quantization_config=...)
    quantisation = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    beside = tmp_path / "coded" / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantisation}))
    found = weights_of(loaded(tmp_path / "coded")).values()
    assert sum(isinstance(weight, CodedWeight) for weight in found) == 14
    beside.write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"hf_quant_config\.json has no object `quantization`"):
        loaded(tmp_path / "coded")


def test_formats_that_give_the_same_bytes_another_meaning_have_other_fingerprints(tmp_path: Path) -> None:
    plain = BUILDERS["llama"](tmp_path / "plain")
    save_published(plain, FORMATS["gptq with zero points"], tmp_path / "coded", tmp_path / "decoded")
    first = loaded(tmp_path / "coded").spec.fingerprint
    assert loaded(tmp_path / "coded").spec.fingerprint == first
    config = {**FORMATS["gptq with zero points"].config, "checkpoint_format": "gptq_v2"}
    checkpoints.edit_config(tmp_path / "coded", quantization_config=config)
    other = loaded(tmp_path / "coded").spec.fingerprint
    assert len({first, other, loaded(tmp_path / "decoded").spec.fingerprint}) == 3


def test_memory_is_asked_for_as_much_as_codes_take(tmp_path: Path) -> None:
    save_published(BUILDERS["llama"](tmp_path / "plain"), FORMATS["awq"], tmp_path / "coded", tmp_path / "decoded")
    model = loaded(tmp_path / "coded")
    tensors = sum(tensor.nbytes for tensor in model.decoder.parameters.tensors.values())
    head = model.decoder.parameters.weights["lm_head.weight"].num_bytes
    codes = sum(weight.num_bytes for weight in weights_of(model).values()) - head
    with pytest.raises(CheckpointError, match="GB of memory"):
        loaded(tmp_path / "coded", memory_bytes=tensors + head + codes)
    loaded(tmp_path / "coded", memory_bytes=tensors + head + codes + 14 * 5 * 64)  # NOTE: the ends of cache lines


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_to_8_bits_where_the_scheme_says_so(dtype: torch.dtype, strategy: str, tmp_path: Path) -> None:
    """W8A8: each row by its largest magnitude / 127, whatever is beside it, and integers added up exactly."""
    encode = ct_int8(is_tensor=strategy == "tensor")
    scheme = Published(compressed("int-quantized", integers(8, strategy), PER_TOKEN), encode)
    save_published(BUILDERS["llama"](tmp_path / "plain"), scheme, tmp_path / "coded", tmp_path / "decoded")
    coded, decoded = weights_of(loaded(tmp_path / "coded")), weights_of(loaded(tmp_path / "decoded"))
    weight, numbers = coded["model.layers.0.mlp.up_proj.weight"], decoded["model.layers.0.mlp.up_proj.weight"].matrix
    assert isinstance(weight, Int8Product)
    assert isinstance(numbers, Matrix)
    x, bias = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(320, dtype=dtype)
    wide = x.double().numpy()
    scales = np.abs(wide).max(1, keepdims=True) / 127
    expected = np.rint(wide / scales) * scales @ numbers.tensor.double().numpy().T + 1
    found = weight(x, bias)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.double().numpy(), expected, rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=1e-4
    )
    assert all(torch.equal(weight(x[row : row + 1], bias)[0], found[row]) for row in range(5))
    assert torch.equal(weight(torch.zeros_like(x)), torch.zeros(5, 320, dtype=dtype))


def rotated(location: str, target: str, *, head_dim: int | None = 64) -> dict[str, Any]:
    """A group of a `transform_config`."""
    part = {"targets": [target], "location": location, "inverse": False, "ignore": ["lm_head"]}
    return {"type": "hadamard", "apply": [part], "randomize": False, "head_dim": head_dim, "precision": "torch.float32"}


def hadamard(size: int) -> Numbers:
    """Sylvester's: the sign is the parity of the bits that row and column share; divided by its root."""
    bits = np.arange(size)[:, None] & np.arange(size)
    parity = np.array([[int(n).bit_count() & 1 for n in row] for row in bits])
    return np.asarray((1 - 2 * parity) / np.sqrt(size), np.float32)


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
@pytest.mark.parametrize("family", BUILDERS)
def test_rotations_of_activations_are_applied(family: str, is_native: bool, tmp_path: Path) -> None:
    """x @ H before down_proj and y @ H after o_proj: as if H were in the weights. Those of q and k cancel."""
    if is_native:
        load_or_skip()
    plain = write_byte_tokenizer(BUILDERS[family](tmp_path / "plain"))
    save_published(plain, FORMATS["compressed int4 groups"], tmp_path / "coded", tmp_path / "decoded")
    attention = rotated("q_attn", "re:.*self_attn$")
    attention["apply"].append({**attention["apply"][0], "location": "k_cache"})
    groups = {"R3": attention, "R4": rotated("input", "re:.*down_proj$"), "R5": rotated("output", "re:.*o_proj$")}
    config = {**FORMATS["compressed int4 groups"].config, "transform_config": {"config_groups": groups}}
    checkpoints.edit_config(tmp_path / "coded", quantization_config=config)
    tensors, block = checkpoints.read_tensors(tmp_path / "decoded"), hadamard(64)
    for name, tensor in tensors.items():
        whole = torch.from_numpy(
            np.kron(np.eye(max(1, tensor.shape[-1 if "down" in name else 0] // 64)), block)
        ).float()
        if name.endswith("down_proj.weight"):
            tensors[name] = (tensor @ whole).contiguous()
        elif name.endswith("o_proj.weight"):
            tensors[name] = (whole @ tensor).contiguous()
    checkpoints.write_tensors(tmp_path / "decoded", tensors)
    stored = checkpoints.read_tensors(tmp_path / "coded")
    stored["model.layers.0.mlp.down_proj.R4_input.weight"] = torch.from_numpy(hadamard(64) * 8).round()
    checkpoints.write_tensors(tmp_path / "coded", stored)
    assert served(tmp_path / "coded", is_native=is_native) == served(tmp_path / "decoded", is_native=is_native)
    before = loaded(tmp_path / "coded").spec.fingerprint
    checkpoints.edit_config(tmp_path / "coded", quantization_config=FORMATS["compressed int4 groups"].config)
    checkpoints.write_tensors(tmp_path / "coded", {name: t for name, t in stored.items() if "R4" not in name})
    assert loaded(tmp_path / "coded").spec.fingerprint != before


def test_rotations_that_are_merged_into_the_weights_need_nothing(tmp_path: Path) -> None:
    """Of any kind, since the stored weights have them already: codes stand for the rotated numbers."""
    plain = write_byte_tokenizer(BUILDERS["llama"](tmp_path / "plain"))
    save_published(plain, FORMATS["compressed int4 groups"], tmp_path / "coded", tmp_path / "decoded")
    merged = rotated("weight_input", "re:.*(q|k|v|gate|up)_proj$") | {"type": "random-hadamard", "randomize": True}
    back = {**merged["apply"][0], "targets": ["re:.*(o|down)_proj$"], "location": "weight_output", "inverse": True}
    merged["apply"].append(back)
    config = {**FORMATS["compressed int4 groups"].config, "transform_config": {"config_groups": {"R1": merged}}}
    checkpoints.edit_config(tmp_path / "coded", quantization_config=config)
    kinds = {type(weight) for weight in weights_of(loaded(tmp_path / "coded")).values()}
    assert kinds == {CodedWeight, MatrixWeight}
    assert served(tmp_path / "coded", is_native=False) == served(tmp_path / "decoded", is_native=False)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.parametrize("name", ["fp8 blocks", "compressed int8 groups with zero points"])
def test_sizes_that_fill_no_block_are_served(name: str, seed: int, tmp_path: Path) -> None:
    """Random numbers of inputs and outputs: the last block of each row, and the last row of blocks, is smaller."""
    load_or_skip()
    rng = random.Random(f"{name} {seed}")
    num_kv_heads, shared = rng.choice((1, 2)), rng.choice((1, 3))
    sizes: dict[str, Any] = {
        "hidden_size": num_kv_heads * shared * rng.randrange(40, 70),
        "intermediate_size": rng.randrange(97, 400),
        "head_dim": 2 * rng.randrange(5, 40),
        "num_attention_heads": num_kv_heads * shared,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": 2,
    }
    plain = write_byte_tokenizer(checkpoints.save_tiny_llama(tmp_path / "plain", **sizes))
    save_published(plain, FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
    coded, decoded = weights_of(loaded(tmp_path / "coded")), weights_of(loaded(tmp_path / "decoded"))
    compared = {key: weight for key, weight in coded.items() if isinstance(weight, CodedWeight)}
    assert len(compared) == 14
    for key, weight in compared.items():
        expected = decoded[key].matrix
        assert isinstance(expected, Matrix)
        torch.testing.assert_close(weight.coded.decode(), expected.tensor, rtol=1e-6, atol=1e-6)
    for is_native in (False, True):
        assert served(tmp_path / "coded", is_native=is_native) == served(tmp_path / "decoded", is_native=is_native)


def test_a_matrix_whose_rows_fill_one_word_is_served(tmp_path: Path) -> None:
    """Regression: of eight inputs GPTQ has one row of words, which turned into a column with the stride of a row."""
    plain = write_byte_tokenizer(checkpoints.save_tiny_llama(tmp_path / "plain", intermediate_size=8))
    save_published(plain, FORMATS["gptq"], tmp_path / "coded", tmp_path / "decoded")
    assert served(tmp_path / "coded", is_native=False) == served(tmp_path / "decoded", is_native=False)


CHANGES = {"the first": 0, "the middle": 0.5, "the last": 1}


@pytest.mark.parametrize("place", CHANGES)
@pytest.mark.parametrize("part", ["weight_scale", "weight_packed"])
def test_a_scale_and_a_code_belong_to_the_fingerprint(part: str, place: str, tmp_path: Path) -> None:
    """Of a tensor of up to 12 KiB each number does, as of these scales; of a larger one those of three samples."""
    plain = checkpoints.save_tiny_llama(tmp_path / "plain", **SIZES | {"intermediate_size": 960})
    save_published(plain, FORMATS["compressed int4 groups"], tmp_path / "coded", tmp_path / "decoded")
    module, tensors = "model.layers.1.mlp.up_proj", checkpoints.read_tensors(tmp_path / "coded")
    scales, codes = (tensors[f"{module}.{each}"].nbytes for each in ("weight_scale", "weight_packed"))
    assert 8192 < scales <= 12_288 < codes
    name = f"{module}.{part}"
    before = loaded(tmp_path / "coded").spec.fingerprint
    numbers = tensors[name].view(-1)
    index = round(CHANGES[place] * (len(numbers) - 1))
    numbers[index] = numbers[index] * 2 if part == "weight_scale" else numbers[index] ^ 1
    checkpoints.write_tensors(tmp_path / "coded", tensors)
    assert loaded(tmp_path / "coded").spec.fingerprint != before


def test_a_rotation_does_not_depend_on_the_rows_beside() -> None:
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(1))
    whole = rotate_blocks(x, 64)
    expected = x.double().numpy() @ np.kron(np.eye(3), hadamard(64).astype(np.float64))
    np.testing.assert_allclose(whole.numpy(), expected, atol=1e-5)
    assert all(torch.equal(rotate_blocks(x[row : row + 1], 64)[0], whole[row]) for row in range(7))
