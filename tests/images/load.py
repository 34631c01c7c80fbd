"""HTTP load whose answers are known: streams that go on while something happens, each compared token by token."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.streams import Answer, Asked, Known, asked_of

NUM_PROMPTS = 6
MAX_TOKENS = 160
STREAM_S = 90.0


@dataclass
class Tally:
    """Outcomes of a load's streams. `lost`: reasons, by request."""

    num_exact: int = 0
    num_tokens: int = 0
    longest_silence_s: float = 0.0
    most_silent: str = ""
    lost: dict[str, str] = field(default_factory=dict)

    def add(self, answer: Answer) -> None:
        """One that was exact."""
        self.num_exact += 1
        self.num_tokens += len(answer.token_ids)
        silence_s = answer.longest_silence_s(answer.sent_s)
        if silence_s > self.longest_silence_s:
            self.longest_silence_s, self.most_silent = silence_s, answer.request_id

    def __str__(self) -> str:
        return (
            f"{self.num_exact} streams token-exact ({self.num_tokens} tokens), {len(self.lost)} lost, "
            f"longest silence {self.longest_silence_s:.1f} s"
        )


def known_answers(url: str, model: str) -> list[Known]:
    """Prompts of several lengths with their greedy answers, asked one by one while nothing goes wrong."""
    found = []
    for number in range(NUM_PROMPTS):
        asked = asked_of(number, num_tokens=100 + 250 * number, max_tokens=MAX_TOKENS)
        with Answer(url, model, asked, f"known-{number}") as answer:
            answer.wait(timeout_s=STREAM_S)
            assert answer.error is None, answer.error
            found.append(Known(asked, answer.token_ids))
    return found


class Load:
    """A few clients, each sending its next stream when the last is over, until told to stop."""

    def __init__(self, url: str, model: str, known: Sequence[Known], num_clients: int, label: str) -> None:
        self.tally = Tally()
        self._url, self._model, self._known, self._label = url, model, known, label
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._num_started = 0
        self._current: dict[int, Answer] = {}
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(num_clients)]
        for thread in self._threads:
            thread.start()

    @property
    def num_ended(self) -> int:
        return self.tally.num_exact + len(self.tally.lost)

    def wait_streaming(self, timeout_s: float = 30.0) -> None:
        """Until every client has a stream that has told a token and is not over."""

        def are_streaming() -> bool:
            answers = list(self._current.values())
            return len(answers) == len(self._threads) and all(a.pieces and not a.is_over for a in answers)

        self._wait(are_streaming, timeout_s, "every client streaming")

    def wait_more(self, num_streams: int, timeout_s: float = STREAM_S) -> None:
        """Until so many more streams, started from now on, are over."""
        goal = self._num_started + num_streams
        self._wait(lambda: self.num_ended >= goal, timeout_s, f"{num_streams} more streams")

    def running(self) -> list[str]:
        """The requests of the streams that have told a token and are not over."""
        return [answer.request_id for answer in list(self._current.values()) if answer.pieces and not answer.is_over]

    def ask_no_more(self) -> None:
        """Those that run go on; nothing new is sent."""
        self._stopping.set()

    def stop(self) -> Tally:
        """Let every stream come to its end."""
        self.ask_no_more()
        for thread in self._threads:
            thread.join(STREAM_S)
            assert not thread.is_alive(), "a stream does not end"
        return self.tally

    def _ask(self, client: int) -> None:
        while not self._stopping.is_set():
            with self._changed:
                number = self._num_started
                self._num_started += 1
            known = self._known[number % len(self._known)]
            # NOTE: every other round is new to all caches, so that KV blocks move between containers
            is_new = number // len(self._known) % 2 == 0
            asked = known.asked.salted(f"{self._label}-{number}") if is_new else known.asked
            self._judge(client, asked, known, f"{self._label}-{number}")

    def _judge(self, client: int, asked: Asked, known: Known, request_id: str) -> None:
        with Answer(self._url, self._model, asked, request_id) as answer:
            self._current[client] = answer
            with contextlib.suppress(AssertionError):
                answer.wait(timeout_s=STREAM_S)
            problem = _problem(answer, known)
        with self._changed:
            if problem is None:
                self.tally.add(answer)
            else:
                self.tally.lost[request_id] = problem
            self._changed.notify_all()

    def _wait(self, predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not predicate():
                assert time.monotonic() < deadline_s, f"not {what} after {timeout_s:g} s: {self.tally}"
                self._changed.wait(0.02)


def _problem(answer: Answer, known: Known) -> str | None:
    if not answer.is_over:
        return f"silent: {len(answer.token_ids)} of {len(known.token_ids)} tokens came"
    if answer.error is not None:
        return answer.error
    if answer.token_ids != known.token_ids:
        pairs = zip(answer.token_ids, known.token_ids, strict=False)
        at = next(
            (i for i, (came, due) in enumerate(pairs) if came != due), min(len(answer.token_ids), len(known.token_ids))
        )
        return f"other tokens from position {at}: {len(answer.token_ids)} came, {len(known.token_ids)} expected"
    return None


@contextlib.contextmanager
def running_load(url: str, model: str, known: Sequence[Known], label: str, num_clients: int = 6) -> Iterator[Load]:
    """Load for the time of the block, which starts when every client streams."""
    load = Load(url, model, known, num_clients, label)
    try:
        load.wait_streaming()
        yield load
    finally:
        load.stop()
