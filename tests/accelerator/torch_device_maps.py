"""PyTorch's own tests of device maps between GPUs, run on gradwire and the stand-in accelerator.

They name devices by number, which means the accelerator of the process, so little has to be replaced: what they ask of
``torch.cuda`` is answered for the stand-in. ``make conformance`` runs them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from accelerator import device
from gradwire import compat

SUITE = "torch.testing._internal.distributed.rpc.rpc_test:TensorPipeAgentCudaRpcTest"
_LIMIT_S = 60.0

DIFFERENT = {
    "test_device_maps_invalid_min_device": "a ValueError, as all options that are wrong",
    "test_device_maps_many_to_one": "refused when it is set, not when the workers meet",
    **dict.fromkeys(
        (
            "test_device_maps_missing_config",
            "test_device_maps_missing_config_loop",
            "test_device_maps_missing_config_not_timeout",
            "test_device_maps_missing_config_remote",
            "test_device_maps_missing_config_remote_response",
            "test_device_maps_missing_config_response",
            "test_device_maps_missing_config_response_loop",
        ),
        "without a map tensors arrive on the device of the same name",
    ),
}
"""Tests that assert what is otherwise in gradwire, and why."""


def answer_for_cuda() -> None:
    """Let torch.cuda tell of the stand-in."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: device.NUM_DEVICES
    cuda.manual_seed_all = lambda seed: None
    cuda.init = lambda: None
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == device.NAME)  # type: ignore[method-assign, assignment]


def main() -> int:
    compat.install()  # before the tests are imported
    from conformance import running, suites

    cases = [case for case in suites.cases_of(suites._load_suite(SUITE)) if "device_map" in case.method]
    device.load()
    answer_for_cuda()
    wrong = 0
    for result in running.run_cases(cases, _LIMIT_S, 2):
        method = result.case.partition(".")[2]
        is_expected = (method in DIFFERENT) != result.is_good
        wrong += not is_expected
        print(f"{result.outcome.value:9}  {method}  {DIFFERENT.get(method, '')}")
        if not is_expected:
            print(result.detail)
    print(f"{len(cases)} tests, {len(DIFFERENT)} of them different on purpose, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
