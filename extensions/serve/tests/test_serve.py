"""The server against its clients: the same text as alone, whatever others do; nothing is held by those who are gone or slow."""

import asyncio
import contextlib
import gc
import io
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import jsonschema
import pytest
import torch
from cpu_graph import CpuRecorder as GraphRecorder
from decoding_helpers import ladder
from elman_authors.testing.kernel import need_host_compiler
from packed_files import documents, write_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from elman_core.cli import main
from elman_core.extension import ConfigError, Sampling, printable, recorder_for, vocabulary_texts
from elman_core.generation import generate_tokens
from elman_core.model import LadderForCausalLM, LadderLM

openai, uvicorn = pytest.importorskip("openai"), pytest.importorskip("uvicorn")

from elman_serve.api import Api  # noqa: E402
from elman_serve.cli.serve import _listen  # noqa: E402
from elman_serve.engine import Engine  # noqa: E402
from elman_serve.language import Language  # noqa: E402
from elman_serve.request import Request, Text  # noqa: E402
from elman_serve.schema import Limits  # noqa: E402
from elman_serve.states import Prefixes, Rows, independent, read  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs/how-to/serve.md"
KEY = "secret-key"
ENDS = {30}
BYTES = vocabulary_texts(None, 256)
LONG = "".join(f"{n} bottles\n" for n in range(40))


def template(messages):
    if messages[-1]["role"] != "user":
        raise ValueError("a user speaks last")
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


class Served:
    """A server on a free port of this machine, in threads of this process."""

    def __init__(
        self, model=None, language=None, *, slots=64, queue=400, prefix_bytes=1 << 20, seconds=60.0, tokens=4096,
        start=True, **more,
    ):  # fmt: skip
        loop = asyncio.new_event_loop()
        self.model = model or ladder("e42", mlp_ratio=1.0)
        self.engine = Engine(
            self.model,
            ENDS,
            language or Language(BYTES, template=template),
            slots=slots,
            queue=queue,
            prefix_bytes=prefix_bytes,
            notify=lambda all_: loop.call_soon_threadsafe(lambda: [each.set() for each in all_]),
            **more,
        )
        limits = Limits(4096, tokens, min(slots, 128), self.model.config.vocab_size)
        self.api = Api(self.engine, "tiny", limits, seconds=seconds, key=KEY)
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.api, http="h11", ws="none", lifespan="off", log_level="error", access_log=False)
        self.server = uvicorn.Server(config)
        serving = self.server.serve(sockets=[self.socket])
        self.thread = threading.Thread(target=lambda: loop.run_until_complete(serving))
        if start:
            self.engine.start()
        self.thread.start()

    def __enter__(self):
        until(lambda: self.server.started)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        if self.engine.is_alive():
            self.engine.close()
            self.engine.join(20)
        assert not self.thread.is_alive()
        assert not self.engine.is_alive()

    @property
    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, path="/v1/completions", key=KEY, **body):
        head = {"Authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json={"model": "tiny", **body}, headers=head, timeout=60)

    def metric(self, name):
        return self.engine.metrics.registry.get_sample_value(f"elman_{name}")

    def alone(self, prompt, count=16, n=1, seed=0, how=None, ends=ENDS):
        """What `elman generate` writes."""
        rows = generate_tokens(
            self.model, prompt, max_new_tokens=count, num=n, how=how or Sampling(), stop=ends, seed=seed
        )
        return [[token for token in text if token is not None] for text in zip(*rows, strict=True)] or [[]] * n


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def served():
    with Served() as made:
        yield made


def take(way, model, monkeypatch):
    """Write texts by the program of a CPU, by steps that are recorded as on a GPU, or by plain PyTorch."""
    recorder = None
    if way == "program":
        need_host_compiler()
        recorder = recorder_for(model)
    for module in ("elman_core.generation.decoder", "elman_serve.states"):
        monkeypatch.setattr(f"{module}.recorder_for", lambda *_: recorder)
    if way == "graph":
        monkeypatch.setattr("elman_serve.states.recorder_for", lambda _: GraphRecorder())


@pytest.mark.parametrize("how", [Sampling(), Sampling(0.9, 40, 0.8), Sampling(0.0)], ids=str)
@pytest.mark.parametrize(
    ("variant", "width", "way"), [("e42", 32, "program"), ("e42", 32, "graph"), ("e88", 16, "plain")]
)
def test_texts_of_equal_settings_are_written_several_tokens_a_turn(variant, width, way, how, monkeypatch):
    """They begin at different times, end at a token or a length in the middle of a turn, and one is given up."""
    model, real, steps, known = ladder(variant, dim=width), Rows.draw, [], []
    take(way, model, monkeypatch)

    def draw(rows, told, how, count):
        steps.append(count)
        known.append(told is not None)
        return real(rows, told, how, max(count, 6))  # however slow this machine is

    monkeypatch.setattr("elman_serve.engine.TURN_SECONDS", 0.2)
    monkeypatch.setattr(Rows, "draw", draw)
    ends = {30, 101} if how.temperature else {30}
    with Served(model, slots=6) as served:
        served.engine.ends = ends
        asked = [Request(b"ab%d" % n, how, 37 * n % 90 + 1, threading.Event(), 1 + n % 2, seed=n) for n in range(8)]
        gone = Request(b"gone", how, 10**6, threading.Event(), stops=(b"never there",))
        for request in (gone, *asked):
            served.engine.submit(request)
            until(lambda request=request: request.texts[0].tokens or request.done)
        gone.cancel()
        until(lambda: all(request.done for request in asked))
        until(lambda: served.metric("slots_used") == 0)
        for request in asked:
            alone = served.alone(request.prompt, request.most, request.count, request.seed, how, ends)
            assert [text.tokens for text in request.texts] == alone
            assert [text.finish for text in request.texts] == [
                "length" if len(text) == request.most else "stop" for text in alone
            ]
        told = sum(len(text.tokens) for request in (gone, *asked) for text in request.texts)
        assert served.metric("written_tokens_total") == told, "neither ends nor what is drawn behind them"
    assert max(steps) > 1
    assert all(known) == (way != "graph"), "there draws begin before the last ones are read"


def test_a_model_that_fails_within_a_turn_is_told_behind_what_it_wrote():
    model, count = ladder("e42"), torch.zeros(())

    def fail(_module, _inputs, out):
        count.add_(1)
        return (out[0] + torch.where(count >= 40, torch.nan, 0.0), out[1])

    expected = [row[0] for row in generate_tokens(model, b"abc", max_new_tokens=80, seed=2)]
    model.model.norm.register_forward_hook(fail)
    with Served(model, slots=1) as served:
        served.engine.ends = set()
        request = Request(b"abc", Sampling(), 80, threading.Event(), seed=2)
        served.engine.submit(request)
        until(lambda: request.done)
        assert "not finite" in str(request.error)
        assert request.texts[0].tokens == expected[:39]
        until(lambda: served.metric("slots_used") == 0)


@pytest.mark.parametrize(
    ("variant", "width", "way"),
    [("e42", 32, "program"), ("e88", 32, "graph"), ("e42", 16, "plain"), ("lstm", 32, "program")],
)
def test_64_clients_at_once_each_get_the_text_that_is_theirs_alone(variant, width, way, monkeypatch):
    draw = random.Random(1)
    asked = []
    for seed in range(64):
        prompt = "".join(draw.choice(["ab", "é", "\n", LONG]) for _ in range(draw.randrange(4)))[:600]
        body = {
            "prompt": prompt,
            "seed": seed,
            "max_tokens": draw.randrange(1, 20),
            "n": draw.choice([1, 1, 1, 3]),
            "temperature": draw.choice([0, 0.7, 1]),
            "top_p": draw.choice([0.9, 1]),
            "top_k": draw.choice([0, 40]),
            "repetition_penalty": draw.choice([1, 1.3]),
        }
        asked.append(body)

    async def ask_all(url):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=120, limits=ALL) as client:
            each = [
                client.post(f"{url}/v1/completions", json={"model": "tiny", "return_token_ids": True, **b})
                for b in asked
            ]
            return await asyncio.gather(*each)

    model = ladder(variant, dim=width)
    take(way, model, monkeypatch)
    steps, together = independent(model, 24)
    assert steps
    assert together == (variant != "lstm")
    with Served(model, slots=24, together=together) as served:
        answers = asyncio.run(ask_all(served.url))
        for body, answer in zip(asked, answers, strict=True):
            how = Sampling(body["temperature"], body["top_k"], body["top_p"], body["repetition_penalty"])
            alone = served.alone(body["prompt"].encode(), body["max_tokens"], body["n"], body["seed"], how)
            assert [choice["token_ids"] for choice in answer.json()["choices"]] == alone
        until(lambda: served.metric("slots_used") == 0)


ALL = httpx.Limits(max_connections=None)


def test_a_machine_is_checked_for_rows_that_do_not_depend_on_each_other():
    class Leaky(torch.nn.Module):  # a batch that is seen by its rows
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1e-6 * x.shape[0]

    model = ladder("e42")
    model.lm_head = Leaky(model.lm_head)
    assert independent(model, 64) == (False, False)


def test_the_openai_client_gets_texts_streams_scores_and_usage(served):
    client = served.client
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    alone = bytes(served.alone(b"abc", 30, seed=5)[0])
    common = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "seed": 5}
    whole = client.completions.create(**common)
    assert whole.choices[0].text == alone.decode(errors="replace")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, len(alone))
    events = list(client.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].text for e in events[:-1]) == whole.choices[0].text
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].usage.completion_tokens == len(alone)

    scored = client.completions.create(**common, logprobs=2, echo=True).choices[0]
    assert scored.text == "abc" + whole.choices[0].text
    got = scored.logprobs
    assert len(got.tokens) == len(got.top_logprobs) == len(alone) + 3
    assert got.top_logprobs[0] is None
    for token, value, top in list(zip(got.tokens, got.token_logprobs, got.top_logprobs, strict=True))[1:]:
        assert top[token] == value  # of what was drawn, beside the two best
        assert 2 <= len(top) <= 3
    tokens = torch.tensor([list(b"abc" + alone)])
    with torch.no_grad():
        expected = served.model(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert got.token_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(got.token_logprobs[1:]), expected, rtol=1e-4, atol=1e-4)
    only = client.completions.create(model="tiny", prompt=LONG, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert only.text == LONG
    assert len(only.logprobs.token_logprobs) == len(LONG)

    assert (
        served.post(prompt=[97.0, 98, 99], max_tokens=30, seed=5).json()["choices"][0]["text"] == whole.choices[0].text
    )
    several = client.completions.create(model="tiny", prompt=["abc", "d"], n=2, max_tokens=5, seed=1)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    letters = [chr(b) for b in alone if 33 <= b < 127]
    stop = letters[len(letters) // 2]
    cut = client.completions.create(**common, stop=[stop, "\n\n\n\n"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.choices[0].text[: whole.choices[0].text.index(stop)]

    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "seed": 2}
    answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=1).choices[0]
    assert answer.message.content == bytes(served.alone(b"user: hi\n", 9, seed=2)[0]).decode(errors="replace")
    assert answer.message.role == "assistant"
    assert len(answer.logprobs.content) in (8, 9)
    deltas = list(client.chat.completions.create(**chat, stream=True))
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(d.choices[0].delta.content or "" for d in deltas) == answer.message.content


def test_a_model_of_tokens_answers_in_text_and_counts_tokens(tmp_path):
    model = ladder("e42", vocab_size=320)
    model.tokenizer = write_tokenizer(tmp_path / "bpe", documents(), template="{{ messages[0]['content'] }}")
    model.save_pretrained(tmp_path / "model")
    model = LadderForCausalLM.from_pretrained(tmp_path / "model").eval()
    language = Language.of(model)
    said = "größe 東"
    prompt, pieces = language.encode(said), language.texts
    with Served(model, language) as served:
        served.engine.ends = set()
        for seed in range(4):
            common = {"model": "tiny", "max_tokens": 40, "seed": seed}
            (alone,) = served.alone(prompt, 40, seed=seed, ends=set())
            raw = b"".join(pieces[token] for token in alone)
            text = raw.decode(errors="replace")
            lines = served.post(**common, prompt=prompt.tolist(), stream=True, return_token_ids=True).text.split("\n\n")
            streamed = [json.loads(line[6:])["choices"][0] for line in lines[:-2]]
            assert [token for each in streamed for token in each["token_ids"]] == alone
            assert "".join(each["text"] for each in streamed) == text, "characters are whole"
            whole = served.client.completions.create(**common, prompt=said, logprobs=1, echo=True)
            assert whole.choices[0].text == said + text
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 40)
            scores, ids = whole.choices[0].logprobs, [*prompt, *alone]
            bounds = [*scores.text_offset, len(said.encode() + raw)]
            assert [(said.encode() + raw)[a:b] for a, b in itertools.pairwise(bounds)] == [pieces[i] for i in ids]
            ascii_ = [
                (name, pieces[i].decode()) for name, i in zip(scores.tokens, ids, strict=True) if pieces[i].isascii()
            ]
            assert [name for name, _ in ascii_] == [piece for _, piece in ascii_]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(scores.token_logprobs[1:]), expected, rtol=1e-4, atol=1e-4)
            stop = re.findall("[!-~]{2}", text)[-1]
            cut = served.client.completions.create(**common, prompt=said, stop=stop).choices[0]
            assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
        chat = {**common, "messages": [{"role": "user", "content": said}], "logprobs": True}
        answer = served.client.chat.completions.create(**chat).choices[0]
        assert answer.message.content == text
        assert bytes(byte for each in answer.logprobs.content for byte in each.bytes) == raw
        assert "from 0 to 319" in served.post(prompt=[320]).json()["error"]["message"]
        model.config.bos_token_id, model.config.eos_token_id = None, 0
        begun = served.post(**common, prompt="", return_token_ids=True).json()["choices"][0]["token_ids"]
        assert begun == served.alone([0], 40, seed=seed, ends=set())[0]


def test_a_stop_string_is_never_shown_in_part():
    request = Request(b"a", Sampling(), 100, threading.Event(), stops=(b"aab", b"ac"))
    text, shown = Text(request), []
    for token, piece in enumerate((b"x", b"a", b"aa", b"ab!", b"?")):
        if text.finish is None:
            text.take(token, piece)
            shown.append(bytes(text.text[: text.shown]))
    assert shown == [b"x", b"x", b"xa", b"xaa"]
    assert (text.finish, text.tokens) == ("stop", [0, 1, 2, 3])


OK = {"prompt": "a", "max_tokens": 1}
WRONG = [
    ({**OK, "model": "other"}, 404, "model_not_found", "model"),
    ({"max_tokens": 1}, 400, "invalid_value", None),
    ({**OK, "max_tokens": "many"}, 400, "invalid_value", "max_tokens"),
    ({**OK, "max_tokens": 10**6}, 400, "invalid_value", "max_tokens"),
    ({**OK, "temperature": -1}, 400, "invalid_value", "temperature"),
    ({**OK, "seed": 2**64}, 400, "invalid_value", "seed"),
    ({**OK, "n": 65}, 400, "invalid_value", "n"),
    ({**OK, "prompt": None}, 400, "invalid_value", "prompt"),
    ({**OK, "stop": ""}, 400, "invalid_value", "stop"),
    ({**OK, "presence_penalty": 0.5}, 400, "invalid_value", "presence_penalty"),
    ({**OK, "frobnicate": 1}, 400, "invalid_value", None),
    ({**OK, "prompt": [256]}, 400, "invalid_value", "prompt"),
    ({**OK, "prompt": [[1], "a", []]}, 400, "invalid_value", "prompt"),
    ({**OK, "prompt": {"a": 1}}, 400, "invalid_value", "prompt"),
    ({**OK, "prompt": [[False]]}, 400, "invalid_value", "prompt"),
    ({**OK, "prompt": [97.5]}, 400, "invalid_value", "prompt"),
    ({**OK, "prompt": []}, 400, "invalid_value", "prompt"),
    ({**OK, "prompt": ["a"] * 65}, 400, "invalid_value", "prompt"),
    ({**OK, "repetition_penalty": 1e-300}, 400, "invalid_value", "repetition_penalty"),
    ({**OK, "prompt": "a" * 4097}, 400, "context_length_exceeded", "prompt"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), WRONG)
def test_a_wrong_body_is_said_in_openais_form(served, body, status, code, param):
    answer = served.post(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_options_of_what_is_not_asked_for_are_refused(served):
    stream = {**OK, "stream_options": {"include_usage": True}}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "top_logprobs": 2}
    for path, body, needed in (("/v1/completions", stream, "stream"), ("/v1/chat/completions", chat, "logprobs")):
        for without in ({}, {needed: False}, {needed: None}):
            answer = served.post(path, **body, **without)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), answer.text
        assert served.post(path, **body, **{needed: True}).status_code == 200
    assert served.post(**OK, stream_options=None).status_code == 200


def test_no_text_is_longer_than_the_server_allows():
    with Served(tokens=8) as served:
        served.engine.ends = set()
        assert served.post(prompt="a").json()["usage"]["completion_tokens"] == 8


def test_best_of_is_n(served):
    assert len(served.post(**OK, n=2, best_of=2).json()["choices"]) == 2
    for asked in ({"best_of": 2}, {"n": 2, "best_of": 1}):
        answer = served.post(**OK, **asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")


def test_wrong_keys_paths_and_clients_errors(served):
    for key in (b"", b"Bearer wrong", b"Bearer " + KEY.encode() + b"x", b"Bearer \xff", KEY.encode()):
        assert httpx.get(served.url + "/v1/models", headers={"Authorization": key}).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="a wrong key"):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0).models.list()
    assert httpx.get(served.url + "/health").json() == {"status": "ok"}
    assert httpx.get(served.url + "/metrics").status_code == 401
    head = {"Authorization": f"Bearer {KEY}"}
    assert "elman_slots_used" in httpx.get(served.url + "/metrics", headers=head).text
    assert httpx.get(served.url + "/v1/nothing", headers=head).json()["error"]["type"] == "invalid_request_error"
    wrong = httpx.get(served.url + "/v1/completions", headers=head)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    text = {**head, "Content-Type": "text/plain"}
    assert httpx.post(served.url + "/v1/completions", content=b"{}", headers=text).status_code == 415
    with pytest.raises(openai.BadRequestError, match="template refuses these messages: a user speaks last"):
        served.client.chat.completions.create(model="tiny", messages=[{"role": "assistant", "content": "x"}])
    with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
        served.client.completions.create(model="big", prompt="a")
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings; /openapi"):
        served.client.embeddings.create(model="tiny", input="a")
    assert not [thread for thread in threading.enumerate() if "AnyIO" in thread.name], "they would outlive ^C"


def test_a_model_without_a_chat_template_says_so():
    with Served(language=Language(BYTES)) as served, pytest.raises(openai.NotFoundError, match="no chat template: use"):
        served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])


def raw(served, *parts, wait=10.0):
    """What comes back for bytes on a connection, until the server closes it or nothing comes."""
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.settimeout(wait)
        for part in parts:
            with contextlib.suppress(OSError):
                client.sendall(part)
        got = b""
        with contextlib.suppress(OSError):
            while chunk := client.recv(65536):
                got += chunk
        return got


def http(body, head=b"", key=KEY):
    lines = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
    )
    return lines % key.encode() + head + b"Content-Length: %d\r\n\r\n" % len(body) + body


SMALL = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
MALFORMED = [
    (b"\x00\x01\x02\xff" * 100 + b"\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"4"),
    (http(b"{", b"Connection: close\r\n"), b"400"),
    (http(b"\xff\xfe", b"Connection: close\r\n"), b"400"),
    (http(b"[" * 100_000, b"Connection: close\r\n"), b"413"),
    (http(b"[" * 50_000, b"Connection: close\r\n"), b"400"),
    (http(b"[]", b"Connection: close\r\n"), b"400"),
    (http(SMALL.replace(b'"a"', b'"\\ud800"'), b"Connection: close\r\n"), b"400"),
    (http(SMALL.replace(b'"a"', b"[1e400]"), b"Connection: close\r\n"), b"400"),
    (http(SMALL.replace(b"1}", b"NaN}"), b"Connection: close\r\n"), b"400"),
    (http(SMALL.replace(b"1}", b"9" * 5000 + b"}"), b"Connection: close\r\n"), b"400"),
    (http(b" " * 10_000_000), b"413"),
    (http(SMALL, b"Connection: close\r\n")[:-5], b"408"),
]


@pytest.mark.parametrize(("sent", "status"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_and_huge_requests_are_refused_and_the_next_is_served(served, sent, status, monkeypatch):
    monkeypatch.setattr("elman_serve.api.BODY_SECONDS", 1)
    assert raw(served, sent).startswith(b"HTTP/1.1 " + status)
    assert served.post(**OK).status_code == 200


def test_pipelined_requests_are_answered_in_order(served):
    last = http(SMALL.replace(b'"a"', b'"ab"'), b"Connection: close\r\n")
    got = raw(served, http(SMALL) + http(b"{}") + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"400", b"200"]


def stream_head(served, **body):
    """A connection on which a stream has begun."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", served.port))
    client.sendall(http(json.dumps({"model": "tiny", "prompt": "a", "stream": True, **body}).encode()))
    assert client.recv(8) == b"HTTP/1.1"
    return client


def test_clients_that_go_away_free_their_slots_at_once():
    with Served(slots=8, tokens=10**6) as served:
        streams = [stream_head(served, max_tokens=10**6, temperature=0, stop=["\x1e"]) for _ in range(4)]
        silent = socket.create_connection(("127.0.0.1", served.port))
        silent.sendall(
            http(json.dumps({"model": "tiny", "prompt": "b", "max_tokens": 10**6, "temperature": 0}).encode())
        )
        until(lambda: served.metric("slots_used") == 5)
        for client in (*streams, silent):
            client.close()
        until(lambda: served.metric("slots_used") == 0, 5)
        assert served.metric("cancelled_total") == 5


def test_clients_that_do_not_read_hold_neither_others_nor_slots():
    with Served(slots=4) as served:
        slow = [stream_head(served, max_tokens=800, temperature=0, logprobs=20) for _ in range(4)]
        for seed in range(3):  # all slots are taken: these wait until the texts of the slow ones are complete
            answer = served.post(prompt="abc", seed=seed, max_tokens=5, return_token_ids=True)
            assert answer.json()["choices"][0]["token_ids"] == served.alone(b"abc", 5, seed=seed)[0]
        assert served.metric("slots_used") == 0
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += slow[0].recv(1 << 20)
        assert b'"finish_reason":"length"' in got
        for client in slow:
            client.close()


def test_an_answer_that_is_complete_does_not_wait_for_the_pause_between_events(served, monkeypatch):
    monkeypatch.setattr("elman_serve.api.EVENT_SECONDS", 30.0)
    events = served.post(prompt="a", max_tokens=200, temperature=0, stream=True).text
    assert events.endswith("data: [DONE]\n\n")


def test_200_connections(served):
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    assert served.post(**OK).status_code == 200
    for client in idle:
        client.sendall(http(SMALL))
    assert all(client.recv(15) == b"HTTP/1.1 200 OK" for client in idle)
    for client in idle:
        client.close()


def test_a_shared_prefix_is_read_once():
    prompt = LONG.encode()[:300]
    with Served() as served:
        common = {"max_tokens": 8, "seed": 3, "return_token_ids": True}
        texts = [prompt, prompt, prompt + b"and more", prompt[:256] + b"or other"]
        for text, reads, reused in zip(texts, (300, 300, 352, 360), (0, 300, 256, 256), strict=True):
            answer = served.post(prompt=list(text), **common).json()
            assert answer["choices"][0]["token_ids"] == served.alone(text, 8, seed=3)[0]
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": reused}
            assert served.metric("prompt_tokens_total") == reads
        assert served.metric("prefix_hits_total") == 3
        assert served.metric("prefix_reused_tokens_total") == 812
        assert served.metric("prefix_states") == 5
        steps = served.metric("step_seconds_count")
        served.post(prompt=[LONG[:300]] * 8, **common)
        assert served.metric("step_seconds_count") - steps <= 9, "all begin in one step"


def test_prompts_that_come_soon_after_one_another_are_read_together(monkeypatch):
    monkeypatch.setattr("elman_serve.engine.GATHER_SECONDS", 0.5)
    real, groups = Engine._read_on, []
    monkeypatch.setattr(Engine, "_read_on", lambda engine, group: groups.append(len(group)) or real(engine, group))
    asked = [Request(b"abc%d" % n, Sampling(), 3, threading.Event(), seed=n) for n in range(3)]
    with Served() as served:
        for request in asked:
            served.engine.submit(request)
            time.sleep(0.01)
        until(lambda: all(request.done for request in asked))
    assert groups == [3]


def test_where_no_state_fits_equal_prompts_wait_for_one_piece_only(monkeypatch):
    real, groups = Engine._read_on, []
    monkeypatch.setattr(Engine, "_read_on", lambda engine, group: groups.append(len(group)) or real(engine, group))
    asked = [Request(LONG.encode()[:300], Sampling(), 3, threading.Event(), seed=n) for n in range(5)]
    with Served(prefix_bytes=100) as served:
        served.engine.submit(*asked)
        until(lambda: all(request.done for request in asked))
        assert served.metric("prefix_state_bytes") == 0
    assert sorted(groups) == [1, 1, 1, 4, 4, 4], "of three pieces each"


def test_many_prompts_are_read_by_as_many_operators_as_two_and_each_state_has_its_memory():
    model, counts = ladder("e42"), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[-1] += 1
            return function(*args, **(kwargs or {}))

    for texts in (2, 48):
        counts.append(0)
        with torch.inference_mode(), Count():
            states, logits = read(model, [b"a" * (1 + row % 2) for row in range(texts)], [[]] * texts)
        for row in (*(tensor for each in states for state in each for tensor in state.values()), *logits):
            assert row.untyped_storage().nbytes() == row.nbytes
    assert counts[1] <= counts[0]


def test_prefixes_are_thrown_away_least_recently_used_first_by_bytes():
    kept = Prefixes(most=3 * 140, piece=2)  # each is 100 bytes of state and 40 of logits
    for text in (b"a", b"b", b"c"):
        kept.keep(kept.keys(text)[0], [{"h": torch.zeros(1, 25)}], torch.zeros(1, 10))
    assert kept.find(kept.keys(b"a"))[0] == 1
    kept.keep(kept.keys(b"d")[0], [{"h": torch.zeros(1, 25)}], torch.zeros(1, 10))
    assert kept.bytes == 420
    found = [kept.find(kept.keys(text)) is not None for text in (b"a", b"b", b"c", b"d", b"da")]
    assert found == [True, False, True, True, False]


def test_a_prompt_that_waits_for_another_is_hashed_once(monkeypatch):
    real, hashed, prompt = Prefixes.keys, [], LONG.encode() * 3
    monkeypatch.setattr(Prefixes, "keys", lambda kept, text: hashed.append(text) or real(kept, text))
    asked = [Request(prompt, Sampling(), 3, threading.Event(), seed=n) for n in range(3)]
    with Served() as served:
        served.engine.submit(*asked)
        until(lambda: all(request.done for request in asked))
        assert [text.tokens for request in asked for text in request.texts] == [
            served.alone(prompt, 3, seed=n)[0] for n in range(3)
        ]
    assert hashed == [prompt] * 3


def test_a_full_queue_and_a_late_text_are_refused():
    with Served(start=False, queue=2, seconds=0.05) as served:
        waiting = [threading.Thread(target=served.post, kwargs=OK) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: len(served.engine._queue) == 2)
        with pytest.raises(openai.RateLimitError, match="2 prompts are waiting"):
            served.client.completions.create(model="tiny", prompt="a")
        assert "at most 2 prompts" in served.post(prompt=["a"] * 3).json()["error"]["message"], "they would never fit"
        time.sleep(0.5)
        served.engine.start()
        for thread in waiting:
            thread.join()
        late = served.post(prompt="a", max_tokens=4096, temperature=0)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        events = served.post(prompt="a", max_tokens=4096, temperature=0, stream=True).text
        assert json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        until(lambda: served.metric("slots_used") == 0)


def test_a_model_that_fails_is_told_to_all_and_to_health():
    model = ladder("e42")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with Served(model) as served:
        answer = served.post(**OK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_failed")
        assert httpx.get(served.url + "/health").status_code == 200  # other texts may be finite
        served.engine.model.model.forward = lambda **_: 1 / 0
        assert "division by zero" in served.post(prompt="new").json()["error"]["message"]
        assert httpx.get(served.url + "/health").status_code == 503
        assert served.post(**OK).status_code == 503


def test_a_model_that_cannot_be_served_is_refused():
    model = LadderLM("transformer", dim=64, depth=1)
    with pytest.raises(ConfigError, match="grows with the text"):
        Engine(model, ENDS, Language(BYTES), slots=1, queue=1, prefix_bytes=0, notify=print)


def test_memory_is_flat_under_random_load():
    draw = random.Random(0)
    with Served(slots=8, prefix_bytes=40_000) as served:

        async def client(seconds):
            end = time.monotonic() + seconds
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http_:
                while time.monotonic() < end:
                    body = {
                        "prompt": LONG[draw.randrange(99) :][: draw.randrange(300)],
                        "max_tokens": draw.randrange(60),
                    }
                    body |= {"n": draw.randrange(1, 4), "stream": draw.random() < 0.5, "model": "tiny"}
                    with contextlib.suppress(httpx.TimeoutException):  # some go away in the middle
                        await http_.post(f"{served.url}/v1/completions", json=body, timeout=draw.choice([0.05, 9]))

        async def load(seconds):
            await asyncio.gather(*(client(seconds) for _ in range(12)))

        def tensors():
            until(lambda: served.metric("slots_used") == served.metric("waiting") == 0)
            gc.collect()
            return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

        asyncio.run(load(1.5))
        before = tensors()
        asyncio.run(load(2.5))
        assert served.metric("prefix_state_bytes") <= 40_000
        assert tensors() <= before + 80  # as many as the states of prefixes that fit


def test_the_openapi_document_describes_the_bodies_that_are_accepted(served):
    document = served.api.document
    for path in ("/v1/completions", "/v1/chat/completions"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        if path == "/v1/completions":
            for body, _, code, _ in WRONG:  # bytes of text are not in a schema
                assert validator.is_valid({"model": "tiny", **body}) == (code == "context_length_exceeded"), body


def test_the_lines_of_python_of_the_page_run(served, capsys):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    exec(code.replace("http://127.0.0.1:8000", served.url).replace('"none"', repr(KEY)), {})
    assert len(capsys.readouterr().out) > 60


def test_a_port_in_use_says_what_to_give():
    with (
        _listen("127.0.0.1", 0) as listening,
        pytest.raises(ConfigError, match="; give another --port or --host"),
    ):
        _listen(*listening.getsockname())


def test_answers_do_not_wait_for_acknowledgements():
    with _listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@contextlib.contextmanager
def command(folder, *words):
    """`elman serve` of the folder it is in, in a process of its own, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "elman_core", "serve", ".", *words],
        cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    try:
        yield process, re.search(r"http://[\d.:]+", process.stdout.readline()).group()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_it_is_killed_and_starts_again_and_sigterm_finishes_what_runs(served, tmp_path):
    served.model.save_pretrained(tmp_path / "tiny")
    (tmp_path / "key").write_text(KEY + "\n")
    words = ["--key-file", str(tmp_path / "key"), "--slots", "4", "--port"]
    body = {"model": "tiny", "prompt": "a", "temperature": 0, "stream": True, "max_tokens": 1500}
    ask = {"json": body, "headers": {"Authorization": f"Bearer {KEY}"}, "timeout": 60}

    def stream(each):
        with httpx.stream("POST", f"{url}/v1/completions", **ask) as answer:
            return "".join(each() or line for line in answer.iter_lines())

    with command(tmp_path / "tiny", *words, "0") as (process, url), pytest.raises(httpx.TransportError):
        stream(process.kill)
    with command(tmp_path / "tiny", *words, url.rpartition(":")[2]) as (process, again):
        assert again == url
        text = stream(lambda: process.send_signal(signal.SIGTERM))
        assert text.endswith("data: [DONE]")
        assert '"finish_reason":"length"' in text
        process.wait(20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_chat_talks_to_a_model(served, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\nag\xffain\n"), encoding="utf-8"))
    served.model.save_pretrained(tmp_path)
    assert main(["chat", str(tmp_path), "-n", "6", "-t", "0"]) == 0
    how = Sampling(temperature=0)
    first = bytes(served.alone(b"hello\n", 6, how=how)[0]).decode(errors="replace")
    second = bytes(served.alone(f"hello\n{first.rstrip()}\nag\ufffdain\n".encode(), 6, how=how)[0]).decode(
        errors="replace"
    )
    assert capsys.readouterr().out == "".join(printable(text, "\n\t") + "\n" for text in (first, second))
