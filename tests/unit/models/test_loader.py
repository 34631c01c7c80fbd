"""`load_model` on good directories: every way weights are stored, every dtype, and what comes with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from tandem.architecture.model import EMBEDDING, HEAD, limit_length
from tandem.compute.ops import Matrix
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CheckpointError, ConfigurationError, UnsupportedCheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.parameters import tensors_of
from tests.helpers.specs import attention_of
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer


def load(
    path: Path, dtype: str = "auto", max_model_len: int | None = None, *, allow_pickle: bool = False
) -> LoadedModel:
    return load_model(
        str(path),
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=TorchKernels(),
        max_model_len=max_model_len,
        allow_pickle=allow_pickle,
    )


def assert_same_parameters(a: LoadedModel, b: LoadedModel) -> None:
    ours, theirs = tensors_of(a.decoder), tensors_of(b.decoder)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def shard(path: Path, *, suffix: str = "safetensors") -> Path:
    """Split a checkpoint into two files and an index."""
    tensors = checkpoints.read_tensors(path)
    (path / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map: dict[str, str] = {}
    for part in (0, 1):
        file = f"{stem}-{part + 1:05}-of-00002.{suffix}"
        content = {name: tensors[name] for name in sorted(tensors)[part::2]}
        weight_map |= dict.fromkeys(content, file)
        save = save_file if suffix == "safetensors" else torch.save
        save(content, path / file)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


class TestStorage:
    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_sharded_equals_single(self, suffix: str, tmp_path: Path) -> None:
        single = load(checkpoints.save_tiny_qwen2(tmp_path / "single"))
        sharded = load(
            shard(checkpoints.save_tiny_qwen2(tmp_path / "sharded"), suffix=suffix), allow_pickle=suffix == "bin"
        )
        assert_same_parameters(single, sharded)
        assert single.spec == sharded.spec

    def test_legacy_pytorch_file(self, tmp_path: Path) -> None:
        single = load(checkpoints.save_tiny_llama(tmp_path / "a"))
        path = checkpoints.save_tiny_llama(tmp_path / "b")
        torch.save(checkpoints.read_tensors(path), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
        assert_same_parameters(single, load(path, allow_pickle=True))

    def test_parameters_have_hugging_face_names(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_gemma3(tmp_path)
        model = load(path)
        names = {tensor.name for tensor in model.spec.tensors()}
        assert set(tensors_of(model.decoder)) == names == set(checkpoints.read_tensors(path))

    def test_same_dtype_stays_a_view_of_the_file(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        parameters = tensors_of(load(path).decoder)
        start, end = mapped_range(path / "model.safetensors")
        assert all(start <= tensor.data_ptr() < end for tensor in parameters.values())

    def test_rotary_buffers_of_old_files_are_ignored(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        checkpoints.write_tensors(path, checkpoints.read_tensors(path) | buffer)
        assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in tensors_of(load(path).decoder)

    def test_multimodal_checkpoint_gives_its_text_model(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_gemma3_conditional(tmp_path)
        assert any("vision_tower" in name for name in checkpoints.read_tensors(path))
        assert not any("vision" in name for name in tensors_of(load(path).decoder))

    def test_projections_of_layers_that_read_another_state_are_ignored(self, tmp_path: Path) -> None:
        """Published Gemma 4 files have them, though nothing is computed with them."""
        path = checkpoints.save_tiny_gemma4(tmp_path)
        tensors = checkpoints.read_tensors(path)
        unused = {f"model.layers.3.self_attn.{name}.weight": torch.ones(4) for name in ("k_proj", "v_proj", "k_norm")}
        assert not unused.keys() & tensors.keys()
        plain = load(path)
        checkpoints.write_tensors(path, tensors | unused)
        assert_same_parameters(plain, load(path))
        checkpoints.write_tensors(path, tensors | {"model.layers.2.self_attn.v_proj.weight": torch.ones(32, 64)})
        with pytest.raises(UnsupportedCheckpointError, match=r"layers\.2\.self_attn\.v_proj.*no place"):
            load(path)


def mapped_range(path: Path) -> tuple[int, int]:
    """Range of addresses at which this process has the file mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    bounds = [int(bound, 16) for line in lines for bound in line.split()[0].split("-")]
    return min(bounds), max(bounds)


class TestDtype:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_auto_is_the_checkpoints_own(self, dtype: str, tmp_path: Path) -> None:
        model = load(checkpoints.save_tiny_llama(tmp_path, dtype=dtype))
        assert model.spec.dtype == dtype
        assert {tensor.dtype for tensor in tensors_of(model.decoder).values()} == {getattr(torch, dtype)}

    def test_auto_without_a_configured_dtype_is_that_of_the_tensors(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path, dtype="bfloat16")
        assert load(checkpoints.edit_config(path, dtype=...)).spec.dtype == "bfloat16"

    def test_auto_passes_over_tensors_that_are_no_floats(self, tmp_path: Path) -> None:
        """Regression: the dtype of the first tensor by name was taken for the model's, and raised KeyError."""
        path = checkpoints.save_tiny_gemma3_conditional(tmp_path, dtype="bfloat16")
        text = json.loads((path / "config.json").read_text())["text_config"]
        checkpoints.edit_config(path, dtype=..., text_config={**text, "dtype": None})
        tensors = checkpoints.read_tensors(path)
        checkpoints.write_tensors(path, {"audio_tower.count": torch.tensor([3]), **tensors})
        assert load(path).spec.dtype == "bfloat16"

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_cast_rounds_each_element_once(self, dtype: str, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path, dtype="bfloat16")
        stored, model = checkpoints.read_tensors(path), load(path, dtype=dtype)
        for name, tensor in tensors_of(model.decoder).items():
            assert torch.equal(tensor, stored[name].to(getattr(torch, dtype))), name

    def test_a_tied_head_is_the_embedding_in_every_dtype(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path, dtype="bfloat16", tie_word_embeddings=True)
        for dtype in ("bfloat16", "float32"):
            parameters = load(path, dtype=dtype).decoder.parameters
            head = parameters.weights[HEAD].matrix
            assert isinstance(head, Matrix)
            assert head.tensor.data_ptr() == parameters.tensors[EMBEDDING].data_ptr()

    def test_unknown_dtype_is_a_configuration_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="dtype='int8' is not served"):
            load(checkpoints.save_tiny_llama(tmp_path), dtype="int8")


class TestGeneration:
    def test_defaults_and_end_tokens_are_merged(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        checkpoints.edit_generation_config(
            path, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=None, do_sample=True, eos_token_id=[7, 5]
        )
        model = load(path)
        assert model.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        assert model.spec.eos_token_ids == (2, 5, 7)

    def test_a_default_end_counts_only_if_no_file_names_one(self, tmp_path: Path) -> None:
        """Regression: Llama's 2, which is a word in many vocabularies, ended answers of a model with other ends."""
        path = checkpoints.edit_config(checkpoints.save_tiny_llama(tmp_path), eos_token_id=...)
        checkpoints.edit_generation_config(path, eos_token_id=...)
        assert load(path).spec.eos_token_ids == (2,)
        checkpoints.edit_generation_config(path, eos_token_id=[7, 5])
        assert load(path).spec.eos_token_ids == (5, 7)
        assert load(checkpoints.edit_config(path, eos_token_id=3)).spec.eos_token_ids == (3, 5, 7)

    def test_ends_of_a_text_model_inside_another_count(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_gemma3_conditional(tmp_path)
        text = json.loads((path / "config.json").read_text())["text_config"]
        checkpoints.edit_config(path, eos_token_id=..., text_config=text | {"eos_token_id": 3})
        checkpoints.edit_generation_config(path, eos_token_id=7)
        assert load(path).spec.eos_token_ids == (3, 7)
        del text["eos_token_id"]
        checkpoints.edit_config(path, text_config=text)
        assert load(path).spec.eos_token_ids == (7,)

    @pytest.mark.parametrize("names_eos", [False, True])
    def test_the_tokenizers_end_counts_whatever_the_file_names(self, names_eos: bool, tmp_path: Path) -> None:
        """Regression: a chat fine-tune that kept its base model's file went on behind the end of its turn."""
        path = checkpoints.save_tiny_llama(tmp_path, vocab_size=NUM_TOKENS)
        checkpoints.edit_generation_config(write_byte_tokenizer(path), eos_token_id=7 if names_eos else None)
        engine = tiny_engine(path)
        assert engine.tokenizer is not None
        assert engine.tokenizer.eos_token_id == NUM_TOKENS - 1
        favoured = SamplingParams(temperature=0, max_tokens=3, logit_bias={NUM_TOKENS - 1: 100.0})
        engine.add_request([65] * 5, favoured, request_id="r")
        outputs = drain(engine)["r", 0]
        assert outputs[-1].finish_reason == "stop"
        assert token_ids(outputs) == [NUM_TOKENS - 1]

    def test_an_end_that_is_no_token_of_the_model_is_none(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        model = load(checkpoints.edit_generation_config(path, eos_token_id=...))
        assert model.ended_by(model.spec.vocab_size) is model.ended_by(None) is model
        assert model.ended_by(5).spec.eos_token_ids == (2, 5)

    def test_options_that_are_not_applied_are_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Regression: a checkpoint's banned words were passed over without a word."""
        path = checkpoints.save_tiny_llama(tmp_path)
        others = {"bad_words_ids": [[5]], "do_sample": False, "min_new_tokens": 3, "unheard_of": "x"}
        load(checkpoints.edit_generation_config(path, temperature=0.5, pad_token_id=3, **others))
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [warning.split(": ")[1] for warning in warnings] == [
            'bad_words_ids=[[5]], do_sample=false, min_new_tokens=3, unheard_of="x"'
        ]

    def test_defaults_of_transformers_are_no_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        config = GenerationConfig()  # type: ignore[no-untyped-call]
        plain = config._get_default_generation_params() | {"do_sample": True, "max_length": None}
        load(checkpoints.edit_generation_config(path, **plain))
        assert [record for record in caplog.records if record.levelname == "WARNING"] == []

    def test_absent_file_sets_nothing(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        (path / "generation_config.json").unlink()
        assert load(path).generation_defaults == {}


class TestLength:
    def test_shorter_sizes_the_rotary_tables(self, tmp_path: Path) -> None:
        assert load(checkpoints.save_tiny_llama(tmp_path), max_model_len=40).spec.max_position_embeddings == 40

    @pytest.mark.parametrize("length", [0, 257])
    def test_beyond_the_model_is_a_configuration_error(self, length: int, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="max_position_embeddings=256"):
            load(checkpoints.save_tiny_llama(tmp_path), max_model_len=length)

    def test_yarn_serves_as_far_as_it_is_stretched_to_who_asks(self, tmp_path: Path) -> None:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
        path = checkpoints.save_tiny_qwen3(tmp_path, vocab_size=NUM_TOKENS)
        write_byte_tokenizer(checkpoints.edit_config(path, rope_parameters=yarn))
        engine = tiny_engine(path, max_model_len=1024, kv_cache_bytes=16 << 20)
        assert engine.limits.max_model_len == 1024
        engine.add_request([1] * 1000, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), request_id="far")
        assert len(token_ids(drain(engine)["far", 0])) == 4
        assert load(path).spec.max_position_embeddings == 256
        with pytest.raises(ConfigurationError, match="from 1 to 1024, what the rope is stretched to"):
            load(path, max_model_len=1025)

    def test_window_that_reaches_everything_is_none(self, tmp_path: Path) -> None:
        spec = load(checkpoints.save_tiny_llama(tmp_path)).spec
        layer = replace(spec.layers[0], mixer=replace(attention_of(spec)[0], window=32))
        spec = replace(spec, layers=(layer,))
        assert attention_of(limit_length(spec, 32))[0].window is None
        assert attention_of(limit_length(spec, 33))[0].window == 32


class TestFingerprint:
    def test_same_weights_same_fingerprint_however_stored(self, tmp_path: Path) -> None:
        a = load(checkpoints.save_tiny_llama(tmp_path / "a")).spec.fingerprint
        b = load(shard(checkpoints.save_tiny_llama(tmp_path / "b")), max_model_len=64).spec.fingerprint
        assert a == b
        assert len(a) == 64

    def test_differs_by_weights_dtype_and_configuration(self, tmp_path: Path) -> None:
        base = checkpoints.save_tiny_llama(tmp_path / "base")
        edited = checkpoints.edit_config(checkpoints.save_tiny_llama(tmp_path / "edited"), rms_norm_eps=1e-5)
        prints = [
            load(base).spec.fingerprint,
            load(base, dtype="bfloat16").spec.fingerprint,
            load(edited).spec.fingerprint,
            load(checkpoints.save_tiny_llama(tmp_path / "other", seed=1)).spec.fingerprint,
        ]
        assert len(set(prints)) == 4

    def test_workers_with_other_longrope_factors_differ(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A token's KV depends on the list, and the list on the length that a worker serves."""
        lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        path = checkpoints.save_tiny_phi3(
            tmp_path, original_max_position_embeddings=32, rope_parameters={"rope_type": "longrope", **lists}
        )
        short, longer, longest = (load(path, max_model_len=length).spec for length in (32, 33, None))
        assert short.fingerprint != longer.fingerprint == longest.fingerprint
        told = [(record.levelname, record.getMessage().split(",")[0]) for record in caplog.records]
        assert ("WARNING", "longrope: long_factor is used for every position") in told

    def test_one_changed_norm_weight_shows(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        before = load(path).spec.fingerprint
        tensors = checkpoints.read_tensors(path)
        norm = tensors["model.norm.weight"].clone()
        norm[5] += 0.01
        checkpoints.write_tensors(path, tensors | {"model.norm.weight": norm})
        assert load(path).spec.fingerprint != before


def test_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load(tmp_path / "nothing")
