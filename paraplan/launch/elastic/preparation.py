"""Preparation of each start of the ranks: the nodes compare what they run, and get a plan if one is asked for."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from dataclasses import dataclass, field
from pathlib import Path

import torch

import paraplan
from paraplan.launch.accelerate import accelerate_variables
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.endpoint import address_towards, interface_towards, interface_variables
from paraplan.launch.nodes.store import NodeFacts, NodeStore, differences
from paraplan.launch.planning import PlannerRequest, make_plan
from paraplan.launch.request import PLAN_VARIABLE

# from how much on a difference of two nodes' clocks is said: times in their logs are then hard to compare
_LARGE_SKEW_S = 1.0


@dataclass(frozen=True)
class Round:
    """The nodes of one rendezvous, which start ranks together, and this node's place among them."""

    store: NodeStore | None
    """The store in which the nodes tell each other; None where there is one node."""
    world_size: int
    ranks_per_node: int
    master_addr: str


@dataclass
class RoundPreparation:
    """Prepare each start of the ranks: differences of the nodes are said, and a plan is made if asked for.

    `drives_accelerate` puts the plan into the variables of accelerate too.
    The plan is written into `job`, its folder and, for the ranks, into `environment`.
    """

    job: JobRecord
    planner: PlannerRequest | None
    environment: dict[str, str]
    drives_accelerate: bool = False
    num_rounds: int = 0
    _text: str = ""
    _accelerate: dict[str, str] = field(default_factory=dict)

    def __call__(self, this_round: Round) -> None:
        """Prepare one start. Raises `PlanError` or `RemoteError` where no plan can be made for these nodes."""
        self.job.store = store = this_round.store
        if store is not None:
            facts = store.exchange_facts(_node_facts(self.job.script, first_node=this_round.master_addr))
            skew_s = -(store.clock_offset_s or 0.0)
            if abs(skew_s) > _LARGE_SKEW_S and self.num_rounds == 0:
                words = "ahead of" if skew_s > 0 else "behind"
                say(f"the clock of this node is {abs(skew_s):.1f} s {words} that of host {facts[0].host}")
            for sentence in differences(facts) if store.node == 0 else []:
                say(f"the nodes differ: {sentence}")
            # the first node may know itself by a loopback address, but not the others
            hosts = [this_round.master_addr, *(fact.address for fact in facts if fact.address)]
            host = next((host for host in hosts if interface_towards(host) is not None), this_round.master_addr)
            chosen = interface_variables(host, os.environ, has_gpus=torch.cuda.is_available())
            is_new = not chosen.items() <= self.environment.items()
            self.environment.update(chosen)
            if is_new:
                say(f"{' '.join(f'{name}={value}' for name, value in chosen.items())}: to reach {host}")
        self.num_rounds += 1
        if self.planner is not None:
            self._plan(this_round, self.planner)
        if self.job.plan is not None and self.drives_accelerate:
            for name in self._accelerate:
                self.environment.pop(name, None)
            self._accelerate = accelerate_variables(self.job.plan, os.environ)
            self.environment.update(self._accelerate)

    def _plan(self, this_round: Round, planner: PlannerRequest) -> None:
        from paraplan.plan.allocators import segment_variables  # pydantic: a tenth of a second without a plan
        from paraplan.plan.files import PlanFile

        before, store = self.job.plan, this_round.store
        fits = before is not None and before.plan.world_size == this_round.world_size

        def make() -> str:
            if fits and before is not None:  # a new node may still wait for it
                return self._text or before.to_json()
            num_nodes = 1 if store is None else store.num_nodes
            ranks = this_round.ranks_per_node
            return make_plan(planner, num_nodes=num_nodes, ranks_per_node=ranks, environment=dict(os.environ))

        text = make() if store is None else store.share_text("plan", make)
        self._text = text
        if fits:
            return
        assert self.job.folder is not None
        path = self.job.folder.path / ("plan.json" if before is None else f"plan-{self.num_rounds}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.job.plan = PlanFile.from_json(text, source=str(path))
        self.environment[PLAN_VARIABLE] = str(path)
        if self.job.plan.training is not None:
            self.environment.update(segment_variables(self.job.plan.training.stack, os.environ))
        if store is None or store.node == 0:
            num_ranks = this_round.world_size
            again = "" if before is None else f", made anew for {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
            say(f"plan: {self.job.plan.plan.describe()}{again}")


def _node_facts(script: str, *, first_node: str) -> NodeFacts:
    """Return the facts of this node; the digest of anything but a file is its name."""
    path = Path(script)
    return NodeFacts(
        host=socket.gethostname(),
        torch=str(torch.__version__),
        paraplan=paraplan.__version__,
        python=platform.python_version(),
        script=hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else script,
        address=address_towards(first_node) or "",
    )
