"""Heads as drafters: guesses against naive references, rows that follow the accepted tokens, exact answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.head_drafter import HeadDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.scheduler.output import NewRequest, ScheduledRequest, SchedulerOutput
from tandem.text.grammar import regex_grammar
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, read_tensors, save_tiny_llama, write_tensors
from tests.helpers.delta_checkpoints import DELTA_BUILDERS, save_tiny_qwen3_5_conditional
from tests.helpers.engines import drafting_engine, drain, least_kv_cache_bytes, serve_alone, tiny_engine, token_ids
from tests.helpers.handoff import Side, hand_off
from tests.helpers.head_drafters import head_drafter
from tests.helpers.head_references import delta_mtp_guess, eagle3_guess, generated_with_mtp, mtp_guess
from tests.helpers.heads import change_config, save_delta_with_mtp, save_eagle3, save_with_mtp, with_stacked_experts
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.tokenizers import write_byte_tokenizer

VOCAB_SIZE = 199
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=24, seed=3, top_p=0.9, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.3),
    "grammar": SamplingParams(max_tokens=24, seed=6, grammar=regex_grammar("([a-c]{2}-[0-9]{2} ){3,}")),
}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(6, VOCAB_SIZE) for _ in range(num_tokens)]


PROMPTS = {name: prompt_of(index, 5 + 17 * index) for index, name in enumerate(PARAMS)}


@dataclass(frozen=True)
class Case:
    """A checkpoint with a head. `guess`: of (checkpoint, tokens, number), by the reference."""

    model: Path
    setting: str
    guess: Callable[[list[int], int], list[int]]


def mtp_case(directory: Path, family: str) -> Case:
    model = write_byte_tokenizer(save_with_mtp((BUILDERS | EXPERT_BUILDERS)[family], directory / family))
    return Case(model, "mtp", lambda tokens, number: mtp_guess(model, tokens, number))


def delta_case(directory: Path, family: str) -> Case:
    model = write_byte_tokenizer(save_delta_with_mtp(DELTA_BUILDERS[family], directory / family))
    return Case(model, "mtp", lambda tokens, number: delta_mtp_guess(model, tokens, number))


def eagle_case(directory: Path, *, num_layers: int = 3, **options: Any) -> Case:
    model = write_byte_tokenizer(save_tiny_llama(directory / "llama", num_hidden_layers=num_layers))
    head = save_eagle3(directory / "eagle", model, **options)
    return Case(model, f"eagle={head}", lambda tokens, number: eagle3_guess(model, head, tokens, number))


CASES: dict[str, Callable[[Path], Case]] = {
    "deepseek_v3": lambda directory: mtp_case(directory, "deepseek_v3"),
    "glm4_moe": lambda directory: mtp_case(directory, "glm4_moe"),
    "glm4_moe_lite": lambda directory: mtp_case(directory, "glm4_moe_lite"),
    "qwen3_next": lambda directory: delta_case(directory, "qwen3_next"),
    "qwen3_5": lambda directory: delta_case(directory, "qwen3_5"),
    "qwen3_5_moe": lambda directory: delta_case(directory, "qwen3_5_moe"),
    "eagle": eagle_case,
    "eagle, normed": lambda directory: eagle_case(
        directory,
        hidden_size=48,
        target_hidden_size=64,
        norm_before_residual=True,
        num_layers=4,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        seed=4,
    ),
}


QUICK = ("deepseek_v3", "qwen3_next", "eagle")


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def plain(case: Case) -> dict[str, list[int]]:
    return serve_alone(case.model, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return eagle_case(tmp_path_factory.mktemp("eagle"))


@dataclass
class Recorded:
    """A head's drafter, and what it guessed behind which tokens. Handed on are up to two tokens of `answer`, the whole
    text of the request, and then guesses: so drafts of all lengths turn out right.
    """

    drafter: HeadDrafter
    answer: Sequence[int] = ()
    tokens: dict[str, list[int]] = field(default_factory=dict)
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.drafter.layers

    def begin(self, request: NewRequest) -> None:
        self.tokens[request.request_id] = [*request.prompt_token_ids, *request.output_token_ids]
        self.drafter.begin(request)

    def observe(self, step: SchedulerOutput, first_tokens: Sequence[int], states: torch.Tensor) -> None:
        self.drafter.observe(step, first_tokens, states)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.tokens[request_id] += token_ids
        self.drafter.extend(request_id, token_ids)

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        handed_on = {}
        for request_id, guess in self.drafter.draft(limits).items():
            tokens = self.tokens[request_id]
            self.seen.append(([*tokens], [*guess]))
            known = self.answer[len(tokens) : len(tokens) + len(self.seen) % 3]
            handed_on[request_id] = [*known, *guess][: limits[request_id]]
        return handed_on

    def end(self, request_id: str) -> None:
        self.drafter.end(request_id)


def checking_all(drafter: Any, num_drafts: int = 3) -> Speculation:
    return Speculation(drafter, num_drafts, adapts=False)


def answers_of(engine: Engine) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, PARAMS[name], request_id=name)
    outputs = drain(engine)
    return {name: token_ids(outputs[name, 0]) for name in PROMPTS}


def test_guesses_are_those_of_a_naive_reference(case: Case) -> None:
    """Behind right and wrong drafts, and a prompt in three chunks. A state of a wrong guess must not remain."""
    prompt = PROMPTS["penalised"]
    answer = serve_alone(case.model, {"r": prompt}, {"r": GREEDY})["r"]
    recorded = Recorded(head_drafter(case.model, case.setting), [*prompt, *answer])
    engine = drafting_engine(case.model, checking_all(recorded), max_num_batched_tokens=16, max_num_running=8)
    engine.add_request(prompt, GREEDY, request_id="r")
    assert token_ids(drain(engine)["r", 0]) == answer
    assert engine.counters.num_drafted > engine.counters.num_accepted > 0
    assert len(recorded.seen) > 8
    for tokens, guess in recorded.seen[::3]:
        assert guess == case.guess(tokens, len(guess))
    assert len({guess[0] for _, guess in recorded.seen}) > 3
    engine.step()
    recorded.drafter.check()


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_steps_and_guesses_are_those_of_generation_by_transformers(family: str, tmp_path: Path) -> None:
    """`generate(use_mtp=True)` guesses one token in each step, as the drafter here does."""
    case = mtp_case(tmp_path, family)
    prompt = PROMPTS["penalised"]
    answer, seen = generated_with_mtp(case.model, prompt, GREEDY.max_tokens or 0)
    recorded = Recorded(head_drafter(case.model, case.setting))
    engine = drafting_engine(case.model, checking_all(recorded, 1))
    engine.add_request(prompt, GREEDY, request_id="r")
    assert token_ids(drain(engine)["r", 0]) == answer
    assert len(seen) > 8
    assert recorded.seen[: len(seen)] == seen


@pytest.mark.parametrize(("num_blocks", "num_longest"), [(64, 1.2), (7, 5.3)], ids=["preempted", "little room"])
def test_every_answer_is_exact(case: Case, plain: dict[str, list[int]], num_blocks: int, num_longest: float) -> None:
    """With chunks and prefix hits, in a pool of the model, or of the head, that is too small for all requests."""
    longest_bytes = least_kv_cache_bytes(case.model, 96, 32, "float32", block_size=8)
    drafter = head_drafter(case.model, case.setting, num_blocks=num_blocks)
    engine = drafting_engine(
        case.model,
        checking_all(drafter),
        max_num_batched_tokens=32,
        max_model_len=96,
        kv_cache_bytes=int(num_longest * longest_bytes),
        block_size=8,
    )
    for _ in range(2):
        assert answers_of(engine) == plain
        drafter.check()
    assert engine.counters.num_drafted > 0
    is_preempted, has_hits = engine.counters.num_preemptions > 0, engine.counters.num_cached_prompt_tokens > 0
    has_states = not engine.kv.layout.can_rewind  # NOTE: of several, which leave K and V of so few tokens room enough
    assert is_preempted or has_states if num_longest < 2 else has_hits


def test_logits_are_those_without_drafts_bit_for_bit(case: Case) -> None:
    """With compiled kernels, which hand out hidden states from inside their call of all layers."""
    load_or_skip()
    options = {"native_kernels": True, "attention_backend": "auto", "dtype": "bfloat16"}
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=3)
    found = []
    for speculate in ("off", case.setting):
        engine = tiny_engine(case.model, **options, speculate=speculate, draft_always=True, max_num_batched_tokens=32)
        request_id = engine.add_request(PROMPTS["grammar"], params)
        found.append([output.logprobs for output in drain(engine)[request_id, 0]])
    assert engine.model.drafter == case.setting.partition("=")[0]
    assert engine.counters.num_drafted > 0
    assert found[0] == found[1]


def test_steps_that_nobody_drafts_for_copy_nothing(eagle: Case) -> None:
    """Each step once copied all rows that waited, on threads of PyTorch's that then took the cores of the next step."""
    drafter = head_drafter(eagle.model, eagle.setting, max_chunk_tokens=256)
    drafter.begin(NewRequest("r", [7], [], GREEDY, 0, frozenset(), b""))
    steps = [(ScheduledRequest("r", position, [7], samples=True), torch.ones(1, 192)) for position in range(100)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for item, states in steps:
            drafter.observe(SchedulerOutput((), (item,), ()), [0], states)
            drafter.extend("r", [7])
    assert {event.name for event in profile.events()}.isdisjoint({"aten::cat", "aten::copy_", "aten::clone"})
    assert len(drafter.draft({"r": 2})["r"]) == 2
    drafter.end("r")
    drafter.check()


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_what_another_worker_began_starts_cold(eagle: Case, name: str) -> None:
    """The states of its prompt stayed there. It is drafted for nevertheless, and exactly."""
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_running": 16, "block_size": 8}
    source = Side(eagle.model, **options)
    destination = Side(eagle.model, **options, speculate=eagle.setting, draft_always=True)
    prompt = PROMPTS["grammar"]
    answer = hand_off(source, destination, prompt, PARAMS[name])
    assert answer == serve_alone(eagle.model, {"r": prompt}, {"r": PARAMS[name]})["r"]
    assert destination.engine.counters.num_drafted > 0


def test_a_cached_prefix_has_its_rows_where_the_token_behind_it_is_the_same(case: Case) -> None:
    """The last row of a block was computed from the next block's first token, so blocks of rows are told apart by it:
    there is no state of another text, and guesses behind a hit are those behind the whole text.
    """
    beginning = prompt_of(50, 16)
    prompts = [[*beginning, 7, 8, 9], [*beginning, 7, 11, 12], [*beginning, 13, 8, 9]]
    recorded = Recorded(head_drafter(case.model, case.setting))
    options = {"max_num_batched_tokens": 16, "max_num_running": 8, "block_size": 8}
    engine = drafting_engine(case.model, checking_all(recorded), **options)
    firsts = []
    for index, prompt in enumerate(prompts):
        recorded.seen.clear()
        engine.add_request(prompt, GREEDY, request_id=str(index))
        engine.step()
        while not recorded.seen:
            engine.step()
        state = recorded.drafter.give(str(index))
        assert state is not None
        firsts.append(state.first)
        drain(engine)
        if state.first == 0:
            for tokens, guess in recorded.seen[::4]:
                assert guess == case.guess(tokens, len(guess))
    assert engine.counters.num_cached_prompt_tokens == 2 * 16
    assert firsts == [0, 0, 16]
    engine.step()
    recorded.drafter.check()


def test_auto_takes_the_module_of_the_checkpoint(tmp_path: Path, eagle: Case) -> None:
    for carrying in (mtp_case(tmp_path, "deepseek_v3"), delta_case(tmp_path, "qwen3_next")):
        assert tiny_engine(carrying.model, speculate="auto").model.drafter == "mtp"
    assert tiny_engine(eagle.model, speculate="auto").model.drafter == "suffix"


def test_experts_of_a_module_may_be_stacks(tmp_path: Path) -> None:
    """As published ones are. The guesses are the same."""
    seen = []
    for change in (lambda path: path, with_stacked_experts):
        model = change(delta_case(tmp_path, "qwen3_next").model)
        recorded = Recorded(head_drafter(model, "mtp"))
        engine = drafting_engine(model, checking_all(recorded))
        engine.add_request(PROMPTS["penalised"], GREEDY, request_id="r")
        drain(engine)
        seen.append(recorded.seen)
    assert seen[0] == seen[1]


def test_the_module_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text = save_delta_with_mtp(DELTA_BUILDERS["qwen3_5"], tmp_path / "text")
    whole = write_byte_tokenizer(save_tiny_qwen3_5_conditional(tmp_path / "whole"))
    module = {name: tensor for name, tensor in read_tensors(text).items() if name.startswith("mtp.")}
    write_tensors(whole, read_tensors(whole) | module)
    assert tiny_engine(whole, speculate="auto").model.drafter == "mtp"


DAMAGED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], dict[str, Any], str]] = {
    "none": (lambda w: w.pop("mtp.fc.weight"), {}, "no module"),
    "declared away": (lambda w: None, {"mtp_num_hidden_layers": 0, "num_nextn_predict_layers": 0}, "no module"),
    "several": (lambda w: None, {"mtp_num_hidden_layers": 2}, "2 modules, and one is served"),
    "own embedding": (lambda w: None, {"mtp_use_dedicated_embeddings": True}, "no module .* that is served"),
    "a norm": (lambda w: w.pop("mtp.norm.weight"), {}, r"lacks mtp\.norm\.weight"),
    "another": (
        lambda w: w.update({"mtp.fc.weight": torch.zeros(64, 64)}),
        {},
        r"mtp\.fc\.weight has shape \[64, 64\]",
    ),
    "more": (lambda w: w.update({"mtp.more.weight": torch.zeros(4)}), {}, r"mtp\.more\.weight"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_modules_of_hybrids_are_refused_by_name(tmp_path: Path, name: str) -> None:
    damage, options, message = DAMAGED[name]
    path = change_config(delta_case(tmp_path, "qwen3_5").model, lambda config: config.update(options))
    tensors = read_tensors(path)
    damage(tensors)
    write_tensors(path, tensors)
    with pytest.raises(ConfigurationError, match=rf"speculate='mtp': the head cannot be used: .*{message}"):
        tiny_engine(path, speculate="mtp")


def test_a_model_without_a_module_is_refused(eagle: Case, tmp_path: Path) -> None:
    promised = write_byte_tokenizer(BUILDERS["deepseek_v3"](tmp_path / "promised"))
    several = mtp_case(tmp_path, "deepseek_v3").model
    change_config(several, lambda config: config.update(num_hidden_layers=2, num_nextn_predict_layers=2))
    for model, message in (
        (eagle.model, "no module"),
        (promised, "no module"),
        (several, "2 modules, and one is served"),
    ):
        with pytest.raises(ConfigurationError, match=rf"speculate='mtp': the head cannot be used: .*{message}"):
            tiny_engine(model, speculate="mtp")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": (
        {"hidden_size": 48},
        "hidden_size=48, and the model's hidden size is 64: it is the head",
    ),
    "target": ({"target_hidden_size": 32}, "target_hidden_size=32, and the model's hidden size is 64"),
    "vocabulary": ({"vocab_size": 150}, "vocab_size=150, and the model has 199 tokens"),
    "layers read": (
        {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        "reads the inputs of layers 0, 1; three different ones",
    ),
    "one layer twice": ({"eagle_aux_hidden_state_layer_ids": [0, 2, 2]}, "three different ones"),
    "layer beyond": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"list of integers in \[0, 2\]"),
}


def test_a_head_does_not_read_several_residual_streams(tmp_path: Path) -> None:
    model = write_byte_tokenizer(EXPERT_BUILDERS["deepseek_v4"](tmp_path / "model"))
    head = save_eagle3(tmp_path / "head", model)
    with pytest.raises(ConfigurationError, match="the model has 3 residual streams, and a head reads a single one"):
        tiny_engine(model, speculate=f"eagle={head}")


@pytest.mark.parametrize("name", REFUSED)
def test_heads_of_other_models_are_refused_by_name(eagle: Case, tmp_path: Path, name: str) -> None:
    options, message = REFUSED[name]
    head = save_eagle3(tmp_path / "head", eagle.model, **options)
    with pytest.raises(ConfigurationError, match=rf"speculate='eagle={head}': the head cannot be used: .*{message}"):
        tiny_engine(eagle.model, speculate=f"eagle={head}")


def test_damaged_heads_are_refused_by_name(eagle: Case, tmp_path: Path) -> None:
    """Among them tokens in place of offsets."""
    damages: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
        "tokens": (lambda w: w.update(d2t=w["d2t"] + torch.arange(80)), "d2t holds differences, not tokens"),
        "no offsets": (lambda w: w.pop("d2t"), "so the head needs d2t, which it lacks"),
        "no norm": (lambda w: w.pop("norm.weight"), r"lacks norm\.weight"),
        "another": (lambda w: w.update({"fc.weight": torch.zeros(64, 128)}), r"fc\.weight has shape \[64, 128\]"),
        "no head": (lambda w: w.pop("fc.weight"), "this is no EAGLE-3 head"),
    }
    for name, (damage, message) in damages.items():
        head = save_eagle3(tmp_path / name, eagle.model)
        tensors = load_file(head / "model.safetensors")
        damage(tensors)
        save_file(tensors, head / "model.safetensors")
        with pytest.raises(ConfigurationError, match=message):
            tiny_engine(eagle.model, speculate=f"eagle={head}")
