"""Shows how training goes: a bar on a terminal, a line now and then where there is none."""

import time
from datetime import timedelta

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Progress through `num_steps` steps, shown inside a ``with`` block.

    Args:
        num_steps: steps in all.
        unit: what `advance` counts besides steps, such as "tokens".
        show: whether to print anything, so that only one worker does.
    """

    def __init__(self, num_steps: int, *, unit: str, show: bool = True) -> None:
        self.num_steps = num_steps
        self.unit = unit
        self.show = show
        self.num_done = 0
        self.num_units = 0
        self.started_s = self.printed_s = time.monotonic()
        # Drawn after each step; a thread of its own would be forked along with loader processes.
        self.bar = Bar(BarColumn(), TextColumn("{task.description}"), auto_refresh=False)
        self.task = self.bar.add_task("", total=num_steps)
        self.has_bar = show and self.bar.console.is_terminal

    def __enter__(self) -> "Progress":
        if self.has_bar:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.has_bar:
            self.bar.stop()

    def advance(self, loss: float, num_units: int) -> None:
        """Count one step, which went through `num_units` units and had this loss."""
        self.num_done += 1
        self.num_units += num_units
        now_s = time.monotonic()
        if self.has_bar:
            line = self.describe(loss, now_s)
            self.bar.update(self.task, completed=self.num_done, description=line, refresh=True)
        elif self.show and (
            self.num_done == self.num_steps or now_s - self.printed_s >= SECONDS_BETWEEN_LINES
        ):
            self.printed_s = now_s
            print(self.describe(loss, now_s), flush=True)

    def describe(self, loss: float, now_s: float) -> str:
        """Return what a person wants to know after a step."""
        elapsed_s = now_s - self.started_s
        left_s = elapsed_s / self.num_done * (self.num_steps - self.num_done)
        rate = f"{self.num_units / elapsed_s:,.0f} {self.unit}/s"
        return (
            f"step {self.num_done}/{self.num_steps}  loss {loss:.3f}  {rate}  "
            f"{timedelta(seconds=round(left_s))} left"
        )
