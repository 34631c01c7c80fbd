"""An engine around a random model, put together as `assemble` does it, but for the checkpoint and the tokenizer.

Also puts requests into it whose KV "came from elsewhere": a decode worker's way in, which costs no prefill here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.gpu.models import RandomModel
from bench.gpu.setting import Setting
from tandem.architecture.model import EMBEDDING, HEAD
from tandem.architecture.state import KVSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionBackend
from tandem.compute.backends import choose_backends
from tandem.compute.choose import choose_kernels
from tandem.compute.layer_states import TORCH_DTYPES
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch, HiddenStates, LayerTurns, WantedTokens
from tandem.compute.weights.dense import DenseFormat
from tandem.core.config import EngineConfig, SchedulerConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor import FinishedStep
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.graphs import DecodeGraphs, padded_sizes
from tandem.engine.identity import ModelIdentity
from tandem.engine.resolve import EngineSizes, default_kv_cache_bytes, resolve_sizes
from tandem.engine.runner import ModelRunner
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import build_layout
from tandem.models.decoder import Decoder
from tandem.models.load_plan import LoadingPlan
from tandem.models.parameters import Parameters
from tandem.scheduler.output import KVEvent, KVReserved, SampledToken, SchedulerOutput
from tandem.scheduler.request import Handoff
from tandem.scheduler.scheduler import Scheduler

GRAPH_RESERVE_BYTES = 8 << 30  # left free for CUDA graphs and activations
DRY_KV_BYTES = 16 << 20
FILL_BYTES = 1 << 30


class WatchedForwardPass(ForwardPass):
    """Counts the passes that were computed without a graph, or captured."""

    num_computed = 0

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batches: Sequence[AttentionBatch],
        wanted: WantedTokens | None = None,
        states: HiddenStates | None = None,
        received: torch.Tensor | None = None,
        turns: LayerTurns | None = None,
    ) -> torch.Tensor:
        self.num_computed += 1
        return super().compute(input_ids, positions, batches, wanted, states, received, turns)

    @property
    def replays_graphs(self) -> bool:
        """False also where they are only rehearsed."""
        return self.graphs is not None and self.device.type == "cuda"


class WatchedRunner(ModelRunner):
    """Counts how steps were computed."""

    num_decode_steps = num_eager_decode_steps = num_mixed_steps = 0

    def __init__(self, forward: WatchedForwardPass) -> None:
        super().__init__(forward)
        self.forward = forward

    def submit(self, step: SchedulerOutput) -> FinishedStep:
        before = self.forward.num_computed
        handle = super().submit(step)
        if any(item.num_tokens > 1 for item in step.scheduled):
            self.num_mixed_steps += 1
        else:
            self.num_decode_steps += 1
            self.num_eager_decode_steps += self.forward.num_computed > before and self.forward.replays_graphs
        return handle


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters that an engine is built for. `kv_bytes`: None = what the device has to spare."""

    max_model_len: int
    max_num_running: int
    max_num_batched_tokens: int
    kv_bytes: int | None = None
    uses_graphs: bool = True


@dataclass(frozen=True, slots=True)
class Stack:
    """An engine and what of it is looked at."""

    model: RandomModel
    device: torch.device
    decoder: Decoder
    arena: Arena
    backend: AttentionBackend
    runner: WatchedRunner
    engine: Engine

    @property
    def system(self) -> str:
        return f"tandem, {self.backend.name}"


def build(setting: Setting, model: RandomModel, limits: Limits) -> Stack:
    """On the device of the model's parameters."""
    spec, device = model.spec, next(iter(model.parameters.values())).device
    wanted = EngineConfig(
        model="",
        attention_backend=setting.backend,
        kv_cache_bytes=limits.kv_bytes or _spare_bytes(device),
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_running=limits.max_num_running,
        prefix_caching=False,
    )
    layout = build_layout(spec.kv_specs, wanted.block_size)
    sizes = resolve_sizes(wanted, spec, layout, device)
    backends = choose_backends(_backend_name(setting, device), device, layout, spec.attention_softcap)
    kv = KVCacheManager(layout, sizes.num_blocks, max_chunk_tokens=sizes.max_num_batched_tokens, prefix_caching=False)
    kernels = choose_kernels(device, None if device.type == "cuda" else False)
    decoder = Decoder(spec, _parameters(model, kernels), kernels)
    arena = Arena(layout, sizes.num_blocks + 1, device)
    forward = WatchedForwardPass(
        decoder,
        spec,
        arena,
        backends,
        max_num_requests=limits.max_num_running,
        max_model_len=sizes.max_model_len,
    )
    _set_graphs(forward, limits, arena)
    runner = WatchedRunner(forward)
    engine = Engine(runner, Scheduler(_limits_of(limits, sizes), kv), kv, _identity(model))
    return Stack(model, device, decoder, arena, backends[KVSpec], runner, engine)


def _parameters(model: RandomModel, kernels: Kernels) -> Parameters:
    plan, tensors = LoadingPlan.of(model.spec, (DenseFormat(kernels),)), model.parameters
    matrices = {HEAD: tensors[EMBEDDING]} | tensors  # the head is the embedding where there is no other
    weights = {weight.name: form.load(weight, [{weight.name: matrices[weight.name]}]) for weight, form in plan.weights}
    return Parameters({tensor.name: tensors[tensor.name] for tensor in plan.tensors}, weights)


def _limits_of(limits: Limits, sizes: EngineSizes) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_running=limits.max_num_running,
        max_model_len=sizes.max_model_len,
    )


def _identity(model: RandomModel) -> ModelIdentity:
    return ModelIdentity(model.spec.fingerprint, model.spec.vocab_size, model.spec.eos_token_ids)


def _spare_bytes(device: torch.device) -> int:
    return default_kv_cache_bytes(device) - GRAPH_RESERVE_BYTES if device.type == "cuda" else DRY_KV_BYTES


def _backend_name(setting: Setting, device: torch.device) -> str:
    return "reference" if device.type == "cpu" else setting.backend


def _set_graphs(forward: WatchedForwardPass, limits: Limits, arena: Arena) -> None:
    """On the CPU, padding without capture stands in for graphs."""
    if not limits.uses_graphs:
        forward.graphs = None
    elif not arena.pages.is_cuda:
        forward.graphs = DecodeGraphs(
            forward.compute,
            padded_sizes(limits.max_num_running),
            num_groups=len(arena.layout.groups),
            block_size=arena.layout.block_size,
            max_model_len=limits.max_model_len,
            device=arena.pages.device,
            capture=False,
        )


@torch.inference_mode()
def fill_with_noise(arena: Arena, dtype: str) -> None:
    """Normal numbers everywhere, as real KV might hold; in pieces, because some kernels cannot count that far."""
    num_blocks = max(1, FILL_BYTES // arena.layout.page_bytes)
    for start in range(0, arena.num_pages, num_blocks):
        arena.pages[start : start + num_blocks].view(TORCH_DTYPES[dtype]).normal_()


def start_decodes(stack: Stack, count: int, num_tokens: int, max_new_tokens: int) -> list[str]:
    """Requests of `num_tokens` tokens whose KV is whatever the arena holds; each step decodes all. Their ids."""
    events: list[KVEvent] = []
    stack.engine.on_kv_event = events.append
    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True)
    vocab_size = stack.model.spec.vocab_size
    ids = [
        stack.engine.add_request(
            [(7 * index + 3) % vocab_size] * num_tokens, params, handoff=Handoff(num_expected_tokens=num_tokens)
        )
        for index in range(count)
    ]
    stack.engine.step()
    reserved = [item for item in events if isinstance(item, KVReserved)]
    assert len(reserved) == count, f"{len(reserved)} of {count} requests found blocks"
    for item in reserved:
        stack.engine.accept_token(item.request_id, SampledToken(5))
        stack.engine.note_kv_ended(item.request_id, num_tokens)
        stack.engine.kv.drop(item.fetch_id)
    return ids


def end(stack: Stack, ids: Sequence[str]) -> None:
    """Abort what is left of these."""
    for request_id in ids:
        stack.engine.abort(request_id)


def serve(stack: Stack, prompts: Sequence[list[int]], num_new_tokens: int, concurrency: int) -> list[list[int]]:
    """Answers of exactly `num_new_tokens` tokens, at most `concurrency` at once; in order of the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    waiting, num_running = list(reversed(prompts)), 0
    while waiting or num_running:
        while waiting and num_running < concurrency:
            answers[stack.engine.add_request(waiting.pop(), params)] = []
            num_running += 1
        for output in stack.engine.step():
            answers[output.request_id] += output.token_ids
            num_running -= output.finish_reason is not None
    assert all(len(answer) == num_new_tokens for answer in answers.values())
    return list(answers.values())
