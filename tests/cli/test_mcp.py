"""The tools for agents, called by the SDK's own client."""

from __future__ import annotations

import ast
import asyncio

import pytest

from paraplan.cli.main import command_of
from paraplan.cli.mcp import TOOLS, next_call, schema, server, words_of
from paraplan.errors import UsageError


def test_an_agent_gets_the_answers_of_the_command_line_and_a_refusal_names_a_call_that_works() -> None:
    sdk = pytest.importorskip("mcp", reason="the extra mcp is not installed")

    async def ask() -> None:
        async with sdk.Client(server()) as client:
            tools = (await client.list_tools()).tools
            assert tuple(one.name for one in tools) == TOOLS
            assert all(one.annotations.read_only_hint and one.description for one in tools)
            answer = await client.call_tool("recommend", {"model": "gpt2", "profile": "2xa100", "global_batch": 16})
            assert not answer.is_error
            assert answer.content[0].text.startswith("Model     gpt2, 124 M parameters\n")
            small = {"model": "llama-3-8b", "profile": "1xrtx-3060", "seq_len": "2k", "global_batch": 8}
            refused = await client.call_tool("recommend", small)
            assert refused.is_error
            text = refused.content[0].text
            assert text.startswith("note: ") or "no plan fits" in text
            name, _, arguments = text.rpartition("next call: ")[2].partition(" ")
            again = await client.call_tool(name, ast.literal_eval(arguments))
            assert not again.is_error, again.content[0].text
            assert "QLoRA" in again.content[0].text or "nf4" in again.content[0].text

    asyncio.run(ask())


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_has_the_options_of_its_command_but_those_that_write(name: str) -> None:
    properties = schema(name)["properties"]
    assert {"output", "html", "script", "help"}.isdisjoint(properties)
    assert all(one["description"] for one in properties.values())
    assert len(properties) <= len(command_of(name).params)


def test_arguments_become_words_and_unknown_ones_are_refused() -> None:
    given = {"model": "gpt2", "profile": "2xa100", "compile": True, "verbose": False, "seq_len": 128}
    assert words_of("recommend", given) == [
        "recommend",
        "--profile",
        "2xa100",
        "--compile",
        "--seq-len",
        "128",
        "--",
        "gpt2",
    ]
    assert words_of("import", {"source": ["ds.json"], "model": "gpt2"}) == [
        "import",
        "--model",
        "gpt2",
        "--",
        "ds.json",
    ]
    with pytest.raises(UsageError, match="recommend has no argument 'modle'"):
        words_of("recommend", {"modle": "gpt2"})


@pytest.mark.parametrize(
    ("given", "refusal", "call"),
    [
        ({"tp": 3}, "error: --tp 3: does not divide\nhint: use --tp 1, 2 or 4", "recommend {'tp': '1'}"),
        ({"model": "gtp2"}, "error: 'gtp2' is no file\nhint: did you mean gpt2?", "recommend {'model': 'gpt2'}"),
        ({}, "error: no NVIDIA driver on this machine\nhint: name one with --profile", "explain {'topic': 'machines'}"),
    ],
)
def test_the_next_call_is_what_the_hint_asks_for(given: dict[str, object], refusal: str, call: str) -> None:
    assert next_call("recommend", given, refusal) == call
