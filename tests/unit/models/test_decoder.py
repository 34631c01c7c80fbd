"""What golden parity in float32 cannot see: roundings and dtypes at the two ends of the decoder."""

import torch

from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import NormSpec
from tandem.attention.reference import ReferenceBackend
from tandem.kernels.torch_kernels import TorchKernels
from tandem.models.decoder import Decoder


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
    return Decoder(spec, weights, TorchKernels())


def _hidden(decoder: Decoder) -> torch.Tensor:
    return decoder.forward(torch.arange(50), torch.zeros(50, dtype=torch.long), (), (), ReferenceBackend())


def test_embedding_scale_is_rounded_to_the_dtype_first() -> None:
    """As Gemma was trained: the square root of 72 is 8.5 in bfloat16."""
    assert torch.equal(_hidden(_decoder(embedding_scale=72**0.5)), _hidden(_decoder(embedding_scale=8.5)))


def test_embeddings_are_not_scaled_in_place() -> None:
    decoder = _decoder(embedding_scale=2.0)
    assert torch.equal(_hidden(decoder), _hidden(decoder))


def test_logits_are_float32_and_capped() -> None:
    hidden = _hidden(_decoder()) * 4
    plain, capped = _decoder().logits(hidden), _decoder(logit_softcap=5.0).logits(hidden)
    assert plain.dtype == capped.dtype == torch.float32
    assert plain.abs().max() > 10
    torch.testing.assert_close(capped, 5.0 * torch.tanh(plain / 5.0))
