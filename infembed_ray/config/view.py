"""Settings of `infembed view`."""

from __future__ import annotations

from infembed_ray.config.base import Settings, runtime_field


class ViewSettings(Settings):
    """`infembed view`: browse the records or the results of an output in a browser."""

    port: int = runtime_field(0, ge=0, le=65535, description="port on 127.0.0.1; 0: a free one")
