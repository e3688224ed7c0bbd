"""Names of torch that the launcher uses and torch does not promise to keep, and why there is no public way.

`elastic` has torch's agent, `parser` torchrun's options, `texts` what errors say. All was
seen in torch 2.11 and 2.13, unless an entry says otherwise; `tests/test_torch_contract.py` asks each new torch for it.

One use is elsewhere: `ranks/bootstrap.py` runs as a script that imports nothing of this package, in ranks whose script
may use another. It reads torch's flight recorder and its names of groups, as `RECORDER_DUMPS` and `GROUPS` in `texts`
name them.
"""
