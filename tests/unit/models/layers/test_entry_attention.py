"""Attention to rows and entries beside transformers', however a sequence is cut, shared, released or taken back.

Memory is NaN until it is written, and again once released: so what is read is what should be.
"""

import random
from typing import Any

import pytest
import torch

from tandem.compute.native.bindings import load
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.compressed_attention import KINDS, OracleLayer, oracle_layer
from tests.helpers.mixer_steps import MixerSteps

LENGTH, HIDDEN = 70, 32
WITHIN = 2e-5


def kernels(backend: str) -> Kernels:
    return load() if backend == "native" else TorchKernels()


def steps(layer: OracleLayer, backend: str = "native", **options: Any) -> MixerSteps:
    return MixerSteps(layer.spec, layer.tensors, kernels(backend), backend=backend, **options)


def hidden(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_sequence_is_that_of_transformers(kind: str, backend: str) -> None:
    layer = oracle_layer(kind)
    torch.testing.assert_close(steps(layer, backend).whole(hidden()), layer(hidden()), atol=WITHIN, rtol=WITHIN)


@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_tokens_are_those_of_transformers(kind: str) -> None:
    layer, x = oracle_layer(kind, max_position_embeddings=4096, index_topk=32), hidden(length=2100)
    runner = steps(layer, block_size=16, max_positions=4096, num_pages=1500)
    found = runner.whole(x, (100, 700, 1500, 2001))
    torch.testing.assert_close(found, layer(x), atol=WITHIN, rtol=WITHIN)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_where_a_sequence_is_cut(kind: str) -> None:
    runner, x = steps(oracle_layer(kind)), hidden()
    whole = runner.whole(x)
    for cut in range(1, LENGTH):
        assert torch.equal(runner.whole(x, (cut,)), whole), cut
    assert torch.equal(runner.whole(x, range(1, LENGTH)), whole)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("spans", [(4, 8), (3, 10), (4, 64)])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_entries_of_any_number_of_tokens_fit_blocks_of_any_size(
    kind: str, spans: tuple[int, int], block_size: int
) -> None:
    layer = oracle_layer(kind, compress_rates=dict(zip(KINDS[1:], spans, strict=True)))
    runner, x = steps(layer, block_size=block_size), hidden(length=140)
    whole = runner.whole(x)
    torch.testing.assert_close(whole, layer(x), atol=WITHIN, rtol=WITHIN)
    assert torch.equal(runner.whole(x, (1, 9, 64, 65, 128)), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_what_shares_a_step(kind: str) -> None:
    runner, rng = steps(oracle_layer(kind)), random.Random(1)
    inputs = [hidden(seed, 60) for seed in range(4)]
    alone = [runner.whole(x) for x in inputs]
    requests, found = [runner.begin() for _ in inputs], [list[torch.Tensor]() for _ in inputs]
    while any(request.length < 60 for request in requests):
        work = [
            (index, x[request.length : request.length + rng.choice((1, 1, 5, 17))])
            for index, (request, x) in enumerate(zip(requests, inputs, strict=True))
            if request.length < 60 and rng.random() < 0.7
        ]
        if work:
            results = runner.step(*((requests[index], x) for index, x in work))
            for (index, _), result in zip(work, results, strict=True):
                found[index].append(result)
    for parts, whole in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_on_behind_any_block_of_another(kind: str) -> None:
    runner, x = steps(oracle_layer(kind)), hidden()
    first = runner.begin(keeps=True)
    (whole,) = runner.step((first, x))
    for length in range(8, LENGTH, 8):
        other = runner.go_on(first, length)
        (found,) = runner.step((other, x[length:]))
        assert torch.equal(found, whole[length:]), length
        runner.end(other)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_drafts_leave_no_trace(kind: str) -> None:
    """At every position five tokens are computed that are taken back, all or but some."""
    runner, x, drafts = steps(oracle_layer(kind)), hidden(), hidden(9)
    whole = runner.whole(x)
    for num_accepted in (0, 2):
        request, found = runner.begin(), list[torch.Tensor]()
        while request.length < LENGTH:
            start = request.length
            end = min(start + 1 + num_accepted, LENGTH)
            found.append(runner.verify(request, torch.cat((x[start:end], drafts[end : end + 5])), end - start))
        runner.end(request)
        assert torch.equal(torch.cat(found), whole)
