"""`--activations int8`: the same tokens in any company, a fingerprint of its own, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.model import HEAD
from tandem.compute.codes import CodedMatrix
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.compute.weights.row_rounding import rounding_rows
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models import packed
from tandem.models.gguf.convert import converted
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.engines import TINY, drain, tiny_engine
from tests.helpers.gguf_files import write_gguf
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.tokenizers import write_byte_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}
PROMPTS = ([5, 9, 13, 2], list(range(40, 140)), [7])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
CASES = [("llama", "gptq with zero points"), ("qwen3_moe", "compressed int4 groups"), ("llama", "gguf")]
OTHERS = [("llama", "gptq 2 in an order"), ("llama", "compressed int8 channels"), ("qwen3_moe", "compressed mxfp4")]


def save(path: Path, family: str, name: str) -> Path:
    """A checkpoint of codes."""
    sizes = SIZES | ({"moe_intermediate_size": 64} if family == "qwen3_moe" else {})
    plain = write_byte_tokenizer(checkpoints.BUILDERS[family](path / "plain", **sizes))
    if name == "gguf":
        return converted(write_gguf(plain, path / "a.gguf", type_name="Q4_1"), path / "cache")
    save_published(plain, FORMATS[name], path / "coded", path / "decoded")
    return path / "coded"


def compiled(path: Path, **options: Any) -> EngineConfig:
    return replace(TINY, model=str(path), dtype="bfloat16", native_kernels=True, attention_backend="native", **options)


def served(config: EngineConfig, prompts: Any) -> list[list[RequestOutput]]:
    """Outputs of all prompts at once."""
    engine = build_engine(config)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    outputs = drain(engine)
    engine.close()
    return [outputs[request_id, 0] for request_id in ids]


def scores(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("family", "name"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_bits_do_not_depend_on_batch_or_chunk(family: str, name: str, tmp_path: Path) -> None:
    load_or_skip()
    path = save(tmp_path, family, name)
    config = compiled(path, activations="int8")
    together = served(config, PROMPTS)
    alone = [served(config, [prompt])[0] for prompt in PROMPTS]
    in_chunks = served(replace(config, max_num_batched_tokens=33), PROMPTS)
    for first, second, third in zip(together, alone, in_chunks, strict=True):
        assert scores(first) == scores(second) == scores(third)
    assert [scores(each) for each in served(replace(config, activations="float"), PROMPTS)] != [
        scores(each) for each in together
    ]


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    return save(tmp_path, "llama", "compressed int4 groups")


def loaded(path: Path, formats_of: FormatReader = read_formats, **options: Any) -> LoadedModel:
    cpu = torch.device("cpu")
    return load_model(str(path), dtype="float32", device=cpu, kernels=load_or_skip(), formats_of=formats_of, **options)


def test_the_fingerprint_tells_them_apart(coded: Path) -> None:
    """So a prefill and a decode worker of different settings do not pair."""
    plain, rounding = loaded(coded).spec.fingerprint, loaded(coded, rounding_rows(read_formats)).spec.fingerprint
    assert plain != rounding
    assert loaded(coded, rounding_rows(read_formats)).spec.fingerprint == rounding


def test_codes_from_the_packed_file_round_rows_too(
    coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    for _ in range(2):
        found = loaded(coded, rounding_rows(read_formats), packed_dir=tmp_path / "packed").decoder.parameters.weights
        matrices = {name: weight.matrix for name, weight in found.items()}
        rounding = {name for name, each in matrices.items() if isinstance(each, CodedMatrix) and each.rounds_rows}
        assert rounding == {*matrices} - {HEAD}


@pytest.mark.parametrize("name", [None, "fp8 blocks", "bitsandbytes nf4"])
def test_models_without_integer_codes_are_refused(name: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plain"
    write_byte_tokenizer(checkpoints.save_tiny_llama(path, **SIZES))
    if name is not None:
        save_published(path, FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
        path = tmp_path / "coded"
    with pytest.raises(ConfigurationError, match=r"activations='int8' is for weights of integer codes .* this model"):
        tiny_engine(path, activations="int8")


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"activations='int4' is not served; choose one of float, int8"):
        replace(TINY, activations="int4")
