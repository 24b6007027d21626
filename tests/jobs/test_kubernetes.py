"""The manifests of jobs/kubernetes are valid for this version of Serve and of the package."""

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from infembed_ray.serving.arguments import ApiArguments, EncoderArguments, IndexArguments
from infembed_ray.serving.routing.blue_green import ReleaseSpec

MANIFESTS = Path(__file__).parents[2] / "jobs" / "kubernetes"


def test_the_service_configuration_is_valid_for_serve_and_the_applications() -> None:
    service = yaml.safe_load((MANIFESTS / "serve.yaml").read_text(encoding="utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    encoder, index, api = config.applications
    fingerprint = EncoderArguments.model_validate(encoder.args).fingerprint
    version = IndexArguments.model_validate(index.args).version
    ApiArguments.model_validate(api.args)
    (ingress,) = api.deployments
    blueprint = ReleaseSpec.model_validate(ingress.user_config)
    assert (blueprint.encoder, blueprint.index) == (encoder.name, index.name)
    assert (blueprint.card.encoder, blueprint.card.index_version) == (fingerprint, version)
