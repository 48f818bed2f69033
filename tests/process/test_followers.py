"""A node that follows: no API to ask, no sidecar, supervised all the same."""

from __future__ import annotations

import signal

TWO = ("--set", "models.target_model.tensor_parallel_size=2", "--set", "engine.node_count=2")
SECOND = (*TWO, "--set", "engine.node_rank=1", "--set", "engine.leader_address=big-0.big")


def test_a_follower_needs_no_api(launch) -> None:
    """While its process lives it works for the leader, although nobody answers on its port; SIGTERM ends it with 0."""
    follower = launch(*SECOND, "--stub-hang", "--set", "sidecar.enabled=true")
    follower.says("node 1 of 2 works for big-0.big, which has the API")
    assert "sidecar" not in follower.output
    follower.signal(signal.SIGTERM)
    assert follower.ends() == 0


def test_a_follower_that_ends_is_lost(launch) -> None:
    """Its end is an engine lost: exit code 5, so that the group is started anew."""
    follower = launch(*SECOND, "--stub-crash-after", 0.5)
    assert follower.ends() == 5


def test_nodes_that_cannot_work_are_refused(launch) -> None:
    """All that is wrong with the nodes, at once, with exit code 2."""
    said = launch("--set", "engine.node_count=3", "--set", "engine.node_rank=3")
    assert said.ends() == 2
    for sentence in (
        "'node_rank' is 3; must be less than node_count (3)",
        "3 nodes cannot share 1 GPUs",
        "'leader_address' is missing; several nodes must know where node 0 is",
    ):
        assert sentence in said.output
