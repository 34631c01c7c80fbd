"""Heads that are trained here guess as they are served, and learn."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.head_references import eagle3_guess
from tools.eagle_answers import Example
from tools.eagle_network import EagleNetwork, HeadSizes, head_config, saved_tensors
from tools.train_eagle import Settings, acceptance, rows_of, train

LAYERS = (0, 1, 2)
NUM_GUESSES = 3


def random_network(num_tokens: int, embedding: torch.Tensor) -> EagleNetwork:
    vocab, hidden = embedding.shape
    sizes = HeadSizes(hidden, 48, 4, 2, 16, num_tokens, 10000.0, 1e-5)
    token_ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:num_tokens].sort().values
    torch.manual_seed(1)
    network = EagleNetwork(sizes, embedding, token_ids, embedding[token_ids], torch.ones(hidden))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).bfloat16())
    return network


@torch.no_grad()
def test_a_network_guesses_what_the_published_layout_of_it_guesses(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path, num_hidden_layers=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    embedding = model.state_dict()["model.embed_tokens.weight"].float()
    network = random_network(80, embedding)
    head = tmp_path / "eagle"
    head.mkdir()
    save_file(saved_tensors(network), head / "model.safetensors")
    (head / "config.json").write_text(json.dumps(head_config(network.sizes, LAYERS, len(embedding), 256)))
    tokens = torch.randint(len(embedding), (40,), generator=torch.Generator().manual_seed(5)).tolist()
    hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[layer] for layer in LAYERS], dim=2)
    behind = tokens[1:]
    for depth in range(NUM_GUESSES):
        rows = network.guesses(states, torch.tensor([behind]), depth + 1)[depth]
        behind.append(int(network.token_ids[network.lm_head(rows[0, -1]).argmax()]))
    expected = [int(weight) for weight in eagle3_guess(path, head, tokens, NUM_GUESSES)]
    assert behind[-NUM_GUESSES:] == expected


def counting_examples(count: int, embedding: torch.Tensor) -> list[Example]:
    """Texts in which the next token is always the next number; states are those of embeddings."""
    vocab = len(embedding)
    found = []
    for start in range(count):
        tokens = [(start * 7 + place) % vocab for place in range(24)]
        here, ahead = (embedding[torch.tensor(part)] for part in (tokens[:-1], tokens[1:]))
        states = torch.cat((here, here, here, 8 * ahead), dim=1).bfloat16()
        found.append(Example(tokens, 4, states, is_greedy=True, is_held_out=False))
    return found


def test_a_head_learns_and_its_guesses_are_counted() -> None:
    embedding = torch.nn.functional.normalize(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), dim=1)
    network = random_network(64, embedding)
    examples = counting_examples(8, embedding)
    settings = Settings(
        num_shallow_epochs=40, num_deep_epochs=20, batch_tokens=200, matrix_rate=2e-2, other_rate=2e-2, report_every=10
    )
    before = acceptance(network, examples, NUM_GUESSES, settings.longest)
    curve = train(network, examples, settings)
    after = acceptance(network, examples, NUM_GUESSES, settings.longest)
    assert curve[-1][1] < curve[0][1]
    # Rows 2 to 19 of 24 tokens: the first guesses token 4, where the answer begins, the last one tokens 21 to 23.
    assert after["num_rows"] == before["num_rows"] == 8 * 18
    assert after["tokens_per_step"][-1] > 3 > 2 > before["tokens_per_step"][-1]  # type: ignore[index]


@pytest.mark.parametrize("num_depths", [1, 3])
def test_rows_are_aligned_with_what_they_guess(num_depths: int) -> None:
    embedding = torch.eye(64)
    example = counting_examples(1, embedding)[0]
    rows = rows_of([example], num_depths, longest=640)
    length = rows.states.shape[1]
    assert rows.token_ids[0, :length].tolist() == list(example.token_ids[1:])
    # The model's last state one position behind row i is that from which token i + 2 follows.
    chosen = rows.teacher[0].argmax(1)[: length - 1]
    assert chosen.tolist() == list(example.token_ids[2:])
    assert rows.is_learnt[0].nonzero()[0].item() == example.num_prompt_tokens - 2
