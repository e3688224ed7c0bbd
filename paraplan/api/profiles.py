"""The machines, GPUs and networks that come with paraplan, and what their records are made of."""

from __future__ import annotations

from paraplan.hardware.catalogue.profile_files import list_gpus as list_gpus
from paraplan.hardware.catalogue.profile_files import list_machines as list_machines
from paraplan.hardware.catalogue.profile_files import list_networks as list_networks
from paraplan.hardware.catalogue.profile_files import load_gpu as load_gpu
from paraplan.hardware.catalogue.profile_files import load_machine as load_machine
from paraplan.hardware.catalogue.profile_files import load_network as load_network
from paraplan.hardware.catalogue.profile_files import profile_names as profile_names
from paraplan.hardware.catalogue.real_machines import machine_content as machine_content
from paraplan.hardware.interconnect import gpu_nics as gpu_nics
from paraplan.hardware.prices import MachinePrice as MachinePrice
from paraplan.hardware.prices import PriceFile as PriceFile
from paraplan.hardware.prices import known_price as known_price
from paraplan.hardware.prices import load_prices as load_prices
from paraplan.hardware.prices import machines_for_rent as machines_for_rent
from paraplan.hardware.profiles import GpuProfile as GpuProfile
from paraplan.hardware.profiles import MachineProfile as MachineProfile
from paraplan.hardware.profiles import NetworkProfile as NetworkProfile
from paraplan.hardware.survey import survey_node as survey_node
from paraplan.hardware.topology import LinkType as LinkType
from paraplan.hardware.topology import connected_groups as connected_groups
