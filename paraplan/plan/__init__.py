"""Plans: how a model is split over ranks, and which splits the runtime supports."""
