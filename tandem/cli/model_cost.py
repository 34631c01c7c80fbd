"""Finds the model that `tandem plan` is about, and its cost in memory and arithmetic.

The model is a built-in one, a model directory, a GGUF file, or a Hugging Face name. Of the latter three only the
`config.json` is read; where there is just a GGUF file, one is made from its header. A plan needs no weights, and torch
only for the formats of a quantised checkpoint, of whose files the headers are read if they are on this machine.
"""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tandem.architecture.catalogue import catalogue_names, find_cost
from tandem.architecture.cost import ModelCost, read_cost
from tandem.architecture.fields import read_json_object
from tandem.architecture.quantisation import find_quantisation, read_config
from tandem.core.errors import CheckpointError, ConfigurationError, UnsupportedCheckpointError, shown
from tandem.core.paths import expanded
from tandem.models.hub_gguf import recall

_CONFIG = "config.json"
BITS = 16  # assumed of each weight where a checkpoint is not quantised


def named_model(name: str, weight_bits: int | None, kv_bits: int) -> ModelCost:
    """Returns the cost of the built-in model `name`, or of the model in the directory or repository of that name.

    `weight_bits`: None = as a quantised checkpoint has them, 16 of others.

    Raises:
        ConfigurationError: the name is none of them.
        CheckpointError: it is a model that cannot be read, or not planned for.
    """
    if name.lower() in catalogue_names():
        return find_cost(name, weight_bits=weight_bits or BITS, kv_bits=kv_bits)
    directory, called = _located(name)
    config = read_json_object(directory / _CONFIG)
    cost = read_cost(config, called, weight_bits=weight_bits or BITS, kv_bits=kv_bits)
    if weight_bits is not None:
        return cost
    fields = read_config(directory)
    try:
        if find_quantisation(fields) is None:
            return cost
        from tandem.models.weight_sizes import quantised_cost  # NOTE: it imports torch, which takes a moment

        return quantised_cost(cost, fields, directory)
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(
            f"--model={shown(called)}: {error}; plan for its unquantised checkpoint, and say by --weight-bits what "
            "smaller weights would change"
        ) from error


def config_of(name: str) -> dict[str, object]:
    """Returns the `config.json` of a directory, file or repository.

    Raises:
        ConfigurationError: the name is none of them; built-in models have no file.
        CheckpointError: the file cannot be fetched or read.
    """
    return read_json_object(_located(name)[0] / _CONFIG)


def _located(name: str) -> tuple[Path, str]:
    """The directory with the `config.json` of a directory, file or repository, and its name for reports."""
    directory = expanded(name)
    if directory.is_dir():
        return directory, directory.resolve().name
    if directory.is_file():
        from tandem.models.hub import resolve_model_path, served_name  # NOTE: it takes a moment, and few plans need it

        return resolve_model_path(name, has_weights=False), served_name(name)
    return _downloaded(name).parent, name


def _downloaded(name: str) -> Path:
    """Path of the `config.json` of a Hugging Face repository: fetched, cached, or made from its GGUF file's header."""
    model, _, revision = name.partition("@")  # NOTE: a revision may have slashes too
    repository, _, part = model.partition(":")
    if repository.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigurationError(
            f"--model={shown(name)} is neither a directory, nor a Hugging Face name (OWNER/NAME[:PART][@REVISION]), "
            f"nor a built-in model: {', '.join(catalogue_names())}"
        )
    if part:
        return _of_gguf(name)
    try:  # NOTE: asking for the file alone is repeated for 23 s where nothing answers
        found = huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=_CONFIG)
    except HFValidationError as error:
        raise ConfigurationError(f"--model={shown(name)} is no Hugging Face name ({error})") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        known = recall(name)
        if known is not None:
            return known / _CONFIG
        raise CheckpointError(
            f"the {_CONFIG} of {shown(name)} cannot be fetched from the Hugging Face hub ({error}); check the name and "
            f"the network, give a model directory, or name a built-in model: {', '.join(catalogue_names())}"
        ) from error
    config = Path(found) / _CONFIG
    return config if config.is_file() else _of_gguf(name)


def _of_gguf(name: str) -> Path:
    from tandem.models.hub import resolve_model_path  # NOTE: it takes a moment, and few plans need it

    return resolve_model_path(name, has_weights=False) / _CONFIG
