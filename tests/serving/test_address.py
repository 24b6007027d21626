"""The address of the API on this machine."""

import socket

import pytest

from infembed_ray.errors import InputError
from infembed_ray.serving.address import require_free_port


def test_a_free_port_is_accepted_even_just_after_use() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # leaves the port in TIME_WAIT
        with pytest.raises(InputError):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)
