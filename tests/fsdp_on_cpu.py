"""The training program under accelerate's FSDP2, on CPU processes joined by gloo.

Accelerate offers FSDP on accelerators only: a launch on CPUs counts as MULTI_CPU, for which it ignores the setting.
All that is changed here is what such a launch counts as; sharding, clipping and checkpoints are accelerate's own.
"""

from __future__ import annotations

import sys
from unittest import mock

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from train import heads


def main(arguments: list[str]) -> None:
    as_if = mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU))
    with as_if, mock.patch.dict("os.environ", ACCELERATE_TORCH_DEVICE="cpu"):
        heads.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
