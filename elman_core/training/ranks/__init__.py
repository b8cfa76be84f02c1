"""The processes that train together: who takes part, how they were started, tensors across them."""
