"""Trains an EAGLE-3 head for a chat model on the model's own answers, and writes it in the published layout.

    python -m tools.train_eagle --out DIR [--model DIR] [--seed 1]

The default model is the one that `tandem up` serves. Questions are asked and answered, the head learns the model's
distributions behind hidden states of three layers, and its guesses at held-out greedy answers are counted. The run is a
function of the seed, the model and the installed Python, and needs one CPU thread. `training.json` has what was found.
"""

import argparse
import json
import logging
import platform
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.dtypes import checkpoint
from tools.eagle_answers import Amounts, Asker, Example
from tools.eagle_network import EagleNetwork, HeadSizes, head_config, saved_tensors

LOG = logging.getLogger("tools.train_eagle")
_IGNORED = -1


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result besides the model. Lengths are tokens, rates are per step."""

    seed: int = 1
    intermediate: int = 512
    num_tokens: int = 4608
    num_shallow_epochs: int = 2
    num_deep_epochs: int = 2
    num_depths: int = 3
    depth_weight: float = 0.8
    batch_tokens: int = 3000
    longest: int = 640
    matrix_rate: float = 2e-3
    other_rate: float = 5e-4
    num_warmup_steps: int = 20
    gradient_clip: float = 1.0
    report_every: int = 20


@dataclass(frozen=True)
class Teacher:
    """Weights and sizes of the model that are read besides its states. `layers`: those whose inputs the head takes."""

    config: dict[str, object]
    embedding: Tensor  # [vocab, hidden], its output head too
    final_norm: Tensor  # [hidden]
    layers: tuple[int, int, int]

    @classmethod
    def load(cls, path: Path) -> "Teacher":
        """Of a Llama whose output head is its embedding. `path`: a checkpoint in 16 bits."""
        config = json.loads((path / "config.json").read_text())
        tensors = load_file(next(path.glob("*.safetensors")))
        number = config["num_hidden_layers"]
        layers = (number // 4 + 1, number * 3 // 5, number - 1)
        return cls(config, tensors["model.embed_tokens.weight"].float(), tensors["model.norm.weight"].float(), layers)

    @property
    def num_layers(self) -> int:
        return int(str(self.config["num_hidden_layers"]))

    def sizes(self, settings: Settings) -> HeadSizes:
        def read(name: str) -> float:
            return float(str(self.config[name]))

        hidden, num_heads = int(read("hidden_size")), int(read("num_attention_heads"))
        return HeadSizes(
            hidden=hidden,
            intermediate=settings.intermediate,
            num_heads=num_heads,
            num_kv_heads=int(read("num_key_value_heads")),
            head_dim=hidden // num_heads,
            num_tokens=settings.num_tokens,
            rope_theta=read("rope_theta"),
            eps=read("rms_norm_eps"),
        )


@dataclass(frozen=True)
class Rows:
    """A batch. Row i has the states of position i; what it guesses at depth d is token i + 2 + d.

    states: [batch, length, 3 * hidden].
    token_ids: [batch, length + num_depths], those behind each row.
    teacher: [batch, length + num_depths, hidden], the model's last states one position behind each row.
    is_learnt: bool [batch, length + num_depths], whether the token after that is part of an answer.
    """

    states: Tensor
    token_ids: Tensor
    teacher: Tensor
    is_learnt: Tensor


def rows_of(examples: Sequence[Example], num_depths: int, longest: int) -> Rows:
    """Rows of several examples, padded at their ends."""
    length = max(min(len(example.states), longest) for example in examples)
    hidden = examples[0].states.shape[1] // 4
    batch, ahead = len(examples), length + num_depths
    states = torch.zeros(batch, length, 3 * hidden)
    token_ids = torch.zeros(batch, ahead, dtype=torch.int64)
    teacher = torch.zeros(batch, ahead, hidden)
    is_learnt = torch.zeros(batch, ahead, dtype=torch.bool)
    for number, example in enumerate(examples):
        own = example.states[: ahead + 1]
        states[number, : len(own[:length])] = own[:length, : 3 * hidden].float()
        following = example.token_ids[1 : ahead + 1]
        token_ids[number, : len(following)] = torch.tensor(following)
        teacher[number, : len(own) - 1] = own[1:, 3 * hidden :].float()
        is_learnt[number, max(0, example.num_prompt_tokens - 2) : len(own) - 1] = True
    return Rows(states, token_ids, teacher, is_learnt)


def batches(examples: Sequence[Example], settings: Settings, order: random.Random) -> Iterator[list[Example]]:
    """All examples in batches of about the same number of tokens, examples of about a length together."""
    ranked = sorted(examples, key=lambda example: (len(example.states), example.token_ids))
    found: list[list[Example]] = [[]]
    for example in ranked:
        if found[-1] and (len(found[-1]) + 1) * min(len(example.states), settings.longest) > settings.batch_tokens:
            found.append([])
        found[-1].append(example)
    order.shuffle(found)
    yield from found


def loss_of(network: EagleNetwork, rows: Rows, num_depths: int, settings: Settings) -> Tensor:
    """Mean cross entropy to the model's distribution over the head's tokens, where its choice is among them."""
    length = rows.states.shape[1]
    found = network.guesses(rows.states, rows.token_ids, num_depths)
    total, weights = torch.zeros(()), 0.0
    for depth, hidden in enumerate(found):
        here = slice(depth, depth + length)
        chosen = _numbers(network)[rows.token_ids[:, depth + 1 : depth + 1 + length]]
        width = chosen.shape[1]
        is_learnt = rows.is_learnt[:, here][:, :width] & (chosen != _IGNORED)
        with torch.no_grad():
            wanted = torch.softmax((rows.teacher[:, here][:, :width][is_learnt] @ network.output.T).float(), dim=-1)
        logits = network.lm_head(hidden[:, :width][is_learnt]).float()
        weight = settings.depth_weight**depth
        total = total - weight * (wanted * F.log_softmax(logits, dim=-1)).sum(-1).mean()
        weights += weight
    return total / weights


def _numbers(network: EagleNetwork) -> Tensor:
    """[vocab], the head's number of each of the model's tokens; `_IGNORED` for those it does not have."""
    numbers = torch.full((len(network.embedding),), _IGNORED)
    numbers[network.token_ids] = torch.arange(len(network.token_ids))
    return numbers


def train(network: EagleNetwork, examples: Sequence[Example], settings: Settings) -> list[tuple[int, float]]:
    """Run all epochs: first one guess of each row, then several. Returns (step, mean loss since the last point)."""
    order = random.Random(settings.seed)
    depths = [1] * settings.num_shallow_epochs + [settings.num_depths] * settings.num_deep_epochs
    steps = [(depth, batch) for depth in depths for batch in batches(examples, settings, order)]
    optimizers = _optimizers(network, settings)
    curve: list[tuple[int, float]] = []
    recent: list[float] = []
    for step, (num_depths, batch) in enumerate(steps):
        rate = min(1.0, (step + 1) / settings.num_warmup_steps, 2 * (1 - step / len(steps)))
        rows = rows_of(batch, num_depths, settings.longest)
        recent.append(_train_step(network, optimizers, rows, num_depths, rate, settings))
        if (step + 1) % settings.report_every == 0:
            curve.append((step + 1, round(sum(recent) / len(recent), 4)))
            recent.clear()
            LOG.info("step %d of %d loss %.4f", curve[-1][0], len(steps), curve[-1][1])
    return curve


def _optimizers(network: EagleNetwork, settings: Settings) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon (Jordan et al. 2024) for the layer's matrices, AdamW for the output head and the norms; and their rates."""
    parameters = dict(network.named_parameters())
    matrices = [p for name, p in parameters.items() if p.dim() == 2 and not name.startswith("lm_head")]
    others = [p for name, p in parameters.items() if p.dim() == 1 or name.startswith("lm_head")]
    muon = torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=settings.other_rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    return [(muon, settings.matrix_rate), (adamw, settings.other_rate)]


def _train_step(
    network: EagleNetwork,
    optimizers: Sequence[tuple[torch.optim.Optimizer, float]],
    rows: Rows,
    num_depths: int,
    rate: float,
    settings: Settings,
) -> float:
    for optimizer, highest in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * highest
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(network, rows, num_depths, settings)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(network.parameters(), settings.gradient_clip)
    for optimizer, _ in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@torch.no_grad()
def acceptance(network: EagleNetwork, examples: Sequence[Example], num_depths: int, longest: int) -> dict[str, object]:
    """Share of guesses that equal the answer's token, of answers that are greedy.

    At each depth: the share among rows whose earlier guesses were all right; tokens per step: if all are checked.
    """
    rights = [0] * num_depths
    num_rows = 0
    for example in examples:
        rows = rows_of([example], num_depths, longest)
        length = rows.states.shape[1]
        is_right = rows.is_learnt[0, : length - num_depths].clone()
        num_rows += int(is_right.sum())
        for depth, hidden in enumerate(network.guesses(rows.states, rows.token_ids, num_depths)):
            guessed = network.token_ids[network.lm_head(hidden[0, : len(is_right)]).argmax(-1)]
            is_right &= guessed == rows.token_ids[0, depth + 1 : depth + 1 + len(is_right)]
            rights[depth] += int(is_right.sum())
    before = [num_rows, *rights]
    return {
        "num_rows": num_rows,
        "accepted_at": [round(right / max(1, earlier), 4) for right, earlier in zip(rights, before, strict=False)],
        "tokens_per_step": [round(1 + sum(rights[: d + 1]) / max(1, num_rows), 4) for d in range(num_depths)],
    }


def build_network(teacher: Teacher, examples: Sequence[Example], settings: Settings) -> EagleNetwork:
    """A head whose tokens are the most frequent of the answers."""
    counts = Counter(token for example in examples for token in example.token_ids[example.num_prompt_tokens :])
    ranked = sorted(range(len(teacher.embedding)), key=lambda token: (-counts[token], token))
    token_ids = torch.tensor(sorted(ranked[: settings.num_tokens]))
    torch.manual_seed(settings.seed)
    output = teacher.embedding[token_ids]
    return EagleNetwork(teacher.sizes(settings), teacher.embedding, token_ids, output, teacher.final_norm)


def save(network: EagleNetwork, teacher: Teacher, out: Path) -> int:
    """Write the head's directory; returns the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(saved_tensors(network), out / "model.safetensors")
    max_positions = int(str(teacher.config["max_position_embeddings"]))
    config = head_config(network.sizes, teacher.layers, len(teacher.embedding), max_positions)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return (out / "model.safetensors").stat().st_size


def make_head(model: Path | None, settings: Settings, amounts: Amounts, out: Path) -> None:
    """The whole run. The guesses counted are those of the weights as they are stored, rounded to bfloat16."""
    began_s = time.process_time()
    teacher = Teacher.load(model or checkpoint("bfloat16"))
    asker = Asker(model or checkpoint(None), (*teacher.layers, teacher.num_layers), settings.seed)
    examples = asker.examples(amounts)
    asker.close()
    asked_s = time.process_time()
    known = [example for example in examples if not example.is_held_out]
    unseen = [example for example in examples if example.is_held_out and example.is_greedy]
    network = build_network(teacher, known, settings)
    LOG.info("%d answers, %d held out and greedy", len(examples), len(unseen))
    curve = train(network, known, settings)
    num_bytes = save(network, teacher, out)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    record = {
        "settings": asdict(settings),
        "amounts": asdict(amounts),
        "num_answer_tokens": sum(len(e.token_ids) - e.num_prompt_tokens for e in known),
        "num_bytes": num_bytes,
        "loss_curve": curve,
        "held_out": acceptance(network, unseen, settings.num_depths, settings.longest),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "hardware": f"one thread of a {platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}",
        "cpu_time_s": {"answers": round(asked_s - began_s), "training": round(time.process_time() - asked_s)},
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    LOG.info("held out: %s", record["held_out"])


def main() -> None:
    """Train, count and write the head's directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a Llama with tied embeddings; omitted: the default model")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    make_head(arguments.model, replace(Settings(), seed=arguments.seed), Amounts(), arguments.out)


if __name__ == "__main__":
    main()
