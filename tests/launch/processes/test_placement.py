"""Where the processes of a run go: hand-counted cases, and relations that hold for every placement."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.launch import LaunchConfig, NodesConfig
from configs.schema.layout import LayoutConfig
from configs.schema.rollout import RolloutConfig
from launch.processes.placement import (
    check_placement,
    first_server_node,
    learner_ranks_per_node,
    num_nodes,
    serve_roles,
    servers,
    servers_on,
)


def config(
    *,
    replicas=1,
    tp=1,
    tp_of_learner=1,
    nodes: NodesConfig | None = None,
    placement="separate",
    **layout: int,
):
    return SimpleNamespace(
        rollout=RolloutConfig(replicas=replicas, tp=tp),
        layout=LayoutConfig(**{"dp": 1, "tp": tp_of_learner} | layout),
        launch=LaunchConfig(nodes=nodes, placement=placement),
    )


def test_one_machine_gives_the_servers_the_gpus_after_the_learners():
    found = config(replicas=2, tp=2, dp=4)
    assert [(s.replica, s.node, s.first_gpu, s.num_ranks) for s in servers(found)] == [
        (0, 0, 4, 2),
        (1, 0, 6, 2),
    ]
    assert serve_roles(found) == ["serve"]
    assert learner_ranks_per_node(found) == 4


def test_colocated_servers_start_at_the_first_gpu():
    assert [s.first_gpu for s in servers(config(replicas=2, tp=4, dp=8, placement="colocated"))] == [0, 4]


@pytest.mark.parametrize(("placement", "first", "total"), [("separate", 2, 4), ("colocated", 0, 2)])
def test_colocated_servers_have_the_learners_nodes(placement, first, total):
    found = config(replicas=4, tp=4, nodes=NodesConfig(learner=2, rollout=2), dp=16, placement=placement)
    assert (first_server_node(found), num_nodes(found)) == (first, total)
    assert [(s.node, s.first_gpu) for s in servers(found)] == [(0, 0), (0, 4), (1, 0), (1, 4)]
    assert (learner_ranks_per_node(found), check_placement(found)) == (8, [])


def test_replicas_fill_their_nodes_in_order():
    found = config(replicas=4, tp=4, nodes=NodesConfig(learner=2, rollout=2), dp=16)
    assert [(s.replica, s.node, s.first_gpu) for s in servers(found)] == [
        (0, 0, 0),
        (1, 0, 4),
        (2, 1, 0),
        (3, 1, 4),
    ]
    assert [s.replica for s in servers_on(found, 1)] == [2, 3]
    assert serve_roles(found) == ["serve-0", "serve-1"]
    assert learner_ranks_per_node(found) == 8
    assert check_placement(found) == []


def test_a_replica_larger_than_a_node_takes_several():
    found = config(replicas=2, tp=16, nodes=NodesConfig(rollout=4), dp=8)
    places = [(s.replica, s.node, s.node_rank, s.num_ranks) for s in servers(found)]
    assert places == [(0, 0, 0, 8), (0, 1, 1, 8), (1, 2, 0, 8), (1, 3, 1, 8)]
    assert check_placement(found) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            config(replicas=3, tp=4, nodes=NodesConfig(rollout=2), dp=8),
            "rollout.replicas: 3 cannot be spread evenly",
        ),
        (
            config(replicas=1, tp=16, nodes=NodesConfig(), dp=8),
            "put 16 server ranks on a node of launch.nodes.gpus_per_node=8",
        ),
        (
            config(replicas=1, tp=4, nodes=NodesConfig(rollout=2), dp=8),
            "fits on one node of launch.nodes.gpus_per_node=8",
        ),
        (
            config(replicas=1, tp=1, nodes=NodesConfig(rollout=2), dp=8),
            "use rollout.replicas=16, or fewer nodes",
        ),
        (
            config(replicas=2, tp=8, nodes=NodesConfig(rollout=3), dp=8),
            "fits on one node of launch.nodes.gpus_per_node=8, but launch.nodes.rollout=3",
        ),
        (config(tp=8, nodes=NodesConfig(learner=1), dp=16), "use launch.nodes.learner=2, or"),
        (
            config(tp=8, nodes=NodesConfig(learner=1), dp=16, placement="colocated"),
            "use launch.nodes.learner=2 and launch.nodes.rollout=2, or",
        ),
        (
            config(tp=8, nodes=NodesConfig(learner=3), dp=16),
            "the learner's processes (layout): 16 cannot be spread evenly",
        ),
        (
            config(nodes=NodesConfig(learner=3), tp_of_learner=3, dp=4),
            "layout.tp=3 does not divide the 4 learner processes of a node",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_a_fix(wrong, says):
    assert any(says in problem for problem in check_placement(wrong))


def test_both_sides_are_reported_at_once():
    assert len(check_placement(config(replicas=3, tp=4, nodes=NodesConfig(rollout=2, learner=3), dp=16))) == 2


@given(replicas=st.integers(1, 8), tp=st.integers(1, 32), nodes=st.integers(1, 8))
def test_every_rank_of_every_replica_is_placed_once(replicas, tp, nodes):
    found = config(replicas=replicas, tp=tp, nodes=NodesConfig(rollout=nodes, gpus_per_node=0))
    try:
        shares = servers(found)
    except ValueError:
        assert replicas % nodes and (nodes % replicas or tp % (nodes // replicas))
        return
    assert {s.node for s in shares} == set(range(nodes))
    assert sum(s.num_ranks for s in shares) == replicas * tp
    taken = [(s.node, gpu) for s in shares for gpu in range(s.first_gpu, s.first_gpu + s.num_ranks)]
    assert len(taken) == len(set(taken))
