"""Model directories that cannot be served: one clear line that names the file or key, and exit code 2, for each.

Damage is done to a checkpoint that works, one thing at a time, and what is checked is what a user sees.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cli.main import main
from tandem.core.errors import CheckpointError, InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tests.helpers import checkpoints
from tests.helpers.engines import drain, tiny_engine
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FLAGS = ["--dtype", "float32", "--no-native-kernels", "--attention-backend", "reference", "--kv-cache-gib", "0.01"]
GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "binary": b"\xff\xfe\x00garbage",
    "zeros": bytes(200),
    "list": b"[1, 2]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "endless-integer": b'{"a": ' + b"9" * 5000 + b"}",
    "truncated": b'{"architectures": ["Llama',
}
WEIGHTS, SURROGATE = "model.safetensors", {"content": "\ud800"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return write_byte_tokenizer(checkpoints.save_tiny_llama(path, vocab_size=NUM_TOKENS))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def assert_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], *messages: str, flags: tuple[str, ...] = ()
) -> None:
    argv = ["generate", "--model", str(checkpoint), "--prompt", "abc", "--max-tokens", "2", *FLAGS, *flags]
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err) < 1500
    for message in messages:
        assert message in captured.err


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("content", GARBAGE)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"])
def test_garbage_files(checkpoint: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / name).write_bytes(GARBAGE[content])
    if (name, content) == ("tokenizer_config.json", "endless-integer"):
        assert_refused(checkpoint, capsys, "JSON")
    else:
        assert_refused(checkpoint, capsys, name)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_directories_or_loops(checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    assert_refused(checkpoint, capsys, name)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_missing_files(checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / name).unlink()
    assert_refused(checkpoint, capsys, name)


def test_a_model_that_is_a_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(checkpoint / "config.json", capsys, "is not a directory")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.99999])
def test_truncated_weights(checkpoint: Path, share: float, capsys: pytest.CaptureFixture[str]) -> None:
    content = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(content[: int(len(content) * share)])
    assert_refused(checkpoint, capsys, WEIGHTS, "download it again")


def test_a_header_that_promises_exabytes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + content[8:])
    assert_refused(checkpoint, capsys, WEIGHTS)


@pytest.mark.parametrize("seed", range(40))
def test_flipped_header_bytes_are_refused_or_harmless(checkpoint: Path, seed: int) -> None:
    """Any header results in an engine or in a `CheckpointError`."""
    rng = random.Random(seed)
    content = bytearray((checkpoint / WEIGHTS).read_bytes())
    for _ in range(3):
        content[rng.randrange(2500)] = rng.randrange(256)
    (checkpoint / WEIGHTS).write_bytes(bytes(content))
    with contextlib.suppress(CheckpointError):
        tiny_engine(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**400},
        {"vocab_size": NUM_TOKENS + 1},
        {"hidden_size": 63},
        {"hidden_size": "64"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 4},
        {"num_attention_heads": True},
        {"rms_norm_eps": float("nan")},
        {"max_position_embeddings": 0},
        {"eos_token_id": 10**9},
        {"eos_token_id": [10**30]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e-300}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -0.5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}},
        {"rope_parameters": [1]},
        {"architectures": [["a"]]},
    ],
    ids=str,
)
def test_absurd_configurations(checkpoint: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.edit_config(checkpoint, **changes)
    assert_refused(checkpoint, capsys)


@pytest.mark.parametrize(
    "changes",
    [{"eos_token_id": 10**9}, {"temperature": "hot"}, {"temperature": 500}, {"top_p": 0}, {"top_k": -1}],
    ids=str,
)
def test_absurd_generation_defaults(
    checkpoint: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.edit_generation_config(checkpoint, **changes)
    assert_refused(checkpoint, capsys, next(iter(changes)))


def _as_torch_file(checkpoint: Path, change: Callable[[dict[Any, Any]], None]) -> None:
    tensors: dict[Any, Any] = dict(checkpoints.read_tensors(checkpoint))
    change(tensors)
    (checkpoint / WEIGHTS).unlink()
    torch.save(tensors, checkpoint / "pytorch_model.bin")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({5: torch.ones(2)}),
        lambda tensors: tensors.update({"model.norm.weight": torch.eye(64).to_sparse()}),
        lambda tensors: tensors.update({"model.norm.weight": torch.empty(64, device="meta")}),
        lambda tensors: tensors.update({"nested": {"a": torch.ones(1)}}),
    ],
    ids=["number-as-name", "sparse", "without-data", "nested"],
)
def test_odd_torch_files(
    checkpoint: Path, change: Callable[[dict[Any, Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    _as_torch_file(checkpoint, change)
    assert_refused(checkpoint, capsys, "pytorch_model.bin", flags=("--allow-pickle",))


def test_a_sound_torch_file_is_served_only_where_it_is_allowed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it was, whatever a `.bin` held was read wherever a directory or repository had no safetensors."""
    _as_torch_file(checkpoint, lambda _: None)
    assert_refused(checkpoint, capsys, "pytorch_model.bin is a pickle", "convert it to safetensors", "--allow-pickle")
    assert main(["up", "--model", str(checkpoint)]) == 2
    assert "pytorch_model.bin is a pickle" in capsys.readouterr().err
    argv = ["generate", "--model", str(checkpoint), "--prompt", "abc", "--max-tokens", "2", *FLAGS]
    assert main([*argv, "--allow-pickle"]) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token": "\ud800"},
        {"bos_token": SURROGATE},
        {"extra_special_tokens": ["\ud800"]},
        {"added_tokens_decoder": {"256": SURROGATE}},
        {"added_tokens_decoder": {"9" * 5000: {"content": "q"}}},
        {"added_tokens_decoder": {"-1": {"content": "q"}}},
        {"added_tokens_decoder": ["q"]},
    ],
    ids=lambda changes: str(changes)[:60].encode("ascii", "replace").decode(),
)
def test_odd_tokenizer_configurations(
    checkpoint: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(checkpoint / "tokenizer_config.json", **changes)
    assert_refused(checkpoint, capsys, "tokenizer_config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}, "pre_tokenizer": None},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
    ids=["no-unknown-token", "unknown-token-is-unknown", "panics"],
)
def test_a_tokenizer_that_fails_on_a_text_fails_that_request_alone(checkpoint: Path, changes: dict[str, Any]) -> None:
    """The library raises bare exceptions and panics; either once ended the whole engine."""
    edit_json(checkpoint / "tokenizer.json", **changes)
    engine = tiny_engine(checkpoint)
    request_id = engine.add_request([65, 66], SamplingParams(max_tokens=4))
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        engine.add_request("zebra", SamplingParams(max_tokens=4))
    assert drain(engine)[request_id, 0][-1].finished
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        Tokenizer.load(checkpoint).encode("zebra")


@pytest.mark.parametrize("template", [5, ["a"], [{"name": "default"}], {"default": 5}, "{% for %}", "{{ 'a' "], ids=str)
def test_chat_templates_that_are_none(checkpoint: Path, template: Any, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(checkpoint / "tokenizer_config.json", chat_template=template)
    assert main(["chat", "--model", str(checkpoint), *FLAGS]) == 2
    assert "template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{{ messages[99].content.x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
        "{{ 'x' * 10 ** 15 }}",
    ],
)
def test_chat_templates_that_fail_or_never_end(checkpoint: Path, template: str) -> None:
    edit_json(checkpoint / "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidRequestError, match=r"template|characters"):
        ChatTemplate.load(checkpoint).render([{"role": "user", "content": "hello"}])
