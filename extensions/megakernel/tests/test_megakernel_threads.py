"""Threads of a block meet between one's write and another's access to a number, and no block reads what another keeps.

Every access of a program is listed (whole_threads.h), apart from how `source.py` finds where threads meet.
"""

import subprocess
from pathlib import Path

import pytest
from elman_authors.testing.kernel import need_host_compiler
from elman_megakernel import programs
from test_megakernel import FOURS, layers_of

from elman_core.kernels.toolchain import find_host_compiler

MAIN = """
int main(int, char** given) {{ return run<elman::whole::Program>({blocks}, {constants}, {floats}, std::atoi(given[1])); }}
"""


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Gives a function of a model: what lists the accesses of its program."""
    need_host_compiler()
    found = []
    monkeypatch.setattr(programs, "Program", lambda source, *_: found.append(source))
    monkeypatch.setattr(programs, "_check", lambda *_: None)

    def compiled(model, **limits):
        programs.made(model, **limits)
        source = found.pop()
        constants = sum(x.numel() for x in source.constants)
        main = MAIN.format(blocks=min(3, source.blocks), constants=constants, floats=source.floats)
        (text := tmp_path / "program.cpp").write_text(
            source.text.replace("<elman/whole.cuh>", '"whole_threads.h"') + main
        )
        made = [str(find_host_compiler()), "-std=c++20", "-O1", "-w", f"-I{Path(__file__).parent}", str(text), "-o"]
        subprocess.run([*made, str(text.with_suffix(""))], check=True)

        def run(skipped=-1):
            done = subprocess.run([text.with_suffix(""), str(skipped)], capture_output=True, text=True, check=False)
            assert done.returncode in (0, 1), done
            return done.returncode, done.stdout

        return run

    return compiled


@pytest.mark.parametrize("limits", [{}, {"large": 1000}], ids=str)
@pytest.mark.parametrize("variants", [*FOURS, "e88:conv_h5v256"])
def test_threads_meet_where_one_reads_what_another_wrote(variants, limits, listed):
    code, said = listed(layers_of(variants), **limits)()
    assert code == 0, said


def test_a_missing_barrier_is_found(listed):
    run = listed(layers_of("e70+e71+e75"))
    barriers = int(run()[1].split()[0])
    assert barriers > 10
    assert [skipped for skipped in range(barriers) if run(skipped)[0] == 0] == []
