"""Settings of torch's allocator by a configuration and its tool."""

from __future__ import annotations

import re

from paraplan.interop.setup import Setup
from paraplan.plan.allocators import grows_segments, tool_allocator

_SEGMENTS = re.compile(
    r"PYTORCH(?:_CUDA)?_ALLOC_CONF\b\W{1,4}(?:\w+:[\w.]+,)*expandable_segments:(true|false)", re.IGNORECASE
)


def with_allocator(setup: Setup, text: str) -> Setup:
    """Return a setup with the segments of torch's allocator as `text` has them in its environment, else as its tool.

    The tool's own framework has its default in its profile.
    """
    told = _SEGMENTS.findall(text)
    tool = tool_allocator(setup.tool)
    if told:
        grows = told[-1].lower() == "true"
    elif tool is not None:
        grows = grows_segments(tool, setup.plan.world_size)
    else:
        return setup
    return setup.replace(stack=setup.stack.replace(expandable_segments=grows or None))
