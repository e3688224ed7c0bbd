"""Messages of torch that a run of ours sets off by design, and that tell a user nothing."""

from __future__ import annotations

import logging
import warnings

from paraplan.runtime.torch_private import NOISY_LOGGERS, VIEW_WARNING


def silence_known_noise() -> None:
    """Silence, by exact message or logger, what torch says about uses that are right here.

    - FSDP2 warns when a wrapped module returns a view (a model that ends in a linear layer on 3-D input does); the
      gradients are right, and tests compare them with one process.
    - The redistribution of doubly sharded tensors logs on every rank that it takes two steps.
    - A pipeline schedule logs its whole table on every rank when one stage raises; the error itself says enough.
    """
    warnings.filterwarnings("ignore", message=VIEW_WARNING, category=UserWarning)
    for name, level in NOISY_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
