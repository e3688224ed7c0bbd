from __future__ import annotations

import io

from paraplan.launch.status import StatusTitle


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_status_as_its_title_once_a_second_and_its_own_title_back() -> None:
    now, terminal = [0.0], Terminal()
    title = StatusTitle(terminal, clock=lambda: now[0])
    for now[0] in (0.5, 1.1, 1.2, 3725.0):
        title.show("8 ranks")
    title.close()
    title.close()
    assert terminal.getvalue() == (
        "\033[22;0t\033]0;paraplan: 8 ranks, 0:01\007\033]0;paraplan: 8 ranks, 1:02:05\007\033[23;0t"
    )


def test_a_pipe_gets_nothing() -> None:
    now, pipe = [0.0], io.StringIO()
    title = StatusTitle(pipe, clock=lambda: now[0])
    now[0] = 10.0
    title.show("8 ranks")
    title.close()
    assert pipe.getvalue() == ""
