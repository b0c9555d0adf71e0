"""`python -m hla_hf.serve` on a tiny model: streamed, two requests at once, cancelled, after a saved prompt state."""

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_examples import make_tokenizer
from tiny import cache_of, tiny_model
from transformers import AutoModelForCausalLM

from hla_hf.serve import follow_prompt_state, main


openai = pytest.importorskip("openai")

DOCUMENT = "Paris is the capital of France. Lyon is its third city. " * 20
QUESTION = "Which city is the capital?"


@pytest.fixture(scope="module")
def model_and_tokenizer(tmp_path_factory):
    """A directory with a model whose layers are softmax and HLA with a window, and the two themselves."""
    path = tmp_path_factory.mktemp("served") / "model"
    tokenizer = make_tokenizer()
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}  # longer prompts are refused
    model = tiny_model(hla_window=8, hla_num_sinks=2, hla_layers=[1], **settings)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, model, tokenizer


@pytest.fixture(scope="module")
def start_server(model_and_tokenizer, tmp_path_factory):
    """Starts servers of the model with the given options; ends them with Ctrl-C, which must take them down."""
    path, _, _ = model_and_tokenizer
    servers = []

    def start(*options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        log = tmp_path_factory.mktemp("log") / "server.txt"
        command = [sys.executable, "-m", "hla_hf.serve", str(path), "--host", "127.0.0.1", "--port", port, *options]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        servers.append(server)
        for _ in range(600):
            assert server.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)

    yield start
    for server in servers:
        server.send_signal(signal.SIGINT)
    try:
        assert all(server.wait(timeout=30) in (0, 130, -signal.SIGINT) for server in servers)
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module")
def client(start_server):
    return start_server()


@pytest.fixture(scope="module")
def states(model_and_tokenizer, tmp_path_factory):
    """Saved states of the document as plain text and as a system message."""
    _, model, tokenizer = model_and_tokenizer
    folder = tmp_path_factory.mktemp("states")
    system = tokenizer.apply_chat_template([{"role": "system", "content": DOCUMENT}], tokenize=False)
    for name, ids in (
        ("text", tokenizer(DOCUMENT, return_tensors="pt")),
        ("chat", tokenizer(system, add_special_tokens=False, return_tensors="pt")),
    ):
        with torch.no_grad():
            output = model(ids.input_ids, use_cache=True)
        model.save_cache(cache_of(output), folder / f"{name}.safetensors")
    with torch.no_grad():
        output = model(ids.input_ids.expand(2, -1), use_cache=True)
    model.save_cache(cache_of(output), folder / "rows.safetensors")
    return folder


@pytest.fixture(scope="module")
def text_client(start_server, states):
    return start_server("--prompt-state", str(states / "text.safetensors"))


@pytest.fixture(scope="module")
def chat_client(start_server, states):
    return start_server("--prompt-state", str(states / "chat.safetensors"))


def complete(client, path, prompt, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    return client.completions.create(model=str(path), prompt=prompt, **options)


def chat(client, path, *messages, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    messages = [{"role": role, "content": content} for role, content in messages]
    return client.chat.completions.create(model=str(path), messages=messages, **options)


def test_completions_and_chats_are_those_of_generate(model_and_tokenizer, client):
    path, model, tokenizer = model_and_tokenizer
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    for answer, inputs in (
        (complete(client, path, DOCUMENT).choices[0].text, tokenizer(DOCUMENT, return_tensors="pt")),
        (
            chat(client, path, ("user", QUESTION)).choices[0].message.content,
            tokenizer(rendered, add_special_tokens=False, return_tensors="pt"),
        ),
    ):
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        assert answer == tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True) != ""


def test_streams_arrive_in_pieces_and_two_requests_at_once_do_not_mix(model_and_tokenizer, client):
    path, _, _ = model_and_tokenizer
    prompts = [DOCUMENT, "Softmax attention keeps every key and value. "]
    expected = [complete(client, path, prompt, max_tokens=60).choices[0].text for prompt in prompts]
    assert expected[0] != expected[1]

    def stream(prompt):
        return [c.choices[0].text for c in complete(client, path, prompt, max_tokens=60, stream=True) if c.choices]

    with ThreadPoolExecutor(2) as pool:
        pieces = list(pool.map(stream, prompts))
    assert ["".join(p) for p in pieces] == expected and all(len([x for x in p if x]) > 10 for p in pieces)
    answer = chat(client, path, ("user", QUESTION)).choices[0].message.content
    chunks = chat(client, path, ("user", QUESTION), stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer


def test_a_cancelled_request_leaves_the_server_to_the_next_one(model_and_tokenizer, client):
    path, _, _ = model_and_tokenizer
    expected = complete(client, path, QUESTION).choices[0].text
    stream = complete(client, path, DOCUMENT, max_tokens=1_000_000, stream=True)  # hours, and requests are queued
    next(iter(stream))
    stream.close()
    start = time.monotonic()
    assert complete(client, path, QUESTION).choices[0].text == expected
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_state_answers_as_the_whole_text_does(model_and_tokenizer, client, text_client, stream):
    path, _, _ = model_and_tokenizer

    def text(*arguments):
        answer = complete(*arguments, stream=stream)
        return "".join(c.choices[0].text for c in answer if c.choices) if stream else answer.choices[0].text

    for question in (QUESTION, " And the third?"):  # the second must not go on from the first
        expected = text(client, path, DOCUMENT + question)
        assert text(text_client, path, question) == expected != text(client, path, question)


def test_messages_follow_a_prompt_state_as_they_follow_its_system_message(model_and_tokenizer, client, chat_client):
    path, _, _ = model_and_tokenizer
    turns = [("user", QUESTION), ("assistant", "Paris."), ("user", "And the third?")]
    for messages in (turns[:1], turns, [("system", "Be exact."), *turns]):
        expected = chat(client, path, ("system", DOCUMENT), *messages).choices[0].message.content
        assert chat(chat_client, path, *messages).choices[0].message.content == expected
    assert expected != chat(client, path, *messages).choices[0].message.content


def test_responses_follow_a_prompt_state_and_what_does_not_generate_refuses(
    model_and_tokenizer, client, chat_client, states
):
    path, _, _ = model_and_tokenizer
    question = {"role": "user", "content": QUESTION}
    document = {"role": "system", "content": DOCUMENT}
    options = {"model": str(path), "max_output_tokens": 24, "temperature": 0, "stream": False}
    expected = client.responses.create(input=[document, question], **options)
    assert chat_client.responses.create(input=[question], **options).output_text == expected.output_text != ""
    model = AutoModelForCausalLM.from_pretrained(path)
    follow_prompt_state(model, states / "chat.safetensors")
    with pytest.raises(ValueError, match="cannot follow the prompt state"):
        model(torch.ones(1, 3, dtype=torch.long))


def test_what_cannot_follow_a_prompt_state_is_refused(model_and_tokenizer, chat_client):
    path, _, _ = model_and_tokenizer
    with pytest.raises(openai.BadRequestError) as info:
        complete(chat_client, path, "")
    assert "the prompt is empty" in info.value.response.text
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError) as info:
        chat(chat_client, path, ("user", QUESTION), tools=tools)
    assert "renders the system message" in info.value.response.text


def test_bad_options_are_one_error(model_and_tokenizer, states, tmp_path, monkeypatch, capsys):
    path, model, _ = model_and_tokenizer
    other = tmp_path / "other"
    shutil.copytree(path, other)
    tiny_model(seed=1, vocab_size=model.config.vocab_size, hla_window=8, hla_layers=[1]).save_pretrained(other)
    state = str(states / "text.safetensors")
    for arguments, expected in (
        ([str(path), "--prompt-state", str(tmp_path / "none")], "no saved cache at"),
        ([str(path), "--prompt-state", str(path / "model.safetensors")], "is not a saved cache"),
        ([str(path), "--prompt-state", str(states / "rows.safetensors")], "of one row of text"),
        ([str(other), "--prompt-state", state], "was saved by another model"),
        (["--prompt-state", state], "belongs to one MODEL"),
        ([str(path), "--prompt-state", state, "--compile"], "belongs to one MODEL"),
        ([str(path), "--continuous-batching"], "pages keys and values"),
    ):
        monkeypatch.setattr(sys, "argv", ["serve", *arguments])
        with pytest.raises(SystemExit) as info:
            main()
        error = capsys.readouterr().err
        assert info.value.code == 2 and expected in " ".join(error.replace("│", " ").split()), error
