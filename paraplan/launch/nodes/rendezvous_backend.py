"""Where torch's dynamic rendezvous keeps its state: signed JSON in a store whose waits a signal ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

from paraplan.launch.faults.report import say
from paraplan.launch.nodes.endpoint import WAIT_S, run_interruptibly
from paraplan.launch.nodes.job_token import ForgedTextError, Seal
from paraplan.launch.nodes.rendezvous import require_same_nnodes
from paraplan.launch.nodes.sealed_values import SealedValues
from paraplan.launch.nodes.store import NodeEndedError
from paraplan.launch.spec import NodeRange
from paraplan.launch.torch_private.elastic import StoreBackend
from paraplan.launch.torch_private.rendezvous_state import StateTranslator

_SILENCE_S = 60.0


class ForgedStateError(ForgedTextError, RendezvousStateError):
    """A state that was not written with the job's token; torch's thread of heartbeats leaves it to the main one."""


class SealedBackend(StoreBackend):
    """torch's c10d backend that writes and reads no pickle, and whose calls do not wait in silence.

    torch's agent makes these calls all the time; where the network is gone they stay in C until it is back.
    """

    _is_cut_off = False

    def __init__(
        self,
        *torchs: Any,
        seal: Seal,
        nodes: NodeRange,
        endpoint: str,
        waits_for_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take torch's arguments, and what signs the state. Raises `NoRendezvousError` for contradictory `nodes`.

        A call raises RendezvousConnectionError where the store says nothing for a minute. It raises NodeEndedError
        where this node waits for one whose ranks have ended well (`waits_for_ended`).
        """
        self._waits_for_ended = waits_for_ended
        super().__init__(*torchs)
        require_same_nnodes(SealedValues(torchs[0], seal), nodes, endpoint=endpoint)
        self._seal = seal
        self._translator = StateTranslator(nodes.max)

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state as torch's holder takes it, and what is compared when it is set."""
        return self._read(self.call_store("get", self.key))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Set the state where it is still the one of `token`; return what is then stored, and whether it is `state`."""
        if token and not isinstance(token, bytes):  # none that this backend has given
            found = self.get_state()
            return None if found is None else (*found, False)
        text = self._seal.close(self.key, self._translator.to_values(state))
        expected = token.decode() if token else self.no_state
        stored: bytes = self.call_store("compare_set", self.key, expected, text)
        found = self._read(stored)
        return None if found is None else (*found, stored == text.encode())

    def _read(self, stored: bytes) -> tuple[bytes, bytes] | None:
        if stored == self.no_state.encode():
            return None
        try:
            return self._translator.to_state(self._seal.open(self.key, stored)), stored
        except ForgedTextError as error:
            raise ForgedStateError(error.message, hint=error.hint) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ForgedStateError(
                f"the state of the rendezvous is of another version: {type(error).__name__}: {error}",
                hint="install the same version of paraplan on every node",
            ) from error

    def call_store(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Return what the store answers; say so where that takes long."""
        try:
            answer = run_interruptibly(
                lambda: super(SealedBackend, self).call_store(operation, *arguments, **options),
                timeout_s=_SILENCE_S,
                on_wait=self._say_cut_off,
            )
        except TimeoutError as error:
            raise RendezvousConnectionError(f"the store says nothing: {error}") from error
        if self._is_cut_off:
            self._is_cut_off = False
            say("the node that hosts the rendezvous answers again")
        if self._waits_for_ended():
            raise NodeEndedError
        return answer

    def _say_cut_off(self) -> None:
        if not self._is_cut_off:
            self._is_cut_off = True
            say(f"the node that hosts the rendezvous has not answered for {WAIT_S:.0f} s; waiting for it")
