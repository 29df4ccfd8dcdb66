"""Who may read a group of parameters, who may change it, and whose turn it is. Pure: nobody waits here.

readers   any number of calls at once, while nobody changes the group
changer   one step at a time, while nobody reads
holder    with "serialize", the one context that may use the group; the others stand in line
"""

from __future__ import annotations

import collections


class Turns:
    """The state of one group.

    Attributes:
        num_readers: Calls that read now.
        is_changed: Whether a step is under way.
        num_pending: Steps that wait for the readers.
        holder: The context whose turn it is, or 0.
    """

    __slots__ = ("_line", "holder", "is_changed", "num_pending", "num_readers")

    def __init__(self) -> None:
        self.num_readers = 0
        self.is_changed = False
        self.num_pending = 0
        self.holder = 0
        self._line: collections.deque[int] = collections.deque()

    def __repr__(self) -> str:
        state = "changed" if self.is_changed else f"{self.num_readers} readers"
        return f"<Turns {state}, {self.num_pending} steps wait, holder {self.holder}, {len(self._line)} in line>"

    # -- reading and changing ----------------------------------------------------------------------------------------

    def can_read(self, is_patient: bool) -> bool:
        """Whether a call may begin to read; a patient one lets steps that wait go first."""
        return not self.is_changed and not (is_patient and self.num_pending)

    def can_change(self) -> bool:
        """Whether a step may begin."""
        return not self.is_changed and not self.num_readers

    # -- turns -------------------------------------------------------------------------------------------------------

    def ask_turn(self, context_id: int) -> bool:
        """Whether it is that context's turn; if not, it stands in line from now on."""
        if self.holder == context_id:
            return True
        if context_id not in self._line:
            self._line.append(context_id)
        if self.holder or self._line[0] != context_id:
            return False
        self._line.popleft()
        self.holder = context_id
        return True

    def leave_line(self, context_id: int) -> None:
        """The context does not want a turn any more."""
        if context_id in self._line:
            self._line.remove(context_id)

    def end_turn(self, context_id: int) -> bool:
        """The context is done with the group; whether it was its turn."""
        self.leave_line(context_id)
        was_holder = self.holder == context_id
        if was_holder:
            self.holder = 0
        return was_holder
