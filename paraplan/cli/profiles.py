"""`paraplan profiles`: the GPUs, machines and networks that come with paraplan, and what is known of each."""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from typing import Annotated, Any

import typer

from paraplan.api.models import bundled_models, load_model
from paraplan.api.profiles import (
    GpuProfile,
    MachineProfile,
    NetworkProfile,
    list_gpus,
    list_machines,
    list_networks,
    load_gpu,
    load_machine,
    load_network,
    machine_content,
    profile_names,
)
from paraplan.errors import ProfileError, near_names

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Kind(StrEnum):
    """Kind of thing that a profile describes."""

    machine = "machine"
    gpu = "gpu"
    network = "network"
    model = "model"


AnyProfile = MachineProfile | GpuProfile | NetworkProfile
KindOption = Annotated[Kind | None, typer.Option("--kind", help="Only profiles of this kind.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.callback()
def profiles() -> None:
    """List and show the machines, GPUs and networks that --profile takes in place of real ones."""


@app.command("list")
def list_profiles(
    search: Annotated[str, typer.Argument(metavar="[TEXT]", help="Only names and titles with this text.")] = "",
    kind: KindOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the machines, GPUs, networks and models, all of them or those whose name, alias or title holds TEXT."""
    machines = _matching(list_machines(), search) if kind in (None, Kind.machine) else []
    gpus = _matching(list_gpus(), search) if kind in (None, Kind.gpu) else []
    networks = _matching(list_networks(), search) if kind in (None, Kind.network) else []
    models = _models(search) if kind in (None, Kind.model) else []
    if not (machines or gpus or networks or models):
        raise ProfileError(f"no profile matches {search!r}", hint="paraplan profiles list shows them all")
    if as_json:
        rows: dict[str, Any] = {
            "machines": [_summary(machine) for machine in machines],
            "gpus": [gpu.model_dump(mode="json") for gpu in gpus],
            "networks": [network.model_dump(mode="json") for network in networks],
            "models": models,
            "source_kinds": _source_kinds(machines, gpus, networks),
        }
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from paraplan.cli.profile_tables import print_gpus, print_machines, print_models, print_networks

    if machines:
        print_machines(machines)
    if gpus:
        print_gpus(gpus)
    if networks:
        print_networks(networks)
    if models:
        print_models(models)
    if not (machines or gpus or networks):
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in _source_kinds(machines, gpus, networks).items())
    typer.echo(f"\nWeakest part of each profile's source: {kinds} (memory: remembered, not looked up)")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A machine, a GPU or a network.")],
    kind: KindOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one profile with its sources. Its --json is a file that --profile reads, to start one's own from."""
    found = _load(name, kind)
    if as_json:
        content = machine_content(found) if isinstance(found, MachineProfile) else found.model_dump(mode="json")
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    from paraplan.cli.profile_tables import print_gpu, print_machine, print_network

    if isinstance(found, MachineProfile):
        print_machine(found)
    elif isinstance(found, GpuProfile):
        print_gpu(found)
    else:
        print_network(found)


def _load(name: str, kind: Kind | None) -> AnyProfile:
    """Return the profile of that name: a machine before a GPU before a network; of a path, what the file describes."""
    wanted = name.strip().lower()
    if kind is None and (name.endswith(".json") or "/" in name):
        kind = Kind.machine
    names = {each: profile_names(f"{each}s") for each in Kind if each is not Kind.model}
    if kind is Kind.model or (kind is None and wanted in bundled_models()):
        raise ProfileError(f"{name} is a model, not a profile", hint=f"paraplan estimate {name} shows what it takes")
    if kind is None:
        kind = next((each for each in names if wanted in names[each]), None)
    if kind is None:
        hint = near_names(wanted, {known for each in names for known in names[each]})
        if hint.startswith("known"):
            hint = "paraplan profiles list shows them all"
        raise ProfileError(f"no profile is called {name!r}", hint=hint)
    if kind is Kind.gpu:
        return load_gpu(name)
    return load_machine(name) if kind is Kind.machine else load_network(name)


def _models(search: str) -> list[dict[str, Any]]:
    names = [name for name in bundled_models() if search.lower() in name]
    found = [load_model(name) for name in names]
    return [
        {
            "name": one.name,
            "model_type": one.model_type,
            "num_parameters": one.parameters.total,
            "num_blocks": one.num_blocks,
            "hidden_size": one.hidden_size,
            "max_seq_length": one.max_seq_length,
        }
        for one in found
    ]


def _matching(found: list[Any], search: str) -> list[Any]:
    text = search.lower()
    return [
        profile
        for profile in found
        if text in profile.name
        or text in profile.title.lower()
        or any(text in alias for alias in getattr(profile, "aliases", ()))
    ]


def _source_kinds(*found: list[Any]) -> dict[str, int]:
    kinds = Counter(profile.source_kind or "not stated" for profiles in found for profile in profiles)
    return dict(kinds.most_common())


def _summary(machine: MachineProfile) -> dict[str, Any]:
    return {
        "name": machine.name,
        "title": machine.title,
        "aliases": list(machine.aliases),
        "gpu": machine.gpu.name,
        "num_gpus": len(machine.node.gpus),
        "nvlink_islands": machine.node.nvlink_islands,
        "nvlink_all_to_all": machine.node.nvlink_all_to_all,
        "network": machine.network.name if machine.network is not None else None,
        "host_memory_bytes": machine.host_memory_bytes,
        "source": machine.source,
        "source_kind": machine.source_kind,
    }
