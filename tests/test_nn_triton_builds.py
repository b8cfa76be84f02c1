"""The Triton kernels compile to machine code for Ampere and Hopper, without a GPU, and fit its registers."""

import re
import subprocess
from pathlib import Path

import pytest
from triton_helpers import needs_triton

pytestmark = needs_triton

STRIDES = dict.fromkeys(["x0", "x1", "r0", "r1", "n0", "n1", "s0", "s1", "g0", "g1", "a0", "a1", "d0", "d1"], "i32")


def kernels():
    """(name, function, types of the arguments, constants, warps) as models of width 1280 and 1536 call them."""
    from elman_core.nn import add_norm_triton, cross_entropy_triton, gated_triton
    from elman_core.training.optim import schedule_free_triton

    block, warps = add_norm_triton._block(1536)
    sizes = {"inner": "i32", "rows": "i32", "width": "i32", "eps": "fp32", **STRIDES}
    wide = dict.fromkeys(("residual", "weight", "stream", "rho", "d_stream", "d", "shares"), "*fp32")
    for narrow in ("bf16", "fp32"):
        types = {**sizes, **wide, **dict.fromkeys(("x", "normed", "dn", "d_x"), f"*{narrow}")}
        yield f"forward {narrow}", add_norm_triton._forward, types, {"ADDS": True, "BLOCK": block}, warps
        constants = {"ADDS": True, "NARROW": narrow == "bf16", "BLOCK": block}
        yield f"backward {narrow}", add_norm_triton._backward, types, constants, warps
        types = dict.fromkeys(("o", "gate", "y", "dy", "d_o", "d_gate"), f"*{narrow}")
        types |= {**sizes, **dict.fromkeys(("heads", "stride_o", "stride_gate", "stride_d"), "i32")}
        types |= {"weight": "*fp32", "shares": "*fp32"}
        constants = {"NORM": True, "SILU": True, "BACK": True, "KEEP": True, "ROWS": 32, "COLUMNS": 64, "BLOCKS": 8}
        yield f"gated {narrow}", gated_triton._kernel, types, constants, gated_triton.WARPS
    lists = dict.fromkeys(("y", "g", "v", "z", "failed"), "*fp32") | {"factors": "*fp64", "count": "i32"}
    types = lists | dict.fromkeys(("beta2", "rest", "decay", "eps"), "fp32")
    yield "schedule-free", schedule_free_triton._update, types, {"BLOCK": schedule_free_triton.BLOCK}, 4
    types = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "rows": "i32", "classes": "i32"}
    yield "cross-entropy", cross_entropy_triton._overwrite, types, {"IGNORED": -100, "ROWS": 16, "BLOCK": 256}, 4


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_kernel_compiles_and_spills_nothing(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, function, types, constants, warps in kernels():
        arguments = function.arg_names
        signature = {n: "constexpr" if n in constants else types[n] for n in arguments}
        given = {(arguments.index(n),): value for n, value in constants.items()}
        source = ASTSource(fn=function, signature=signature, constexprs=given)
        built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
        assert len(built.asm["cubin"]) > 1000, name
        reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        if not reader.is_file():
            continue
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(built.asm["cubin"])
        usage = subprocess.run([str(reader), "-res-usage", str(binary)], capture_output=True, text=True, check=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
        assert found, usage.stdout
        assert int(found[2]) == 0, f"{name} keeps {found[2]} bytes of a thread in memory"
        assert int(found[1]) * 32 * warps <= 65536, name
