"""Two engines in one process and a transfer between their arenas that the test moves by hand."""

from dataclasses import replace
from pathlib import Path

from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.resolve import Assembly, assemble
from tandem.kvcache.block_table import BlockRange
from tandem.scheduler.output import KVComputed, KVEvent, KVReserved, SampledToken
from tandem.scheduler.request import Handoff
from tests.helpers.engines import TINY


class Side:
    """One engine, its arena and the KV events it gave. `speculation`: drafts of the test's own."""

    def __init__(self, path: Path, speculation: Speculation | None = None, /, **overrides: object) -> None:
        config = replace(TINY, model=str(path), **overrides)  # type: ignore[arg-type]
        self.assembly: Assembly = assemble(config, speculation=speculation)
        self.engine = self.assembly.engine
        self.events: list[KVEvent] = []
        self.outputs: list[RequestOutput] = []
        self.engine.on_kv_event = self.events.append

    def reserved(self) -> KVReserved:
        found = [event for event in self.events if isinstance(event, KVReserved)]
        return found[-1]

    def step(self) -> None:
        self.outputs += self.engine.step()
        self.engine.check()

    def token_ids(self, request_id: str) -> list[int]:
        return [t for output in self.outputs if output.request_id == request_id for t in output.token_ids]

    def run(self) -> None:
        """Step until nothing can go on."""
        self.step()
        while self.engine.has_work and not self.engine.is_stalled:
            self.step()


def copy_blocks(source: Side, chunks: list[KVComputed], destination: Side, reserved: KVReserved) -> int:
    """Move what `destination` lacks of these chunks; returns how many blocks that were."""
    remote = _entries([group for chunk in chunks for group in enumerate(chunk.groups)])
    local = _entries(list(enumerate(reserved.groups)))
    for entry in local.keys() & remote.keys():
        destination.assembly.arena.pages[local[entry]] = source.assembly.arena.pages[remote[entry]]
    return len(local.keys() & remote.keys())


def prefill(source: Side, prompt: list[int], params: SamplingParams, outputs: tuple[int, ...] = ()) -> list[KVComputed]:
    """Compute a prompt under the lease "lease" and one token after it; returns the chunks in order."""
    handoff = Handoff(output_token_ids=outputs, num_new_tokens=1, lease_id="lease")
    source.engine.add_request(prompt, params, request_id="prefill", handoff=handoff)
    source.events.clear()
    source.outputs.clear()
    source.run()
    return [event for event in source.events if isinstance(event, KVComputed)]


def hand_off(
    source: Side, destination: Side, prompt: list[int], params: SamplingParams, *, num_chunks: int | None = None
) -> list[int]:
    """Serve a request over both; only the first `num_chunks` chunks arrive. Returns its tokens."""
    destination.events.clear()
    destination.outputs.clear()
    handoff = Handoff(num_expected_tokens=len(prompt))
    destination.engine.add_request(prompt, params, request_id="decode", handoff=handoff)
    destination.step()
    chunks = prefill(source, prompt, params)
    first = source.token_ids("prefill")
    destination.outputs += destination.engine.accept_token("decode", SampledToken(first[0]))
    destination.engine.check()
    if any(isinstance(event, KVReserved) for event in destination.events):
        reserved = destination.reserved()
        arrived = chunks if num_chunks is None else chunks[:num_chunks]
        copy_blocks(source, arrived, destination, reserved)
        destination.engine.note_kv_ended("decode", arrived[-1].num_tokens if arrived else 0)
        destination.engine.kv.drop(reserved.fetch_id)
    source.engine.kv.drop("lease")
    destination.run()
    return destination.token_ids("decode")


def _entries(groups: list[tuple[int, BlockRange]]) -> dict[tuple[int, int], list[int]]:
    """The pages of each block."""
    return {
        (group, index): list(pages)
        for group, found in groups
        for index, pages in enumerate(found.pages(), found.first_index)
    }
