"""Requests that share a prefix while the KV of one of them is on its way: who waits for whom, and for how long."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.scheduler.output import KVEvent, KVReserved
from tandem.scheduler.request import Handoff
from tests.helpers.checkpoints import save_tiny_gemma3, save_tiny_llama
from tests.helpers.engines import tiny_engine
from tests.helpers.tokenizers import write_byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
HEAD = list(range(32))
LONG = HEAD + [100] * 180


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(save_tiny_llama(tmp_path_factory.mktemp("llama")))


class Decode:
    """An engine, and what it reserved."""

    def __init__(self, path: Path, **options: object) -> None:
        self.engine: Engine = tiny_engine(path, **options)
        self.events: list[KVEvent] = []
        self.engine.on_kv_event = self.events.append
        self.answered: set[str] = set()

    def ask(self, request_id: str, prompt: list[int], num_expected: int = 0, lease_id: str | None = None) -> None:
        new = None if lease_id is None else 1
        handoff = Handoff(num_expected_tokens=num_expected, lease_id=lease_id, num_new_tokens=new)
        self.engine.add_request(prompt, GREEDY, request_id=request_id, handoff=handoff)

    def run(self, num_steps: int = 20) -> None:
        for _ in range(num_steps):
            self.answered |= {output.request_id for output in self.engine.step()}
            self.engine.check()

    @property
    def reserved(self) -> dict[str, int]:
        """Tokens held already, by request that got blocks for the rest."""
        return {event.request_id: event.num_held_tokens for event in self.events if isinstance(event, KVReserved)}

    @property
    def num_computed(self) -> int:
        """Prompt tokens since it was asked last."""
        return sum(step.num_prompt_tokens for step in self.engine.take_step_stats())


def test_who_computes_its_own_prompt_waits_for_nobody_elses_prefill(llama: Path) -> None:
    decode = Decode(llama)
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    decode.ask("local", HEAD + [60] * 4)
    decode.run()
    assert decode.answered == {"local"}


@pytest.mark.parametrize("num_arrived", [0, 48, len(LONG)])
def test_a_prompt_that_is_on_its_way_is_not_computed_beside(llama: Path, num_arrived: int) -> None:
    """A router sends a prompt again as one that is here already, when it has just sent it: choices of one request,
    agents on one document. All of it was computed a second time, beside the streams. What does not arrive is computed.
    """
    decode = Decode(llama)
    decode.ask("remote", LONG, len(LONG))
    decode.run(1)
    decode.ask("local", LONG)
    decode.ask("longer", [*LONG, 7, 8])
    decode.run(3)
    decode.engine.note_kv_offered("remote", min(num_arrived, 48))
    decode.run(2)
    assert decode.num_computed == 0
    decode.engine.note_kv_ended("remote", num_arrived)
    decode.run()
    assert decode.answered == {"remote", "local", "longer"}
    tails = 4 + 6
    assert decode.num_computed == (1 + tails if num_arrived == len(LONG) else len(LONG) - num_arrived + tails)


def test_who_waited_for_a_prompt_that_is_aborted_computes_it(llama: Path) -> None:
    decode = Decode(llama)
    decode.ask("remote", LONG, len(LONG))
    decode.run(1)
    decode.ask("local", LONG)
    decode.run(2)
    assert decode.num_computed == 0
    decode.engine.abort("remote")
    decode.run()
    assert "local" in decode.answered
    assert decode.num_computed == len(LONG)


def test_who_computes_most_of_its_prompt_or_for_others_waits_for_nobody(llama: Path) -> None:
    """Two workers that prefill one prompt for each other would wait for each other."""
    decode = Decode(llama)
    decode.ask("remote", LONG, len(LONG))
    decode.run(1)
    decode.ask("other", LONG[:80] + [60] * 90)
    decode.ask("leased", LONG, lease_id="lease")
    decode.run()
    assert decode.answered == {"other", "leased"}


def test_one_whose_kv_can_be_read_waits_for_nobody_elses(llama: Path) -> None:
    """Until then it does, to share what comes first."""
    decode = Decode(llama)
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    decode.ask("short", HEAD + [50] * 4, 36)
    decode.run()
    assert set(decode.reserved) == {"long"}
    decode.engine.note_kv_offered("short", 0)
    decode.run(1)
    assert decode.reserved == {"long": 0, "short": 0}
    decode.engine.note_kv_ended("short", 36)
    decode.run()
    assert decode.answered == {"short"}


def test_one_that_still_waits_holds_up_nobody_behind_it(llama: Path) -> None:
    """It waits for the same block, but they need not."""
    decode = Decode(llama)
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    decode.ask("waits", HEAD + [70] * 4, 36)
    decode.ask("offered", HEAD + [50] * 4, 36)
    decode.ask("local", HEAD + [60] * 4)
    decode.engine.note_kv_offered("offered", 0)
    decode.run(1)
    assert decode.reserved == {"long": 0, "offered": 0}
    decode.run()
    assert decode.answered == {"local"}
    assert decode.reserved["waits"] == 32, "what was computed here is shared"


def test_with_a_window_the_whole_prompt_is_waited_for_and_shared(tmp_path: Path) -> None:
    """Blocks of a windowed group are there for a prompt's end alone, so that a part of it is of no use to others."""
    decode = Decode(write_byte_tokenizer(save_tiny_gemma3(tmp_path)))
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    decode.ask("alike", [*LONG[:-1], 7], len(LONG))
    decode.engine.note_kv_offered("long", 48)
    decode.run(1)
    assert set(decode.reserved) == {"long"}
    decode.engine.note_kv_ended("long", len(LONG))
    decode.run(1)
    assert decode.reserved == {"long": 0, "alike": 208}


def test_with_a_window_nobody_waits_for_what_cannot_be_shared(tmp_path: Path) -> None:
    decode = Decode(write_byte_tokenizer(save_tiny_gemma3(tmp_path)))
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    decode.ask("local", LONG[:160] + [7] * 20)
    decode.ask("remote", LONG[:160] + [8] * 20, 180)
    decode.ask("alike", LONG)
    decode.run()
    assert decode.answered == {"local"}
    assert set(decode.reserved) == {"long", "remote"}


def test_what_has_arrived_of_a_prompt_is_shared_before_the_rest_has(llama: Path) -> None:
    decode = Decode(llama)
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    decode.ask("short", HEAD + [50] * 4, 36)
    decode.engine.note_kv_offered("long", 48)
    decode.run(1)
    assert decode.reserved == {"long": 0, "short": 32}
    decode.engine.note_kv_ended("short", 36)
    decode.engine.note_kv_ended("long", 48)
    decode.run()
    assert decode.answered == {"short", "long"}
    assert decode.engine.kv_usage.used == 0


def test_a_full_step_still_reserves_for_kv_that_comes_from_elsewhere(llama: Path) -> None:
    decode = Decode(llama, max_num_batched_tokens=8, max_num_running=8)
    decode.ask("local", [100] * 200)
    decode.run(1)
    decode.ask("local too", [90] * 200)
    decode.ask("remote", [50] * 40, 40)
    decode.run(1)
    assert set(decode.reserved) == {"remote"}


def counted_matches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of chains whose prefix is looked up from now on."""
    matched: list[int] = []
    match = KVCacheManager.match

    def counted(kv: KVCacheManager, hashes: Sequence[bytes], num_tokens: int, num_expected: int = 0) -> PrefixMatch:
        matched.append(len(hashes))
        return match(kv, hashes, num_tokens, num_expected)

    monkeypatch.setattr(KVCacheManager, "match", counted)
    return matched


@pytest.mark.parametrize("num_expected", [0, len(LONG)], ids=["local", "remote"])
def test_who_waits_for_kv_on_its_way_is_not_looked_up_in_every_step(
    llama: Path, num_expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 waiting requests of a 32k document took 0.4 s a step from the streams beside them."""
    decode = Decode(llama, max_num_running=64)
    decode.ask("stream", [1])
    decode.ask("long", LONG, len(LONG))
    decode.run(1)
    for number in range(20):
        decode.ask(f"alike {number}", [*LONG[:-1], number], num_expected)
    decode.run(1)
    matched = counted_matches(monkeypatch)
    decode.run(1)
    decode.engine.note_kv_offered("long", 48)
    decode.run(3)
    assert matched == []
    decode.engine.note_kv_ended("long", len(LONG))
    decode.run(1)
    assert len(matched) == 20


def test_a_full_step_looks_at_no_prompt_that_it_could_not_begin(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker's steps are full, and what waits may be long and cached."""
    decode = Decode(llama, max_num_batched_tokens=8, max_num_running=8)
    decode.ask("local", [100] * 200)
    decode.run(1)
    for number in range(5):
        decode.ask(f"local {number}", [90 - number] * 200)
    matched = counted_matches(monkeypatch)
    decode.run(3)
    assert matched == []
    decode.ask("remote", [50] * 40, 40)
    decode.run(1)
    assert set(decode.reserved) == {"remote"}
    assert matched == [0] * 5 + [2]


def test_a_full_step_gives_nobody_room_that_one_before_it_lacks(llama: Path) -> None:
    decode = Decode(llama, max_num_batched_tokens=8, max_num_running=8, kv_cache_bytes=1 << 18)
    num_tokens = decode.engine.kv_usage.total * 16
    decode.ask("local", [100] * (num_tokens // 2))
    decode.run(1)
    decode.ask("local too", [90] * (num_tokens * 3 // 5))
    decode.ask("remote", [50] * 40, 40)
    decode.run(1)
    assert set(decode.reserved) == set()


def test_a_full_step_counts_what_is_shared_as_no_lack_of_room(llama: Path) -> None:
    decode = Decode(llama, max_num_batched_tokens=8, max_num_running=8, kv_cache_bytes=1 << 18)
    num_tokens = decode.engine.kv_usage.total * 16
    shared = [100] * (num_tokens // 2)
    decode.ask("stream", shared)
    decode.run(num_tokens // 16)
    decode.ask("local", [80] * (num_tokens // 4))
    decode.run(1)
    decode.ask("sharing", [*shared, 1])
    decode.ask("remote", [50] * 40, 40)
    decode.run(1)
    assert set(decode.reserved) == {"remote"}
