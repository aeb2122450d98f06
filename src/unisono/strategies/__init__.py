"""How tightly workers are coupled. A strategy is a frozen dataclass that says what it gives up."""

from unisono.strategies.synchronous import Synchronous

__all__ = ["Synchronous"]
