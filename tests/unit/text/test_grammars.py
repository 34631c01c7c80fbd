"""Compiled grammars over every kind of tokenizer, and grammars meant to harm who compiles them."""

import gc
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.core.errors import CapacityError, InvalidRequestError
from tandem.text import grammar_sandbox
from tandem.text.grammar import choice_grammar, lark_grammar, regex_grammar, schema_grammar
from tandem.text.grammars import MAX_CACHED, Grammars
from tandem.text.tokenizer import Tokenizer
from tests.helpers.grammars import allowed_ids, random_answer, random_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer
from tests.unit.text.checkpoints import byte_level, sentencepiece

MAKERS: dict[str, Callable[[Path], Path]] = {
    "bytes": write_byte_tokenizer,
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without strip": lambda path: sentencepiece(path, strips=False),
}
NAMES = choice_grammar(["über 你 a", "über 你 b", "the quick brown fox"])


@pytest.fixture(scope="module", params=sorted(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(MAKERS[request.param](tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = _of(tokenizer, num_padding=70)
    yield found
    found.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    found = Grammars(Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("bytes"))), NUM_TOKENS)
    yield found
    found.close()


def _of(tokenizer: Tokenizer, num_padding: int = 0) -> Grammars:
    eos = tokenizer.eos_token_id
    assert eos is not None
    return Grammars(tokenizer, tokenizer.vocab_size + num_padding, (eos,))


def test_answers_are_what_the_grammar_says_whatever_the_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    drawn = {random_answer(grammars, tokenizer, NAMES, random.Random(seed)) for seed in range(40)}
    assert drawn == {"über 你 a", "über 你 b", "the quick brown fox"}


def test_a_mask_allows_exactly_the_tokens_whose_text_may_come(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Nothing is forced here, so every token is judged by its bytes alone; specials, ends and padding have none."""
    grammar = regex_grammar("[a-e ]{1,3}|é")
    allowed = allowed_ids(grammars, grammars.matcher(grammar))
    may_begin = {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if not tokenizer.is_special(token_id) and _begins(tokenizer.token_bytes(token_id))
    }
    assert allowed == may_begin


def _begins(data: bytes) -> bool:
    text = data.decode(errors="replace")
    return bool(data) and ((len(text) <= 3 and set(text) <= set("abcde ")) or "é".encode().startswith(data))


def test_a_matcher_takes_an_answer_whole_or_token_by_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    grammar = schema_grammar({**schema, "additionalProperties": False})
    for seed in range(10):
        answer = random_ids(grammars, tokenizer, grammar, random.Random(seed))
        if answer is None:
            continue
        step_by_step = grammars.matcher(grammar)
        for num_read, token_id in enumerate(answer):
            whole = grammars.matcher(grammar)
            assert whole.consume(answer[:num_read])
            assert allowed_ids(grammars, whole) == allowed_ids(grammars, step_by_step)
            assert step_by_step.consume([token_id])
        assert grammars.end_bit in allowed_ids(grammars, step_by_step)


def test_tokens_that_do_not_match_are_not_consumed(plain: Grammars) -> None:
    matcher = plain.matcher(regex_grammar("ab"))
    assert matcher.consume([])
    assert not matcher.consume([0, 0, 0])
    assert not plain.matcher(regex_grammar("ab")).consume([NUM_TOKENS - 1])


def test_special_tokens_come_only_where_they_are_named(plain: Grammars) -> None:
    matcher = plain.matcher(lark_grammar('start: <|im_start|> "a"\n'))
    assert allowed_ids(plain, matcher) == {257}
    assert matcher.consume([257])
    with pytest.raises(InvalidRequestError, match="no_such"):
        plain.compiled(lark_grammar("start: <|no_such|>\n"))
    text = plain.matcher(regex_grammar(r"<\|im_start\|>"))
    assert 257 not in allowed_ids(plain, text)


def test_masks_of_many_matchers_are_those_of_each(plain: Grammars) -> None:
    patterns = ["a", "[b-y]+", "z?", "[0-9]{3}"]
    alone = [allowed_ids(plain, plain.matcher(regex_grammar(pattern))) for pattern in patterns]
    matchers = [plain.matcher(regex_grammar(pattern)) for pattern in patterns]
    together = [allowed_ids(plain, matcher) for matcher in reversed(matchers)]
    assert together[::-1] == alone


def _schema_chain(length: int) -> str:
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    schema = {"$defs": {**links, f"d{length}": True}, "$ref": "#/$defs/d0"}
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _patterns_at_once(count: int) -> str:
    schema = {"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(count)]}
    return json.dumps({"grammars": [{"json_schema": schema}]})


HOSTILE = {
    "references, deep": _schema_chain(2000),
    "rules, deep": lark_grammar("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'),
    "patterns, together": _patterns_at_once(24),
    "patterns, exponential": lark_grammar(
        "start: A\nA: " + " & ".join(f"/.*x{i}.*/" for i in range(50)) + "\n",
    ),
    "brackets, deep": lark_grammar("start: " + "(" * 20000 + '"a"' + ")" * 20000 + "\n"),
    "groups, deep": regex_grammar("(" * 3000 + "a" + ")" * 3000),
    "repetitions, nested": regex_grammar("((a{100}){100}){100}"),
    "arrays, deep": '{"grammars":[{"json_schema":' + '{"items":' * 5000 + "true" + "}" * 5000 + "}]}",
    "nothing": "{",
    "no grammar": "{}",
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_served(plain: Grammars, grammar: str) -> None:
    """Several of these bring the compiler down with a stack overflow, or never end."""
    started_s = time.process_time()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="cannot be enforced"):
            plain.compiled(grammar)
    assert time.process_time() - started_s < 1.0, "it took this process's time"
    plain.compiled(regex_grammar("a"))


@pytest.mark.parametrize("size", [1, 2**18], ids=["small", "larger than a pipe"])
def test_a_trial_that_gets_no_time_says_nothing_of_its_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    grammars, pid = _with_trial(tmp_path)
    grammar = regex_grammar("b") + " " * size
    _stop(pid)
    with monkeypatch.context() as short:
        short.setattr(grammar_sandbox, "_TIMEOUT_S", 0.2)
        with pytest.raises(CapacityError, match=r"no answer in 0\.2 s"):
            grammars.compiled(grammar)
    grammars.compiled(grammar)
    grammars.close()


def test_a_trial_that_was_killed_says_nothing_of_its_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, pid = _with_trial(tmp_path)
    tell = grammar_sandbox._tell

    def tell_and_kill(*arguments: Any) -> bool:
        is_told = tell(*arguments)
        os.kill(pid, signal.SIGKILL)
        return is_told

    _stop(pid)  # it must not answer before it is killed
    with monkeypatch.context() as killing:
        killing.setattr(grammar_sandbox, "_tell", tell_and_kill)
        with pytest.raises(CapacityError, match="ended with status -9"):
            grammars.compiled(regex_grammar("b"))
    grammars.compiled(regex_grammar("b"))
    grammars.close()


def _stop(pid: int) -> None:
    """NOTE: a process that runs on another core goes on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


def _with_trial(path: Path) -> tuple[Grammars, int]:
    """And the id of its process."""
    before = _children()
    grammars = Grammars(Tokenizer.load(write_byte_tokenizer(path)), NUM_TOKENS)
    grammars.compiled(regex_grammar("a"))
    (pid,) = _children() - before
    return grammars, int(pid)


@pytest.mark.parametrize("pattern", ["((a{1,1000}){1,1000}){1,1000}", "(a|b)*a(a|b){40}", ".*a.{300}"])
def test_a_regex_that_grows_step_by_step_ends_in_an_error_not_in_a_hang(plain: Grammars, pattern: str) -> None:
    matcher = plain.matcher(regex_grammar(pattern))
    letter = next(iter(sorted(allowed_ids(plain, plain.matcher(regex_grammar("a"))))))
    for _ in range(60):
        started_s = time.process_time()
        allowed_ids(plain, matcher)
        assert time.process_time() - started_s < 1.0
        if matcher.error is not None or not matcher.consume([letter]):
            break


def test_the_cache_is_bounded_and_what_it_forgot_is_compiled_again(tmp_path: Path) -> None:
    grammars = Grammars(Tokenizer.load(write_byte_tokenizer(tmp_path)), NUM_TOKENS)
    texts = [choice_grammar([f"item {index}"]) for index in range(MAX_CACHED + 3)]
    for text in texts:
        grammars.compiled(text)
    assert [grammars.known(text) is not None for text in texts].count(True) == MAX_CACHED
    assert grammars.known(texts[0]) is None
    grammars.matcher(texts[0])
    assert grammars.known(texts[0]) is not None
    grammars.close()


def test_the_cache_is_bounded_by_memory_not_by_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a regex of 24 characters could take 160 MB, and 256 of them were kept."""
    grammars = Grammars(Tokenizer.load(write_byte_tokenizer(tmp_path)), NUM_TOKENS)
    texts = [regex_grammar(f"(a{{200}}){{{length}}}") for length in (100, 101, 102)]
    first = grammars.compiled(texts[0]).num_bytes
    assert first > 4 << 20
    monkeypatch.setattr("tandem.text.grammars.MAX_CACHED_BYTES", int(1.6 * first))  # NOTE: measured sizes vary
    for text in texts[1:]:
        grammars.compiled(text)
    assert [grammars.known(text) is not None for text in texts] == [False, False, True]
    small = regex_grammar("a")
    assert grammars.compiled(small).num_bytes < 1 << 20
    assert grammars.known(texts[2]) is not None
    grammars.close()


def test_a_grammar_is_not_forgotten_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.text.grammars.MAX_CACHED", 1)
    grammars = Grammars(Tokenizer.load(write_byte_tokenizer(tmp_path)), NUM_TOKENS)
    held = grammars.compiled(regex_grammar("a"))
    grammars.compiled(regex_grammar("b"))
    assert grammars.known(regex_grammar("a")) is held
    assert grammars.compiled(regex_grammar("a")) is held
    del held
    assert grammars.known(regex_grammar("a")) is None
    grammars.close()


def test_what_is_known_to_be_wrong_is_refused_at_once(plain: Grammars) -> None:
    for refuses in (plain.compiled, plain.known):
        with pytest.raises(InvalidRequestError, match="cannot be enforced"):
            refuses("[]")


def test_threads_ask_at_once(tmp_path: Path) -> None:
    grammars = Grammars(Tokenizer.load(write_byte_tokenizer(tmp_path)), NUM_TOKENS)
    found: list[set[int]] = []

    def ask(index: int) -> None:
        found.append(allowed_ids(grammars, grammars.matcher(regex_grammar("ab"[index % 2]))))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grammars.close()
    assert len(found) == 8
    assert len({frozenset(ids) for ids in found}) == 2


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    before = _children()
    grammars = Grammars(Tokenizer.load(write_byte_tokenizer(tmp_path)), NUM_TOKENS)
    grammars.compiled(regex_grammar("a"))
    assert len(_children() - before) == 1
    grammars.close()
    assert _children() <= before
    grammars.compiled(regex_grammar("b"))
    assert len(_children() - before) == 1
    del grammars
    gc.collect()
    assert _children() <= before


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # NOTE: a thread that has just ended
            found.update((task / "children").read_text().split())
    return found
