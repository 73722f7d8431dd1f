"""Ray, on which corpora are embedded and tasks are trained on several machines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Connect to a cluster: the one in `RAY_ADDRESS`, the one that this machine belongs to, or a new one on it."""
    import ray

    connected = ray.is_initialized()
    if not connected:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        if not connected:
            ray.shutdown()
