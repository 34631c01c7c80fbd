"""Shards of checkpoints: each rank loads its own rectangles, and together they are the checkpoint again."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.model import HEAD
from tandem.compute.collectives import RankLinks
from tandem.compute.ops import Matrix
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.coded import CodedWeight
from tandem.compute.weights.shards import GatheredWeight, JoinedWeight, SummedWeight
from tandem.core.errors import ConfigurationError
from tandem.models import packed
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import FORMATS, save_published


@dataclass(frozen=True)
class _Silent:
    """`Collectives` of a rank that only loads."""

    rank: int
    num_ranks: int

    def add(self, node: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError

    def join(self, part: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        raise AssertionError

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def collect(self, terms: torch.Tensor, owners: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError


def load(path: Path, rank: int = 0, num_ranks: int = 1) -> LoadedModel:
    silent = _Silent(rank, num_ranks)
    links = None if num_ranks == 1 else RankLinks(silent, silent)
    return load_model(str(path), device=torch.device("cpu"), kernels=TorchKernels(), links=links)


def matrix(model: LoadedModel, name: str) -> torch.Tensor:
    weight = model.decoder.parameters.weights[name]
    inner = weight.own if isinstance(weight, SummedWeight | JoinedWeight | GatheredWeight) else weight
    if isinstance(inner, CodedWeight):
        return inner.coded.decode()
    assert isinstance(inner.matrix, Matrix)
    return inner.matrix.tensor


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "save", [checkpoints.save_tiny_qwen2, checkpoints.save_tiny_phi3, checkpoints.save_tiny_gemma3]
)
def test_loaded_shards_are_the_checkpoint_again(tmp_path: Path, save: checkpoints.Builder, num_ranks: int) -> None:
    """Biases, fused projections and a tied head included; K and V of two heads are in two of four ranks."""
    path = save(tmp_path, num_key_value_heads=2)
    whole = load(path)
    shards = [load(path, rank, num_ranks) for rank in range(num_ranks)]
    assert {shard.spec.fingerprint for shard in shards} == {whole.spec.fingerprint}
    kept = [shard.decoder.parameters.tensors for shard in shards]
    for name, tensor in whole.decoder.parameters.tensors.items():
        if name.endswith(".bias") and "o_proj" not in name:
            parts = [tensors[name] for tensors in kept]
            tensor_again = torch.cat(parts[:: num_ranks // 2] if "k_proj" in name or "v_proj" in name else parts)
            assert torch.equal(tensor_again, tensor), name
        else:
            assert all(torch.equal(tensors[name], tensor) for tensors in kept), name
    for weight in whole.spec.weights():
        parts = [matrix(shard, weight.name) for shard in shards]
        parts = parts[:: num_ranks // 2] if "k_proj" in weight.name or "v_proj" in weight.name else parts
        axis = 1 if weight.sum_blocks > 1 else 0
        assert torch.equal(torch.cat(parts, dim=axis), matrix(whole, weight.name)), weight.name
    assert {type(shard.decoder.parameters.weights[HEAD]) for shard in shards} == {JoinedWeight}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_split_by_outputs(tmp_path: Path, name: str) -> None:
    """So no group of inputs is parted, nor an order of inputs. What is no code is split by inputs as ever."""
    dense, coded, decoded = (tmp_path / part for part in ("dense", "coded", "decoded"))
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 128}
    save_published(checkpoints.save_tiny_llama(dense, num_key_value_heads=2, **sizes), FORMATS[name], coded, decoded)
    whole = load(coded)
    shards = [load(coded, rank, 2) for rank in range(2)]
    for weight in whole.spec.weights():
        parts = [matrix(shard, weight.name) for shard in shards]
        is_split_by_inputs = isinstance(shards[0].decoder.parameters.weights[weight.name], SummedWeight)
        assert is_split_by_inputs <= (FORMATS[name].encoder(weight.name) is None)
        assert torch.equal(torch.cat(parts, dim=int(is_split_by_inputs)), matrix(whole, weight.name)), weight.name


def test_ranks_share_the_scales_of_a_block_that_is_parted(tmp_path: Path) -> None:
    """Blocks of 128 outputs, and 64 of the keys' for each rank."""
    dense, coded, decoded = (tmp_path / name for name in ("dense", "coded", "decoded"))
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
    save_published(
        checkpoints.save_tiny_llama(dense, num_key_value_heads=2, **sizes), FORMATS["fp8 blocks"], coded, decoded
    )
    whole, *shards = load(coded), load(coded, 0, 2), load(coded, 1, 2)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(torch.cat([matrix(shard, name) for shard in shards]), matrix(whole, name))


def test_codes_whose_words_would_be_parted_are_refused_by_name(tmp_path: Path) -> None:
    """Words of 8 outputs, and 4 of the keys' for each rank."""
    dense, coded, decoded = (tmp_path / name for name in ("dense", "coded", "decoded"))
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 4}
    save_published(checkpoints.save_tiny_llama(dense, num_key_value_heads=2, **sizes), FORMATS["awq"], coded, decoded)
    with pytest.raises(
        ConfigurationError, match=r"tp=2 cannot split this: .*k_proj.* one row for 8 outputs.*or use tp=1"
    ):
        load(coded, 1, 2)


def test_each_expert_is_loaded_by_one_rank(tmp_path: Path) -> None:
    """And the router by all."""
    path = checkpoints.save_tiny_qwen3_moe(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    whole = load(path)
    shards = [load(path, rank, 4) for rank in range(4)]
    loaded = [{name for name in shard.decoder.parameters.weights if ".experts." in name} for shard in shards]
    assert sum(map(len, loaded)) == len(set().union(*loaded))
    assert set().union(*loaded) == {name for name in whole.decoder.parameters.weights if ".experts." in name}
    assert [len(names) for names in loaded] == [6, 12, 6, 12], "three maps of each expert, in two layers"
    routers = [matrix(shard, "model.layers.0.mlp.gate.weight") for shard in shards]
    assert all(torch.equal(router, routers[0]) for router in routers)


def test_fewer_experts_than_ranks_are_refused_before_a_file_is_opened(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_mixtral(tmp_path, num_local_experts=2, num_key_value_heads=4)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"tp=4 cannot .*layer 0 has 2 experts, fewer than 4 ranks.* tp=1, 2$"):
        load(path, 0, 4)


def test_each_stage_has_a_packed_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: stages between the first and the last had the same file, so each start wrote it anew."""
    kernels, silent = load_or_skip(), _Silent(0, 1)
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    path = checkpoints.save_tiny_qwen3(tmp_path / "model", num_hidden_layers=4, vocab_size=208)
    for _ in range(2):
        for stage in range(4):
            links = RankLinks(silent, silent, stage=stage, num_stages=4)
            with caplog.at_level(logging.INFO, logger=packed.__name__):
                load_model(
                    str(path), device=torch.device("cpu"), kernels=kernels, packed_dir=tmp_path / "packed", links=links
                )
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) == 4
    words = [record.message.split()[0] for record in caplog.records if record.name == packed.__name__]
    assert words == ["packing", "packed"] * 4
