"""Jobs on the schedulers of clusters: packed, submitted, followed and ended by their own clients."""
