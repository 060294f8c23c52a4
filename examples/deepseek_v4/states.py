"""States of training on disk, by orbax: written while training goes on, by every process its own devices' parts."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class States:
    """The last states that a directory keeps, each after a step.

    Args:
      directory: of the states; None keeps none.
      every: steps from state to state.
      batches: says what the batches follow from (`Batches.described`).
    """

    def __init__(self, directory: str | None, every: int, batches: dict[str, Any]) -> None:
        self.directory, self.batches, self.manager = directory, batches, None
        if directory is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every)
            self.manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    def last(self) -> int | None:
        """The step of the last state, if there is one."""
        return None if self.manager is None else self.manager.latest_step()

    def restore(self, step: int, like: Any) -> Any:
        """The state after a step, over the devices that `like` says.

        Raises:
          ValueError: the state comes of other batches, so those that follow would not be those that it was to see; or
            its arrays are not those of `like`.
        """
        got = self.manager.restore(step, args=ocp.args.Composite(batches=ocp.args.JsonRestore())).batches
        if got != self.batches:
            raise ValueError(f"{self.directory}: got a state of training by {got}, wanted one by {self.batches}")
        try:
            return self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))).state
        except ValueError as e:  # whose text has a paragraph for each array
            text = " ".join(str(e).split())[:200]
            wanted = "those of this model, --lora and --only"
            raise ValueError(f"{self.directory}: got a state of other arrays, wanted {wanted}: {text} …") from e

    def wants(self, step: int, is_last: bool) -> bool:
        """True if the state after this step is to be kept: the very last one is."""
        return self.manager is not None and (is_last or self.manager.should_save(step))

    def save(self, step: int, state: Any) -> None:
        """Copies a state to the host, so that it may be donated, and lets it be written."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), batches=ocp.args.JsonSave(self.batches))
        self.manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Waits until all is written."""
        if self.manager is not None:
            self.manager.wait_until_finished()
            self.manager.close()
