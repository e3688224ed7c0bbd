"""torch's elastic agent with our ranks in it: one attempt of the ranks, the agent of one node, the job under it."""
