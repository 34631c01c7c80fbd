"""Drafts in plans: what is counted of a drafter, beside what an engine with it holds in memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cli.main import main
from tandem.cli.model_cost import named_model
from tandem.cli.plan_drafts import planned_drafts
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.formats import read_formats
from tandem.core.errors import TandemError
from tandem.core.speculate import drafter_of
from tandem.engine.drafts.draft_model import DraftModel
from tandem.engine.drafts.heads import DraftingHead
from tandem.engine.drafts.networks import TargetModel, load_network
from tandem.models.loader import load_model
from tandem.planning.planned_drafts import PlannedDrafts
from tandem.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.engines import TINY
from tests.helpers.heads import save_deepseek_v3_with_mtp, save_eagle3, save_qwen3_next_with_mtp
from tests.helpers.tokenizers import write_byte_tokenizer

BITS = 32  # of the tiny checkpoints' numbers
CPU = torch.device("cpu")


def draft_case(directory: Path) -> tuple[Path, str]:
    model = write_byte_tokenizer(save_tiny_llama(directory / "model"))
    small = write_byte_tokenizer(save_tiny_llama(directory / "small", num_hidden_layers=1, seed=1))
    return model, f"draft={small}"


def mtp_case(directory: Path) -> tuple[Path, str]:
    return write_byte_tokenizer(save_deepseek_v3_with_mtp(directory / "model")), "mtp"


def hybrid_case(directory: Path) -> tuple[Path, str]:
    return write_byte_tokenizer(save_qwen3_next_with_mtp(directory / "model")), "mtp"


def eagle_case(directory: Path, **options: int) -> tuple[Path, str]:
    model = write_byte_tokenizer(save_tiny_llama(directory / "model", num_hidden_layers=3))
    return model, f"eagle={save_eagle3(directory / 'eagle', model, **options)}"


CASES: dict[str, Callable[[Path], tuple[Path, str]]] = {
    "draft": draft_case,
    "mtp": mtp_case,
    "mtp of a hybrid": hybrid_case,
    "eagle": eagle_case,
    "eagle of its own width": partial(eagle_case, hidden_size=48, target_hidden_size=64),
}


def planned(model: Path, setting: str, num_accelerators: int = 1) -> PlannedDrafts:
    cost = named_model(str(model), BITS, BITS)
    found = planned_drafts(
        setting, cost, path=model, weight_bits=BITS, acceptance=0.6, most=3, num_accelerators=num_accelerators
    )
    assert found is not None
    return found


@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_the_engine_holds(tmp_path: Path, name: str) -> None:
    model, setting = CASES[name](tmp_path)
    drafts = planned(model, setting)
    load = partial(load_model, dtype="float32", device=CPU, kernels=TorchKernels())
    target = TargetModel(
        load(str(model)), model, Tokenizer.load(model), TorchKernels(), CPU, read_formats, allow_pickle=False, load=load
    )
    drafter = drafter_of(setting)
    assert drafter is not None
    network = load_network(replace(TINY, model=str(model), speculate=setting), drafter[0], target)
    assert isinstance(network, DraftModel | DraftingHead)
    held = network.model.weight_bytes if isinstance(network, DraftModel) else network.loaded.weight_bytes
    assert drafts.weight_bytes == pytest.approx(held, rel=0.02)
    assert drafts.drafter is not None
    per_block = drafts.drafter.network.kv_bytes_per_token * TINY.block_size
    assert per_block == pytest.approx(network.layout.page_bytes, rel=0.02)


def test_what_an_engine_would_refuse_is_refused(tmp_path: Path) -> None:
    llama, head = eagle_case(tmp_path, hidden_size=48)
    for setting, message in (
        ("draft", "speculate='draft' is no drafter"),
        ("mtp", "speculate='mtp': the configuration of model has no module"),
        (head, "hidden_size=48, and the model's hidden size is 64"),
    ):
        with pytest.raises(TandemError, match=message):
            planned(llama, setting)


def test_the_leader_of_several_has_the_models_output_head_again(tmp_path: Path) -> None:
    """Of a module for multi-token prediction. A head that has its own costs as much on one accelerator."""
    model, setting = mtp_case(tmp_path / "mtp")
    table_bytes = named_model(str(model), BITS, BITS).num_table_parameters * BITS / 8
    assert planned(model, setting, 2).weight_bytes - planned(model, setting).weight_bytes == table_bytes
    llama, head = eagle_case(tmp_path / "eagle")
    assert planned(llama, head, 2).weight_bytes == planned(llama, head).weight_bytes


def test_auto_plans_the_head_that_a_worker_finds(tmp_path: Path) -> None:
    model = write_byte_tokenizer(save_tiny_llama(tmp_path, num_hidden_layers=3))
    assert planned(model, "auto").drafter is None
    save_eagle3(model / "eagle3", model, hidden_size=48)  # of another model
    assert planned(model, "auto").drafter is None
    save_eagle3(model / "eagle", model)
    assert planned(model, "auto").drafter == planned(model, f"eagle={model / 'eagle'}").drafter


def test_a_head_that_is_named_is_billed_where_prompts_are_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time, memory and what is handed over. `auto` has none there, nor does a drafter from the text."""
    model = write_byte_tokenizer(save_tiny_llama(tmp_path, num_hidden_layers=3))
    head = save_eagle3(model / "eagle", model)
    plan = ["plan", "--model", str(model), "--input-tokens", "100", "--output-tokens", "20"]

    def drafted(setting: str) -> dict[str, Any]:
        main([*plan, "--json", "--speculate", setting])
        value: dict[str, Any] = json.loads(capsys.readouterr().out)
        return value

    off, text, auto, named = map(drafted, ("off", "ngram", "auto", f"eagle={head}"))
    at_prefill = [each["workers"]["prefill"] for each in (off, text, auto, named)]
    assert at_prefill[:3] == [at_prefill[0]] * 3
    assert [each["drafts"] and each["drafts"]["at_prefill"] for each in (off, text, auto, named)] == [
        None,
        False,
        False,
        True,
    ]
    bill, plain = named["drafts"], at_prefill[0]
    assert auto["drafts"] == bill | {"at_prefill": False}
    assert plain["kv_memory_bytes"] - at_prefill[3]["kv_memory_bytes"] == pytest.approx(bill["weight_bytes"])
    assert at_prefill[3]["prefill_ms"] > plain["prefill_ms"]
    assert at_prefill[3]["speed"]["prefill"]["ms_per_token"] > plain["speed"]["prefill"]["ms_per_token"]
    moved = named["hand_off"]["num_bytes"] - off["hand_off"]["num_bytes"]
    assert moved == pytest.approx(100 * bill["kv_bytes_per_token"])
    main([*plan, "--speculate", f"eagle={head}"])
    assert "KB per token, on prefill workers too" in capsys.readouterr().out


def test_a_plan_tells_what_drafts_take_and_bring(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "qwen3-8b", "--input-tokens", "2000", "--tpot-ms", "20"]

    def drafted(*arguments: str) -> dict[str, object]:
        assert main([*plan, "--json", *arguments]) == 0
        value: dict[str, object] = json.loads(capsys.readouterr().out)
        return value

    off, sure, never = (
        drafted(),
        drafted("--speculate", "draft=qwen3-0.6b", "--acceptance", "0.8"),
        drafted("--speculate", "draft=qwen3-0.6b", "--acceptance", "0"),
    )
    assert off["drafts"] is None
    steps = [value["workers"]["decode"] for value in (off, sure, never)]  # type: ignore[index]
    assert steps[1]["step_ms"] < 0.7 * steps[0]["step_ms"]
    assert steps[2]["step_ms"] == steps[0]["step_ms"]
    assert steps[1]["kv_memory_bytes"] == pytest.approx(steps[0]["kv_memory_bytes"] - 1.192e9, rel=0.001)
    assert steps[1]["kv_tokens"] < 0.6 * steps[0]["kv_tokens"]
    assert off["workers"]["prefill"] == sure["workers"]["prefill"]  # type: ignore[index]
    assert main([*plan, "--speculate", "draft=qwen3-0.6b"]) == 0
    out = capsys.readouterr().out
    assert "drafts: 60% right, at most 7 a step, by qwen3-0.6b: 1.19 GB, 115 KB per token" in out
    assert "a token with drafts: at best, likely" in out
