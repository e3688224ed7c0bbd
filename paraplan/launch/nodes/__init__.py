"""The nodes of a job: how they are found, meet, and tell each other what they are."""
