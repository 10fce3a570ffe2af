"""One training loop for every experiment, and the run folder it writes."""
