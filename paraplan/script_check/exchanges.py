"""Exchanges of a script outside of its models: what they give is made of what all ranks gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paraplan.script_check.sources import Sources, is_data, place_of_caller
from paraplan.script_check.torch_private import around_exchanges

_GIVEN = {
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "gather": ("tensor", "gather_list"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": ("input", "output"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
}
"""Names of the arguments of exchanges: what a rank gives, and what it gets."""


def follow_exchanges(sources: Sources) -> None:
    """Follow rows through exchanges, as where a group gathers those of its ranks: one process has them all.

    What one rank alone has and broadcasts is read where it is broadcast, by all of its group.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__
        parameters = inspect.signature(plain)

        def exchange(*args: Any, **kwargs: Any) -> Any:
            is_of_script = sources.is_of_script
            result = plain(*args, **kwargs)
            if not is_of_script:
                return result
            given = parameters.bind(*args, **kwargs).arguments
            if name != "broadcast":
                before, after = _GIVEN[name]
                if sources.link(given.get(before), given.get(after)):
                    sources.gathers_rows = True
            elif result is None and sources.is_watching and is_data(given["tensor"]):  # not still under way, no weight
                sources.read_in_place(f"{place_of_caller()} broadcast", given["tensor"])
            return result

        return exchange

    around_exchanges([*_GIVEN, "broadcast"], make)
