"""Render a page from its Jinja template, which extends `base.html` (reports) or `shell.html` (pages with a server)."""

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from infembed_ray.reporting import charts


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of a package; equal values give equal HTML.

    Args:
        package: dotted name of the package that holds the template.
        template: path of the template in the package. It extends one of these and may import `macros.html`.
        values: variables of the template. `charts`, the module, is always there.
    """
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("infembed_ray.reporting", ".")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.globals["charts"] = charts
    return environment.get_template(template).render(values)
