"""A model's step as a list of tensor operations at fixed addresses, repeated on a CPU without Python."""
