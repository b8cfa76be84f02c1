"""Several ranks for the tests: a process that has imported everything once and forks them, which costs milliseconds instead of
the seconds that `torchrun` and its imports take."""

import contextlib
import faulthandler
import gc
import io
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Ended:
    """How the ranks ended: exit codes (negative: the signal) and what each wrote."""

    codes: list[int]
    out: list[str]
    err: list[str]


class Launcher:
    """Starts ranks, each of which runs one command line of elman."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELMAN_RANK_TIMEOUT": "60", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not initialise CUDA before the fork
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, ranks: int, words: list[str], prelude: str = "", limit: float = 90, **environment: str) -> None:
        """Start them. `prelude` is Python that each runs first. After `limit` seconds each prints its stacks and ends."""
        self.count += 1
        where = self.folder / f"ranks-{self.count}"
        where.mkdir()
        asked = {"ranks": ranks, "words": [str(w) for w in words], "prelude": prelude, "limit": limit}
        asked["environment"] = environment
        self.process.stdin.write(json.dumps({**asked, "where": str(where)}) + "\n")
        self.process.stdin.flush()
        self.where, self.ranks = where, ranks
        self.pids = json.loads(self.process.stdout.readline())

    def wait(self) -> Ended:
        """How those that were started ended."""
        codes = json.loads(self.process.stdout.readline())
        texts = {kind: [(self.where / f"{r}.{kind}").read_text() for r in range(self.ranks)] for kind in ("out", "err")}
        return Ended(codes, **texts)

    def run(self, ranks: int, words: list[str], prelude: str = "", limit: float = 90, **environment: str) -> Ended:
        self.start(ranks, words, prelude, limit, **environment)
        return self.wait()

    def expect(self, codes: list[int], words: list[str], prelude: str = "", **more: Any) -> Ended:
        """Run as many ranks as there are codes, which must be those that they end with."""
        ended = self.run(len(codes), words, prelude, **more)
        assert ended.codes == codes, ended.err
        return ended

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve() -> None:
    gc.disable()
    import torch.distributed

    import elman_core.training.loop
    import elman_core.training.start  # noqa: F401
    from elman_core.cli import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(["list"])  # imports what a command line needs, and the plugins
    gc.freeze()  # a rank that looked for garbage here would copy all of it
    gc.enable()
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        # The store is the launcher's, as torchrun's is: it outlives the ranks, and has a port that nobody takes before them.
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {
            "WORLD_SIZE": asked["ranks"],
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        pids, (begin, hold) = [], os.pipe()
        for rank in range(asked["ranks"]):
            pid = os.fork()
            if not pid:
                os.close(hold)
                # Until all are forked: a lock that the store's thread holds for a first rank would stay locked in the next.
                os.read(begin, 1)
                child(asked, {**place, "RANK": rank, "LOCAL_RANK": rank, **asked["environment"]}, rank)
            pids.append(pid)
        os.close(hold)
        os.close(begin)
        print(json.dumps(pids), file=replies, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), file=replies, flush=True)


def child(asked: dict, environment: dict, rank: int) -> None:
    code = 70
    try:
        for number, kind in ((0, None), (1, "out"), (2, "err")):
            path = "/dev/null" if kind is None else f"{asked['where']}/{rank}.{kind}"
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), number)
        faulthandler.dump_traceback_later(asked["limit"], exit=True)  # a test that hangs says where
        os.environ.update({k: str(v) for k, v in environment.items()})
        from elman_core.cli import main
        from elman_core.training.ranks import group

        exec(asked["prelude"], {"RANK": rank, "__name__": "prelude"})
        code = main(asked["words"])
        group.leave(well=code == 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
