"""One decode step of recurrent state, in place in a byte pool."""

from pallas_kernels.state_step.api import StateBlocks, conv_step, delta_step, ssm_step

__all__ = ["StateBlocks", "conv_step", "delta_step", "ssm_step"]
