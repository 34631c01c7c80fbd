"""Workers of a model with recurrent layers: alone they serve it, and what would move its state is refused by name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigurationError
from tandem.core.scope import UNSCOPED
from tandem.rpc.messages import GenerateCall
from tandem.worker.process import serving_worker
from tandem.worker.settings import DecodeSettings, PrefillSettings, WorkerSettings
from tests.helpers.callers import WorkerCaller
from tests.helpers.handoffs import PROMPT, alone, call_of
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.helpers.workers import GREEDY, SAMPLED, at_rest, generated, pair_of, prompt_of, settings_of


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path_factory.mktemp("worker-granite")))


def test_a_decode_worker_alone_gives_the_tokens_of_the_engine(hybrid: Path) -> None:
    async def main() -> None:
        async with serving_worker(settings_of(DecodeSettings, hybrid, "d0", transport="tcp")) as worker:
            client = WorkerCaller(worker.core.me.address)
            calls = [
                GenerateCall(request_id=str(n), prompt_token_ids=prompt_of(n, n), params=params, scope=UNSCOPED)
                for n, params in ((1, GREEDY), (33, SAMPLED), (90, GREEDY))
            ]
            answers = await asyncio.gather(*(generated(client, call) for call in calls))
            await at_rest(worker)
            await client.close()
        assert answers == [alone(hybrid, call.prompt_token_ids, call.params) for call in calls]

    asyncio.run(main())


def test_the_family_without_recurrent_layers_is_handed_over(tmp_path: Path) -> None:
    """As Granite 4 Micro is."""
    options: dict[str, Any] = {
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    }
    path = write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path, **options))

    async def main() -> None:
        async with pair_of(path, transport="tcp") as pair:
            assert await generated(pair.to_decode, call_of(pair)) == alone(path, PROMPT, GREEDY)
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PrefillSettings, {}, r"role='prefill': layer 0 .*recurrent state.*`tandem up --prefill 0`"),
        (
            DecodeSettings,
            {"host_kv_gib": 0.01},
            r"host_kv_gib=0\.01: layer 0 .*recurrent state.*leave host_kv_gib at 0",
        ),
    ],
)
def test_what_would_move_a_recurrent_state_is_refused_before_it_is_ready(
    hybrid: Path, kind: type[WorkerSettings], settings: dict[str, object], message: str
) -> None:
    async def main() -> None:
        async with serving_worker(settings_of(kind, hybrid, "w0", transport="tcp", **settings)):
            pytest.fail("it is ready")

    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(main())
