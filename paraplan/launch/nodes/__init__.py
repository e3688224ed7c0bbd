"""The nodes of a job: how they are found, wait for each other, and exchange what they know."""
