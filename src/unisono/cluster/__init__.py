"""How the processes of a run are started, find each other, are watched and are stopped."""
