"""Costs of the drafts that `tandem plan --speculate` names.

Reads configurations; for the directory of an EAGLE head also the names of its tensors.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tandem.architecture.cost import ModelCost
from tandem.architecture.draft_cost import DrafterCost, eagle3_cost, mtp_cost
from tandem.architecture.families.eagle3 import DIRECTORIES, LAYER
from tandem.cli.model_cost import BITS, config_of, named_model
from tandem.core.errors import CheckpointError, ConfigurationError, TandemError
from tandem.core.paths import expanded
from tandem.core.speculate import AUTO, DRAFT, EAGLE, MTP, OFF, SETTINGS, drafter_of
from tandem.planning.planned_drafts import PlannedDrafts


def planned_drafts(
    setting: str,
    model: ModelCost,
    *,
    path: Path,
    weight_bits: int | None,
    acceptance: float,
    most: int,
    num_accelerators: int,
) -> PlannedDrafts | None:
    """The drafts of workers that run with `--speculate` = `setting`; None = none.

    Args:
        path: directory of the model, where it is one.
        weight_bits: bits of a draft model's or head's weights; None = as its checkpoint has them.
        most: number of tokens drafted at a time.
        num_accelerators: accelerators of a worker.

    Raises:
        ConfigurationError: it is no drafter, or that of another model.
        CheckpointError: it cannot be read.
    """
    found = drafter_of(setting)
    if found is None:
        raise ConfigurationError(f"speculate={setting!r} is no drafter; choose {', '.join(SETTINGS)}")
    name, directory = found
    if name == OFF:
        return None
    try:
        drafter = _drafter(name, directory or "", model, path, weight_bits)
    except TandemError as error:
        raise type(error)(f"speculate={setting!r}: {error}") from error
    if drafter is not None and num_accelerators > 1:  # NOTE: one has the model's output head, of which each has a part
        drafter = replace(drafter, num_shared_parameters=0)
    return PlannedDrafts(drafter=drafter, acceptance=acceptance, most=most)


def _drafter(name: str, directory: str, model: ModelCost, path: Path, weight_bits: int | None) -> DrafterCost | None:
    """Cost of the drafter. NOTE: for `auto` the configuration tells whether the weights have an MTP module."""
    if name == DRAFT:
        return DrafterCost(named_model(directory, weight_bits, int(model.kv_bits)))
    if name == EAGLE:
        return _eagle(directory, model, weight_bits)
    if name == MTP or (name == AUTO and len(model.model.mtp_layers) == 1):
        return mtp_cost(model)
    return _eagle_beside(path, model, weight_bits) if name == AUTO else None


def _eagle(directory: str, model: ModelCost, weight_bits: int | None) -> DrafterCost:
    config = config_of(directory)
    return eagle3_cost(config, _names(directory, config, model), directory, model, weight_bits=weight_bits or BITS)


def _eagle_beside(path: Path, model: ModelCost, weight_bits: int | None) -> DrafterCost | None:
    """The head that a worker would find beside a model's directory; None also for one that does not fit the model."""
    for directory in (expanded(str(path)) / name for name in DIRECTORIES):
        if (directory / "config.json").is_file():
            with suppress(CheckpointError):
                return _eagle(str(directory), model, weight_bits)
    return None


def _names(directory: str, config: Mapping[str, object], model: ModelCost) -> Collection[str]:
    """Names of a head's tensors; where only its configuration was fetched, the names that published heads have."""
    path = expanded(directory)
    if path.is_dir():
        from tandem.architecture.families.eagle3 import parameter_name  # NOTE: with torch, which few plans need
        from tandem.models.checkpoint import open_checkpoint
        from tandem.models.weights import stored_names

        return stored_names(open_checkpoint(path), parameter_name)
    has_offsets = config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size")
    has_embedding = config.get("hidden_size") != model.hidden_size
    optional = {"d2t": has_offsets, "embed_tokens.weight": has_embedding}
    return {"fc.weight", f"{LAYER}.hidden_norm.weight", *(name for name, is_there in optional.items() if is_there)}
