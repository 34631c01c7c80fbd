"""A cluster whose worker has ranks on two hosts: it computes its prompts itself, and both end together."""

import random
import signal
from pathlib import Path

import psutil

from tandem.core.sampling_params import SamplingParams
from tandem.process.ports import free_ports
from tests.helpers.checkpoints import save_tiny_qwen2
from tests.helpers.cluster import running_cluster
from tests.helpers.engines import serve_alone
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.rank_hosts import rank_host
from tests.helpers.serving_clients import Ask, complete
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FLAGS = (
    *("--kv-cache-gib", "0.01", "--max-model-len", "256", "--max-num-batched-tokens", "64"),
    *("--max-num-running", "32", "--num-threads", "1"),
)
PROMPT = tuple(7 + (11 * i) % 150 for i in range(100))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)


def test_a_worker_of_two_hosts_serves_and_drains_with_either(tmp_path: Path) -> None:
    """A host that is told to stop has its worker drain, and leaves when that has."""
    load_or_skip()
    sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
    model = write_byte_tokenizer(save_tiny_qwen2(tmp_path / "model", dtype="bfloat16", num_key_value_heads=2, **sizes))
    expected = serve_alone(
        model, {"r": list(PROMPT)}, {"r": GREEDY}, dtype="auto", native_kernels=True, attention_backend="auto"
    )["r"]
    (port,) = free_ports(1, "127.0.0.1", random.Random())
    extra = {"worker": FLAGS, "decode": ("--tp", "2", "--hosts", "2", "--ranks-bind", f"127.0.0.1:{port}")}
    with rank_host(port) as host, running_cluster(model, prefill=0, decode=1, block_size=16, extra=extra) as cluster:
        for _ in range(2):
            assert list(complete(cluster, Ask(PROMPT, GREEDY))[1][0].token_ids) == expected
        worker = psutil.Process(cluster.processes["decode-0"].pid)
        host.send_signal(signal.SIGTERM)
        assert host.wait(60) == 0
        cluster.wait(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
