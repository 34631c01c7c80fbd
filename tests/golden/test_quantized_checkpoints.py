"""Checkpoints of `tandem quantize`, read by transformers with compressed-tensors, beside our own reading of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.compute.native.build import default_cache_dir
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.models.default_model import fetch_default_model
from tandem.models.gguf.convert import converted
from tandem.quantize.coded_layer import from_stored
from tandem.quantize.recipe import FormatName, Method, Recipe
from tandem.quantize.source import SourceModel
from tandem.text.tokenizer import Tokenizer
from tests.helpers import checkpoints
from tests.helpers.checkpoints import load_reference
from tests.helpers.delta_checkpoints import save_tiny_qwen3_5_moe, save_tiny_qwen3_next
from tests.helpers.engines import serve_alone
from tests.helpers.hybrid_checkpoints import save_tiny_falcon_h1, save_tiny_lfm2_moe, save_tiny_nemotron_latent
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.quantizing import quantize_tiny, random_tokens
from tests.helpers.tokenizers import write_byte_tokenizer

pytest.importorskip("compressed_tensors", reason="compressed_tensors, whose decoding is compared, is not installed")

NUM_TOKENS = 24
TEXTS = ("The capital of France is", "def fibonacci(n):", "Water boils at a temperature of")
FORMATS: tuple[FormatName, ...] = ("int8", "int4", "fp8", "mxfp4", "nvfp4")
BUILDERS = {"llama": checkpoints.save_tiny_llama, "qwen2": checkpoints.save_tiny_qwen2}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
@pytest.mark.parametrize("name", FORMATS)
def test_transformers_finds_our_numbers(name: FormatName, build: checkpoints.Builder, tmp_path: Path) -> None:
    """Each weight, once decompressed, has the bits with which the quantiser went on to the next layer."""
    source = build(tmp_path / "model", dtype="bfloat16")
    recipe = Recipe(name, "rtn", group_size=32 if name == "int4" else None)
    quantize_tiny(source, tmp_path / "out", recipe)
    reference = load_reference(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        reference(random_tokens(1, 100))  # NOTE: weights are decoded at the first call
    model = SourceModel.open(source, TorchKernels())
    grid = recipe.grid(torch.bfloat16)
    theirs = dict(reference.named_parameters())
    for index in range(model.spec.num_layers):
        stored = load_file(tmp_path / "out" / f"model-layer-{index:05d}.safetensors")
        for weight, numbers in from_stored(model, index, grid, stored).items():
            assert torch.equal(numbers.to(torch.bfloat16), theirs[weight]), weight


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_transformers_answers_as_we_do(name: FormatName, tmp_path: Path) -> None:
    """Greedy, in float32. From a checkpoint in float32, whose scales are not rounded to 16 bits by either.
    Of mxfp4 and nvfp4 its decoding makes bfloat16 weights, which it does not multiply float32 rows with.
    """
    source = checkpoints.save_tiny_llama(tmp_path / "model", dtype="float32")
    write_byte_tokenizer(source)
    method: Method = "gptq" if name in ("int8", "int4") else "rtn"
    quantize_tiny(source, tmp_path / "out", Recipe(name, method, group_size=32 if name == "int4" else None))
    prompt = random_tokens(1, 40)
    reference: Any = load_reference(tmp_path / "out", dtype=torch.float32)
    theirs = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # NOTE: otherwise it leaves out the word that pads
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ours = serve_alone(tmp_path / "out", {"r": prompt[0].tolist()}, {"r": params}, dtype="float32")["r"]
    assert ours == theirs[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_answers_as_we_do_with_real_weights(tmp_path: Path) -> None:
    """SmolLM2 in int4 by GPTQ. NOTE: from its numbers in float32, as above."""
    try:
        file = fetch_default_model(default_cache_dir() / "models")
    except CheckpointError as error:
        pytest.skip(str(error))
    source = converted(file, tmp_path / "float32", decoded_to="float32")
    quantize_tiny(source, tmp_path / "out", Recipe("int4", "gptq", group_size=64))
    reference: Any = load_reference(tmp_path / "out", dtype=torch.float32)
    tokenizer, params = Tokenizer.load(source), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = {text: tokenizer.encode(text) for text in TEXTS}
    load_or_skip()
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "native_kernels": True}
    ours = serve_alone(tmp_path / "out", prompts, dict.fromkeys(prompts, params), **options, attention_backend="auto")
    for text, prompt in prompts.items():
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=-1,
        )
        assert ours[text] == theirs[0, len(prompt) :].tolist(), text


@pytest.mark.parametrize(
    "build",
    [
        checkpoints.save_tiny_phi3,
        checkpoints.save_tiny_qwen3_moe,
        save_tiny_falcon_h1,
        *(
            pytest.param(build, marks=pytest.mark.slow)
            for build in (save_tiny_lfm2_moe, save_tiny_nemotron_latent, save_tiny_qwen3_next, save_tiny_qwen3_5_moe)
        ),
    ],
    ids=["fused rows", "experts", "falcon-h1", "lfm2-moe", "nemotron-h", "qwen3-next", "qwen3.5-moe"],
)
def test_other_forms_are_read_too(build: checkpoints.Builder, tmp_path: Path) -> None:
    """Phi 3 has q, k and v in one module; transformers stacks experts."""
    source = build(tmp_path / "model", dtype="bfloat16")
    quantize_tiny(source, tmp_path / "out", Recipe("int8", "gptq"))
    reference = load_reference(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        reference(random_tokens(1, 100))
    found = dict(reference.named_parameters())
    for name, tensor in load_reference(source, dtype=torch.bfloat16).named_parameters():
        assert (found[name].float() - tensor.float()).norm() < 0.02 * tensor.float().norm(), name
