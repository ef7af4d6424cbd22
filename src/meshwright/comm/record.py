"""Recording a step: traffic, live storages, FLOPs and time."""

from meshwright.comm.phase import current_phase, phase

__all__ = ["current_phase", "phase"]
