"""The collections of an API as one request sees them: by the key that it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar

from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.serving import schema
from infembed_ray.serving.http.errors import ApiError
from infembed_ray.serving.service import Service

ALLOWED: ContextVar[frozenset[str] | None] = ContextVar("ALLOWED", default=None)
"""Collections that the key of the current request may use; None: all. The middleware sets it for every request."""


class Collections:
    """Name -> the service of a collection, for the request that runs now.

    Args:
        all: returns the services of a new request, the default collection first. They are of one release.
    """

    def __init__(self, all: Callable[[], Mapping[str, Service]]) -> None:
        self.all = all

    def __getitem__(self, name: str) -> Service:
        """Return the service of a collection; ApiError if there is none, or the key may not use it."""
        allowed = ALLOWED.get()
        if allowed is not None and name not in allowed:  # the same answer whether there is such a collection or not
            message = f"this API key may not use the collection {name!r}; it may use {', '.join(sorted(allowed))}"
            raise ApiError(403, f"{message} (/v1/collections/NAME)", param="collection", code="collection_not_allowed")
        visible = self.visible()
        if name not in visible:
            message = f"there is no collection {name!r}; there are {', '.join(visible)}"
            raise ApiError(404, message, param="collection", code="collection_not_found")
        return visible[name]

    def visible(self) -> dict[str, Service]:
        """Return the collections that the key may use."""
        allowed = ALLOWED.get()
        return {name: service for name, service in self.all().items() if allowed is None or name in allowed}

    def models(self) -> list[schema.Model]:
        """Return the card of each model: that of its first collection which the key may use."""
        cards = [service.card for service in self.visible().values()]
        return list({card.id: card for card in reversed(cards)}.values())[::-1]

    def encoding(self, model: str | None) -> Service:
        """Return the service that embeds texts: of the default collection, unless another model is named.

        Every key may use every encoder: vectors of the client's own texts tell nothing about a collection.
        """
        services = self.all()
        return next((one for one in services.values() if one.card.id == model), services[DEFAULT_COLLECTION])
