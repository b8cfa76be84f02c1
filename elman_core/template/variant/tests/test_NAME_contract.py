from elman_{{name}}.op import {{name}}

from elman_core.testing import KernelContract, VariantContract


class Test{{Name}}(VariantContract):
    variant = "{{name}}"
    options = ({}, {"use_conv": True, "expansion": 1.5, "mamba2_init": "s4d"})


class Test{{Name}}Kernel(KernelContract):
    spec = {{name}}.spec()
