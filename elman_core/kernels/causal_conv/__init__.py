"""The causal depthwise convolution over time: its kernel (`op`), plain PyTorch (`reference`), problems (`spec`)."""
