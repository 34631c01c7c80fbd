"""Port and model of `tandem up`, tried before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.checks import check_model, check_port, check_widths
from tandem.core.errors import ConfigurationError, UnsupportedCheckpointError
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.process.ports import bound
from tests.helpers.checkpoints import edit_config, save_tiny_deepseek_v3, save_tiny_qwen2
from tests.helpers.hybrid_checkpoints import save_tiny_lfm2
from tests.helpers.tokenizers import write_byte_tokenizer


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_a_port_is_free_or_it_is_said_who_is_to_move(host: str) -> None:
    with bound(host, 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf":{port} .*stop what took it or choose another by --port"):
            check_port(host, port)
    check_port(host, port)


def test_a_name_is_tried_at_the_address_that_the_gateway_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address of a name was tried once: `localhost` was refused where IPv6 is off."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a list of addresses was asked for"))
    check_port("localhost", 0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:1024 .*choose an address of this machine by --host"):
        check_port("192.0.2.1", 1024)


def test_a_recurrent_model_is_served_with_weights_in_a_format_that_is(tmp_path: Path) -> None:
    path = write_byte_tokenizer(save_tiny_lfm2(tmp_path))
    check_model(path)
    edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    check_model(path)
    edit_config(path, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedCheckpointError, match=r'config.json: .*quant_method="aqlm" is not served'):
        check_model(path)


def test_widths_that_do_not_divide_a_model_are_refused_with_those_that_do(tmp_path: Path) -> None:
    path = save_tiny_qwen2(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    check_widths(path, {"prefill": 4, "decode": 2}, 16)
    check_widths(path, {"prefill": 2, "decode": 2}, 16, "nixl")
    with pytest.raises(ConfigurationError, match="--prefill-tp=2 and --decode-tp=1 with --transport nixl"):
        check_widths(path, {"prefill": 2, "decode": 1}, 16, "nixl")
    with pytest.raises(ConfigurationError, match=r"tp=8 .*num_attention_heads=4, .*what can be had: tp=1, 2, 4"):
        check_widths(path, {"prefill": 1, "decode": 8}, 16)


def test_contexts_change_no_hand_off_and_count_as_ranks(tmp_path: Path) -> None:
    path = save_tiny_qwen2(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    ones, contexts = {"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 1}
    check_widths(path, ones, 16, "nixl", ones, contexts)
    stages = {"prefill": 2, "decode": 2}
    check_widths(path, ones, 16, "nixl", stages, contexts)
    with pytest.raises(ConfigurationError, match=r"pp=2 with cp=9 are 18 ranks, .* give cp=8 or less"):
        check_widths(path, ones, 16, "auto", stages, {"prefill": 9, "decode": 1})
    with pytest.raises(ConfigurationError, match=r"tp=8 with cp=3 are 24 ranks"):
        check_widths(path, {"prefill": 8, "decode": 1}, 16, "auto", ones, {"prefill": 3, "decode": 1})


def test_ranks_that_share_their_state_hand_over_by_any_transport(tmp_path: Path) -> None:
    check_widths(save_tiny_deepseek_v3(tmp_path), {"prefill": 2, "decode": 1}, 16, "nixl")


def test_widths_that_group_layers_in_different_ways_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_qwen2(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    monkeypatch.setattr(RankedLayout, "is_shared", property(lambda self: self.num_ranks < 4))
    check_widths(path, {"prefill": 4, "decode": 4}, 16)
    with pytest.raises(ConfigurationError, match=r"--prefill-tp=1 and --decode-tp=4 group .* or --prefill 0"):
        check_widths(path, {"prefill": 1, "decode": 4}, 16)


def test_checks_of_default_settings_do_without_pytorch(tmp_path: Path) -> None:
    """`tandem up` kept it for as long as the cluster ran: 160 MB."""
    path = write_byte_tokenizer(save_tiny_qwen2(tmp_path))
    code = (
        "import sys; from pathlib import Path; import tandem.cli.up; from tandem.cli.checks import *; "
        "path = Path(sys.argv[1]); tokenizer = check_model(path); check_widths(path, {'prefill': 2, 'decode': 1}, 16); "
        "check_parsers(path, tokenizer, 'auto', 'auto'); check_backend(path, 'auto', 16, on_cpus=True); "
        "check_gateway(None, None); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == 0
