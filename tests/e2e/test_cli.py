"""The `tandem` command as a user runs it: real processes, real files, exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.core.sampling_params import SamplingParams
from tests.helpers import command_line
from tests.helpers.checkpoints import save_tiny_qwen3
from tests.helpers.engines import drain, text, tiny_engine, token_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FLAGS = ["--dtype", "float32", "--no-native-kernels", "--attention-backend", "reference", "--kv-cache-gib", "0.01"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    return write_byte_tokenizer(save_tiny_qwen3(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


def tandem(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return command_line.run(*arguments, given=stdin, env=os.environ)


def in_a_new_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", command_line.MODULE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def expected_text(checkpoint: Path, prompt: str, params: SamplingParams) -> str:
    engine = tiny_engine(checkpoint)
    request_id = engine.add_request(prompt, params)
    return text(drain(engine)[request_id, 0])


def test_generate_prints_the_engines_text(checkpoint: Path) -> None:
    result = tandem(
        "generate", "--model", checkpoint, "--prompt", "abc", "--max-tokens", "12", "--temperature", "0", *FLAGS
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected_text(checkpoint, "abc", SamplingParams(temperature=0.0, max_tokens=12)) + "\n"


def test_stats_name_what_was_measured(checkpoint: Path) -> None:
    flags = ["--max-tokens", "4", "--stats", "--speculate", f"draft={checkpoint}", *FLAGS]
    result = tandem("generate", "--model", checkpoint, "--prompt", "a" * 40, "--prompt", "a" * 40, *flags)
    assert result.returncode == 0, result.stderr
    assert "TTFT ms" in result.stderr
    assert "TPOT ms" in result.stderr
    assert "prefix hits: 32 of 80 prompt tokens" in result.stderr
    assert "KV blocks:" in result.stderr
    assert re.search(r"drafts: \d+ of \d+\s+accepted,\s+-?\d+\.\d+\s+s\s+saved", result.stderr)


def test_a_file_is_served_as_one_batch_with_its_own_settings(checkpoint: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "abc", "max_tokens": 5, "temperature": 0.0, "ignore_eos": True},
        {"prompt": [1, 2, 3], "max_tokens": 7, "seed": 3, "ignore_eos": True, "n": 2},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, lines)))
    result = tandem("generate", "--model", checkpoint, "--file", source, "--output", target, *FLAGS)
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(answer["prompt"], answer["index"], len(answer["token_ids"])) for answer in answers] == [
        ("abc", 0, 5),
        ([1, 2, 3], 0, 7),
        ([1, 2, 3], 1, 7),
    ]
    engine = tiny_engine(checkpoint)
    request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=7, seed=3, ignore_eos=True))
    assert answers[1]["token_ids"] == token_ids(drain(engine)[request_id, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be"),
        (["--prompt", "a", "--temperature", "nan"], "temperature=nan must be"),
        (["--prompt", "a", "--top-p", "0"], "top_p=0.0 must be"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens=0 must be"),
        (["--prompt", "a", "--max-tokens", "x"], "--max-tokens='x'"),
        (["--prompt", "a", "--dtype", "int3"], "int3"),
        (["--prompt", "a", "--block-size", "7"], "block_size=7"),
        (["--prompt", "a", "--device", "tpu"], "device='tpu'"),
        (["--prompt", "a", "--attention-backend", "magic"], "attention_backend='magic'"),
        (["--prompt", ""], "the prompt is empty"),
        ([], "there is no prompt"),
        (["--file", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_settings_are_one_clear_line(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(checkpoint), *FLAGS, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_model_is_one_clear_line_of_a_real_process(tmp_path: Path) -> None:
    result = in_a_new_process("generate", "--model", tmp_path / "nothing", "--prompt", "a")
    assert result.returncode == 2
    assert "nothing" in result.stderr
    assert "Traceback" not in result.stderr


def test_variables_configure_and_flags_win(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MODEL", str(checkpoint))
    monkeypatch.setenv("TANDEM_MAX_TOKENS", "3")
    monkeypatch.setenv("TANDEM_TEMPERATURE", "0")
    params = SamplingParams(temperature=0.0, max_tokens=6)
    result = tandem("generate", "--prompt", "abc", "--max-tokens", "6", *FLAGS)
    assert result.stdout == expected_text(checkpoint, "abc", params) + "\n"


def test_a_reader_that_goes_away_ends_the_command_quietly(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "tandem.cli.main", "generate", "--model", str(checkpoint), "--prompt", "abc"]
    process = subprocess.Popen([*command, *FLAGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 141
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_output_that_cannot_spell_a_character(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    flags = ["--max-tokens", "8", "--seed", "1", *FLAGS]
    streamed = in_a_new_process("generate", "--model", checkpoint, "--prompt", "caf\u00e9", *flags)
    assert streamed.returncode == 0, streamed.stderr
    listed = in_a_new_process("generate", "--model", checkpoint, "--prompt", "caf\u00e9", "--prompt", "x", *flags)
    assert listed.returncode == 0, listed.stderr
    assert [json.loads(line)["prompt"] for line in listed.stdout.splitlines()] == ["caf\u00e9", "x"]


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "--help"], ["version"]])
def test_help_and_version(arguments: list[str]) -> None:
    result = tandem(*arguments)
    assert result.returncode == 0
    assert "tandem" in (result.stdout + result.stderr).lower()


def test_chat_goes_on_after_a_message_its_template_refuses(checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    refusing = (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    (model / "chat_template.jinja").write_text(refusing)
    result = tandem("chat", "--model", model, "--max-tokens", "4", *FLAGS, stdin="hello\nagain\n/new\nhello\n/quit\n")
    assert result.returncode == 0, result.stderr
    assert "one message only" in result.stdout
    assert result.stdout.count("prompt tokens cached") == 2


def test_chat_keeps_the_conversation(checkpoint: Path) -> None:
    result = tandem("chat", "--model", checkpoint, "--max-tokens", "6", *FLAGS, stdin="hello\nand again\n/new\n/quit\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens cached") == 2
