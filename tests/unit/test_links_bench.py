"""The benchmark of links: its figures by hand, and that jobs which talk lie closer than by best fit or chance."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.placement import Draft
from tests.benchmarks import links
from tests.benchmarks.links import World


def test_a_step_takes_longer_over_more_nodes():
    times = links.step_times()
    assert [times[together] for together in ("2", "3", "4")] == [1, 1, 1]
    assert all(times[apart] > 1.1 for apart in ("11", "12", "13", "22", "1111"))
    assert times["11"] == pytest.approx((1.96 + 1.02 + 1.09 + 1.10 + 1.83 + 2.01) / 6, abs=0.01)


def test_racks_have_four_to_eight_nodes_and_a_quarter_has_no_nvlink():
    nodes = list(links.inventories())
    racks = [node.labels["rack"] for node in nodes]
    sizes = {racks.count(rack) for rack in racks[: -links.RACKS[-1]]}
    assert sizes == {4, 5, 6, 7, 8}
    assert sum(not any(link.nvlinks for link in node.links) for node in nodes) == len(nodes) // 4


def test_a_group_is_whole_until_one_of_its_gpus_is_in_use():
    world = World("bestfit", Random(1))
    assert links.groups_whole(world) == 100
    arrival = next(a for a in links.arrivals("philly", 200, 1) if a.gpus == 4)
    draft, spots = world.place(arrival) or pytest.fail("no room")
    assert links.on_nodes(spots) == [4]
    assert links.is_in_one_group(draft, spots)
    assert links.groups_whole(world) == pytest.approx(100 * 95 / 96)
    world.make_room(1000, 0)
    assert links.groups_whole(world) == 100, "it has ended"


def test_two_gpus_of_two_sockets_are_in_no_group():
    world = World("serai", Random(1))
    draft = Draft(world.cluster.snapshot(0), index=world.index)
    task = next(a for a in links.arrivals("philly", 9, 1) if a.gpus == 1).shape.tasks[0]
    search = draft.search(task, ())
    assert "n000" in search.fitting()
    spot = search.best(links.gangs.NO_LIMIT)
    assert spot is not None
    assert not links.is_in_one_group(draft, [spot]), "one GPU goes where there is no NVLink"


def test_jobs_that_talk_lie_closer_than_by_best_fit_or_chance():
    rows = {policy: links.measured("philly", 50, policy, 0, 200) for policy in links.POLICIES}
    for row in rows.values():
        assert 35 < float(row["given"] or 0) <= 50
        assert int(row["several_gpus"] or 0) >= 5
    costs = {policy: float(row["cost_of_pair"] or 0) for policy, row in rows.items()}
    assert costs["serai"] < costs["bestfit"] / 5
    assert costs["serai"] < costs["random"] / 5
