"""Arguments on their way to torch's agent: what it does not read itself, and what it would look up in vain."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from paraplan.launch.elastic.launch import make_config, streams_by_rank, with_rendezvous
from paraplan.launch.nodes.endpoint import (
    address_towards,
    addresses_of,
    interface_towards,
    interface_variables,
    is_loopback,
)
from paraplan.launch.parser import parse_arguments
from paraplan.launch.request import LaunchRequest
from paraplan.launch.spec import ONE_NODE, NodeRange


@pytest.mark.parametrize("value", ["0", "3", "0:3,1:2"])
def test_what_torch_reads_of_streams_is_left_to_it(value: str) -> None:
    assert streams_by_rank(value) is None


def test_local_ranks_of_two_digits_reach_torchs_logs(tmp_path: Path) -> None:
    words = ["-r", "10:3,1:1", "-t", "11:2", "train.py"]
    request = LaunchRequest(parse_arguments(words, {}), nodes=ONE_NODE, nproc_per_node="12")
    config, _, _ = make_config(request, log_dir=str(tmp_path))
    assert config.nproc_per_node == 12
    assert vars(config.logs_specs)["_redirects"] == {10: Std.ALL, 1: Std.OUT}
    assert vars(config.logs_specs)["_tee"] == {11: Std.ERR}


def test_one_node_without_an_endpoint_has_a_rendezvous_of_its_own_on_a_free_port() -> None:
    spec = parse_arguments(["train.py"], {})
    assert with_rendezvous(spec, ONE_NODE).rdzv_endpoint == "127.0.0.1:0"
    assert with_rendezvous(spec, NodeRange(2, 2)).rdzv_backend == "static"


def test_loopback_is_no_way_to_other_nodes() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") is None
    assert interface_variables("127.0.0.1", {}, has_gpus=True) == {}
    assert [is_loopback(text) for text in ("127.0.1.1", "::1", "10.0.0.1", "gpu-a")] == [True, True, False, False]
    assert addresses_of("no-such-host.invalid") == []


def test_a_way_to_an_address_of_ipv6_is_known() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            assert address_towards("::1") == "::1"
    except OSError:
        pytest.skip("this host has no IPv6")


def test_the_interface_to_the_first_node_is_given_where_nobody_has_chosen_one(tmp_path: Path) -> None:
    own = next((host for host in ("192.0.2.1", "198.51.100.1") if interface_towards(host)), None)
    if own is None:
        pytest.skip("this machine has no way to other networks")
    name = interface_towards(own)
    none = (tmp_path / "none",)
    assert interface_variables(own, {}, has_gpus=False, nccl_files=none) == {"GLOO_SOCKET_IFNAME": name}
    both = interface_variables(own, {}, has_gpus=True, nccl_files=none)
    assert both == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    chosen = {"GLOO_SOCKET_IFNAME": "x", "NCCL_SOCKET_IFNAME": "y"}
    assert interface_variables(own, chosen, has_gpus=True, nccl_files=none) == {}
    (tmp_path / "nccl.conf").write_text("NCCL_SOCKET_IFNAME=z\n")
    assert "NCCL_SOCKET_IFNAME" not in interface_variables(own, {}, has_gpus=True, nccl_files=(tmp_path / "nccl.conf",))
