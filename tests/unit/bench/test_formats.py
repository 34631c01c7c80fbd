"""The benchmark of formats counts the bytes of codes and scales, and serves each format."""

from pathlib import Path

import pytest
import torch

from bench import formats
from bench.engine import Workload
from bench.experts import step_bytes
from tandem.architecture.fields import read_json_object
from tandem.compute.codes import CodeKind
from tests.helpers import checkpoints
from tests.helpers.rounded_weights import Rounding, round_to_codes
from tests.helpers.tokenizers import write_byte_tokenizer

BY_NAME = {each.name: each for each in formats.FORMATS}


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("kind", CodeKind)
def test_bits_are_those_of_a_matrix(kind: CodeKind, group_size: int) -> None:
    rounding = Rounding(kind, group_size)
    coded = round_to_codes(torch.randn(8, 256), rounding)
    table = 0 if coded.table is None else coded.table.nbytes
    assert 8 * (coded.num_bytes - table) == formats._bits(rounding) * 8 * 256


def test_a_token_reads_the_head_in_bits_of_its_own(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_llama(tmp_path)
    config = dict(read_json_object(path / "config.json"))
    no_context = Workload("none", 1, 0, 0, 0, 1)
    plain, int4 = (BY_NAME[name].cost(config) for name in ("bf16", "int4, groups of 128"))
    head = plain.num_table_parameters
    layers = plain.num_active_parameters - head
    assert step_bytes(plain, no_context) == pytest.approx(2 * (layers + head))
    assert step_bytes(int4, no_context) == pytest.approx((4 + 16 / 128) / 8 * layers + head)


def test_every_format_is_served_and_has_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.save_tiny_llama(tmp_path, max_position_embeddings=1024, vocab_size=4096)
    write_byte_tokenizer(path)
    monkeypatch.setattr(formats, "random_checkpoint", lambda shape: path)
    monkeypatch.setattr(formats, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(formats, "matmul_rate", lambda dtype, repeats: 1e11)
    monkeypatch.setattr(formats, "fastest_dtype", lambda: torch.float32)
    monkeypatch.setattr(formats, "WORKLOADS", (Workload("single", 1, 0, 5, 4, 1), Workload("prefill", 1, 0, 20, 1, 1)))
    report = formats.measure("tiny", 1)
    found = {(row.workload, row.system) for row in report.rows}
    assert found == {(workload, name) for workload in ("single", "prefill") for name in BY_NAME}
    assert all(row.value > 0 and row.floor for row in report.rows)
