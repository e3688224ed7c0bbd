"""What torch's C++ writes on stderr: the level from which it does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LIBRARY = "lib/libc10.so"
LOG_LEVEL = "FLAGS_caffe2_log_level"
"""The level in c10/util/Logging.cpp. It is set from TORCH_CPP_LOG_LEVEL when torch is imported, and nowhere later."""

FATAL = 3
_VARIABLES = ("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES")


def silence_torch_log(environment: Mapping[str, str] = os.environ) -> None:
    """Have C++ write nothing but what ends this process; processes that were forked before write on.

    A store that is gone makes torch's agent write its C++ frames for every message; the launcher says it in a sentence.
    A user who asks torch for more in the environment gets it. A torch without this flag writes as ever.
    """
    import torch

    if not any(name in environment for name in _VARIABLES):
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / LIBRARY))
            ctypes.c_int.in_dll(library, LOG_LEVEL).value = FATAL
