"""What every transport must do, as checks that run on any implementation.

A check gets a function that makes two connected `StreamConnection`s and uses them as rpc does. Run them all with
`check_transport`, or each as a test of its own:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS)
    def test_my_transport(check): check(make_pair)
"""

from __future__ import annotations

from gradwire.testing import _data_checks, _end_checks
from gradwire.testing._pairs import ConnectionPair, MakePair, TransportCheck

__all__ = ["TRANSPORT_CHECKS", "ConnectionPair", "MakePair", "TransportCheck", "check_transport"]

TRANSPORT_CHECKS: tuple[TransportCheck, ...] = (
    _data_checks.check_frames_of_all_sizes,
    _data_checks.check_many_frames_in_one_write,
    _data_checks.check_a_reader_may_wait,
    _data_checks.check_frames_held_back,
    _data_checks.check_threads_may_send_at_once,
    _data_checks.check_tensors_of_many_kinds,
    _data_checks.check_many_large_tensors,
    _data_checks.check_large_tensors_again_and_again,
    _data_checks.check_sending_captures,
    _data_checks.check_tensors_outlive_the_connection,
    _data_checks.check_large_segments_are_read_into_place,
    _end_checks.check_peer_close_is_a_loss,
    _end_checks.check_own_close_is_told_apart,
    _end_checks.check_close_wakes_a_waiting_reader,
    _end_checks.check_close_wakes_a_waiting_sender,
    _end_checks.check_end_inside_a_frame,
    _end_checks.check_garbage_ends_only_its_connection,
    _end_checks.check_limits_are_kept_on_both_sides,
    _end_checks.check_send_has_a_deadline,
    _end_checks.check_full_connection_recovers,
    _end_checks.check_nothing_is_left,
)
"""Every check, in the order in which `check_transport` runs them."""


def check_transport(make_pair: MakePair) -> None:
    """Runs every check.

    Args:
        make_pair: Makes a new connection with these options; what else it needs is its own affair.

    Raises:
        AssertionError: The transport breaks a rule.
    """
    for check in TRANSPORT_CHECKS:
        check(make_pair)
