"""Models of every family and format on an NVIDIA GPU, with the kernels chosen there, beside PyTorch on the CPU.

In float32 greedy tokens are equal. In bfloat16, where rounding decides between near-ties, log-probabilities are about
as near to those of float32 as PyTorch's on the CPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tests.helpers import checkpoints
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import write_byte_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DEVICE = "cuda"
FAMILIES = (
    checkpoints.BUILDERS | checkpoints.MORE_BUILDERS | checkpoints.EXPERT_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS
)
PROMPTS = ([5, 9, 13, 2], list(range(40, 95)), [7])
MOST_ERROR = 1.5
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}


def engine_on(device: str, path: Path, dtype: str) -> Engine:
    choice: dict[str, Any] = {"native_kernels": False, "attention_backend": "reference"}
    if device == DEVICE:
        choice = {"native_kernels": None, "attention_backend": "auto"}
    return tiny_engine(path, device=device, dtype=dtype, kv_cache_bytes=1 << 24, **choice)


def tokens(engine: Engine) -> list[list[int]]:
    """Of all prompts at once: prefill in company, then decode steps of several."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[name, 0]) for name in names]


def logprobs(engine: Engine) -> torch.Tensor:
    """Of the longest prompt's tokens after the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    name = engine.add_request(PROMPTS[1], params)
    found = next(each.prompt_logprobs for each in drain(engine)[name, 0] if each.prompt_logprobs is not None)
    return torch.tensor([entry.logprob for entry in found if entry is not None])


def check(path: Path) -> None:
    write_byte_tokenizer(path)
    plain = engine_on("cpu", path, "float32")
    assert tokens(engine_on(DEVICE, path, "float32")) == tokens(plain)
    exact = logprobs(plain)
    ours, usual = (
        (logprobs(engine_on(device, path, "bfloat16")) - exact).abs().mean().item() for device in (DEVICE, "cpu")
    )
    assert ours < MOST_ERROR * usual + 0.01, (ours, usual)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    save: Callable[[Path], Path] = FAMILIES[name]
    check(save(tmp_path / name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_formats(family: str, name: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"moe_intermediate_size": 64} if family == "qwen3_moe" else {})
    path = getattr(checkpoints, f"save_tiny_{family}")(tmp_path / family, **sizes)
    save_published(path, FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
    check(tmp_path / "coded")
