"""Settings of `infembed manifests`."""

import re

from pydantic import Field, field_validator

from infembed_ray.config.base import Settings

_PODS = re.compile(r"(\d+)(?:-(\d+))?")


class NodeGroup(Settings):
    """A group of equal Ray nodes. Each node is a pod."""

    resources: dict[str, str | int] = Field(description="Kubernetes resources of a pod: cpu, memory, nvidia.com/gpu")

    @property
    def gpus(self) -> int:
        """GPUs of a pod."""
        return sum(int(amount) for name, amount in self.resources.items() if name.endswith("/gpu"))


class ManifestsSettings(Settings):
    """`infembed manifests`: jobs/configs/VERB.yaml -> RayJobs, a RayService and what protects them."""

    output: str = Field("kubernetes", description="directory of the manifests; a rerun replaces all but `base`")
    stages: dict[str, dict[str, int | str] | None] = Field(
        description="verb -> node group -> pods, a number or for `serve` a range such as 2-8; null: no manifest"
    )
    groups: dict[str, NodeGroup] = Field(description="name -> node group of workers, or of the head (`head`)")
    images: dict[str, str] = Field(description="node group, or `default` -> container image, best by digest")
    claim: str | None = Field(None, description="PersistentVolumeClaim (ReadWriteMany) at /mnt/infembed")

    @field_validator("stages")
    @classmethod
    def _require_numbers(cls, stages: dict[str, dict[str, int | str] | None]) -> dict[str, dict[str, int | str] | None]:
        for verb, nodes in stages.items():
            for group, pods in (nodes or {}).items():
                if not _PODS.fullmatch(str(pods)):
                    raise ValueError(f"{verb}.{group}={pods}: give a number of pods, or a range such as 2-8")
        return stages

    def pods(self, verb: str) -> dict[str, tuple[int, int]]:
        """Return node group -> smallest and largest number of pods of a stage."""
        numbers: dict[str, tuple[int, int]] = {}
        for group, pods in (self.stages[verb] or {}).items():
            match = _PODS.fullmatch(str(pods))
            assert match is not None  # it is validated
            numbers[group] = (int(match[1]), int(match[2] or match[1]))
        return numbers
