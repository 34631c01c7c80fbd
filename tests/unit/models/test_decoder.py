"""Cases that golden parity in float32 cannot see: roundings and dtypes at both ends of the decoder, work left out."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.model import ModelSpec
from tandem.architecture.state import KVSpec
from tandem.architecture.tensors import NormSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.order import Order
from tandem.compute.step import AttentionBatch, WantedTokens
from tandem.compute.torch.attention import ReferenceBackend
from tandem.compute.torch.kernels import TorchKernels
from tandem.kvcache.spec import build_layout
from tandem.models.decoder import Decoder
from tandem.models.loader import load_model
from tests.helpers import checkpoints, hybrid_checkpoints
from tests.helpers.parameters import dense_parameters, tensors_of
from tests.helpers.stepping import REFERENCE


def _decoder(*, embedding_scale: float = 1.0, logit_softcap: float = 0.0) -> Decoder:
    """A model without layers: an embedding, a norm and a tied head."""
    spec = ModelSpec(
        family="test",
        hidden_size=72,
        vocab_size=50,
        max_position_embeddings=16,
        layers=(),
        final_norm=NormSpec("model.norm", 72, 1.0),
        dtype="bfloat16",
        tie_word_embeddings=True,
        eos_token_ids=(),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
    )
    embedding = torch.randn(50, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(72).bfloat16()}
    kernels = TorchKernels()
    return Decoder(spec, dense_parameters(weights, kernels), kernels)


def _hidden(decoder: Decoder) -> torch.Tensor:
    return decoder.forward(torch.arange(50), torch.zeros(50, dtype=torch.long), (), (), REFERENCE)


def test_embedding_scale_is_rounded_to_the_dtype_first() -> None:
    """As Gemma was trained: the square root of 72 is 8.5 in bfloat16."""
    assert torch.equal(_hidden(_decoder(embedding_scale=72**0.5)), _hidden(_decoder(embedding_scale=8.5)))


@pytest.mark.parametrize(
    "save",
    [
        checkpoints.save_tiny_granite,
        checkpoints.save_tiny_granite_moe,
        hybrid_checkpoints.save_tiny_granite_hybrid,
        hybrid_checkpoints.save_tiny_falcon_h1,
    ],
)
def test_a_multiplier_of_embeddings_is_not_rounded(save: Callable[..., Path], tmp_path: Path) -> None:
    """Regression: that of Granite was rounded to bfloat16 first, as Gemma's scale is, and transformers does not."""
    path = save(tmp_path, dtype="bfloat16", embedding_multiplier=5.65)
    reference: Any = checkpoints.load_reference(path, torch.bfloat16)
    token_ids, seen = torch.arange(64), list[torch.Tensor]()
    reference.get_decoder().layers[0].register_forward_pre_hook(
        lambda _, args, named: seen.append(args[0] if args else named["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        reference(token_ids.unsqueeze(0))
    decoder = load_model(str(path), device=torch.device("cpu"), kernels=TorchKernels()).decoder
    assert torch.equal(decoder.embed(token_ids), seen[0][0])


def test_embeddings_are_not_scaled_in_place() -> None:
    decoder = _decoder(embedding_scale=2.0)
    assert torch.equal(_hidden(decoder), _hidden(decoder))


def test_logits_are_float32_and_capped() -> None:
    hidden = _hidden(_decoder()) * 4
    plain, capped = _decoder().logits(hidden), _decoder(logit_softcap=5.0).logits(hidden)
    assert plain.dtype == capped.dtype == torch.float32
    assert plain.abs().max() > 10
    torch.testing.assert_close(capped, 5.0 * torch.tanh(plain / 5.0))


class CountingKernels(TorchKernels):
    """Remembers how many tokens each weight was multiplied by, by the address of its memory."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        order: Order = Order.ROWS,
        sum_blocks: int = 1,
    ) -> torch.Tensor:
        self.rows[weight.data_ptr()] = len(x)
        return super().linear(x, weight, bias, out_dtype=out_dtype, order=order, sum_blocks=sum_blocks)


@pytest.mark.parametrize("num_wanted", [0, 1, 3])
def test_layers_behind_the_last_state_compute_only_tokens_that_are_asked_for(num_wanted: int, tmp_path: Path) -> None:
    """Of five layers of Gemma 4 the last two read the state of others; the third writes its own for all tokens."""
    kernels = CountingKernels()
    path = checkpoints.save_tiny_gemma4(tmp_path)
    decoder = load_model(str(path), device=torch.device("cpu"), kernels=kernels).decoder
    layout = build_layout(decoder.spec.kv_specs, 8)
    arena = Arena(layout, 1 + 2 * len(layout.groups), torch.device("cpu"))
    assert len(arena.layers) == 3
    token_ids, positions = torch.arange(20, 32), torch.arange(12)
    by_group = [_batch(1 + 2 * group, 12, 12) for group in range(len(layout.groups))]
    last = [_batch(1 + 2 * group, 12, num_wanted) for group in range(len(layout.groups))]
    groups = [layout.group_of_layer(state)[0] for state in range(3)]
    batches = [by_group[group] for group in groups]
    everything = decoder.forward(token_ids, positions, arena.layers, batches, REFERENCE)
    kernels.rows.clear()
    assert decoder.spec.wanted_states == (1, 2), "layers 3 and 4 read those of layers 1 and 2"
    wanted = WantedTokens(torch.arange(12 - num_wanted, 12), {state: last[groups[state]] for state in (1, 2)})
    hidden = decoder.forward(token_ids, positions, arena.layers, batches, REFERENCE, wanted)
    torch.testing.assert_close(hidden, everything[12 - num_wanted :])
    names = ("self_attn.q_proj", "self_attn.o_proj", "per_layer_input_gate")
    tensors = tensors_of(decoder)
    seen = [
        [kernels.rows.get(tensors[f"model.layers.{layer}.{name}.weight"].data_ptr(), 0) for name in names]
        for layer in (1, 2, 3, 4)
    ]
    assert seen == [[12] * 3, [12, num_wanted, num_wanted], [num_wanted] * 3, [num_wanted] * 3]


class PreparingBackend(ReferenceBackend):
    """Makes a batch of its own in `prepare` and wants it in `attend`."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[AttentionBatch, Collection[AttentionParams]]] = []

    def prepare(self, batch: AttentionBatch, kv: LayerKV, layers: Collection[AttentionParams]) -> AttentionBatch:
        self.prepared.append((replace(batch), layers))
        return self.prepared[-1][0]

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        assert any(batch is ready and params in layers for ready, layers in self.prepared)
        return super().attend(queries, kv, batch, params)


@pytest.mark.parametrize("num_wanted", [None, 0, 2])
@pytest.mark.parametrize(
    ("save", "num_groups", "num_read"),
    [(checkpoints.save_tiny_qwen3, 1, 1), (checkpoints.save_tiny_gemma4, 3, 2)],
    ids=["three layers of a group", "five layers of three groups"],
)
def test_a_batch_is_prepared_once_for_all_layers_of_a_kv_group(
    save: Callable[[Path], Path], num_groups: int, num_read: int, num_wanted: int | None, tmp_path: Path
) -> None:
    """Tokens that are asked for are a batch of their own, of `num_read` groups; none are not prepared."""
    decoder = load_model(str(save(tmp_path)), device=torch.device("cpu"), kernels=TorchKernels()).decoder
    layout = build_layout(decoder.spec.kv_specs, 8)
    assert len(layout.groups) == num_groups
    arena = Arena(layout, 1 + 2 * num_groups, torch.device("cpu"))
    groups = [layout.group_of_layer(state)[0] for state in range(layout.num_layers)]
    by_group = [_batch(1 + 2 * group, 12, 12) for group in range(num_groups)]
    wanted = None
    if num_wanted is not None:
        last = [_batch(1 + 2 * group, 12, num_wanted) for group in range(num_groups)]
        rows = torch.arange(12 - num_wanted, 12)
        wanted = WantedTokens(rows, {state: last[groups[state]] for state in decoder.spec.wanted_states})
    backend = PreparingBackend()
    batches = [by_group[group] for group in groups]
    decoder.forward(torch.arange(12), torch.arange(12), arena.layers, batches, {KVSpec: backend}, wanted)
    num_queries = [int(batch.query_start[-1]) for batch, _ in backend.prepared]
    assert num_queries == [12] * num_groups + ([num_wanted] * num_read if num_wanted else [])
    assert all(len(layers) == 1 for _, layers in backend.prepared)


def _batch(first_block: int, seq_len: int, num_tokens: int) -> AttentionBatch:
    """The last tokens of one request, whose blocks of 8 tokens come one after the other."""
    num_requests = int(num_tokens > 0)
    return AttentionBatch(
        query_start=torch.tensor([0, num_tokens][: num_requests + 1], dtype=torch.int32),
        seq_lens=torch.full((num_requests,), seq_len, dtype=torch.int32),
        block_tables=torch.tensor([[first_block, first_block + 1]][:num_requests], dtype=torch.int32).view(-1, 2),
        slot_mapping=8 * first_block + torch.arange(seq_len - num_tokens, seq_len),
        max_query_len=num_tokens,
        max_seq_len=seq_len,
    )
