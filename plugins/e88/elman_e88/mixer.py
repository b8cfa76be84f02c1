"""The E88 mixer: its parameters are those of `MatrixMixer`."""

from elman_core.nn import MatrixMixer

from .op import e88


class E88Mixer(MatrixMixer):
    """x → q, k, v → conv → SiLU → L2 norm of q, k → recurrence → + D v → RMSNorm → gate → head mixing → y."""

    kernel = e88
