"""How long a run has fewer workers after a failure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ddp.rendezvous.members import FormedGeneration


@dataclass
class Shortfall:
    """The number of workers before the first failure since the run was at full strength, and when that failure was."""

    world_size: int = 0
    """0 at full strength."""
    since_s: float = 0.0
    """Monotonic time."""

    def failed(self, world_size: int, now_s: float) -> None:
        """A generation with this number of workers has failed."""
        if not self.world_size:
            self.world_size, self.since_s = world_size, now_s

    def formed(self, generation: FormedGeneration, limit: int, now_s: float) -> float | None:
        """A generation has formed, and at most `limit` workers are wanted. Returns the seconds since the failure if the
        run is at full strength again."""
        is_full = len(generation.members) >= min(self.world_size, limit) and not generation.handover_only
        if not self.world_size or not is_full:
            return None
        self.world_size = 0
        return now_s - self.since_s
