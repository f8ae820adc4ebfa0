"""What a step asks of the way in which a model is spread over the ranks: replicated (DDP) or sharded (FSDP)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges, processing_order
from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.tensors.state_tree import Layout

if TYPE_CHECKING:
    from elastic_ddp.distributed.prepared_model import PreparedModel


def unused(names: Sequence[str], advice: str) -> ConfigError:
    """What a loss is refused with that does not depend on parameters which are trained."""
    return ConfigError(
        f"the loss does not depend on {len(names)} parameters: {shorten(names, 5)}; {advice}, or freeze them with "
        "requires_grad_(False)"
    )


class Strategy(ABC):
    """Gradients of a generation: which micro-batches are this rank's, and how their sum reaches every rank.

    A step goes `begin_step`, then for each micro-batch `prepare_forward` and `backward`, and then holds the mean
    gradient in the parameters, or in this rank's shards of them. Every rank builds it, with a model that
    `check_same_model` has seen, and calls `spread` once all of them hold the same.
    """

    replicates_state = True
    """Whether every rank holds the whole state, so that it outlives the generation."""

    def __init__(self, model: PreparedModel, config: RunConfig, group: ProcessGroup) -> None:
        self.ranges = micro_batch_ranges(config.num_micro_batches, group.world_size)
        self.micro_batches = processing_order(self.ranges[group.rank])
        """This rank's micro-batches, in the order in which it computes them."""
        self.micro_batch_size = config.micro_batch_size
        self._group = group
        self._model = model
        self._trained = self._find_trained()

    @abstractmethod
    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Brings the model and its optimizers, whole until now, into the form in which they train."""

    def layout(self, optimizers: Sequence[torch.optim.Optimizer]) -> Layout | None:
        """How tensors of the state are spread after that; None if every rank has the whole of each."""
        return None

    def _find_trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for name, each in self._model.module.named_parameters() if each.requires_grad}

    def begin_step(self, rows: np.ndarray) -> None:
        """A new step; `rows` holds the row count of each of its M micro-batches.

        Raises:
            ConfigError: other parameters are to be trained than when the generation began, which no rank reduces.
        """
        trained = self._find_trained()
        if changed := sorted(
            name for name in trained.keys() | self._trained.keys() if trained.get(name) is not self._trained.get(name)
        ):
            raise ConfigError(
                f"parameters {shorten(changed, 5)} were added, replaced, frozen or unfrozen inside run.steps(), and "
                "a run trains the same ones from its first step to its last; to freeze some for a while, give them a "
                "param_group of their own with lr=0 (a scheduler can raise it)"
            )
        self._rows = rows
        self.num_leaves = int(np.count_nonzero(rows))
        self.divisor = int(rows.sum()) / self.micro_batch_size
        """The step's rows in units of full micro-batches: M, but for the short last step of an epoch."""
        with_rows = [m for m in self.micro_batches if rows[m]]
        self.to_compute = with_rows or self.micro_batches[-1:]
        """This rank's micro-batches with rows, in order. A rank without any computes one on padding and adds nothing:
        its part in the collectives has to be played."""

    def weight(self, micro_batch: int) -> float:
        """A micro-batch's part in a step's sum: its rows in units of full micro-batches."""
        return int(self._rows[micro_batch]) / self.micro_batch_size

    def min_forwards(self, rows: np.ndarray) -> int:
        """Through how many forwards every rank has to go where micro-batches have so many rows, because others need it
        for theirs. What goes beyond a rank's own counts for nothing."""
        return 0

    @abstractmethod
    def prepare_forward(self, micro_batch: int) -> None:
        """Called before the forward of each micro-batch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        """The backward of a micro-batch's mean loss. After the last one, parameters hold the step's mean gradient.

        Raises:
            ConfigError: gradients would be missing.
        """

    def dummy_backward(self, loss: torch.Tensor) -> None:
        """The backward after a forward that counts for nothing, before those that do."""
        raise NotImplementedError(f"{type(self).__name__} asks for no forward beyond a rank's own")

    @abstractmethod
    def reshard(self) -> None:
        """Lets go of what a forward without a backward has gathered. Before parameters are looked at outside of it."""

    def clip_grad_norm(self, most: float) -> torch.Tensor:
        """Clips the gradients to a total 2-norm. Returns what it was, the same on every rank; all of them call it."""
        return torch.nn.utils.clip_grad_norm_(self._model.module.parameters(), most)

    @abstractmethod
    def close(self) -> None:
        """Lets go of the process group."""
