"""Settings of torch's allocator that tools make, by name (`profiles/allocators.json`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from paraplan.hardware.profile_json import read_object, validated
from paraplan.plan.stack import StackSettings
from paraplan.records import Record
from paraplan.resources import profiles_folder

ExpandableSegments = Literal["no", "several_processes", "yes"]
"""Whether torch's allocator grows its segments (`expandable_segments:True`), or does so where there are several
processes."""

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of torch's allocator: the first is read by all releases, the second since 2.9 and before the first."""


def segment_variables(stack: StackSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable under which torch's allocator grows its segments where `stack` says so; else nothing.

    Other settings that `environment` has for the allocator stay, and so does what it says of segments.
    """
    set_there = [name for name in reversed(_VARIABLES) if environment.get(name)]
    told = ",".join(environment[name] for name in set_there)
    if not stack.expandable_segments or "expandable_segments" in told:
        return {}
    name = set_there[0] if set_there else _VARIABLES[0]
    return {name: ",".join(filter(None, [environment.get(name), "expandable_segments:True"]))}


class ToolAllocator(Record):
    """Settings of one tool where nobody else has made any."""

    name: str
    """A word of texts that name the tool."""
    expandable_segments: ExpandableSegments
    """Whether segments grow."""
    source: str
    """Where the value comes from."""


class _ToolAllocators(Record):
    tools: tuple[ToolAllocator, ...]


def tool_allocator(text: str) -> ExpandableSegments | None:
    """Return whether a tool that `text` names has torch's allocator grow its segments, None where it sets nothing."""
    words = text.lower()
    found = (tool for tool in _tools() if re.search(rf"(?<![a-z0-9_]){tool.name}(?![a-z0-9_])", words))
    return next((tool.expandable_segments for tool in found), None)


def grows_segments(how: ExpandableSegments, num_processes: int) -> bool:
    """Return whether segments grow in so many processes."""
    return how == "yes" or (how == "several_processes" and num_processes > 1)


@cache
def _tools() -> tuple[ToolAllocator, ...]:
    path = profiles_folder() / "allocators.json"
    return validated(_ToolAllocators, read_object(path), where=str(path)).tools
