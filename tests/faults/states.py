"""States of the protocol, each reached by watching for it, never by waiting for a while."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tests.faults.scene import Scene
from tests.faults.streams import PATIENCE_S, Answer, Asked


class State(StrEnum):
    """Progress of a request."""

    QUEUED = "queued"
    COMPUTING = "between chunks"
    TRANSFER = "transfer under way"
    FIRST = "after the first token"
    DECODING = "mid-decode"


@dataclass(frozen=True, slots=True)
class Staged:
    """A request in some state, those that were needed to bring it there, and who serves it."""

    answer: Answer
    others: tuple[Answer, ...]
    prefill: str
    decode: str

    def answers(self) -> tuple[Answer, ...]:
        return (self.answer, *self.others)


NUM_BLOCKERS = 3
NUM_DECODED = 12


NUM_STAGINGS = 5


class _TooLateError(Exception):
    """The request was in the state and left it before that was seen, or never came into it."""


@contextmanager
def staged(scene: Scene, state: State, asked: Asked, gateway: int = 0) -> Iterator[Staged]:
    """Bring a request into a state and hang up on everybody at the end."""
    for number in range(NUM_STAGINGS):
        with ExitStack() as opened:
            try:
                found = opened.enter_context(_staged(scene, state, asked, gateway))
            except _TooLateError:
                assert number < NUM_STAGINGS - 1, f"no request was seen {state}, {NUM_STAGINGS} times"
                continue
            yield found
            return


@contextmanager
def _staged(scene: Scene, state: State, asked: Asked, gateway: int) -> Iterator[Staged]:
    asked = asked.salted(scene.new_salt())
    if state is State.TRANSFER:
        scene.warm_prefill(asked)
    others = tuple(scene.ask(asked.salted(""), gateway) for _ in range(NUM_BLOCKERS if state is State.QUEUED else 0))
    for other in others:
        paired(scene, other, gateway)
    answer = scene.ask(asked, gateway)
    try:
        pairing = paired(scene, answer, gateway)
        found = Staged(answer, others, pairing["prefill"], pairing["decode"])
        assert found.prefill != found.decode, "decode computes this prompt itself"
        _ARRIVED[state](scene, found)
        yield found
    finally:
        for each in (answer, *others):
            each.hang_up()


def paired(scene: Scene, answer: Answer, gateway: int) -> dict[str, str]:
    """Waits for its first pairing."""
    found: list[dict[str, str]] = []

    def is_paired() -> bool:
        with suppress(StopIteration):
            found.append(scene.pairing(answer, gateway))
        return bool(found)

    scene.cluster.wait(is_paired, PATIENCE_S)
    return found[-1]


def _until(scene: Scene, staged: Staged, metric: Callable[[], float]) -> None:
    scene.cluster.wait(lambda: metric() > 0 or staged.answer.pieces, PATIENCE_S)
    if staged.answer.pieces:
        raise _TooLateError


def _until_queued(scene: Scene, staged: Staged) -> None:
    def num_waiting() -> float:
        return sum(scene.cluster.metrics(staged.prefill)["vllm:num_requests_waiting"].values())

    _until(scene, staged, num_waiting)


def _until_computing(scene: Scene, staged: Staged) -> None:
    _until(scene, staged, lambda: scene.cluster.blocks(staged.prefill)["leased"])


_ARRIVED: dict[State, Callable[[Scene, Staged], None]] = {
    State.QUEUED: _until_queued,
    State.COMPUTING: _until_computing,
    State.TRANSFER: lambda _, staged: staged.answer.wait(1),
    State.FIRST: lambda _, staged: staged.answer.wait(1),
    State.DECODING: lambda _, staged: staged.answer.wait(NUM_DECODED),
}
