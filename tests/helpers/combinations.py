"""Random combinations of a model and features, and what the plainest engine answers to the same requests.

A combination is a family, a dtype, a format of weights, rotations, and a setting of each feature that must not change
answers: drafts, ranks, the size of blocks and steps, prefix caching, requests that come, leave and go on elsewhere at
any moment, and a pool so small that requests are preempted.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.config import FLOAT, INT8, EngineConfig
from tandem.core.output import RequestOutput
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.scheduler.request import Handoff
from tandem.text.grammar import choice_grammar, regex_grammar
from tests.helpers import checkpoints
from tests.helpers.engines import drain
from tests.helpers.heads import HEAD_BUILDERS
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.ranked import ranked_config
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FAMILIES = (
    checkpoints.BUILDERS
    | checkpoints.EXPERT_BUILDERS
    | checkpoints.MORE_BUILDERS
    | RECURRENT_BUILDERS
    | BLOCK_BUILDERS
    | HEAD_BUILDERS
)
AMPLE_BYTES = 1 << 25
MAX_MODEL_LEN = 256
_SAVED = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
LATE_STEP = 30
_RESUMED = "+"  # behind the id of a request that goes on

_STOPS = ("a", "Q", " ", "\ufffd", "zz", "\ufffd\ufffd")
_GRAMMARS = (regex_grammar("[a-z]{2,9}-[0-9]{3}"), regex_grammar("[äöß]{4}"), choice_grammar(("yes", "yes, 你", "no")))

Answer = tuple[list[int], list[object], object, object, object]


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny checkpoint. `path` has codes if there is a format, `plain` the numbers they were made from. `head`: the
    drafter that it carries, if any. `rotated`: the modules whose activations are rotated.
    """

    family: str
    dtype: str
    format: str | None
    path: Path
    plain: Path
    head: str | None = None
    rotated: str | None = None
    activations: str = FLOAT


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and the salt of the cached state that it may share. `is_late`: it comes once others are computed."""

    prompt: list[int]
    params: SamplingParams
    salt: str
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Engine steps before which a request begins and, if ever, is aborted; `resumes`: it goes on from there."""

    begins: int
    leaves: int | None
    resumes: bool


def draw_model(rng: random.Random, directory: Path) -> Model:
    """Every family and every published format, alone and together, as far as tiny sizes allow."""
    family, dtype = rng.choice(sorted(FAMILIES)), rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    plain = write_byte_tokenizer(FAMILIES[family](directory / "plain", dtype=dtype, **_SAVED))
    eagle = plain / "eagle"
    head = f"eagle={eagle}" if eagle.is_dir() else "mtp" if family in HEAD_BUILDERS else None
    names = [] if eagle.is_dir() or rng.random() < 0.2 else rng.sample(sorted(FORMATS), 4)
    for number, name in enumerate(names):
        coded = directory / f"coded{number}"
        try:
            save_published(plain, FORMATS[name], coded, directory / f"decoded{number}")
        except ValueError:  # a matrix too small for a whole group
            continue
        rotated = _rotate(rng, coded) if name.startswith("compressed") and rng.random() < 0.7 else None
        activations = INT8 if rotated is None and rng.random() < 0.15 else FLOAT
        return Model(family, dtype, name, coded, plain, head, rotated, activations)
    return Model(family, dtype, None, plain, plain, head)


def _rotate(rng: random.Random, path: Path) -> str | None:
    """Rotates activations of some of the coded modules; returns their name."""
    suffixes = (".weight_packed", ".weight_scale")
    modules = {name.rpartition(".")[0] for name in checkpoints.read_tensors(path) if name.endswith(suffixes)}
    if not modules:
        return None
    name = rng.choice(sorted({module.rpartition(".")[2] for module in modules}))
    location, head_dim = rng.choice(("input", "input", "output")), rng.choice((None, 8, 16, 32))
    part = {"targets": [f"re:.*\\.{name}$"], "location": location, "inverse": False, "ignore": []}
    scheme = {"type": "hadamard", "apply": [part], "randomize": False, "head_dim": head_dim}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {"R": scheme}}
    (path / "config.json").write_text(json.dumps(config))
    return f"{location} of {name}"


def draw_params(rng: random.Random, *, with_grammars: bool = False) -> SamplingParams:
    """Every option that changes tokens or tells of them, alone and mixed."""
    max_tokens = rng.choice((1, 2, 5, 17, 33))
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "seed": rng.randrange(100),
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    end = tuple(rng.randrange(6, 199) for _ in range(rng.randint(1, 2)))
    start = tuple(rng.randrange(6, 199) for _ in range(rng.randint(0, 2)))
    thinking = Reasoning(start, end, is_open=rng.random() < 0.6, max_tokens=rng.choice((None, 0, 3, 9)))
    others: dict[str, Any] = {
        "logprobs": rng.choice((0, 2)),
        "prompt_logprobs": rng.choice((0, 3)),
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.7,
        "logit_bias": {rng.randrange(200): 5.0},
        "allowed_token_ids": tuple(range(6, 199, rng.randrange(1, 5))),
        "bad_words": ((rng.randrange(6, 199),), (rng.randrange(6, 199), rng.randrange(6, 199))),
        "stop_token_ids": tuple(range(6, 199, 20)),
        "stop": tuple(rng.sample(_STOPS, rng.randint(1, 4))),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "min_tokens": rng.randint(1, max_tokens),
        "reasoning": thinking,
        "speculate": "off",
    }
    chosen = {name: value for name, value in others.items() if rng.random() < 0.2}
    if with_grammars and rng.random() < 0.4:  # NOTE: a grammar says itself when an answer ends
        chosen = {name: value for name, value in chosen.items() if name not in ("min_tokens", "allowed_token_ids")}
        options |= {"grammar": rng.choice(_GRAMMARS), "ignore_eos": False}
    return SamplingParams(**options, **chosen)


def draw_asks(rng: random.Random, number: int) -> list[Ask]:
    """Prompts of 1 to 200 tokens, of which half begin like another, and a few belong to somebody else. The last one is
    another's whole prompt, once its blocks are cached, whose logprobs are asked for.
    """

    def prompt(length: int) -> list[int]:
        return [rng.randrange(6, 199) for _ in range(length)]

    beginnings, with_grammars = [prompt(100) for _ in range(2)], rng.random() < 0.3
    asks = []
    for index in range(number):
        own = prompt(rng.choice((1, 7, 16, 33, 90, 150, 200)))
        whole = (beginnings[index % 2] + own)[:200] if rng.random() < 0.5 else own
        asks.append(Ask(whole, draw_params(rng, with_grammars=with_grammars), rng.choice(("", "", "", "other"))))
    known = max(asks, key=lambda ask: len(ask.prompt))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    return [*asks, Ask(known.prompt, params, known.salt, is_late=True)]


def draw_plan(rng: random.Random, ask: Ask) -> Plan:
    """NOTE: logprobs of a prompt are told by whoever computes the whole of it."""
    begins = LATE_STEP if ask.is_late else rng.choice((0, 0, 0, rng.randrange(40)))
    leaves = begins + rng.randrange(30) if rng.random() < 0.4 else None
    return Plan(begins, leaves, ask.params.prompt_logprobs is None and rng.random() < 0.6)


def serve(engine: Engine, asks: list[Ask], plans: list[Plan]) -> list[Answer]:
    """Serves the requests as the plans have it, and proves the accounting after every step."""
    outputs: list[list[RequestOutput]] = [[] for _ in asks]
    moments = {moment for plan in plans for moment in (plan.begins, plan.leaves) if moment is not None}
    step = 0
    while step <= max(moments) or engine.has_work:
        for index, (ask, plan) in enumerate(zip(asks, plans, strict=True)):
            scope = CacheScope(salt=ask.salt)
            if step == plan.begins:
                engine.add_request(ask.prompt, ask.params, request_id=str(index), scope=scope)
            if step == plan.leaves and engine.knows(str(index)):
                engine.abort(str(index))
                if plan.resumes:
                    before = tuple(token for output in outputs[index] for token in output.token_ids)
                    handoff, request_id = Handoff(output_token_ids=before), f"{index}{_RESUMED}"
                    engine.add_request(ask.prompt, ask.params, request_id=request_id, scope=scope, handoff=handoff)
        for output in engine.step() if engine.has_work else ():
            outputs[int(output.request_id.removesuffix(_RESUMED))].append(output)
        engine.check()
        step += 1
    return [answer_of(each) for each in outputs]


def plain_answers(model: Model, asks: list[Ask]) -> list[Answer]:
    """One rank that computes one request after another in large steps, with nothing cached and no drafts.

    Raises:
        ConfigurationError, CheckpointError: the family is not served in this format.
    """
    engine = build_engine(plain_config(model))
    found = []
    for ask in asks:
        request_id = engine.add_request(ask.prompt, ask.params)
        found.append(answer_of(drain(engine)[request_id, 0]))
    engine.close()
    return found


def plain_config(model: Model, **overrides: Any) -> EngineConfig:
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 256,
        "prefix_caching": False,
        "kv_cache_bytes": AMPLE_BYTES,
        "activations": model.activations,
    }
    return ranked_config(model.path, **options | overrides)


def answer_of(outputs: list[RequestOutput]) -> Answer:
    """Tokens, logprobs and those of the prompt to the bit, the text, and why it ended; None: it has not. A step with
    drafts tells several tokens at once.
    """
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs: list[object] = [entry for output in outputs for entry in output.logprobs or ()]
    of_prompt = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None)
    text = "".join(output.text for output in outputs)
    return tokens, logprobs, of_prompt, text, outputs[-1].finish_reason if outputs else None


def is_beginning(found: Answer, whole: Answer) -> bool:
    """Whether an answer that was cut off is what the whole one begins with."""
    tokens, logprobs, of_prompt, text, reason = found
    is_same = tokens == whole[0][: len(tokens)] and logprobs == whole[1][: len(logprobs)]
    return is_same and of_prompt in (None, whole[2]) and str(whole[3]).startswith(str(text)) and reason is None
