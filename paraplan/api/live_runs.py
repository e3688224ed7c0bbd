"""Runs of `paraplan launch` while they run: who runs, the logs of all ranks, where they wait, and profiles."""

from __future__ import annotations

from paraplan.launch.spec import RUNS_FOLDER as RUNS_FOLDER
from paraplan.live.logs import LogFollower as LogFollower
from paraplan.live.logs import LogLine as LogLine
from paraplan.live.profiles import Profiles as Profiles
from paraplan.live.profiles import profile_run as profile_run
from paraplan.live.runs import Run as Run
from paraplan.live.runs import RunEndedError as RunEndedError
from paraplan.live.runs import RunError as RunError
from paraplan.live.runs import ended_runs as ended_runs
from paraplan.live.runs import find_run as find_run
from paraplan.live.runs import live_runs as live_runs
from paraplan.live.runs import whole_run as whole_run
from paraplan.live.waiting import WaitingRanks as WaitingRanks
from paraplan.live.waiting import ask_where_ranks_wait as ask_where_ranks_wait
