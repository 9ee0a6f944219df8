"""Transfer of a packed step's weights, buffers and optimizer state to the candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from padiff.align import Alignment
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.model.live_model import LiveModel
from padiff.records import Both, OptimizerState
from padiff.replaying.checks import Reference
from padiff.weights.assign import carry_over
from padiff.weights.carried_state import StateCarrier
from padiff.weights.start import recorded_of
from padiff.weights.stored import Stored, stored_step
from padiff.weights.transfer import Model, TransferError, plan_transfer

#: Number of opened steps that are cached; a resync repeats three steps many times.
_OPEN = 4


class StateRestorer:
    """Transfer of the state before packed steps to the candidate. The alignment of the models is computed once.

    Args:
        reference: the run with packs.
        model: the candidate.
        optimizers: the candidate's optimizers.
        layer_map: pairs of layers from the user.
        partial: True to leave parameters without a partner unchanged.

    Attributes:
        left: parameters that stayed unchanged, and recorded ones without a place, as ``layer/slot [shape]``.
        partners: the reference's layer path by the candidate's layer path.
    """

    def __init__(
        self, reference: Reference, model: LiveModel, optimizers: Sequence[Any], layer_map: Any, partial: bool = False
    ) -> None:
        self._partial = partial
        self._reference, self._model, self._optimizers = reference, model, optimizers
        self._layer_map = layer_map
        self._alignment: Alignment | None = None
        self._opened: dict[int, Stored] = {}
        self.partners: dict[str, str] = {}
        self.left: tuple[str, ...] = ()

    def carry(self, number: int, undo: list[Callable[[], None]], states: bool = True) -> None:
        """Set weights, buffers and optimizers to the state before a packed step; all of them, or none.

        Args:
            number: number of the packed step.
            undo: list that receives functions which restore the optimizers.
            states: True to set the optimizers, too.

        Raises:
            UsageError: the state does not fit this model; nothing was changed.
        """
        stored = self._stored(number)
        if self._optimizers and stored.optimizers is None:
            raise UsageError(stored.why_not)
        if self._alignment is None:
            carried = carry_over(
                stored.model,
                self._model.model,
                self._layer_map,
                partial=self._partial,
                # Names can mislead; the order of execution does not.
                recorded=recorded_of(stored, self._model, always=True),
                then=lambda done: self._set(stored, done.alignment, undo),
            )
            self._alignment = carried.alignment
            self.left = (*carried.transfer.not_carried, *carried.transfer.left_as_is)
            self.partners = {pair.candidate.path: pair.reference.path for pair in carried.alignment.pairs}
            return
        models: Both[Model] = Both(stored.model, self._model)
        pairs = GivenMap.resolve(self._layer_map, models.map(lambda model: model.nodes))
        try:
            transfer = plan_transfer(models, self._alignment, pairs, self._partial)
        except TransferError as error:
            raise UsageError(f"step {number} can't be carried to this model: {error}") from None
        tensors = self._model.framework.tensors
        before = [(tensor, tensors.copy(tensor)) for tensor, _ in transfer.writes]
        try:
            for tensor, array in transfer.writes:
                tensors.write(tensor, array)
            for call in transfer.calls:
                call()
            if states:
                self._set(stored, self._alignment, undo)
        except BaseException:
            for tensor, array in before:
                tensors.write(tensor, array)
            raise

    @property
    def names(self) -> dict[int, str]:
        """Return the sites of the candidate's tensors by their ``id``."""
        return {id(tensor): site for site, tensor in self._model.tensors()}

    def states(self, number: int) -> list[OptimizerState]:
        """Return the recorded optimizer states before a packed step, for the candidate's optimizers.

        Call `carry` first, which aligns the models.

        Raises:
            UsageError: the state was not recorded, or does not fit.
        """
        assert self._alignment is not None
        stored = self._stored(number)
        if stored.optimizers is None:
            raise UsageError(stored.why_not)
        return self._states(stored, self._alignment)

    def _stored(self, number: int) -> Stored:
        """Open a packed step. The last few steps stay cached: experiments and perturbed runs open them repeatedly."""
        stored = self._opened.pop(number, None)
        if stored is None:
            stored = stored_step(self._reference.run, number, self._reference.path)
            while len(self._opened) >= _OPEN:
                del self._opened[next(iter(self._opened))]
        self._opened[number] = stored
        return stored

    def _states(self, stored: Stored, alignment: Alignment) -> list[OptimizerState]:
        api, names = self._model.framework.optimizers, self.names
        carrier = StateCarrier(stored.model, self._model, alignment, stored.optimizers or ())
        states: list[OptimizerState] = []
        for optimizer in self._optimizers:
            sites = [names[id(parameter)] for parameter in api.optimized(optimizer) if id(parameter) in names]
            if not sites:
                raise UsageError("the optimizer steps no parameter of this model: make it of model.parameters()")
            states.append(carrier.state_for(sites))
        return states

    def _set(self, stored: Stored, alignment: Alignment, undo: list[Callable[[], None]]) -> None:
        """Set the optimizers to the recorded states; all of them, or none."""
        if not self._optimizers:
            return
        api, names = self._model.framework.optimizers, self.names
        states = self._states(stored, alignment)
        restores: list[Callable[[], None]] = []
        try:
            for optimizer, state in zip(self._optimizers, states):
                restores.append(api.set_state(optimizer, names, state))
        except BaseException:
            for restore in reversed(restores):
                restore()
            raise
        undo += restores
