"""The `infembed` command."""

from infembed_ray.cli.main import _parser as _parser
