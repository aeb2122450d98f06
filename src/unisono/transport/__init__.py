"""Move bytes between the workers of one group: one file a way of doing it, all behind `base.Transport`."""
