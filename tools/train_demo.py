"""Makes `demo/tandem-demo`: mines the corpus, trains tokenizer and model, measures, writes a Hugging Face directory.

    python -m tools.train_demo --out demo/tandem-demo

The run is a function of the seed, the number of steps and the installed Python's standard library; time decides
nothing. It needs no network and one CPU thread (about half an hour). It never reads the checkpoint it replaces.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.demo_batches import (
    IGNORED,
    ConversationRows,
    DocumentRows,
    Sample,
    batch_tensors,
    encode_conversation,
    encode_document,
    evaluation_rows,
)
from tools.demo_card import model_card
from tools.demo_corpus import Corpus, corpus_origin, mine_corpus
from tools.demo_tokenizer import END_OF_TEXT, VOCAB_SIZE, train_tokenizer

LOG = logging.getLogger("tools.train_demo")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result besides the corpus. Lengths are tokens, rates are per step."""

    seed: int = 1
    num_steps: int = 1500
    num_warmup_steps: int = 50
    learning_rate: float = 3e-3
    num_decay_steps: int = 300
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    num_document_rows: int = 4
    num_conversation_rows: int = 4
    row_length: int = 257
    long_row_length: int = 4097
    long_row_every: int = 50
    evaluation_length: int = 1024
    report_every: int = 50
    loss_chunk: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0

    def is_long_step(self, step: int) -> bool:
        """Now and then a step is one whole-context row, so that far positions are not noise."""
        return step % self.long_row_every == self.long_row_every - 1

    def rate_at(self, step: int) -> float:
        """Linear warm-up, a plateau, and a linear descent to nothing in the last `num_decay_steps`."""
        warmup = (step + 1) / self.num_warmup_steps
        decay = (self.num_steps - step) / self.num_decay_steps
        return self.learning_rate * min(1.0, warmup, decay)


@dataclass(frozen=True)
class Encoded:
    """A corpus as token ids, with each text's length in bytes beside it for bits per byte."""

    documents: list[Sample]
    conversations: list[Sample]
    document_bytes: int
    conversation_bytes: int


class Batches:
    """The order of rows: half plain text, half chats; long rows alternate between the two."""

    def __init__(self, encoded: Encoded, settings: Settings) -> None:
        self.settings = settings
        order = random.Random(settings.seed)
        row, long_row = settings.row_length, settings.long_row_length
        self.documents = DocumentRows(encoded.documents, order, row)
        self.conversations = ConversationRows(encoded.conversations, order, row)
        self.long_documents = DocumentRows(encoded.documents, order, long_row)
        self.long_conversations = ConversationRows(encoded.conversations, order, long_row)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of this step: int64 [num_rows, length]."""
        if self.settings.is_long_step(step):
            is_chat = (step // self.settings.long_row_every) % 2 == 1
            row = (self.long_conversations if is_chat else self.long_documents).next_row()
            return batch_tensors([row], self.settings.long_row_length)
        rows = [self.documents.next_row() for _ in range(self.settings.num_document_rows)]
        rows += [self.conversations.next_row() for _ in range(self.settings.num_conversation_rows)]
        return batch_tensors(rows, self.settings.row_length)


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly initialised float32 model."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.long_row_length - 1,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(settings.seed)
    model = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, torch.float32)
    return model


def encode(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, *, repeats: bool) -> Encoded:
    """`repeats` weights the conversations by their `copies`, as training does."""
    documents = [encode_document(tokenizer, document) for document in corpus.documents]
    conversations = []
    for conversation in corpus.conversations:
        sample = encode_conversation(tokenizer, conversation)
        conversations += [sample] * (conversation.copies if repeats else 1)
    answers = [t.content for c in corpus.conversations for t in c.turns if t.role == "assistant"]
    return Encoded(documents, conversations, _num_bytes([d.text for d in corpus.documents]), _num_bytes(answers))


def _num_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def summed_loss(model: Qwen3ForCausalLM, inputs: Tensor, labels: Tensor, chunk: int, scale: float) -> Tensor:
    """Cross entropy summed over learnt tokens, times `scale`; with gradients enabled, also back-propagated.

    The head runs on `chunk` learnt tokens at a time, so that no [num_tokens, vocab_size] tensor is ever made. The
    last chunk is padded: a CPU kernel is prepared once a shape, and the number of learnt tokens differs every step.
    """
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [num_rows, length, hidden_size]
    learnt = labels != IGNORED
    num_padding = -int(learnt.sum()) % chunk
    selected = F.pad(hidden[learnt], (0, 0, 0, num_padding))  # [num_chunks * chunk, hidden_size]
    targets = F.pad(labels[learnt], (0, num_padding), value=IGNORED)
    leaf = selected.detach().requires_grad_(torch.is_grad_enabled())
    total = torch.zeros(())
    for part, target in zip(torch.split(leaf, chunk), torch.split(targets, chunk), strict=True):
        loss = F.cross_entropy(model.lm_head(part).float(), target, reduction="sum") * scale
        total += loss.detach()
        if loss.requires_grad:
            torch.autograd.backward(loss)
    if leaf.grad is not None:
        torch.autograd.backward(selected, leaf.grad)
    return total


def train(model: Qwen3ForCausalLM, batches: Batches, settings: Settings) -> tuple[list[tuple[int, float]], int]:
    """Run every step. Returns (step, mean training loss since the last point) pairs and the tokens seen."""
    optimizers = _optimizers(model, settings)
    curve: list[tuple[int, float]] = []
    recent: list[float] = []
    num_tokens = 0
    for step in range(settings.num_steps):
        inputs, labels = batches.at(step)
        num_tokens += inputs.numel()
        recent.append(_train_step(model, optimizers, inputs, labels, step, settings))
        if (step + 1) % settings.report_every == 0:
            curve.append((step + 1, round(sum(recent) / len(recent), 4)))
            recent.clear()
            LOG.info("step %d loss %.4f tokens %d", *curve[-1], num_tokens)
    return curve, num_tokens


def _optimizers(model: Qwen3ForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    decay, rate = settings.weight_decay, settings.learning_rate
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]


def _train_step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    inputs: Tensor,
    labels: Tensor,
    step: int,
    settings: Settings,
) -> float:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = settings.rate_at(step)
    scale = 1.0 / max(1, int((labels != IGNORED).sum()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_loss(model, inputs, labels, settings.loss_chunk, scale)
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return float(loss)


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, samples: list[Sample], num_bytes: int, settings: Settings) -> dict[str, float]:
    """Perplexity per learnt token and bits per byte of learnt text, from a cold start every evaluation row."""
    total, num_tokens = 0.0, 0
    for row in evaluation_rows(samples, settings.evaluation_length):
        inputs, labels = batch_tensors([row], len(row.ids))
        total += float(summed_loss(model, inputs, labels, settings.loss_chunk, 1.0))
        num_tokens += int((labels != IGNORED).sum())
    return {
        "perplexity": round(math.exp(total / num_tokens), 3),
        "bits_per_byte": round(total / math.log(2) / num_bytes, 4),
        "num_tokens": num_tokens,
    }


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, out: Path) -> None:
    """Write weights, configuration, tokenizer and generation defaults."""
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    _set_json_value(out / "config.json", "rope_theta", settings.rope_theta)
    _set_json_value(out / "tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast")


def _set_json_value(path: Path, key: str, value: object) -> None:
    """Readers older than transformers 5 look for other keys than it writes."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Train, measure and write the checkpoint directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo/tandem-demo"))
    parser.add_argument("--steps", type=int, default=Settings.num_steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    make_checkpoint(replace(Settings(), num_steps=arguments.steps, seed=arguments.seed), arguments.out)


def make_checkpoint(settings: Settings, out: Path) -> None:
    """The whole run; the weights are measured as they are stored, after rounding to bfloat16."""
    corpus = mine_corpus()
    training, held_out = corpus.split()
    turns = [turn.content for conversation in training.conversations for turn in conversation.turns]
    tokenizer = train_tokenizer([d.text for d in training.documents] + turns)
    model = build_model(settings, tokenizer)
    LOG.info("%d parameters, corpus %s", model.num_parameters(), corpus.sha256())
    started_s = time.process_time()
    encoded = encode(training, tokenizer, repeats=True)
    curve, num_tokens = train(model, Batches(encoded, settings), settings)
    cpu_time_s = time.process_time() - started_s
    torch.nn.Module.to(model, torch.bfloat16)
    save(model, tokenizer, settings, out)
    torch.nn.Module.to(model, torch.float32)
    unseen = encode(held_out, tokenizer, repeats=False)
    record = {
        "settings": asdict(settings),
        "corpus": corpus_origin(),
        "corpus_sha256": corpus.sha256(),
        "num_parameters": model.num_parameters(),
        "num_tokens_per_epoch": {
            "plain": sum(len(s.ids) for s in encoded.documents),
            "chat": sum(len(s.ids) for s in encoded.conversations),
        },
        "num_tokens_seen": num_tokens,
        "loss_curve": curve,
        "held_out": {
            "plain": measure(model, unseen.documents, unseen.document_bytes, settings),
            "chat": measure(model, unseen.conversations, unseen.conversation_bytes, settings),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "hardware": f"one thread of a {platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}",
        "cpu_time_s": round(cpu_time_s),
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "README.md").write_text(model_card(record))


if __name__ == "__main__":
    main()
