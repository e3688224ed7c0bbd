"""A script that cannot be checked is told in a sentence, with what can be given."""

from __future__ import annotations

import pytest

from paraplan.script_check.failures import run_error

FIRST = "paraplan: rank 0 failed first: "
SAID = {
    FIRST + "AssertionError: Torch not compiled with CUDA enabled": ("CUDA", "no GPU"),
    FIRST + "OSError: We couldn't connect to 'https://huggingface.co'": ("huggingface", "it downloads"),
    FIRST + "EOFError: EOF when reading a line": ("EOF", "terminal"),
    FIRST + "RuntimeError: Mesh should not be bigger than default world size 2, but found 8 ranks!": ("8", "--ranks"),
    "t.py: error: no size\n" + FIRST + "the script ended itself with exit code 2": ("no size", "come after --"),
    "not done after 600 s": ("after 600 s", "--timeout"),
    "paraplan: the job hangs: no rank has moved for 41 s; ending it\n  rank 1 in sleep": ("rank 1 in", "waits"),
    "paraplan: the job hangs: ranks\n  ranks 0-1 in wait (file_baton.py:63)": ("a build of an extension", "named lock"),
    "": ("status 1", "paraplan launch"),
}


@pytest.mark.parametrize("said", SAID)
def test_what_was_missing_is_told_with_what_to_give(said: str) -> None:
    error, (what, hint) = run_error("t.py", "on 2 CPU ranks", 1, said), SAID[said]
    assert what in error.message
    assert "\n" not in error.message
    assert hint in str(error.hint)
