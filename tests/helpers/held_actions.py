"""Actions that have ranks wait for files, by which a test puts what they do in order."""

from dataclasses import dataclass
from pathlib import Path
from time import sleep

from scalec.testing.faults import Action, Scene


@dataclass(frozen=True)
class Leave:
    """An empty file."""

    path: Path

    def strike(self, scene: Scene) -> None:
        """Leaves it."""
        self.path.touch()


@dataclass(frozen=True)
class Await:
    """Waits until a file or folder is there."""

    path: Path
    then: Action | None = None

    def strike(self, scene: Scene) -> None:
        """Waits, and acts."""
        while not self.path.exists():
            sleep(0.001)
        if self.then:
            self.then.strike(scene)
