"""What torch's C++ writes on stderr: the level from which it does."""

from __future__ import annotations

import ctypes
from pathlib import Path

LIBRARY = "lib/libc10.so"
LOG_LEVEL = "FLAGS_caffe2_log_level"
"""The level in c10/util/Logging.cpp. It is set from TORCH_CPP_LOG_LEVEL when torch is imported, and nowhere later."""

FATAL = 3


def silence_native_log() -> None:
    """Have C++ write nothing but what ends this process. Raises OSError or ValueError for a torch without the flag."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / LIBRARY))
    ctypes.c_int.in_dll(library, LOG_LEVEL).value = FATAL
