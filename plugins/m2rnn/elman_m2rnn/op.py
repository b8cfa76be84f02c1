"""The recurrence of M²RNN on every back end."""

from elman_core.kernels import RowsKernel

from .reference import m2rnn_reference

m2rnn = RowsKernel("m2rnn", reference=m2rnn_reference)
