"""The engine's benchmark waits for whole answers: figures arrive with the first token already."""

from bench.engine import Workload, run_tandem
from tandem.core.config import EngineConfig
from tandem.engine.resolve import build_engine


def test_a_run_lasts_until_every_answer_is_whole() -> None:
    engine = build_engine(EngineConfig(model="demo/tandem-demo", max_model_len=256))
    try:
        timing = run_tandem(engine, Workload("two", 2, 0, 20, 16, 1), seed=0)
        assert not engine.has_work
        assert timing.tpot_s is not None
        assert timing.tpot_s > 0
        assert timing.num_output_tokens == 32
    finally:
        engine.close()
