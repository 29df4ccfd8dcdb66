"""Gradient scaling for half precision, with one check over all owners: either all of them step or none does."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from gradwire.errors import ConfigurationError, OptimizerError
from gradwire.optim.distributed import Contexts, DistributedOptimizer, check_contexts
from gradwire.optim.grad_transforms import SCALE

T = TypeVar("T")
_STATE: dict[str, tuple[str, type[float] | type[int]]] = {  # by the key in torch's state dict
    "scale": ("_scale", float),
    "growth_factor": ("_growth_factor", float),
    "backoff_factor": ("_backoff_factor", float),
    "growth_interval": ("_growth_interval", int),
    "_growth_tracker": ("_num_good", int),
}
_ByOptimizer = weakref.WeakKeyDictionary[DistributedOptimizer, T]


class GradScaler:
    """Scales losses up, so that small gradients do not vanish in half precision, and unscales gradients before a step.

    Example::

        scaler = GradScaler()
        with autograd.context() as ctx:
            ctx.backward(scaler.scale(compute_loss()))
            scaler.step(optimizer, ctx)
            scaler.update()

    Args:
        init_scale: The initial scale.
        growth_factor: Factor by which the scale is multiplied after `growth_interval` steps with finite gradients.
        backoff_factor: Factor by which the scale is multiplied after a step that was skipped because a gradient was not
            finite.
        growth_interval: Number of steps with finite gradients before the scale grows.
        enabled: If False, losses and gradients are not changed.

    Raises:
        ConfigurationError: A factor is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ConfigurationError(
                f"the scale ({init_scale}) must be positive, the growth factor ({growth_factor}) greater than 1, the "
                f"backoff factor ({backoff_factor}) between 0 and 1, and the interval ({growth_interval}) at least 1"
            )
        self._scale = float(init_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._num_good = 0
        self._enabled = enabled
        # Since the last update, by optimizer: whether the gradients of contexts were finite, and which were stepped with.
        self._checked: _ByOptimizer[dict[tuple[int, ...], bool]] = weakref.WeakKeyDictionary()
        self._stepped: _ByOptimizer[set[tuple[int, ...]]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        state = f"scale {self._scale:g}" if self._enabled else "not enabled"
        return f"<GradScaler: {state}>"

    def is_enabled(self) -> bool:
        """Return whether scaling is enabled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale; 1 if scaling is not enabled."""
        return self._scale if self._enabled else 1.0

    def scale(self, outputs: Any) -> Any:
        """Return a loss, or several in a list or tuple, multiplied by the scale.

        Raises:
            ConfigurationError: An item is not a tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(item) for item in outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return [self.scale(item) for item in outputs]
        raise ConfigurationError(f"only tensors and lists of them can be scaled, not {type(outputs).__name__}")

    def unscale_(self, optimizer: DistributedOptimizer, context_id: Contexts) -> None:
        """Unscale the gradients of contexts, and check on all owners whether they are finite, in one round trip.

        Call it before clipping; otherwise `step` does it.

        Raises:
            ConfigurationError, UnknownContext: As for `DistributedOptimizer.step`.
            OptimizerError: It was already called for these contexts since the last `update`, or an owner did not answer.
        """
        if not self._enabled:
            return
        contexts = check_contexts(context_id)
        checked = self._checked.setdefault(optimizer, {})
        if contexts in checked:
            raise OptimizerError("unscale_() has already been called on this optimizer since the last update().")
        checked[contexts] = optimizer._are_finite(contexts)
        optimizer._edits.add(contexts, (SCALE, 1.0 / self._scale))

    def step(self, optimizer: DistributedOptimizer, context_id: Contexts) -> bool:
        """Step on all owners if all gradients on all of them are finite; on none otherwise.

        Returns:
            Whether it stepped.

        Raises:
            ConfigurationError, UnknownContext: As for `DistributedOptimizer.step`.
            OptimizerStepFailed: Some owners did not step. Call it again to repeat the step for these.
            OptimizerError: It was already called for these contexts since the last `update`, or an owner did not answer.
        """
        if not self._enabled:
            optimizer.step(context_id)
            return True
        contexts = check_contexts(context_id)
        stepped = self._stepped.setdefault(optimizer, set())
        if contexts in stepped:  # their gradients would not be unscaled
            raise OptimizerError(
                "step() has already been called since the last update(). Call update() after every step"
            )
        if contexts not in self._checked.get(optimizer, {}):
            self.unscale_(optimizer, contexts)
        is_finite = self._checked[optimizer][contexts]
        if is_finite:
            optimizer.step(contexts)
        else:
            optimizer._edits.drop(contexts)
        stepped.add(contexts)
        return is_finite

    def update(self, new_scale: float | None = None) -> None:
        """Raise or lower the scale, after the steps of all optimizers.

        Args:
            new_scale: The new scale; by default it depends on whether gradients were finite.

        Raises:
            OptimizerError: Neither `step` nor `unscale_` was called since the last `update`.
        """
        if not self._enabled:
            return
        found = [is_finite for checked in self._checked.values() for is_finite in checked.values()]
        self._checked.clear()
        self._stepped.clear()
        if new_scale is not None:
            self._scale = float(new_scale)
            return
        if not found:
            raise OptimizerError("No inf checks were recorded prior to update. Call step() or unscale_() first")
        if not all(found):
            self._scale, self._num_good = self._scale * self._backoff_factor, 0
            return
        self._num_good += 1
        if self._num_good >= self._growth_interval:
            grown = self._scale * self._growth_factor
            self._scale, self._num_good = grown if math.isfinite(grown) else self._scale, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; empty if scaling is not enabled."""
        if not self._enabled:
            return {}
        return {key: getattr(self, name) for key, (name, _) in _STATE.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another scaler, including that of a `torch.amp.GradScaler`.

        Raises:
            ConfigurationError: A key is missing, or the state is empty, like that of a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ConfigurationError(
                "the state dict is empty, possibly because it came from a scaler that was disabled"
            )
        for key in _STATE:
            if key not in state_dict:
                raise ConfigurationError(f"not the state of a GradScaler: {key!r} is missing")
        loaded = {name: kind(state_dict[key]) for key, (name, kind) in _STATE.items()}
        vars(self).update(loaded)
