"""Settings of `infembed manifests`."""

from __future__ import annotations

from pydantic import Field

from infembed_ray.config.base import Settings


class NodeGroup(Settings):
    """A group of equal Ray nodes. Each node is a pod."""

    resources: dict[str, str | int] = Field(
        description="Kubernetes resources of a pod, requested and limited: cpu, memory, nvidia.com/gpu, vpc.amazonaws.com/efa"
    )
    node_selector: dict[str, str] = Field({}, description="labels of the Kubernetes nodes that may run the pods")

    @property
    def gpus(self) -> int:
        """GPUs of a pod."""
        return sum(int(amount) for name, amount in self.resources.items() if name.endswith("/gpu"))


class StagePods(Settings):
    """What one stage runs on."""

    config: str = Field(description="settings file of the verb")
    nodes: dict[str, int] = Field(description="node group -> number of pods; of `serve`: the smallest number")
    max_nodes: dict[str, int] = Field({}, description="node group -> largest number of pods, of `serve` only")
    secrets: tuple[str, ...] = Field(
        (), description="Kubernetes Secrets whose entries become environment variables of the stage's pods"
    )


class ManifestsSettings(Settings):
    """`infembed manifests`: the settings files of the verbs -> RayJobs, a RayService and what protects them."""

    output: str = Field(
        "kubernetes",
        description="directory of the manifests; files of an earlier run are replaced, all but those of `base`",
    )
    stages: dict[str, StagePods | None] = Field(description="verb -> what it runs on; null: no manifest")
    groups: dict[str, NodeGroup] = Field(description="name -> node group of worker pods")
    head: NodeGroup = Field(
        NodeGroup(resources={"cpu": 4, "memory": "16Gi"}),
        description="pod of the head, which runs the drivers of jobs and no tasks",
    )
    image: str = Field(description="container image of CPU pods and of the head; name it by digest")
    gpu_image: str | None = Field(None, description="container image of the pods of groups with GPUs")
    namespace: str = Field("infembed", description="Kubernetes namespace")
    claim: str | None = Field(
        None,
        description="PersistentVolumeClaim (ReadWriteMany) at /mnt/infembed; null: inputs and outputs are in a store",
    )
    redis: str = Field("infembed-redis:6379", description="address of the Redis that keeps the state of the API's GCS")
    queue: str | None = Field(None, description="Kueue's LocalQueue for the RayJobs; null: no queue")
