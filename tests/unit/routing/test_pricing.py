"""Every figure in columns equals what `cost` says of the same choice, and no bound is above it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.routing.candidates import Placement
from tandem.routing.cost import predict
from tandem.routing.eligible_workers import EligibleWorkers
from tandem.routing.pricing import HandOffCosts, decode_ms, local_ms, ways_of
from tests.unit.routing.builders import candidates_of, links_between, requests, workers

ROUNDING = 1 + 1e-9


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_columns_price_like_cost(data: st.DataObject) -> None:
    states = data.draw(workers())
    shape, links = data.draw(requests(states)), data.draw(links_between(states))
    now_s = data.draw(st.sampled_from([0.0, 0.2]))
    known = candidates_of(*states, links=links, now_s=now_s)
    prefills, decodes = EligibleWorkers.of(known.prefill, links), EligibleWorkers.of(known.decode, links)
    held = decodes.cached_blocks(shape)
    costs_ms = decode_ms(shape, decodes, now_s)
    _, alone_ms = local_ms(shape, decodes, held, costs_ms, now_s)
    for row, decode in enumerate(decodes):
        expected_ms = predict(shape, Placement(None, decode), links, now_s).total_ms
        assert alone_ms[row] == pytest.approx(expected_ms, rel=1e-9)
    if not prefills or not decodes:
        return
    ways = ways_of(shape, prefills, list(known.holders.values()), links, now_s, float("inf"))
    hand_off = HandOffCosts(shape, decodes, held, costs_ms)
    bounds_ms = hand_off.least_ms(ways, prefills.columns.chunk_blocks.min())
    for p, d in itertools.product(range(len(prefills)), range(len(decodes))):
        if prefills[p].worker_id == decodes[d].worker_id:
            assert hand_off.into(d, prefills, ways, links)[0, p] == hand_off.out_of(p, prefills, ways, links)[0, d]
            continue
        for way, holder in enumerate(ways.holders):
            if np.isinf(ways.ttft_ms[way, p]):
                continue
            total_ms = predict(shape, Placement(prefills[p], decodes[d], holder), links, now_s).total_ms
            assert hand_off.into(d, prefills, ways, links)[way, p] == pytest.approx(total_ms, rel=1e-9)
            assert hand_off.out_of(p, prefills, ways, links)[way, d] == pytest.approx(total_ms, rel=1e-9)
            assert bounds_ms[d] <= total_ms * ROUNDING
