"""Quantisation of a checkpoint, one layer at a time: calibrate, round, write, and compute the held-out text through the
layer.

A layer is calibrated on the outputs of the already quantised layers before it (GPTQ, section 4). The text is computed
with the numbers as readers of the files will find them, so a run that is killed and repeated makes the same checkpoint.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import torch

from tandem.architecture.model import EMBEDDING, HEAD, choose_rope_factors
from tandem.compute.ops import Kernels
from tandem.core.errors import ConfigurationError
from tandem.core.heap import large_buffers_given_back
from tandem.quantize.checkpoint_writer import CheckpointWriter
from tandem.quantize.coded_layer import WeightError, coded_inputs, from_stored, read_errors, to_stored, write_errors
from tandem.quantize.evaluation import compare, relative_error
from tandem.quantize.grids import Grid
from tandem.quantize.layer_rounding import round_layer
from tandem.quantize.moments import Moments
from tandem.quantize.output_head import OutputHead
from tandem.quantize.recipe import Recipe, check_divides
from tandem.quantize.report import LayerError, QuantizationReport
from tandem.quantize.rotation import MergedRotation, neutral
from tandem.quantize.source import SourceModel, module_of
from tandem.quantize.stream import LayerRunner, ResidualStream
from tandem.quantize.text import Sequences

REPORT: Final = "quantization_report"  # file name, without ending
_ROWS: Final = 4096  # rows of an embedding that are rotated at a time


class QuantizationRun:
    """One quantisation of a model by a recipe.

    Args:
        name: name of the model, for the report.
        model: the checkpoint to quantise, which `recipe` must suit.
        sequences: text for calibration and evaluation, in sequences no longer than the model's limit.
        on_layer: called by `write` after each layer, on its thread, with the number of finished layers.

    Raises:
        ConfigurationError: the recipe does not suit the model.
    """

    def __init__(
        self,
        name: str,
        model: SourceModel,
        recipe: Recipe,
        sequences: Sequences,
        kernels: Kernels,
        on_layer: Callable[[int], None],
    ) -> None:
        self._name = name
        self._model = model
        self._recipe = recipe
        self._sequences = sequences
        self._kernels = kernels
        self._on_layer = on_layer
        self._grid: Grid = recipe.grid(model.dtype)
        check_divides(model.spec, recipe, self._grid)
        self._rotation = MergedRotation.of(model.spec) if recipe.rotate else None
        self._own = model.own_names()
        if self._rotation is not None:
            self._refuse_others()

    def identity(self) -> Mapping[str, Any]:
        """Everything on which the result depends."""
        digest = hashlib.sha256()
        for tokens in (self._sequences.calibration, self._sequences.evaluation):
            digest.update(repr(tokens.shape).encode() + tokens.numpy().tobytes())
        recipe = asdict(self._recipe)
        return {"model": self._model.fingerprint, "recipe": recipe, "text": digest.hexdigest()}

    @large_buffers_given_back()
    def write(self, writer: CheckpointWriter) -> QuantizationReport:
        """Writes the checkpoint with a report in it; layers that `writer` already has are not computed again.

        Raises:
            CheckpointError: a file cannot be written, or the model's numbers are not finite.
        """
        spec, original = self._model.spec, self._model.stored(EMBEDDING)
        embedding = self._embedding(original)
        length = self._sequences.calibration.shape[1]
        runner = LayerRunner(choose_rope_factors(spec, length), self._kernels)
        before = runner.begin(self._sequences.evaluation, original)
        after = runner.begin(self._sequences.evaluation, embedding)
        calibration = runner.begin(self._sequences.calibration, embedding)
        layers = []
        for index in range(spec.num_layers):
            tensors = self._model.load_layer(index)
            runner.advance(index, tensors, before)
            tensors, errors = self._layer(index, tensors, runner, calibration, writer)
            runner.advance(index, tensors, after)
            if self._needs_moments:
                runner.advance(index, tensors, calibration)
            unrotated = after.hidden if self._rotation is None else self._rotation.rotate_back(after.hidden)
            layers.append(LayerError(index, relative_error(before.hidden, unrotated), tuple(errors)))
            self._on_layer(index + 1)
        return self._finish(writer, embedding, before, after, tuple(layers))

    @property
    def _needs_moments(self) -> bool:
        return self._recipe.method != "rtn"

    def _layer(
        self,
        index: int,
        tensors: dict[str, torch.Tensor],
        runner: LayerRunner,
        calibration: ResidualStream,
        writer: CheckpointWriter,
    ) -> tuple[dict[str, torch.Tensor], list[WeightError]]:
        """The layer's parameters as in the written file, and the errors of its weights."""
        found = writer.read_layer(index)
        if found is None:
            if self._rotation is not None:
                self._rotation.rotate_layer(self._model.spec.layers[index], tensors)
            inputs = coded_inputs(self._model, index)
            moments = {}
            if self._needs_moments:
                moments = {shared.weights[0]: Moments(shared.linears[0].inputs) for shared in inputs}
                runner.observe(index, tensors, calibration, moments)
            coded, errors = round_layer(tensors, inputs, self._recipe.method, self._grid, moments)
            stored = to_stored(self._model, index, coded, tensors)
            writer.write_layer(index, stored, write_errors(errors))
        else:
            stored, text = found
            errors = read_errors(text)
        return from_stored(self._model, index, self._grid, stored), errors

    def _finish(
        self,
        writer: CheckpointWriter,
        embedding: torch.Tensor,
        before: ResidualStream,
        after: ResidualStream,
        layers: tuple[LayerError, ...],
    ) -> QuantizationReport:
        model, recipe = self._model, self._recipe
        rest = self._rest(embedding)
        writer.write_rest(rest)
        old_head = self._head(model.final_norm(), model.head())
        new_head = old_head
        if self._rotation is not None:
            new_head = self._head(neutral(model.spec.final_norm), rest[model.head_name])
        report = QuantizationReport(
            model=self._name,
            recipe=recipe,
            group_size=self._grid.group_size,
            num_calibration_tokens=self._sequences.calibration.numel() if self._needs_moments else 0,
            bytes_before=sum(path.stat().st_size for path in model.checkpoint.paths),
            bytes_after=writer.num_bytes,
            quality=compare(self._sequences.evaluation, before.hidden, after.hidden, old_head, new_head),
            layers=layers,
        )
        texts = {f"{REPORT}.json": report.as_json(), f"{REPORT}.txt": report.as_text()}
        writer.finish(model.directory, self._config(rest), texts)
        return report

    def _head(self, norm: torch.Tensor | None, rows: torch.Tensor) -> OutputHead:
        return OutputHead(self._model.spec, norm, rows, self._kernels)

    def _embedding(self, original: torch.Tensor) -> torch.Tensor:
        """The embedding as in the written file."""
        if self._rotation is None:
            return original
        return _by_rows(original, self._rotation.rotate_embedding)

    def _rest(self, embedding: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors outside the layers, by the checkpoint's names."""
        model, rotation = self._model, self._rotation
        found = {name: model.checkpoint.tensor(name) for name in model.checkpoint.names if name not in self._own}
        if rotation is None:
            return found
        norm, weight = model.spec.final_norm, model.final_norm()
        found[model.sources[EMBEDDING].tensor] = embedding
        found[model.head_name] = _by_rows(model.head(), lambda rows: rotation.rotate_head(rows, norm, weight))
        if norm.tensor_name is not None:
            name = model.sources[norm.tensor_name].tensor
            found[name] = neutral(norm).to(found[name].dtype)
        return found

    def _config(self, rest: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """`config.json`, with the format of the weights described as in compressed-tensors."""
        config: dict[str, Any] = json.loads(json.dumps(self._model.config))
        if self._rotation is not None:
            for section in (config, config.get("text_config")):
                if section is not None:
                    section["tie_word_embeddings"] = False
        name = self._grid.format_name
        group = {"targets": ["Linear"], "weights": self._grid.description(), "format": name}
        nothing = {"input_activations": None, "output_activations": None}
        return config | {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
                "format": name,
                "config_groups": {"group_0": group | nothing},
                "ignore": self._ignored(rest),
                "kv_cache_scheme": None,
            }
        }

    def _ignored(self, rest: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of modules whose weights are matrices but not quantised."""
        model = self._model
        found = {module_of(HEAD)}
        for index in range(model.spec.num_layers):
            coded = {name for shared in coded_inputs(model, index) for name in shared.weights}
            plain = (
                tensor.name for tensor in model.own_tensors(index) if tensor.is_weight and tensor.name not in coded
            )
            found.update(module_of(model.written_name(name)) for name in plain)
        found.update(module_of(name) for name, tensor in rest.items() if name.endswith(".weight") and tensor.ndim == 2)
        return sorted(found - {module_of(model.sources[EMBEDDING].tensor)})

    def _refuse_others(self) -> None:
        model = self._model
        norm = model.spec.final_norm.tensor_name
        known = {model.sources[name].tensor for name in (EMBEDDING, norm) if name is not None}
        others = [name for name in model.checkpoint.names if name not in known | self._own | {model.head_name}]
        if others:
            raise ConfigurationError(
                f"--rotate: {model.directory} has {others[0]}, which the rotation does not reach; leave --rotate out"
            )


def _by_rows(matrix: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies `rotate` to a few rows at a time; the result has the dtype of `matrix`."""
    return torch.cat([rotate(rows.float()).to(matrix.dtype) for rows in torch.split(matrix, _ROWS)])
