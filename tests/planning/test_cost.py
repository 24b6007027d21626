"""Seconds of a step against traffic counted by hand, where there is nothing to compute."""

from dataclasses import replace

import pytest
import torch

from infembed_ray.config.planning import Hardware
from infembed_ray.planning.capacity import GIB, Weights
from infembed_ray.planning.cost import Cluster, Demand, collective_seconds, node_count, nodes, step_seconds
from infembed_ray.planning.workload import Workload

CLUSTER = Cluster.from_settings(Hardware(), torch.bfloat16)
PARAMETERS = 10**9
IN_BF16 = Weights(PARAMETERS, PARAMETERS, 10**8, 0.0, 2)
WORK = Workload(
    queries=4, own=4, passages=4, slots=1, tokens=1, graph_slots=1, passes=8, batches=2, flops=0, steps=1, records=4,
    whole_epoch=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "grad_cache", "bytes_a_parameter"),
    [
        (0, False, 4 + 4),
        (1, False, 4 + 2),  # sums in fp32 once, updated parameters in bf16 once
        (2, False, 2 * 2 + 2),  # gradients of each batch
        (2, True, 2 * 8 + 2),  # of each pass
        (3, False, 2 * (8 + 8) + 2 * 2),
        (3, True, 2 * (8 + 6 + 8) + 2 * 8),  # the last pass of a batch is not repeated
    ],
)
def test_traffic_of_a_step(stage, grad_cache, bytes_a_parameter):
    weights = IN_BF16 if stage else replace(IN_BF16, nbytes=4)
    config = {"zero_optimization": {"stage": stage}}
    found = step_seconds(WORK, weights, CLUSTER, config, grad_cache, checkpointing=False)
    assert found == pytest.approx(collective_seconds(bytes_a_parameter * PARAMETERS, CLUSTER))


def test_nodes_hold_whole_replicas_and_all_memory_and_vcpus():
    (node,) = nodes("i4i.4xlarge")  # 16 vCPUs, 115 GiB usable, 3,490 GiB of disk
    assert node_count([Demand(5, 40 * GIB, 1)], node) == 3
    assert node_count([Demand(20, GIB, 4)], node) == 5
    assert node_count([Demand(1, GIB, 1)], node, least=2) == 2
    assert node_count([Demand(4, GIB, 1, disk=2000 * GIB)], node) == 4
    assert node_count([Demand(1, 120 * GIB)], node) is None
    assert node_count([Demand(1, GIB, 17)], node) is None
