"""Grammars are compiled beside everything else that a gateway does."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.gateway.grammar_check import GrammarCheck
from tandem.gateway.model import ServedModel
from tandem.rpc.messages import ModelInfo
from tandem.text.grammar import Grammars, regex_grammar
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


def test_slow_grammars_hold_up_neither_long_prompts_nor_known_grammars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go = ServedModel.load(str(write_byte_tokenizer(tmp_path)), "m", 0), threading.Event()
    monkeypatch.setattr(Grammars, "known", lambda _, grammar: object() if grammar == "known" else None)
    monkeypatch.setattr(Grammars, "check", lambda _, grammar: go.wait(20))

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
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
