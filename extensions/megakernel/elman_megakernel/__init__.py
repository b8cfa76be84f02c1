"""A whole model as one kernel that decodes: recorded, written as C++, compiled, launched."""
