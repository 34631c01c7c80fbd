"""Grammars are compiled beside everything else that a gateway does."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.gateway.grammar_check import GrammarCheck
from tandem.gateway.model import ServedModel
from tandem.rpc.messages import ModelInfo
from tandem.text.grammar import Grammars, regex_grammar
from tandem.text.grammars import CompiledGrammar
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

INFO = ModelInfo(name="m", fingerprint="f", max_model_len=4096, vocab_size=NUM_TOKENS, block_size=16)


def test_a_grammar_is_checked_once_and_its_fault_is_remembered(tmp_path: Path) -> None:
    check = GrammarCheck(Tokenizer.load(write_byte_tokenizer(tmp_path)))

    async def story() -> None:
        for _ in range(2):
            await check.check(regex_grammar("[ab]+"), NUM_TOKENS)
            with pytest.raises(InvalidRequestError):
                await check.check("no grammar", NUM_TOKENS)

    try:
        asyncio.run(story())
    finally:
        check.close()


def test_outcomes_are_remembered_within_bounds_and_what_was_compiled_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.gateway.grammar_check.MAX_REMEMBERED", 2)
    compiled, compile_ = list[str](), Grammars._compile

    def noted(grammars: Grammars, grammar: str) -> CompiledGrammar | str:
        compiled.append(grammar)
        return compile_(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", noted)
    check = GrammarCheck(Tokenizer.load(write_byte_tokenizer(tmp_path)))
    first, second, third = map(regex_grammar, "abc")

    async def story() -> None:
        for grammar in (first, second, first, third, third, first):
            await check.check(grammar, NUM_TOKENS)

    try:
        asyncio.run(story())
        assert compiled == [first, second, third, first]
        assert not [each for each in gc.get_objects() if isinstance(each, CompiledGrammar)]
    finally:
        check.close()


def test_slow_grammars_hold_up_neither_long_prompts_nor_known_grammars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go = ServedModel.load(str(write_byte_tokenizer(tmp_path)), "m", 0), threading.Event()
    monkeypatch.setattr(Grammars, "fault", lambda _, grammar: None if grammar == "known" or go.wait(20) else "no time")

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await model.check_grammar("known", INFO)
        slow = [asyncio.create_task(model.check_grammar(f"slow {number}", INFO)) for number in range(3)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                assert len(await model.encoder.encode("a" * 3000, 4096, add_special_tokens=False)) == 3000
                await model.check_grammar("known", INFO)
            assert not any(task.done() for task in slow)
        finally:
            go.set()
        await asyncio.gather(*slow)

    try:
        asyncio.run(story())
    finally:
        model.grammars.close()
        model.encoder.close()
