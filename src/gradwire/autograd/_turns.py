"""Who may read a group of parameters, who may change it, and whose turn it is. Pure: nobody waits here.

    readers   any number of calls at once, while nobody changes the group
    changer   one step at a time, while nobody reads
    holder    with "serialize", the one context that may use the group; the others stand in line

Calls that may use anything read *everything*, which is a group, too: it counts the changers of all others.
"""

from __future__ import annotations

import collections
from collections.abc import Collection


class Turns:
    """The state of one group.

    Attributes:
        num_readers: Calls that read now.
        num_changers: Steps under way.
        num_pending: Steps that wait for the readers.
        holder: The context whose turn it is, or 0.
    """

    __slots__ = ("_line", "holder", "num_changers", "num_pending", "num_readers")

    def __init__(self) -> None:
        self.num_readers = 0
        self.num_changers = 0
        self.num_pending = 0
        self.holder = 0
        self._line: collections.deque[int] = collections.deque()

    def __repr__(self) -> str:
        state = f"{self.num_readers} readers, {self.num_changers} changers"
        return f"<Turns {state}, {self.num_pending} steps wait, holder {self.holder}, {self.num_in_line} in line>"

    # -- reading and changing ----------------------------------------------------------------------------------------

    def can_read(self, is_patient: bool) -> bool:
        """Whether a call may begin to read; a patient one lets steps that wait go first."""
        return not self.num_changers and not (is_patient and self.num_pending)

    # -- turns -------------------------------------------------------------------------------------------------------

    @property
    def num_in_line(self) -> int:
        """Contexts that wait for their turn."""
        return len(self._line)

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


class Change:
    """A step on some groups: all of them at once, so that nobody holds one and waits for another.

    Args:
        groups: What is changed.
        everything: What calls read that may use anything.
    """

    def __init__(self, groups: Collection[Turns], everything: Turns) -> None:
        self._groups = [*groups, everything]
        self._own = groups
        self._everything = everything
        # How many of the groups count this step. Each changes together with a group's count, in one line: Ctrl-C may come
        # between two groups, and what was counted is taken back.
        self._num_waiting = 0
        self._num_begun = 0

    def wait(self) -> None:
        """The step wants to begin."""
        for group in self._groups:
            group.num_pending, self._num_waiting = group.num_pending + 1, self._num_waiting + 1

    def stop_waiting(self) -> None:
        """The step begins, or does not want to any more."""
        while number := self._num_waiting:
            group = self._groups[number - 1]
            group.num_pending, self._num_waiting = group.num_pending - 1, number - 1

    def begin(self) -> bool:
        """Begins, if nobody is in the way."""
        if self._everything.num_readers:
            return False
        for group in self._own:
            if group.num_readers or group.num_changers:
                return False
        for group in self._groups:
            group.num_changers, self._num_begun = group.num_changers + 1, self._num_begun + 1
        return True

    def end(self) -> None:
        """The step is over, if it has begun, and does not wait."""
        while number := self._num_begun:
            group = self._groups[number - 1]
            group.num_changers, self._num_begun = group.num_changers - 1, number - 1
        if self._num_waiting:
            self.stop_waiting()
