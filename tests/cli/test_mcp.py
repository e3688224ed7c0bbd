"""The tools for agents, called by the SDK's own client."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from paraplan.cli.main import command_of
from paraplan.cli.mcp import TOOLS, answered, next_call, schema, server, words_of
from paraplan.cli.mcp_files import AgentFiles
from paraplan.errors import UsageError


@pytest.fixture
def files(tmp_path: Path) -> AgentFiles:
    return AgentFiles(tmp_path)


def test_an_agent_gets_the_answers_of_the_command_line_and_a_refusal_names_a_call_that_works(
    tmp_path: Path,
) -> None:
    sdk = pytest.importorskip("mcp", reason="the extra mcp is not installed")

    async def ask() -> None:
        async with sdk.Client(server(AgentFiles(tmp_path))) as client:
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
    assert {"html", "script", "help", "keep"}.isdisjoint(properties)
    assert all(one["description"] for one in properties.values())
    group, _, inner = name.partition("_")
    command = command_of(group).commands[inner] if inner else command_of(group)
    assert len(properties.keys() - {"files"}) <= len(command.params)


def test_what_a_run_measured_is_kept_by_no_tool() -> None:
    assert "measured" not in schema("estimate")["properties"]
    assert "measured" in schema("compare")["properties"]  # a trace that is read


def test_arguments_become_words_and_unknown_ones_are_refused(files: AgentFiles) -> None:
    given = {"model": "gpt2", "profile": "2xa100", "compile": True, "verbose": False, "seq_len": 128}
    assert words_of("recommend", given, files) == [
        "recommend",
        "--profile",
        "2xa100",
        "--compile",
        "--seq-len",
        "128",
        "--",
        "gpt2",
    ]
    assert words_of("profiles_list", {"search": "a100"}, files) == ["profiles", "list", "--", "a100"]
    assert words_of("import", {"source": ["ds.json"], "model": "gpt2"}, files) == [
        "import",
        "--model",
        "gpt2",
        "--",
        "ds.json",
    ]
    with pytest.raises(UsageError, match="recommend has no argument 'modle'"):
        words_of("recommend", {"modle": "gpt2"}, files)


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


def ask(agent: AgentFiles, name: str, **arguments: object) -> list[str]:
    texts, is_error = asyncio.run(answered(name, arguments, agent))
    assert not is_error, texts
    return texts


def test_an_agent_without_files_of_its_own_goes_from_a_config_to_a_plan_and_to_another_config(
    files: AgentFiles,
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    beside = {"model": "gpt2", "profile": "8xa100"}
    (priced,) = ask(files, "import", source=["ds.json"], files={"ds.json": config}, **beside)
    assert "As DeepSpeed runs it" in priced
    words = {"framework": "deepspeed", "global_batch": 16, "output": "plan.json"}
    text, plan = ask(files, "recommend", **words, **beside)
    assert "Written to plan.json" in text
    assert plan.startswith('plan.json:\n{\n  "schema_version": 1')
    assert "zero_optimization" in ask(files, "export", plan="plan.json", to="deepspeed")[0]
    assert "pass  fits" in ask(files, "verify", plan="plan.json")[0]
    assert str(files.folder) not in "".join((priced, text, plan))


def test_a_model_and_a_machine_are_given_as_text_too(files: AgentFiles) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = sizes | {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 256}
    given = {"small/config.json": model, "topo.txt": "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"}
    assert "topo.txt, 2 GPUs" in ask(files, "topo", files=given, **{"from": "topo.txt"})[0]
    assert ask(files, "estimate", model="small/config.json", profile="1xa100")[0].startswith("Model     small, ")


@pytest.mark.parametrize("name", ["../ds.json", "/etc/ds.json", "a/../../ds.json", ".ds.json", "-o.json", "run.py", ""])
def test_a_file_is_a_plain_name_in_the_agents_folder_and_no_program(name: str, files: AgentFiles) -> None:
    with pytest.raises(UsageError, match="is no name of a file that an agent gives"):
        files.keep({name: "{}"})
    texts, is_error = asyncio.run(answered("recommend", {"model": "gpt2", "output": name}, files))
    assert is_error
    assert "is no name of a file" in texts[0]
    assert not list(files.folder.iterdir())


def test_files_of_other_kinds_and_sizes_are_refused_in_a_sentence(files: AgentFiles) -> None:
    with pytest.raises(UsageError, match="files is not an object"):
        files.keep(["ds.json"])
    with pytest.raises(UsageError, match="has 1,000,001 characters, over 1,000,000"):
        files.keep({"ds.json": "a" * 1_000_001})
