"""Law of plain modules: on every rank of every topology, each tensor and state is the slice that hands would cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim

from tests.unit.live.cluster import STATES, Place, Saved, local, module
from tests.unit.live.threads import ThreadRanks, run
from ucp.core.topology import Topology
from ucp.live.load import load_into

SAVED = Saved(Path(tempfile.mkdtemp()))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Of at most 16 ranks, for 4 layers and 4 experts."""
    tp, dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 2]))
    if tp * dp * pp * cp > 16:
        pp, cp = 1, 1
    vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    etp = draw(st.sampled_from([None, *(own for own in (1, 2, 4) if tp * dp * cp % own == 0)]))
    stage = tp * dp * cp // (tp if etp is None else etp)
    ep = draw(st.sampled_from([own for own in (1, 2, 4) if stage % own == 0]))
    return Topology(tp=tp, dp=dp, pp=pp, cp=cp, vpp=vpp, ep=ep, etp=etp)


@settings(max_examples=6, deadline=None)
@given(topology=topologies(), numbers=st.sampled_from(["local", "global"]))
def test_every_rank_gets_its_slices(topology: Topology, numbers: str) -> None:
    def load(ranks: ThreadRanks) -> None:
        wanted = local(SAVED, Place(topology, ranks.rank), numbers=numbers)
        chunks = [module({name: own["weight"].shape for name, (_, own) in chunk.items()}) for chunk in wanted]
        optimizer = optim.AdamW([param for chunk in chunks for param in chunk.parameters()])
        model = chunks if len(chunks) > 1 else chunks[0]
        load_into(model, topology, SAVED.path, optimizer=optimizer, process_group=ranks)
        for chunk, own in zip(chunks, wanted, strict=True):
            for name, (_, states) in own.items():
                param = chunk.get_parameter(name)
                held = {**optimizer.state[param], "weight": param.detach()}
                for state in STATES:
                    assert torch.equal(held[state], torch.from_numpy(states[state].copy())), (ranks.rank, name, state)
                assert held["step"] == 9
        assert optimizer.param_groups[0]["lr"] == 0.5

    assert run(topology.ranks, load) == [None] * topology.ranks
