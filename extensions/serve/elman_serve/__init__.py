"""A server for many clients of one model: the commands `elman serve` and `elman chat`.

`engine` decodes the texts of all clients in one batch, `api` is the HTTP side, `schema` the bodies that it accepts.
"""
