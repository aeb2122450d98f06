"""Sums and copies over all workers: schedules as data, what verifies them and what executes them."""
